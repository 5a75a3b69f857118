//go:build linux

// Package guest asks the kernel it runs on what conntrack.Conn.Probe claims to know of it, in messages
// of its own making, and what becomes of a plan there. It is a kernel test like any other; in the
// guests of test/kernels, what it finds (testing.T.Attr) goes into docs/kernels.md.
package guest

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// families are the columns of most tables.
var families = []conntrack.Family{conntrack.IPv4, conntrack.IPv6}

// dial returns a Conn to an empty table, and a socket of our own beside it.
func dial(t *testing.T) (*conntrack.Conn, *socket) {
	t.Helper()
	ns := nstest.New(t)
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	var s *socket
	if err := ns.Do(func() (err error) {
		s, err = open()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return c, s
}

func create(t *testing.T, c *conntrack.Conn, flows ...conntrack.Flow) {
	t.Helper()
	for _, f := range flows {
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatalf("%v: %s", err, &f)
		}
	}
}

// flow is number n of a family's flows from one client through one frontend to one backend. Its
// addresses differ from each other in more than one byte.
func flow(fam conntrack.Family, proto uint8, n int) conntrack.Flow {
	client, dst, src := "192.0.2.50", "203.0.113.10", "198.51.100.11"
	if fam == conntrack.IPv6 {
		client, dst, src = "2001:db8:9::50", "2001:db8:1::10", "2001:db8:2::11"
	}
	addr, port := netip.MustParseAddr, uint16(n)
	f := conntrack.Flow{
		Family: fam, Proto: proto, Timeout: 600, Status: conntrack.StatusConfirmed,
		Orig:  conntrack.Tuple{Src: addr(client), Dst: addr(dst), SrcPort: port, DstPort: 53},
		Reply: conntrack.Tuple{Src: addr(src), Dst: addr(client), SrcPort: 5353, DstPort: port},
	}
	if proto != conntrack.UDP {
		f.State = 1 // TCP and SCTP flows have one
	}
	return f
}

// attr reports what was found for the families, once where it is the same.
func attr(t *testing.T, found map[conntrack.Family]string) {
	t.Helper()
	v4, v6 := found[conntrack.IPv4], found[conntrack.IPv6]
	if v4 == v6 {
		t.Attr("found", v4)
		return
	}
	t.Attr("found", fmt.Sprintf("IPv4 %s, IPv6 %s", v4, v6))
}
