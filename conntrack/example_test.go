package conntrack_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Count the DNS flows that go to one backend, without copying the table.
func ExampleConn_Dump() {
	conn, err := conntrack.Dial(conntrack.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	n := 0
	for flow, err := range conn.Dump(context.Background(), conntrack.Filter{
		Family:   conntrack.IPv4,
		Proto:    conntrack.UDP,
		ReplySrc: netip.MustParseAddr("198.51.100.11"),
	}) {
		if err != nil {
			log.Fatal(err)
		}
		if flow.Orig.DstPort == 53 { // flow is borrowed: copy *flow to keep it
			n++
		}
	}
	fmt.Println(n, "flows; the kernel returned", conn.Stats().Returned)
}

func ExampleReadText() {
	saved := `udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=40000 dport=53 [UNREPLIED] src=198.51.100.11 dst=192.0.2.50 sport=5353 dport=40000 mark=0 use=1
not a flow
`
	for line, err := range conntrack.ReadText(strings.NewReader(saved)) {
		if err != nil {
			fmt.Println(err)
			continue
		}
		f := line.Flow
		fmt.Println(line.Line, f.Orig.Dst, "is translated:", f.Translated(), "answered:", f.Replied())
	}
	// Output:
	// 1 203.0.113.10 is translated: true answered: false
	// line 2: protocol number "a" is not a number up to 255: "not a flow"
}
