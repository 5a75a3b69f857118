package ruleset

import (
	"bytes"
	"slices"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// What else the ruleset does to packets on their way to the NAT rules.

// forgetOthers frees the tables whose rules have no part in a translation. It is to
// be called when all rules and sets have been read.
func (m *model) forgetOthers() {
	m.writers = map[uint32][]*chain{}
	for k, t := range m.tables {
		writes := false
		for _, c := range t.chains {
			if c.early && !t.dormant && c.writes() {
				m.writers[c.hook] = append(m.writers[c.hook], c)
				writes = true
			}
		}
		switch {
		case t.dormant, !t.nat && !writes:
			delete(m.tables, k)
		default:
			t.fill()
		}
	}
	for _, list := range m.writers {
		slices.SortFunc(list, byPriority)
	}
}

// writes tells whether packets may come from a chain to a rule that writes
// addresses or ports. One that is too long to be read may.
func (c *chain) writes() bool {
	some := func(x *chain) bool { return x.tooLong || x.some(mayWrite) }
	for _, x := range c.table.chains {
		if some(x) { // else nothing need be decoded
			return slices.ContainsFunc(reachable(c.table, []*chain{c}), some)
		}
	}
	return false
}

// some tells whether a rule of the chain has some expressions.
func (c *chain) some(has func(exprs []byte) bool) bool {
	for _, exprs := range c.pairs {
		if has(exprs) {
			return true
		}
	}
	return false
}

// each yields name and data of the expressions of a rule.
func each(exprs []byte, yield func(name string, data []byte)) {
	for a := walk(exprs); a.next(); {
		name, data := exprOf(a.val)
		yield(name, data)
	}
}

// mayWrite tells whether a rule has an expression that may write addresses or
// ports; where it does is told when a packet meets it.
func mayWrite(exprs []byte) (may bool) {
	each(exprs, func(name string, data []byte) {
		switch name {
		case "payload":
			may = may || find(data, uapi.NftaPayloadSreg) != nil
		case "target":
			target, _, _, _ := xtInfo(data)
			may = may || writingTargets[target]
		}
	})
	return may
}

// writingTargets are targets outside the nat table that write addresses.
var writingTargets = map[string]bool{"DNPT": true, "SNPT": true, "RAWDNAT": true}

// tracks tells whether a rule of the family bridge has bridged packets tracked
// (nf_ct_netns_get for NFPROTO_BRIDGE).
func tracks(exprs []byte) (does bool) {
	each(exprs, func(name string, _ []byte) {
		does = does || name == "ct" || name == "connlimit" || name == "objref"
	})
	return does
}

// fill marks the sets that rules of the table add elements to, or take them from,
// when packets meet them: no commit tells of that. A set need not have the flag
// dynamic for it, which nft sets where set and rule are in one command.
func (t *table) fill() {
	for _, c := range t.chains {
		if c.tooLong {
			for _, s := range t.sets {
				s.dynamic = s.dynamic || !s.constant
			}
		}
		if !bytes.Contains(c.raw, []byte("dynset\x00")) {
			continue
		}
		for _, exprs := range c.pairs {
			each(exprs, func(name string, data []byte) {
				if name != "dynset" {
					return
				}
				a := attrs{val: find(data, uapi.NftaDynsetSetName)}
				if s := t.sets[string(a.text())]; s != nil {
					s.dynamic, s.constant = true, false
				}
			})
		}
	}
}
