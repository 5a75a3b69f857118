package ruleset

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// set is a set or a map of a table. Its elements are fetched when the first
// packet meets it.
type set struct {
	name     string
	handle   uint64 // none is given twice in a table
	constant bool   // anonymous: it has one rule, and what it holds never changes
	isMap    bool
	verdicts bool // a verdict map
	objects  bool // a map of objects
	interval bool
	timed    bool // its elements may expire
	dynamic  bool // packets add elements
	flaky    bool // an expression may refuse any of its elements
	keyLen   int  // bytes
	dataLen  int
	fields   []int // lengths of a concatenation's parts, padded to 4 in the key

	elements *elements // nil until fetched
	count    uint32    // of the elements, as newer kernels tell beforehand
	tooLarge error     // why the elements are not read
}

// elements are those of a set, ordered so that they can be found.
type elements struct {
	low  []byte // keys, or the first keys of intervals, one behind the other
	high []byte // the last keys of intervals; nil for sets without
	data []byte // of maps that are no verdict maps
	to   []*verdictOp
	// unsafe elements may be gone, or may refuse a packet; nil: none.
	unsafe   []bool
	n        int
	catchall int // index; -1 where there is none
	ordered  bool
}

// addSet takes in an answer to NFT_MSG_GETSET.
func (m *model) addSet(family Family, b []byte) error {
	s := &set{}
	var in string
	flags, dataType, keyLen, dataLen := uint32(0), uint32(0), uint32(0), uint32(0)
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaSetTable:
			in = string(a.text())
		case uapi.NftaSetName:
			s.name = string(a.text())
		case uapi.NftaSetFlags:
			flags = a.u32()
		case uapi.NftaSetHandle:
			s.handle = a.u64()
		case uapi.NftaSetKeyLen:
			keyLen = a.u32()
		case uapi.NftaSetDataType:
			dataType = a.u32()
		case uapi.NftaSetDataLen:
			dataLen = a.u32()
		case uapi.NftaSetDesc:
			if err := s.addFields(a.val); err != nil {
				return err
			}
		case uapi.NftaSetExpr, uapi.NftaSetExpressions:
			s.flaky = true
		case uapi.NftaSetCount:
			s.count = a.u32()
		}
	}
	if a.bad || s.name == "" || keyLen == 0 || keyLen > regBytes || dataLen > regBytes {
		return fmt.Errorf("set %s: %w", s.name, errMalformed)
	}
	t := m.tables[tableKey{family, in}]
	if t == nil {
		return nil
	}
	s.keyLen, s.dataLen = int(keyLen), int(dataLen)
	s.objects = flags&uapi.NftSetObject != 0
	s.isMap = flags&uapi.NftSetMap != 0
	s.verdicts = s.isMap && dataType == uapi.NftDataVerdict
	s.interval = flags&uapi.NftSetInterval != 0
	s.timed = flags&uapi.NftSetTimeout != 0
	s.dynamic = flags&uapi.NftSetEval != 0
	const fixed = uapi.NftSetAnonymous | uapi.NftSetConstant
	s.constant = flags&fixed == fixed && s.handle != 0 && !s.timed && !s.dynamic
	if s.verdicts {
		s.dataLen = 0
	} else if s.isMap && s.dataLen == 0 {
		return fmt.Errorf("map %s: %w", s.name, errMalformed)
	}
	sum := 0
	for _, f := range s.fields {
		sum += align(f)
	}
	if sum != 0 && sum != s.keyLen {
		return fmt.Errorf("set %s: fields: %w", s.name, errMalformed)
	}
	t.sets[s.name] = s
	return m.count()
}

// addFields reads how a key is put together. NFTA_SET_DESC_CONCAT comes only for
// sets that need to know, those of intervals.
func (s *set) addFields(desc []byte) error {
	list := walk(find(desc, uapi.NftaSetDescConcat))
	for list.next() {
		f := walk(list.val)
		for f.next() {
			if f.typ == uapi.NftaSetFieldLen {
				n := f.u32()
				if n == 0 || n > regBytes {
					return fmt.Errorf("set %s: field: %w", s.name, errMalformed)
				}
				s.fields = append(s.fields, int(n))
			}
		}
		list.bad = list.bad || f.bad
	}
	if list.bad {
		return fmt.Errorf("set %s: fields: %w", s.name, errMalformed)
	}
	return nil
}

// element is one element as the kernel sends it.
type element struct {
	key, keyEnd, data []byte
	to                *verdictOp
	flags             uint32
	unsafe            bool
}

// gathering collects the elements of a set, message by message.
type gathering struct {
	table  *table
	set    *set
	limits limits
	list   []element
	bytes  int
}

// add takes in an answer to NFT_MSG_GETSETELEM.
func (g *gathering) add(b []byte) error {
	list := walk(find(b, uapi.NftaSetElemListElements))
	for list.next() {
		e, err := g.element(list.val)
		if err != nil {
			return fmt.Errorf("element of set %s: %w", g.set.name, err)
		}
		g.bytes += len(e.key) + len(e.keyEnd) + len(e.data)
		if len(g.list) >= g.limits.elements || g.bytes > g.limits.bytes {
			return errHuge
		}
		g.list = append(g.list, e)
	}
	if list.bad {
		return fmt.Errorf("elements of set %s: %w", g.set.name, errMalformed)
	}
	return nil
}

func (g *gathering) element(b []byte) (e element, err error) {
	var key, keyEnd, data []byte
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaSetElemKey:
			key = find(a.val, uapi.NftaDataValue)
		case uapi.NftaSetElemKeyEnd:
			keyEnd = find(a.val, uapi.NftaDataValue)
		case uapi.NftaSetElemData:
			data = a.val
		case uapi.NftaSetElemFlags:
			e.flags = a.u32()
		case uapi.NftaSetElemTimeout, uapi.NftaSetElemExpiration, uapi.NftaSetElemExpr, uapi.NftaSetElemExpressions:
			e.unsafe = true
		}
	}
	s := g.set
	catchall := e.flags&uapi.NftSetElemCatchall != 0
	end := e.flags&uapi.NftSetElemIntervalEnd != 0
	switch {
	case a.bad, !catchall && len(key) != s.keyLen, keyEnd != nil && len(keyEnd) != s.keyLen:
		return e, errMalformed
	case s.verdicts && !end:
		v, ok := verdict(g.table, data)
		if !ok {
			return e, errMalformed
		}
		e.to = v
	case s.isMap && !end:
		v, ok := value(data)
		if !ok || len(v) != s.dataLen {
			return e, errMalformed
		}
		e.data = bytes.Clone(v)
	}
	e.key, e.keyEnd = bytes.Clone(key), bytes.Clone(keyEnd)
	e.unsafe = e.unsafe || s.timed || s.flaky
	return e, nil
}

// finish orders what was collected.
func (g *gathering) finish() *elements {
	s := g.set
	x := &elements{catchall: -1}
	var catchall *element
	list := make([]element, 0, len(g.list))
	for i := range g.list {
		if g.list[i].flags&uapi.NftSetElemCatchall != 0 {
			catchall = &g.list[i]
			continue
		}
		list = append(list, g.list[i])
	}
	g.list = nil
	if s.interval && s.fields == nil {
		list = intervals(list, s.keyLen)
	} else if !s.interval {
		slices.SortStableFunc(list, func(a, b element) int { return bytes.Compare(a.key, b.key) })
	}
	x.ordered = s.fields == nil || !s.interval
	for i := range list {
		x.append(s, &list[i])
	}
	if catchall != nil {
		x.catchall = x.n
		catchall.key = make([]byte, s.keyLen)
		x.append(s, catchall)
		x.n-- // found by nothing but its index
	}
	return x
}

func (x *elements) append(s *set, e *element) {
	x.low = append(x.low, e.key...)
	if s.interval {
		if e.keyEnd == nil {
			e.keyEnd = e.key
		}
		x.high = append(x.high, e.keyEnd...)
	}
	if e.unsafe && x.unsafe == nil {
		x.unsafe = make([]bool, x.n, x.n+1)
	}
	if x.unsafe != nil {
		x.unsafe = append(x.unsafe, e.unsafe)
	}
	switch {
	case s.verdicts:
		x.to = append(x.to, e.to)
	case s.isMap:
		x.data = append(x.data, e.data...)
	}
	x.n++
}

// size is the memory that elements take.
func (x *elements) size() int {
	const pointer, verdict = 8, 16
	return len(x.low) + len(x.high) + len(x.data) + len(x.unsafe) + len(x.to)*(pointer+verdict)
}

// intervals turns beginnings and ends into first and last keys. An interval ends
// before the next element, whether that is an end or a beginning
// (nft_rbtree_lookup finds the last that is not behind the key); on equal keys the
// end comes first.
func intervals(list []element, keyLen int) []element {
	end := func(e element) bool { return e.flags&uapi.NftSetElemIntervalEnd != 0 }
	slices.SortStableFunc(list, func(a, b element) int {
		return cmp.Or(bytes.Compare(a.key, b.key), cmp.Compare(rank(end(a)), rank(end(b))))
	})
	out := list[:0]
	open := -1
	for _, e := range list {
		if open >= 0 && out[open].keyEnd == nil {
			if bytes.Equal(out[open].key, e.key) {
				// Two beginnings at one key: only one of them can be in force.
				out[open].unsafe = true
				out[open].keyEnd = bytes.Clone(e.key)
			} else {
				out[open].keyEnd = before(e.key)
			}
		}
		open = -1
		if !end(e) {
			out = append(out, e)
			open = len(out) - 1
		}
	}
	if open >= 0 && out[open].keyEnd == nil {
		out[open].keyEnd = bytes.Repeat([]byte{0xff}, keyLen)
	}
	return out
}

func rank(end bool) int {
	if end {
		return 0
	}
	return 1
}

// before returns the key before one that is not the first.
func before(key []byte) []byte {
	k := bytes.Clone(key)
	for i := len(k) - 1; i >= 0; i-- {
		k[i]--
		if k[i] != 0xff {
			break
		}
	}
	return k
}

// find yields the elements that a key may find, of which only some bits may be
// known, so that it is between low and high. It tells whether the key may find
// none; the catch-all does not count. steps is how many elements may be looked
// at; ok is false where those do not do.
func (x *elements) find(s *set, low, high, known []byte, exact bool, steps int,
	yield func(index int) bool,
) (miss bool, used int, ok bool) {
	k := s.keyLen
	switch {
	case exact && x.ordered:
		// The last element whose key is not behind.
		i := sort.Search(x.n, func(i int) bool { return bytes.Compare(x.low[i*k:i*k+k], low) > 0 }) - 1
		if i < 0 || x.high == nil && !bytes.Equal(x.low[i*k:i*k+k], low) ||
			x.high != nil && bytes.Compare(x.high[i*k:i*k+k], low) < 0 {
			return true, 1, true
		}
		yield(i)
		return false, 1, true
	case x.n > steps:
		return true, steps, false
	}
	miss = true
	for i := range x.n {
		first, last := x.low[i*k:i*k+k], x.low[i*k:i*k+k]
		if x.high != nil {
			last = x.high[i*k : i*k+k]
		}
		may, sure := true, true
		switch {
		case x.high == nil:
			may, sure = couldEqual(first, low, known), exact
		case s.fields != nil:
			for off, j := 0, 0; j < len(s.fields) && may; j++ {
				n := s.fields[j]
				m, c := overlap(first[off:off+n], last[off:off+n], low[off:off+n], high[off:off+n])
				may, sure = m, sure && c
				off += align(n)
			}
		default:
			may, sure = overlap(first, last, low, high)
		}
		if !may {
			continue
		}
		miss = miss && !sure
		if !yield(i) || sure {
			return miss, i + 1, true
		}
	}
	return miss, x.n, true
}

// couldEqual tells whether a key with some known bits may be k.
func couldEqual(k, val, known []byte) bool {
	for i := range k {
		if (k[i]^val[i])&known[i] != 0 {
			return false
		}
	}
	return true
}

// overlap tells whether a value between low and high may, and whether it must be
// between first and last.
func overlap(first, last, low, high []byte) (may, must bool) {
	if bytes.Compare(high, first) < 0 || bytes.Compare(low, last) > 0 {
		return false, false
	}
	return true, bytes.Compare(first, low) <= 0 && bytes.Compare(high, last) <= 0
}

// inherit takes over the elements of constant sets that an older model has
// fetched: of a generation that was in force as a whole.
func (m *model) inherit(old *model) {
	for k, t := range m.tables {
		o := old.tables[k]
		if o == nil || o.handle != t.handle || t.handle == 0 {
			continue
		}
		for name, s := range t.sets {
			if was := o.sets[name]; was != nil && s.constant && was.handle == s.handle && was.elements != nil {
				if s.elements = was.elements.in(t); s.elements != nil {
					m.held += s.elements.size()
				}
			}
		}
	}
}

func (s *set) object(t *table) object { return object{t.handle, s.handle, true} }

// in returns the elements with the chains of another model's table.
func (x *elements) in(t *table) *elements {
	y := *x
	y.to = make([]*verdictOp, len(x.to))
	for i, v := range x.to {
		y.to[i] = v
		if v.chain != nil {
			y.to[i] = &verdictOp{v.code, t.chains[v.chain.name]}
			if y.to[i].chain == nil {
				return nil
			}
		}
	}
	return &y
}

// elementsRequest is NFT_MSG_GETSETELEM for all elements of a set.
func elementsRequest(t *table, s *set) []byte {
	b := request(uapi.NftGetSetElem, t.family)
	b = withText(b, uapi.NftaSetElemListTable, t.name)
	return withText(b, uapi.NftaSetElemListSet, s.name)
}

// request is a dump request without attributes.
func request(msg uint16, family Family) []byte {
	order := binary.NativeEndian
	b := order.AppendUint32(nil, uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg)
	b = order.AppendUint16(b, msg)
	b = order.AppendUint16(b, uapi.FRequest|uapi.FDump)
	b = append(b, make([]byte, 8)...) // sequence, port
	return append(b, byte(family), 0, 0, 0)
}

// tableRequest is a dump request for the objects in one table, whose name goes
// with the same number for rules and sets (NFTA_RULE_TABLE, NFTA_SET_TABLE).
func tableRequest(msg uint16, t *table) []byte {
	return withText(request(msg, t.family), uapi.NftaRuleTable, t.name)
}

// withText appends a string attribute.
func withText(b []byte, typ uint16, text string) []byte {
	order := binary.NativeEndian
	b = order.AppendUint16(b, uint16(uapi.SizeofNlAttr+len(text)+1))
	b = order.AppendUint16(b, typ)
	b = append(append(b, text...), 0)
	b = append(b, make([]byte, align(len(b))-len(b))...)
	order.PutUint32(b, uint32(len(b)))
	return b
}
