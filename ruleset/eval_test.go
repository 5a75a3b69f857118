package ruleset

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

const (
	nh = uapi.NftPayloadNetworkHeader
	th = uapi.NftPayloadTransportHeader
)

func xtAddr(a string) []byte {
	b := make([]byte, xtAddrSize)
	copy(b, netip.MustParseAddr(a).AsSlice())
	return b
}

func shorts(v ...uint16) (b []byte) {
	for _, x := range v {
		b = binary.NativeEndian.AppendUint16(b, x)
	}
	return b
}

// conntrackInfo is struct xt_conntrack_mtinfo3 with an original destination.
func conntrackInfo(match, invert, state, status uint16, dst, mask string, dport, dportHigh uint16) []byte {
	none := make([]byte, xtAddrSize)
	return join(none, none, xtAddr(dst), xtAddr(mask), none, none, none, none, make([]byte, 8), shorts(17, 0, dport, 0, 0, match, invert, state, status, 0, dportHigh, 0, 0, 0))
}

// recent is struct xt_recent_mtinfo_v1.
func recent(check, invert byte) []byte {
	b := make([]byte, 228)
	b[8], b[9] = check, invert
	copy(b[10:], "clients")
	return b
}

func multiport(flags, invert byte, ports []uint16, ranges ...int) []byte {
	b := make([]byte, 48)
	b[0], b[1], b[47] = flags, byte(len(ports)), invert
	copy(b[2:], shorts(ports...))
	for _, i := range ranges {
		b[32+i] = 1
	}
	return b
}

// TestMatches puts expressions before an accept, in a chain that drops what comes
// to its end: so accepted means that they match.
func TestMatches(t *testing.T) {
	eth0 := &Interfaces{ID: 1, List: []Interface{{2, "eth0"}}}
	either := &Interfaces{ID: 2, List: []Interface{{2, "eth0"}, {3, "eth1"}}}
	host := &knowing{}
	at := func(in *Interfaces) *knowing {
		return &knowing{inputs: map[netip.Addr]*Interfaces{dns().Src: in}, outputs: in}
	}
	name := func(s string) []byte { return append([]byte(s), make([]byte, ifNameSize-len(s))...) }
	own := dns()
	own.Src = netip.MustParseAddr("192.0.2.1")
	toOwn := dns()
	toOwn.Dst = own.Src
	toOwn6 := dns6()
	toOwn6.Dst = netip.MustParseAddr("2001:db8::1")
	fib := func(result, flags uint32) []byte {
		return expr("fib", num(uapi.NftaFibDreg, 1), num(uapi.NftaFibResult, result), num(uapi.NftaFibFlags, flags))
	}
	const yes, no, maybe, anything = "untranslated", "dropped", "untranslated, or dropped", "anything"
	tests := []struct {
		name  string
		exprs []byte
		p     Packet // dns() unless set
		h     Host
		want  string
	}{
		{"nothing", nil, Packet{}, nil, yes},
		{"daddr", join(payload(nh, 16, 4), eq(203, 0, 113, 10)), Packet{}, nil, yes},
		{"another daddr", join(payload(nh, 16, 4), eq(203, 0, 113, 11)), Packet{}, nil, no},
		{"not daddr", join(payload(nh, 16, 4), cmpTo(uapi.NftCmpNeq, 203, 0, 113, 10)), Packet{}, nil, no},
		{"daddr/24 as iptables writes it", join(payload(nh, 16, 3), eq(203, 0, 113)), Packet{}, nil, yes},
		{"daddr/25", join(payload(nh, 16, 4), bitwiseAnd(255, 255, 255, 128), eq(203, 0, 113, 0)), Packet{}, nil, yes},
		{"both addresses at once", join(payload(nh, 12, 8), eq(192, 0, 2, 50, 203, 0, 113, 10)), Packet{}, nil, yes},
		{"ip6 daddr", join(payload(nh, 24, 16), eq(dns6().Dst.AsSlice()...)), dns6(), nil, yes},
		{"ip protocol", join(payload(nh, 9, 1), eq(17)), Packet{}, nil, yes},
		{"ip version", join(payload(nh, 0, 1), bitwiseAnd(0xf0), eq(0x40)), Packet{}, nil, yes},
		{"ip header length", join(payload(nh, 0, 1), bitwiseAnd(0x0f), eq(5)), Packet{}, nil, maybe},
		{"ip6 next header, perhaps an extension's", join(payload(nh, 6, 1), eq(17)), dns6(), nil, maybe},
		{"ttl", join(payload(nh, 8, 1), eq(64)), Packet{}, nil, maybe},
		{"behind the header", join(payload(nh, 24, 4), eq(0, 0, 0, 0)), Packet{}, nil, maybe},
		{"link layer", join(payload(0, 0, 6), eq(0, 0, 0, 0, 0, 0)), Packet{}, nil, maybe},
		{"dport", join(payload(th, 2, 2), eq(0, 53)), Packet{}, nil, yes},
		{"dport >", join(payload(th, 2, 2), cmpTo(uapi.NftCmpGt, 0, 53)), Packet{}, nil, no},
		{"dport >=", join(payload(th, 2, 2), cmpTo(uapi.NftCmpGte, 0, 53)), Packet{}, nil, yes},
		{"dport <", join(payload(th, 2, 2), cmpTo(uapi.NftCmpLt, 0, 54)), Packet{}, nil, yes},
		{"dport <=", join(payload(th, 2, 2), cmpTo(uapi.NftCmpLte, 0, 52)), Packet{}, nil, no},
		{"ttl <= 255", join(payload(nh, 8, 1), cmpTo(uapi.NftCmpLte, 255)), Packet{}, nil, yes},
		{"dport range", join(payload(th, 2, 2), expr("range", num(uapi.NftaRangeSreg, 1), num(uapi.NftaRangeOp, 0),
			dataOf(uapi.NftaRangeFrom, 0, 50), dataOf(uapi.NftaRangeTo, 0, 60))), Packet{}, nil, yes},
		{"not dport range", join(payload(th, 2, 2), expr("range", num(uapi.NftaRangeSreg, 1), num(uapi.NftaRangeOp, 1),
			dataOf(uapi.NftaRangeFrom, 0, 50), dataOf(uapi.NftaRangeTo, 0, 60))), Packet{}, nil, no},
		{"udp length", join(payload(th, 4, 2), eq(0, 9)), Packet{}, nil, maybe},
		{"a register that was not loaded", eq(1), Packet{}, nil, maybe},
		{"nfproto", join(metaKey(uapi.NftMetaNfproto), eq(uapi.NfprotoIPv4)), Packet{}, nil, yes},
		{"l4proto", join(metaKey(uapi.NftMetaL4proto), eq(6)), Packet{}, nil, no},
		{"ethertype", join(metaKey(uapi.NftMetaProtocol), eq(0x86, 0xdd)), Packet{}, nil, no},
		{"mark", join(metaKey(uapi.NftMetaMark), eq(word(1)...)), Packet{}, nil, maybe},
		{"mark and 0", join(metaKey(uapi.NftMetaMark), bitwiseAnd(0, 0, 0, 0), eq(word(0)...)), Packet{}, nil, yes},
		{"owner", join(metaKey(uapi.NftMetaSkuid), eq(word(0)...)), Packet{}, nil, maybe},
		{"input interface", join(metaKey(uapi.NftMetaIifname), eq(name("eth0")...)), Packet{}, at(eth0), yes},
		{"another", join(metaKey(uapi.NftMetaIifname), eq(name("eth1")...)), Packet{}, at(eth0), no},
		{"eth+", join(metaKey(uapi.NftMetaIifname), eq([]byte("eth")...)), Packet{}, at(eth0), yes},
		{"eth+ of two", join(metaKey(uapi.NftMetaIifname), eq([]byte("eth")...)), Packet{}, at(either), yes},
		{"one of two", join(metaKey(uapi.NftMetaIifname), eq(name("eth0")...)), Packet{}, at(either), maybe},
		{"interface not known", join(metaKey(uapi.NftMetaIifname), eq(name("eth0")...)), Packet{}, at(nil), maybe},
		{"index", join(metaKey(uapi.NftMetaIif), eq(word(2)...)), Packet{}, at(eth0), yes},
		{"an output interface before routing", join(metaKey(uapi.NftMetaOifname), eq(name("eth0")...)), Packet{}, at(eth0), no},
		{"an output interface of this host's packet", join(metaKey(uapi.NftMetaOifname), eq(name("eth0")...)), own, at(eth0), yes},
		{"an input interface of this host's packet", join(metaKey(uapi.NftMetaIifname), eq(name("eth0")...)), own, at(eth0), no},
		{"state new", join(ctKey(uapi.NftCtState), bitwiseAnd(word(8)...), cmpTo(uapi.NftCmpNeq, word(0)...)), Packet{}, nil, yes},
		{"state established", join(ctKey(uapi.NftCtState), bitwiseAnd(word(2)...), cmpTo(uapi.NftCmpNeq, word(0)...)), Packet{}, nil, no},
		{"status dnat", join(ctKey(uapi.NftCtStatus), bitwiseAnd(word(0x20)...), cmpTo(uapi.NftCmpNeq, word(0)...)), Packet{}, nil, no},
		{"status helper", join(ctKey(uapi.NftCtStatus), bitwiseAnd(word(0x2000)...), cmpTo(uapi.NftCmpNeq, word(0)...)), Packet{}, nil, maybe},
		{"direction", join(ctKey(uapi.NftCtDirection), eq(0)), Packet{}, nil, yes},
		{"ct mark", join(ctKey(uapi.NftCtMark), eq(word(0)...)), Packet{}, nil, maybe},
		{"ct daddr", join(ctKey(uapi.NftCtDst, nla(uapi.NftaCtDirection, []byte{0})), eq(203, 0, 113, 10)), Packet{}, nil, yes},
		{"ct reply daddr", join(ctKey(uapi.NftCtDst, nla(uapi.NftaCtDirection, []byte{1})), eq(203, 0, 113, 10)), Packet{}, nil, maybe},
		{"ct ip6 daddr of IPv4", join(ctKey(uapi.NftCtDstIP6), eq(203, 0, 113, 10)), Packet{}, nil, no},
		{"ct proto-dst", join(ctKey(uapi.NftCtProtoDst), eq(0, 53)), Packet{}, nil, yes},
		{"ct protocol", join(ctKey(uapi.NftCtProtocol), eq(17)), Packet{}, nil, yes},
		{"ct bytes", join(ctKey(15), eq(0)), Packet{}, nil, maybe},
		{"fib daddr type local", join(fib(3, uapi.NftaFibFDaddr), eq(word(uapi.RtnLocal)...)), toOwn, nil, yes},
		{"not local", join(fib(3, uapi.NftaFibFDaddr), eq(word(uapi.RtnLocal)...)), Packet{}, nil, no},
		{"fib saddr type", join(fib(3, uapi.NftaFibFSaddr), eq(word(uapi.RtnUnicast)...)), Packet{}, nil, yes},
		{"IPv6 unicast or nowhere", join(fib(3, uapi.NftaFibFDaddr), eq(word(uapi.RtnUnicast)...)), dns6(), nil, maybe},
		{"local on another interface", join(fib(3, uapi.NftaFibFDaddr|uapi.NftaFibFIif), eq(word(uapi.RtnLocal)...)), toOwn, nil, maybe},
		{"type not known", join(fib(3, uapi.NftaFibFDaddr), eq(word(uapi.RtnLocal)...)), Packet{}, Unknown{}, maybe},
		{"fib oif", join(fib(1, uapi.NftaFibFSaddr), eq(word(0)...)), Packet{}, nil, maybe},
		{"numgen", join(expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 2)), eq(word(1)...)), Packet{}, nil, maybe},
		{"numgen mod 1", join(expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 1)), eq(word(0)...)), Packet{}, nil, yes},
		{"numgen with an offset", join(expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 2),
			num(uapi.NftaNgOffset, 5)), eq(word(1)...)), Packet{}, nil, no},
		{"numgen of too many", join(expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 1<<30)), eq(word(1)...)), Packet{}, nil, maybe},
		{"hash", join(expr("hash", num(uapi.NftaHashDreg, 1), num(uapi.NftaHashModulus, 3)), cmpTo(uapi.NftCmpNeq, word(3)...)), Packet{}, nil, yes},
		{"hash with a map of its own", join(expr("hash", num(uapi.NftaHashDreg, 1), num(uapi.NftaHashModulus, 3), str(uapi.NftaHashSetName, "x"))), Packet{}, nil, anything},
		{"byteorder", join(payload(th, 2, 2), swap(2, 2), eq(binary.LittleEndian.AppendUint16(nil, 53)...)), Packet{}, nil, yes},
		{"byteorder of one byte does nothing", join(metaKey(uapi.NftMetaL4proto), swap(1, 2), eq(17)), Packet{}, nil, yes},
		{"byteorder of two ports", join(payload(th, 0, 4), swap(4, 2), eq(0)), Packet{}, nil, anything},
		{"byteorder of a word", join(immediateReg(1, 1, 2, 3, 4), swap(4, 4), eq(4, 3, 2, 1)), Packet{}, nil, yes},
		{"shift", join(immediateReg(1, word(0x0000ff01)...), shiftBy(uapi.NftBitwiseRshift, 8), eq(word(0xff)...)), Packet{}, nil, yes},
		{"shift left", join(immediateReg(1, word(0x80000001)...), shiftBy(uapi.NftBitwiseLshift, 1), eq(word(2)...)), Packet{}, nil, yes},
		{"unknown bits shifted out", join(metaKey(uapi.NftMetaMark), shiftBy(uapi.NftBitwiseRshift, 31), cmpTo(uapi.NftCmpLt, 2)), Packet{}, nil, yes},
		{"limit", expr("limit"), Packet{}, nil, maybe},
		{"quota", expr("quota"), Packet{}, nil, maybe},
		{"counter", expr("counter"), Packet{}, nil, yes},
		{"log", expr("log"), Packet{}, nil, yes},
		{"dynset", expr("dynset"), Packet{}, nil, maybe},
		{"dynset that adds", expr("dynset", num(uapi.NftaDynsetOp, uapi.NftDynsetOpAdd)), Packet{}, nil, maybe},
		{"dynset that updates", expr("dynset", num(uapi.NftaDynsetOp, 1)), Packet{}, nil, maybe},
		{"dynset that deletes", expr("dynset", num(uapi.NftaDynsetOp, uapi.NftDynsetOpDelete)), Packet{}, nil, yes},
		{"meta set", expr("meta", num(uapi.NftaMetaKey, 3), num(uapi.NftaMetaSreg, 1)), Packet{}, nil, yes},
		{"object that counts", expr("objref", num(uapi.NftaObjrefImmType, 1)), Packet{}, nil, yes},
		{"object that limits", expr("objref", num(uapi.NftaObjrefImmType, 4)), Packet{}, nil, maybe},
		{"synproxy object", expr("objref", num(uapi.NftaObjrefImmType, 10)), Packet{}, nil, anything},
		{"map of objects", expr("objref", str(uapi.NftaObjrefSetName, "x")), Packet{}, nil, anything},
		{"rt", join(expr("rt", num(1, 1)), eq(1)), Packet{}, nil, maybe},
		{"socket", join(expr("socket", num(2, 1)), eq(1)), Packet{}, nil, maybe},
		{"reject", expr("reject"), Packet{}, nil, no},
		{"write into the packet", expr("payload", num(uapi.NftaPayloadSreg, 1), num(uapi.NftaPayloadBase, nh)), Packet{}, nil, anything},
		{"unknown expression", unknownThing(), Packet{}, nil, anything},
		{"unknown expression that is not reached", join(payload(th, 2, 2), eq(0, 54), unknownThing()), Packet{}, nil, no},
		{"queue", expr("queue"), Packet{}, nil, anything},
		{"tproxy", expr("tproxy"), Packet{}, nil, anything},
		{"break", verdictExpr(uapi.NftBreak, ""), Packet{}, nil, no},
		{"continue", verdictExpr(uapi.NftContinue, ""), Packet{}, nil, yes},
		{"jump to nowhere", jump("none"), Packet{}, nil, anything},
		{"queue verdict", verdictExpr(3, ""), Packet{}, nil, anything},

		{"comment", match("comment", 0, make([]byte, 256)), Packet{}, nil, yes},
		{"recent --set, or no memory", match("recent", 1, recent(2, 0)), Packet{}, nil, maybe},
		{"recent --rcheck", match("recent", 1, recent(1, 0)), Packet{}, nil, maybe},
		{"recent, cut short", match("recent", 1, recent(2, 0)[:200]), Packet{}, nil, maybe},
		{"udp ports", match("udp", 0, append(shorts(0, 65535, 50, 60), 0, 0)), Packet{}, nil, yes},
		{"udp other ports", match("udp", 0, append(shorts(0, 65535, 54, 60), 0, 0)), Packet{}, nil, no},
		{"udp not ports", match("udp", 0, append(shorts(0, 65535, 54, 60), 2, 0)), Packet{}, nil, yes},
		{"udp source port", match("udp", 0, append(shorts(1, 1023, 0, 65535), 0, 0)), Packet{}, nil, no},
		{"udp not source port", match("udp", 0, append(shorts(1, 1023, 0, 65535), 1, 0)), Packet{}, nil, yes},
		{"tcp flags", match("tcp", 0, append(shorts(0, 65535, 53, 53), 0, 2, 2, 0)), Packet{}, nil, maybe},
		{"sctp ports", match("sctp", 0, append(append(shorts(50, 60, 0, 0), make([]byte, 52)...), append(word(2), word(0)...)...)), Packet{}, nil, yes},
		{"multiport", match("multiport", 1, multiport(1, 0, []uint16{10, 53})), Packet{}, nil, yes},
		{"multiport range", match("multiport", 1, multiport(1, 0, []uint16{50, 60, 99}, 0)), Packet{}, nil, yes},
		{"multiport inverted", match("multiport", 1, multiport(1, 1, []uint16{50, 60}, 0)), Packet{}, nil, no},
		{"multiport of either", match("multiport", 1, multiport(2, 0, []uint16{40000})), Packet{}, nil, yes},
		{"multiport of sources", match("multiport", 1, multiport(0, 0, []uint16{53})), Packet{}, nil, no},
		{"addrtype", match("addrtype", 1, append(shorts(0, 4), word(0)...)), toOwn, nil, yes},
		{"addrtype of another", match("addrtype", 1, append(shorts(0, 4), word(0)...)), Packet{}, nil, no},
		{"addrtype inverted", match("addrtype", 1, append(shorts(0, 4), word(2)...)), Packet{}, nil, yes},
		{"addrtype of the source", match("addrtype", 1, append(shorts(4, 0), word(0)...)), Packet{}, nil, no},
		{"addrtype of an interface", match("addrtype", 1, append(shorts(0, 4), word(4)...)), toOwn, nil, maybe},
		{"addrtype of IPv6", match("addrtype", 1, append(shorts(0, 4), word(0)...)), toOwn6, nil, yes},
		{"addrtype, old", match("addrtype", 0, make([]byte, 12)), Packet{}, nil, maybe},
		{"iprange", match("iprange", 1, append(join(xtAddr("192.0.2.0"), xtAddr("192.0.2.9"), xtAddr("203.0.113.9"), xtAddr("203.0.113.10")), 2)), Packet{}, nil, yes},
		{"iprange of sources", match("iprange", 1, append(join(xtAddr("192.0.2.0"), xtAddr("192.0.2.9"), xtAddr("203.0.113.9"), xtAddr("203.0.113.10")), 3)), Packet{}, nil, no},
		{"iprange inverted", match("iprange", 1, append(join(xtAddr("192.0.2.0"), xtAddr("192.0.2.9"), xtAddr("203.0.113.9"), xtAddr("203.0.113.10")), 0x11)), Packet{}, nil, yes},
		{"ctstate", match("conntrack", 3, conntrackInfo(ctState, 0, 8, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, yes},
		{"ctstate inverted", match("conntrack", 3, conntrackInfo(ctState, ctState, 8, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, no},
		{"ctstate DNAT", match("conntrack", 3, conntrackInfo(ctState, 0, 0x80, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, no},
		{"ctorigdst", match("conntrack", 3, conntrackInfo(ctOrigDst, 0, 0, 0, "203.0.113.99", "255.255.255.0", 0, 0)), Packet{}, nil, yes},
		{"ctorigdst inverted", match("conntrack", 3, conntrackInfo(ctOrigDst, ctOrigDst, 0, 0, "203.0.113.99", "255.255.255.0", 0, 0)), Packet{}, nil, no},
		{"ctorigdstport", match("conntrack", 3, conntrackInfo(ctOrigDstPort, 0, 0, 0, "0.0.0.0", "0.0.0.0", 50, 60)), Packet{}, nil, yes},
		{"ctproto", match("conntrack", 3, conntrackInfo(ctProto, 0, 0, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, yes},
		{"ctdir", match("conntrack", 3, conntrackInfo(ctDirection, ctDirection, 0, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, no},
		{"ctstatus", match("conntrack", 3, conntrackInfo(ctStatus, 0, 0, 0x20, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, no},
		{"ctreplsrc", match("conntrack", 3, conntrackInfo(ctReplSrc, 0, 0, 0, "0.0.0.0", "0.0.0.0", 0, 0)), Packet{}, nil, maybe},
		{"state", match("state", 0, word(8)), Packet{}, nil, yes},
		{"statistic random", match("statistic", 0, append(shorts(0, 0), word(1<<30)...)), Packet{}, nil, maybe},
		{"statistic always", match("statistic", 0, append(shorts(0, 0), word(1<<31)...)), Packet{}, nil, yes},
		{"statistic never", match("statistic", 0, append(shorts(0, 1), word(1<<31)...)), Packet{}, nil, no},
		{"statistic every packet", match("statistic", 0, append(shorts(1, 0), word(0)...)), Packet{}, nil, yes},
		{"mark match", match("mark", 1, join(word(1), word(3), word(0))), Packet{}, nil, maybe},
		{"mark match under no mask", match("mark", 1, make([]byte, 12)), Packet{}, nil, yes},
		{"connmark match", match("connmark", 1, join(word(1), word(3), word(1))), Packet{}, nil, maybe},
		{"unknown match", match("teleport", 0, nil), Packet{}, nil, maybe},
		{"match cut short", match("udp", 0, shorts(0)), Packet{}, nil, maybe},
		{"MARK", target("MARK", 2, make([]byte, 8)), Packet{}, nil, yes},
		{"REJECT", target("REJECT", 0, word(0)), Packet{}, nil, no},
		{"unknown target", target("TPROXY", 1, nil), Packet{}, nil, anything},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := tt.p
			if !p.Dst.IsValid() {
				p = dns()
			}
			family := IPv4
			if p.Dst.Is6() {
				family = IPv6
			}
			r := newRig(t, family)
			for hook, name := range map[uint32]string{uapi.NfInetPreRouting: "pre", uapi.NfInetLocalOut: "out"} {
				r.base(name, hook, -100, uapi.NfDrop)
				r.rule(name, tt.exprs, accept())
			}
			h := tt.h
			if h == nil {
				h = host
			}
			got := r.outcome(p, h).String()
			if tt.want == anything {
				got, _, _ = strings.Cut(got, ":")
			}
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func concat(length ...uint32) []byte {
	var fields [][]byte
	for _, n := range length {
		fields = append(fields, nla(uapi.NftaListElem, num(uapi.NftaSetFieldLen, n)))
	}
	return nla(uapi.NftaSetDesc, nla(uapi.NftaSetDescConcat, fields...))
}

// A client is noted by the rule that translates (kube-proxy's session affinity):
// nothing passes it untranslated.
func TestRecent(t *testing.T) {
	for _, tt := range []struct {
		name  string
		match []byte
		want  string
	}{
		{"--set", recent(2, 0), "198.51.100.1:53, or dropped"},
		{"! --set", recent(2, 1), "untranslated, or dropped"},
		{"--set --rttl", recent(2|16, 0), "198.51.100.1:53, or dropped"},
		{"--rcheck", recent(1, 0), "198.51.100.1:53, or untranslated"},
		{"! --rcheck", recent(1, 1), "198.51.100.1:53, or untranslated"},
		{"--update", recent(4, 0), "198.51.100.1:53, or untranslated"},
		{"--remove", recent(8, 0), "198.51.100.1:53, or untranslated"},
		{"inverted how?", recent(2, 2), "198.51.100.1:53, untranslated, or dropped"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for rev := range uint32(2) {
				r := newRig(t, IPv4)
				r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
				r.rule("pre", match("recent", rev, tt.match), dnat("198.51.100.1:0"))
				if got := r.outcome(dns(), &knowing{}).String(); got != tt.want {
					t.Errorf("revision %d: %s, want %s", rev, got, tt.want)
				}
			}
		})
	}
}

func TestSets(t *testing.T) {
	const iv = uapi.NftSetInterval
	timeout := nla(uapi.NftaSetElemTimeout, make([]byte, 8))
	keyEnd := func(b ...byte) []byte { return dataOf(uapi.NftaSetElemKeyEnd, b...) }
	tests := []struct {
		name   string
		flags  uint32
		keyLen uint32
		attrs  []byte
		elems  [][]byte
		load   []byte
		want   string // accepted, dropped or both
	}{
		{"in it", 0, 2, nil, [][]byte{elem([]byte{0, 80}), elem([]byte{0, 53}), elem([]byte{1, 0})}, payload(th, 2, 2), "untranslated"},
		{"not in it", 0, 2, nil, [][]byte{elem([]byte{0, 80}), elem([]byte{0, 54})}, payload(th, 2, 2), "dropped"},
		{"empty", 0, 2, nil, nil, payload(th, 2, 2), "dropped"},
		{"key not known", 0, 4, nil, [][]byte{elem(word(1))}, metaKey(uapi.NftMetaMark), "untranslated, or dropped"},
		{"timed", uapi.NftSetTimeout, 2, nil, [][]byte{elem([]byte{0, 53})}, payload(th, 2, 2), "untranslated, or dropped"},
		{"a timed element", 0, 2, nil, [][]byte{elem([]byte{0, 53}, timeout)}, payload(th, 2, 2), "untranslated, or dropped"},
		{"an expression that refuses", 0, 2, nil, [][]byte{elem([]byte{0, 53}, nla(uapi.NftaSetElemExpr))}, payload(th, 2, 2), "untranslated, or dropped"},
		{"another timed element", 0, 2, nil, [][]byte{elem([]byte{0, 53}), elem([]byte{0, 54}, timeout)}, payload(th, 2, 2), "untranslated"},
		{"dynamic", uapi.NftSetEval, 2, nil, nil, payload(th, 2, 2), "untranslated, or dropped"},
		{"catch-all", 0, 2, nil, [][]byte{elem(nil)}, payload(th, 2, 2), "untranslated"},
		{"interval", iv, 2, nil, [][]byte{elemEnd([]byte{0, 60}), elem([]byte{0, 50})}, payload(th, 2, 2), "untranslated"},
		{"its first", iv, 2, nil, [][]byte{elemEnd([]byte{0, 60}), elem([]byte{0, 53})}, payload(th, 2, 2), "untranslated"},
		{"behind its last", iv, 2, nil, [][]byte{elemEnd([]byte{0, 53}), elem([]byte{0, 50})}, payload(th, 2, 2), "dropped"},
		{"before it", iv, 2, nil, [][]byte{elem([]byte{0, 54}), elemEnd([]byte{0, 60}), elemEnd([]byte{0, 0})}, payload(th, 2, 2), "dropped"},
		{"adjacent: the end comes first", iv, 2, nil, [][]byte{elem([]byte{0, 53}), elemEnd([]byte{0, 53}), elem([]byte{0, 50}), elemEnd([]byte{0, 60})}, payload(th, 2, 2), "untranslated"},
		{"without an end", iv, 2, nil, [][]byte{elem([]byte{0, 50})}, payload(th, 2, 2), "untranslated"},
		{"interval around all that is possible", iv, 1, nil, [][]byte{elem([]byte{0})}, payload(nh, 8, 1), "untranslated"},
		{"interval around some of it", iv, 1, nil, [][]byte{elem([]byte{1})}, payload(nh, 8, 1), "untranslated, or dropped"},
		{"concatenation", iv, 8, concat(4, 2), [][]byte{
			elem([]byte{203, 0, 113, 0, 0, 50, 0, 0}, keyEnd(203, 0, 113, 255, 0, 60, 0, 0)),
		}, join(payload(nh, 16, 4), expr("payload", num(uapi.NftaPayloadDreg, 9), num(uapi.NftaPayloadBase, th),
			num(uapi.NftaPayloadOffset, 2), num(uapi.NftaPayloadLen, 2))), "untranslated"},
		{"field by field", iv, 8, concat(4, 2), [][]byte{
			elem([]byte{203, 0, 113, 0, 0, 54, 0, 0}, keyEnd(203, 0, 113, 255, 0, 60, 0, 0)),
		}, join(payload(nh, 16, 4), expr("payload", num(uapi.NftaPayloadDreg, 9), num(uapi.NftaPayloadBase, th),
			num(uapi.NftaPayloadOffset, 2), num(uapi.NftaPayloadLen, 2))), "dropped"},
		{
			"exact concatenation with padding", 0, 8, nil,
			[][]byte{elem([]byte{203, 0, 113, 10, 17, 0, 0, 0})},
			join(payload(nh, 16, 4), expr("meta", num(uapi.NftaMetaDreg, 9), num(uapi.NftaMetaKey, uapi.NftMetaL4proto))), "untranslated",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, IPv4)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfDrop)
			r.set("s", tt.flags, tt.keyLen, tt.attrs, tt.elems...)
			r.rule("pre", tt.load, lookupSet("s"), accept())
			if got := r.outcome(dns(), &knowing{}).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			inverse := map[string]string{"untranslated": "dropped", "dropped": "untranslated"}[tt.want]
			if inverse == "" {
				inverse = tt.want
			}
			r = newRig(t, IPv4)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfDrop)
			r.set("s", tt.flags, tt.keyLen, tt.attrs, tt.elems...)
			r.rule("pre", tt.load, lookupSet("s", num(uapi.NftaLookupFlags, uapi.NftLookupFInv)), accept())
			if got := r.outcome(dns(), &knowing{}).String(); got != inverse {
				t.Errorf("inverted: got %s, want %s", got, inverse)
			}
		})
	}
}

func TestVerdictMaps(t *testing.T) {
	const flags = uapi.NftSetMap
	verdicts := num(uapi.NftaSetDataType, uapi.NftDataVerdict)
	port := []byte{0, 53}
	other := []byte{0, 54}
	dreg := num(uapi.NftaLookupDreg, uapi.NftRegVerdict)
	tests := []struct {
		name  string
		flags uint32
		elems [][]byte
		load  []byte
		want  string
	}{
		{"hit", flags, [][]byte{elem(port, elemVerdict(uapi.NftGoto, "a")), elem(other, elemVerdict(uapi.NftGoto, "b"))}, payload(th, 2, 2), "198.51.100.1:53"},
		{"miss", flags, [][]byte{elem(other, elemVerdict(uapi.NftGoto, "b"))}, payload(th, 2, 2), "198.51.100.3:53"},
		{"catch-all", flags, [][]byte{elem(nil, elemVerdict(uapi.NftJump, "a")), elem(other, elemVerdict(uapi.NftGoto, "b"))}, payload(th, 2, 2), "198.51.100.1:53"},
		{"hit beside a catch-all", flags, [][]byte{elem(nil, elemVerdict(uapi.NftJump, "a")), elem(port, elemVerdict(uapi.NftGoto, "b"))}, payload(th, 2, 2), "198.51.100.2:53"},
		{"continue goes on to the next rule", flags, [][]byte{elem(port, elemVerdict(uapi.NftContinue, ""))}, payload(th, 2, 2), "198.51.100.3:53"},
		{"accept", flags, [][]byte{elem(port, elemVerdict(uapi.NfAccept, ""))}, payload(th, 2, 2), "untranslated"},
		{"drop", flags, [][]byte{elem(port, elemVerdict(uapi.NfDrop, ""))}, payload(th, 2, 2), "dropped"},
		{
			"key not known", flags,
			[][]byte{elem(port, elemVerdict(uapi.NftGoto, "a")), elem(other, elemVerdict(uapi.NftGoto, "b"))},
			join(metaKey(uapi.NftMetaMark)), "198.51.100.1:53, 198.51.100.2:53, or 198.51.100.3:53",
		},
		{
			"key not known, with a catch-all", flags,
			[][]byte{elem(port, elemVerdict(uapi.NftGoto, "a")), elem(nil, elemVerdict(uapi.NftGoto, "b"))},
			join(metaKey(uapi.NftMetaMark)), "198.51.100.1:53, or 198.51.100.2:53",
		},
		{"timed", flags | uapi.NftSetTimeout, [][]byte{elem(port, elemVerdict(uapi.NftGoto, "a"))}, payload(th, 2, 2), "198.51.100.1:53, or 198.51.100.3:53"},
		{"dynamic", flags | uapi.NftSetEval, nil, payload(th, 2, 2), "anything: " + whyDynamic},
		{
			"random", flags,
			[][]byte{elem([]byte{0, 0}, elemVerdict(uapi.NftGoto, "a")), elem([]byte{1, 0}, elemVerdict(uapi.NftGoto, "b"))},
			expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 2)), "198.51.100.1:53, or 198.51.100.2:53",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name == "random" && binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
				t.Skip("the keys are a little-endian machine's")
			}
			r := newRig(t, IPv4)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.chain("a", "b")
			r.rule("a", dnat("198.51.100.1:0"))
			r.rule("b", dnat("198.51.100.2:0"))
			r.set("m", tt.flags, 2, verdicts, tt.elems...)
			r.rule("pre", tt.load, lookupSet("m", dreg))
			r.rule("pre", dnat("198.51.100.3:0"))
			if got := r.outcome(dns(), &knowing{}).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestChains(t *testing.T) {
	ten := func(n string) []byte { return dnat("198.51.100." + n + ":0") }
	const pre = uapi.NfInetPreRouting
	tests := []struct {
		name  string
		build func(r *rig)
		want  string
	}{
		{"no rule", func(*rig) {}, "untranslated"},
		{"jump and back", func(r *rig) {
			r.rule("pre", jump("a"))
			r.rule("pre", ten("1"))
			r.rule("a", back())
		}, "198.51.100.1:53"},
		{"goto and the end: the base chain's policy", func(r *rig) {
			r.rule("pre", goTo("a"))
			r.rule("pre", ten("1"))
		}, "untranslated"},
		{"goto returns to the caller's caller", func(r *rig) {
			r.rule("pre", jump("a"))
			r.rule("pre", ten("1"))
			r.rule("a", goTo("b"))
			r.rule("a", ten("2"))
		}, "198.51.100.1:53"},
		{"return in the base chain", func(r *rig) {
			r.rule("pre", back())
			r.rule("pre", ten("1"))
		}, "untranslated"},
		{"accept in a chain ends the base chain", func(r *rig) {
			r.rule("pre", jump("a"))
			r.rule("pre", ten("1"))
			r.rule("a", accept())
		}, "untranslated"},
		{"the first that translates wins", func(r *rig) {
			r.rule("pre", ten("1"))
			r.rule("pre", ten("2"))
		}, "198.51.100.1:53"},
		{"perhaps", func(r *rig) {
			r.rule("pre", expr("limit"), ten("1"))
			r.rule("pre", ten("2"))
		}, "198.51.100.1:53, or 198.51.100.2:53"},
		{"by priority", func(r *rig) {
			r.base("pre2", pre, -101, uapi.NfAccept)
			r.rule("pre", ten("1"))
			r.rule("pre2", ten("2"))
		}, "198.51.100.2:53"},
		{"accept goes on to the next base chain", func(r *rig) {
			r.base("pre2", pre, -101, uapi.NfAccept)
			r.rule("pre", ten("1"))
			r.rule("pre2", accept())
		}, "198.51.100.1:53"},
		{"drop ends it", func(r *rig) {
			r.base("pre2", pre, -101, uapi.NfAccept)
			r.rule("pre", ten("1"))
			r.rule("pre2", dropIt())
		}, "dropped"},
		{"a policy that drops", func(r *rig) {
			r.base("pre2", pre, -101, uapi.NfDrop)
			r.rule("pre", ten("1"))
		}, "dropped"},
		{"equal priority: either may be first", func(r *rig) {
			r.base("pre2", pre, -100, uapi.NfAccept)
			r.rule("pre", ten("1"))
			r.rule("pre2", ten("2"))
		}, "198.51.100.1:53, or 198.51.100.2:53"},
		{"equal priority: one that lets it pass changes nothing", func(r *rig) {
			r.base("pre2", pre, -100, uapi.NfAccept)
			r.rule("pre", ten("1"))
			r.rule("pre2", payload(th, 2, 2), eq(0, 54), ten("2"))
		}, "198.51.100.1:53"},
		{"the same address and port are a translation too", func(r *rig) {
			r.rule("pre", dnat("203.0.113.10:53"))
		}, "203.0.113.10:53"},
		{"chains that only mark are passed over", func(r *rig) {
			r.rule("pre", payload(nh, 12, 4), eq(1, 2, 3, 4), jump("a"))
			r.rule("pre", ten("1"))
			r.rule("a", target("MARK", 2, make([]byte, 8)))
			r.rule("a", jump("b"))
			r.rule("b", back())
		}, "198.51.100.1:53"},
		{"a circle", func(r *rig) {
			r.rule("pre", jump("a"))
			r.rule("a", jump("b"))
			r.rule("b", jump("a"))
			r.rule("b", ten("1"))
		}, "anything: " + whyDepth},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, IPv4)
			r.base("pre", pre, -100, uapi.NfAccept)
			r.chain("a", "b", "c")
			tt.build(r)
			if got := r.outcome(dns(), &knowing{}).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// compat is struct nf_nat_ipv4_multi_range_compat, range2 struct nf_nat_range2.
func compat(flags uint32, low, high string, port, portHigh uint16) []byte {
	b := append(word(1), word(flags)...)
	b = append(append(b, netip.MustParseAddr(low).AsSlice()...), netip.MustParseAddr(high).AsSlice()...)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, port), portHigh)
}

func range2(flags uint32, low, high string, ports ...uint16) []byte {
	b := join(word(flags), xtAddr(low), xtAddr(high))
	for _, p := range ports {
		b = binary.BigEndian.AppendUint16(b, p)
	}
	return append(b, 0, 0)
}

func TestTranslations(t *testing.T) {
	const ips, ports, offset, netmap = uapi.NfNatRangeMapIPs, uapi.NfNatRangeProtoSpecified, uapi.NfNatRangeProtoOffset, uapi.NfNatRangeNetmap
	natv := func(family uint32, flags uint32, attrs ...[]byte) []byte {
		return expr("nat", append([][]byte{num(uapi.NftaNatType, 1), num(uapi.NftaNatFamily, family), num(uapi.NftaNatFlags, flags)}, attrs...)...)
	}
	addrs := join(num(uapi.NftaNatRegAddrMin, 1), num(uapi.NftaNatRegAddrMax, 2))
	own := dns()
	own.Src = netip.MustParseAddr("192.0.2.1")
	tests := []struct {
		name   string
		family Family
		exprs  []byte
		p      Packet
		want   string
	}{
		{"address", IPv4, dnat("198.51.100.1:0"), dns(), "198.51.100.1:53"},
		{"address and port", IPv4, dnat("198.51.100.1:5353"), dns(), "198.51.100.1:5353"},
		{"port alone", INet, join(immediateReg(1, 0, 99), natv(uapi.NfprotoInet, 0, num(uapi.NftaNatRegProtoMin, 1))), dns(), "203.0.113.10:99"},
		{"range of addresses", IPv4, join(immediateReg(1, 198, 51, 100, 1), immediateReg(2, 198, 51, 100, 9), natv(2, 0, addrs)), dns(), "198.51.100.1-198.51.100.9:53"},
		{"range upside down", IPv4, join(immediateReg(1, 198, 51, 100, 9), immediateReg(2, 198, 51, 100, 1), natv(2, 0, addrs)), dns(), "anything: " + whyAddress},
		{"of the other family: no effect", INet, join(immediateReg(1, 198, 51, 100, 1), natv(2, 0, num(uapi.NftaNatRegAddrMin, 1))), dns6(), "untranslated"},
		{"prefix", IPv4, join(immediateReg(1, 198, 51, 100, 0), immediateReg(2, 198, 51, 100, 255), natv(2, netmap, addrs)), dns(), "198.51.100.10:53"},
		{"address not known", IPv4, join(metaKey(uapi.NftMetaMark), natv(2, 0, num(uapi.NftaNatRegAddrMin, 1))), dns(), "anything: " + whyAddress},
		{"snat is out of place", IPv4, expr("nat", num(uapi.NftaNatType, 0), num(uapi.NftaNatFamily, 2)), dns(), `anything: the expression "nat" is not understood`},
		{"redirect", IPv4, expr("redir"), dns(), "this host:53, or dropped"},
		{"redirect to ports", IPv4, join(immediateReg(1, 0, 80), immediateReg(2, 0, 90), expr("redir", num(1, 1), num(2, 2))), dns(), "this host:80-90, or dropped"},
		{"redirect of this host's packet", IPv4, expr("redir"), own, "127.0.0.1:53"},

		{"DNAT 2", IPv4, target("DNAT", 2, range2(ips|ports, "198.51.100.1", "198.51.100.1", 5353, 5353, 0)), dns(), "198.51.100.1:5353"},
		{"DNAT 2 of a port alone", IPv4, target("DNAT", 2, range2(ports, "0.0.0.0", "0.0.0.0", 99, 99, 0)), dns(), "203.0.113.10:99"},
		{"DNAT 2 with shifted ports", IPv4, target("DNAT", 2, range2(ips|ports|offset, "198.51.100.1", "198.51.100.1", 1000, 1009, 50)), dns(), "198.51.100.1:1000-1009"},
		{"DNAT 1", IPv6, target("DNAT", 1, range2(ips, "2001:db8:b::1", "2001:db8:b::9", 0, 0)), dns6(), "[2001:db8:b::1]-[2001:db8:b::9]:53"},
		{"DNAT over several words", IPv6, target("DNAT", 1, range2(ips, "2001:db8:b::5", "2001:db8:c::1", 0, 0)), dns6(), "[2001:db8:b::]-[2001:db8:c:0:ffff:ffff:ffff:ffff]:53"},
		{"DNAT 0", IPv4, target("DNAT", 0, compat(ips|ports, "198.51.100.1", "198.51.100.1", 7, 9)), dns(), "198.51.100.1:7-9"},
		{"ports upside down", IPv4, target("DNAT", 0, compat(ips|ports, "198.51.100.1", "198.51.100.1", 9, 7)), dns(), "198.51.100.1:7-9"},
		{"DNAT cut short", IPv4, target("DNAT", 2, word(0)), dns(), `anything: the target "DNAT" is not understood`},
		{"REDIRECT", IPv4, target("REDIRECT", 0, compat(ports, "0.0.0.0", "0.0.0.0", 80, 80)), dns(), "this host:80, or dropped"},
		{"NETMAP", IPv4, target("NETMAP", 0, compat(ips, "198.51.100.0", "198.51.100.255", 0, 0)), dns(), "198.51.100.10:53"},
		{"NETMAP of IPv6", IPv6, target("NETMAP", 0, range2(ips, "2001:db8:b::", "2001:db8:b::ffff", 0, 0, 0)), dns6(), "[2001:db8:b::10]:53"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, tt.family)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.base("out", uapi.NfInetLocalOut, -100, uapi.NfAccept)
			r.rule("pre", tt.exprs)
			r.rule("out", tt.exprs)
			if got := r.outcome(tt.p, &knowing{}).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestOrigin(t *testing.T) {
	r := newRig(t, IPv4)
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	r.base("out", uapi.NfInetLocalOut, -100, uapi.NfAccept)
	r.rule("pre", dnat("198.51.100.1:0"))
	r.rule("out", dnat("198.51.100.2:0"))
	own := dns()
	own.Src = netip.MustParseAddr("192.0.2.1")
	for _, tt := range []struct {
		name string
		p    Packet
		h    Host
		want string
	}{
		{"another host", dns(), &knowing{}, "198.51.100.1:53"},
		{"this host", own, &knowing{}, "198.51.100.2:53"},
		{"not certain", own, &knowing{unsure: map[netip.Addr]bool{own.Src: true}}, "198.51.100.1:53, or 198.51.100.2:53"},
		{"a host that knows nothing", own, Unknown{}, "198.51.100.1:53, or 198.51.100.2:53"},
		{"no ports", Packet{conntrack.ICMP, own.Src, own.Dst, 0, 0}, &knowing{}, "anything: " + whyProto},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := r.outcome(tt.p, tt.h).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestExplain(t *testing.T) {
	r := newRig(t, IPv4)
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	r.chain("DOCKER")
	r.rule("pre", match("comment", 0, append([]byte("published"), 0)), match("addrtype", 1, append(shorts(0, 2), word(0)...)), jump("DOCKER"))
	r.rule("DOCKER", metaKey(uapi.NftMetaL4proto), eq(17), payload(th, 2, 2), eq(0, 53), dnat("198.51.100.1:5353"))
	o, steps := r.ruleset().Explain(dns(), &knowing{})
	var got []string
	for _, s := range steps {
		got = append(got, s.Rule.String()+": "+s.Text+": "+s.Effect)
	}
	want := "ip t pre handle 1: /* published */ -m addrtype --dst-type UNICAST jump DOCKER: leads to DOCKER\n" +
		"ip t DOCKER handle 2: meta l4proto udp th dport 53 dnat to 198.51.100.1:5353: translates it to 198.51.100.1:5353"
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
	if o.By != (Rule{IPv4, "t", "DOCKER", 2}) {
		t.Errorf("by %s", o.By)
	}
}
