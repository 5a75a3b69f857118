package ruleset

import (
	"testing"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

func setMark(v uint32) []byte {
	return join(immediateReg(1, word(v)...), expr("meta", num(uapi.NftaMetaKey, uapi.NftMetaMark), num(uapi.NftaMetaSreg, 1)))
}

func setConnMark(v uint32) []byte {
	return join(immediateReg(1, word(v)...), expr("ct", num(uapi.NftaCtKey, uapi.NftCtMark), num(uapi.NftaCtSreg, 1)))
}

func markIs(v uint32) []byte { return join(metaKey(uapi.NftMetaMark), eq(word(v)...)) }

// copyMark sets one mark to the other.
func copyMark(toConn bool) []byte {
	if toConn {
		return join(metaKey(uapi.NftMetaMark), expr("ct", num(uapi.NftaCtKey, uapi.NftCtMark), num(uapi.NftaCtSreg, 1)))
	}
	return join(ctKey(uapi.NftCtMark), expr("meta", num(uapi.NftaMetaKey, uapi.NftMetaMark), num(uapi.NftaMetaSreg, 1)))
}

// Marks that rules have set before in a hook decide, on whatever way they were set.
func TestMarks(t *testing.T) {
	const maybe = "198.51.100.1:53, or untranslated"
	limit := expr("limit")
	restore := func(mode byte, mark, ctMask, nfMask uint32) []byte {
		return target("CONNMARK", 1, join(word(mark), word(ctMask), word(nfMask), []byte{mode}))
	}
	tests := []struct {
		name  string
		build func(r *rig)
		want  string
	}{
		{"set", func(r *rig) {
			r.rule("pre", setMark(1))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"set to another", func(r *rig) {
			r.rule("pre", setMark(2))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "untranslated"},
		{"not set", func(r *rig) {
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"set by a rule that may match", func(r *rig) {
			r.rule("pre", limit, setMark(1))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"set to one of two", func(r *rig) {
			r.rule("pre", setMark(1))
			r.rule("pre", limit, setMark(3))
			r.rule("pre", metaKey(uapi.NftMetaMark), bitwiseAnd(word(1)...), eq(word(1)...), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"set by the beginning of a rule that does not match", func(r *rig) {
			r.rule("pre", setMark(1), payload(th, 2, 2), eq(0, 99), accept())
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"set behind what does not match", func(r *rig) {
			r.rule("pre", setMark(2))
			r.rule("pre", payload(th, 2, 2), eq(0, 99), setMark(1))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "untranslated"},
		{"set in a chain that is jumped to", func(r *rig) {
			r.rule("c", setMark(1))
			r.rule("pre", jump("c"))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"set in a chain that may be jumped to", func(r *rig) {
			r.rule("c", setMark(1))
			r.rule("pre", limit, jump("c"))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"set before a return", func(r *rig) {
			r.rule("c", setMark(1), back())
			r.rule("c", setMark(2))
			r.rule("pre", jump("c"))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"a chain that is met with two marks", func(r *rig) {
			r.rule("c", markIs(2), dnat("198.51.100.1:0"))
			r.rule("pre", setMark(1))
			r.rule("pre", jump("c"))
			r.rule("pre", setMark(2))
			r.rule("pre", jump("c"))
		}, "198.51.100.1:53"},
		{"a base chain that comes later", func(r *rig) {
			r.base("later", uapi.NfInetPreRouting, 0, uapi.NfAccept)
			r.rule("pre", setMark(1), accept())
			r.rule("pre", setMark(2))
			r.rule("later", markIs(1), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"one of the same priority", func(r *rig) {
			r.base("later", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.rule("pre", setMark(1))
			r.rule("later", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"one behind two of the same priority", func(r *rig) {
			r.base("second", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.base("later", uapi.NfInetPreRouting, 0, uapi.NfAccept)
			r.rule("pre", setMark(1))
			r.rule("second", setMark(1))
			r.rule("later", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"the other hook", func(r *rig) {
			r.base("out", uapi.NfInetLocalOut, -100, uapi.NfAccept)
			r.rule("out", setMark(1))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"of the connection", func(r *rig) {
			r.rule("pre", setConnMark(7))
			r.rule("pre", ctKey(uapi.NftCtMark), eq(word(7)...), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"copied to the connection and back", func(r *rig) {
			r.rule("pre", setMark(7))
			r.rule("pre", copyMark(true))
			r.rule("pre", setMark(0))
			r.rule("pre", copyMark(false))
			r.rule("pre", markIs(7), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"MARK under a mask", func(r *rig) {
			r.rule("pre", target("MARK", 2, join(word(1), word(3))))
			r.rule("pre", match("mark", 1, join(word(1), word(3), word(0))), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"what the mask leaves", func(r *rig) {
			r.rule("pre", target("MARK", 2, join(word(1), word(3))))
			r.rule("pre", match("mark", 1, join(word(4), word(4), word(0))), dnat("198.51.100.1:0"))
		}, maybe},
		{"! mark", func(r *rig) {
			r.rule("pre", target("MARK", 2, join(word(1), word(3))))
			r.rule("pre", match("mark", 1, join(word(1), word(3), word(1))), dnat("198.51.100.1:0"))
		}, "untranslated"},
		{"a bit that is turned without being cleared", func(r *rig) {
			r.rule("pre", setMark(1))
			r.rule("pre", target("MARK", 2, join(word(5), word(0))))
			r.rule("pre", markIs(4), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"another revision of MARK", func(r *rig) {
			r.rule("pre", setMark(1))
			r.rule("pre", target("MARK", 3, join(word(1), word(3))))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"HMARK", func(r *rig) {
			r.rule("pre", setMark(1))
			r.rule("pre", target("HMARK", 0, nil))
			r.rule("pre", markIs(1), dnat("198.51.100.1:0"))
		}, maybe},
		{"CONNMARK sets", func(r *rig) {
			r.rule("pre", restore(uapi.XtConnmarkSet, 7, 0xf, 0))
			r.rule("pre", match("connmark", 1, join(word(7), word(0xf), word(0))), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"CONNMARK saves and restores", func(r *rig) {
			r.rule("pre", setMark(0x17))
			r.rule("pre", restore(uapi.XtConnmarkSave, 0, 0xff, 0xf))
			r.rule("pre", setMark(0x100))
			r.rule("pre", target("CONNMARK", 2, join(word(0), word(0xff), word(0xff), []byte{0, 0, uapi.XtConnmarkRestore})))
			r.rule("pre", markIs(0x107), dnat("198.51.100.1:0"))
		}, "198.51.100.1:53"},
		{"CONNMARK shifts", func(r *rig) {
			r.rule("pre", setMark(7))
			r.rule("pre", setConnMark(7))
			r.rule("pre", target("CONNMARK", 2, join(word(0), word(0), word(0), []byte{0, 1, uapi.XtConnmarkRestore})))
			r.rule("pre", markIs(7), dnat("198.51.100.1:0"))
		}, maybe},
		{"to an address by the mark", func(r *rig) {
			r.set("m", uapi.NftSetMap, 4, num(uapi.NftaSetDataLen, 4), elem(word(1), dataOf(uapi.NftaSetElemData, 198, 51, 100, 1)),
				elem(word(2), dataOf(uapi.NftaSetElemData, 198, 51, 100, 2)))
			r.rule("pre", setMark(2))
			r.rule("pre", metaKey(uapi.NftMetaMark), lookupSet("m", num(uapi.NftaLookupDreg, 1)),
				expr("nat", num(uapi.NftaNatType, uapi.NftNatDnat), num(uapi.NftaNatFamily, 2), num(uapi.NftaNatRegAddrMin, 1)))
		}, "198.51.100.2:53"},
		{"the mark itself, which is not an address", func(r *rig) {
			r.rule("pre", setMark(0x02020202))
			r.rule("pre", metaKey(uapi.NftMetaMark), expr("nat", num(uapi.NftaNatType, uapi.NftNatDnat), num(uapi.NftaNatFamily, 2), num(uapi.NftaNatRegAddrMin, 1)))
		}, "2.2.2.2:53"},
		{"each of many chains with many marks", func(r *rig) {
			for i := range 15 {
				for j := range 2 {
					r.rule(name(i), expr("limit"), target("MARK", 2, join(word(uint32(j)<<i), word(1<<i))), jump(name(i+1)))
				}
			}
			r.rule(name(15), markIs(1<<20), dnat("198.51.100.1:0"))
			r.rule("pre", jump(name(0)))
		}, maybe},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, IPv4)
			r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
			r.chain("c")
			for i := range 16 {
				r.chain(name(i))
			}
			tt.build(r)
			rs := r.ruleset()
			if got := rs.Outcome(dns(), &knowing{}).String(); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			if o, _ := rs.Explain(dns(), &knowing{}); o.String() != tt.want {
				t.Errorf("explained: %s, want %s", o, tt.want)
			}
		})
	}
}

func TestDescribeMarks(t *testing.T) {
	for want, exprs := range map[string][]byte{
		"meta mark set 0x4000":                   setMark(0x4000),
		"ct mark set meta mark":                  copyMark(true),
		"-j MARK --set-xmark 0x4000/0x4000":      target("MARK", 2, join(word(0x4000), word(0x4000))),
		"-j CONNMARK":                            target("CONNMARK", 1, make([]byte, 13)),
		"-m connmark ! --mark 0x1/0x3 accept":    join(match("connmark", 1, join(word(1), word(3), word(1))), accept()),
		"(sets a mark) -m mark --mark 0x1/0xff":  join(target("HMARK", 0, nil), match("mark", 1, join(word(1), word(255), word(0)))),
		"-m recent --set dnat to 198.51.100.1:1": join(match("recent", 0, recent(2, 0)), dnat("198.51.100.1:1")),
	} {
		if got := describe(newRig(t, IPv4).m.tables[tableKey{IPv4, "t"}], exprs); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
