package ruleset

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Shadow is a rule that leads to a translation and that no packet meets: By, an
// earlier rule of the same chain, matches all that it would match, and ends their
// way through the chain.
type Shadow struct {
	Step
	By Step
}

// String writes both: "RULE: TEXT, since RULE: TEXT comes before it".
func (s Shadow) String() string {
	return fmt.Sprintf("%s: %s, since %s comes before it: %s", s.Rule, s.Text, s.By.Rule, s.By.Text)
}

const (
	// maxShadowSteps bounds the comparisons of rules with earlier ones to a second
	// or so.
	maxShadowSteps = 1 << 23
	// maxShadowChain is from which length on the rules of a chain are only compared
	// with those that ask exactly the same, since the others are too many.
	maxShadowChain = 1 << 10
)

// Shadowed lists the rules that are shadowed for certain: where the earlier rule
// asks nothing but what the later one asks too, in the same words or, of addresses
// and ports, more broadly. Nothing is said of a match that may come out otherwise
// the second time (a rate, a random number, a mark). It decodes every rule. With
// rules given, only what they shadow is listed.
func (r *Ruleset) Shadowed(by ...Rule) []Shadow {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := shading{facts: map[*rule]*matching{}, altered: map[*chain]bool{}, steps: maxShadowSteps}
	var list []Shadow
	for _, t := range r.model.relevant() {
		chains := reachable(t, t.bases())
		slices.SortFunc(chains, func(a, b *chain) int { return cmp.Compare(a.name, b.name) })
		for _, c := range chains {
			if len(by) == 0 || slices.ContainsFunc(by, func(x Rule) bool { return x.Chain == c.name }) {
				list = append(list, s.chain(c)...)
			}
		}
	}
	return slices.DeleteFunc(list, func(x Shadow) bool { return len(by) > 0 && !slices.Contains(by, x.By.Rule) })
}

// shading compares rules with each other.
type shading struct {
	facts   map[*rule]*matching
	altered map[*chain]bool // by changes
	steps   int
}

// matching is what a rule asks of a packet, and what it then does.
type matching struct {
	// asks are the tests by their text, and bytes the bits of headers that have to
	// have a value.
	asks  map[string]bool
	bytes map[place]bits
	sure  bool // and nothing else matters
	does  op   // what decides; nil where nothing does
	// opaque: it may do anything, to the packet too.
	opaque bool
}

// place is a byte of a header.
type place struct {
	base   uint32
	offset int
}

type bits struct{ value, mask byte }

func (s *shading) chain(c *chain) (list []Shadow) {
	rules := c.each()
	same := map[string][]int{} // the earlier rules by what they ask
	from := 0                  // behind the last rule that may have changed the packet
	for i := range rules {
		b := s.of(&rules[i])
		key := ""
		if len(rules) > maxShadowChain {
			key = b.String()
		}
		for _, j := range same[key] {
			if s.steps--; s.steps < 0 || !s.leadsOn(b) {
				break
			}
			if a := s.of(&rules[j]); j >= from && b.has(a) && s.ends(a, b, c.table.family) {
				step := func(r *rule) Step { return Step{Rule: ruleAt{c, r.handle}.rule(), Text: describe(c.table, r.exprs)} }
				list = append(list, Shadow{step(&rules[i]), step(&rules[j])})
				break
			}
		}
		if b.sure {
			same[key] = append(same[key], i)
		}
		if s.changes(b, 0) {
			from = i + 1
		}
	}
	return list
}

// leadsOn tells whether a rule translates, or leads to where that may happen.
func (s *shading) leadsOn(m *matching) bool {
	switch o := m.does.(type) {
	case *natOp, *redirOp, *xtNat:
		return true
	case *verdictOp:
		return o.chain != nil && !o.chain.harmless(0, false)
	}
	return false
}

// changes tells whether a rule, or a chain that it leads to, may change the packet.
func (s *shading) changes(m *matching, depth int) bool {
	if m.opaque || depth > maxDepth {
		return true
	}
	switch o := m.does.(type) {
	case *lookupOp: // to any of its chains
		return true
	case *verdictOp:
		if o.chain == nil {
			return false
		}
		altered, known := s.altered[o.chain]
		if !known {
			for i := range o.chain.each() {
				altered = altered || s.changes(s.of(&o.chain.rules[i]), depth+1)
			}
			s.altered[o.chain] = altered
		}
		return altered
	}
	return false
}

// ends tells whether no packet that a rule matches for certain comes to a later
// one of its chain, of which it is known that it would match there.
func (s *shading) ends(a, b *matching, family Family) bool {
	switch o := a.does.(type) {
	case *natOp: // passes over those of the other family (nft_nat_eval)
		later, same := b.does.(*natOp)
		return family != INet || o.family == INet || same && later.family == o.family
	case *redirOp, *xtNat:
		return true
	case *verdictOp:
		switch o.code {
		case uapi.NfAccept, uapi.NfDrop, uapi.NftReturn, uapi.NftGoto:
			return true // what is gone to returns to whoever called this chain
		case uapi.NftJump:
			return s.consumes(o.chain, b, family, 0)
		}
	}
	return false
}

// consumes tells whether no packet that has passed certain tests comes out of a
// chain.
func (s *shading) consumes(c *chain, known *matching, family Family, depth int) bool {
	if depth > maxDepth {
		return false
	}
	for i := range c.each() {
		if s.steps--; s.steps < 0 {
			return false
		}
		m := s.of(&c.rules[i])
		sure := m.sure && known.has(m)
		switch o := m.does.(type) {
		case nil:
		case *natOp, *redirOp, *xtNat:
			if sure && s.ends(m, known, family) {
				return true
			}
		case *verdictOp:
			switch o.code {
			case uapi.NfAccept, uapi.NfDrop:
				if sure {
					return true
				}
			case uapi.NftJump:
				if sure && s.consumes(o.chain, known, family, depth+1) {
					return true
				}
			default: // may lead out
				return false
			}
		default:
			return false
		}
		if s.changes(m, depth) {
			return false
		}
	}
	return false
}

// has tells whether a packet that has what m asks has what other asks, too.
func (m *matching) has(other *matching) bool {
	for ask := range other.asks {
		if !m.asks[ask] {
			return false
		}
	}
	for p, want := range other.bytes {
		if got := m.bytes[p]; got.mask&want.mask != want.mask || got.value&want.mask != want.value {
			return false
		}
	}
	return true
}

// held is what is known of a register's 32 bits: how they were made, and where in
// a header they are from, if they are.
type held struct {
	text   string
	base   uint32
	offset int
	mask   [4]byte
	header bool
}

// of returns what a rule asks and does.
func (s *shading) of(r *rule) *matching {
	if m := s.facts[r]; m != nil {
		return m
	}
	m := &matching{asks: map[string]bool{}, bytes: map[place]bits{}, sure: true}
	s.facts[r] = m
	var regs [regBytes / 4]held
	set := func(off, n int, text string) {
		for i := range (n + 3) / 4 {
			regs[off/4+i] = held{text: fmt.Sprintf("%s[%d]", text, i)}
		}
	}
	// read returns the text of some bytes, "" where one is not known.
	read := func(off, n int) (text string) {
		for i := off / 4; i < (off+n+3)/4; i++ {
			if regs[i].text == "" || off%4 != 0 {
				return ""
			}
			text += regs[i].text + " "
		}
		return text
	}
	ask := func(of, format string, args ...any) {
		if of == "" {
			m.sure = false
			return
		}
		m.asks[of+fmt.Sprintf(format, args...)] = true
	}
	for _, o := range r.operations() {
		switch o := o.(type) {
		case *payloadOp:
			header := o.base == uapi.NftPayloadNetworkHeader || o.base == uapi.NftPayloadTransportHeader
			set(o.dreg, o.length, fmt.Sprintf("payload %d %d %d", o.base, o.offset, o.length))
			for i := 0; header && i < o.length; i += 4 {
				w := &regs[(o.dreg+i)/4]
				w.header, w.base, w.offset = true, o.base, o.offset+i
				w.mask = [4]byte{0xff, 0xff, 0xff, 0xff}
			}
		case *metaOp:
			switch o.key {
			case uapi.NftMetaNfproto, uapi.NftMetaL4proto, uapi.NftMetaProtocol, uapi.NftMetaIif, uapi.NftMetaOif:
				set(o.dreg, 4, fmt.Sprintf("meta %d", o.key))
			case uapi.NftMetaIifname, uapi.NftMetaOifname:
				set(o.dreg, ifNameSize, fmt.Sprintf("meta %d", o.key))
			default: // such as a mark, which another rule may set
				clear(regs[o.dreg/4:])
			}
		case *ctOp:
			clear(regs[o.dreg/4:])
			if o.key == uapi.NftCtState || o.key == uapi.NftCtDirection {
				set(o.dreg, 4, fmt.Sprintf("ct %d", o.key))
			}
		case *fibOp:
			set(o.dreg, 4, fmt.Sprintf("fib %v %v", o.source, o.device))
		case *immediateOp:
			set(o.dreg, len(o.data), fmt.Sprintf("%x", o.data))
		case *bitwiseOp:
			for i := 0; i < len(o.mask); i += 4 {
				w := regs[(o.sreg+i)/4]
				for j := i; j < min(i+4, len(o.mask)); j++ {
					w.mask[j-i] &= o.mask[j]
					w.header = w.header && o.xor[j] == 0
				}
				if w.text != "" {
					w.text = fmt.Sprintf("(%s&%x^%x)", w.text, o.mask[i:min(i+4, len(o.mask))], o.xor[i:min(i+4, len(o.mask))])
				}
				regs[(o.dreg+i)/4] = w
			}
		case *cmpOp:
			if o.op != uapi.NftCmpEq || !m.needs(regs[:], o) {
				ask(read(o.sreg, len(o.data)), "cmp %d %x", o.op, o.data)
			}
		case *rangeOp:
			ask(read(o.sreg, len(o.from)), "range %v %x %x", o.invert, o.from, o.to)
		case *lookupOp:
			key := read(o.sreg, o.set.keyLen)
			if o.set.dynamic || o.set.timed || o.set.flaky {
				key = ""
			}
			if o.dreg == regVerdict {
				m.does = o
				return m
			}
			ask(key, "in %s %v", o.set.name, o.invert)
			if o.dreg != regNone {
				clear(regs[o.dreg/4:])
			}
		case *xtPorts, *xtMultiport, *xtAddrtype, *xtIprange:
			ask("match ", "%T %+v", o, o)
		case *xtConntrack:
			const same = ctState | ctProto | ctOrigSrc | ctOrigDst | ctOrigSrcPort | ctOrigDstPort | ctDirection | ctStateAlias
			if o.asks&^same != 0 {
				m.sure = false
			}
			ask("match ", "%T %+v", o, o)
		case *xtChance:
			m.sure = m.sure && o.always
		case *verdictOp, *natOp, *redirOp, *xtNat:
			m.does = o
			return m
		case *anyOp, *writeOp:
			m.opaque, m.sure, m.does = true, false, o
			return m
		default: // not understood, or otherwise with each packet
			m.sure = false
			clear(regs[:])
		}
	}
	return m
}

// String is the same for all that ask the same.
func (m *matching) String() string {
	list := slices.Sorted(maps.Keys(m.asks))
	for p, b := range m.bytes {
		list = append(list, fmt.Sprint(p, b))
	}
	slices.Sort(list)
	return fmt.Sprint(list)
}

// needs notes a comparison with bits of a header, and tells whether it is one.
func (m *matching) needs(regs []held, o *cmpOp) bool {
	wanted := map[place]bits{}
	for i, v := range o.data {
		w := &regs[(o.sreg+i)/4]
		if !w.header || o.sreg%4 != 0 || v&^w.mask[i%4] != 0 {
			return false
		}
		wanted[place{w.base, w.offset + i%4}] = bits{v, w.mask[i%4]}
	}
	for p, b := range wanted {
		if old, ok := m.bytes[p]; ok && (old.value^b.value)&old.mask&b.mask != 0 {
			return false // it matches nothing
		}
		old := m.bytes[p]
		wanted[p] = bits{old.value | b.value, old.mask | b.mask}
	}
	maps.Copy(m.bytes, wanted)
	return true
}
