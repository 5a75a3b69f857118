//go:build linux

package ruleset

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// generator writes random rulesets of the grammar that is understood, in which
// the few addresses and ports that the test uses occur again and again.
type generator struct {
	*rand.Rand
	v6 bool
}

func (g *generator) pick(list ...string) string { return list[g.IntN(len(list))] }

func (g *generator) chance(percent int) bool { return g.IntN(100) < percent }

func (g *generator) family() string {
	if g.v6 {
		return "ip6"
	}
	return "ip"
}

// The addresses of the test: of services, of this host, of clients, of backends.
func (g *generator) service() string {
	if g.v6 {
		return fmt.Sprintf("2001:db8:5::%d", 1+g.IntN(4))
	}
	return fmt.Sprintf("203.0.113.%d", 1+g.IntN(4))
}

func (g *generator) own() string {
	if g.v6 {
		return g.pick("2001:db8:1::1", "2001:db8:2::1", "2001:db8:1::9")
	}
	return g.pick("10.1.0.1", "10.2.0.1", "10.1.0.9")
}

func (g *generator) dst() string {
	if g.chance(30) {
		return g.own()
	}
	return g.service()
}

func (g *generator) client() string {
	if g.v6 {
		return g.pick("2001:db8:1::2", "2001:db8:1::3", "2001:db8:2::2", g.own())
	}
	return g.pick("10.1.0.2", "10.1.0.3", "10.2.0.2", g.own())
}

func (g *generator) backend() string {
	if g.v6 {
		return fmt.Sprintf("2001:db8:b::%d", 1+g.IntN(9))
	}
	return fmt.Sprintf("198.51.100.%d", 1+g.IntN(9))
}

func (g *generator) backends() (low, high string) {
	n := 1 + g.IntN(5)
	if g.v6 {
		return fmt.Sprintf("2001:db8:b::%d", n), fmt.Sprintf("2001:db8:b::%d", n+g.IntN(4))
	}
	return fmt.Sprintf("198.51.100.%d", n), fmt.Sprintf("198.51.100.%d", n+g.IntN(4))
}

func (g *generator) prefix(of string) string {
	if g.v6 {
		return of[:strings.LastIndex(of, ":")] + ":/" + g.pick("64", "126", "125")
	}
	return of[:strings.LastIndex(of, ".")] + ".0/" + g.pick("24", "29", "30", "16")
}

// Ports from 50 to 59 are sent to.
func (g *generator) port() int { return 50 + g.IntN(10) }

func (g *generator) ports() string {
	if g.chance(50) {
		return fmt.Sprint(g.port())
	}
	low := g.port()
	return fmt.Sprintf("%d-%d", low, low+1+g.IntN(5))
}

// distinct returns n different values of f, or fewer.
func distinct[T comparable](n int, f func() T) []T {
	var list []T
	seen := map[T]bool{}
	for range 4 * n {
		if v := f(); !seen[v] && len(list) < n {
			seen[v] = true
			list = append(list, v)
		}
	}
	return list
}

// bracketed addresses are written with a port.
func (g *generator) bracketed(a string) string {
	if g.v6 {
		return "[" + a + "]"
	}
	return a
}

// nft writes a table.
func (g *generator) nft(name string) string {
	family := g.family()
	inet := g.chance(30)
	if inet {
		family = "inet"
	}
	t := &nftTable{generator: g, inet: inet, chains: g.IntN(6)}
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n", family, name)
	addr := map[bool]string{false: "ipv4_addr", true: "ipv6_addr"}[g.v6]

	fmt.Fprintf(&b, "\tset addrs { type %s; %s elements = { %s } }\n", addr, g.pick("", "timeout 1h;", "counter;"),
		strings.Join(distinct(3, g.dst), ", "))
	fmt.Fprintf(&b, "\tset ports { type inet_service; flags interval; elements = { %s } }\n", t.portSet())
	fmt.Fprintf(&b, "\tset pairs { type %s . inet_service; flags interval; elements = { %s . %s } }\n", addr,
		g.prefix(g.service()), g.ports())
	fmt.Fprintf(&b, "\tset learned { type %s; flags dynamic,timeout; timeout 1h; size 16; }\n", addr)
	fmt.Fprintf(&b, "\tmap backends { type inet_service : %s . inet_service; elements = { %s } }\n", addr,
		mapOf(distinct(3, g.port), func(string) string { return fmt.Sprintf("%s . %d", g.backend(), g.port()) }))
	fmt.Fprintf(&b, "\tcounter seen { }\n")
	for i := t.chains - 1; i >= 0; i-- { // those that are jumped to come first
		fmt.Fprintf(&b, "\tchain c%d {\n", i)
		t.rules(&b, i+1, 1+g.IntN(4))
		b.WriteString("\t}\n")
	}
	fmt.Fprintf(&b, "\tmap services { type %s . inet_proto . inet_service : verdict; elements = { %s } }\n", addr,
		mapOf(distinct(4, func() string {
			return fmt.Sprintf("%s . %s . %d", g.dst(), g.pick("udp", "tcp", "udp"), g.port())
		}), func(string) string { return t.target(0) }))
	t.named = true
	for _, hook := range []string{"prerouting", "output"} {
		for i := range 1 + g.IntN(2) {
			fmt.Fprintf(&b, "\tchain %s%d { type nat hook %s priority %s; policy %s;\n", hook, i, hook,
				g.pick("-100", "-100", "-90", "0", "-110"), g.pick("accept", "accept", "accept", "accept", "drop"))
			t.rules(&b, 0, 1+g.IntN(5))
			b.WriteString("\t}\n")
		}
	}
	b.WriteString("}\n")
	return b.String()
}

type nftTable struct {
	*generator
	inet   bool
	named  bool // the map "services" may be used, which comes behind the chains
	chains int
}

func (t *nftTable) rules(b *strings.Builder, from, n int) {
	for range n {
		var parts []string
		if t.inet { // else a rule may be meant for the other family
			parts = append(parts, t.pick("meta nfproto "+map[bool]string{false: "ipv4", true: "ipv6"}[t.v6], ""))
		}
		for range t.IntN(4) {
			parts = append(parts, t.match())
		}
		parts = append(parts, t.statement(), t.action(from))
		fmt.Fprintf(b, "\t\t%s\n", strings.Join(parts, " "))
	}
}

func (t *nftTable) portSet() string {
	low := t.port()
	return fmt.Sprintf("%d, %d-%d", low, low+2, low+3+t.IntN(3))
}

func (t *nftTable) match() string {
	ip := t.family()
	not := t.pick("", "", "", "!= ")
	switch t.IntN(34) {
	case 0, 1, 2:
		return fmt.Sprintf("%s daddr %s%s", ip, not, t.dst())
	case 3:
		return fmt.Sprintf("%s daddr %s{ %s }", ip, not, strings.Join(distinct(2, t.dst), ", "))
	case 4:
		return fmt.Sprintf("%s daddr %s%s", ip, not, t.prefix(t.service()))
	case 5:
		return fmt.Sprintf("%s saddr %s%s", ip, not, t.client())
	case 6:
		return fmt.Sprintf("%s saddr %s%s", ip, not, t.prefix(t.client()))
	case 7, 8, 9:
		return fmt.Sprintf("udp dport %s%s", not, t.ports())
	case 10:
		return fmt.Sprintf("udp dport %s{ %s }", not, t.portSet())
	case 11:
		return fmt.Sprintf("th dport %s %d", t.pick(">=", "<", ">", "<="), t.port())
	case 12:
		return "udp dport @ports"
	case 13:
		return fmt.Sprintf("udp sport %s", t.pick("40000-40001", "40002", "!= 40000", "{ 40001, 40002 }"))
	case 14:
		return fmt.Sprintf("iifname %s%s", not, t.pick(`"r0"`, `"r1"`, `"r*"`, `"lo"`, `{ "r0", "lo" }`))
	case 15:
		return fmt.Sprintf("oifname %s%s", not, t.pick(`"r0"`, `"s0"`, `"s*"`, `"lo"`))
	case 16, 17:
		return fmt.Sprintf("fib daddr type %slocal", not)
	case 18:
		return fmt.Sprintf("fib saddr type %slocal", not)
	case 19:
		return t.pick("ct state new", "ct state established,related", "ct direction original", "ct status dnat",
			"ct mark 0", fmt.Sprintf("ct original %s daddr %s", ip, t.dst()), "ct original proto-dst "+fmt.Sprint(t.port()))
	case 20:
		return t.pick("meta mark 1", "meta mark and 1 == 1", "meta mark set 1", "meta mark and 0 == 0", "meta mark { 1, 2 }",
			"meta mark != 2", "ct mark 1", "ct mark and 2 == 2", "ct mark 1 meta mark 1")
	case 21:
		return t.pick("numgen inc mod 3 == 0", "numgen random mod 2 == 0", "numgen inc mod 2 < 1", "symhash mod 2 == 0",
			fmt.Sprintf("jhash %s saddr mod 2 == 0", ip))
	case 22:
		return t.pick("limit rate 1/hour burst 1 packets", "limit rate over 1/second", "quota over 10 bytes")
	case 23:
		return fmt.Sprintf("%s daddr . udp dport { %s . %d, %s . %d }", ip, t.service(), 50+t.IntN(5), t.own(), 55+t.IntN(5))
	case 24:
		return fmt.Sprintf("%s daddr . udp dport @pairs", ip)
	case 25:
		return fmt.Sprintf("%s daddr %s@addrs", ip, not)
	case 26:
		return t.pick("meta l4proto udp", "meta l4proto { tcp, udp }", "meta l4proto != udp")
	case 27:
		if t.v6 {
			return "ip6 nexthdr udp"
		}
		return t.pick("ip protocol udp", "ip saddr and 0.0.0.3 == 0.0.0.2", "ip daddr and 255.255.255.1 == 203.0.113.1",
			"ip dscp 0", "ip ttl > 10", "ip version 4")
	case 28:
		return t.pick("meta skuid 0", "meta pkttype host", "meta length > 20", "meta iif lo", "meta cpu 0", "rt classid 0")
	case 29:
		return fmt.Sprintf("%s saddr @learned", ip)
	case 30:
		return t.pick("update", "update", "delete") + fmt.Sprintf(" @learned { %s saddr }", ip)
	case 31:
		return fmt.Sprintf("meta l4proto . th dport { udp . %d, tcp . %d, udp . %d-%d }", 50+t.IntN(3), t.port(), 54, 54+t.IntN(5))
	case 32:
		return fmt.Sprintf("%s saddr . %s daddr %s{ %s . %s }", ip, ip, not, t.client(), t.dst())
	}
	return fmt.Sprintf("%s daddr %s-%s udp dport %d", ip, t.low(), t.high(), t.port())
}

func (t *nftTable) low() string {
	return map[bool]string{false: "203.0.113.1", true: "2001:db8:5::1"}[t.v6]
}

func (t *nftTable) high() string {
	return map[bool]string{false: "203.0.113.2", true: "2001:db8:5::2"}[t.v6]
}

func (t *nftTable) statement() string {
	return t.pick("", "", "", "counter", "counter name seen", "meta mark set 0x4000", "meta mark set 1", "meta mark set 2",
		"meta mark set meta mark and 0xfffffff0", "meta mark set meta mark or 1", "meta mark set ct mark", "ct mark set meta mark",
		"ct mark set 1", fmt.Sprintf("meta mark set udp dport map { %d : 1, %d : 2 }", 50+t.IntN(5), 55+t.IntN(5)))
}

// target is what a verdict map may hold, from chain number on.
func (t *nftTable) target(from int) string {
	if from < t.chains && t.chance(70) {
		return t.pick("jump", "goto") + fmt.Sprintf(" c%d", from+t.IntN(t.chains-from))
	}
	return t.pick("accept", "return", "continue", "drop")
}

func (t *nftTable) action(from int) string {
	ip := t.family()
	to := ip + " to"
	switch t.IntN(20) {
	case 0, 1, 2:
		if from < t.chains {
			return fmt.Sprintf("%s c%d", t.pick("jump", "jump", "goto"), from+t.IntN(t.chains-from))
		}
		return t.pick("return", "accept", "continue")
	case 3:
		return fmt.Sprintf("udp dport vmap { %s }", mapOf(distinct(3, t.port), func(string) string { return t.target(from) }))
	case 4:
		low := t.port()
		return fmt.Sprintf("udp dport vmap { %d-%d : %s, %d : %s, * : %s }", low, low+2, t.target(from), low+4,
			t.target(from), t.target(from))
	case 5:
		if t.named && from == 0 {
			return fmt.Sprintf("%s daddr . meta l4proto . th dport vmap @services", ip)
		}
		return fmt.Sprintf("%s saddr vmap { %s : %s, %s : %s }", ip, t.clientA(), t.target(from), t.clientB(), t.target(from))
	case 6:
		return fmt.Sprintf("numgen random mod 3 vmap { 0 : %s, 1 : %s, 2 : %s }", t.target(from), t.target(from), t.target(from))
	case 7, 8:
		return fmt.Sprintf("dnat %s %s", to, t.backend())
	case 9:
		return fmt.Sprintf("meta l4proto udp dnat %s %s:%s", to, t.bracketed(t.backend()), t.ports())
	case 10:
		low, high := t.backends()
		return fmt.Sprintf("dnat %s %s-%s%s", to, low, high, t.pick("", "", " persistent", " random"))
	case 11:
		return fmt.Sprintf("meta l4proto udp dnat to :%s", t.ports())
	case 12:
		return fmt.Sprintf("dnat %s %s daddr map { %s }", to, ip, mapOf(distinct(3, t.dst), func(string) string { return t.backend() }))
	case 13:
		return fmt.Sprintf("meta l4proto udp dnat %s addr . port to numgen %s mod 2 map { 0 : %s . %d, 1 : %s . %d }", ip,
			t.pick("inc", "random"), t.backend(), t.port(), t.backend(), t.port())
	case 14:
		return fmt.Sprintf("dnat %s jhash %s saddr . %s daddr mod 3 seed 7 offset 2 map { 2 : %s, 3 : %s, 4 : %s }", to, ip, ip,
			t.backend(), t.backend(), t.backend())
	case 15:
		return "meta l4proto udp dnat " + ip + " addr . port to udp dport map @backends"
	case 16:
		if t.v6 {
			return "dnat ip6 prefix to ip6 daddr map { 2001:db8:5::/64 : 2001:db8:b::/64 }"
		}
		return "dnat ip prefix to ip daddr map { 203.0.113.0/24 : 198.51.100.0/24 }"
	case 17:
		return t.pick("redirect", fmt.Sprintf("meta l4proto udp redirect to :%s", t.ports()))
	case 18:
		return t.pick("accept", "accept", "return", "drop", "continue")
	}
	low, high := t.backends()
	return fmt.Sprintf("dnat %s interval to udp dport map { %d : %s-%s, %d : %s-%s }", ip,
		50+t.IntN(5), low, high, 55+t.IntN(5), low, high)
}

func (t *nftTable) clientA() string {
	return map[bool]string{false: "10.1.0.2", true: "2001:db8:1::2"}[t.v6]
}

func (t *nftTable) clientB() string {
	return map[bool]string{false: "10.2.0.2", true: "2001:db8:2::2"}[t.v6]
}

// mapOf writes the elements of a map.
func mapOf(keys any, value func(string) string) string {
	var list []string
	add := func(k string) { list = append(list, k+" : "+value(k)) }
	switch keys := keys.(type) {
	case []string:
		for _, k := range keys {
			add(k)
		}
	case []int:
		for _, k := range keys {
			add(fmt.Sprint(k))
		}
	}
	return strings.Join(list, ", ")
}

// iptables writes the nat table for iptables-restore or ip6tables-restore.
func (g *generator) iptables() string {
	var b strings.Builder
	chains := g.IntN(5)
	b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n")
	for i := range chains {
		fmt.Fprintf(&b, ":c%d - [0:0]\n", i)
	}
	rules := func(chain string, from, n int) {
		for range n {
			proto := g.pick("udp", "udp", "udp", "")
			out := chain == "OUTPUT"
			fmt.Fprintf(&b, "-A %s%s%s\n", chain, g.xtMatches(proto, chain == "PREROUTING", out), g.xtAction(proto, from, chains))
		}
	}
	rules("PREROUTING", 0, 2+g.IntN(5))
	rules("OUTPUT", 0, 1+g.IntN(4))
	for i := range chains {
		rules(fmt.Sprintf("c%d", i), i+1, 1+g.IntN(4))
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func (g *generator) xtMatches(proto string, pre, out bool) string {
	var b strings.Builder
	not := func() string { return g.pick(" ", " ", " ! ") }
	if g.chance(50) {
		fmt.Fprintf(&b, "%s-d %s", not(), g.pick(g.dst(), g.dst(), g.prefix(g.service())))
	}
	if g.chance(20) {
		fmt.Fprintf(&b, "%s-s %s", not(), g.pick(g.client(), g.prefix(g.client())))
	}
	if pre && g.chance(25) {
		fmt.Fprintf(&b, "%s-i %s", not(), g.pick("r0", "r1", "r+", "lo"))
	}
	if out && g.chance(20) {
		fmt.Fprintf(&b, "%s-o %s", not(), g.pick("r0", "s0", "s+", "lo"))
	}
	if proto != "" {
		fmt.Fprintf(&b, " -p %s", proto)
		switch g.IntN(8) {
		case 0, 1, 2:
			fmt.Fprintf(&b, " -m %s%s--dport %s", proto, not(), strings.Replace(g.ports(), "-", ":", 1))
		case 3:
			fmt.Fprintf(&b, " -m %s --sport %s", proto, g.pick("40000", "40000:40001", "40002"))
		case 4:
			low := g.port()
			fmt.Fprintf(&b, " -m multiport%s%s %d,%d:%d", not(), g.pick("--dports", "--ports", "--dports"), low, low+2, low+4)
		}
	}
	low, high := "203.0.113.1", "203.0.113.3"
	if g.v6 {
		low, high = "2001:db8:5::1", "2001:db8:5::3"
	}
	switch g.IntN(21) {
	case 0, 1:
		fmt.Fprintf(&b, " -m addrtype%s--dst-type LOCAL", not())
	case 2:
		fmt.Fprintf(&b, " -m addrtype --src-type %s", g.pick("LOCAL", "UNICAST"))
	case 3:
		fmt.Fprintf(&b, " -m conntrack%s--ctstate %s", not(), g.pick("NEW", "DNAT", "ESTABLISHED,RELATED", "NEW,SNAT"))
	case 4:
		fmt.Fprintf(&b, " -m conntrack%s--ctorigdst %s", not(), g.pick(g.dst(), g.prefix(g.service())))
	case 5:
		fmt.Fprintf(&b, " -m statistic --mode random --probability %s", g.pick("0.5", "1.0", "0.33"))
	case 6:
		fmt.Fprintf(&b, " -m statistic --mode nth --every %s --packet 0", g.pick("2", "1", "3"))
	case 7:
		fmt.Fprintf(&b, " -m iprange%s--dst-range %s-%s", not(), low, high)
	case 8, 16, 17:
		fmt.Fprintf(&b, " -m %s%s--mark %s", g.pick("mark", "mark", "connmark"), not(), g.pick("0x1/0x1", "0x1", "0x2/0x3", "0x0/0x4000"))
	case 9:
		fmt.Fprintf(&b, " -m comment --comment \"a comment\"")
	case 10:
		fmt.Fprintf(&b, " -m limit --limit 1/hour --limit-burst 2")
	case 11:
		fmt.Fprintf(&b, " -m conntrack --ctorigdstport %s --ctdir ORIGINAL --ctproto 17", strings.Replace(g.ports(), "-", ":", 1))
	case 12:
		fmt.Fprintf(&b, " -m state --state %s", g.pick("NEW", "ESTABLISHED"))
	case 13, 14:
		fmt.Fprintf(&b, " -m recent%s--set --name clients %s", not(), g.pick("--rsource", "--rdest"))
	case 15:
		fmt.Fprintf(&b, " -m recent%s%s --name clients", not(), g.pick("--rcheck --seconds 60", "--update --hitcount 2", "--rcheck", "--remove"))
	}
	return b.String()
}

func (g *generator) xtAction(proto string, from, chains int) string {
	switch g.IntN(14) {
	case 0, 1, 2:
		if from < chains {
			return fmt.Sprintf(" %s c%d", g.pick("-j", "-j", "-g"), from+g.IntN(chains-from))
		}
		return " -j RETURN"
	case 3:
		return " -j " + g.pick("ACCEPT", "RETURN")
	case 4:
		return " -j " + g.pick("MARK --set-xmark 0x4000/0x4000", "MARK --set-mark 1", "MARK --set-xmark 2/3", "MARK --or-mark 1",
			"CONNMARK --set-xmark 1/1", "CONNMARK --save-mark", "CONNMARK --restore-mark", "CONNMARK --save-mark --nfmask 1 --ctmask 3")
	case 5, 6, 7:
		return " -j DNAT --to-destination " + g.backend()
	case 8:
		if proto != "" {
			return fmt.Sprintf(" -j DNAT --to-destination %s:%s", g.bracketed(g.backend()), g.ports())
		}
	case 9:
		low, high := g.backends()
		if low == high {
			return " -j DNAT --to-destination " + low
		}
		return fmt.Sprintf(" -j DNAT --to-destination %s-%s", low, high)
	case 10:
		if proto != "" {
			return fmt.Sprintf(" -j REDIRECT --to-ports %s", g.ports())
		}
		return " -j REDIRECT"
	case 11:
		if g.v6 {
			return " -j NETMAP --to 2001:db8:b::/64"
		}
		return " -j NETMAP --to 198.51.100.0/24"
	case 12:
		if proto != "" {
			return fmt.Sprintf(" -j DNAT --to-destination :%d", g.port())
		}
	}
	return "" // a rule without a target only counts
}
