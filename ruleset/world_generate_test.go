//go:build linux

package ruleset

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
)

// The networks of a world: 10.NUMBER.0.0/24 and 2001:db8:NUMBER::/64. Those of
// links are 1 to 9.
const (
	vips      = 90 // that rules translate, somewhere behind the default route
	backends  = 91
	others    = 92 // backends that take the place of these
	distant   = 93 // clients behind a gateway
	anyIP     = 94 // local by a route of the table local
	byPolicy  = 95 // local by a route of another table
	gateway   = 254
	broadcast = 255
	policy    = 100 // a routing table
)

// hostAddr returns a host of a network of the round's family.
func (w *world) hostAddr(network, n int) netip.Addr { return hostOf(w.v6, network, n) }

func hostOf(v6 bool, network, n int) netip.Addr {
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::%d", network, n))
	}
	return netip.AddrFrom4([4]byte{10, byte(network), 0, byte(n)})
}

// netOf returns a network of a family.
func netOf(v6 bool, network int) netip.Prefix {
	p, _ := hostOf(v6, network, 0).Prefix(lenOf(v6))
	return p
}

func lenOf(v6 bool) int {
	if v6 {
		return 64
	}
	return 24
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func everywhere(v6 bool) netip.Prefix {
	if v6 {
		return netip.MustParsePrefix("::/0")
	}
	return netip.MustParsePrefix("0.0.0.0/0")
}

// A link's addresses are 1 and, for a while, some of the secondaries.
var secondaries = []int{7, 8, 9}

// link is one of the host's interfaces.
type worldLink struct {
	name    string
	network int
	there   bool
	bare    bool // it never has addresses
	strict  bool // its rp_filter is
	made    int  // how often it was
	addrs   []netip.Prefix
}

// The interfaces that a world may have. What comes in by tun0 has no route back.
var linkNames = []string{"wan", "lan", "dmz", "ppp0", "tun0"}

func (w *world) oneLink() *worldLink { return w.links[w.IntN(len(w.links))] }

// ifname is the name of some interface, as rules have it.
func (w *world) ifname() string {
	names := append([]string{"lo", "gone0"}, linkNames...)
	if w.bridge {
		names = append(names, "br0", "p1")
	}
	if w.loop {
		names = append(names, "a0", "a1")
	}
	if w.macvlan {
		names = append(names, "mv0")
	}
	return w.pick(names...)
}

// dst is where packets are sent, and what rules name.
func (w *world) dst() netip.Addr {
	switch n := w.IntN(100); {
	case n < 42:
		return w.hostAddr(vips, 1+w.IntN(2))
	case n < 62:
		return w.hostAddr(w.oneLink().network, 1)
	case n < 74:
		return w.hostAddr(w.oneLink().network, secondaries[w.IntN(len(secondaries))])
	case n < 82:
		return w.hostAddr(anyIP, 1+w.IntN(2))
	case n < 88:
		return w.hostAddr(byPolicy, 1+w.IntN(2))
	case n < 93:
		return w.hostAddr(w.oneLink().network, 2+w.IntN(2))
	case n < 96:
		return w.hostAddr(backends, 1+w.IntN(9))
	case n < 98:
		if w.v6 {
			return netip.MustParseAddr("ff02::123")
		}
		return w.hostAddr(w.oneLink().network, broadcast)
	}
	if w.v6 {
		return netip.MustParseAddr("fe80::1")
	}
	return netip.MustParseAddr(w.pick("224.0.0.123", "255.255.255.255"))
}

// src is where packets that come in by a link are said to be from.
func (w *world) src(l *worldLink) netip.Addr {
	switch n := w.IntN(100); {
	case n < 40:
		return w.hostAddr(l.network, 2+w.IntN(3))
	case n < 55:
		return w.hostAddr(w.oneLink().network, 2+w.IntN(3))
	case n < 72:
		return w.hostAddr(distant, 1+w.IntN(5))
	case n < 80:
		return w.hostAddr(w.oneLink().network, 1)
	case n < 88:
		return w.hostAddr(w.oneLink().network, secondaries[w.IntN(len(secondaries))])
	case n < 94:
		return w.hostAddr(anyIP, 1+w.IntN(3))
	}
	return w.hostAddr(byPolicy, 1+w.IntN(3))
}

func (w *world) backend() string { return w.hostAddr(backends, 1+w.IntN(9)).String() }

// route returns a random route.
func (w *world) route(v6 bool) testnet.Route {
	l := w.oneLink()
	to := testnet.Route{Dst: everywhere(v6), Via: hostOf(v6, l.network, gateway), Dev: l.name}
	if l.bare {
		to.Via = netip.Addr{}
	}
	switch w.IntN(12) {
	case 0, 1, 2:
		// a default route
	case 3:
		to.Dst = netOf(v6, vips)
	case 4:
		to.Dst = netOf(v6, distant)
	case 5:
		to.Dst = single(hostOf(v6, w.IntN(2)+anyIP, 1+w.IntN(2))) // longer than AnyIP's
	case 6:
		to.Dst = netOf(v6, backends)
	case 7: // a client's way is not what its address says
		to.Dst = single(hostOf(v6, w.oneLink().network, 2+w.IntN(3)))
	case 8:
		return testnet.Route{
			Type: [...]uint8{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT, unix.RTN_THROW}[w.IntN(4)],
			Dst:  single(hostOf(v6, []int{vips, distant, backends}[w.IntN(3)], 1+w.IntN(4))),
		}
	case 9:
		return testnet.Route{Type: unix.RTN_LOCAL, Dst: netOf(v6, anyIP), Dev: "lo"}
	case 10:
		return testnet.Route{
			Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_MAIN,
			Dst: single(hostOf(v6, []int{vips, distant, anyIP}[w.IntN(3)], 1+w.IntN(3))), Dev: "lo",
		}
	case 11:
		to = testnet.Route{Type: unix.RTN_LOCAL, Dst: netOf(v6, byPolicy), Dev: "lo", Table: policy}
	}
	if to.Type == 0 && w.chance(30) {
		to.Table = policy
	}
	return to
}

// policyRule returns a random policy rule that leads to the table policy.
func (w *world) policyRule(v6 bool) testnet.Rule {
	r := testnet.Rule{V6: v6, Priority: uint32(10 + w.IntN(1000)), Table: policy}
	switch w.IntN(6) {
	case 0, 1:
		r.Mark = 7
	case 2:
		r.From = netOf(v6, []int{distant, w.oneLink().network, byPolicy}[w.IntN(3)])
	case 3:
		r.To = netOf(v6, []int{byPolicy, vips, distant}[w.IntN(3)])
	case 4:
		r.In = w.pick("lo", w.oneLink().name, w.oneLink().name)
	case 5:
		r.Out = w.oneLink().name
	}
	return r
}

// worldRules writes the rules of a round, which ask what the host decides.
type worldRules struct {
	*world
	chains int
	sets   bool // the sets may be used
}

func (w *world) rules() (list []string) {
	r := &worldRules{world: w, chains: w.IntN(4)}
	if w.chance(45) {
		list = append(list, r.marks())
	}
	if w.chance(15) {
		list = append(list, r.writer())
	}
	if w.chance(15) {
		list = append(list, r.knock()...)
	}
	if w.chance(20) {
		list = append(list, fmt.Sprintf("table %s raw {\n\tchain out { type filter hook output priority -300;\n\t\t%s notrack\n\t}\n}\n",
			w.family(), r.match("output")))
	}
	for i := range 1 + w.IntN(2) {
		list = append(list, r.table(fmt.Sprintf("w%d", i)))
	}
	return list
}

func (r *worldRules) table(name string) string {
	family := r.family()
	if r.chance(30) {
		family = "inet"
	}
	addr := map[bool]string{false: "ipv4_addr", true: "ipv6_addr"}[r.v6]
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n", family, name)
	some := func(f func() string) string { return strings.Join(distinct(3, f), ", ") }
	dst := func() string { return r.dst().String() }
	port := func() string { return fmt.Sprint(r.port()) }
	fmt.Fprintf(&b, "\tset addrs { type %s; elements = { %s } }\n", addr, some(dst))
	fmt.Fprintf(&b, "\tset links { type ifname; elements = { %s } }\n", some(r.ifname))
	fmt.Fprintf(&b, "\tset both { type ifname . %s; elements = { %s } }\n", addr,
		some(func() string { return r.ifname() + " . " + dst() }))
	fmt.Fprintf(&b, "\tmap to { type inet_service : %s; elements = { %s } }\n", addr,
		mapOf(distinct(4, port), func(string) string { return r.backend() }))
	for i := r.chains - 1; i >= 0; i-- {
		fmt.Fprintf(&b, "\tchain c%d {\n", i)
		for range 1 + r.IntN(3) {
			fmt.Fprintf(&b, "\t\t%s\n", r.rule(r.pick("prerouting", "output"), i+1))
		}
		b.WriteString("\t}\n")
	}
	r.sets = true
	for _, hook := range []string{"prerouting", "output"} {
		if r.chance(20) {
			continue // a plain router's, or that of a host that serves nobody
		}
		fmt.Fprintf(&b, "\tchain %s { type nat hook %s priority %s;\n", hook, hook, r.pick("-100", "-100", "0"))
		if r.chance(15) && hook == "prerouting" && r.chains > 0 {
			fmt.Fprintf(&b, "\t\tiifname vmap { %s }\n", mapOf(distinct(2, r.ifname), func(string) string {
				return r.pick("jump", "goto") + " c0"
			}))
		}
		for range 2 + r.IntN(5) {
			fmt.Fprintf(&b, "\t\t%s\n", r.rule(hook, 0))
		}
		b.WriteString("\t}\n")
	}
	r.sets = false
	b.WriteString("}\n")
	return b.String()
}

func (r *worldRules) rule(hook string, chain int) string {
	var parts []string
	parts = append(parts, r.match(hook))
	if r.chance(35) {
		parts = append(parts, r.match(hook))
	}
	if r.chance(30) {
		parts = append(parts, fmt.Sprintf("th dport %s%s", r.pick("", "", "!= "), r.ports()))
	}
	if r.chance(10) {
		parts = append(parts, "counter")
	}
	return strings.Join(append(parts, r.action(chain)), " ")
}

// match is what the host decides, or depends on what it was sent.
func (r *worldRules) match(hook string) string {
	ip := r.family()
	not := r.pick("", "", "", "!= ")
	kind := r.pick("local", "local", "local", "unicast", "broadcast", "multicast")
	in := hook == "prerouting"
	switch n := r.IntN(30); {
	case n < 5:
		return fmt.Sprintf("%s %s%q", map[bool]string{true: "iifname", false: "oifname"}[in], not, r.ifname())
	case n == 5:
		return fmt.Sprintf("%s %s%q", map[bool]string{true: "iifname", false: "oifname"}[in], not, r.pick("w*", "l*", "p*", "t*"))
	case n == 6:
		return fmt.Sprintf("%s %s%s", map[bool]string{true: "iif", false: "oif"}[in], not, r.pick("lo", r.oneLink().name))
	case n == 7 && r.sets:
		return fmt.Sprintf("%s %s@links", map[bool]string{true: "iifname", false: "oifname"}[in], not)
	case n == 8 && r.sets:
		return fmt.Sprintf("%s . %s daddr @both", map[bool]string{true: "iifname", false: "oifname"}[in], ip)
	case n == 9:
		return fmt.Sprintf("iifname %s%q", not, r.ifname()) // also where there is none
	case n < 14:
		return fmt.Sprintf("fib daddr type %s%s", not, kind)
	case n < 16:
		return fmt.Sprintf("fib saddr type %s%s", not, kind)
	case n == 16:
		return fmt.Sprintf("fib daddr . %s type %s%s", map[bool]string{true: "iif", false: "oif"}[in], not, kind)
	case n == 17 && in:
		return r.pick("fib saddr . iif oif missing", "fib saddr . iif oif exists", fmt.Sprintf("fib saddr oifname %q", r.ifname()))
	case n == 18:
		return "fib daddr . mark type " + kind
	case n < 21:
		return r.pick("meta mark 7", "meta mark 1", "meta mark != 7", "ct mark 3", "meta mark 0")
	case n == 21:
		if in {
			return r.pick("meta pkttype host", "meta iifgroup 0", "meta iiftype ether", "meta iiftype loopback")
		}
		return r.pick("meta skuid 0", "meta oiftype ether", "meta oifgroup 0", fmt.Sprintf("rt nexthop %s", r.hostAddr(1, gateway)))
	case n == 22:
		return fmt.Sprintf("%s saddr %s%s", ip, not, r.src(r.oneLink()))
	case n == 23:
		return fmt.Sprintf("%s saddr %s%s", ip, not, netOf(r.v6, r.pickNet()))
	case n == 24 && r.sets:
		return fmt.Sprintf("%s daddr %s@addrs", ip, not)
	case n == 25:
		return fmt.Sprintf("%s daddr %s%s", ip, not, netOf(r.v6, r.pickNet()))
	}
	return fmt.Sprintf("%s daddr %s%s", ip, not, r.dst())
}

func (r *worldRules) pickNet() int {
	return []int{vips, anyIP, byPolicy, distant, r.oneLink().network, r.oneLink().network}[r.IntN(6)]
}

func (r *worldRules) action(chain int) string {
	ip := r.family()
	switch n := r.IntN(20); {
	case n < 8:
		return fmt.Sprintf("dnat %s to %s", ip, r.backend())
	case n < 10:
		return fmt.Sprintf("meta l4proto { tcp, udp } dnat %s to %s:%d", ip, r.bracketed(r.backend()), r.port())
	case n == 10:
		return fmt.Sprintf("dnat %s to %s-%s", ip, r.hostAddr(backends, 2), r.hostAddr(backends, 4))
	case n == 11 && r.sets:
		return fmt.Sprintf("dnat %s to th dport map @to", ip)
	case n < 14:
		return "redirect"
	case n == 14:
		return fmt.Sprintf("meta l4proto { tcp, udp } redirect to :%d", r.port())
	case n < 18 && chain < r.chains:
		return fmt.Sprintf("%s c%d", r.pick("jump", "jump", "goto"), chain+r.IntN(r.chains-chain))
	case n == 18:
		return r.pick("accept", "return", "meta mark set 7 continue")
	}
	return fmt.Sprintf("dnat %s to %s", ip, r.backend())
}

// marks is a table that marks packets before they are translated.
func (r *worldRules) marks() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet marks {\n")
	for _, hook := range []string{"prerouting", "output"} {
		kind := map[string]string{"prerouting": "filter", "output": "route"}[hook]
		fmt.Fprintf(&b, "\tchain %s { type %s hook %s priority -150;\n", hook, kind, hook)
		for range 1 + r.IntN(2) {
			fmt.Fprintf(&b, "\t\t%s %s\n", r.match(hook), r.pick("meta mark set 7", "meta mark set 1", "ct mark set 3", "meta mark set 7"))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// writer is a table that writes packets before they are translated.
func (r *worldRules) writer() string {
	ip := r.family()
	hook := r.pick("prerouting", "prerouting", "output")
	kind := map[string]string{"prerouting": "filter", "output": "route"}[hook]
	what := r.pick(fmt.Sprintf("%s daddr set %s", ip, r.dst()), fmt.Sprintf("udp dport set %d", r.port()),
		fmt.Sprintf("%s saddr set %s", ip, r.src(r.oneLink())))
	return fmt.Sprintf("table %s writer {\n\tchain c { type %s hook %s priority %s;\n\t\tmeta l4proto udp %s %s\n\t}\n}\n",
		r.pick("inet", ip), kind, hook, r.pick("-150", "-101", "-199"), r.match(hook), what)
}

// knock are a set and then, by themselves, rules that add to it.
func (r *worldRules) knock() []string {
	ip := r.family()
	addr := map[bool]string{false: "ipv4_addr", true: "ipv6_addr"}[r.v6]
	return []string{
		fmt.Sprintf("table %s knock {\n\tset knocked { type %s; timeout 1h; size 256; }\n}\n", ip, addr),
		fmt.Sprintf("table %s knock {\n\tchain k { type filter hook prerouting priority -150;\n\t\tudp dport %d add @knocked { %s saddr }\n\t}\n"+
			"\tchain pre { type nat hook prerouting priority -100;\n\t\t%s saddr @knocked th dport %s dnat to %s\n\t}\n}\n",
			ip, r.port(), ip, ip, r.ports(), r.backend()),
	}
}

// plainRules are rules that ask nothing of the host: what is translated, and to
// what, by destination.
type plainRules map[netip.AddrPort]netip.AddrPort

func (w *world) plain() plainRules {
	p := plainRules{}
	for range 12 {
		p[netip.AddrPortFrom(w.dst(), uint16(w.port()))] = netip.AddrPortFrom(w.hostAddr(backends, 1+w.IntN(9)), uint16(w.port()))
	}
	return p
}

// changed returns the rules after a change: some are gone, some have another
// backend, some are new.
func (p plainRules) changed(w *world) plainRules {
	next := plainRules{}
	for _, dst := range p.inOrder() {
		switch w.IntN(3) {
		case 0:
		case 1:
			next[dst] = netip.AddrPortFrom(w.hostAddr(others, 1+w.IntN(9)), uint16(w.port()))
		default:
			next[dst] = p[dst]
		}
	}
	for range 6 {
		if dst := netip.AddrPortFrom(w.dst(), uint16(w.port())); !p[dst].IsValid() {
			next[dst] = netip.AddrPortFrom(w.hostAddr(others, 1+w.IntN(9)), dst.Port())
		}
	}
	return next
}

func (p plainRules) inOrder() []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(p), netip.AddrPort.Compare)
}

// text writes the rules so that both hooks meet them.
func (p plainRules) text(v6 bool) string {
	ip := map[bool]string{false: "ip", true: "ip6"}[v6]
	var b strings.Builder
	fmt.Fprintf(&b, "table %s plain {\n\tchain both {\n", ip)
	for _, dst := range p.inOrder() {
		fmt.Fprintf(&b, "\t\t%s daddr %s meta l4proto { tcp, udp } th dport %d dnat to %s\n", ip, dst.Addr(), dst.Port(), p[dst])
	}
	b.WriteString("\t}\n")
	for _, hook := range []string{"prerouting", "output"} {
		fmt.Fprintf(&b, "\tchain %s { type nat hook %s priority -100;\n\t\tjump both\n\t}\n", hook, hook)
	}
	b.WriteString("}\n")
	return b.String()
}

// stale tells what the rules make of a flow that others have made.
func (p plainRules) stale(f *conntrack.Flow) Verdict {
	to, ok := p[netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)]
	got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	switch {
	case got == to:
		return Right
	case !f.Translated() && !ok:
		return Plain
	case !f.Translated():
		return Untranslated
	case !ok:
		return FrontendGone
	}
	return BackendGone
}
