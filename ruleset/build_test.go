package ruleset

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Messages are written here as the kernel writes them, to be decoded.

func nla(typ uint16, parts ...[]byte) []byte {
	v := join(parts...)
	b := binary.NativeEndian.AppendUint16(nil, uint16(uapi.SizeofNlAttr+len(v)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return join(b, v, make([]byte, align(len(v))-len(v)))
}

func num(typ uint16, v uint32) []byte { return nla(typ, binary.BigEndian.AppendUint32(nil, v)) }

func str(typ uint16, s string) []byte { return nla(typ, append([]byte(s), 0)) }

func expr(name string, attrs ...[]byte) []byte {
	return nla(uapi.NftaListElem, str(uapi.NftaExprName, name), nla(uapi.NftaExprData, attrs...))
}

func dataOf(typ uint16, v ...byte) []byte { return nla(typ, nla(uapi.NftaDataValue, v)) }

// word is a number of the machine's byte order.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func payload(base, offset, length uint32) []byte {
	return expr("payload", num(uapi.NftaPayloadDreg, 1), num(uapi.NftaPayloadBase, base),
		num(uapi.NftaPayloadOffset, offset), num(uapi.NftaPayloadLen, length))
}

func cmpTo(op uint32, v ...byte) []byte {
	return expr("cmp", num(uapi.NftaCmpSreg, 1), num(uapi.NftaCmpOp, op), dataOf(uapi.NftaCmpData, v...))
}

func eq(v ...byte) []byte { return cmpTo(uapi.NftCmpEq, v...) }

func metaKey(key uint32) []byte {
	return expr("meta", num(uapi.NftaMetaDreg, 1), num(uapi.NftaMetaKey, key))
}

func ctKey(key uint32, attrs ...[]byte) []byte {
	return expr("ct", append([][]byte{num(uapi.NftaCtDreg, 1), num(uapi.NftaCtKey, key)}, attrs...)...)
}

func bitwiseAnd(mask ...byte) []byte {
	return expr("bitwise", num(uapi.NftaBitwiseSreg, 1), num(uapi.NftaBitwiseDreg, 1),
		num(uapi.NftaBitwiseLen, uint32(len(mask))), dataOf(uapi.NftaBitwiseMask, mask...),
		dataOf(uapi.NftaBitwiseXor, make([]byte, len(mask))...))
}

func shiftBy(op, bits uint32) []byte {
	return expr("bitwise", num(uapi.NftaBitwiseSreg, 1), num(uapi.NftaBitwiseDreg, 1), num(uapi.NftaBitwiseLen, 4),
		num(uapi.NftaBitwiseOp, op), dataOf(uapi.NftaBitwiseData, word(bits)...))
}

func swap(length, size uint32) []byte {
	return expr("byteorder", num(uapi.NftaByteorderSreg, 1), num(uapi.NftaByteorderDreg, 1),
		num(uapi.NftaByteorderLen, length), num(uapi.NftaByteorderSize, size))
}

func immediateReg(reg uint32, v ...byte) []byte {
	return expr("immediate", num(uapi.NftaImmediateDreg, reg), dataOf(uapi.NftaImmediateData, v...))
}

func verdictData(code int32, chain string) []byte {
	attrs := [][]byte{num(uapi.NftaVerdictCode, uint32(code))}
	if chain != "" {
		attrs = append(attrs, str(uapi.NftaVerdictChain, chain))
	}
	return nla(uapi.NftaDataVerdict, attrs...)
}

func verdictExpr(code int32, chain string) []byte {
	return expr("immediate", num(uapi.NftaImmediateDreg, uapi.NftRegVerdict),
		nla(uapi.NftaImmediateData, verdictData(code, chain)))
}

func accept() []byte           { return verdictExpr(uapi.NfAccept, "") }
func jump(chain string) []byte { return verdictExpr(uapi.NftJump, chain) }
func goTo(chain string) []byte { return verdictExpr(uapi.NftGoto, chain) }
func back() []byte             { return verdictExpr(uapi.NftReturn, "") }
func dropIt() []byte           { return verdictExpr(uapi.NfDrop, "") }
func unknownThing() []byte     { return expr("teleport", num(1, 1)) }
func match(name string, rev uint32, info []byte) []byte {
	return expr("match", str(uapi.NftaMatchName, name), num(uapi.NftaMatchRev, rev), nla(uapi.NftaMatchInfo, info))
}

func target(name string, rev uint32, info []byte) []byte {
	return expr("target", str(uapi.NftaMatchName, name), num(uapi.NftaMatchRev, rev), nla(uapi.NftaMatchInfo, info))
}

// dnat translates to an IPv4 address and port, or without the port if it is 0.
func dnat(to string) []byte {
	a := netip.MustParseAddrPort(to)
	b := immediateReg(1, a.Addr().AsSlice()...)
	attrs := [][]byte{
		num(uapi.NftaNatType, uapi.NftNatDnat), num(uapi.NftaNatFamily, uapi.NfprotoIPv4),
		num(uapi.NftaNatRegAddrMin, 1), num(uapi.NftaNatRegAddrMax, 1),
	}
	if a.Port() != 0 {
		b = append(b, immediateReg(2, byte(a.Port()>>8), byte(a.Port()))...)
		attrs = append(attrs, num(uapi.NftaNatRegProtoMin, 2))
	}
	return append(b, expr("nat", attrs...)...)
}

// rig is a model in the making.
type rig struct {
	tb     testing.TB
	m      *model
	family Family
	table  string
	handle uint64
}

func newRig(tb testing.TB, family Family) *rig {
	tb.Helper()
	r := &rig{tb: tb, m: newModel(), family: family, table: "t"}
	r.check(r.m.addTable(family, join(str(uapi.NftaTableName, "t"), num(uapi.NftaTableFlags, 0))))
	return r
}

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func (r *rig) check(err error) {
	r.tb.Helper()
	if err != nil {
		r.tb.Fatal(err)
	}
}

// base adds a base chain.
func (r *rig) base(name string, hook uint32, priority int32, policy uint32) {
	r.tb.Helper()
	r.check(r.m.addChain(r.family, join(str(uapi.NftaChainTable, r.table), str(uapi.NftaChainName, name),
		nla(uapi.NftaChainHook, num(uapi.NftaHookHooknum, hook), num(uapi.NftaHookPriority, uint32(priority))),
		num(uapi.NftaChainPolicy, policy), str(uapi.NftaChainType, "nat"))))
}

func (r *rig) chain(names ...string) {
	r.tb.Helper()
	for _, name := range names {
		r.check(r.m.addChain(r.family, join(str(uapi.NftaChainTable, r.table), str(uapi.NftaChainName, name))))
	}
}

func (r *rig) rule(chain string, exprs ...[]byte) {
	r.tb.Helper()
	r.handle++
	r.check(r.m.addRule(r.family, join(str(uapi.NftaRuleTable, r.table), str(uapi.NftaRuleChain, chain),
		nla(uapi.NftaRuleHandle, binary.BigEndian.AppendUint64(nil, r.handle)), nla(uapi.NftaRuleExpressions, exprs...))))
}

// set adds a set, with elements if there are any.
func (r *rig) set(name string, flags, keyLen uint32, attrs []byte, elems ...[]byte) {
	r.tb.Helper()
	r.check(r.m.addSet(r.family, join(str(uapi.NftaSetTable, r.table), str(uapi.NftaSetName, name),
		num(uapi.NftaSetFlags, flags), num(uapi.NftaSetKeyLen, keyLen), attrs)))
	t := r.m.tables[tableKey{r.family, r.table}]
	g := gathering{table: t, set: t.sets[name], limits: usualLimits}
	for len(elems) > 0 { // an attribute holds 64 KiB
		n := min(len(elems), 500)
		r.check(g.add(nla(uapi.NftaSetElemListElements, elems[:n]...)))
		elems = elems[n:]
	}
	t.sets[name].elements = g.finish()
}

// elem is an element; a nil key makes it the catch-all.
func elem(key []byte, attrs ...[]byte) []byte {
	if key == nil {
		return nla(uapi.NftaListElem, append(attrs, num(uapi.NftaSetElemFlags, uapi.NftSetElemCatchall))...)
	}
	return nla(uapi.NftaListElem, append([][]byte{dataOf(uapi.NftaSetElemKey, key...)}, attrs...)...)
}

func elemEnd(key []byte) []byte {
	return nla(uapi.NftaListElem, dataOf(uapi.NftaSetElemKey, key...), num(uapi.NftaSetElemFlags, uapi.NftSetElemIntervalEnd))
}

func elemVerdict(code int32, chain string) []byte {
	return nla(uapi.NftaSetElemData, verdictData(code, chain))
}

func lookupSet(name string, attrs ...[]byte) []byte {
	return expr("lookup", append([][]byte{str(uapi.NftaLookupSet, name), num(uapi.NftaLookupSreg, 1)}, attrs...)...)
}

func (r *rig) ruleset() *Ruleset {
	rs := &Ruleset{model: r.m, effort: newEffort()}
	rs.eval = eval{m: r.m, fetch: func(_ *table, s *set) (*elements, error) { return nil, errHuge }}
	return rs
}

func (r *rig) outcome(p Packet, h Host) *Outcome { return r.ruleset().Outcome(p, h) }

// knowing is a Host of a few answers: 192.0.2.1 is its own address.
type knowing struct {
	epoch   uint64
	inputs  map[netip.Addr]*Interfaces
	outputs *Interfaces
	unsure  map[netip.Addr]bool
}

var ownAddrs = map[netip.Addr]bool{
	netip.MustParseAddr("192.0.2.1"): true, netip.MustParseAddr("2001:db8::1"): true,
}

func (k *knowing) Epoch() uint64      { return k.epoch }
func (k *knowing) Current(uint8) bool { return true }
func (k *knowing) Certain() Host      { return k }

func (k *knowing) Sent(a netip.Addr) Origin {
	switch {
	case k.unsure[a]:
		return Unsure
	case ownAddrs[a]:
		return Own
	}
	return Foreign
}

func (k *knowing) Types(a netip.Addr) Types {
	switch {
	case ownAddrs[a]:
		return TypeLocal
	case a.Is6():
		return TypeUnicast | typeNowhere
	}
	return TypeUnicast
}

func (k *knowing) Inputs(a netip.Addr) *Interfaces { return k.inputs[a] }
func (k *knowing) Outputs(netip.Addr) *Interfaces  { return k.outputs }

// The packet of most tests: 192.0.2.50:40000 > 203.0.113.10:53.
func dns() Packet {
	return Packet{
		conntrack.UDP, netip.MustParseAddr("192.0.2.50"), netip.MustParseAddr("203.0.113.10"), 40000, 53,
	}
}

func dns6() Packet {
	return Packet{
		conntrack.UDP, netip.MustParseAddr("2001:db8::50"), netip.MustParseAddr("2001:db8:a::10"), 40000, 53,
	}
}
