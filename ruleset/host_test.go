//go:build linux

package ruleset

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzRoutes reads links and routes of whatever content.
func FuzzRoutes(f *testing.F) {
	route := []byte{unix.AF_INET, 24, 0, 0, unix.RT_TABLE_MAIN, 0, 0, unix.RTN_UNICAST, 0, 0, 0, 0}
	f.Add(route, true)
	f.Add(append(route, nla(unix.RTA_DST, []byte{192, 0, 2, 0})...), false)
	f.Add(append(route, nla(unix.RTA_MULTIPATH, []byte{8, 0, 0, 0, 2, 0, 0, 0})...), false)
	f.Fuzz(func(t *testing.T, b []byte, local bool) {
		r := newReading()
		r.link(unix.RTM_NEWLINK, b)
		r.netconf(unix.RTM_NEWNETCONF, b)
		r.rule(b, ^uint32(0))
		r.route(b, local)
		for i := range r.routes {
			for p := range r.routes[i].m {
				if _, n, ok := r.routes[i].find(p.Addr()); !ok || n < p.Bits() {
					t.Errorf("%s is not found", p)
				}
			}
		}
		r.finish()
		r.known = true
		for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
			addr := netip.MustParseAddr(a)
			if r.types(addr) == 0 {
				t.Errorf("%s has no type", addr)
			}
			_, _ = certain{r.hostState}.Inputs(addr), r.sent(addr)
		}
	})
}
