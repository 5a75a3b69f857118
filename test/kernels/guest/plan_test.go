//go:build linux

package guest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// busy is the size of the table that plans are made for, so that they are those of a busy node.
const busy = 1_000_000

// service is a cluster address and its backends.
func service(owner, at string, proto uint8, backends ...string) (string, []frontend.Frontend) {
	a := netip.MustParseAddrPort(at)
	var list []netip.AddrPort
	for _, b := range backends {
		list = append(list, netip.MustParseAddrPort(b))
	}
	return owner, []frontend.Frontend{{
		Owner: owner, Kind: frontend.ClusterIP, Proto: proto, Addr: a.Addr(), Ports: frontend.Port(a.Port()),
		Valid: frontend.NewBackends(list...), Usable: len(list),
	}}
}

// row returns n addresses, numbered from 1.
func row(format string, n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf(format, i+1))
	}
	return list
}

// What is planned for a change, and what that costs: flows that the kernel copies though they are not
// wanted. What it deletes must be exactly what the change made stale.
func TestPlans(t *testing.T) {
	all := []struct {
		owner, at string
		proto     uint8
		to        []string
	}{
		{"dns", "203.0.113.10:53", conntrack.UDP, []string{"198.51.100.11:5353", "198.51.100.12:5353"}},
		{"ntp", "203.0.113.11:123", conntrack.UDP, []string{"198.51.100.21:123"}},
		{"web", "203.0.113.12:443", conntrack.TCP, []string{"198.51.100.31:8443", "198.51.100.32:8443"}},
		{"sig", "203.0.113.13:2905", conntrack.SCTP, []string{"198.51.100.41:2905", "198.51.100.42:2905"}},
		{"dns6", "[2001:db8:1::10]:53", conntrack.UDP, []string{"[2001:db8:2::11]:5353", "[2001:db8:2::12]:5353"}},
		{"web6", "[2001:db8:1::12]:443", conntrack.TCP, []string{"[2001:db8:2::31]:8443", "[2001:db8:2::32]:8443"}},
		{"big", "203.0.113.14:9000", conntrack.UDP, row("198.51.100.1%02d:9000", 12)},
		{"big6", "[2001:db8:1::14]:9000", conntrack.UDP, row("[2001:db8:2::1%02d]:9000", 12)},
	}
	// lose returns the change of a service that keeps but its first backends.
	lose := func(owner string, keep int) func(*frontend.Table) frontend.Change {
		return func(tab *frontend.Table) (ch frontend.Change) {
			for _, s := range all {
				if s.owner == owner {
					ch = tab.Set(service(owner, s.at, s.proto, s.to[:keep]...))
				}
			}
			return ch
		}
	}
	for _, tc := range []struct {
		name   string
		change func(*frontend.Table) frontend.Change // nil: a full pass
	}{
		{"an IPv4 backend leaves", lose("dns", 1)},
		{"an IPv6 backend leaves", lose("dns6", 1)},
		{"an IPv4 service loses its last backend", lose("ntp", 0)},
		{"an IPv6 service is deleted", func(tab *frontend.Table) frontend.Change { return tab.Set("dns6", nil) }},
		{"a TCP backend leaves", lose("web", 1)},
		{"an IPv6 TCP backend leaves", lose("web6", 1)},
		{"an SCTP backend leaves", lose("sig", 1)},
		{"ten IPv4 backends leave", lose("big", 2)},
		{"ten IPv6 backends leave", lose("big6", 2)},
		{"full pass", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, _ := dial(t)
			tab := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
			total := 0
			for _, s := range all {
				tab.Set(service(s.owner, s.at, s.proto, s.to...))
				at := netip.MustParseAddrPort(s.at)
				for _, b := range s.to {
					to := netip.MustParseAddrPort(b)
					for i := range 20 {
						total++
						f := flow(conntrack.FamilyOf(at.Addr()), s.proto, total)
						f.Orig.Dst, f.Orig.DstPort = at.Addr(), at.Port()
						f.Reply.Src, f.Reply.SrcPort = to.Addr(), to.Port()
						if i%2 == 0 {
							f.Status |= replied
						}
						if i >= 18 { // of somebody else, in a zone of his own
							f.Zone = 7
						}
						create(t, c, f)
					}
				}
			}
			var change frontend.Change
			if tc.change != nil {
				change = tc.change(tab)
			}
			p, err := sweep.NewPlanner(t.Context(), c, tab)
			if err != nil {
				t.Fatal(err)
			}
			p.Flows = busy
			plan := p.Full()
			if tc.change != nil {
				plan = p.Narrow(change)
			}

			// What should go, by a dump that the kernel is not trusted to filter.
			stale := map[uint16]bool{}
			flows, err := c.List(t.Context(), conntrack.Filter{})
			if err != nil || len(flows) != total {
				t.Fatalf("%d flows, %v", len(flows), err)
			}
			for i := range flows {
				if tab.Judge(&flows[i]).Action == frontend.Delete {
					stale[flows[i].Orig.SrcPort] = true
				}
			}
			if len(stale) == 0 && tc.change != nil {
				t.Fatal("the change makes nothing stale")
			}

			r, err := (&sweep.Sweeper{Conn: c, Judge: tab}).Run(t.Context(), plan)
			if err != nil {
				t.Fatal(err)
			}
			left, err := c.List(t.Context(), conntrack.Filter{})
			if err != nil {
				t.Fatal(err)
			}
			missed := 0
			for _, f := range left {
				if stale[f.Orig.SrcPort] {
					missed++
				}
			}
			if hit := total - len(left) - (len(stale) - missed); missed > 0 || hit > 0 || r.Deleted != len(stale) {
				t.Errorf("%d flows were stale, %d of them are left, %d others gone; %+v", len(stale), missed, hit, r)
			}
			var queries []string
			wanted := 0
			for _, q := range r.Queries {
				queries = append(queries, q.Query.String())
				wanted += q.Wanted
			}
			slices.Sort(queries)
			t.Attr("plan", strings.Join(queries, "; "))
			t.Attr("copied", fmt.Sprintf("%d for %d", r.Returned, wanted))
		})
	}
}
