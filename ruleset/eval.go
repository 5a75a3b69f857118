package ruleset

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

const (
	// maxDepth is how deep jumps may nest: the kernel refuses more than
	// NFT_JUMP_STACK_SIZE, 16.
	maxDepth = 32
	// maxSteps is how many expressions and elements of sets are looked at for a
	// packet, which takes about 10 ms. A walk past 50 000 rules that compare with
	// no single destination takes most of them.
	maxSteps = 1 << 18
	// maxFork is how many values of a random number are tried one by one.
	maxFork = 4096
	// maxTargets is how many translations an outcome holds.
	maxTargets = 1 << 16

	ifNameSize = 16 // IFNAMSIZ
)

// Why an outcome is anything.
const (
	whyWork    = "the packet would have to be followed through too many rules"
	whyBusy    = "following packets through the rules has taken too long of late; this one is tried again in a while"
	whyDepth   = "chains jump to each other too deep"
	whyLong    = "a chain has more rules than are read"
	whyTargets = "there are too many translations"
	whyAddress = "the rules translate to an address or a port that is not known"
	whyDynamic = "packets add elements to a map"
	whyWrites  = "a rule writes the address or port that NAT rules then read"
	whyProto   = "a protocol without ports"
	whyVerdict = "the verdict of a rule is not understood"
)

// errLong ends the reading of a chain.
var errLong = errors.New(whyLong)

// Why the elements of a set are not read, which makes its lookup anything.
var (
	errHuge = errors.New("a set has more elements than are read")
	errMany = errors.New("the sets have more elements in all than are read")
)

// deps is what an outcome depends on beside destination, protocol and hook.
type deps uint8

const (
	depSrc deps = 1 << iota
	depSport
	depIn
	depOut
)

// eval follows one packet through the rules. Everything that may happen to it is
// collected as it is met: chains only need to report where the packet may go on.
type eval struct {
	m     *model
	host  Host
	fetch func(*table, *set) (*elements, error)
	// retain makes the evaluation remember the rules that decide.
	retain bool

	p    Packet
	v4   bool
	hook uint32
	in   device
	out  device
	nh   header // the network header
	th   header // the transport header

	// With tracked, what rules set marks to counts, which takes longer, since a chain
	// may do another thing with another mark. marked: a mark was read.
	tracked, marked bool

	read  deps
	limit int    // of steps
	steps int    // that are left
	cur   ruleAt // where the packet is

	why   string // set: anything may happen
	err   error  // why elements could not be fetched
	drop  bool
	to    []netip.AddrPort
	many  []Range
	by    ruleAt
	trace []traced
}

// device is an interface of the packet.
type device struct {
	known  bool
	absent bool // there is none: an input interface of a packet of this host's own
	Interface
}

// header is the beginning of a header, bit by bit known or not.
type header struct {
	val, known [40]byte
	n          int // every packet has so many bytes of it
}

type ruleAt struct {
	chain  *chain
	handle uint64
}

// traced is a rule that decided something.
type traced struct {
	ruleAt
	exprs  []byte
	effect string
}

// chainResult is what a chain does with the packet.
type chainResult struct {
	in     marks // that it came with
	cont   exit  // at the end, or by a return
	accept exit  // by being accepted, which ends the base chain
}

// exit is a way out of a chain or a rule.
type exit struct {
	open  bool  // the packet may take it
	marks marks // as far as they are then known
}

func (x *exit) take(m marks) {
	if x.open {
		m = m.join(x.marks)
	}
	x.open, x.marks = true, m
}

func (x *exit) add(y exit) {
	if y.open {
		x.take(y.marks)
	}
}

// frame is what a chain's rules have done so far with the packet.
type frame struct {
	depth  int
	rule   *rule
	next   exit // to the next rule
	cont   exit
	accept exit
}

// start sets an evaluation up for a packet.
func (e *eval) start(p Packet) {
	e.p, e.v4 = p, p.Dst.Is4()
	e.read, e.steps, e.why, e.err = 0, e.limit, "", nil
	e.drop, e.by, e.cur, e.trace = false, ruleAt{}, ruleAt{}, nil
	e.to, e.many, e.marked = e.to[:0], e.many[:0], false
	e.nh, e.th = header{}, header{}
	set := func(h *header, off int, data ...byte) {
		copy(h.val[off:], data)
		for i := range data {
			h.known[off+i] = 0xff
		}
	}
	if e.v4 {
		e.nh.n = 20
		e.nh.val[0], e.nh.known[0] = 0x40, 0xf0
		set(&e.nh, 9, p.Proto)
		set(&e.nh, v4Src, p.Src.AsSlice()...) // nothing, if it is not known
		set(&e.nh, v4Dst, p.Dst.AsSlice()...)
	} else {
		// The next header may be an extension's.
		e.nh.n = 40
		e.nh.val[0], e.nh.known[0] = 0x60, 0xf0
		set(&e.nh, v6Src, p.Src.AsSlice()...)
		set(&e.nh, v6Dst, p.Dst.AsSlice()...)
	}
	e.th.n = 8
	set(&e.th, 2, byte(p.DstPort>>8), byte(p.DstPort))
	if p.Src.IsValid() {
		set(&e.th, 0, byte(p.SrcPort>>8), byte(p.SrcPort))
	}
}

// Offsets of addresses in struct iphdr and ipv6hdr.
const (
	v4Src, v4Dst = 12, 16
	v6Src, v6Dst = 8, 24
)

// run evaluates the packet at the hooks that an origin leads to.
func (e *eval) run(p Packet, origin Origin) (untranslated bool) {
	if !conntrack.HasPorts(p.Proto) || p.Proto == conntrack.GRE || !p.Dst.IsValid() ||
		p.Src.IsValid() && p.Src.Is4() != p.Dst.Is4() {
		e.start(p)
		e.why = whyProto
		return false
	}
	e.start(p)
	if origin != Own && e.at(uapi.NfInetPreRouting) {
		untranslated = true
	}
	if origin != Foreign && e.at(uapi.NfInetLocalOut) {
		untranslated = true
	}
	return untranslated
}

// at evaluates the packet at one hook, for each interface that it may have, as
// far as rules ask for it.
func (e *eval) at(hook uint32) (untranslated bool) {
	e.hook = hook
	if len(e.m.baseChains(hook)) == 0 { // then nothing before them matters
		return true
	}
	e.in, e.out = device{absent: true}, device{absent: true}
	var list *Interfaces
	dep, d := depIn, &e.in
	if hook == uapi.NfInetLocalOut {
		dep, d, list = depOut, &e.out, e.host.Outputs(e.p.Dst)
	} else if e.p.Src.IsValid() {
		list = e.host.Inputs(e.p.Src)
	}
	if list == nil || len(list.List) == 0 {
		*d = device{}
		return e.hookChains(hook)
	}
	for _, i := range list.List {
		*d = device{known: true, Interface: i}
		if e.hookChains(hook) {
			untranslated = true
		}
		if e.read&dep == 0 || e.why != "" {
			break
		}
	}
	return untranslated
}

// hookChains calls the base chains of a hook as nf_nat_inet_fn does: the first
// that translates, or drops, is the last. Of those with equal priority, the one
// registered last comes first (nf_hook_entries_grow), and no dump tells which
// that is: each of them may be met, with any marks.
func (e *eval) hookChains(hook uint32) (untranslated bool) {
	e.m.runs++ // results depend on hook and interface
	for _, c := range e.m.writers[hook] {
		if !c.meets(e.v4) {
			continue
		}
		// Only whether it comes to a rule that writes is of interest: a packet that is
		// dropped, or accepted earlier, makes no difference to the others.
		if e.follow(c, 0, marks{}); e.why != "" {
			return false
		}
	}
	list := e.m.baseChains(hook)
	var known marks
	for len(list) > 0 {
		priority, all, n := list[0].priority, true, 0
		for _, c := range list {
			if c.priority == priority && c.meets(e.v4) {
				n++
			}
		}
		var out exit
		for len(list) > 0 && list[0].priority == priority {
			c := list[0]
			list = list[1:]
			if !c.meets(e.v4) {
				continue
			}
			if n > 1 {
				known = marks{}
			}
			r := e.follow(c, 0, known)
			if e.why != "" {
				return false
			}
			on := r.accept
			if r.cont.open {
				if c.drop {
					e.note(nil, "drops by its policy", c)
					e.drop = true
				} else {
					on.take(r.cont.marks)
				}
			}
			all = all && on.open
			out.add(on)
		}
		if !all {
			return false
		}
		if n == 1 {
			known = out.marks
		}
	}
	return true
}

// meets tells whether packets of a family come to a base chain.
func (c *chain) meets(v4 bool) bool {
	f := c.table.family
	return f == INet || (f == IPv4) == v4
}

// follow leads the packet through a chain.
func (e *eval) follow(c *chain, depth int, in marks) chainResult {
	if c.at != e.m.runs {
		c.at, c.met = e.m.runs, c.met[:0]
	}
	for i := range c.met {
		if c.met[i].in == in {
			return c.met[i]
		}
	}
	if e.steps -= len(c.met); e.steps < 0 {
		e.giveUp(e.tooMuch())
		return chainResult{}
	}
	if depth > maxDepth {
		e.giveUp(whyDepth)
		return chainResult{}
	}
	if c.tooLong {
		e.cur = ruleAt{chain: c}
		e.giveUp(whyLong)
		return chainResult{}
	}
	f := frame{depth: depth, next: exit{true, in}}
	rules, some := c.each(), c.candidates(e.p)
	for i := some.take(); i < len(rules); i = some.take() {
		r := &rules[i]
		if e.steps--; e.steps < 0 {
			e.giveUp(e.tooMuch())
			return chainResult{}
		}
		if r.passes(e.tracked) {
			continue
		}
		regs := regs{marks: f.next.marks}
		e.cur, f.rule, f.next = ruleAt{c, r.handle}, r, exit{}
		e.exec(r.operations(), &regs, &f)
		if e.why != "" {
			return chainResult{}
		}
		if !f.next.open {
			break
		}
	}
	f.cont.add(f.next)
	res := chainResult{in, f.cont, f.accept}
	c.met = append(c.met, res)
	return res
}

// tooMuch is why a packet is given up that takes more steps than it has.
func (e *eval) tooMuch() string {
	if e.limit < maxSteps {
		return whyBusy
	}
	return whyWork
}

func (e *eval) giveUp(why string) {
	if e.why == "" {
		e.why, e.by = why, e.cur
	}
}

// exec runs the expressions of a rule from one on (nft_rule_dp_for_each_expr in
// nft_do_chain). Where one may come out in several ways, all of them are tried.
func (e *eval) exec(ops []op, r *regs, f *frame) {
	for i, o := range ops {
		if e.steps--; e.steps < 0 {
			e.giveUp(e.tooMuch())
			return
		}
		met := yes
		switch o := o.(type) {
		case *payloadOp:
			met = e.payload(o, r)
		case *metaOp:
			met = e.meta(o, r)
		case *ctOp:
			met = e.ct(o, r)
		case *immediateOp:
			r.put(o.dreg, o.data)
		case *bitwiseOp:
			r.bitwise(o)
		case *shiftOp:
			r.shift(o)
		case *byteorderOp:
			r.byteorder(o)
		case *cmpOp:
			met = r.compare(o)
		case *rangeOp:
			met = r.within(o)
		case *unknownOp:
			if o.dreg != regNone {
				r.forget(o.dreg, o.length)
			}
			met = unsure
		case *enumOp:
			if o.count > maxFork {
				r.forget(o.dreg, 4)
				continue
			}
			for v := range o.count {
				fork := *r
				fork.putWord(o.dreg, o.first+v)
				if e.exec(ops[i+1:], &fork, f); e.why != "" {
					return
				}
			}
			return
		case *fibOp:
			types := e.fib(o)
			for t := range uint32(16) {
				if types>>t&1 == 0 {
					continue
				}
				fork := *r
				fork.putWord(o.dreg, t)
				if e.exec(ops[i+1:], &fork, f); e.why != "" {
					return
				}
			}
			return
		case *lookupOp:
			e.lookup(o, ops[i+1:], r, f)
			return
		case *verdictOp:
			e.verdict(o, ops[i+1:], r, f)
			return
		case *natOp:
			if o.family != INet && (o.family == IPv4) != e.v4 {
				continue // nft_nat_inet_eval
			}
			e.nat(o, r, f)
			return
		case *redirOp:
			e.redir(o, r, f)
			return
		case *xtNat:
			e.xtNat(o, f)
			return
		case *setMarkOp, *xtSetMark, *xtConnmark, *forgetMark:
			if e.tracked {
				r.marks.set(o, r)
			}
		case *xtMark:
			e.marked = true
			met = o.match(r.marks)
		case *xtRecent:
			e.drop = true
			met = between(!o.invert, o.invert)
		case *xtUnknown:
			e.drop = true
			met = unsure
		case *writeOp:
			if o.moves(e.v4) {
				e.giveUp(whyWrites)
				return
			}
		case matcher:
			met = o.match(e)
		case *anyOp:
			e.giveUp(o.why)
			return
		}
		switch met {
		case no:
			f.next.take(r.marks)
			return
		case unsure:
			f.next.take(r.marks)
		}
	}
	f.next.take(r.marks)
}

// matcher is a match of x_tables.
type matcher interface{ match(e *eval) trilean }

func (e *eval) payload(o *payloadOp, r *regs) trilean {
	var h *header
	switch o.base {
	case uapi.NftPayloadNetworkHeader:
		h = &e.nh
		src, n := v4Src, 4
		if !e.v4 {
			src, n = v6Src, 16
		}
		if o.offset < src+n && o.offset+o.length > src {
			e.read |= depSrc
		}
	case uapi.NftPayloadTransportHeader:
		h = &e.th
		if o.offset < 2 {
			e.read |= depSport
		}
	default:
		r.forget(o.dreg, align(o.length))
		return unsure
	}
	if o.offset+o.length > h.n {
		r.forget(o.dreg, align(o.length))
		return unsure
	}
	r.put(o.dreg, h.val[o.offset:o.offset+o.length])
	copy(r.known[o.dreg:], h.known[o.offset:o.offset+o.length])
	return yes
}

func (e *eval) meta(o *metaOp, r *regs) trilean {
	switch o.key {
	case uapi.NftMetaNfproto:
		r.put(o.dreg, []byte{e.nfproto()})
	case uapi.NftMetaL4proto:
		r.put(o.dreg, []byte{e.p.Proto})
	case uapi.NftMetaProtocol: // ETH_P_IP, ETH_P_IPV6
		if e.v4 {
			r.put(o.dreg, []byte{0x08, 0x00})
		} else {
			r.put(o.dreg, []byte{0x86, 0xdd})
		}
	case uapi.NftMetaIif, uapi.NftMetaIifname:
		e.read |= depIn
		return e.device(&e.in, o, r)
	case uapi.NftMetaOif, uapi.NftMetaOifname:
		e.read |= depOut
		return e.device(&e.out, o, r)
	case uapi.NftMetaMark:
		e.mark(r.marks.packet, o.dreg, r)
	default:
		// The rest has no interface, socket or route for some packets, and then
		// breaks.
		r.forget(o.dreg, regBytes)
		return unsure
	}
	return yes
}

func (e *eval) mark(m bits32, dreg int, r *regs) {
	e.marked = true
	binary.NativeEndian.PutUint32(r.val[dreg:], m.val)
	binary.NativeEndian.PutUint32(r.known[dreg:], m.known)
}

func (e *eval) nfproto() byte {
	if e.v4 {
		return uapi.NfprotoIPv4
	}
	return uapi.NfprotoIPv6
}

// device stores index or name of an interface. Where there is none, older kernels
// break and newer ones store 0 or an empty name (nft_meta_get_eval_ifname).
func (e *eval) device(d *device, o *metaOp, r *regs) trilean {
	name := o.key == uapi.NftMetaIifname || o.key == uapi.NftMetaOifname
	length := 4
	if name {
		length = ifNameSize
	}
	switch {
	case !d.known && !d.absent:
		r.forget(o.dreg, length)
		return unsure
	case name:
		var b [ifNameSize]byte
		copy(b[:ifNameSize-1], d.Name)
		r.put(o.dreg, b[:])
	default:
		r.putWord(o.dreg, d.Index)
	}
	if d.absent {
		return unsure
	}
	return yes
}

func (e *eval) ct(o *ctOp, r *regs) trilean {
	reply := o.dir == 1
	src, dst := e.p.Src, e.p.Dst
	switch o.key {
	case uapi.NftCtState:
		r.putWord(o.dreg, uapi.CtStateBitNew)
		return yes
	case uapi.NftCtDirection:
		r.put(o.dreg, []byte{0})
		return yes
	case uapi.NftCtStatus:
		r.putWord(o.dreg, 0)
		binary.NativeEndian.PutUint32(r.known[o.dreg:], uapi.CtStatusUnset)
		return yes
	case uapi.NftCtMark:
		e.mark(r.marks.conn, o.dreg, r)
		return yes
	case uapi.NftCtL3protocol:
		r.put(o.dreg, []byte{e.nfproto()})
		return yes
	case uapi.NftCtProtocol:
		r.put(o.dreg, []byte{e.p.Proto})
		return yes
	case uapi.NftCtSrc, uapi.NftCtDst, uapi.NftCtSrcIP, uapi.NftCtDstIP, uapi.NftCtSrcIP6, uapi.NftCtDstIP6:
		a := dst
		if o.key == uapi.NftCtSrc || o.key == uapi.NftCtSrcIP || o.key == uapi.NftCtSrcIP6 {
			e.read |= depSrc
			a = src
		}
		wants4 := o.key == uapi.NftCtSrcIP || o.key == uapi.NftCtDstIP
		wants6 := o.key == uapi.NftCtSrcIP6 || o.key == uapi.NftCtDstIP6
		if wants4 && !e.v4 || wants6 && e.v4 {
			return no
		}
		b := a.AsSlice()
		if reply || b == nil || !span(o.dreg, len(b)) {
			break
		}
		r.put(o.dreg, b)
		return yes
	case uapi.NftCtProtoSrc, uapi.NftCtProtoDst:
		port := e.p.DstPort
		if o.key == uapi.NftCtProtoSrc {
			e.read |= depSport
			port = e.p.SrcPort
			reply = reply || !e.p.Src.IsValid()
		}
		if reply {
			break
		}
		r.put(o.dreg, []byte{byte(port >> 8), byte(port)})
		return yes
	}
	r.forget(o.dreg, regBytes)
	return unsure
}

// fib returns the types that an address may have.
func (e *eval) fib(o *fibOp) Types {
	a := e.p.Dst
	if o.source {
		e.read |= depSrc
		a = e.p.Src
	}
	return e.types(a, o.device)
}

func (e *eval) types(a netip.Addr, device bool) Types {
	if !a.IsValid() {
		return AllTypes
	}
	types := e.host.Types(a)
	if types == 0 {
		types = AllTypes
	}
	if device { // what another interface has counts as somewhere else
		types |= TypeUnicast
		if !e.v4 {
			types |= typeNowhere
		}
	}
	return types
}

func (e *eval) lookup(o *lookupOp, rest []op, r *regs, f *frame) {
	s := o.set
	if s.dynamic {
		f.next.take(r.marks)
		switch o.dreg {
		case regVerdict:
			e.giveUp(whyDynamic)
		case regNone:
			e.exec(rest, r, f)
		default:
			r.forget(o.dreg, align(s.dataLen))
			e.exec(rest, r, f)
		}
		return
	}
	x := s.elements
	if x == nil {
		var err error
		if x, err = e.fetch(e.cur.chain.table, s); err != nil {
			if s.tooLarge == nil {
				e.err = err
			}
			e.giveUp(err.Error())
			return
		}
	}
	var low, high [regBytes]byte
	r.bounds(o.sreg, s.keyLen, &low, &high)
	k := s.keyLen
	if o.dreg == regNone {
		found, refuses := false, false
		miss, used, ok := x.find(s, low[:k], high[:k], r.known[o.sreg:o.sreg+k], r.exact(o.sreg, k), e.steps,
			func(i int) bool {
				found, refuses = true, refuses || x.mayFail(i)
				return true
			})
		if e.spend(used, ok); e.why != "" {
			return
		}
		if x.catchall >= 0 && miss {
			found, refuses, miss = true, refuses || x.mayFail(x.catchall), false
		}
		miss = miss || refuses
		if o.invert {
			found, miss = miss, found
		}
		if miss {
			f.next.take(r.marks)
		}
		if found {
			e.exec(rest, r, f)
		}
		return
	}
	use := func(index int) {
		if x.mayFail(index) {
			f.next.take(r.marks)
		}
		if o.dreg == regVerdict {
			e.verdict(x.to[index], rest, r, f)
			return
		}
		fork := *r
		fork.put(o.dreg, x.data[index*s.dataLen:(index+1)*s.dataLen])
		e.exec(rest, &fork, f)
	}
	miss, used, ok := x.find(s, low[:k], high[:k], r.known[o.sreg:o.sreg+k], r.exact(o.sreg, k), e.steps,
		func(i int) bool {
			use(i)
			return e.why == ""
		})
	if e.spend(used, ok); e.why != "" {
		return
	}
	if !miss {
		// An element that may be gone leaves the catch-all.
		miss = x.unsafe != nil && x.catchall >= 0
	}
	switch {
	case miss && x.catchall >= 0:
		use(x.catchall)
	case miss:
		f.next.take(r.marks)
	}
}

func (x *elements) mayFail(i int) bool { return i < len(x.unsafe) && x.unsafe[i] }

func (e *eval) spend(steps int, ok bool) {
	if e.steps -= steps; !ok || e.steps < 0 {
		e.giveUp(e.tooMuch())
	}
}

// verdict carries a verdict out (nft_do_chain).
func (e *eval) verdict(v *verdictOp, rest []op, r *regs, f *frame) {
	switch v.code {
	case uapi.NfAccept:
		e.note(f.rule, "accepts it", e.cur.chain)
		f.accept.take(r.marks)
	case uapi.NfDrop:
		e.note(f.rule, "drops it", e.cur.chain)
		e.drop = true
	case uapi.NftReturn:
		f.cont.take(r.marks)
	case uapi.NftContinue:
		e.exec(rest, r, f)
	case uapi.NftBreak:
		f.next.take(r.marks)
	case uapi.NftJump, uapi.NftGoto:
		if e.retain {
			e.note(f.rule, "leads to "+v.chain.name, e.cur.chain)
		}
		cur := e.cur
		res := e.follow(v.chain, f.depth+1, r.marks)
		e.cur = cur
		f.accept.add(res.accept)
		// A chain that was gone to returns to whoever called this one.
		if v.code == uapi.NftGoto {
			f.cont.add(res.cont)
		} else {
			f.next.add(res.cont)
		}
	default:
		e.giveUp(whyVerdict)
	}
}

func (e *eval) nat(o *natOp, r *regs, f *frame) {
	// nft_nat_init sets these two by the registers that there are.
	n := natRange{flags: o.flags &^ (uapi.NfNatRangeMapIPs | uapi.NfNatRangeProtoSpecified)}
	if o.addrMin != regNone {
		n.flags |= uapi.NfNatRangeMapIPs
		size := 4
		if !e.v4 {
			size = 16
		}
		if !r.exact(o.addrMin, size) || !r.exact(o.addrMax, size) {
			e.giveUp(whyAddress)
			return
		}
		n.addrMin, _ = netip.AddrFromSlice(r.val[o.addrMin : o.addrMin+size])
		n.addrMax, _ = netip.AddrFromSlice(r.val[o.addrMax : o.addrMax+size])
	}
	if !e.ports(&n, o.portMin, o.portMax, r) {
		return
	}
	e.translate(n, f)
}

// ports reads the registers of a range of ports.
func (e *eval) ports(n *natRange, low, high int, r *regs) bool {
	if low == regNone {
		return true
	}
	n.flags |= uapi.NfNatRangeProtoSpecified
	if !r.exact(low, 2) || !r.exact(high, 2) {
		e.giveUp(whyAddress)
		return false
	}
	n.portMin, n.portMax = binary.BigEndian.Uint16(r.val[low:]), binary.BigEndian.Uint16(r.val[high:])
	return true
}

func (e *eval) redir(o *redirOp, r *regs, f *frame) {
	var n natRange
	if e.ports(&n, o.portMin, o.portMax, r) {
		e.redirect(n, f)
	}
}

func (e *eval) xtNat(o *xtNat, f *frame) {
	if o.redirect {
		e.redirect(o.natRange, f)
		return
	}
	e.translate(o.natRange, f)
}

// translate is nf_nat_setup_info for a destination.
func (e *eval) translate(n natRange, f *frame) {
	low, high := e.p.Dst, e.p.Dst
	if n.flags&uapi.NfNatRangeMapIPs != 0 {
		if low, high = n.addrMin, n.addrMax; n.flags&uapi.NfNatRangeNetmap != 0 {
			low = netmap(e.p.Dst, low, high)
			high = low
		}
		var ok bool
		if low, high, ok = addrBounds(low, high); !ok {
			e.giveUp(whyAddress)
			return
		}
	}
	e.add(Range{Min: low, Max: high}, n, f)
}

// redirect is nf_nat_redirect: to the loopback address for this host's own
// packets, otherwise to one of the input interface, and without one the packet
// is dropped.
func (e *eval) redirect(n natRange, f *frame) {
	if e.hook == uapi.NfInetPreRouting {
		e.drop = true
		e.add(Range{}, n, f)
		return
	}
	lo := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if !e.v4 {
		lo = netip.IPv6Loopback()
	}
	e.add(Range{Min: lo, Max: lo}, n, f)
}

// add notes a translation. With a range of ports, any of them may be taken,
// wherever the search for a free one begins (nf_nat_l4proto_unique_tuple); with
// none, the port stays.
func (e *eval) add(t Range, n natRange, f *frame) {
	t.MinPort, t.MaxPort = e.p.DstPort, e.p.DstPort
	if n.flags&uapi.NfNatRangeProtoSpecified != 0 {
		t.MinPort, t.MaxPort = min(n.portMin, n.portMax), max(n.portMin, n.portMax)
	}
	if len(e.to)+len(e.many) >= maxTargets {
		e.giveUp(whyTargets)
		return
	}
	if e.by.chain == nil {
		e.by = e.cur
	}
	if t.Min.IsValid() && t.Min == t.Max && t.MinPort == t.MaxPort {
		e.to = append(e.to, netip.AddrPortFrom(t.Min, t.MinPort))
	} else {
		e.many = append(e.many, t)
	}
	if e.retain {
		e.note(f.rule, "translates it to "+t.String(), e.cur.chain)
	}
}

// netmap puts the host part of an address behind a network's (nft_nat_setup_netmap,
// netmap_tg6).
func netmap(a, low, high netip.Addr) netip.Addr {
	x, l, h := a.AsSlice(), low.AsSlice(), high.AsSlice()
	for i := range x {
		mask := ^(l[i] ^ h[i])
		x[i] = x[i]&^mask | l[i]&mask
	}
	b, _ := netip.AddrFromSlice(x)
	return b
}

// addrBounds tells between which addresses find_best_ips_proto chooses. It goes
// by words of 32 bits; behind the first that is below its maximum, any will do.
func addrBounds(low, high netip.Addr) (netip.Addr, netip.Addr, bool) {
	switch {
	case low == high:
		return low, high, true
	case low.Is4():
		return low, high, low.Less(high)
	}
	l, h := low.As16(), high.As16()
	word := 0
	for ; slices.Equal(l[word:word+4], h[word:word+4]); word += 4 {
	}
	if slices.Compare(l[word:word+4], h[word:word+4]) > 0 {
		return low, high, false
	}
	for i := word + 4; i < 16; i++ {
		l[i], h[i] = 0, 0xff
	}
	return netip.AddrFrom16(l), netip.AddrFrom16(h), true
}

// note remembers a rule that decides.
func (e *eval) note(r *rule, effect string, c *chain) {
	if !e.retain || len(e.trace) >= maxTrace {
		return
	}
	t := traced{ruleAt: ruleAt{chain: c}, effect: effect}
	if r != nil {
		t.handle, t.exprs = r.handle, r.exprs
	}
	for _, s := range e.trace {
		if s.ruleAt == t.ruleAt && s.effect == effect {
			return
		}
	}
	e.trace = append(e.trace, t)
}

// maxTrace is how many rules are remembered for people.
const maxTrace = 64

// outcome makes a value of what was collected.
func (e *eval) outcome(untranslated bool) *Outcome {
	if e.why != "" {
		return &Outcome{Any: true, Why: e.why, By: e.by.rule()}
	}
	o := &Outcome{Untranslated: untranslated, Dropped: e.drop, By: e.by.rule()}
	if len(e.to) > 0 {
		slices.SortFunc(e.to, netip.AddrPort.Compare)
		o.To = slices.Clone(slices.Compact(e.to))
	}
	if len(e.many) > 0 {
		slices.SortFunc(e.many, compareRanges)
		o.Ranges = slices.Clone(slices.Compact(e.many))
	}
	return o
}

func compareRanges(a, b Range) int {
	if c := netip.AddrPortFrom(a.Min, a.MinPort).Compare(netip.AddrPortFrom(b.Min, b.MinPort)); c != 0 {
		return c
	}
	return netip.AddrPortFrom(a.Max, a.MaxPort).Compare(netip.AddrPortFrom(b.Max, b.MaxPort))
}

func (r ruleAt) rule() Rule {
	if r.chain == nil {
		return Rule{}
	}
	return Rule{r.chain.table.family, r.chain.table.name, r.chain.name, r.handle}
}

// match functions of x_tables.

func (p *xtPorts) match(e *eval) trilean {
	t := yes
	if p.src != [2]uint16{0, 0xffff} || p.invSrc {
		e.read |= depSport
		switch {
		case !e.p.Src.IsValid():
			t = unsure
		case in(e.p.SrcPort, p.src) == p.invSrc:
			return no
		}
	}
	if in(e.p.DstPort, p.dst) == p.invDst {
		return no
	}
	if p.more {
		return unsure
	}
	return t
}

func (m *xtMultiport) match(e *eval) trilean {
	if m.flags != 1 {
		e.read |= depSport
	}
	known := e.p.Src.IsValid()
	found := slices.ContainsFunc(m.ranges, func(r [2]uint16) bool {
		return m.flags != 0 && in(e.p.DstPort, r) || m.flags != 1 && known && in(e.p.SrcPort, r)
	})
	if !found && !known && m.flags != 1 {
		return unsure
	}
	return between(found != m.invert, found == m.invert)
}

func (a *xtAddrtype) match(e *eval) trilean {
	t := yes
	if a.source != 0 {
		e.read |= depSrc
		t = a.one(e, e.p.Src, a.source, a.invSource)
	}
	if a.dest != 0 && t != no {
		if d := a.one(e, e.p.Dst, a.dest, a.invDest); d != yes {
			t = d
		}
	}
	return t
}

func (a *xtAddrtype) one(e *eval, addr netip.Addr, mask uint16, invert bool) trilean {
	types, m := e.types(addr, a.device), Types(mask)
	t := unsure
	switch {
	case e.v4:
		t = between(types&^m == 0, types&m == 0)
	case m == TypeLocal: // of more types, IPv6 wants all at once (match_type6)
		t = between(types == TypeLocal, types&TypeLocal == 0)
	}
	if invert {
		t = negate(t)
	}
	return t
}

func (r *xtIprange) match(e *eval) trilean {
	t := yes
	for i, a := range [2]netip.Addr{e.p.Src, e.p.Dst} {
		if !r.used[i] {
			continue
		}
		if i == 0 {
			e.read |= depSrc
		}
		if !a.IsValid() {
			t = unsure
			continue
		}
		inside := r.ranges[i][0].Compare(a) <= 0 && a.Compare(r.ranges[i][1]) <= 0
		if inside == r.inv[i] {
			return no
		}
	}
	return t
}

// match is conntrack_mt for the first packet of a flow, which is in state NEW and
// of the original direction.
func (c *xtConntrack) match(e *eval) trilean {
	fails := func(what uint16, holds bool) bool {
		return c.wants(what) && holds == (c.invert&what != 0)
	}
	if c.wants(ctOrigSrc) {
		e.read |= depSrc
	}
	if c.wants(ctOrigSrcPort) {
		e.read |= depSport
	}
	known := e.p.Src.IsValid()
	switch {
	case fails(ctState, c.state&uapi.CtStateBitNew != 0),
		fails(ctDirection, true),
		known && fails(ctOrigSrc, c.wants(ctOrigSrc) && inPrefix(e.p.Src, c.src)),
		fails(ctOrigDst, c.wants(ctOrigDst) && inPrefix(e.p.Dst, c.dst)),
		fails(ctProto, uint16(e.p.Proto) == c.proto),
		known && fails(ctOrigSrcPort, in(e.p.SrcPort, c.sports)),
		fails(ctOrigDstPort, in(e.p.DstPort, c.dports)):
		return no
	case !known && c.wants(ctOrigSrc|ctOrigSrcPort),
		c.wants(ctReplSrc | ctReplDst | ctReplSrcPort | ctReplDstPort | ctExpires):
		return unsure
	case !c.wants(ctStatus):
		return yes
	case c.status&^uapi.CtStatusUnset != 0:
		return unsure
	case c.invert&ctStatus != 0:
		return yes
	}
	return no
}

func (c *xtConntrack) wants(what uint16) bool { return c.asks&what != 0 }

func (c *xtChance) match(*eval) trilean { return between(c.always, c.never) }
