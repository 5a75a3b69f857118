package frontend

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/conntrack"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
func ip(s string) netip.Addr     { return netip.MustParseAddr(s) }

func backends(list ...string) Backends {
	var bs []netip.AddrPort
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			bs = append(bs, netip.AddrPortFrom(a, 0))
		} else {
			bs = append(bs, ap(s))
		}
	}
	return NewBackends(bs...)
}

// udp is a flow from a client to dst that is answered from src.
func udp(dst, src string) conntrack.Flow {
	d, s := ap(dst), ap(src)
	client := ip("192.0.2.50")
	if d.Addr().Is6() {
		client = ip("2001:db8:9::5")
	}
	return conntrack.Flow{
		Family: conntrack.FamilyOf(d.Addr()), Proto: conntrack.UDP,
		Orig:  conntrack.Tuple{Src: client, Dst: d.Addr(), SrcPort: 40000, DstPort: d.Port()},
		Reply: conntrack.Tuple{Src: s.Addr(), Dst: client, SrcPort: s.Port(), DstPort: 40000},
	}
}

func at(dst string, kind Kind, valid Backends, usable int) Frontend {
	d := ap(dst)
	return Frontend{
		Owner: "default/dns:udp", Kind: kind, Proto: conntrack.UDP,
		Addr: d.Addr(), Ports: Port(d.Port()), Valid: valid, Usable: usable,
	}
}

func anywhere(port uint16, kind Kind, valid Backends, usable int) Frontend {
	return Frontend{
		Owner: "default/dns:udp", Kind: kind, Proto: conntrack.UDP, Family: conntrack.IPv4,
		Ports: Port(port), Valid: valid, Usable: usable,
	}
}

// forInside is a load balancer's address whose backends only this host and its pods
// are sent to.
func forInside() Frontend {
	f := at(vip, LoadBalancerIP, backends(alive), 0)
	f.Inside = 1
	return f
}

// from is a flow of another sender.
func from(src string, f conntrack.Flow) conntrack.Flow {
	f.Orig.Src, f.Reply.Dst = ip(src), ip(src)
	return f
}

const (
	vip   = "203.0.113.10:53"
	alive = "198.51.100.11:53"
	dead  = "198.51.100.19:53"
)

// The rule, one case a line of it. The corpus in test/scenarios has more.
func TestJudge(t *testing.T) {
	one := backends(alive)
	listed := Host{Listed: []netip.Addr{ip("192.0.2.1"), ip("127.0.0.1")}, Other: []netip.Addr{ip("192.0.2.9")}}
	mod := func(f conntrack.Flow, change func(*conntrack.Flow)) conntrack.Flow { change(&f); return f }
	for _, tc := range []struct {
		name string
		now  []Frontend
		was  []Frontend
		host Host
		own  *Sweep // of all frontends of now
		in   string
		flow conntrack.Flow
		want string
	}{
		{name: "ICMP", flow: mod(udp(vip, vip), func(f *conntrack.Flow) { f.Proto = conntrack.ICMP }), want: "ignore protocol"},
		{
			name: "another zone", now: []Frontend{at(vip, ClusterIP, one, 1)},
			flow: mod(udp(vip, dead), func(f *conntrack.Flow) { f.Zone = 7 }), want: "ignore zone",
		},
		{
			name: "another zone, one direction", now: []Frontend{at(vip, ClusterIP, one, 1)},
			flow: mod(udp(vip, dead), func(f *conntrack.Flow) { f.Zone, f.ZoneDir = 7, conntrack.ZoneReply }), want: "ignore zone",
		},
		{
			name: "expected by a helper", now: []Frontend{at(vip, ClusterIP, one, 1)},
			flow: mod(udp(vip, dead), func(f *conntrack.Flow) { f.Status = conntrack.StatusExpected }), want: "ignore expected",
		},
		{name: "no frontend", flow: udp(vip, dead), want: "ignore no-frontend"},
		{name: "another port", now: []Frontend{at("203.0.113.10:54", ClusterIP, one, 1)}, flow: udp(vip, dead), want: "ignore no-frontend"},
		{name: "serving", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, alive), want: "keep serving"},
		{name: "valid but not usable", now: []Frontend{at(vip, ClusterIP, one, 0)}, flow: udp(vip, alive), want: "keep serving"},
		{name: "backend gone", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, dead), want: "delete backend-gone"},
		{name: "backend's other port", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, "198.51.100.11:54"), want: "delete backend-gone"},
		{name: "no backends", now: []Frontend{at(vip, ClusterIP, Backends{}, 0)}, flow: udp(vip, dead), want: "delete no-backends"},
		{name: "only the port is translated", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, "203.0.113.10:54"), want: "delete backend-gone"},
		{name: "untranslated", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, vip), want: "delete untranslated"},
		{name: "untranslated, nothing usable", now: []Frontend{at(vip, ClusterIP, one, 0)}, flow: udp(vip, vip), want: "keep awaiting-backends"},
		{name: "backend at the frontend itself", now: []Frontend{at(vip, ExternalIP, backends(vip), 1)}, flow: udp(vip, vip), want: "keep serving"},
		{name: "tombstone", was: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, alive), want: "delete frontend-gone"},
		{name: "tombstone, untranslated", was: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, vip), want: "ignore no-frontend"},
		{name: "back again", was: []Frontend{at(vip, ClusterIP, one, 1)}, now: []Frontend{at(vip, ExternalIP, one, 1)}, flow: udp(vip, alive), want: "keep serving"},
		{
			name: "handed to another proxy", was: []Frontend{at(vip, ClusterIP, one, 1)},
			now:  []Frontend{{Owner: "x", Kind: ClusterIP, Proto: conntrack.UDP, Addr: ip("203.0.113.10"), Ports: Port(53), Valid: one, Foreign: true}},
			flow: udp(vip, dead), want: "ignore no-frontend",
		},
		{
			name: "shared with another proxy, its backend", now: []Frontend{
				at(vip, ExternalIP, one, 1),
				{Owner: "x", Kind: ExternalIP, Proto: conntrack.UDP, Addr: ip("203.0.113.10"), Ports: Port(53), Valid: backends(dead), Foreign: true},
			},
			flow: udp(vip, dead), want: "keep serving",
		},
		{name: "in a service range", in: "203.0.113.0/24", flow: udp(vip, alive), want: "delete frontend-gone"},
		{name: "in a service range, untranslated", in: "203.0.113.0/24", flow: udp(vip, vip), want: "ignore no-frontend"},
		{name: "in a service range, another port", in: "203.0.113.0/24", now: []Frontend{at("203.0.113.10:54", ClusterIP, one, 1)}, flow: udp(vip, alive), want: "delete frontend-gone"},
		{name: "in a service range, a frontend", in: "203.0.113.0/24", now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, alive), want: "keep serving"},
		{
			name: "in a service range, another proxy's address", in: "203.0.113.0/24",
			now:  []Frontend{{Owner: "x", Kind: ClusterIP, Proto: conntrack.UDP, Addr: ip("203.0.113.10"), Ports: Port(54), Foreign: true}},
			flow: udp(vip, alive), want: "ignore no-frontend",
		},
		{name: "in no service range", in: "203.0.113.128/25", flow: udp(vip, alive), want: "ignore no-frontend"},
		{name: "own policy off", own: new(Off), now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, dead), want: "keep policy"},
		{name: "own policy off, serving", own: new(Off), now: []Frontend{at(vip, ClusterIP, one, 1)}, flow: udp(vip, alive), want: "keep serving"},
		{
			name: "primary", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: []netip.Addr{ip("127.0.0.1"), ip("192.0.2.1"), ip("192.0.2.9")}, NodePorts: []netip.Prefix{Primary}},
			flow: udp("192.0.2.1:30053", dead), want: "delete backend-gone",
		},
		{
			name: "not primary", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: []netip.Addr{ip("192.0.2.1"), ip("192.0.2.9")}, NodePorts: []netip.Prefix{Primary}},
			flow: udp("192.0.2.9:30053", dead), want: "ignore no-frontend",
		},
		{
			name: "primary, none of the family", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: []netip.Addr{ip("2001:db8::1")}, Other: []netip.Addr{ip("192.0.2.1")}, NodePorts: []netip.Prefix{Primary}},
			flow: udp("192.0.2.1:30053", dead), want: "delete backend-gone",
		},
		{
			name: "primary, and no Node known", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Other: []netip.Addr{ip("192.0.2.1")}, NodePorts: []netip.Prefix{Primary}},
			flow: udp("192.0.2.1:30053", "192.0.2.1:30053"), want: "keep uncertain-address",
		},
		{name: "node port", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("192.0.2.1:30053", dead), want: "delete backend-gone"},
		{name: "node port elsewhere", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("192.0.2.2:30053", dead), want: "ignore no-frontend"},
		{name: "node port on loopback", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("127.0.0.1:30053", "127.0.0.1:30053"), want: "keep uncertain-address"},
		{name: "node port on loopback, translated", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("127.0.0.2:30053", dead), want: "delete backend-gone"},
		{name: "node port on loopback, serving", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("127.0.0.1:30053", alive), want: "keep serving"},
		{name: "node port on loopback, gone", was: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("127.0.0.1:30053", alive), want: "delete frontend-gone"},
		{
			name: "node port gone on loopback, and a host port", was: []Frontend{anywhere(30053, NodePort, one, 1)},
			now: []Frontend{anywhere(30053, HostPort, backends(dead), 1)}, host: listed, flow: udp("127.0.0.1:30053", dead), want: "ignore no-frontend",
		},
		{
			name: "node port on loopback, and a host port's backend", now: []Frontend{anywhere(30053, NodePort, one, 1), anywhere(30053, HostPort, backends(dead), 1)},
			host: listed, flow: udp("127.0.0.1:30053", dead), want: "keep serving",
		},
		{name: "host port on loopback", now: []Frontend{anywhere(514, HostPort, one, 1)}, host: listed, flow: udp("127.0.0.1:514", dead), want: "ignore no-frontend"},
		{name: "host port gone on loopback", was: []Frontend{anywhere(514, HostPort, one, 1)}, host: listed, flow: udp("127.0.0.1:514", dead), want: "ignore no-frontend"},
		{
			name: "node port on loopback outside the ranges", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: listed.Listed, NodePorts: []netip.Prefix{Primary}}, flow: udp("127.0.0.1:30053", dead), want: "ignore no-frontend",
		},
		{
			name: "node port on loopback by name", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: listed.Listed, NodePorts: []netip.Prefix{Primary, Localhost}}, flow: udp("127.0.0.1:30053", dead), want: "delete backend-gone",
		},
		{
			name: "node port on loopback of IPv6", now: []Frontend{{Owner: "w", Kind: NodePort, Proto: conntrack.UDP, Family: conntrack.IPv6, Ports: Port(30053), Usable: 1}},
			host: Host{NodePorts: []netip.Prefix{Localhost}}, flow: udp("[::1]:30053", "[2001:db8:2::19]:53"), want: "ignore no-frontend",
		},
		{name: "node port, unlisted", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), want: "keep uncertain-address"},
		{name: "node port, unlisted, translated", now: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("192.0.2.9:30053", dead), want: "delete backend-gone"},
		{
			name: "node port, unlisted, but a host port too", now: []Frontend{anywhere(30053, NodePort, one, 1), anywhere(30053, HostPort, one, 1)}, host: listed,
			flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), want: "delete untranslated",
		},
		{name: "host port, unlisted", now: []Frontend{anywhere(514, HostPort, one, 1)}, host: listed, flow: udp("192.0.2.9:514", "192.0.2.9:514"), want: "delete untranslated"},
		{name: "host port of one address", now: []Frontend{at("192.0.2.9:514", HostPort, one, 1)}, host: listed, flow: udp("192.0.2.9:514", dead), want: "delete backend-gone"},
		{name: "host port of an address that is not here", now: []Frontend{at("192.0.2.2:514", HostPort, one, 1)}, host: listed, flow: udp("192.0.2.2:514", dead), want: "ignore no-frontend"},
		{
			name: "node-port range", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: listed.Listed, Other: listed.Other, NodePorts: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/29")}},
			flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), want: "delete untranslated",
		},
		{
			name: "outside the node-port range", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Listed: listed.Listed, NodePorts: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/29")}},
			flow: udp("192.0.2.1:30053", dead), want: "ignore no-frontend",
		},
		{
			name: "node-port range of the other family", now: []Frontend{anywhere(30053, NodePort, one, 1)},
			host: Host{Other: listed.Other, NodePorts: []netip.Prefix{netip.MustParsePrefix("2001:db8::/64")}},
			flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), want: "delete untranslated",
		},
		{name: "node port that is gone", was: []Frontend{anywhere(30053, NodePort, one, 1)}, host: listed, flow: udp("192.0.2.9:30053", alive), want: "delete frontend-gone"},
		{name: "two owners, second serves", now: []Frontend{at(vip, ExternalIP, one, 1), at(vip, ExternalIP, backends(dead), 1)}, flow: udp(vip, dead), want: "keep serving"},
		{name: "two owners, one usable", now: []Frontend{at(vip, LoadBalancerIP, Backends{}, 0), at(vip, LoadBalancerIP, one, 1)}, flow: udp(vip, vip), want: "delete untranslated"},
		{name: "external, untranslated", now: []Frontend{at(vip, ExternalIP, one, 1)}, flow: udp(vip, vip), want: "keep uncertain-address"},
		{name: "external, untranslated, nothing usable", now: []Frontend{at(vip, ExternalIP, one, 0)}, flow: udp(vip, vip), want: "keep awaiting-backends"},
		{name: "external, translated", now: []Frontend{at(vip, ExternalIP, one, 1)}, flow: udp(vip, dead), want: "delete backend-gone"},
		{name: "external, gone", was: []Frontend{at(vip, ExternalIP, one, 1)}, flow: udp(vip, alive), want: "delete frontend-gone"},
		{
			name: "external of one, load balancer's of another", now: []Frontend{at(vip, ExternalIP, one, 1), at(vip, LoadBalancerIP, one, 1)},
			flow: udp(vip, vip), want: "delete untranslated",
		},
		{
			name: "external with backends of one, load balancer's without of another", now: []Frontend{at(vip, ExternalIP, one, 1), at(vip, LoadBalancerIP, Backends{}, 0)},
			flow: udp(vip, vip), want: "keep uncertain-address",
		},
		{
			name: "exact and every address", now: []Frontend{at("192.0.2.1:53", ExternalIP, one, 1), anywhere(53, HostPort, backends(dead), 1)}, host: listed,
			flow: udp("192.0.2.1:53", dead), want: "keep serving",
		},
		{
			name: "IPv6", now: []Frontend{at("[2001:db8::10]:53", ClusterIP, backends("[2001:db8:2::11]:53"), 1)},
			flow: udp("[2001:db8::10]:53", "[2001:db8:2::12]:53"), want: "delete backend-gone",
		},
		{
			name: "range, same port", now: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{50000, 50099}, Valid: backends("198.51.100.11"), Usable: 1}},
			flow: udp("192.0.2.1:50099", "198.51.100.11:50099"), want: "keep serving",
		},
		{
			name: "range, other port", now: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{50000, 50099}, Valid: backends("198.51.100.11"), Usable: 1}},
			flow: udp("192.0.2.1:50099", "198.51.100.11:50098"), want: "delete backend-gone",
		},
		{
			name: "past the range", now: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{50000, 50099}, Valid: backends("198.51.100.11"), Usable: 1}},
			flow: udp("192.0.2.1:50100", "198.51.100.11:50098"), want: "ignore no-frontend",
		},
		{
			name: "range to the last port", now: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{1, 65535}, Valid: backends("198.51.100.11"), Usable: 1}},
			flow: udp("192.0.2.1:65535", "192.0.2.1:65535"), want: "delete untranslated",
		},
		{
			name: "range that is gone", was: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{50000, 50099}, Valid: one, Usable: 1}},
			flow: udp("192.0.2.1:50001", alive), want: "delete frontend-gone",
		},
		{
			name: "port 0 is nothing", now: []Frontend{{Owner: "w", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Valid: one, Usable: 1}},
			flow: udp("192.0.2.1:0", "192.0.2.1:0"), want: "ignore no-frontend",
		},
		{
			name: "established TCP", now: []Frontend{func() Frontend { f := at(vip, ClusterIP, one, 1); f.Proto = conntrack.TCP; return f }()},
			flow: mod(udp(vip, dead), func(f *conntrack.Flow) { f.Proto, f.Status = conntrack.TCP, conntrack.StatusSeenReply }), want: "keep policy",
		},
		{
			name: "unanswered TCP", now: []Frontend{func() Frontend { f := at(vip, ClusterIP, one, 1); f.Proto = conntrack.TCP; return f }()},
			flow: mod(udp(vip, dead), func(f *conntrack.Flow) { f.Proto = conntrack.TCP }), want: "delete backend-gone",
		},
		{
			name: "for inside, from outside", now: []Frontend{forInside()}, host: listed,
			flow: udp(vip, vip), want: "keep awaiting-backends",
		},
		{
			name: "for inside, from this host", now: []Frontend{forInside()}, host: listed,
			flow: from("192.0.2.1", udp(vip, vip)), want: "delete untranslated",
		},
		{
			name: "for inside, from an unlisted address of this host", now: []Frontend{forInside()}, host: listed,
			flow: from("192.0.2.9", udp(vip, vip)), want: "delete untranslated",
		},
		{
			name: "for inside, from loopback", now: []Frontend{forInside()},
			flow: from("127.0.0.1", udp(vip, vip)), want: "delete untranslated",
		},
		{
			name: "for inside, from a pod", now: []Frontend{forInside()},
			host: Host{Pods: []netip.Prefix{netip.MustParsePrefix("2001:db8::/64"), netip.MustParsePrefix("198.51.100.64/26")}},
			flow: from("198.51.100.77", udp(vip, vip)), want: "delete untranslated",
		},
		{
			name: "for inside, from another host's pod", now: []Frontend{forInside()},
			host: Host{Pods: []netip.Prefix{netip.MustParsePrefix("198.51.100.64/26")}},
			flow: from("198.51.100.17", udp(vip, vip)), want: "keep awaiting-backends",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := NewTable(Options{Policy: DefaultPolicy})
			tab.SetHost(tc.host)
			if tc.in != "" {
				tab.SetServiceRanges(netip.MustParsePrefix(tc.in))
			}
			tab.Set("a", tc.was)
			tab.Set("a", nil)
			for i := range tc.now {
				tc.now[i].Sweep = tc.own
				tab.Set(fmt.Sprint("b", i), tc.now[i:i+1])
			}
			v, steps := tab.Explain(&tc.flow)
			if v.String() != tc.want {
				t.Errorf("%s, want %s\n%q", v, tc.want, steps)
			}
			if plain := tab.Judge(&tc.flow); plain != v {
				t.Errorf("Judge says %v, Explain %v", plain, v)
			}
			if len(steps) == 0 {
				t.Error("no explanation")
			}
		})
	}
}

// Where kube-proxy serves node ports, by NewNodePortAddresses and
// expandNodePortAddressKeywords; the module bench asks these themselves.
func TestNodePortRanges(t *testing.T) {
	listed := []string{"192.0.2.1", "192.0.2.2", "2001:db8::1"}
	four, six := listed[:2], listed[2:]
	for _, tc := range []struct {
		ranges string
		listed []string
		want   string // of 192.0.2.1, 192.0.2.2, 192.0.2.9 and 2001:db8::1, 2001:db8::9
	}{
		{"", listed, "yes perhaps perhaps, yes perhaps"},
		{"", nil, "perhaps perhaps perhaps, perhaps perhaps"},
		{"primary", listed, "yes no no, yes no"},
		{"primary", four, "yes no no, yes yes"},
		{"primary", six, "yes yes yes, yes no"},
		{"primary", nil, "perhaps perhaps perhaps, perhaps perhaps"},
		{"localhost", listed, "no no no, no no"},
		{"all", listed, "yes yes yes, yes yes"},
		{"primary localhost", listed, "yes no no, yes no"},
		{"primary localhost", four, "yes no no, no no"},
		{"localhost primary", nil, "perhaps perhaps perhaps, perhaps perhaps"},
		{"localhost all", listed, "yes yes yes, yes yes"},
		{"all primary", listed, "yes yes yes, yes yes"},
		{"primary localhost all", nil, "yes yes yes, yes yes"},
		{"192.0.2.8/29", listed, "no no yes, yes yes"},
		{"192.0.2.9/29", listed, "no no yes, yes yes"},
		{"192.0.2.8/29 primary", listed, "yes no yes, yes no"},
		{"192.0.2.8/29 primary", four, "yes no yes, yes yes"},
		{"192.0.2.8/29 primary", nil, "perhaps perhaps yes, perhaps perhaps"},
		{"2001:db8::8/125", listed, "yes yes yes, no yes"},
		{"2001:db8::8/125 localhost", listed, "no no no, no yes"},
		{"127.0.0.0/8 ::1/128", listed, "no no no, no no"},
		{"0.0.0.0/0", listed, "yes yes yes, yes yes"},
		{"0.0.0.0/0 192.0.2.1/32 primary", listed, "yes yes yes, yes no"},
	} {
		t.Run(tc.ranges+" of "+fmt.Sprint(tc.listed), func(t *testing.T) {
			var h Host
			for _, a := range tc.listed {
				h.Listed = append(h.Listed, ip(a))
			}
			for word := range strings.FieldsSeq(tc.ranges) {
				p, err := ParseNodePorts(word)
				if err != nil {
					t.Fatal(err)
				}
				h.NodePorts = append(h.NodePorts, p)
			}
			var got []string
			for _, a := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.9", "2001:db8::1", "2001:db8::9"} {
				got = append(got, []string{"no", "perhaps", "yes"}[h.serves(ip(a))])
			}
			if s := strings.Join(got[:3], " ") + ", " + strings.Join(got[3:], " "); s != tc.want {
				t.Errorf("%s, want %s", s, tc.want)
			}
		})
	}
	for _, s := range []string{"", "Primary", "local", "192.0.2.1", "192.0.2.0/33", "::ffff:192.0.2.0/120", "fe80::%eth0/64"} {
		if p, err := ParseNodePorts(s); err == nil {
			t.Errorf("%q is taken for %v %s", s, p, NodePortsWord(p))
		}
	}
}

// What an uncertain flow would be deleted for, once somebody knows better.
func TestElse(t *testing.T) {
	one := backends(alive)
	node := anywhere(30053, NodePort, one, 1)
	for _, tc := range []struct {
		name    string
		now     Frontend
		own     *Sweep
		replied bool
		flow    conntrack.Flow
		want    Reason
		why     string
	}{
		{name: "external", now: at(vip, ExternalIP, one, 1), flow: udp(vip, vip), want: Untranslated, why: whyExternal},
		{name: "node port", now: node, flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), want: Untranslated, why: whyNodePort},
		{
			name: "node port without backends", now: anywhere(30053, NodePort, one, 0),
			flow: udp("192.0.2.9:30053", "192.0.2.9:30053"), why: whyNodePort,
		},
		{name: "left by the policy", now: at(vip, ExternalIP, one, 1), own: new(Off), flow: udp(vip, vip), why: whyExternal},
		{
			name: "answered, and left by the policy", now: at(vip, ExternalIP, one, 1), own: new(Unreplied), replied: true,
			flow: udp(vip, vip), why: whyExternal,
		},
		{
			name: "not answered, and not left by it", now: at(vip, ExternalIP, one, 1), own: new(Unreplied),
			flow: udp(vip, vip), want: Untranslated, why: whyExternal,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := NewTable(Options{Policy: DefaultPolicy})
			tab.SetHost(Host{Listed: []netip.Addr{ip("192.0.2.1")}, Other: []netip.Addr{ip("192.0.2.9")}})
			tc.now.Sweep = tc.own
			tab.Set("a", []Frontend{tc.now})
			if tc.replied {
				tc.flow.Status |= conntrack.StatusSeenReply
			}
			if v := tab.Judge(&tc.flow); v.Reason != UncertainAddr || v.Action != Keep || v.Else != tc.want || v.Why != tc.why {
				t.Errorf("%+v, want %s for %q", v, tc.want, tc.why)
			}
		})
	}
}

// Where host ports are not known, one of them may serve a load balancer's address
// that is this host's (k3s's svclb).
func TestHostPortsUnknown(t *testing.T) {
	own, other := "192.0.2.1:53", vip
	host := Host{Listed: []netip.Addr{ip("192.0.2.1")}, HostPortsUnknown: true}
	external := at(own, ExternalIP, backends(alive), 1)
	balanced := external
	balanced.Balanced = true
	for _, tc := range []struct {
		name string
		f    Frontend
		to   string
		gone bool
		want string
		then Reason
	}{
		{"a load balancer's", at(own, LoadBalancerIP, backends(alive), 1), dead, false, "keep uncertain-address", BackendGone},
		{"a load balancer's, its backend", at(own, LoadBalancerIP, backends(alive), 1), alive, false, "keep serving", 0},
		{"a load balancer's, untranslated", at(own, LoadBalancerIP, backends(alive), 1), own, false, "delete untranslated", 0},
		{"a load balancer's without backends", at(own, LoadBalancerIP, Backends{}, 0), dead, false, "keep uncertain-address", NoBackends},
		{"a load balancer's, gone", at(own, LoadBalancerIP, backends(alive), 1), dead, true, "keep uncertain-address", FrontendGone},
		{"a load balancer's elsewhere", at(other, LoadBalancerIP, backends(alive), 1), dead, false, "delete backend-gone", 0},
		{"a load balancer's elsewhere, gone", at(other, LoadBalancerIP, backends(alive), 1), dead, true, "delete frontend-gone", 0},
		{"an external one of such a Service", balanced, dead, false, "keep uncertain-address", BackendGone},
		{"an external one of another Service", external, dead, false, "delete backend-gone", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := NewTable(Options{Policy: DefaultPolicy})
			tab.SetHost(host)
			tab.Set("a", []Frontend{tc.f})
			if tc.gone {
				tab.Set("a", nil)
			}
			f := udp(netip.AddrPortFrom(tc.f.Addr, 53).String(), tc.to)
			if v := tab.Judge(&f); v.String() != tc.want || v.Else != tc.then {
				t.Errorf("%v, else %v, want %s, else %v", v, v.Else, tc.want, tc.then)
			}
			if m := tab.HostPortsMatter(); m != (tc.f.Addr == ip("192.0.2.1") && (tc.f.Kind == LoadBalancerIP || tc.f.Balanced)) {
				t.Errorf("host ports matter: %t", m)
			}
			known := host
			known.HostPortsUnknown = false
			if ch := tab.SetHost(known); !slices.Equal(ch.Hosts, known.Listed) || tab.HostPortsMatter() {
				t.Errorf("known: %+v", ch)
			}
			if v := tab.Judge(&f); v.Reason == UncertainAddr {
				t.Errorf("known: %v", v)
			}
		})
	}
}

// Where nobody says on which addresses node ports are served, it is certain of the
// first that the Node lists, and where there is no Node of those that the user says.
func TestNodePortsByTheNode(t *testing.T) {
	for _, tc := range []struct {
		h    Host
		addr string
		want certainty
	}{
		{Host{Listed: []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}}, "192.0.2.1", certain},
		{Host{Listed: []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}}, "192.0.2.2", uncertain},
		{Host{Served: []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}}, "192.0.2.2", certain},
		{Host{Served: []netip.Addr{ip("192.0.2.1")}}, "192.0.2.2", uncertain},
		{Host{Served: []netip.Addr{ip("192.0.2.1")}, NodePorts: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}}, "192.0.2.1", unserved},
	} {
		if got := tc.h.serves(ip(tc.addr)); got != tc.want {
			t.Errorf("%s of %+v: %d, want %d", tc.addr, tc.h, got, tc.want)
		}
	}
}

func TestHostAddressLost(t *testing.T) {
	tab := NewTable(Options{Policy: DefaultPolicy})
	tab.SetHost(Host{Listed: []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}})
	tab.Set("a", []Frontend{anywhere(30053, NodePort, backends(alive), 1)})
	flow := udp("192.0.2.1:30053", alive)
	if v := tab.Judge(&flow).String(); v != "keep serving" {
		t.Fatal(v)
	}
	ch := tab.SetHost(Host{Listed: []netip.Addr{ip("192.0.2.2")}})
	if !slices.Equal(ch.Hosts, []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}) { // the other is the first now
		t.Errorf("suspect addresses %v", ch.Hosts)
	}
	if v := tab.Judge(&flow).String(); v != "delete frontend-gone" {
		t.Error(v)
	}
	if ch := tab.SetHost(Host{Listed: []netip.Addr{ip("192.0.2.2")}}); !ch.Empty() {
		t.Errorf("the same again: %+v", ch)
	}
}

func TestChange(t *testing.T) {
	one, two, other := backends(alive), backends(alive, "198.51.100.12:53"), backends(dead)
	fr := func(valid Backends, usable int) []Frontend { return []Frontend{at(vip, ClusterIP, valid, usable)} }
	inside := fr(one, 0)
	inside[0].Inside = 1
	foreign := fr(one, 0)
	foreign[0].Foreign = true
	for _, tc := range []struct {
		name     string
		from, to []Frontend
		want     []string
	}{
		{"appears", nil, fr(one, 1), []string{"frontend-new []"}},
		{"appears without backends", nil, fr(Backends{}, 0), []string{"frontend-new []"}},
		{"disappears", fr(one, 1), nil, []string{"frontend-gone [198.51.100.11:53]"}},
		{"the same", fr(one, 1), fr(one, 1), nil},
		{"a second backend", fr(one, 1), fr(two, 2), nil},
		{"a backend leaves", fr(two, 2), fr(one, 1), []string{"backend-lost [198.51.100.12:53]"}},
		{"a backend is replaced", fr(one, 1), fr(other, 1), []string{"backend-lost [198.51.100.11:53]"}},
		{"to none", fr(one, 1), fr(Backends{}, 0), []string{"backend-lost [198.51.100.11:53]"}},
		{"the first", fr(Backends{}, 0), fr(one, 1), []string{"first-backend []"}},
		{"not usable any more", fr(one, 1), fr(one, 0), nil},
		{"usable again", fr(one, 0), fr(one, 1), []string{"first-backend []"}},
		{
			"replaced after a time without usable ones", fr(one, 0), fr(other, 1),
			[]string{"backend-lost [198.51.100.11:53]", "first-backend []"},
		},
		{
			"a host port becomes an external address",
			[]Frontend{at(vip, HostPort, one, 1)},
			[]Frontend{at(vip, ExternalIP, one, 1)},
			[]string{"frontend-gone [198.51.100.11:53]", "frontend-new []"},
		},
		{"the first for what is sent from inside", fr(one, 0), inside, []string{"first-backend []"}},
		{"not only from inside", inside, fr(one, 1), []string{"first-backend []"}},
		{"only from inside", fr(one, 1), inside, nil},
		{
			"the first of an external address",
			[]Frontend{at(vip, ExternalIP, one, 0)},
			[]Frontend{at(vip, ExternalIP, one, 1)},
			[]string{"first-backend []"},
		},
		{
			"an external address that a load balancer gets",
			[]Frontend{at(vip, ExternalIP, one, 1)},
			[]Frontend{at(vip, LoadBalancerIP, one, 1)},
			[]string{"first-backend []"},
		},
		{
			"an address that a load balancer loses",
			[]Frontend{at(vip, LoadBalancerIP, one, 1)},
			[]Frontend{at(vip, ExternalIP, one, 1)},
			[]string{"frontend-new []"}, // a host port may have served it
		},
		{"to another proxy", fr(one, 1), foreign, nil},
		{"from another proxy", foreign, fr(one, 1), []string{"frontend-new []"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := NewTable(Options{Policy: DefaultPolicy})
			tab.Set("a", tc.from)
			ch := tab.Set("a", tc.to)
			var got []string
			for _, s := range ch.Suspects {
				got = append(got, fmt.Sprint(s.Cause, " ", s.Lost))
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestReplaceHandsOverWithoutGap(t *testing.T) {
	tab := NewTable(Options{Policy: DefaultPolicy})
	tab.Replace(map[string][]Frontend{"old": {at(vip, ClusterIP, backends(alive, "198.51.100.12:53"), 2)}})
	ch := tab.Replace(map[string][]Frontend{"new": {at(vip, ClusterIP, backends(alive), 1)}})
	if len(ch.Suspects) != 1 || ch.Suspects[0].Cause != CauseBackendLost || len(ch.Suspects[0].Lost) != 1 {
		t.Errorf("%+v", ch)
	}
	if _, tombs := tab.Len(); tombs != 0 {
		t.Errorf("%d tombstones", tombs)
	}
}

func TestTombstones(t *testing.T) {
	tab := NewTable(Options{Policy: DefaultPolicy})
	rng := Frontend{Owner: "r", Proto: conntrack.UDP, Addr: ip("192.0.2.1"), Ports: Ports{10, 20}, Usable: 1}
	tab.Set("a", []Frontend{at(vip, ClusterIP, backends(alive), 1), rng})
	tab.Set("a", nil)
	list := tab.Tombstones()
	if len(list) != 2 || list[0].Key.String() != "192.0.2.1:10-20/UDP" || list[1].Key.String() != vip+"/UDP" {
		t.Fatalf("%v", list)
	}
	again := NewTable(Options{Policy: DefaultPolicy})
	again.Set("b", []Frontend{rng})
	again.Bury(list...)
	if got := again.Tombstones(); len(got) != 1 || got[0] != list[1] {
		t.Errorf("buried %v", got)
	}
	flow := udp(vip, alive)
	if v := again.Judge(&flow); v.String() != "delete frontend-gone" || v.Owner != "default/dns:udp" || v.Kind != ClusterIP {
		t.Errorf("%+v", v)
	}
	again.Forget(list[0].Key, list[1].Key)
	if f, tombs := again.Len(); f != 1 || tombs != 0 {
		t.Errorf("%d frontends, %d tombstones", f, tombs)
	}
	if v := again.Judge(&flow); v.String() != "ignore no-frontend" {
		t.Errorf("%+v", v)
	}
}

// model is the judgement and the table's history as the design tells them,
// without an index: everything is looked through for every flow.
type model struct {
	units map[string][]Frontend
	tombs []Frontend // all that went and were not forgotten
	host  map[netip.Addr]hostAddr
	pods  []netip.Prefix
	// hidden: there may be host ports that are not known.
	hidden bool
	loops  func(netip.Addr) bool // there may be node ports on this loopback address

	policy   Sweep // of UDP
	services []netip.Prefix
}

func (m *model) claims() (all []Frontend) {
	for _, u := range sortedKeys(m.units) {
		all = append(all, m.units[u]...)
	}
	return all
}

// lives tells whether a frontend of ours says at a key what f said there.
func (m *model) lives(f *Frontend) bool {
	return slices.ContainsFunc(m.claims(), func(c Frontend) bool {
		return !c.Foreign && c.Key() == f.Key() && c.Kind == f.Kind && m.allowed(&c) == m.allowed(f)
	})
}

func (m *model) set(unit string, fs []Frontend) {
	was := m.units[unit]
	m.units[unit] = fs
	for _, f := range was {
		edited := func(x Frontend) bool { return x.Key() == f.Key() && x.Kind == f.Kind && !x.Foreign }
		if !f.Foreign && !slices.ContainsFunc(fs, edited) {
			m.tombs = append(m.tombs, f)
		}
	}
	m.tombs = slices.DeleteFunc(m.tombs, func(f Frontend) bool { return m.lives(&f) })
}

// setHost leaves the node ports on addresses where they were served and are not.
func (m *model) setHost(now map[netip.Addr]hostAddr) {
	was := m.host
	m.host = now
	for a, h := range now {
		if was[a].ports != certain || h.ports != unserved {
			continue
		}
		for _, f := range slices.Concat(m.claims(), m.tombs) {
			if f.Kind == NodePort && !f.Foreign && !f.Addr.IsValid() {
				f.Addr = a
				m.tombs = append(m.tombs, f)
			}
		}
	}
}

// tombstones counts what cannot be told apart once.
func (m *model) tombstones() int {
	type one struct {
		Key
		Kind
		Sweep
	}
	all := map[one]bool{}
	for _, f := range m.tombs {
		all[one{f.Key(), f.Kind, m.allowed(&f)}] = true
	}
	return len(all)
}

func (m *model) inside(src netip.Addr) bool {
	h, local := m.host[src]
	return src.IsLoopback() || local && !h.was ||
		!local && slices.ContainsFunc(m.pods, func(p netip.Prefix) bool { return p.Contains(src) })
}

func (m *model) matches(f *Frontend, fl *conntrack.Flow) (match, was bool, c certainty) {
	k := f.Key()
	if k.Proto != fl.Proto || !k.Ports.Contains(fl.Orig.DstPort) {
		return false, false, 0
	}
	h, local := m.host[fl.Orig.Dst]
	everywhere := k.Addr.IsUnspecified()
	if m.loops(fl.Orig.Dst) {
		return everywhere && f.Kind == NodePort, false, uncertain
	}
	if everywhere {
		if !local || k.Addr.Is4() != fl.Orig.Dst.Is4() {
			return false, false, 0
		}
	} else if k.Addr != fl.Orig.Dst || f.Kind == HostPort && !local {
		return false, false, 0
	}
	switch {
	case f.Kind == NodePort:
		return h.ports != unserved, h.was, h.ports
	case f.Kind == ExternalIP && (f.Usable > 0 || f.Inside > 0 && m.inside(fl.Orig.Src)):
		return true, h.was && everywhere, uncertain
	}
	return true, h.was && (everywhere || f.Kind == HostPort), certain
}

// judge is rule before the policy, which is the least that any frontend that
// matches allows, or any tombstone where there is none.
func (m *model) judge(fl *conntrack.Flow) string {
	verdict, limits, tombLimits := m.rule(fl)
	if limits == nil {
		limits = tombLimits
	}
	least := m.policy
	if limits != nil {
		least = slices.Min(limits)
	}
	switch {
	case m.policy == Off && least == Off:
		return "ignore protocol"
	case verdict[:6] == "delete" && (least == Off || least == Unreplied && fl.Replied()):
		return "keep policy"
	}
	return verdict
}

func (m *model) allowed(f *Frontend) Sweep {
	if f.Sweep != nil {
		return *f.Sweep
	}
	return m.policy
}

func (m *model) rule(fl *conntrack.Flow) (verdict string, limits, tombLimits []Sweep) {
	var balanced, lbTomb, ours, foreign, tomb, hit, backends, usable, uncertainSeen, uncertainUsable, certainSeen bool
	for _, f := range m.claims() {
		match, was, c := m.matches(&f, fl)
		if !match {
			if k := f.Key(); m.loops(fl.Orig.Dst) && k.Addr.IsUnspecified() && k.Ports.Contains(fl.Orig.DstPort) {
				// A host port, say, which may be served there.
				foreign, hit = true, hit || f.Valid.Contains(netip.AddrPortFrom(fl.Reply.Src, fl.Reply.SrcPort), fl.Orig.DstPort)
			}
			continue
		}
		if was {
			if !f.Foreign {
				tomb, tombLimits = true, append(tombLimits, m.allowed(&f))
			}
			continue
		}
		for _, b := range f.Valid.All() {
			if b.Addr() == fl.Reply.Src && (b.Port() == fl.Reply.SrcPort || b.Port() == 0 && fl.Reply.SrcPort == fl.Orig.DstPort) {
				hit = true
			}
		}
		if f.Foreign {
			foreign = true
			continue
		}
		ours, limits = true, append(limits, m.allowed(&f))
		balanced = balanced || f.Kind == LoadBalancerIP || f.Balanced
		backends = backends || f.Valid.Len() > 0
		has := f.Usable > 0 || f.Inside > 0 && m.inside(fl.Orig.Src)
		if c == uncertain {
			uncertainSeen, uncertainUsable = true, uncertainUsable || has
		} else {
			certainSeen, usable = true, usable || has
		}
	}
	for _, f := range m.tombs {
		if f.Kind == NodePort && f.Addr.IsValid() {
			f.Kind = Static // that of an address where it was served
		}
		if match, _, _ := m.matches(&f, fl); match {
			tomb, tombLimits = true, append(tombLimits, m.allowed(&f))
			lbTomb = lbTomb || f.Kind == LoadBalancerIP
		}
	}
	h, local := m.host[fl.Orig.Dst]
	hidden := m.hidden && local && !h.was
	if !ours && !tomb && !foreign && slices.ContainsFunc(m.services, func(p netip.Prefix) bool { return p.Contains(fl.Orig.Dst) }) {
		tomb = !slices.ContainsFunc(m.claims(), func(f Frontend) bool { return f.Foreign && f.Addr == fl.Orig.Dst })
	}
	translated := netip.AddrPortFrom(fl.Reply.Src, fl.Reply.SrcPort) != netip.AddrPortFrom(fl.Orig.Dst, fl.Orig.DstPort)
	switch {
	case !ours && translated && tomb && !foreign && hidden && lbTomb, ours && !hit && translated && hidden && balanced:
		return "keep uncertain-address", limits, tombLimits
	case !ours && translated && tomb && !foreign:
		return "delete frontend-gone", limits, tombLimits
	case !ours:
		return "ignore no-frontend", limits, tombLimits
	case hit:
		return "keep serving", limits, tombLimits
	case translated && backends:
		return "delete backend-gone", limits, tombLimits
	case translated:
		return "delete no-backends", limits, tombLimits
	case usable:
		return "delete untranslated", limits, tombLimits
	case uncertainUsable || uncertainSeen && !certainSeen:
		return "keep uncertain-address", limits, tombLimits
	}
	return "keep awaiting-backends", limits, tombLimits
}

// A small world, so that everything meets everything.
var (
	worldHosts = []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}
	worldDsts  = append(worldHosts, ip("203.0.113.10"))
	// This host, if it is, or one of its pods, if they are known.
	worldSenders = []netip.Addr{ip("192.0.2.2"), ip("198.51.100.77"), ip("127.0.0.1")}
	worldPods    = []netip.Prefix{netip.MustParsePrefix("198.51.100.64/26")}
	worldTo      = []netip.Addr{ip("198.51.100.1"), ip("198.51.100.2"), ip("192.0.2.1")}
)

func worldFlows() (flows []conntrack.Flow) {
	for _, d := range append([]netip.Addr{ip("127.0.0.1")}, worldDsts...) {
		for port := uint16(1); port <= 4; port++ {
			for _, to := range append(worldTo, d) {
				for toPort := uint16(1); toPort <= 4; toPort++ {
					f := udp(netip.AddrPortFrom(d, port).String(), netip.AddrPortFrom(to, toPort).String())
					if toPort%2 == 0 {
						f.Status |= conntrack.StatusSeenReply
					}
					flows = append(flows, f)
				}
			}
			for _, src := range worldSenders { // untranslated flows, of which it matters who sends
				f := udp(netip.AddrPortFrom(d, port).String(), netip.AddrPortFrom(d, port).String())
				f.Orig.Src, f.Reply.Dst = src, src
				flows = append(flows, f)
			}
		}
	}
	return flows
}

func genFrontend(t *rapid.T) Frontend {
	f := Frontend{
		Owner: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "owner"), Proto: conntrack.UDP,
		Kind:    rapid.SampledFrom([]Kind{Static, ClusterIP, ExternalIP, LoadBalancerIP, NodePort, HostPort}).Draw(t, "kind"),
		Usable:  rapid.IntRange(0, 1).Draw(t, "usable"),
		Foreign: rapid.IntRange(0, 4).Draw(t, "foreign") == 0,
	}
	f.Balanced = f.Kind == ExternalIP && rapid.Bool().Draw(t, "balanced")
	if f.Kind == NodePort {
		f.Inside = rapid.IntRange(0, 2).Draw(t, "inside")
	}
	first := rapid.Uint16Range(1, 4).Draw(t, "first")
	f.Ports = Ports{first, rapid.Uint16Range(first, 4).Draw(t, "last")}
	if f.Kind == NodePort || rapid.Bool().Draw(t, "everywhere") {
		f.Family = conntrack.IPv4
	} else {
		f.Addr = rapid.SampledFrom(worldDsts).Draw(t, "addr")
	}
	var bs []netip.AddrPort
	for range rapid.IntRange(0, 3).Draw(t, "backends") {
		bs = append(bs, netip.AddrPortFrom(rapid.SampledFrom(worldTo).Draw(t, "to"), rapid.Uint16Range(0, 4).Draw(t, "port")))
	}
	f.Valid = NewBackends(bs...)
	if rapid.IntRange(0, 2).Draw(t, "own policy") == 0 {
		f.Sweep = new(genSweep(t))
	}
	return f
}

func genSweep(t *rapid.T) Sweep {
	return rapid.SampledFrom([]Sweep{All, Unreplied, Off}).Draw(t, "sweep")
}

func genHost(t *rapid.T) (h Host) {
	for _, a := range worldHosts {
		switch rapid.IntRange(0, 3).Draw(t, "host") {
		case 1:
			h.Listed = append(h.Listed, a)
		case 2:
			h.Other = append(h.Other, a)
		case 3:
			h.Served = append(h.Served, a)
		}
	}
	if rapid.IntRange(0, 3).Draw(t, "ranges") == 0 {
		h.NodePorts = []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}
	}
	h.HostPortsUnknown = rapid.IntRange(0, 2).Draw(t, "no Pods") == 0
	if rapid.Bool().Draw(t, "pods") {
		h.Pods = worldPods
	}
	return h
}

// suspects tells whether a change points at a flow.
func (c *Change) suspects(f *conntrack.Flow) bool {
	if slices.Contains(c.Hosts, f.Orig.Dst) ||
		slices.ContainsFunc(c.Ranges, func(p netip.Prefix) bool { return p.Contains(f.Orig.Dst) }) {
		return true
	}
	return slices.ContainsFunc(c.Suspects, func(s Suspect) bool {
		if s.Key.Proto != f.Proto || !s.Key.Ports.Contains(f.Orig.DstPort) ||
			!s.Key.Addr.IsUnspecified() && s.Key.Addr != f.Orig.Dst {
			return false
		}
		if s.Cause != CauseBackendLost {
			return true
		}
		return slices.ContainsFunc(s.Lost, func(b netip.AddrPort) bool {
			return b.Addr() == f.Reply.Src && (b.Port() == f.Reply.SrcPort || b.Port() == 0)
		})
	})
}

// The table agrees with the model after every update, in whatever order updates
// come, and a flow becomes stale only where the change said so.
func TestAgainstModel(t *testing.T) {
	flows := worldFlows()
	rapid.Check(t, func(t *rapid.T) {
		policy := DefaultPolicy
		policy.UDP = genSweep(t)
		tab := NewTable(Options{Policy: policy})
		m := &model{units: map[string][]Frontend{}, host: map[netip.Addr]hostAddr{}, loops: tab.loops, policy: policy.UDP}
		graves := map[Key]bool{}
		verdicts := make([]string, len(flows))
		for i := range flows {
			verdicts[i] = tab.Judge(&flows[i]).String()
		}
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			var ch Change
			switch step := rapid.IntRange(0, 9).Draw(t, "step"); step {
			case 0:
				ch = tab.SetHost(genHost(t))
				m.setHost(tab.hosts) // the certainty of an address has a test of its own
				m.pods, m.hidden = tab.pods, tab.hidden
			case 1:
				var keys []Key
				for _, tomb := range tab.Tombstones() {
					keys = append(keys, tomb.Key)
				}
				if len(keys) > 0 {
					k := rapid.SampledFrom(keys).Draw(t, "forgotten")
					tab.Forget(k)
					m.tombs = slices.DeleteFunc(m.tombs, func(f Frontend) bool { return f.Key() == k })
					ch.Hosts = worldDsts // it may have held another tombstone back, which a full pass finds
				}
			case 2:
				m.services = rapid.SliceOfN(rapid.SampledFrom([]netip.Prefix{
					netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("192.0.2.2/32"),
				}), 0, 2).Draw(t, "service ranges")
				ch = tab.SetServiceRanges(m.services...)
			default:
				unit := rapid.SampledFrom([]string{"u", "v", "w"}).Draw(t, "unit")
				fs := rapid.SliceOfN(rapid.Custom(genFrontend), 0, 3).Draw(t, "frontends")
				m.set(unit, slices.Clone(fs))
				ch = tab.Set(unit, fs)
			}
			frontends, tombstones := tab.Len()
			places := map[Key]bool{}
			for _, f := range tab.Frontends() {
				places[f.Key] = true
			}
			if f, d := len(places), len(tab.Tombstones()); frontends != f || tombstones != d || d != m.tombstones() {
				t.Fatalf("Len says %d and %d, of %d frontends and %d tombstones; the model has %d",
					frontends, tombstones, f, d, m.tombstones())
			}
			for _, k := range ch.Buried {
				graves[k] = true
			}
			for _, tomb := range tab.Tombstones() {
				if !graves[tomb.Key] {
					t.Fatalf("nobody was told of the tombstone %v", tomb)
				}
			}
			for i := range flows {
				v, _ := tab.Explain(&flows[i])
				if plain := tab.Judge(&flows[i]); plain != v {
					t.Fatalf("%s: Judge %v, Explain %v", &flows[i], plain, v)
				}
				if want := m.judge(&flows[i]); v.String() != want {
					t.Fatalf("%s: %v, want %s", &flows[i], v, want)
				}
				if v.Action == Delete && verdicts[i] != v.String() && verdicts[i][:6] != "delete" && !ch.suspects(&flows[i]) {
					t.Fatalf("%s went from %s to %v unsuspected by %+v", &flows[i], verdicts[i], v, ch)
				}
				verdicts[i] = v.String()
			}
		}
	})
}

// What is known at last depends on what went and what is left, not on the order in
// which it went, nor on names.
func TestOrderDoesNotMatter(t *testing.T) {
	flows := worldFlows()
	rapid.Check(t, func(t *rapid.T) {
		units := []string{"u", "v", "w"}
		before, after := map[string][]Frontend{}, map[string][]Frontend{}
		for _, u := range units {
			before[u] = rapid.SliceOfN(rapid.Custom(genFrontend), 1, 2).Draw(t, u)
			for i := range before[u] { // all at one place
				if before[u][i].Ports = Port(1); before[u][i].Addr.IsValid() {
					before[u][i].Addr = worldDsts[0]
				}
			}
			if rapid.Bool().Draw(t, u+" stays") {
				after[u] = before[u]
			}
		}
		from, to := genHost(t), genHost(t)
		// What comes is ours at once in any order, so that only what goes is permuted.
		world := func(order []string, names []string) *Table {
			tab := NewTable(Options{Policy: DefaultPolicy})
			tab.SetHost(from)
			as := map[string]string{}
			for i, u := range units {
				as[u] = names[i]
				tab.Set(names[i], slices.Clone(before[u]))
			}
			for _, step := range order {
				if step == "host" {
					tab.SetHost(to)
				} else if after[step] == nil {
					tab.Set(as[step], nil)
				}
			}
			return tab
		}
		steps := append([]string{"host"}, units...)
		one := world(steps, units)
		two := world(rapid.Permutation(steps).Draw(t, "order"), rapid.Permutation(units).Draw(t, "names"))
		for i := range flows {
			if v, w := one.Judge(&flows[i]), two.Judge(&flows[i]); v.String() != w.String() {
				t.Fatalf("%s: %v in one order, %v in another", &flows[i], v, w)
			}
		}
	})
}

// Node ports of an address on which they were served and are not any more.
func TestNodePortsMoveAway(t *testing.T) {
	one, two := ip("192.0.2.1"), ip("192.0.2.2")
	first := Host{Listed: []netip.Addr{one, two}, NodePorts: []netip.Prefix{Primary}}
	second := Host{Listed: []netip.Addr{two, one}, NodePorts: []netip.Prefix{Primary}}
	tab := NewTable(Options{Policy: DefaultPolicy})
	tab.SetHost(first)
	gone := anywhere(30054, NodePort, backends(alive), 1)
	gone.Sweep = new(Off)
	tab.Set("a", []Frontend{anywhere(30053, NodePort, backends(alive), 1)})
	tab.Set("gone", []Frontend{gone})
	tab.Set("gone", nil)
	judge := func(dst, src string) string {
		f := udp(dst, src)
		return tab.Judge(&f).String()
	}
	ch := tab.SetHost(second)
	if !slices.Equal(ch.Hosts, []netip.Addr{one, two}) || len(ch.Buried) != 2 || ch.Buried[0].String() != "192.0.2.1:30053/UDP" {
		t.Errorf("change %+v", ch)
	}
	tab.Set("new", []Frontend{anywhere(30055, NodePort, backends(alive), 1)})
	for _, tc := range []struct{ dst, src, want string }{
		{"192.0.2.1:30053", alive, "delete frontend-gone"},
		{"192.0.2.1:30053", dead, "delete frontend-gone"},
		{"192.0.2.1:30053", "192.0.2.1:30053", "ignore no-frontend"},
		{"192.0.2.1:30054", alive, "keep policy"},
		{"192.0.2.1:30055", dead, "ignore no-frontend"}, // never was served there
		{"192.0.2.2:30053", alive, "keep serving"},
		{"192.0.2.2:30053", dead, "delete backend-gone"},
	} {
		if v := judge(tc.dst, tc.src); v != tc.want {
			t.Errorf("%s answered from %s: %s, want %s", tc.dst, tc.src, v, tc.want)
		}
	}

	saved := tab.Tombstones()
	again := NewTable(Options{Policy: DefaultPolicy})
	again.SetHost(second)
	again.Bury(saved...)
	f := udp("192.0.2.1:30053", alive)
	if v := again.Judge(&f).String(); v != "delete frontend-gone" {
		t.Errorf("after a restart: %s", v)
	}

	tab.Set("a", nil)
	if v := judge("192.0.2.1:30053", alive); v != "delete frontend-gone" {
		t.Errorf("once it is gone everywhere: %s", v)
	}
	tab.SetHost(first)
	tab.Set("a", []Frontend{anywhere(30053, NodePort, backends(alive), 1)})
	if v := judge("192.0.2.1:30053", alive); v != "keep serving" {
		t.Errorf("back again: %s", v)
	}
	for _, tomb := range tab.Tombstones() {
		tab.Forget(tomb.Key)
	}
	if _, n := tab.Len(); n != 0 || len(tab.Tombstones()) != 0 {
		t.Errorf("%d tombstones are left of %v", n, tab.Tombstones())
	}
	if v := judge("192.0.2.1:30053", alive); v != "keep serving" {
		t.Errorf("what lives was forgotten with its tombstone: %s", v)
	}
}

// However many have been at one place, a few tombstones tell of them.
func TestTombstonesOfOnePlace(t *testing.T) {
	tab := NewTable(Options{Policy: DefaultPolicy})
	for i := range 100 {
		f := at(vip, ExternalIP, backends(alive), 1)
		f.Owner = fmt.Sprint("s", i)
		if i%2 == 0 {
			f.Sweep = new(Off)
		}
		tab.Set(f.Owner, []Frontend{f})
		tab.Set(f.Owner, nil)
	}
	if got := tab.Tombstones(); len(got) != 2 || got[0].Owner != "s98" || got[1].Owner != "s99" {
		t.Errorf("%v", got)
	}
	flow := udp(vip, alive)
	if v := tab.Judge(&flow).String(); v != "keep policy" {
		t.Error(v)
	}
}

// What a frontend allowed before it was edited does not count.
func TestEditedPolicyLeavesNothing(t *testing.T) {
	tab := NewTable(Options{Policy: DefaultPolicy})
	f := at(vip, ExternalIP, backends(alive), 1)
	off := f
	off.Sweep = new(Off)
	tab.Set("a", []Frontend{off})
	tab.Set("a", []Frontend{f})
	if got := tab.Tombstones(); len(got) != 0 {
		t.Errorf("edited: %v", got)
	}
	old := tab.tombstone(&off)
	if ch := tab.Bury(old); !ch.Empty() || len(tab.Tombstones()) != 0 {
		t.Errorf("edited while the agent was away: %+v, %v", ch, tab.Tombstones())
	}
	tab.Set("a", nil)
	flow := udp(vip, alive)
	if v := tab.Judge(&flow).String(); v != "delete frontend-gone" {
		t.Error(v)
	}
}

func TestPolicy(t *testing.T) {
	for _, tc := range []struct{ in, want, err string }{
		{"udp=all,tcp=unreplied,sctp=unreplied", "udp=all,tcp=unreplied,sctp=unreplied", ""},
		{"udp=off", "udp=off,tcp=unreplied,sctp=unreplied", ""},
		{" tcp=all , sctp=off", "udp=all,tcp=all,sctp=off", ""},
		{"", "", `"": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"icmp=all", "", `"icmp=all": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"udp", "", `"udp": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"udp=some", "", `"udp=some": want all, unreplied or off after udp=`},
		{"udp=all,udp=off", "", `"udp=off": udp is given twice`},
	} {
		t.Run(tc.in, func(t *testing.T) {
			p, err := ParsePolicy(tc.in)
			if err != nil {
				if err.Error() != tc.err {
					t.Errorf("error %q, want %q", err, tc.err)
				}
				return
			}
			if tc.err != "" || p.String() != tc.want {
				t.Errorf("%s, want %s or error %q", p, tc.want, tc.err)
			}
		})
	}
}

func bigTable(services, each int) *Table {
	tab := NewTable(Options{Policy: DefaultPolicy})
	tab.SetHost(Host{Listed: []netip.Addr{ip("192.0.2.1")}})
	for i := range services {
		tab.Set(fmt.Sprint("s", i), bigService(i, each))
	}
	return tab
}

func bigService(i, each int) []Frontend {
	var bs []netip.AddrPort
	for j := range each {
		n := i*each + j
		bs = append(bs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 53))
	}
	valid := NewBackends(bs...)
	vip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 16 + byte(i>>16), byte(i >> 8), byte(i)}), 53)
	np := anywhere(uint16(30000+i%2000), NodePort, valid, each)
	return []Frontend{at(vip.String(), ClusterIP, valid, each), np}
}

func TestJudgeAllocatesNothing(t *testing.T) {
	tab := bigTable(1000, 10)
	tab.Set("r", []Frontend{{Owner: "w", Proto: conntrack.UDP, Family: conntrack.IPv4, Ports: Ports{50000, 50099}, Usable: 1}})
	for _, f := range []conntrack.Flow{
		udp("172.16.0.7:53", "10.0.0.70:53"), udp("172.16.0.7:53", "10.9.9.9:53"),
		udp("192.0.2.1:30007", "10.9.9.9:53"), udp("192.0.2.1:50007", "10.9.9.9:53"), udp("192.0.2.77:9", "192.0.2.77:9"),
	} {
		if n := testing.AllocsPerRun(100, func() { tab.Judge(&f) }); n != 0 {
			t.Errorf("%s: %v allocations", &f, n)
		}
	}
}

func BenchmarkJudge(b *testing.B) {
	for _, services := range []int{10, 1000, 10_000} {
		tab := bigTable(services, 10)
		for name, f := range map[string]conntrack.Flow{
			"serving":     udp("172.16.0.7:53", "10.0.0.70:53"),
			"no-frontend": udp("203.0.113.1:53", "203.0.113.1:53"),
			"node-port":   udp("192.0.2.1:30007", "10.9.9.9:53"),
		} {
			b.Run(fmt.Sprintf("%s/services=%d", name, services), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					tab.Judge(&f)
				}
			})
		}
	}
}

func BenchmarkSet(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		tab := bigTable(services, 10)
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				tab.Set("s7", bigService(7, 9+i%2))
			}
		})
	}
}
