package ruleset

import (
	"context"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// reader makes numbers of a fuzzer's bytes; behind the end they are 0.
type reader []byte

func (r *reader) byte() byte {
	if len(*r) == 0 {
		return 0
	}
	b := (*r)[0]
	*r = (*r)[1:]
	return b
}

func (r *reader) below(n int) int { return int(r.byte()) % n }

// reg is a register, as a rule that was not written by nft may name it.
func (r *reader) reg() uint32 {
	return []uint32{1, 1, 1, 2, 3, 4, 8, 9, 10, 11, 12, 15, 16, 20, 22, 23}[r.below(16)]
}

func (r *reader) length() int {
	return []int{1, 2, 3, 4, 4, 6, 8, 12, 16, 16, 17, 20, 32, 64}[r.below(14)]
}

func (r *reader) value() []byte {
	b := make([]byte, r.length())
	for i := range b {
		b[i] = r.byte()
	}
	return b
}

// expression is any expression, of any lengths and registers.
func (r *reader) expression() []byte {
	dreg := func(typ uint16) []byte { return num(typ, r.reg()) }
	switch r.below(20) {
	case 0:
		return expr("payload", dreg(uapi.NftaPayloadDreg), num(uapi.NftaPayloadBase, uint32(r.below(4))),
			num(uapi.NftaPayloadOffset, uint32(r.below(44))), num(uapi.NftaPayloadLen, uint32(r.length())))
	case 1, 2:
		return expr("meta", dreg(uapi.NftaMetaDreg), num(uapi.NftaMetaKey, uint32(r.below(34))))
	case 3:
		return expr("ct", dreg(uapi.NftaCtDreg), num(uapi.NftaCtKey, uint32(r.below(24))),
			nla(uapi.NftaCtDirection, []byte{byte(r.below(3))}))
	case 4:
		mask := r.value()
		return expr("bitwise", dreg(uapi.NftaBitwiseSreg), dreg(uapi.NftaBitwiseDreg), num(uapi.NftaBitwiseLen, uint32(len(mask))),
			dataOf(uapi.NftaBitwiseMask, mask...), dataOf(uapi.NftaBitwiseXor, make([]byte, len(mask))...))
	case 5:
		return expr("bitwise", dreg(uapi.NftaBitwiseSreg), dreg(uapi.NftaBitwiseDreg), num(uapi.NftaBitwiseLen, uint32(r.length())),
			num(uapi.NftaBitwiseOp, uint32(r.below(4))), dataOf(uapi.NftaBitwiseData, word(uint32(r.below(34)))...))
	case 6:
		return expr("byteorder", dreg(uapi.NftaByteorderSreg), dreg(uapi.NftaByteorderDreg),
			num(uapi.NftaByteorderLen, uint32(r.length())), num(uapi.NftaByteorderSize, []uint32{2, 4, 8, 3}[r.below(4)]))
	case 7, 8:
		return expr("cmp", dreg(uapi.NftaCmpSreg), num(uapi.NftaCmpOp, uint32(r.below(6))), dataOf(uapi.NftaCmpData, r.value()...))
	case 9:
		from := r.value()
		return expr("range", dreg(uapi.NftaRangeSreg), num(uapi.NftaRangeOp, uint32(r.below(2))),
			dataOf(uapi.NftaRangeFrom, from...), dataOf(uapi.NftaRangeTo, from...))
	case 10:
		attrs := [][]byte{str(uapi.NftaLookupSet, []string{"set", "map", "vmap"}[r.below(3)]), dreg(uapi.NftaLookupSreg)}
		switch r.below(3) {
		case 0:
			attrs = append(attrs, num(uapi.NftaLookupDreg, uapi.NftRegVerdict))
		case 1:
			attrs = append(attrs, dreg(uapi.NftaLookupDreg))
		}
		return expr("lookup", attrs...)
	case 11, 12:
		return expr("immediate", dreg(uapi.NftaImmediateDreg), dataOf(uapi.NftaImmediateData, r.value()...))
	case 13:
		return expr([]string{"numgen", "hash"}[r.below(2)], num(uapi.NftaNgDreg, r.reg()), num(uapi.NftaHashDreg, uint32(1+r.below(4))),
			num(uapi.NftaHashModulus, uint32(r.below(6))))
	case 14:
		return expr("fib", dreg(uapi.NftaFibDreg), num(uapi.NftaFibResult, uint32(r.below(5))), num(uapi.NftaFibFlags, uint32(r.below(32))))
	case 15:
		return expr([]string{"rt", "socket", "osf", "xfrm", "exthdr"}[r.below(5)], dreg(1), dreg(2))
	case 16, 17:
		attrs := [][]byte{num(uapi.NftaNatType, uapi.NftNatDnat), num(uapi.NftaNatFamily, []uint32{2, 10, 1}[r.below(3)])}
		for typ := uint16(uapi.NftaNatRegAddrMin); typ <= uapi.NftaNatRegProtoMax; typ++ {
			if r.below(2) == 1 {
				attrs = append(attrs, dreg(typ))
			}
		}
		return expr("nat", append(attrs, num(uapi.NftaNatFlags, uint32(r.below(128))))...)
	case 18:
		attrs := [][]byte{}
		for typ := uint16(uapi.NftaRedirRegProtoMin); typ <= uapi.NftaRedirRegProtoMax; typ++ {
			if r.below(3) > 0 {
				attrs = append(attrs, dreg(typ))
			}
		}
		return expr("redir", attrs...)
	}
	info := make([]byte, r.byte())
	for i := range info {
		info[i] = r.byte()
	}
	kind := []string{"match", "target"}[r.below(2)]
	name := []string{
		"udp", "tcp", "sctp", "multiport", "addrtype", "iprange", "conntrack", "state", "statistic", "comment", "recent",
		"DNAT", "REDIRECT", "NETMAP",
	}[r.below(14)]
	return expr(kind, str(uapi.NftaMatchName, name), num(uapi.NftaMatchRev, uint32(r.below(4))), nla(uapi.NftaMatchInfo, info))
}

// FuzzExpressions decodes, interprets, compares and writes rules that no program
// would make, but that the kernel takes from whoever may write rules: expressions
// in any order, with registers and lengths that do not fit together.
func FuzzExpressions(f *testing.F) {
	f.Add([]byte{0, 11, 0, 3, 198, 51, 100, 1, 16, 0, 1, 0, 0, 0, 0})
	f.Add([]byte{1, 0, 16, 16, 0, 1, 0, 0}) // dnat to meta l4proto
	f.Fuzz(func(t *testing.T, program []byte) {
		if len(program) > 2000 {
			return
		}
		read := reader(program)
		var exprs [][]byte
		for len(read) > 0 && len(exprs) < 12 {
			exprs = append(exprs, read.expression())
		}
		for _, family := range []Family{INet, IPv4, IPv6} {
			r := newRig(t, family)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.base("out", uapi.NfInetLocalOut, -100, uapi.NfAccept)
			r.chain("c")
			r.set("set", uapi.NftSetInterval, 4, nil, elem([]byte{10, 0, 0, 0}), elemEnd([]byte{11, 0, 0, 0}))
			r.set("map", uapi.NftSetMap, 2, num(uapi.NftaSetDataLen, 4), elem([]byte{0, 53}, dataOf(uapi.NftaSetElemData, 198, 51, 100, 1)))
			r.set("vmap", uapi.NftSetMap, 4, num(uapi.NftaSetDataType, uapi.NftDataVerdict),
				elem(word(17), elemVerdict(uapi.NftJump, "c")), elem(nil, elemVerdict(uapi.NftContinue, "")))
			for i := range exprs {
				r.rule("c", exprs[i:]...)
			}
			r.rule("pre", exprs...)
			r.rule("pre", jump("c"))
			r.rule("out", jump("c"))
			rs := r.ruleset()
			for _, p := range []Packet{dns(), dns6(), {Proto: dns().Proto, Dst: dns().Dst, DstPort: 53}} {
				wide := rs.Outcome(p, Unknown{})
				if narrow := rs.Outcome(p, &knowing{}); !covers(wide, narrow) {
					t.Errorf("knowing less makes less possible: %s, but %s", wide, narrow)
				}
				_, _ = rs.Explain(p, Unknown{})
			}
			for _, tab := range r.m.tables {
				for _, c := range tab.chains {
					for _, x := range c.pairs {
						_ = describe(tab, x)
					}
				}
			}
			_ = rs.NotUnderstood()
			if c := rs.since(context.Background(), &Ruleset{model: r.m}); len(c.Suspects) > 0 {
				t.Errorf("nothing has changed, and yet %v is suspect", c.Suspects)
			}
			empty := newRig(t, family)
			_ = rs.since(context.Background(), &Ruleset{model: empty.m})
		}
	})
}

// What no program writes is explained all the same.
func TestDescribeOddities(t *testing.T) {
	to := func(family byte, attrs ...[]byte) []byte {
		return expr("nat", append([][]byte{num(uapi.NftaNatType, uapi.NftNatDnat), num(uapi.NftaNatFamily, uint32(family))}, attrs...)...)
	}
	addr, port := num(uapi.NftaNatRegAddrMin, 1), num(uapi.NftaNatRegProtoMin, 1)
	for _, tt := range []struct {
		name  string
		exprs []byte
		want  string
	}{
		{"to a protocol", join(metaKey(uapi.NftMetaL4proto), to(2, addr)), "dnat to meta l4proto"},
		{"to an interface's name", join(metaKey(uapi.NftMetaIifname), to(2, addr)), "dnat to iifname"},
		{"to the family", join(metaKey(uapi.NftMetaNfproto), to(2, addr, port)), "dnat to meta nfproto"},
		{"to a mark and a port", join(metaKey(uapi.NftMetaMark), immediateReg(2, 0, 53), to(2, addr, num(uapi.NftaNatRegProtoMin, 2))), "dnat to meta mark:53"},
		{"to its own source", join(payload(nh, 12, 4), to(2, addr)), "dnat to ip saddr"},
		{"to a register that was not loaded", to(2, addr), "dnat to reg"},
		{"to a range", join(immediateReg(1, 198, 51, 100, 1), immediateReg(2, 198, 51, 100, 9), to(2, addr, num(uapi.NftaNatRegAddrMax, 2))), "dnat to 198.51.100.1-198.51.100.9"},
		{"to half an address", join(immediateReg(1, 198, 51), to(2, addr)), "dnat to 50739"},
		{"port of a protocol", join(metaKey(uapi.NftMetaL4proto), expr("redir", num(uapi.NftaRedirRegProtoMin, 1))), "redirect to :meta l4proto"},
		{"a protocol of four bytes", join(metaKey(uapi.NftMetaL4proto), eq(17, 0, 0, 0)), "meta l4proto 0x11000000"},
		{"a family of two", join(metaKey(uapi.NftMetaNfproto), eq(2, 0)), "meta nfproto 0x0200"},
		{"an address of seventeen", join(payload(nh, 12, 4), eq(make([]byte, 17)...)), "ip saddr 0x" + strings.Repeat("00", 17)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, IPv4)
			if got := describe(r.m.tables[tableKey{IPv4, "t"}], tt.exprs); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// How x_tables reads addresses depends on the packet where a table is of both
// families.
func TestBothFamilies(t *testing.T) {
	for _, tt := range []struct {
		name  string
		exprs []byte
		want  string
	}{
		{"DNAT", target("DNAT", 2, range2(3, "198.51.100.1", "198.51.100.9", 1, 2, 3)), `anything: the target "DNAT" is not understood in a table of both families`},
		{"REDIRECT", target("REDIRECT", 0, make([]byte, 40)), `anything: the target "REDIRECT" is not understood in a table of both families`},
		{"REJECT", target("REJECT", 0, nil), "dropped"},
		{"iprange", join(match("iprange", 1, make([]byte, 65)), accept()), "untranslated, or dropped"},
		{"conntrack", join(match("conntrack", 3, make([]byte, 170)), accept()), "untranslated, or dropped"},
		{"udp", join(match("udp", 0, append(shorts(0, 65535, 53, 53), 0, 0)), accept()), "untranslated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, INet)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfDrop)
			r.rule("pre", tt.exprs)
			if got := r.outcome(dns(), &knowing{}).String(); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}
