//go:build linux

package ruleset

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// site is a host between a client and a LAN, whose flows are judged:
//
//	client [eth0]────[wan] host [lan]────[eth0] lan
//
// The client is the gateway to everywhere. Each word in braces, in addresses and
// rules, is what siteWords has for the family.
type site struct {
	t                 *testing.T
	v6                bool
	words             *strings.Replacer
	host, client, lan *testnet.NS
	flows             *conntrack.Conn
	// early was opened before anything of interest happened, as an agent's judge.
	early *Judge
}

// siteWords are the words of IPv4 and of IPv6.
var siteWords = [][3]string{
	{"{ip}", "ip", "ip6"},
	{"{type}", "ipv4_addr", "ipv6_addr"},
	{"{wan}", "192.0.2.1", "2001:db8:1::1"},
	{"{client}", "192.0.2.50", "2001:db8:1::50"},
	{"{lan}", "198.51.100.1", "2001:db8:2::1"},
	{"{backend}", "198.51.100.11", "2001:db8:2::11"},
	{"{server}", "198.51.100.53", "2001:db8:2::53"},
	{"{leg}", "198.51.100.77", "2001:db8:2::77"},    // of the LAN, where the client has it
	{"{shared}", "192.0.2.80", "2001:db8:1::80"},    // of the WAN, where nobody has it
	{"{vip}", "203.0.113.10", "2001:db8:9::10"},     // the gateway's
	{"{vip2}", "203.0.113.11", "2001:db8:9::11"},    // the same
	{"{services}", "203.0.113.0", "2001:db8:9::"},   // their network
	{"{far}", "203.0.113.200", "2001:db8:9::200"},   // a client behind the gateway
	{"{third}", "10.9.0.1", "2001:db8:7::1"},        // the host's on a third network
	{"{third2}", "10.9.0.2", "2001:db8:7::2"},       // the first beside it
	{"{third3}", "10.9.0.3", "2001:db8:7::3"},       // and the second
	{"{all}", "0.0.0.0", "::"},                      //
	{"{len}", "24", "64"},                           // of each network
	{"{full}", "32", "128"},                         // of an address
	{"{nfproto}", "ipv4", "ipv6"},                   //
	{"{iptables}", "iptables-nft", "ip6tables-nft"}, //
	{"{bridge-nf}", "net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"},
}

func newSite(t *testing.T, v6 bool) *site {
	t.Helper()
	s := &site{t: t, v6: v6, host: nstest.New(t), client: nstest.New(t), lan: nstest.New(t)}
	var words []string
	for _, w := range siteWords {
		words = append(words, w[0], map[bool]string{false: w[1], true: w[2]}[v6])
	}
	s.words = strings.NewReplacer(words...)
	must(t, s.host.Sysctl("net.ipv4.ip_forward", "1"))
	must(t, s.host.Sysctl("net.ipv6.conf.all.forwarding", "1"))
	s.rpFilter("all", "0")
	s.link("wan", s.client, "eth0")
	s.link("lan", s.lan, "eth0")
	s.addr(s.host, "wan", "{wan}")
	s.addr(s.host, "lan", "{lan}")
	s.addr(s.client, "eth0", "{client}")
	s.addr(s.lan, "eth0", "{backend}")
	s.addr(s.lan, "eth0", "{server}")
	s.route(s.host, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{client}"), Dev: "wan"})
	s.route(s.client, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{wan}"), Dev: "eth0"})
	s.route(s.lan, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{lan}"), Dev: "eth0"})
	var err error
	s.flows, err = conntrack.Dial(conntrack.Config{NetNS: s.host.Path()})
	must(t, err)
	t.Cleanup(func() { s.flows.Close() })
	return s
}

func (s *site) say(text string) string { return s.words.Replace(text) }

func (s *site) at(a string) netip.Addr        { return netip.MustParseAddr(s.say(a)) }
func (s *site) prefix(p string) netip.Prefix  { return netip.MustParsePrefix(s.say(p)) }
func (s *site) to(a string) netip.AddrPort    { return netip.AddrPortFrom(s.at(a), 53) }
func (s *site) from(a string) netip.AddrPort  { return netip.AddrPortFrom(s.at(a), 40000) }
func (s *site) network(a string) netip.Prefix { return s.prefix(a + "/{len}") }
func (s *site) lonely(a string) netip.Prefix  { return s.prefix(a + "/{full}") }
func (s *site) rpFilter(ifname, value string) { s.sysctl("net.ipv4.conf."+ifname+".rp_filter", value) }

func (s *site) sysctl(name, value string) { s.t.Helper(); must(s.t, s.host.Sysctl(name, value)) }

func (s *site) noAddr(ns *testnet.NS, i, a string) {
	s.t.Helper()
	must(s.t, ns.DelAddr(i, s.network(a)))
}

func (s *site) addr(ns *testnet.NS, ifname, a string) {
	s.t.Helper()
	must(s.t, ns.AddAddr(ifname, s.network(a)))
}

func (s *site) route(ns *testnet.NS, r testnet.Route) {
	s.t.Helper()
	must(s.t, ns.SetRoute(r))
}

func (s *site) rule(r testnet.Rule) {
	s.t.Helper()
	r.V6 = s.v6
	must(s.t, s.host.SetRule(r))
}

// link joins the host to another namespace. What the host gets is not filtered by
// its source.
func (s *site) link(name string, ns *testnet.NS, peer string) {
	s.t.Helper()
	must(s.t, s.host.Veth(name, ns, peer))
	s.rpFilter(name, "0")
}

// nft loads rules, and opens the early judge when they are the first.
func (s *site) nft(rules string) {
	s.t.Helper()
	s.run(s.say(rules), "nft", "-f", "-")
	if s.early == nil {
		s.early = s.judge()
		return
	}
	reload(s.t, s.early)
}

func (s *site) run(stdin, name string, args ...string) {
	s.t.Helper()
	must(s.t, s.host.Do(func() error {
		cmd := exec.Command(name, args...) // also when the test ends
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s\n%s", err, out, stdin)
		}
		return nil
	}))
}

// judge opens one, as a command does.
func (s *site) judge() *Judge {
	s.t.Helper()
	j, err := NewJudge(s.t.Context(), Config{NetNS: s.host.Path()})
	must(s.t, err)
	s.t.Cleanup(func() { must(s.t, j.Close()) })
	return j
}

// send sends a datagram by a socket.
func (s *site) send(ns *testnet.NS, o testnet.SocketOptions, from, to netip.AddrPort) {
	s.t.Helper()
	c, err := ns.ListenUDPAs(from, o)
	must(s.t, err)
	defer c.Close()
	_, err = c.WriteToUDPAddrPort([]byte("x"), to)
	must(s.t, err)
}

// flow waits for a flow that the kernel has made, and sees to it that it is the one
// that the case is about: translated to a destination, or, to the zero one, not.
func (s *site) flow(proto uint8, from, to, goes netip.AddrPort) *conntrack.Flow {
	s.t.Helper()
	var all []conntrack.Flow
	for start := time.Now(); time.Since(start) < 5*time.Second; time.Sleep(time.Millisecond) {
		all = all[:0]
		for f, err := range s.flows.Dump(context.Background(), conntrack.Filter{}) {
			must(s.t, err)
			all = append(all, *f)
			if f.Proto != proto || netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort) != from ||
				netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort) != to {
				continue
			}
			got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
			if goes.IsValid() && got != goes || !goes.IsValid() && f.Translated() {
				s.t.Fatalf("the case is not what it was meant to be: goes to %s, not %s: %s", got, goes, f)
			}
			return new(*f)
		}
	}
	for _, f := range all {
		s.t.Logf("there: %s", &f)
	}
	s.t.Fatalf("the case is not what it was meant to be: no flow %s > %s", from, to)
	return nil
}

// kept fails where a flow that the kernel made under these rules is stale, by what
// was known all along or by what can be seen now.
func (s *site) kept(what string, f *conntrack.Flow) {
	s.t.Helper()
	reload(s.t, s.early)
	for name, j := range map[string]*Judge{"the judge that was open": s.early, "a judge opened now": s.judge()} {
		v, steps := j.Explain(f)
		if v.Verdict.Stale() {
			s.t.Errorf("%s: %s calls a right flow %s: %s\n  %s", what, name, v.Verdict, f, strings.Join(steps, "\n  "))
		} else if v.Verdict == Unpredictable && v.Why == "" {
			s.t.Errorf("%s: %s keeps it without a reason", what, name)
		}
		s.t.Logf("%s: %s: %s %s", what, name, v.Verdict, v.Why)
	}
}

// udp sends a datagram and judges its flow.
func (s *site) udp(ns *testnet.NS, o testnet.SocketOptions, from, to, goes string) *conntrack.Flow {
	s.t.Helper()
	var end netip.AddrPort
	if goes != "" {
		end = s.to(goes)
	}
	s.send(ns, o, s.from(from), s.to(to))
	f := s.flow(conntrack.UDP, s.from(from), s.to(to), end)
	s.kept("at once", f)
	return f
}

// Rules that are met by what comes in, and by what this host sends.
const (
	dnatIn  = "table {ip} nat { chain pre { type nat hook prerouting priority -100; udp dport 53 dnat to {backend}; }; }"
	dnatOut = "table {ip} nat { chain out { type nat hook output priority -100; {ip} daddr {vip} udp dport 53 dnat to {backend}; }; }"
)

// dnatBy are rules for what comes in by an interface.
func dnatBy(ifname string) string {
	return strings.Replace(dnatIn, "udp", "iifname "+ifname+" udp", 1)
}

// dnatLocal are rules for what is sent to an address of this host.
var dnatLocal = strings.Replace(dnatIn, "udp", "fib daddr type local udp", 1)

var (
	ordinary    = testnet.SocketOptions{}
	transparent = testnet.SocketOptions{Transparent: true}
	freebind    = testnet.SocketOptions{Freebind: true}
)

// besideCases are hosts of which a flow's addresses do not tell what its first
// packet met. Each flow is one that the kernel has made under the rules.
var besideCases = []struct {
	name string
	only int // 4 or 6, where a family differs
	do   func(s *site)
}{
	// The hook.
	{"transparent proxy, what comes in is redirected", 0, func(s *site) {
		s.nft("table {ip} nat { chain pre { type nat hook prerouting priority -100; udp dport 53 redirect to :5353; }; }")
		s.udp(s.host, transparent, "{client}", "{server}", "")
	}},
	{"transparent proxy, what this host sends is translated", 0, func(s *site) {
		s.nft(dnatOut)
		s.udp(s.host, transparent, "{client}", "{vip}", "{backend}")
	}},
	{"packets of a raw socket with another's source", 0, func(s *site) {
		s.nft(dnatOut)
		raw, err := s.host.OpenRaw(s.v6, ordinary)
		must(s.t, err)
		defer raw.Close()
		must(s.t, raw.Send(conntrack.UDP, s.from("{far}"), s.to("{vip}")))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{far}"), s.to("{vip}"), s.to("{backend}")))
	}},
	{"a socket with an address that this host does not have", 6, func(s *site) {
		s.nft(dnatOut)
		s.udp(s.host, freebind, "{shared}", "{vip}", "{backend}")
	}},
	{"an address that the host has lost since", 0, func(s *site) {
		s.addr(s.host, "wan", "{shared}")
		s.nft(dnatOut)
		f := s.udp(s.host, ordinary, "{shared}", "{vip}", "{backend}")
		s.noAddr(s.host, "wan", "{shared}")
		s.kept("the address is gone", f)
	}},
	{"a socket that outlives its address", 6, func(s *site) {
		s.addr(s.host, "wan", "{shared}")
		s.nft(dnatOut)
		c, err := s.host.ListenUDP(s.from("{shared}"))
		must(s.t, err)
		defer c.Close()
		s.noAddr(s.host, "wan", "{shared}")
		_, err = c.WriteToUDPAddrPort([]byte("x"), s.to("{vip}"))
		must(s.t, err)
		s.kept("at once", s.flow(conntrack.UDP, s.from("{shared}"), s.to("{vip}"), s.to("{backend}")))
	}},
	{"a client's address that this host has taken over", 0, func(s *site) {
		s.addr(s.client, "eth0", "{shared}")
		s.nft(dnatIn)
		f := s.udp(s.client, ordinary, "{shared}", "{wan}", "{backend}")
		s.noAddr(s.client, "eth0", "{shared}")
		s.addr(s.host, "wan", "{shared}")
		s.kept("taken over", f)
	}},
	{"an address that is local by a policy table", 0, func(s *site) {
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Table: 100, Dst: s.lonely("{far}"), Dev: "lo"})
		s.rule(testnet.Rule{Priority: 50, To: s.lonely("{far}"), Table: 100})
		s.nft(dnatOut)
		s.udp(s.host, transparent, "{far}", "{vip}", "{backend}")
	}},
	{"TPROXY, and what the proxy sends", 0, func(s *site) {
		s.rule(testnet.Rule{Priority: 50, Mark: 1, Table: 100})
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Table: 100, Dst: s.prefix("{all}/0"), Dev: "lo"})
		s.nft(`table {ip} proxy {
			chain pre { type filter hook prerouting priority -150; iifname wan udp dport 53 tproxy to :5353 meta mark set 1; }
		}
		table {ip} nat {
			chain pre { type nat hook prerouting priority -100; iifname lan udp dport 53 dnat to {backend}; }
			chain out { type nat hook output priority -100; {ip} daddr {vip} udp dport 53 dnat to {backend}; }
		}`)
		c, err := s.host.ListenUDPAs(netip.MustParseAddrPort(s.say(map[bool]string{false: "{all}:5353", true: "[{all}]:5353"}[s.v6])), transparent)
		must(s.t, err)
		defer c.Close()
		s.udp(s.client, ordinary, "{client}", "{server}", "")
		s.send(s.host, transparent, s.from("{client}"), s.to("{vip}"))
		s.kept("what the proxy sent", s.flow(conntrack.UDP, s.from("{client}"), s.to("{vip}"), s.to("{backend}")))
	}},
	{"what this host sent untracked comes in again", 0, func(s *site) {
		around := nstest.New(s.t)
		s.link("out", around, "in")
		s.link("back", around, "out")
		must(s.t, around.Sysctl("net.ipv4.ip_forward", "1"))
		must(s.t, around.Sysctl("net.ipv6.conf.all.forwarding", "1"))
		for _, i := range []string{"all", "in", "out"} {
			must(s.t, around.Sysctl("net.ipv4.conf."+i+".rp_filter", "0"))
		}
		s.sysctl("net.ipv4.conf.back.accept_local", "1")
		s.addr(s.host, "out", "{third}")
		s.addr(around, "in", "{third2}")
		back, err := s.host.Interface("back")
		must(s.t, err)
		// Neighbours need not be asked for, only this one way is wanted.
		must(s.t, around.SetQuiet("out"))
		must(s.t, around.SetHardwareAddr("out", back.HardwareAddr))
		s.route(around, testnet.Route{Dst: s.lonely("{vip}"), Dev: "out"})
		s.route(s.host, testnet.Route{Dst: s.lonely("{vip}"), Via: s.at("{third2}"), Dev: "out"})
		s.nft(`table {ip} raw { chain out { type filter hook output priority -300; oifname out notrack; }; }` + "\n" + dnatBy("back"))
		s.udp(s.host, ordinary, "{third}", "{vip}", "{backend}")
	}},
	{"SYNPROXY, what comes in is translated", 0, func(s *site) { s.synproxy("pre", "") }},
	{"SYNPROXY, what this host sends is translated", 0, func(s *site) { s.synproxy("out", "{backend}") }},

	{"a socket in a VRF", 0, func(s *site) {
		s.vrf()
		s.nft(strings.ReplaceAll(dnatOut, "{vip}", "{server}"))
		s.udp(s.host, testnet.SocketOptions{Device: "blue"}, "{lan}", "{server}", "{backend}")
	}},
	{"an ipvlan in another namespace, mode L3", 0, func(s *site) { s.ipvlan(1) }},
	{"an ipvlan in another namespace, mode L3S", 0, func(s *site) { s.ipvlan(2) }},

	// The interface.
	{"a client with two legs", 0, func(s *site) {
		must(s.t, s.client.AddAddr("lo", s.lonely("{leg}")))
		s.nft(dnatBy("wan"))
		s.udp(s.client, ordinary, "{leg}", "{wan}", "{backend}")
	}},
	{"a client with two legs, rp_filter is loose", 4, func(s *site) {
		s.rpFilter("wan", "2")
		must(s.t, s.client.AddAddr("lo", s.lonely("{leg}")))
		s.nft(dnatBy("wan"))
		s.udp(s.client, ordinary, "{leg}", "{wan}", "{backend}")
	}},
	{"a client with two legs, rp_filter is strict", 6, func(s *site) { // which is IPv4's alone
		s.rpFilter("wan", "1")
		must(s.t, s.client.AddAddr("lo", s.lonely("{leg}")))
		s.nft(dnatBy("wan"))
		s.udp(s.client, ordinary, "{leg}", "{wan}", "{backend}")
	}},
	{"a client with two legs, rules are for the other", 0, func(s *site) {
		must(s.t, s.client.AddAddr("lo", s.lonely("{leg}")))
		s.nft(dnatBy("lan"))
		s.udp(s.client, ordinary, "{leg}", "{wan}", "")
	}},
	{"direct server return by an interface without routes", 0, func(s *site) {
		tunnel := nstest.New(s.t)
		s.link("tunl9", tunnel, "eth0")
		i, err := s.host.Interface("tunl9")
		must(s.t, err)
		raw, err := tunnel.OpenLink("eth0", i.HardwareAddr)
		must(s.t, err)
		defer raw.Close()
		s.nft(dnatBy("tunl9"))
		must(s.t, raw.Send(conntrack.UDP, s.from("{far}"), s.to("{wan}")))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{far}"), s.to("{wan}"), s.to("{backend}")))
	}},
	{"a bridge without an address, whose packets meet the rules", 0, func(s *site) {
		if err := s.host.Sysctl(s.say("{bridge-nf}"), "1"); err != nil {
			s.t.Skip("this kernel has no br_netfilter: ", err)
		}
		beside := nstest.New(s.t)
		must(s.t, s.host.AddLink(testnet.Link{Name: "br1", Kind: "bridge"}))
		s.rpFilter("br1", "0")
		s.link("p1", s.client, "e1")
		s.link("p2", beside, "e1")
		must(s.t, s.host.SetMaster("p1", "br1"))
		must(s.t, s.host.SetMaster("p2", "br1"))
		s.addr(s.client, "e1", "{third2}")
		s.addr(beside, "e1", "{third3}")
		s.nft(dnatBy("br1"))
		s.udp(s.client, ordinary, "{third2}", "{third3}", "{backend}")
	}},
	{"a bridge passes packets with this host's address", 0, func(s *site) {
		if err := s.host.Sysctl(s.say("{bridge-nf}"), "1"); err != nil {
			s.t.Skip("this kernel has no br_netfilter: ", err)
		}
		raw := s.behindBridge()
		s.nft(dnatOut)
		must(s.t, raw.Send(conntrack.UDP, s.from("{wan}"), s.to("{vip}")))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{wan}"), s.to("{vip}"), netip.AddrPort{}))
	}},
	{"a bridge without an address, rp_filter is strict and rules are for the source's interface", 4, func(s *site) {
		if err := s.host.Sysctl(s.say("{bridge-nf}"), "1"); err != nil {
			s.t.Skip("this kernel has no br_netfilter: ", err)
		}
		raw := s.behindBridge()
		s.noAddr(s.host, "br1", "{third}")
		s.rpFilter("all", "1") // which is for what is routed
		s.nft(dnatBy("wan"))
		must(s.t, raw.Send(conntrack.UDP, s.from("{client}"), s.to("{vip}")))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{client}"), s.to("{vip}"), netip.AddrPort{}))
	}},
	{"a socket that is bound to an interface", 0, func(s *site) {
		must(s.t, s.host.DelRoute(testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{client}"), Dev: "wan"}))
		s.route(s.host, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{server}"), Dev: "lan"})
		s.route(s.host, testnet.Route{Dst: s.lonely("{vip}"), Via: s.at("{client}"), Dev: "wan"})
		s.nft(strings.Replace(dnatOut, "{ip} daddr", "oifname lan {ip} daddr", 1))
		s.udp(s.host, testnet.SocketOptions{Device: "lan"}, "{lan}", "{vip}", "{backend}")
	}},
	{"a socket whose mark chooses the way", 0, func(s *site) {
		s.rule(testnet.Rule{Priority: 50, Mark: 7, Table: 200})
		s.route(s.host, testnet.Route{Table: 200, Dst: s.prefix("{all}/0"), Via: s.at("{server}"), Dev: "lan"})
		s.nft(strings.Replace(dnatOut, "{ip} daddr", "oifname lan {ip} daddr", 1))
		s.udp(s.host, testnet.SocketOptions{Mark: 7}, "{lan}", "{vip}", "{backend}")
	}},
	{"an interface that is away for a moment", 0, func(s *site) {
		provider := s.dial()
		s.nft(dnatBy("ppp0"))
		f := s.udp(provider, ordinary, "{third2}", "{third}", "{backend}")
		must(s.t, s.host.SetDown("ppp0"))
		s.kept("it is down", f)
		must(s.t, s.host.DelLink("ppp0"))
		s.kept("it is gone", f)
		s.dial()
		s.kept("it is there again", f)
	}},
	{"an interface that is away, and something else leads to the client", 0, func(s *site) {
		provider := s.dial()
		s.nft(dnatBy("ppp0"))
		f := s.udp(provider, ordinary, "{third2}", "{wan}", "{backend}")
		must(s.t, s.host.DelLink("ppp0"))
		s.kept("by the default route", f)
		s.route(s.host, testnet.Route{Dst: s.network("{third}"), Dev: "lan"})
		s.kept("by another link", f)
	}},
	{"an interface that is away, what this host sends", 0, func(s *site) {
		s.dial()
		s.route(s.host, testnet.Route{Dst: s.lonely("{vip}"), Via: s.at("{third2}"), Dev: "ppp0"})
		s.nft(strings.Replace(dnatOut, "{ip} daddr", "oifname ppp0 {ip} daddr", 1))
		f := s.udp(s.host, ordinary, "{third}", "{vip}", "{backend}")
		must(s.t, s.host.DelLink("ppp0"))
		s.kept("it is gone", f)
		s.dial()
		s.kept("it is there again, and the route is not", f)
	}},
	{"an interface that has another number since", 0, func(s *site) {
		provider := s.dial()
		s.nft(strings.Replace(dnatIn, "udp", "iif ppp0 udp", 1))
		f := s.udp(provider, ordinary, "{third2}", "{third}", "{backend}")
		must(s.t, s.host.DelLink("ppp0"))
		s.kept("it is gone", f)
		s.dial()
		s.kept("it is there again", f)
	}},
	{"an interface that has another name since", 0, func(s *site) {
		provider := s.dial()
		s.nft(dnatBy("ppp0"))
		f := s.udp(provider, ordinary, "{third2}", "{third}", "{backend}")
		must(s.t, s.host.SetDown("ppp0"))
		must(s.t, s.host.Rename("ppp0", "ppp1"))
		must(s.t, s.host.SetUp("ppp1"))
		if s.v6 { // addresses went with the interface
			s.addr(s.host, "ppp1", "{third}")
		}
		s.kept("it has another name", f)
	}},
	{"an interface that became a bridge's port", 0, func(s *site) {
		provider := s.dial()
		s.nft(dnatBy("ppp0"))
		f := s.udp(provider, ordinary, "{third2}", "{third}", "{backend}")
		must(s.t, s.host.AddLink(testnet.Link{Name: "br0", Kind: "bridge"}))
		must(s.t, s.host.SetMaster("ppp0", "br0"))
		s.noAddr(s.host, "ppp0", "{third}")
		s.addr(s.host, "br0", "{third}")
		s.kept("it is a port", f)
	}},
	{"a default route that is another since", 0, func(s *site) {
		gateway := testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{client}"), Dev: "wan"}
		s.nft(dnatBy("wan"))
		f := s.farClient()
		must(s.t, s.host.DelRoute(gateway))
		s.kept("there is none", f)
		s.route(s.host, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{server}"), Dev: "lan"})
		s.kept("it leads elsewhere", f)
	}},
	{"a network that has moved to another interface", 0, func(s *site) {
		s.nft(dnatBy("wan"))
		f := s.farClient()
		s.route(s.host, testnet.Route{Dst: s.network("{services}"), Dev: "lan"})
		s.kept("a route leads elsewhere", f)
	}},

	{"a client of a VRF", 0, func(s *site) {
		s.vrf()
		// What a port gets meets the rules as the port's, and then as the VRF's.
		s.nft(strings.Replace(dnatIn, "udp", "iifname lan {ip} daddr {lan} udp", 1))
		s.udp(s.lan, ordinary, "{server}", "{lan}", "{backend}")
	}},

	// Whose an address is.
	{"a shared address that another host has now", 0, func(s *site) {
		s.addr(s.host, "wan", "{shared}")
		s.nft(dnatLocal)
		f := s.udp(s.client, ordinary, "{client}", "{shared}", "{backend}")
		s.noAddr(s.host, "wan", "{shared}")
		s.kept("the address is gone", f)
	}},
	{"a shared address that another host has now, by iptables", 0, func(s *site) {
		if _, err := exec.LookPath(s.say("{iptables}")); err != nil {
			s.t.Skip(err)
		}
		s.addr(s.host, "wan", "{shared}")
		s.run("", s.say("{iptables}"), "-t", "nat", "-A", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-p", "udp",
			"--dport", "53", "-j", "DNAT", "--to-destination", s.say("{backend}"))
		s.early = s.judge()
		f := s.udp(s.client, ordinary, "{client}", "{shared}", "{backend}")
		s.noAddr(s.host, "wan", "{shared}")
		s.kept("the address is gone", f)
	}},
	{"a backup's copy of the flows to a shared address", 0, func(s *site) {
		s.nft(dnatLocal)
		s.copyFlow(s.from("{client}"), s.to("{shared}"), s.to("{backend}"))
		f := s.flow(conntrack.UDP, s.from("{client}"), s.to("{shared}"), s.to("{backend}"))
		if f.Status&conntrack.StatusDstNAT == 0 {
			s.t.Fatalf("not as conntrackd makes it: %s", f)
		}
		s.kept("a backup", f)
		s.addr(s.host, "wan", "{shared}")
		s.kept("the master", f)
		s.noAddr(s.host, "wan", "{shared}")
		s.kept("a backup again", f)
	}},
	{"an address of a VRF", 0, func(s *site) {
		s.vrf()
		s.nft(strings.Replace(dnatLocal, "daddr type", "daddr . iif type", 1))
		s.udp(s.lan, ordinary, "{server}", "{lan}", "{backend}")
	}},
	{"an address that is this host's since", 0, func(s *site) {
		s.nft(strings.Replace(dnatLocal, "local", "!= local", 1))
		f := s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
		s.addr(s.host, "lan", "{vip}")
		s.kept("the address is there", f)
	}},
	{"an untranslated flow to an address that is this host's since", 0, func(s *site) {
		// What is sent there now is for the service: the flow is as stale as one from
		// before the rule.
		s.nft(dnatLocal)
		f := s.udp(s.client, ordinary, "{client}", "{server}", "")
		s.addr(s.host, "lan", "{server}")
		if v := s.judge().Judge(f); v.Verdict != Untranslated {
			s.t.Errorf("%s: %s", v.Verdict, v.Why)
		}
	}},
	{"a link-local address of another interface", 6, func(s *site) {
		other := nstest.New(s.t)
		s.link("dmz", other, "eth0")
		must(s.t, s.host.DelAddr("dmz", netip.MustParsePrefix("fe80::1/64")))
		must(s.t, s.host.AddAddr("dmz", netip.MustParsePrefix("fe80::9/64")))
		s.addr(other, "eth0", "{third2}")
		s.addr(s.host, "dmz", "{third}")
		i, err := s.host.Interface("dmz")
		must(s.t, err)
		raw, err := other.OpenLink("eth0", i.HardwareAddr)
		must(s.t, err)
		defer raw.Close()
		s.nft(dnatLocal)
		to := netip.AddrPortFrom(netip.MustParseAddr("fe80::1"), 53)
		must(s.t, raw.Send(conntrack.UDP, s.from("{third2}"), to))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{third2}"), to, netip.AddrPort{}))
	}},
	{"a local route in the main table", 0, func(s *site) {
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_MAIN, Dst: s.lonely("{vip}"), Dev: "lo"})
		s.nft(dnatLocal)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a longer prefix in the main table", 4, func(s *site) {
		// Without policy rules, local and main are one trie (fib_trie_unmerge).
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Dst: s.network("{services}"), Dev: "lo"})
		s.route(s.host, testnet.Route{Dst: s.lonely("{vip}"), Via: s.at("{server}"), Dev: "lan"})
		s.nft(dnatLocal)
		s.udp(s.client, ordinary, "{client}", "{vip}", "")
	}},
	{"a longer prefix in the main table, beside policy rules", 4, func(s *site) {
		s.rule(testnet.Rule{Priority: 50, Mark: 7, Table: 200})
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Dst: s.network("{services}"), Dev: "lo"})
		s.route(s.host, testnet.Route{Dst: s.lonely("{vip}"), Via: s.at("{server}"), Dev: "lan"})
		s.nft(dnatLocal)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a local route in a policy table", 6, func(s *site) {
		s.route(s.host, testnet.Route{Type: unix.RTN_LOCAL, Table: 100, Dst: s.lonely("{vip}"), Dev: "lo"})
		s.rule(testnet.Rule{Priority: 50, To: s.lonely("{vip}"), Table: 100})
		s.nft(dnatLocal)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"an address of another interface than the packet came by", 0, func(s *site) {
		s.nft(strings.Replace(dnatIn, "udp", "fib daddr . iif type local udp", 1))
		s.send(s.client, ordinary, s.from("{client}"), s.to("{lan}"))
		s.send(s.client, ordinary, s.from("{client}"), s.to("{wan}"))
		s.kept("the interface's", s.flow(conntrack.UDP, s.from("{client}"), s.to("{wan}"), s.to("{backend}")))
		for _, f := range s.all() {
			s.kept("another's", &f)
		}
	}},
	{"redirected to an address that is another since", 0, func(s *site) {
		s.nft("table {ip} nat { chain pre { type nat hook prerouting priority -100; {ip} daddr {vip} udp dport 53 redirect; }; }")
		f := s.udp(s.client, ordinary, "{client}", "{vip}", "{wan}")
		s.noAddr(s.host, "wan", "{wan}")
		s.kept("it is gone", f)
		s.addr(s.host, "wan", "{shared}")
		s.kept("there is another", f)
	}},
	{"an address that came while there are 40 000 routes", 4, func(s *site) {
		s.manyRoutes()
		s.nft(dnatLocal)
		s.addr(s.host, "wan", "{shared}")
		s.udp(s.client, ordinary, "{client}", "{shared}", "{backend}")
	}},
	{"a source that came while there are 40 000 routes", 4, func(s *site) {
		s.manyRoutes()
		s.nft(dnatOut)
		s.addr(s.host, "wan", "{shared}")
		s.udp(s.host, ordinary, "{shared}", "{vip}", "{backend}")
	}},
	{"an interface that came while there are 40 000 routes", 4, func(s *site) {
		s.manyRoutes()
		s.nft(dnatBy("ppp0"))
		s.udp(s.dial(), ordinary, "{third2}", "{third}", "{backend}")
	}},

	// What else makes flows as they are.
	{"a bridge that tracks connections", 0, func(s *site) {
		s.insert("nf_conntrack_bridge")
		beside := nstest.New(s.t)
		must(s.t, s.host.AddLink(testnet.Link{Name: "br1", Kind: "bridge"}))
		s.link("p1", s.client, "e1")
		s.link("p2", beside, "e1")
		must(s.t, s.host.SetMaster("p1", "br1"))
		must(s.t, s.host.SetMaster("p2", "br1"))
		if err := s.host.Sysctl(s.say("{bridge-nf}"), "0"); err != nil && !errors.Is(err, unix.ENOENT) {
			s.t.Fatal(err)
		}
		s.addr(s.client, "e1", "{third2}")
		s.addr(beside, "e1", "{third3}")
		s.run("table bridge firewall { chain f { type filter hook forward priority 0; ct state new accept; }; }", "nft", "-f", "-")
		s.nft(dnatIn)
		s.udp(s.client, ordinary, "{third2}", "{third3}", "")
	}},
	{"IPVS", 0, func(s *site) {
		s.insert("ip_vs")
		s.insert("ip_vs_rr")
		s.sysctl("net.ipv4.vs.conntrack", "1")
		s.ipvs(s.to("{wan}"), s.to("{backend}"))
		s.nft(strings.Replace(dnatIn, "udp", "{ip} daddr {vip} udp", 1))
		s.udp(s.client, ordinary, "{client}", "{wan}", "{backend}")
	}},
	{"a filter chain writes the address", 0, func(s *site) {
		s.nft(`table {ip} m { chain pre { type filter hook prerouting priority -150; {ip} daddr {vip} {ip} daddr set {vip2}; }; }
		table {ip} nat { chain pre { type nat hook prerouting priority -100; {ip} daddr {vip2} udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a filter chain writes another address", 0, func(s *site) {
		s.nft(`table inet m { chain pre { type filter hook prerouting priority -150; {ip} daddr {vip} {ip} daddr set {vip2}; }; }
		table {ip} nat { chain pre { type nat hook prerouting priority -100; {ip} daddr {vip} udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.client, ordinary, "{client}", "{vip}", "")
	}},
	{"a filter chain writes the port", 0, func(s *site) {
		s.nft(`table {ip} m { chain pre { type filter hook prerouting priority -150; udp dport 53 udp dport set 5353; }; }
		table {ip} nat { chain pre { type nat hook prerouting priority -100; udp dport 5353 dnat to {backend}; }; }`)
		s.send(s.client, ordinary, s.from("{client}"), s.to("{vip}"))
		s.kept("at once", s.flow(conntrack.UDP, s.from("{client}"), s.to("{vip}"), s.to("{backend}")))
	}},
	{"a filter chain that another jumps to writes the address", 0, func(s *site) {
		s.nft(`table {ip} m {
			chain change { {ip} daddr set {vip2}; }
			chain pre { type filter hook prerouting priority -101; {ip} daddr {vip} jump change; }
		}
		table {ip} nat { chain pre { type nat hook prerouting priority -100; {ip} daddr {vip2} udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a filter chain writes the source", 0, func(s *site) {
		s.nft(`table {ip} m { chain pre { type filter hook prerouting priority -150; udp dport 53 {ip} saddr {client} {ip} saddr set {far}; }; }
		table {ip} nat { chain pre { type nat hook prerouting priority -100; {ip} saddr {far} udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a chain of this host's own packets writes the address", 0, func(s *site) {
		s.nft(`table {ip} m { chain out { type route hook output priority -150; {ip} daddr {vip} {ip} daddr set {vip2}; }; }
		table {ip} nat { chain out { type nat hook output priority -100; {ip} daddr {vip2} udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.host, ordinary, "{wan}", "{vip}", "{backend}")
	}},
	{"a filter chain sets the mark", 0, func(s *site) {
		s.nft(`table {ip} m { chain pre { type filter hook prerouting priority -150; iifname wan meta mark set 7; }; }
		table {ip} nat { chain pre { type nat hook prerouting priority -100; meta mark 7 udp dport 53 dnat to {backend}; }; }`)
		s.udp(s.client, ordinary, "{client}", "{vip}", "{backend}")
	}},
	{"a set that packets add to, made without the rule that does", 0, func(s *site) {
		s.nft("table {ip} nat { set knocked { type {type}; timeout 1h; size 64; }; }")
		s.nft(`table {ip} nat {
			chain knock { type filter hook prerouting priority -150; udp dport 7 add @knocked { {ip} saddr }; }
			chain pre { type nat hook prerouting priority -100; {ip} saddr @knocked udp dport 53 dnat to {backend}; }
		}`)
		s.send(s.client, ordinary, s.from("{client}"), s.to("{vip}"))
		f := s.flow(conntrack.UDP, s.from("{client}"), s.to("{vip}"), netip.AddrPort{})
		s.kept("before it knocks", f)
		s.send(s.client, ordinary, s.from("{client}"), netip.AddrPortFrom(s.at("{vip}"), 7))
		s.kept("after it knocked", f)
		s.udp(s.client, ordinary, "{client}", "{vip2}", "{backend}")
	}},
}

// TestBeside judges right flows on hosts where what a packet met cannot be told from
// its addresses.
func TestBeside(t *testing.T) {
	nstest.Require(t)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("install nftables: ", err)
	}
	for _, c := range besideCases {
		for _, family := range []int{4, 6} {
			if c.only != 0 && c.only != family {
				continue
			}
			t.Run(fmt.Sprintf("%s, IPv%d", c.name, family), func(t *testing.T) { c.do(newSite(t, family == 6)) })
		}
	}
}

// dial makes a third link, as a dialler does, to a provider's namespace.
func (s *site) dial() *testnet.NS {
	s.t.Helper()
	provider := nstest.New(s.t)
	s.link("ppp0", provider, "ppp0")
	s.addr(s.host, "ppp0", "{third}")
	s.addr(provider, "ppp0", "{third2}")
	s.route(provider, testnet.Route{Dst: s.prefix("{all}/0"), Via: s.at("{third}"), Dev: "ppp0"})
	return provider
}

// behindBridge makes a bridge with an address and two ports, and returns the link
// behind the first, by which packets go to what is behind the other.
func (s *site) behindBridge() *testnet.Raw {
	s.t.Helper()
	beside := nstest.New(s.t)
	must(s.t, s.host.AddLink(testnet.Link{Name: "br1", Kind: "bridge"}))
	s.rpFilter("br1", "0")
	s.link("p1", s.client, "e1")
	s.link("p2", beside, "e1")
	must(s.t, s.host.SetMaster("p1", "br1"))
	must(s.t, s.host.SetMaster("p2", "br1"))
	s.addr(s.host, "br1", "{third}")
	i, err := beside.Interface("e1")
	must(s.t, err)
	raw, err := s.client.OpenLink("e1", i.HardwareAddr)
	must(s.t, err)
	s.t.Cleanup(raw.Close)
	return raw
}

// farClient is a flow of a client behind the gateway.
func (s *site) farClient() *conntrack.Flow {
	s.t.Helper()
	must(s.t, s.client.AddAddr("lo", s.lonely("{far}")))
	return s.udp(s.client, ordinary, "{far}", "{wan}", "{backend}")
}

// vrf puts the link to the LAN into a VRF, whose table has its routes from then on.
func (s *site) vrf() {
	s.t.Helper()
	err := s.host.AddLink(testnet.Link{Name: "blue", Kind: "vrf", Table: 10})
	if errors.Is(err, unix.EOPNOTSUPP) {
		s.t.Skip("this kernel has no VRF: ", err)
	}
	must(s.t, err)
	if s.v6 { // the link is taken down and up again
		s.sysctl("net.ipv6.conf.all.keep_addr_on_down", "1")
	}
	must(s.t, s.host.SetMaster("lan", "blue"))
}

// ipvlan sends from another namespace by an ipvlan, whose packets the host's
// namespace sends as its own (ipvlan_process_outbound).
func (s *site) ipvlan(mode uint16) {
	s.t.Helper()
	container := nstest.New(s.t)
	err := s.host.AddLink(testnet.Link{Name: "ipvl0", Kind: "ipvlan", Parent: "wan", Mode: mode, Into: container})
	if errors.Is(err, unix.EOPNOTSUPP) {
		s.t.Skip("this kernel has no ipvlan: ", err)
	}
	must(s.t, err)
	must(s.t, container.AddAddr("ipvl0", s.lonely("{shared}")))
	s.route(container, testnet.Route{Dst: s.prefix("{all}/0"), Dev: "ipvl0"})
	s.nft(dnatOut)
	s.udp(container, ordinary, "{shared}", "{vip}", "{backend}")
}

// insert inserts a module for as long as the test takes, from where the guests of
// test/kernels have them.
func (s *site) insert(name string) {
	s.t.Helper()
	loaded, err := os.ReadFile("/proc/modules")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.t.Fatal(err)
	}
	if strings.Contains("\n"+string(loaded), "\n"+name+" ") {
		return
	}
	f, err := os.Open(filepath.Join(os.Getenv("FLOWSWEEP_MODULES"), name+".ko"))
	if err != nil {
		s.t.Skipf("the module %s is not there: %v", name, err)
	}
	defer f.Close()
	must(s.t, unix.FinitModule(int(f.Fd()), "", 0))
	s.t.Cleanup(func() {
		s.run("flush ruleset", "nft", "-f", "-")
		// What used it is freed a moment later.
		for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			err := unix.DeleteModule(name, unix.O_NONBLOCK)
			if err == nil || time.Since(start) > 10*time.Second {
				must(s.t, err)
				return
			}
		}
	})
}

func (s *site) all() (list []conntrack.Flow) {
	s.t.Helper()
	for f, err := range s.flows.Dump(context.Background(), conntrack.Filter{}) {
		must(s.t, err)
		list = append(list, *f)
	}
	return list
}

// manyRoutes makes the reading of routes slow. Where it is slow to add them, fewer
// are enough.
func (s *site) manyRoutes() {
	s.t.Helper()
	start := time.Now()
	for i := 0; i < 40_000 && time.Since(start) < 3*time.Second; i++ {
		a := netip.AddrFrom4([4]byte{10, 64 + byte(i>>16), byte(i >> 8), byte(i)})
		s.route(s.host, testnet.Route{Dst: netip.PrefixFrom(a, 32), Via: s.at("{client}"), Dev: "wan"})
	}
}

// copyFlow creates a flow as conntrackd does, with the bits of its translation.
func (s *site) copyFlow(from, to, goes netip.AddrPort) {
	s.t.Helper()
	const ( // enum ctattr_type and below
		ctaStatus, ctaTimeout, ctaNatDst       = 3, 7, 13
		ctaNatV4Min, ctaNatV6Min, ctaNatProto  = 1, 4, 3
		ctaProtoNatPortMin, ctaProtoNatPortMax = 1, 2
	)
	nested := uint16(unix.NLA_F_NESTED)
	port := func(typ uint16, p uint16) []byte { return nla(typ, []byte{byte(p >> 8), byte(p)}) }
	tuple := func(typ uint16, a, b netip.AddrPort) []byte {
		src, dst := uint16(1), uint16(2)
		if s.v6 {
			src, dst = 3, 4
		}
		return nla(typ|nested, nla(1|nested, nla(src, a.Addr().AsSlice()), nla(dst, b.Addr().AsSlice())),
			nla(2|nested, nla(1, []byte{conntrack.UDP}), port(2, a.Port()), port(3, b.Port())))
	}
	natAddr := uint16(ctaNatV4Min)
	if s.v6 {
		natAddr = ctaNatV6Min
	}
	family := byte(unix.AF_INET)
	if s.v6 {
		family = unix.AF_INET6
	}
	const confirmed, seenReply = 1 << 3, 1 << 1
	body := join([]byte{family, 0, 0, 0}, tuple(1, from, to), tuple(2, to, from),
		num(ctaStatus, confirmed|seenReply), num(ctaTimeout, 600),
		nla(ctaNatDst|nested, nla(natAddr, goes.Addr().AsSlice()),
			nla(ctaNatProto|nested, port(ctaProtoNatPortMin, goes.Port()), port(ctaProtoNatPortMax, goes.Port()))))
	const ctNew = unix.NFNL_SUBSYS_CTNETLINK << 8
	must(s.t, s.host.Do(func() error {
		return netfilter([]netlinkRequest{{ctNew, unix.NLM_F_CREATE | unix.NLM_F_EXCL | unix.NLM_F_ACK, body}})
	}))
}

// synproxy connects through a SYNPROXY, which keeps the client's handshake from
// connection tracking and sends one of its own, with the client's address, to where
// the client wanted to: the flow meets the rules of the hook output alone.
func (s *site) synproxy(chain, goes string) {
	s.t.Helper()
	s.sysctl("net.netfilter.nf_conntrack_tcp_loose", "0")
	s.run(s.say(`table {ip} syn {
		chain raw { type filter hook prerouting priority -300; iifname wan tcp dport 80 tcp flags syn notrack; }
		chain f { type filter hook forward priority 0; iifname wan tcp dport 80 ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm; }
	}`), "nft", "-f", "-")
	hook := map[string]string{"pre": "prerouting", "out": "output"}[chain]
	s.nft("table {ip} nat { chain c { type nat hook " + hook + " priority -100; {ip} daddr {server} tcp dport 80 dnat to {backend}; }; }")
	from, to := netip.AddrPortFrom(s.at("{client}"), 40000), netip.AddrPortFrom(s.at("{server}"), 80)
	for _, a := range []string{"{server}", "{backend}"} {
		listenTCP(s.t, s.lan, netip.AddrPortFrom(s.at(a), 80))
	}
	var end netip.AddrPort
	if goes != "" {
		end = netip.AddrPortFrom(s.at(goes), 80)
	}
	conn := dialTCP(s.t, s.client, from, to)
	defer conn.Close()
	s.kept("at once", s.flow(conntrack.TCP, from, to, end))
}
