package conntrack

import (
	"encoding/binary"
	"net/netip"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// message builds netlink messages one behind the other in b. Headers and
// lengths are in host byte order, the values of ctnetlink's attributes in
// network byte order.
type message struct {
	b     []byte
	start int // of the message being built
}

func (m *message) begin(typ, flags uint16, seq uint32, family Family) {
	m.start = len(m.b)
	m.b = binary.NativeEndian.AppendUint32(m.b, 0) // length, set by end
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
	m.b = binary.NativeEndian.AppendUint16(m.b, flags)
	m.b = binary.NativeEndian.AppendUint32(m.b, seq)
	m.b = binary.NativeEndian.AppendUint32(m.b, 0) // port id: the kernel fills it in
	m.b = append(m.b, byte(family), uapi.NfnetlinkV1, 0, 0)
}

func (m *message) end() {
	binary.NativeEndian.PutUint32(m.b[m.start:], uint32(len(m.b)-m.start))
}

// attr opens an attribute; its value is appended by the caller and ended by
// close with the offset returned.
func (m *message) attr(typ uint16) int {
	at := len(m.b)
	m.b = binary.NativeEndian.AppendUint16(m.b, 0)
	m.b = binary.NativeEndian.AppendUint16(m.b, typ)
	return at
}

func (m *message) nest(typ uint16) int { return m.attr(typ | uapi.AttrNested) }

func (m *message) close(at int) {
	binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at))
	for len(m.b)%uapi.Align != 0 {
		m.b = append(m.b, 0)
	}
}

func (m *message) u8(typ uint16, v uint8) {
	at := m.attr(typ)
	m.b = append(m.b, v)
	m.close(at)
}

func (m *message) u16(typ uint16, v uint16) {
	at := m.attr(typ)
	m.b = binary.BigEndian.AppendUint16(m.b, v)
	m.close(at)
}

func (m *message) u32(typ uint16, v uint32) {
	at := m.attr(typ)
	m.b = binary.BigEndian.AppendUint32(m.b, v)
	m.close(at)
}

func (m *message) addr(v4, v6 uint16, a netip.Addr) {
	typ := v6
	if a.Is4() {
		typ = v4
	}
	at := m.attr(typ)
	if a.Is4() {
		x := a.As4()
		m.b = append(m.b, x[:]...)
	} else {
		x := a.As16()
		m.b = append(m.b, x[:]...)
	}
	m.close(at)
}

// tuple appends CTA_TUPLE_ORIG or _REPLY as ctnetlink_parse_tuple reads it.
func (m *message) tuple(typ uint16, f *Flow, t *Tuple, dir ZoneDir) {
	at := m.nest(typ)
	ip := m.nest(uapi.CtaTupleIP)
	m.addr(uapi.CtaIPv4Src, uapi.CtaIPv6Src, t.Src)
	m.addr(uapi.CtaIPv4Dst, uapi.CtaIPv6Dst, t.Dst)
	m.close(ip)
	p := m.nest(uapi.CtaTupleProto)
	m.u8(uapi.CtaProtoNum, f.Proto)
	switch {
	case f.Proto == ICMP:
		m.u16(uapi.CtaProtoICMPID, t.ICMPID)
		m.u8(uapi.CtaProtoICMPType, t.ICMPType)
		m.u8(uapi.CtaProtoICMPCode, t.ICMPCode)
	case f.Proto == ICMPv6:
		m.u16(uapi.CtaProtoICMP6ID, t.ICMPID)
		m.u8(uapi.CtaProtoICMP6Typ, t.ICMPType)
		m.u8(uapi.CtaProtoICMP6Cod, t.ICMPCode)
	case HasPorts(f.Proto):
		m.u16(uapi.CtaProtoSrcPort, t.SrcPort)
		m.u16(uapi.CtaProtoDstPort, t.DstPort)
	}
	m.close(p)
	if f.Zone != 0 && f.ZoneDir == dir {
		m.u16(uapi.CtaTupleZone, f.Zone)
	}
	m.close(at)
}

func (m *message) zone(f *Flow) {
	if f.Zone != 0 && f.ZoneDir == ZoneBoth {
		m.u16(uapi.CtaZone, f.Zone)
	}
}

// complete tells what a flow lacks to be named in a request: without a full
// tuple the kernel would take a delete for a flush of the whole table, and
// without an id it would delete whatever has the tuple by now.
func complete(f *Flow) error {
	for _, t := range []*Tuple{&f.Orig, &f.Reply} {
		for _, a := range []netip.Addr{t.Src, t.Dst} {
			if !a.IsValid() || a.Zone() != "" || FamilyOf(a) != f.Family {
				return incomplete(f, "an address is missing or not of the family")
			}
		}
	}
	if f.Proto == 0 {
		return incomplete(f, "no protocol")
	}
	return nil
}

func deletable(f *Flow) error {
	if f.ID == 0 {
		return incomplete(f, "no id")
	}
	return complete(f)
}

// create appends IPCTNL_MSG_CT_NEW.
func (m *message) create(f *Flow, master *Flow, seq uint32) error {
	if err := complete(f); err != nil {
		return err
	}
	m.begin(uapi.CtNew, uapi.FRequest|uapi.FAck|uapi.FCreate|uapi.FExcl, seq, f.Family)
	m.tuple(uapi.CtaTupleOrig, f, &f.Orig, ZoneOrig)
	m.tuple(uapi.CtaTupleReply, f, &f.Reply, ZoneReply)
	if master != nil {
		m.tuple(uapi.CtaTupleMaster, master, &master.Orig, ZoneOrig)
	}
	m.zone(f)
	m.u32(uapi.CtaStatus, uint32(f.Status&(StatusSeenReply|StatusAssured)|StatusConfirmed))
	m.u32(uapi.CtaTimeout, max(f.Timeout, 1))
	if f.Mark != 0 {
		m.u32(uapi.CtaMark, f.Mark)
	}
	switch f.Proto {
	case TCP:
		info := m.nest(uapi.CtaProtoinfo)
		tcp := m.nest(uapi.CtaProtoinfoTCP)
		m.u8(uapi.CtaProtoinfoTCPState, f.State)
		m.close(tcp)
		m.close(info)
	case SCTP: // the kernel refuses a state without both verification tags
		info := m.nest(uapi.CtaProtoinfo)
		sctp := m.nest(uapi.CtaProtoinfoSCTP)
		m.u8(uapi.CtaProtoinfoSCTPState, f.State)
		m.u32(uapi.CtaProtoinfoSCTPVtagOrig, 1)
		m.u32(uapi.CtaProtoinfoSCTPVtagReply, 1)
		m.close(sctp)
		m.close(info)
	}
	m.end()
	return nil
}

// dump appends a request for the table. Only the fields of the filter that use
// admits are told to the kernel.
func (m *message) dump(f *Filter, use Features, seq uint32) {
	m.begin(uapi.CtGet, uapi.FRequest|uapi.FDump, seq, f.Family)
	if f.Family != 0 {
		m.filter(f, use)
	}
	if bits := f.Set | f.Clear; bits != 0 && use.Status == Honoured {
		// ctnetlink_filter_match_status: status & mask == value.
		m.u32(uapi.CtaStatus, uint32(f.Set))
		m.u32(uapi.CtaStatusMask, uint32(bits))
	}
	if f.Zone != nil && use.Zone == Honoured {
		m.u16(uapi.CtaZone, *f.Zone)
	}
	m.end()
}

// filter appends CTA_FILTER and the tuples that it speaks of. The kernel reads
// ports only beside a protocol (ctnetlink_parse_tuple_filter).
func (m *message) filter(f *Filter, use Features) {
	ff := use.family(f.Family)
	byProto := f.Proto != 0 && ff.Proto == Honoured
	byAddr := ff.Addr == Honoured
	byPort := byProto && ff.ports(f.Proto) == Honoured
	var orig, reply uint32
	if byProto {
		orig |= uapi.FilterProtoNum
	}
	if f.OrigDst.IsValid() && byAddr {
		orig |= uapi.FilterIPDst
	}
	if f.OrigDstPort != 0 && byPort {
		orig |= uapi.FilterDstPort
	}
	if f.ReplySrc.IsValid() && byAddr {
		reply |= uapi.FilterIPSrc
	}
	if f.ReplySrcPort != 0 && byPort {
		reply |= uapi.FilterProtoNum | uapi.FilterSrcPort
	}
	if orig|reply == 0 {
		return
	}
	at := m.nest(uapi.CtaFilter)
	m.flags(uapi.CtaFilterOrigFlags, orig)
	m.flags(uapi.CtaFilterReplyFlags, reply)
	m.close(at)
	m.filterTuple(uapi.CtaTupleOrig, orig, f.Proto, f.OrigDst, f.OrigDstPort)
	m.filterTuple(uapi.CtaTupleReply, reply, f.Proto, f.ReplySrc, f.ReplySrcPort)
}

// flags appends filter flags, which the kernel reads in host byte order
// (nla_get_u32 in ctnetlink_parse_filter).
func (m *message) flags(typ uint16, v uint32) {
	if v == 0 {
		return
	}
	at := m.attr(typ)
	m.b = binary.NativeEndian.AppendUint32(m.b, v)
	m.close(at)
}

func (m *message) filterTuple(typ uint16, flags uint32, proto uint8, a netip.Addr, port uint16) {
	if flags == 0 {
		return
	}
	at := m.nest(typ)
	if flags&uapi.FilterIPSrc != 0 {
		ip := m.nest(uapi.CtaTupleIP)
		m.addr(uapi.CtaIPv4Src, uapi.CtaIPv6Src, a)
		m.close(ip)
	}
	if flags&uapi.FilterIPDst != 0 {
		ip := m.nest(uapi.CtaTupleIP)
		m.addr(uapi.CtaIPv4Dst, uapi.CtaIPv6Dst, a)
		m.close(ip)
	}
	if flags&uapi.FilterProtoNum != 0 {
		p := m.nest(uapi.CtaTupleProto)
		m.u8(uapi.CtaProtoNum, proto)
		if flags&uapi.FilterSrcPort != 0 {
			m.u16(uapi.CtaProtoSrcPort, port)
		}
		if flags&uapi.FilterDstPort != 0 {
			m.u16(uapi.CtaProtoDstPort, port)
		}
		m.close(p)
	}
	m.close(at)
}

// get appends IPCTNL_MSG_CT_GET for the flow that has f's original tuple.
func (m *message) get(f *Flow, seq uint32) error {
	if err := complete(f); err != nil {
		return err
	}
	m.begin(uapi.CtGet, uapi.FRequest, seq, f.Family)
	m.tuple(uapi.CtaTupleOrig, f, &f.Orig, ZoneOrig)
	m.zone(f)
	m.end()
	return nil
}

// delete appends IPCTNL_MSG_CT_DELETE for the flow that has f's reply tuple, if
// it also has f's id (ctnetlink_del_conntrack).
//
// The reply tuple, not the original one, because the id alone does not tell a
// flow from its successor: nf_ct_get_id hashes the address of the entry in
// memory and its original tuple. A flow that is deleted and comes back on the
// same CPU gets the same memory (the slab hands out what was freed last) and
// thereby the same id, though it is translated elsewhere now: seen in 9994 of
// 10000 tries on 6.18. The reply tuple holds the translation. So what is
// deleted has the tuple in both directions (the original one is in the id) and
// goes where the flow that was judged went.
//
// Without any tuple the kernel would take the request for a flush of the whole
// table; deletable refuses that before a byte is written.
func (m *message) delete(f *Flow, flags uint16, seq uint32) error {
	if err := deletable(f); err != nil {
		return err
	}
	m.begin(uapi.CtDelete, uapi.FRequest|flags, seq, f.Family)
	m.tuple(uapi.CtaTupleReply, f, &f.Reply, ZoneReply)
	m.zone(f)
	m.u32(uapi.CtaID, f.ID)
	m.end()
	return nil
}

// stats appends IPCTNL_MSG_CT_GET_STATS.
func (m *message) stats(seq uint32) {
	m.begin(uapi.CtGetStats, uapi.FRequest, seq, 0)
	m.end()
}
