package ruleset

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Matches and targets of x_tables, as iptables-nft uses them. Their data are the
// kernel's structs, in the machine's byte order where nothing else is said.
type (
	xtPorts struct { // struct xt_udp, xt_tcp, xt_sctp_info
		src, dst       [2]uint16
		invSrc, invDst bool
		more           bool // what follows may match or not: flags, options, chunks
	}
	xtMultiport struct { // struct xt_multiport_v1
		flags  uint8
		ranges [][2]uint16
		invert bool
	}
	xtAddrtype struct { // struct xt_addrtype_info_v1
		source, dest       uint16
		invSource, invDest bool
		device             bool // limited to an interface
	}
	xtIprange struct { // struct xt_iprange_mtinfo
		ranges    [2][2]netip.Addr // of source and destination
		used, inv [2]bool
	}
	xtConntrack struct { // struct xt_conntrack_mtinfo3
		asks, invert   uint16
		state, status  uint16
		proto          uint16
		src, dst       [2]netip.Addr // address and mask
		sports, dports [2]uint16
	}
	xtChance struct{ always, never bool } // statistic

	// xtRecent is "recent --set": it notes an address and so is always true, but
	// drops the packet where there is no memory for it (recent_mt).
	xtRecent struct{ invert bool }

	// xtUnknown is a match whose data are not understood, or that asks what the
	// tuple does not tell. It can match or not, or drop the packet (hotdrop).
	xtUnknown struct{ name string }

	// xtNat is DNAT, REDIRECT or NETMAP.
	xtNat struct {
		redirect bool
		natRange
	}
)

const (
	xtAddrSize = 16 // union nf_inet_addr
	maxPorts   = 15 // XT_MULTI_PORTS
)

func xtInfo(b []byte) (name string, rev uint32, info []byte, ok bool) {
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaMatchName:
			name = string(a.text())
		case uapi.NftaMatchRev:
			rev = a.u32()
		case uapi.NftaMatchInfo:
			info = a.val
		}
	}
	return name, rev, info, !a.bad && name != ""
}

func decodeMatch(t *table, b []byte) (op, bool) {
	name, rev, info, ok := xtInfo(b)
	if !ok {
		return nil, false
	}
	o := op(nil)
	v4 := t.family == IPv4
	switch fmt.Sprint(name, rev) {
	case "comment0":
		return nil, true
	case "udp0":
		o = decodeUDP(info)
	case "tcp0":
		o = decodeTCP(info)
	case "sctp0":
		o = decodeSCTP(info)
	case "multiport1":
		o = decodeMultiport(info)
	case "addrtype1":
		o = decodeAddrtype(info)
	case "iprange1":
		if t.family != INet { // where a packet's family tells how addresses are read
			o = decodeIprange(info, v4)
		}
	case "conntrack1", "conntrack2", "conntrack3":
		if t.family != INet {
			o = decodeConntrack(info, rev, v4)
		}
	case "state0":
		if len(info) >= 4 {
			o = &xtConntrack{asks: ctState, state: uint16(binary.NativeEndian.Uint32(info))}
		}
	case "statistic0":
		o = decodeStatistic(info)
	case "recent0", "recent1":
		o = decodeRecent(info)
	case "mark1", "connmark1":
		o = decodeMarkMatch(name == "connmark", info)
	}
	switch {
	case o != nil:
		return o, true
	case neverDrop[name]:
		return maybe, true
	}
	return &xtUnknown{name}, true
}

// neverDrop are matches that ask what the tuple does not tell and never set
// hotdrop.
var neverDrop = map[string]bool{
	"cgroup": true, "connbytes": true, "connlabel": true, "connmark": true, "cpu": true,
	"devgroup": true, "dscp": true, "ecn": true, "helper": true, "length": true, "limit": true,
	"mac": true, "mark": true, "nfacct": true, "owner": true, "physdev": true, "pkttype": true,
	"quota": true, "realm": true, "set": true, "socket": true, "time": true, "tos": true, "ttl": true,
}

// harmlessTargets end with XT_CONTINUE: they note or count something, or change
// what does not lead the packet elsewhere.
var harmlessTargets = map[string]bool{
	"AUDIT": true, "CLASSIFY": true, "CONNSECMARK": true, "IDLETIMER": true, "LED": true, "LOG": true,
	"NFLOG": true, "RATEEST": true, "SECMARK": true, "TRACE": true,
}

func decodeTarget(t *table, b []byte) (op, bool) {
	name, rev, info, ok := xtInfo(b)
	if !ok {
		return nil, false
	}
	v4 := t.family == IPv4
	if harmlessTargets[name] {
		return nil, true
	}
	switch name {
	case "MARK":
		return decodeSetMark(rev, info), true
	case "CONNMARK":
		return decodeConnmark(rev, info), true
	case "HMARK", "SET": // a hash; what a set has, perhaps
		return &forgetMark{}, true
	}
	if t.family == INet && name != "REJECT" {
		return &anyOp{"the target " + quote(name) + " is not understood in a table of both families"}, true
	}
	var r natRange
	switch fmt.Sprint(name, rev) {
	case "REJECT0":
		return drop, true
	case "DNAT0":
		r, ok = compatRange(info)
		ok = ok && v4
	case "DNAT1", "DNAT2":
		r, ok = xtRange(info, v4, rev == 2)
	case "REDIRECT0", "NETMAP0":
		if v4 {
			r, ok = compatRange(info)
		} else {
			r, ok = xtRange(info, false, false)
		}
		if name == "NETMAP" {
			r.flags |= uapi.NfNatRangeNetmap | uapi.NfNatRangeMapIPs
		} else {
			r.flags &^= uapi.NfNatRangeMapIPs
		}
	default:
		return &anyOp{"the target " + quote(name) + " is not understood"}, true
	}
	if !ok {
		return &anyOp{"the target " + quote(name) + " is not understood"}, true
	}
	return &xtNat{name == "REDIRECT", r}, true
}

func u16s(b []byte) (a, z uint16) {
	return binary.NativeEndian.Uint16(b), binary.NativeEndian.Uint16(b[2:])
}

func decodeUDP(b []byte) op {
	if len(b) < 9 {
		return nil
	}
	p := &xtPorts{}
	p.src[0], p.src[1] = u16s(b)
	p.dst[0], p.dst[1] = u16s(b[4:])
	p.invSrc, p.invDst = b[8]&1 != 0, b[8]&2 != 0
	return p
}

func decodeTCP(b []byte) op {
	if len(b) < 12 {
		return nil
	}
	p := &xtPorts{}
	p.src[0], p.src[1] = u16s(b)
	p.dst[0], p.dst[1] = u16s(b[4:])
	option, mask, inv := b[8], b[9], b[11]
	p.invSrc, p.invDst = inv&1 != 0, inv&2 != 0
	p.more = option != 0 || mask != 0 || inv&^3 != 0
	return p
}

func decodeSCTP(b []byte) op {
	const flags, invflags = 60, 64 // offsets in struct xt_sctp_info
	if len(b) < invflags+4 {
		return nil
	}
	use, inv := binary.NativeEndian.Uint32(b[flags:]), binary.NativeEndian.Uint32(b[invflags:])
	p := &xtPorts{src: [2]uint16{0, 0xffff}, dst: [2]uint16{0, 0xffff}}
	if use&1 != 0 {
		p.src[0], p.src[1] = u16s(b[4:])
	}
	if use&2 != 0 {
		p.dst[0], p.dst[1] = u16s(b)
	}
	p.invSrc, p.invDst = use&1 != 0 && inv&1 != 0, use&2 != 0 && inv&2 != 0
	p.more = use&^3 != 0
	return p
}

func decodeMultiport(b []byte) op {
	if len(b) < 48 || b[0] > 2 || b[1] > maxPorts {
		return nil
	}
	m := &xtMultiport{flags: b[0], invert: b[47] != 0}
	port := func(i int) uint16 { return binary.NativeEndian.Uint16(b[2+2*i:]) }
	for i, n := 0, int(b[1]); i < n; i++ {
		r := [2]uint16{port(i), port(i)}
		if b[32+i] != 0 { // pflags: the first of a range
			if i++; i >= n {
				return nil
			}
			r[1] = port(i)
		}
		m.ranges = append(m.ranges, r)
	}
	return m
}

func decodeAddrtype(b []byte) op {
	if len(b) < 8 {
		return nil
	}
	a := &xtAddrtype{}
	a.source, a.dest = u16s(b)
	flags := binary.NativeEndian.Uint32(b[4:])
	if flags&^0xf != 0 {
		return nil
	}
	a.invSource, a.invDest, a.device = flags&1 != 0, flags&2 != 0, flags&0xc != 0
	return a
}

// inetAddr reads a union nf_inet_addr.
func inetAddr(b []byte, v4 bool) netip.Addr {
	if v4 {
		return netip.AddrFrom4([4]byte(b))
	}
	return netip.AddrFrom16([16]byte(b))
}

func decodeIprange(b []byte, v4 bool) op {
	if len(b) < 4*xtAddrSize+1 {
		return nil
	}
	r := &xtIprange{}
	flags := b[4*xtAddrSize]
	for i := range 2 {
		r.ranges[i] = [2]netip.Addr{inetAddr(b[2*i*xtAddrSize:], v4), inetAddr(b[(2*i+1)*xtAddrSize:], v4)}
		r.used[i], r.inv[i] = flags>>i&1 != 0, flags>>(4+i)&1 != 0
	}
	return r
}

// XT_CONNTRACK_*: what is matched.
const (
	ctState = 1 << iota
	ctProto
	ctOrigSrc
	ctOrigDst
	ctReplSrc
	ctReplDst
	ctStatus
	ctExpires
	ctOrigSrcPort
	ctOrigDstPort
	ctReplSrcPort
	ctReplDstPort
	ctDirection
	ctStateAlias
)

func decodeConntrack(b []byte, rev uint32, v4 bool) op {
	const fixed = 8*xtAddrSize + 8 // addresses and masks, expires_min, expires_max
	size := map[uint32]int{1: fixed + 16, 2: fixed + 18, 3: fixed + 26}[rev]
	if len(b) < size {
		return nil
	}
	c := &xtConntrack{}
	c.src = [2]netip.Addr{inetAddr(b, v4), inetAddr(b[xtAddrSize:], v4)}
	c.dst = [2]netip.Addr{inetAddr(b[2*xtAddrSize:], v4), inetAddr(b[3*xtAddrSize:], v4)}
	order := binary.NativeEndian
	b = b[fixed:]
	c.proto = order.Uint16(b)
	c.asks, c.invert = order.Uint16(b[10:]), order.Uint16(b[12:])
	if rev == 1 {
		c.state, c.status = uint16(b[14]), uint16(b[15])
	} else {
		c.state, c.status = order.Uint16(b[14:]), order.Uint16(b[16:])
	}
	if rev == 3 { // ranges in the machine's byte order; before, one port each
		c.sports = [2]uint16{order.Uint16(b[2:]), order.Uint16(b[18:])}
		c.dports = [2]uint16{order.Uint16(b[4:]), order.Uint16(b[20:])}
	} else {
		sport, dport := binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint16(b[4:])
		c.sports, c.dports = [2]uint16{sport, sport}, [2]uint16{dport, dport}
	}
	return c
}

func decodeStatistic(b []byte) op {
	if len(b) < 8 {
		return nil
	}
	mode, flags := u16s(b)
	if mode > 1 || flags > 1 {
		return nil
	}
	c := &xtChance{}
	if mode == 0 { // statistic_mt: matches where 31 random bits are less than the probability
		p := binary.NativeEndian.Uint32(b[4:])
		c.always, c.never = p >= 1<<31, p == 0
	} else { // every n-th packet, n-1 given
		c.always = binary.NativeEndian.Uint32(b[4:]) == 0
	}
	if flags == 1 {
		c.always, c.never = c.never, c.always
	}
	return c
}

// decodeRecent reads struct xt_recent_mtinfo, or the same with a mask.
func decodeRecent(b []byte) op {
	const check, invert, size, set = 8, 9, 211, 1 << 1 // XT_RECENT_SET
	switch {
	case len(b) < size || b[invert] > 1:
		return nil
	case b[check]&set == 0: // whether an address was noted is not known
		return maybe
	}
	return &xtRecent{b[invert] == 1}
}

// natRange is a range of translations (struct nf_nat_range2).
type natRange struct {
	flags            uint32
	addrMin, addrMax netip.Addr
	portMin, portMax uint16
}

// compatRange reads struct nf_nat_ipv4_multi_range_compat. Ports are big endian
// here and below.
func compatRange(b []byte) (r natRange, ok bool) {
	if len(b) < 20 || binary.NativeEndian.Uint32(b) != 1 {
		return r, false
	}
	r.flags = binary.NativeEndian.Uint32(b[4:])
	r.addrMin, r.addrMax = inetAddr(b[8:], true), inetAddr(b[12:], true)
	r.portMin, r.portMax = binary.BigEndian.Uint16(b[16:]), binary.BigEndian.Uint16(b[18:])
	return r, true
}

// xtRange reads struct nf_nat_range, or nf_nat_range2 with base.
func xtRange(b []byte, v4, base bool) (r natRange, ok bool) {
	size := 4 + 2*xtAddrSize + 4
	if base {
		size += 2
	}
	if len(b) < size {
		return r, false
	}
	r.flags = binary.NativeEndian.Uint32(b)
	r.addrMin, r.addrMax = inetAddr(b[4:], v4), inetAddr(b[4+xtAddrSize:], v4)
	ports := b[4+2*xtAddrSize:]
	r.portMin, r.portMax = binary.BigEndian.Uint16(ports), binary.BigEndian.Uint16(ports[2:])
	return r, true
}

// inPrefix compares an address with another one under a mask (conntrack_addrcmp).
func inPrefix(a netip.Addr, p [2]netip.Addr) bool {
	x, y, mask := a.AsSlice(), p[0].AsSlice(), p[1].AsSlice()
	for i := range x {
		if (x[i]^y[i])&mask[i] != 0 {
			return false
		}
	}
	return true
}

func in(port uint16, r [2]uint16) bool { return r[0] <= port && port <= r[1] }
