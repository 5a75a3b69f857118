package ruleset

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// whole is an index that leaves no rule out.
func whole(n int) *index {
	x := &index{next: make([]int32, n)}
	for i := range x.next {
		x.next[i] = int32(i + 1)
	}
	return x
}

// TestIndex leads packets through long chains of random rules, with an index and
// without: what may happen to them is the same.
func TestIndex(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed: ", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	tab := newRig(t, IPv4).m.tables[tableKey{IPv4, "t"}]
	indexed, anything, packets := 0, 0, 0
	for range 60 {
		family := []Family{INet, IPv4, IPv6}[rnd.IntN(3)]
		build := func(rnd *rand.Rand) *rig {
			r := newRig(t, family)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.chain("c")
			r.set("set", uapi.NftSetInterval, 4, nil, elem([]byte{10, 0, 0, 0}), elemEnd([]byte{11, 0, 0, 0}))
			r.set("map", uapi.NftSetMap, 2, num(uapi.NftaSetDataLen, 4), elem([]byte{0, 53}, dataOf(uapi.NftaSetElemData, 198, 51, 100, 1)))
			r.set("vmap", uapi.NftSetMap, 4, num(uapi.NftaSetDataType, uapi.NftDataVerdict),
				elem(word(17), elemVerdict(uapi.NftJump, "c")), elem(nil, elemVerdict(uapi.NftContinue, "")))
			r.rule("c", match("statistic", 0, append(shorts(0, 0), word(1<<30)...)), accept())
			for range indexFrom + rnd.IntN(100) {
				r.rule("pre", randomRule(rnd, tab)...)
			}
			return r
		}
		again := rnd.Uint64()
		with, without := build(rand.New(rand.NewPCG(again, 2))), build(rand.New(rand.NewPCG(again, 2)))
		plain := without.m.tables[tableKey{family, "t"}].chains["pre"]
		plain.indices = [2]*index{whole(len(plain.each())), whole(len(plain.each()))}
		a, b := with.ruleset(), without.ruleset()
		for n := range 60 {
			p := dns()
			p.Dst, p.DstPort = netip.AddrFrom4([4]byte{203, 0, 113, byte(n % 20)}), uint16(50+n%7)
			if n%2 == 1 {
				p = dns6()
				p.Dst, p.DstPort = netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(n % 20)}), uint16(50+n%7)
			}
			x, y := a.Outcome(p, &knowing{}), b.Outcome(p, &knowing{})
			if !x.equal(y) || x.By != y.By {
				t.Fatalf("seed %d: to %s:%d: with an index %s by %s, without %s by %s", seed, p.Dst, p.DstPort, x, x.By, y, y.By)
			}
			if packets++; x.Any {
				anything++
			}
		}
		for _, x := range with.m.tables[tableKey{family, "t"}].chains["pre"].indices {
			if x == nil {
				continue
			}
			indexed++
			if family != INet && len(x.addr) == 0 && len(x.port) == 0 {
				t.Error("no rule is found by address or port")
			}
		}
	}
	t.Logf("%d indices, %d packets, %d may be anything", indexed, packets, anything)
}

// randomRule compares with a destination in many ways, and with other things
// before and after.
func randomRule(rnd *rand.Rand, tab *table) (rule [][]byte) {
	noise := func() {
		if rnd.IntN(3) > 0 {
			return
		}
		b := make(reader, 40)
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		e := b.expression()
		if _, unknown := decodeExpr(tab, walkOne(e)).(*anyOp); !unknown || rnd.IntN(50) == 0 {
			rule = append(rule, e)
		}
	}
	noise()
	switch rnd.IntN(9) {
	case 0, 1:
		rule = append(rule, payload(nh, 16, 4), eq(203, 0, 113, byte(rnd.IntN(20))))
	case 2:
		rule = append(rule, payload(nh, 24, 16), eq(0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, byte(rnd.IntN(20))))
	case 3:
		rule = append(rule, metaKey(uapi.NftMetaL4proto), eq(17), payload(th, 2, 2), eq(0, byte(50+rnd.IntN(7))))
	case 4:
		rule = append(rule, match("udp", 0, append(shorts(0, 65535, uint16(50+rnd.IntN(7)), uint16(50+rnd.IntN(7))), byte(rnd.IntN(4)), 0)))
	case 5:
		rule = append(rule, payload(nh, 16, 4), cmpTo(uapi.NftCmpNeq, 203, 0, 113, byte(rnd.IntN(20))))
	case 6:
		rule = append(rule, payload(nh, 16, 3), eq(203, 0, 113))
	case 7: // the register is overwritten before it is compared
		rule = append(rule, payload(nh, 16, 4), immediateReg(1, 203, 0, 113, 5), eq(203, 0, 113, 5))
	}
	noise()
	if rnd.IntN(2) == 0 {
		rule = append(rule, payload(th, 2, 2), eq(0, byte(50+rnd.IntN(7))))
	}
	noise()
	return append(rule, [][]byte{dnat("198.51.100.1:0"), accept(), back(), jump("c"), dropIt()}[rnd.IntN(5)])
}

// walkOne returns what is in an element of a list.
func walkOne(b []byte) []byte {
	a := walk(b)
	a.next()
	return a.val
}
