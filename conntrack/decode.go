package conntrack

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// errMalformed: a message does not hold a flow that could be judged.
var errMalformed = errors.New("malformed conntrack message")

// nextMessage cuts the first netlink message from b. ok is false where what is
// left is no whole message.
func nextMessage(b []byte) (typ, flags uint16, seq uint32, payload, rest []byte, ok bool) {
	if len(b) < uapi.SizeofNlMsghdr {
		return
	}
	n := int(binary.NativeEndian.Uint32(b))
	if n < uapi.SizeofNlMsghdr || n > len(b) {
		return
	}
	typ = binary.NativeEndian.Uint16(b[4:])
	flags = binary.NativeEndian.Uint16(b[6:])
	seq = binary.NativeEndian.Uint32(b[8:])
	return typ, flags, seq, b[uapi.SizeofNlMsghdr:n], b[min(aligned(n), len(b)):], true
}

func aligned(n int) int { return (n + uapi.Align - 1) &^ (uapi.Align - 1) }

// nextAttr cuts the first attribute from b. It returns ok false at the end, and
// also where an attribute claims more than there is: what came before counts,
// and a flow that then lacks something is refused as a whole.
func nextAttr(b []byte) (typ uint16, value, rest []byte, ok bool) {
	if len(b) < uapi.SizeofNlAttr {
		return
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < uapi.SizeofNlAttr || n > len(b) {
		return
	}
	typ = binary.NativeEndian.Uint16(b[2:]) & uapi.AttrTypeMask
	return typ, b[uapi.SizeofNlAttr:n], b[min(aligned(n), len(b)):], true
}

func be16(b []byte) uint16 {
	if len(b) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

func be32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func u8(b []byte) uint8 {
	if len(b) < 1 {
		return 0
	}
	return b[0]
}

// decodeFlow reads what ctnetlink_fill_info wrote behind the netlink header. It
// overwrites all of f, allocates nothing and keeps nothing of b. Attributes
// that it does not know are passed over; without two whole tuples of one family
// and protocol it returns errMalformed.
func decodeFlow(b []byte, f *Flow) error {
	*f = Flow{}
	if len(b) < uapi.SizeofNfgenmsg {
		return errMalformed
	}
	f.Family = Family(b[0])
	if f.Family != IPv4 && f.Family != IPv6 {
		return errMalformed
	}
	var replyProto uint8
	var orig, reply bool
	for rest := b[uapi.SizeofNfgenmsg:]; ; {
		typ, v, next, ok := nextAttr(rest)
		if !ok {
			break
		}
		rest = next
		switch typ {
		case uapi.CtaTupleOrig:
			orig = decodeTuple(v, f, &f.Orig, &f.Proto, ZoneOrig)
		case uapi.CtaTupleReply:
			reply = decodeTuple(v, f, &f.Reply, &replyProto, ZoneReply)
		case uapi.CtaStatus:
			f.Status = Status(be32(v))
		case uapi.CtaTimeout:
			f.Timeout = be32(v)
		case uapi.CtaMark:
			f.Mark = be32(v)
		case uapi.CtaID:
			f.ID = be32(v)
		case uapi.CtaZone:
			f.Zone, f.ZoneDir = be16(v), ZoneBoth
		case uapi.CtaProtoinfo:
			f.State = decodeState(v)
		}
	}
	if !orig || !reply || f.Proto != replyProto {
		return errMalformed
	}
	return nil
}

func decodeTuple(b []byte, f *Flow, t *Tuple, proto *uint8, dir ZoneDir) bool {
	var ports int
	for {
		typ, v, next, ok := nextAttr(b)
		if !ok {
			break
		}
		b = next
		switch typ {
		case uapi.CtaTupleIP:
			decodeIP(v, f.Family, t)
		case uapi.CtaTupleProto:
			ports = decodeProto(v, t, proto)
		case uapi.CtaTupleZone:
			f.Zone, f.ZoneDir = be16(v), dir
		}
	}
	return t.Src.IsValid() && t.Dst.IsValid() && *proto != 0 && (!HasPorts(*proto) || ports == 2)
}

func decodeIP(b []byte, family Family, t *Tuple) {
	for {
		typ, v, next, ok := nextAttr(b)
		if !ok {
			return
		}
		b = next
		var a netip.Addr
		switch {
		case family == IPv4 && (typ == uapi.CtaIPv4Src || typ == uapi.CtaIPv4Dst) && len(v) == 4:
			a = netip.AddrFrom4([4]byte(v))
		case family == IPv6 && (typ == uapi.CtaIPv6Src || typ == uapi.CtaIPv6Dst) && len(v) == 16:
			a = netip.AddrFrom16([16]byte(v))
		default:
			continue
		}
		if typ == uapi.CtaIPv4Src || typ == uapi.CtaIPv6Src {
			t.Src = a
		} else {
			t.Dst = a
		}
	}
}

// decodeProto returns how many ports it found.
func decodeProto(b []byte, t *Tuple, proto *uint8) (ports int) {
	var haveSrc, haveDst bool
	for {
		typ, v, next, ok := nextAttr(b)
		if !ok {
			break
		}
		b = next
		switch typ {
		case uapi.CtaProtoNum:
			*proto = u8(v)
		case uapi.CtaProtoSrcPort:
			t.SrcPort, haveSrc = be16(v), len(v) >= 2
		case uapi.CtaProtoDstPort:
			t.DstPort, haveDst = be16(v), len(v) >= 2
		case uapi.CtaProtoICMPID, uapi.CtaProtoICMP6ID:
			t.ICMPID = be16(v)
		case uapi.CtaProtoICMPType, uapi.CtaProtoICMP6Typ:
			t.ICMPType = u8(v)
		case uapi.CtaProtoICMPCode, uapi.CtaProtoICMP6Cod:
			t.ICMPCode = u8(v)
		}
	}
	if haveSrc {
		ports++
	}
	if haveDst {
		ports++
	}
	return ports
}

// decodeState reads CTA_PROTOINFO_TCP or _SCTP, of which both have the state
// as their first attribute type.
func decodeState(b []byte) uint8 {
	typ, v, _, ok := nextAttr(b)
	if !ok || typ != uapi.CtaProtoinfoTCP && typ != uapi.CtaProtoinfoSCTP {
		return 0
	}
	for {
		typ, val, next, ok := nextAttr(v)
		if !ok {
			return 0
		}
		if typ == uapi.CtaProtoinfoTCPState {
			return u8(val)
		}
		v = next
	}
}

// decodeError reads NLMSG_ERROR or NLMSG_DONE: the errno as a positive number,
// and the kernel's words where it sent any (NETLINK_EXT_ACK).
func decodeError(typ, flags uint16, b []byte) (errno uint32, msg string) {
	if len(b) < 4 {
		return 0, ""
	}
	errno = uint32(-int32(binary.NativeEndian.Uint32(b)))
	if flags&uapi.FAckTLVs == 0 {
		return errno, ""
	}
	b = b[4:]
	if typ == uapi.MsgError { // struct nlmsgerr: the request's header, its payload unless capped
		if len(b) < uapi.SizeofNlMsghdr {
			return errno, ""
		}
		skip := uapi.SizeofNlMsghdr
		if flags&uapi.FCapped == 0 {
			skip = aligned(int(min(binary.NativeEndian.Uint32(b), 1<<20)))
		}
		if skip < uapi.SizeofNlMsghdr || skip > len(b) {
			return errno, ""
		}
		b = b[skip:]
	}
	for {
		typ, v, next, ok := nextAttr(b)
		if !ok {
			return errno, ""
		}
		b = next
		if typ == uapi.ErrAttrMsg {
			for len(v) > 0 && v[len(v)-1] == 0 {
				v = v[:len(v)-1]
			}
			return errno, string(v)
		}
	}
}
