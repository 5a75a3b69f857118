package ruleset

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// FuzzMessages decodes whatever may come over netlink, interprets it and writes it
// for people. It must end, and end soon.
func FuzzMessages(f *testing.F) {
	tables := join(str(uapi.NftaTableName, "nat"))
	chains := join(str(uapi.NftaChainTable, "nat"), str(uapi.NftaChainName, "pre"), str(uapi.NftaChainType, "nat"),
		nla(uapi.NftaChainHook, num(uapi.NftaHookHooknum, 0), num(uapi.NftaHookPriority, 0)))
	f.Add(tables, chains, []byte{}, []byte{}, []byte{})
	for _, exprs := range [][]byte{
		join(payload(th, 2, 2), eq(0, 53), dnat("198.51.100.1:53")),
		join(payload(th, 2, 2), lookupSet("s", num(uapi.NftaLookupDreg, 0))),
		join(metaKey(uapi.NftMetaIifname), bitwiseAnd(1, 2, 3), shiftBy(1, 3), swap(4, 4), accept()),
		join(match("multiport", 1, multiport(1, 0, []uint16{1, 2}, 0)), target("DNAT", 2, range2(3, "198.51.100.1", "198.51.100.9", 1, 2, 3))),
		join(expr("numgen", num(1, 1), num(2, 4000)), expr("numgen", num(1, 1), num(2, 4000)), jump("pre")),
		join(expr("fib", num(1, 1), num(2, 3), num(3, 2)), eq(2, 0, 0, 0), expr("redir")),
	} {
		rule := join(str(uapi.NftaRuleTable, "nat"), str(uapi.NftaRuleChain, "pre"), nla(uapi.NftaRuleHandle, make([]byte, 8)),
			nla(uapi.NftaRuleExpressions, exprs))
		sets := join(str(uapi.NftaSetTable, "nat"), str(uapi.NftaSetName, "s"), num(uapi.NftaSetFlags, uapi.NftSetMap|uapi.NftSetInterval),
			num(uapi.NftaSetKeyLen, 2), num(uapi.NftaSetDataType, uapi.NftDataVerdict), num(uapi.NftaSetDataLen, 4))
		f.Add(tables, chains, rule, sets, nla(uapi.NftaSetElemListElements, elem([]byte{0, 50}, elemVerdict(uapi.NftJump, "pre")),
			elemEnd([]byte{0, 60})))
	}
	f.Fuzz(func(t *testing.T, tables, chains, rules, sets, elems []byte) {
		start := time.Now()
		for _, family := range []Family{INet, IPv4, IPv6} {
			m := newModel()
			_ = m.addTable(family, tables)
			_ = m.addChain(family, chains)
			_ = m.addSet(family, sets)
			_ = m.addRule(family, rules)
			_ = m.addRule(family, rules)
			for _, t := range m.tables {
				for _, s := range t.sets {
					g := gathering{table: t, set: s, limits: usualLimits}
					if g.add(elems) == nil {
						s.elements = g.finish()
					}
				}
			}
			rs := &Ruleset{model: m, effort: newEffort()}
			rs.eval = eval{m: m, fetch: func(*table, *set) (*elements, error) { return nil, errHuge }}
			for _, p := range []Packet{dns(), dns6()} {
				wide, narrow := rs.Outcome(p, Unknown{}), rs.Outcome(p, &knowing{inputs: map[netip.Addr]*Interfaces{
					p.Src: {ID: 1, List: []Interface{{2, "eth0"}}},
				}})
				if !covers(wide, narrow) {
					t.Errorf("knowing less makes less possible: %s, but %s", wide, narrow)
				}
				_, _ = rs.Explain(p, &knowing{})
			}
			_ = rs.NotUnderstood()
			if c := rs.since(context.Background(), &Ruleset{model: m}); len(c.Suspects) > 0 {
				t.Errorf("nothing has changed, and yet %v is suspect", c.Suspects)
			}
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
	})
}

// covers tells whether what is possible by narrow is possible by wide.
func covers(wide, narrow *Outcome) bool {
	if wide.Any || narrow.Any {
		return wide.Any
	}
	if narrow.Untranslated && !wide.Untranslated || narrow.Dropped && !wide.Dropped {
		return false
	}
	for _, a := range narrow.To {
		if !wide.Allows(a, AllTypes) {
			return false
		}
	}
	return len(narrow.Ranges) == 0 || len(wide.Ranges) > 0
}

// TestHostile interprets rulesets that were made to be slow.
func TestHostile(t *testing.T) {
	const pre = uapi.NfInetPreRouting
	numgen := func(n uint32) []byte { return expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, n)) }
	tests := []struct {
		name  string
		build func(r *rig)
		any   bool
	}{
		{"every chain jumps twice to the next", func(r *rig) {
			for i := range 15 {
				for range 2 {
					r.rule(name(i), expr("limit"), jump(name(i+1)))
				}
			}
			r.rule(name(15), dnat("198.51.100.1:0"))
			r.rule("pre", jump(name(0)))
		}, false},
		{"every chain jumps to all others", func(r *rig) {
			for i := range 40 {
				for j := range 40 {
					r.rule(name(i), expr("limit"), jump(name(j)))
				}
				r.rule(name(i), accept())
			}
			r.rule("pre", jump(name(0)))
		}, true},
		{"deeper than the kernel allows", func(r *rig) {
			for i := range 40 {
				r.rule(name(i), jump(name(i+1)))
			}
			r.rule(name(40), accept())
			r.rule("pre", jump(name(0)))
		}, true},
		{"forks in forks", func(r *rig) {
			r.rule("pre", numgen(4000), numgen(4000), numgen(4000), eq(1, 2, 3, 4), accept())
		}, true},
		{"a map of every chain, and the key is not known", func(r *rig) {
			var elems [][]byte
			for i := range 4000 {
				elems = append(elems, elem(word(uint32(i)), elemVerdict(uapi.NftJump, name(i%40))))
			}
			r.set("m", uapi.NftSetMap, 4, num(uapi.NftaSetDataType, uapi.NftDataVerdict), elems...)
			for i := range 40 {
				for range 30 {
					r.rule(name(i), metaKey(uapi.NftMetaMark), lookupSet("m", num(uapi.NftaLookupDreg, 0)))
				}
			}
			r.rule("pre", jump(name(0)))
		}, true},
		{"a long way", func(r *rig) {
			exprs := make([][]byte, 0, 100)
			for range 50 {
				exprs = append(exprs, payload(th, 2, 2), eq(0, 53))
			}
			exprs = append(exprs, eq(9), accept())
			for range 3000 {
				r.rule("pre", exprs...)
			}
		}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, IPv4)
			r.base("pre", pre, -100, uapi.NfAccept)
			for i := range 50 {
				r.chain(name(i))
			}
			tt.build(r)
			rs := r.ruleset()
			o := rs.Outcome(dns(), &knowing{})
			if steps := mostEffort - rs.effort.left; steps > maxSteps {
				t.Errorf("the first packet took %d steps", steps)
			}
			if o.Any != tt.any {
				t.Errorf("%s", o)
			}
			if !tt.any {
				return
			}
			if o.Why != whyWork && o.Why != whyDepth {
				t.Errorf("why: %s", o.Why)
			}
		})
	}
}

func name(i int) string { return "c" + string(rune('0'+i/10)) + string(rune('0'+i%10)) }

// A set that is too large counts as unknown, and takes no memory.
func TestHugeSet(t *testing.T) {
	r := newRig(t, IPv4)
	r.set("s", 0, 4, nil)
	tab := r.m.tables[tableKey{IPv4, "t"}]
	g := gathering{table: tab, set: tab.sets["s"], limits: usualLimits}
	batch := make([][]byte, 1024)
	for i := range batch {
		batch[i] = elem(word(uint32(i)))
	}
	message := nla(uapi.NftaSetElemListElements, batch...)
	for range usualLimits.elements / len(batch) {
		if err := g.add(message); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.add(message); !errors.Is(err, errHuge) {
		t.Errorf("got %v", err)
	}
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	r.rule("pre", payload(nh, 16, 4), lookupSet("s"), accept())
	tab.sets["s"].elements = nil // fetching it gives errHuge
	if o := r.outcome(dns(), &knowing{}); !o.Any || o.Why != errHuge.Error() {
		t.Error(o)
	}
}

func TestLoadLimits(t *testing.T) {
	r := newRig(t, IPv4)
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	r.m.raw = maxRaw - 8
	err := r.m.addRule(IPv4, join(str(uapi.NftaRuleTable, "t"), str(uapi.NftaRuleChain, "pre"),
		nla(uapi.NftaRuleHandle, make([]byte, 8)), nla(uapi.NftaRuleExpressions, accept())))
	if !errors.Is(err, ErrTooLarge) {
		t.Errorf("rules: %v", err)
	}
	r.m.objects = maxObjects
	if err := r.m.addTable(IPv4, str(uapi.NftaTableName, "x")); !errors.Is(err, ErrTooLarge) {
		t.Errorf("tables: %v", err)
	}
}

func BenchmarkOutcome(b *testing.B) {
	r := newRig(b, IPv4)
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	for i := range 7000 {
		r.rule("pre", payload(nh, 16, 4), eq(203, 0, byte(113+i/256), byte(i)), payload(nh, 9, 1), eq(17),
			payload(th, 2, 2), eq(0, 53), dnat("198.51.100.1:0"))
	}
	rs := r.ruleset()
	p := dns()
	for name, dst := range map[string]string{"first": "203.0.113.0", "last of 7000": "203.0.140.87"} {
		p.Dst = netip.MustParseAddr(dst)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if o := rs.Outcome(p, &knowing{}); len(o.To) != 1 {
					b.Fatal(o)
				}
			}
		})
	}
}
