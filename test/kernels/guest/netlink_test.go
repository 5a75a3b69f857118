//go:build linux

package guest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// attribute is one netlink attribute, of the values one behind the other.
func attribute(typ uint16, values ...[]byte) []byte {
	value := bytes.Join(values, nil)
	b := binary.NativeEndian.AppendUint16(nil, uint16(uapi.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return pad(append(b, value...))
}

func nested(typ uint16, values ...[]byte) []byte { return attribute(typ|uapi.AttrNested, values...) }

func pad(b []byte) []byte {
	for len(b)%uapi.Align != 0 {
		b = append(b, 0)
	}
	return b
}

func be16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
func be32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

// tuple is CTA_TUPLE_ORIG or CTA_TUPLE_REPLY, without what is zero.
func tuple(typ uint16, proto uint8, t conntrack.Tuple) []byte {
	var ip, l4 []byte
	for _, a := range []struct {
		v4, v6 uint16
		netip.Addr
	}{{uapi.CtaIPv4Src, uapi.CtaIPv6Src, t.Src}, {uapi.CtaIPv4Dst, uapi.CtaIPv6Dst, t.Dst}} {
		switch {
		case a.Is4():
			ip = append(ip, attribute(a.v4, a.AsSlice())...)
		case a.Is6():
			ip = append(ip, attribute(a.v6, a.AsSlice())...)
		}
	}
	if proto != 0 {
		l4 = attribute(uapi.CtaProtoNum, []byte{proto})
	}
	if t.SrcPort != 0 {
		l4 = append(l4, attribute(uapi.CtaProtoSrcPort, be16(t.SrcPort))...)
	}
	if t.DstPort != 0 {
		l4 = append(l4, attribute(uapi.CtaProtoDstPort, be16(t.DstPort))...)
	}
	var parts [][]byte
	if ip != nil {
		parts = append(parts, nested(uapi.CtaTupleIP, ip))
	}
	if l4 != nil {
		parts = append(parts, nested(uapi.CtaTupleProto, l4))
	}
	return nested(typ, parts...)
}

// criteria encodes a filter, with all that it sets told to the kernel.
func criteria(f conntrack.Filter) (attrs []byte) {
	type end struct {
		flags uint32
		conntrack.Tuple
	}
	var orig, reply end
	if f.Proto != 0 {
		orig.flags |= uapi.FilterProtoNum
	}
	if f.OrigDst.IsValid() {
		orig.flags |= uapi.FilterIPDst
		orig.Dst = f.OrigDst
	}
	if f.OrigDstPort != 0 {
		orig.flags |= uapi.FilterDstPort
		orig.DstPort = f.OrigDstPort
	}
	if f.ReplySrc.IsValid() {
		reply.flags |= uapi.FilterIPSrc
		reply.Src = f.ReplySrc
	}
	if f.ReplySrcPort != 0 {
		reply.flags |= uapi.FilterProtoNum | uapi.FilterSrcPort
		reply.SrcPort = f.ReplySrcPort
	}
	host := func(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
	var flags, tuples []byte
	for _, e := range []struct {
		end
		flag, tuple uint16
	}{
		{orig, uapi.CtaFilterOrigFlags, uapi.CtaTupleOrig},
		{reply, uapi.CtaFilterReplyFlags, uapi.CtaTupleReply},
	} {
		if e.flags == 0 {
			continue
		}
		proto := f.Proto
		if e.flags&uapi.FilterProtoNum == 0 {
			proto = 0
		}
		flags = append(flags, attribute(e.flag, host(e.flags))...)
		tuples = append(tuples, tuple(e.tuple, proto, e.Tuple)...)
	}
	if flags != nil {
		attrs = append(nested(uapi.CtaFilter, flags), tuples...)
	}
	if bits := f.Set | f.Clear; bits != 0 {
		attrs = append(attrs, attribute(uapi.CtaStatus, be32(uint32(f.Set)))...)
		attrs = append(attrs, attribute(uapi.CtaStatusMask, be32(uint32(bits)))...)
	}
	if f.Zone != nil {
		attrs = append(attrs, attribute(uapi.CtaZone, be16(*f.Zone))...)
	}
	return attrs
}

// request is one message to ctnetlink.
func request(typ, flags uint16, seq uint32, fam conntrack.Family, attrs []byte) []byte {
	order := binary.NativeEndian
	b := order.AppendUint32(nil, uint32(uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg+len(attrs)))
	b = order.AppendUint16(b, typ)
	b = order.AppendUint16(b, uapi.FRequest|flags)
	b = order.AppendUint32(b, seq)
	b = order.AppendUint32(b, 0)
	b = append(b, byte(fam), uapi.NfnetlinkV1, 0, 0)
	return append(b, attrs...)
}

// remove is a delete. It always has a tuple, without which the table would be flushed.
func remove(fam conntrack.Family, proto uint8, as named, seq uint32, flags uint16) []byte {
	attrs := tuple(uapi.CtaTupleReply, proto, as.reply)
	if as.zone != 0 {
		attrs = append(attrs, attribute(uapi.CtaZone, be16(as.zone))...)
	}
	attrs = append(attrs, attribute(uapi.CtaID, be32(as.id))...)
	return request(uapi.CtDelete, flags, seq, fam, attrs)
}

// socket is a netlink socket of the namespace that it was opened in.
type socket struct{ fd int }

func open() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	// ctnetlink answers within the send.
	tv := unix.Timeval{Sec: 5}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &socket{fd}, nil
}

func (s *socket) Close() error { return unix.Close(s.fd) }

// answer sends messages and hands on what comes back, until the end of a dump or the answer to the
// last message. handle gets the type of a message, the sequence number and the payload.
func (s *socket) answer(b []byte, last uint32, handle func(typ uint16, seq uint32, payload []byte)) error {
	if err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(s.fd, buf)
		if err != nil {
			return err
		}
		for b := buf[:n]; len(b) >= uapi.SizeofNlMsghdr; {
			length := int(binary.NativeEndian.Uint32(b))
			if length < uapi.SizeofNlMsghdr || length > len(b) {
				return fmt.Errorf("a message of %d bytes in %d", length, len(b))
			}
			typ, seq := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])
			handle(typ, seq, b[uapi.SizeofNlMsghdr:length])
			if (typ == uapi.MsgDone || typ == uapi.MsgError) && seq == last {
				return nil
			}
			b = b[min(length+(-length&(uapi.Align-1)), len(b)):]
		}
	}
}

// errno reads what a message of type NLMSG_ERROR or NLMSG_DONE reports.
func errno(typ uint16, payload []byte) unix.Errno {
	if typ != uapi.MsgError && typ != uapi.MsgDone || len(payload) < 4 {
		return 0
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(payload)))
}

// within finds the value of an attribute inside others, by the types on the way.
func within(b []byte, path ...uint16) []byte {
	for len(b) >= uapi.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < uapi.SizeofNlAttr || n > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&uapi.AttrTypeMask == path[0] {
			if len(path) == 1 {
				return b[uapi.SizeofNlAttr:n]
			}
			return within(b[uapi.SizeofNlAttr:n], path[1:]...)
		}
		b = b[min(n+(-n&(uapi.Align-1)), len(b)):]
	}
	return nil
}

// dump returns how often each source port occurs among the flows that the kernel returns, and the
// error that it ends with.
func (s *socket) dump(fam conntrack.Family, attrs []byte) (seen map[uint16]int, refused unix.Errno, err error) {
	seen = map[uint16]int{}
	err = s.answer(request(uapi.CtGet, uapi.FDump, 1, fam, attrs), 1, func(typ uint16, _ uint32, payload []byte) {
		if typ != uapi.CtNew {
			refused = errno(typ, payload)
			return
		}
		port := within(payload[uapi.SizeofNfgenmsg:], uapi.CtaTupleOrig, uapi.CtaTupleProto, uapi.CtaProtoSrcPort)
		if len(port) == 2 {
			seen[binary.BigEndian.Uint16(port)]++
		}
	})
	return seen, refused, err
}
