//go:build linux

package sweep_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// A service proxy has written its rules: DNS is served by one backend now. It
// tells the table what it wrote, and has the flows cleaned that were translated
// by the rules before.
func ExampleCleanStaleEntries() {
	ctx := context.Background()
	table := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	table.Set("default/dns", []frontend.Frontend{{
		Owner: "default/dns:udp",
		Kind:  frontend.ClusterIP,
		Proto: conntrack.UDP,
		Addr:  netip.MustParseAddr("203.0.113.10"),
		Ports: frontend.Port(53),
		Valid: frontend.NewBackends(netip.MustParseAddrPort("198.51.100.12:53")),
		// The proxy chooses from this many for new flows.
		Usable: 1,
	}})

	conn, err := conntrack.Dial(conntrack.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	// A flow that is pinned to a backend that left.
	pinned, err := conntrack.Parse("udp 17 30 src=192.0.2.50 dst=203.0.113.10 sport=40000 dport=53 " +
		"src=198.51.100.11 dst=192.0.2.50 sport=53 dport=40000")
	if err != nil {
		log.Fatal(err)
	}
	if err := conn.Create(ctx, pinned); err != nil {
		log.Fatal(err)
	}

	report, err := sweep.CleanStaleEntries(ctx, conn, conntrack.IPv4, table)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("deleted", report.Deleted, "as", frontend.BackendGone)
	// Output: deleted 1 as backend-gone
}
