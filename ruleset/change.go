package ruleset

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Change is what another generation of the rules makes suspect: flows to other
// destinations may be translated now as they might before.
type Change struct {
	// All means that every flow is suspect, for the reason Why; the rest is not
	// set.
	All bool
	Why string
	// Suspects are in order, without doubles.
	Suspects []Suspect
}

// Suspect is a set of destinations.
type Suspect struct {
	Proto  uint8        // 0: any
	Prefix netip.Prefix // invalid: any address
	// MinPort to MaxPort; 0 to 65535: any port.
	MinPort, MaxPort uint16
}

// String writes "udp 203.0.113.10/32:53".
func (s Suspect) String() string {
	proto, addr, port := "any", "*", "*"
	if s.Proto != 0 {
		proto = protoValue([]byte{s.Proto})
	}
	if s.Prefix.IsValid() {
		addr = s.Prefix.String()
	}
	if s.MinPort != 0 || s.MaxPort != 0xffff {
		port = fmt.Sprint(s.MinPort)
		if s.MaxPort != s.MinPort {
			port += fmt.Sprint("-", s.MaxPort)
		}
	}
	return proto + " " + addr + ":" + port
}

// Contains tells whether a flow's destination is suspect.
func (s Suspect) Contains(proto uint8, dst netip.AddrPort) bool {
	return (s.Proto == 0 || s.Proto == proto) && (!s.Prefix.IsValid() || s.Prefix.Contains(dst.Addr())) &&
		s.MinPort <= dst.Port() && dst.Port() <= s.MaxPort
}

// Empty tells whether nothing became suspect.
func (c *Change) Empty() bool { return !c.All && len(c.Suspects) == 0 }

// Contains tells whether a flow's destination is suspect.
func (c *Change) Contains(proto uint8, dst netip.AddrPort) bool {
	return c.All || slices.ContainsFunc(c.Suspects, func(s Suspect) bool { return s.Contains(proto, dst) })
}

const (
	// maxSuspects is how many suspects are told apart: more than that, and one
	// walk over all flows is cheaper.
	maxSuspects = 1024
	// compareFor bounds the fetching of sets for a comparison. Those of
	// anonymous maps stay known, so that the next comparison needs less.
	compareFor = 300 * time.Millisecond
	// compareSteps bounds the rules and elements that are looked at.
	compareSteps = 1 << 21
)

// anywhere is every destination.
var anywhere = Suspect{MaxPort: 0xffff}

// since tells what has become suspect since an older generation, and takes over
// what that one has fetched and does not change.
func (r *Ruleset) since(ctx context.Context, old *Ruleset) Change {
	r.mu.Lock()
	defer r.mu.Unlock()
	old.mu.Lock()
	defer old.mu.Unlock()
	r.model.inherit(old.model)
	d := &difference{
		ctx: ctx, old: old.model, now: r.model, fetch: r.eval.fetch, steps: compareSteps, until: time.Now().Add(compareFor),
		keys: map[*chain][]uint64{}, deep: map[*chain]bool{}, out: map[Suspect]struct{}{}, leaves: map[visit]struct{}{},
	}
	d.compare()
	if d.why != "" {
		return Change{All: true, Why: d.why}
	}
	c := Change{}
	for s := range d.out {
		c.Suspects = append(c.Suspects, s)
	}
	slices.SortFunc(c.Suspects, func(a, b Suspect) int {
		return cmp.Or(cmp.Compare(a.Proto, b.Proto), a.Prefix.Addr().Compare(b.Prefix.Addr()),
			cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()),
			cmp.Compare(a.MinPort, b.MinPort), cmp.Compare(a.MaxPort, b.MaxPort))
	})
	return c
}

// difference compares two generations. Rules that are in one of them only are
// suspect with what they match, and so is what leads to a chain with such rules.
type difference struct {
	ctx      context.Context
	old, now *model
	fetch    func(*table, *set) (*elements, error)
	until    time.Time
	steps    int

	keys   map[*chain][]uint64
	deep   map[*chain]bool // of the new model
	out    map[Suspect]struct{}
	leaves map[visit]struct{}
	why    string // everything is suspect
}

// visit is a chain that all destinations of a suspect meet.
type visit struct {
	chain *chain
	at    Suspect
}

func (d *difference) all(why string) {
	if d.why == "" {
		d.why = why
	}
}

func (d *difference) step() bool {
	if d.steps--; d.steps < 0 {
		d.all("the rules are too many to be compared")
	}
	return d.why == ""
}

// rewritten tells whether a chain of writers has changed in any way: what packets
// are then is not known.
func (d *difference) rewritten(hook uint32) bool {
	return !slices.EqualFunc(d.old.writers[hook], d.now.writers[hook], func(a, b *chain) bool {
		if a.table.tableKey != b.table.tableKey || a.priority != b.priority || len(a.table.chains) != len(b.table.chains) {
			return false
		}
		for name, c := range a.table.chains {
			if o := b.table.chains[name]; o == nil || !bytes.Equal(c.raw, o.raw) {
				return false
			}
		}
		return true
	})
}

// beside tells whether another of some base chains has the same priority: which of
// them comes first is not known, and so are the marks that the others meet.
func beside(c *chain, list []*chain) bool {
	return slices.ContainsFunc(list, func(x *chain) bool { return x != c && x.priority == c.priority })
}

func (d *difference) compare() {
	for _, hook := range []uint32{uapi.NfInetPreRouting, uapi.NfInetLocalOut} {
		if d.rewritten(hook) {
			d.all("rules that write addresses or ports have changed")
			return
		}
		for _, c := range d.now.baseChains(hook) {
			o := d.before(c)
			if o != nil && (!o.base || o.hook != c.hook || o.priority != c.priority || o.drop != c.drop) {
				d.all("a base chain has changed: " + ruleAt{chain: c}.rule().Table + " " + c.name)
				return
			}
			if o == nil && c.drop {
				d.all("a base chain with the policy drop is new: " + c.name)
				return
			}
			if o == nil && beside(c, d.now.baseChains(hook)) {
				d.all("a base chain beside others of its priority is new: " + c.name)
				return
			}
			d.chains(o, c, anywhere, 0)
		}
		for _, o := range d.old.baseChains(hook) {
			if t := d.now.tables[o.table.tableKey]; t == nil || t.dormant || t.chains[o.name] == nil {
				if o.drop {
					d.all("a base chain with the policy drop is gone: " + o.name)
					return
				}
				if beside(o, d.old.baseChains(hook)) {
					d.all("a base chain beside others of its priority is gone: " + o.name)
					return
				}
				d.leavesOf(o, anywhere, 0)
			}
		}
	}
}

// before returns the chain of the same name in the old model.
func (d *difference) before(c *chain) *chain {
	if t := d.old.tables[c.table.tableKey]; t != nil && !t.dormant {
		return t.chains[c.name]
	}
	return nil
}

// chains compares two versions of a chain that destinations in at come to.
func (d *difference) chains(o, c *chain, at Suspect, depth int) {
	if o == nil {
		d.leavesOf(c, at, depth)
		return
	}
	switch {
	case depth > maxDepth:
		d.all(whyDepth)
		return
	case c.tooLong:
		return // packets that come here may be anything, so that none is stale
	case o.tooLong:
		d.all(whyLong)
		return
	}
	if _, done := d.leaves[visit{c, at}]; done {
		return
	}
	d.leaves[visit{c, at}] = struct{}{}
	a, b := d.keysOf(o), d.keysOf(c)
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	oldRules, rules := o.each(), c.each()
	for i := head; i < len(a)-tail; i++ {
		d.leaf(o, &oldRules[i], at, depth)
	}
	for i := range rules {
		if i < head || i >= len(b)-tail {
			d.same(c, &rules[i], at, depth)
		} else {
			d.leaf(c, &rules[i], at, depth)
		}
		if d.why != "" {
			return
		}
	}
}

// same looks at a rule that is in both generations: what it leads to may have
// changed.
func (d *difference) same(c *chain, r *rule, at Suspect, depth int) {
	if !d.step() || r.passes(true) && !d.leadsOn(r) {
		return
	}
	k := newKnowledge(at)
	for _, o := range r.operations() {
		if !k.take(o) {
			return
		}
		switch o := o.(type) {
		case *verdictOp:
			if o.chain != nil && d.changed(o.chain) {
				d.chains(d.before(o.chain), o.chain, k.at, depth+1)
			}
		case *lookupOp:
			d.sameLookup(c, o, r, k, depth)
		}
	}
}

// leadsOn tells whether a rule jumps to another chain.
func (d *difference) leadsOn(r *rule) bool {
	return slices.ContainsFunc(r.operations(), func(o op) bool {
		v, ok := o.(*verdictOp)
		return ok && v.chain != nil
	})
}

func (d *difference) sameLookup(c *chain, o *lookupOp, r *rule, k *knowledge, depth int) {
	s := o.set
	if s.dynamic {
		return // its elements are not part of a generation
	}
	if s.constant {
		if o.dreg != regVerdict {
			return
		}
		x := d.elements(c.table, s)
		if x == nil {
			return
		}
		for i, v := range x.to {
			if !d.step() {
				return
			}
			if at, ok := k.element(o, x, i); ok && v.chain != nil && d.changed(v.chain) {
				d.chains(d.before(v.chain), v.chain, at, depth+1)
			}
		}
		return
	}
	x := d.elements(c.table, s)
	if x == nil {
		return
	}
	var was *elements
	if t := d.old.tables[c.table.tableKey]; t != nil && t.sets[s.name] != nil {
		was = t.sets[s.name].elements
	}
	if was == nil || o.dreg != regVerdict && !was.equal(x) {
		// No packet has met it, so that nothing was fetched, or the outcome of
		// what follows in the rule has changed in places that are not worked out.
		if o.dreg == regVerdict {
			d.everyElement(o, x, k)
			return
		}
		d.leaf(c, r, k.at, depth)
		return
	}
	if o.dreg == regVerdict {
		d.verdictMap(o, was, x, k, depth)
	}
}

// everyElement makes all that a verdict map has suspect.
func (d *difference) everyElement(o *lookupOp, x *elements, k *knowledge) {
	for i := range x.to {
		if !d.step() {
			return
		}
		if at, ok := k.element(o, x, i); ok {
			d.emit(at)
		}
	}
}

// verdictMap compares two versions of a verdict map.
func (d *difference) verdictMap(o *lookupOp, was, x *elements, k *knowledge, depth int) {
	if (was.catchall >= 0) != (x.catchall >= 0) ||
		x.catchall >= 0 && !sameVerdict(was.to[was.catchall], x.to[x.catchall]) {
		d.emit(k.at)
		return
	}
	index := make(map[string]int, was.n)
	for i := range was.n {
		index[was.key(o.set, i)] = i
	}
	for i := range x.n {
		if !d.step() {
			return
		}
		j, ok := index[x.key(o.set, i)]
		delete(index, x.key(o.set, i))
		at, possible := k.element(o, x, i)
		switch {
		case !possible:
		case !ok || !sameVerdict(was.to[j], x.to[i]) || was.mayFail(j) != x.mayFail(i):
			d.emit(at)
		case x.to[i].chain != nil && d.changed(x.to[i].chain):
			d.chains(d.before(x.to[i].chain), x.to[i].chain, at, depth+1)
		}
	}
	for _, j := range index {
		if at, possible := k.element(o, was, j); possible {
			d.emit(at)
		}
	}
	if x.catchall >= 0 {
		if c := x.to[x.catchall].chain; c != nil && d.changed(c) {
			d.chains(d.before(c), c, k.at, depth+1)
		}
	}
}

func sameVerdict(a, b *verdictOp) bool {
	return a.code == b.code && (a.chain == nil) == (b.chain == nil) && (a.chain == nil || a.chain.name == b.chain.name)
}

// key is what tells an element from the others of its set.
func (x *elements) key(s *set, i int) string {
	k := string(x.low[i*s.keyLen : (i+1)*s.keyLen])
	if x.high != nil {
		k += string(x.high[i*s.keyLen : (i+1)*s.keyLen])
	}
	return k
}

func (x *elements) equal(y *elements) bool {
	return x.n == y.n && x.catchall == y.catchall && string(x.low) == string(y.low) && string(x.high) == string(y.high) &&
		string(x.data) == string(y.data) && slices.Equal(x.unsafe, y.unsafe) && slices.EqualFunc(x.to, y.to, sameVerdict)
}

// elements returns those of a set of the new model.
func (d *difference) elements(t *table, s *set) *elements {
	if s.elements != nil {
		return s.elements
	}
	if time.Now().After(d.until) || d.ctx.Err() != nil {
		d.all("there are too many sets to be compared in time")
		return nil
	}
	x, err := d.fetch(t, s)
	if err != nil {
		d.all(err.Error())
		return nil
	}
	return x
}

// changed tells whether a chain of the new model, or one that it leads to, has
// other rules or elements than before.
func (d *difference) changed(c *chain) bool {
	if v, ok := d.deep[c]; ok {
		return v
	}
	if !d.step() {
		return true
	}
	d.deep[c] = false // where chains lead in a circle
	d.deep[c] = d.compareDeep(c)
	return d.deep[c]
}

func (d *difference) compareDeep(c *chain) bool {
	o := d.before(c)
	if o == nil || o.tooLong != c.tooLong || !slices.Equal(d.keysOf(o), d.keysOf(c)) {
		return true
	}
	rules := c.each()
	for i := range rules {
		for _, x := range rules[i].operations() {
			switch x := x.(type) {
			case *verdictOp:
				if x.chain != nil && d.changed(x.chain) {
					return true
				}
			case *lookupOp:
				if d.changedSet(c, x) {
					return true
				}
			}
		}
	}
	return false
}

func (d *difference) changedSet(c *chain, o *lookupOp) bool {
	s := o.set
	if s.dynamic || s.constant && o.dreg != regVerdict {
		return false
	}
	x := d.elements(c.table, s)
	if x == nil {
		return true
	}
	if !s.constant {
		t := d.old.tables[c.table.tableKey]
		if t == nil || t.sets[s.name] == nil || t.sets[s.name].elements == nil || !t.sets[s.name].elements.equal(x) {
			return true
		}
	}
	for _, v := range x.to {
		if v.chain != nil && d.changed(v.chain) {
			return true
		}
	}
	return false
}

// leavesOf makes suspect what the rules of a chain decide, as if all were new.
func (d *difference) leavesOf(c *chain, at Suspect, depth int) {
	switch {
	case depth > maxDepth:
		d.all(whyDepth)
		return
	case c.tooLong:
		d.all(whyLong)
		return
	}
	v := visit{c, at}
	if _, done := d.leaves[v]; done {
		return
	}
	d.leaves[v] = struct{}{}
	rules := c.each()
	for i := range rules {
		if d.leaf(c, &rules[i], at, depth); d.why != "" {
			return
		}
	}
}

// leaf makes suspect what one rule decides.
func (d *difference) leaf(c *chain, r *rule, at Suspect, depth int) {
	if !d.step() || r.passes(true) {
		return
	}
	k := newKnowledge(at)
	for _, o := range r.operations() {
		if !k.take(o) {
			return // matches nothing that comes here
		}
		if !decisive(o) && !setsMark(o) { // a mark may decide elsewhere
			continue
		}
		switch o := o.(type) {
		case *verdictOp:
			if o.code == uapi.NftJump {
				d.leavesOf(o.chain, k.at, depth+1)
				return
			}
		case *lookupOp:
			d.leafMap(c, o, k, depth)
			return
		}
		d.emit(k.at)
		return
	}
}

// leafMap makes suspect what a verdict map decides.
func (d *difference) leafMap(c *chain, o *lookupOp, k *knowledge, depth int) {
	x := o.set.elements
	if x == nil && d.now.tables[c.table.tableKey] == c.table && !o.set.dynamic {
		x = d.elements(c.table, o.set)
	}
	if x == nil || x.catchall >= 0 {
		d.emit(k.at)
		return
	}
	for i, v := range x.to {
		if !d.step() {
			return
		}
		at, ok := k.element(o, x, i)
		switch {
		case !ok:
		case at == k.at && v.code == uapi.NftJump:
			d.leavesOf(v.chain, at, depth+1)
		default:
			d.emit(at)
		}
	}
}

func (d *difference) emit(s Suspect) {
	if !s.Prefix.IsValid() && s.MinPort == 0 && s.MaxPort == 0xffff {
		d.all("a rule has changed that is not limited to an address or a port")
		return
	}
	d.out[s] = struct{}{}
	if len(d.out) > maxSuspects {
		d.all("more destinations are suspect than are told apart")
	}
}

// keysOf identifies the rules of a chain: equal keys mean the same rule, whatever
// has been counted.
func (d *difference) keysOf(c *chain) []uint64 {
	if k, ok := d.keys[c]; ok {
		return k
	}
	k := make([]uint64, 0, len(c.rules))
	for _, exprs := range c.pairs {
		k = append(k, ruleKey(c.table, exprs))
	}
	d.keys[c] = k
	return k
}

var keySeed = maphash.MakeSeed()

func ruleKey(t *table, exprs []byte) uint64 {
	var h maphash.Hash
	h.SetSeed(keySeed)
	for a := walk(exprs); a.next(); {
		name, data := exprOf(a.val)
		_, _ = h.WriteString(name)
		_ = h.WriteByte(0)
		switch name {
		case "counter", "quota", "last", "limit", "connlimit":
			// They show what they have counted, and decide nothing that is known.
			continue
		case "lookup":
			// The set that had the name may have been another.
			if s := t.sets[string(textOf(find(data, uapi.NftaLookupSet)))]; s != nil {
				var b [16]byte
				binary.NativeEndian.PutUint64(b[:], t.handle)
				binary.NativeEndian.PutUint64(b[8:], s.handle)
				_, _ = h.Write(b[:])
			}
		}
		_, _ = h.Write(data)
	}
	return h.Sum64()
}

// knowledge is what is known of the destinations that a rule matches, as far as
// its expressions have been taken: at least all of them are in at.
type knowledge struct {
	at    Suspect
	words [regBytes]field
}

// field is what a byte of a register holds.
type field struct {
	what   what
	offset int // of the byte in what
	mask   byte
}

type what uint8

const (
	nothing what = iota
	addr4
	addr6
	dport
	l4proto
)

func newKnowledge(at Suspect) *knowledge { return &knowledge{at: at} }

func (k *knowledge) load(reg int, w what, n int) {
	for i := 0; i < n && reg >= 0 && reg+i < regBytes; i++ {
		k.words[reg+i] = field{w, i, 0xff}
	}
}

func (k *knowledge) forget(reg, n int) {
	for i := reg; i >= 0 && i < reg+n && i < regBytes; i++ {
		k.words[i] = field{}
	}
}

// take takes an expression in; false means that it matches none of them.
func (k *knowledge) take(o op) bool {
	switch o := o.(type) {
	case *payloadOp:
		k.forget(o.dreg, align(o.length))
		for i := range o.length {
			f := field{mask: 0xff}
			switch off := o.offset + i; {
			case o.base == uapi.NftPayloadTransportHeader && (off == 2 || off == 3):
				f.what, f.offset = dport, off-2
			case o.base != uapi.NftPayloadNetworkHeader:
			case o.length <= 4 && off >= v4Dst && off < v4Dst+4:
				f.what, f.offset = addr4, off-v4Dst
			case off >= v6Dst && off < v6Dst+16:
				f.what, f.offset = addr6, off-v6Dst
			}
			if f.what != nothing {
				k.words[o.dreg+i] = f
			}
		}
	case *metaOp:
		k.forget(o.dreg, ifNameSize)
		if o.key == uapi.NftMetaL4proto {
			k.load(o.dreg, l4proto, 1)
		}
	case *ctOp:
		k.forget(o.dreg, regBytes)
	case *fibOp:
		k.forget(o.dreg, 4)
	case *immediateOp:
		k.forget(o.dreg, align(len(o.data)))
	case *bitwiseOp:
		var to [regBytes]field
		for i := range o.mask {
			if f := k.words[o.sreg+i]; o.xor[i] == 0 {
				f.mask &= o.mask[i]
				to[i] = f
			}
		}
		k.forget(o.dreg, align(len(o.mask)))
		copy(k.words[o.dreg:], to[:len(o.mask)])
	case *shiftOp:
		k.forget(o.dreg, o.length)
	case *byteorderOp:
		k.forget(o.dreg, o.length)
	case *enumOp:
		k.forget(o.dreg, 4)
	case *unknownOp:
		k.forget(o.dreg, o.length)
	case *lookupOp:
		if o.dreg >= 0 {
			k.forget(o.dreg, align(o.set.dataLen))
		}
	case *cmpOp:
		if o.op == uapi.NftCmpEq {
			return k.narrow(o.sreg, o.data, o.data)
		}
	case *rangeOp:
		if !o.invert {
			return k.narrow(o.sreg, o.from, o.to)
		}
	case *xtPorts:
		if !o.invDst {
			return k.ports(o.dst[0], o.dst[1])
		}
	}
	return true
}

// narrow takes in that a register is between two values, field by field: low and
// high of a field count only if the fields before it are equal in both, or if
// both are a concatenation's.
func (k *knowledge) narrow(reg int, low, high []byte) bool {
	for i := 0; i < len(low); {
		f := k.words[reg+i]
		n := 1
		for i+n < len(low) && k.words[reg+i+n].what == f.what && f.what != nothing {
			n++
		}
		if f.what != nothing && f.offset == 0 && !k.field(f.what, k.words[reg+i:reg+i+n], low[i:i+n], high[i:i+n]) {
			return false
		}
		if string(low[i:i+n]) != string(high[i:i+n]) {
			break
		}
		i += n
	}
	return true
}

func (k *knowledge) field(w what, masks []field, low, high []byte) bool {
	for _, f := range masks {
		if f.mask != 0xff && (w == dport || w == l4proto || string(low) != string(high)) {
			return true
		}
	}
	switch w {
	case dport:
		if len(low) == 2 {
			return k.ports(binary.BigEndian.Uint16(low), binary.BigEndian.Uint16(high))
		}
	case l4proto:
		if low[0] != high[0] {
			return true
		}
		if k.at.Proto != 0 && k.at.Proto != low[0] {
			return false
		}
		k.at.Proto = low[0]
	case addr4, addr6:
		return k.addr(w, masks, low, high)
	}
	return true
}

func (k *knowledge) ports(low, high uint16) bool {
	k.at.MinPort, k.at.MaxPort = max(k.at.MinPort, low), min(k.at.MaxPort, high)
	return k.at.MinPort <= k.at.MaxPort
}

// addr narrows to the longest prefix that holds all addresses between low and
// high where the mask has bits.
func (k *knowledge) addr(w what, masks []field, low, high []byte) bool {
	var b [16]byte
	size := 4
	if w == addr6 {
		size = 16
	}
	bits := 0
count:
	for i := range low {
		for bit := range 8 {
			m := byte(0x80) >> bit
			if masks[i].mask&m == 0 || low[i]&m != high[i]&m {
				break count
			}
			b[i] |= low[i] & m
			bits++
		}
	}
	a, _ := netip.AddrFromSlice(b[:size])
	p := netip.PrefixFrom(a, bits)
	switch {
	case bits == 0:
	case !k.at.Prefix.IsValid():
		k.at.Prefix = p
	case !k.at.Prefix.Overlaps(p):
		return false
	case p.Bits() > k.at.Prefix.Bits():
		k.at.Prefix = p
	}
	return true
}

// element is where a verdict map's element leads from: all of what is known where
// its key says no more, and for the catch-all. ok is false where nothing that
// comes here has its key.
func (k *knowledge) element(o *lookupOp, x *elements, i int) (at Suspect, ok bool) {
	if i == x.catchall {
		return k.at, true
	}
	e := *k
	s := o.set
	low := x.low[i*s.keyLen : (i+1)*s.keyLen]
	high := low
	if x.high != nil {
		high = x.high[i*s.keyLen : (i+1)*s.keyLen]
	}
	if s.fields == nil {
		ok = e.narrow(o.sreg, low, high)
		return e.at, ok
	}
	for off, j := 0, 0; j < len(s.fields); j++ {
		n := s.fields[j]
		if !e.narrow(o.sreg+off, low[off:off+n], high[off:off+n]) {
			return e.at, false
		}
		off += align(n)
	}
	return e.at, true
}
