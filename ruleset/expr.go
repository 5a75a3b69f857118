package ruleset

import (
	"encoding/binary"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// op is what one expression of a rule does, one of the types below or of those
// in xt.go. Registers are given as offsets into the 64 bytes that expressions
// share (struct nft_regs without the verdict).
type op any

// Registers that are none.
const (
	regNone    = -1
	regVerdict = -2 // NFT_REG_VERDICT
)

type (
	payloadOp struct { // nft_payload_eval
		base           uint32
		offset, length int
		dreg           int
	}
	metaOp struct { // nft_meta_get_eval
		key  uint32
		dreg int
	}
	ctOp struct { // nft_ct_get_eval
		key  uint32
		dir  int // 0 original, 1 reply, -1 not given
		dreg int
	}
	fibOp struct { // nft_fib*_eval_type
		dreg   int
		source bool
		device bool // the type is asked for one interface
	}
	immediateOp struct {
		dreg int
		data []byte
	}
	bitwiseOp struct { // nft_bitwise_eval_bool
		sreg, dreg int
		mask, xor  []byte
	}
	shiftOp struct { // nft_bitwise_eval_lshift, _rshift
		sreg, dreg int
		length     int
		bits       uint32
		right      bool
	}
	byteorderOp struct { // nft_byteorder_eval; ntoh and hton are one
		sreg, dreg   int
		length, size int
	}
	cmpOp struct {
		sreg int
		op   uint32
		data []byte
	}
	rangeOp struct {
		sreg     int
		invert   bool
		from, to []byte
	}
	lookupOp struct { // nft_lookup_eval
		set    *set
		sreg   int
		dreg   int // regNone for sets, regVerdict for verdict maps
		invert bool
	}
	enumOp struct { // numgen and hash: any of first … first+count-1
		dreg         int
		first, count uint32
	}
	unknownOp struct { // yields what the tuple does not tell, or breaks
		dreg   int // regNone: yields nothing
		length int
	}
	verdictOp struct {
		code  int32
		chain *chain // of jump and goto
	}
	natOp struct { // nft_nat_eval
		family           Family
		addrMin, addrMax int
		portMin, portMax int
		flags            uint32
	}
	redirOp struct { // nft_redir_eval
		portMin, portMax int
	}
	writeOp struct { // nft_payload_set_eval
		base           uint32
		offset, length int
	}
	anyOp struct{ why string }
)

// decisive tells whether an expression can do more than let a rule match or not.
func decisive(o op) bool {
	switch o := o.(type) {
	case *verdictOp:
		return o.code != uapi.NftContinue && o.code != uapi.NftBreak
	case *lookupOp:
		return o.dreg == regVerdict
	case *natOp, *redirOp, *anyOp, *xtNat, *xtRecent, *xtUnknown, *writeOp:
		return true
	}
	return false
}

// The expressions that need no operand.
var (
	maybe = &unknownOp{dreg: regNone}
	drop  = &verdictOp{code: uapi.NfDrop}
)

// decodeOps decodes the expressions of a rule. From one that cannot be decoded
// on, anything may happen: the rest is not looked at.
func decodeOps(t *table, exprs []byte) []op {
	n := 0
	for a := walk(exprs); a.next(); {
		n++
	}
	ops := make([]op, 0, n)
	list := walk(exprs)
	for list.next() {
		if list.typ != uapi.NftaListElem {
			return append(ops, &anyOp{"an unknown attribute among expressions"})
		}
		o := decodeExpr(t, list.val)
		if o == nil {
			continue // has no effect on the packet's way
		}
		ops = append(ops, o)
		if _, ok := o.(*anyOp); ok {
			return ops
		}
	}
	if list.bad {
		ops = append(ops, &anyOp{"a rule that is cut short"})
	}
	return ops
}

func exprOf(b []byte) (name string, data []byte) {
	for a := walk(b); a.next(); {
		switch a.typ {
		case uapi.NftaExprName:
			name = string(a.text())
		case uapi.NftaExprData:
			data = a.val
		}
	}
	return name, data
}

func decodeExpr(t *table, b []byte) op {
	name, data := exprOf(b)
	o, ok := decodeNamed(t, name, data)
	if !ok {
		return &anyOp{"the expression " + quote(name) + " is not understood"}
	}
	return o
}

func decodeNamed(t *table, name string, b []byte) (op, bool) {
	switch name {
	case "counter", "log", "last", "notrack":
		return nil, true
	case "dup":
		// A copy goes elsewhere, without a connection of this one's
		// (nf_dup_ipv4); the packet goes on.
		return nil, true
	case "limit", "quota", "connlimit":
		return maybe, true
	case "reject":
		return drop, true
	case "immediate":
		return decodeImmediate(t, b)
	case "payload":
		return decodePayload(b)
	case "meta":
		return decodeMeta(b)
	case "ct":
		return decodeCt(b)
	case "bitwise":
		return decodeBitwise(b)
	case "byteorder":
		return decodeByteorder(b)
	case "cmp":
		return decodeCmp(b)
	case "range":
		return decodeRange(b)
	case "lookup":
		return decodeLookup(t, b)
	case "dynset":
		return decodeDynset(b)
	case "objref":
		return decodeObjref(b)
	case "fib":
		return decodeFib(b)
	case "numgen":
		return decodeEnum(b, uapi.NftaNgDreg, uapi.NftaNgModulus, uapi.NftaNgOffset, 0)
	case "hash":
		return decodeEnum(b, uapi.NftaHashDreg, uapi.NftaHashModulus, uapi.NftaHashOffset, uapi.NftaHashSetName)
	case "rt":
		return decodeUnknown(b, uapi.NftaRtDreg)
	case "socket":
		return decodeUnknown(b, uapi.NftaSocketDreg)
	case "osf":
		return decodeUnknown(b, uapi.NftaOsfDreg)
	case "xfrm":
		return decodeUnknown(b, uapi.NftaXfrmDreg)
	case "exthdr":
		if find(b, uapi.NftaExthdrSreg) != nil {
			return maybe, true // writes an option of TCP, if there is one (nft_exthdr_tcp_set_eval)
		}
		return decodeUnknown(b, uapi.NftaExthdrDreg)
	case "nat":
		return decodeNat(b)
	case "redir":
		return decodeRedir(b)
	case "match":
		return decodeMatch(t, b)
	case "target":
		return decodeTarget(t, b)
	}
	return nil, false
}

// register gives a register's offset (nft_parse_register).
func register(n uint32) (offset int, ok bool) {
	switch {
	case n == uapi.NftRegVerdict:
		return regVerdict, true
	case n <= uapi.NftReg4:
		return int(n-uapi.NftReg1) * uapi.NftRegSize, true
	case n >= uapi.NftReg32First && n <= uapi.NftReg32Last:
		return int(n-uapi.NftReg32First) * uapi.NftReg32Size, true
	}
	return 0, false
}

// fields reads the attributes of an expression that are numbers; where one is
// missing, it keeps what it was.
type fields map[uint16]*uint32

func (f fields) read(b []byte) bool {
	a := walk(b)
	for a.next() {
		if p := f[a.typ]; p != nil {
			*p = a.u32()
		}
	}
	return !a.bad
}

// unset is what a number is before it is read. No register has it.
const unset = ^uint32(0)

// span tells whether length bytes from a register on are all registers.
func span(offset, length int) bool { return offset >= 0 && length > 0 && offset+length <= regBytes }

// value returns the bytes of a struct nft_data that is no verdict.
func value(b []byte) ([]byte, bool) {
	v := find(b, uapi.NftaDataValue)
	return v, len(v) > 0 && len(v) <= regBytes
}

// verdict reads a struct nft_data that is a verdict.
func verdict(t *table, b []byte) (*verdictOp, bool) {
	v := find(b, uapi.NftaDataVerdict)
	if v == nil {
		return nil, false
	}
	o := &verdictOp{}
	known := false
	a := walk(v)
	for a.next() {
		switch a.typ {
		case uapi.NftaVerdictCode:
			o.code, known = int32(a.u32()), true
		case uapi.NftaVerdictChain:
			o.chain = t.chains[string(a.text())]
		}
	}
	if a.bad || !known {
		return nil, false
	}
	switch o.code {
	case uapi.NfAccept, uapi.NfDrop, uapi.NftContinue, uapi.NftBreak, uapi.NftReturn:
		o.chain = nil
		return o, true
	case uapi.NftJump, uapi.NftGoto:
		return o, o.chain != nil
	}
	return nil, false // NF_QUEUE: somebody else decides
}

func decodeImmediate(t *table, b []byte) (op, bool) {
	dreg := unset
	if !(fields{uapi.NftaImmediateDreg: &dreg}).read(b) {
		return nil, false
	}
	off, ok := register(dreg)
	if !ok {
		return nil, false
	}
	data := find(b, uapi.NftaImmediateData)
	if off == regVerdict {
		return result(verdict(t, data))
	}
	v, ok := value(data)
	return &immediateOp{off, v}, ok && span(off, len(v))
}

// result keeps a nil pointer from becoming an op that is not nil.
func result[T any](o *T, ok bool) (op, bool) {
	if !ok {
		return nil, false
	}
	return o, true
}

func decodePayload(b []byte) (op, bool) {
	dreg, base, offset, length, sreg := unset, unset, unset, unset, unset
	ok := (fields{
		uapi.NftaPayloadDreg: &dreg, uapi.NftaPayloadBase: &base, uapi.NftaPayloadOffset: &offset,
		uapi.NftaPayloadLen: &length, uapi.NftaPayloadSreg: &sreg,
	}).read(b)
	if !ok || offset > 1<<16 || length > regBytes {
		return nil, false
	}
	if sreg != unset {
		return &writeOp{base, int(offset), int(length)}, true
	}
	off, ok := register(dreg)
	if !ok || !span(off, int(length)) {
		return nil, false
	}
	return &payloadOp{base, int(offset), int(length), off}, true
}

// moves tells whether a write changes an address or a port: one to the header of an
// inner packet may, for all that is known.
func (o *writeOp) moves(v4 bool) bool {
	from, to := 0, 4 // both ports
	switch o.base {
	case uapi.NftPayloadLLHeader:
		return false
	case uapi.NftPayloadNetworkHeader:
		if from, to = v4Src, v4Dst+4; !v4 {
			from, to = v6Src, v6Dst+16
		}
	case uapi.NftPayloadTransportHeader:
	default:
		return true
	}
	return o.offset < to && o.offset+o.length > from
}

func decodeMeta(b []byte) (op, bool) {
	dreg, key, sreg := unset, unset, unset
	if !(fields{uapi.NftaMetaDreg: &dreg, uapi.NftaMetaKey: &key, uapi.NftaMetaSreg: &sreg}).read(b) {
		return nil, false
	}
	if sreg != unset {
		return decodeMarkSet(key == uapi.NftMetaMark, false, sreg)
	}
	off, ok := register(dreg)
	length := uapi.NftReg32Size
	if key == uapi.NftMetaIifname || key == uapi.NftMetaOifname {
		length = ifNameSize
	}
	return &metaOp{key, off}, ok && span(off, length)
}

func decodeCt(b []byte) (op, bool) {
	dreg, key, sreg := unset, unset, unset
	o := &ctOp{dir: -1}
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaCtDreg:
			dreg = a.u32()
		case uapi.NftaCtKey:
			key = a.u32()
		case uapi.NftaCtSreg:
			sreg = a.u32()
		case uapi.NftaCtDirection:
			if len(a.val) != 1 {
				return nil, false
			}
			o.dir = int(a.val[0])
		}
	}
	if a.bad {
		return nil, false
	}
	if sreg != unset {
		return decodeMarkSet(key == uapi.NftCtMark, true, sreg)
	}
	off, ok := register(dreg)
	o.key, o.dreg = key, off
	return o, ok && span(off, uapi.NftReg32Size)
}

// decodeMarkSet decodes what sets a mark, or else a priority, a label and the like,
// which lead a packet nowhere.
func decodeMarkSet(mark, conn bool, sreg uint32) (op, bool) {
	if !mark {
		return nil, true
	}
	off, ok := register(sreg)
	return &setMarkOp{conn, off}, ok && span(off, uapi.NftReg32Size)
}

func decodeBitwise(b []byte) (op, bool) {
	sreg, dreg, length, kind := unset, unset, unset, uint32(uapi.NftBitwiseMaskXor)
	ok := (fields{
		uapi.NftaBitwiseSreg: &sreg, uapi.NftaBitwiseDreg: &dreg,
		uapi.NftaBitwiseLen: &length, uapi.NftaBitwiseOp: &kind,
	}).read(b)
	from, ok1 := register(sreg)
	to, ok2 := register(dreg)
	if !ok || !ok1 || !ok2 || length > regBytes || !span(from, int(length)) || !span(to, int(length)) {
		return nil, false
	}
	switch kind {
	case uapi.NftBitwiseMaskXor:
		mask, ok1 := value(find(b, uapi.NftaBitwiseMask))
		xor, ok2 := value(find(b, uapi.NftaBitwiseXor))
		if !ok1 || !ok2 || len(mask) != int(length) || len(xor) != int(length) {
			return nil, false
		}
		return &bitwiseOp{from, to, mask, xor}, true
	case uapi.NftBitwiseLshift, uapi.NftBitwiseRshift:
		v, ok := value(find(b, uapi.NftaBitwiseData))
		if !ok || len(v) != 4 || length%4 != 0 {
			return nil, false
		}
		// Of the machine's byte order, as the words that are shifted.
		bits := binary.NativeEndian.Uint32(v)
		if bits == 0 || bits >= 32 {
			return nil, false
		}
		return &shiftOp{from, to, int(length), bits, kind == uapi.NftBitwiseRshift}, true
	}
	return nil, false // of two registers, since Linux 6.13
}

func decodeByteorder(b []byte) (op, bool) {
	sreg, dreg, length, size := unset, unset, unset, unset
	ok := (fields{
		uapi.NftaByteorderSreg: &sreg, uapi.NftaByteorderDreg: &dreg,
		uapi.NftaByteorderLen: &length, uapi.NftaByteorderSize: &size,
	}).read(b)
	from, ok1 := register(sreg)
	to, ok2 := register(dreg)
	if !ok || !ok1 || !ok2 || length > regBytes || !span(from, int(length)) || !span(to, int(length)) {
		return nil, false
	}
	switch {
	case size != 2 && size != 4 && size != 8, size == 2 && length >= 4:
		return nil, false // of several ports, kernels before 6.7 convert the wrong ones
	case length < size: // nft writes so for single bytes, and nothing is done
		return nil, true
	}
	return &byteorderOp{from, to, int(length - length%size), int(size)}, true
}

func decodeCmp(b []byte) (op, bool) {
	sreg, kind := unset, unset
	ok := (fields{uapi.NftaCmpSreg: &sreg, uapi.NftaCmpOp: &kind}).read(b)
	v, ok1 := value(find(b, uapi.NftaCmpData))
	off, ok2 := register(sreg)
	return &cmpOp{off, kind, v}, ok && ok1 && ok2 && kind <= uapi.NftCmpGte && span(off, len(v))
}

func decodeRange(b []byte) (op, bool) {
	sreg, kind := unset, unset
	ok := (fields{uapi.NftaRangeSreg: &sreg, uapi.NftaRangeOp: &kind}).read(b)
	from, ok1 := value(find(b, uapi.NftaRangeFrom))
	to, ok2 := value(find(b, uapi.NftaRangeTo))
	off, ok3 := register(sreg)
	return &rangeOp{off, kind == uapi.NftCmpNeq, from, to},
		ok && ok1 && ok2 && ok3 && kind <= uapi.NftCmpNeq && len(from) == len(to) && span(off, len(from))
}

func decodeLookup(t *table, b []byte) (op, bool) {
	sreg, dreg, flags := unset, unset, uint32(0)
	ok := (fields{
		uapi.NftaLookupSreg: &sreg, uapi.NftaLookupDreg: &dreg, uapi.NftaLookupFlags: &flags,
	}).read(b)
	var name string
	if a := walk(find(b, uapi.NftaLookupSet)); ok {
		a.val = a.rest
		name = string(a.text())
	}
	s := t.sets[name]
	off, ok1 := register(sreg)
	if !ok || !ok1 || s == nil || flags&^uapi.NftLookupFInv != 0 || !span(off, s.keyLen) {
		return nil, false
	}
	o := &lookupOp{set: s, sreg: off, dreg: regNone, invert: flags&uapi.NftLookupFInv != 0}
	if dreg != unset {
		if o.dreg, ok = register(dreg); !ok || o.invert || !s.isMap {
			return nil, false
		}
		switch {
		case o.dreg == regVerdict != s.verdicts:
			return nil, false
		case o.dreg != regVerdict && !span(o.dreg, s.dataLen):
			return nil, false
		}
	} else if s.isMap {
		return nil, false
	}
	return o, true
}

// decodeDynset tells whether adding an element may refuse the packet. It does so
// where the set is full, as every one that packets add to can be (its size is 65535
// where none is given, nft_dynset_init), or for an expression of the element's;
// nft_dynset_eval then breaks. How full it is no generation tells. Taking an
// element away never does.
func decodeDynset(b []byte) (op, bool) {
	kind := uint32(uapi.NftDynsetOpAdd)
	if !(fields{uapi.NftaDynsetOp: &kind}).read(b) {
		return nil, false
	}
	if kind == uapi.NftDynsetOpDelete {
		return nil, true
	}
	return maybe, true
}

// decodeObjref tells what objects do with a packet: they count, refuse it or
// assign something to its connection.
func decodeObjref(b []byte) (op, bool) {
	kind := uint32(uapi.NftObjectCounter)
	if !(fields{uapi.NftaObjrefImmType: &kind}).read(b) {
		return nil, false
	}
	switch {
	case find(b, uapi.NftaObjrefSetName) != nil: // a map of objects of a type not given here
		return nil, false
	case kind == uapi.NftObjectCounter:
		return nil, true
	case kind <= uapi.NftObjectCtExpect:
		return maybe, true
	}
	return nil, false // synproxy
}

func decodeFib(b []byte) (op, bool) {
	dreg, what, flags := unset, unset, unset
	if !(fields{uapi.NftaFibDreg: &dreg, uapi.NftaFibResult: &what, uapi.NftaFibFlags: &flags}).read(b) {
		return nil, false
	}
	off, ok := register(dreg)
	if !ok || off < 0 {
		return nil, false
	}
	const known = uapi.NftaFibFSaddr | uapi.NftaFibFDaddr | uapi.NftaFibFIif | uapi.NftaFibFOif
	if what == uapi.NftFibResultAddrtype && flags&^known == 0 && span(off, 4) {
		return &fibOp{off, flags&uapi.NftaFibFSaddr != 0, flags&(uapi.NftaFibFIif|uapi.NftaFibFOif) != 0}, true
	}
	return &unknownOp{off, regBytes - off}, true
}

func decodeEnum(b []byte, dregAttr, modulusAttr, offsetAttr, refused uint16) (op, bool) {
	dreg, modulus, offset := unset, unset, uint32(0)
	ok := (fields{dregAttr: &dreg, modulusAttr: &modulus, offsetAttr: &offset}).read(b)
	off, ok1 := register(dreg)
	if !ok || !ok1 || !span(off, 4) || modulus == 0 || refused != 0 && find(b, refused) != nil {
		return nil, false
	}
	return &enumOp{off, offset, modulus}, true
}

// decodeUnknown decodes an expression of which only the register is known that
// it writes to, of unknown length.
func decodeUnknown(b []byte, dregAttr uint16) (op, bool) {
	dreg := unset
	if !(fields{dregAttr: &dreg}).read(b) {
		return nil, false
	}
	off, ok := register(dreg)
	return &unknownOp{off, regBytes - off}, ok && off >= 0
}

func decodeNat(b []byte) (op, bool) {
	kind, family, flags := unset, unset, uint32(0)
	amin, amax, pmin, pmax := unset, unset, unset, unset
	ok := (fields{
		uapi.NftaNatType: &kind, uapi.NftaNatFamily: &family, uapi.NftaNatFlags: &flags,
		uapi.NftaNatRegAddrMin: &amin, uapi.NftaNatRegAddrMax: &amax,
		uapi.NftaNatRegProtoMin: &pmin, uapi.NftaNatRegProtoMax: &pmax,
	}).read(b)
	if !ok || kind != uapi.NftNatDnat {
		return nil, false
	}
	o := &natOp{family: Family(family), flags: flags}
	length := 4
	switch o.family {
	case IPv4:
	case IPv6:
		length = 16
	case INet: // ports alone
		if amin != unset {
			return nil, false
		}
	default:
		return nil, false
	}
	o.addrMin, o.addrMax, ok = pair(amin, amax, length)
	if !ok {
		return nil, false
	}
	o.portMin, o.portMax, ok = pair(pmin, pmax, 2)
	return o, ok
}

// pair gives the offsets of the registers of a range. Where the second is
// missing, the range has one value (nft_nat_init).
func pair(low, high uint32, length int) (from, to int, ok bool) {
	if low == unset {
		return regNone, regNone, high == unset
	}
	from, ok = register(low)
	if !ok || !span(from, length) {
		return 0, 0, false
	}
	if high == unset {
		return from, from, true
	}
	to, ok = register(high)
	return from, to, ok && span(to, length)
}

func decodeRedir(b []byte) (op, bool) {
	pmin, pmax := unset, unset
	if !(fields{uapi.NftaRedirRegProtoMin: &pmin, uapi.NftaRedirRegProtoMax: &pmax}).read(b) {
		return nil, false
	}
	low, high, ok := pair(pmin, pmax, 2)
	return &redirOp{low, high}, ok
}
