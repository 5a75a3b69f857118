//go:build linux

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// raw reads dumps and looks at nothing but where they end: what the kernel and
// the system calls take, the floor of every program that reads the table.
type raw struct {
	fd  int
	buf []byte
	seq uint32
}

func dialRaw() (*raw, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	r := &raw{fd: fd, buf: make([]byte, 64<<10)}
	return r, errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
}

func (r *raw) close() { _ = unix.Close(r.fd) }

// dump asks with a filter and reads all that comes. It returns how many bytes.
func (r *raw) dump(f conntrack.Filter) (size int, err error) {
	r.seq++
	if err := unix.Send(r.fd, request(f, r.seq), 0); err != nil {
		return 0, err
	}
	for {
		n, err := unix.Read(r.fd, r.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return size, err
		}
		size += n
		// NLMSG_DONE comes at the end of the last datagram, and an error alone.
		last := r.buf[max(0, n-uapi.SizeofNlMsghdr-4):n]
		switch head := r.buf[:n]; {
		case binary.NativeEndian.Uint16(head[4:]) == uapi.MsgError:
			return size, fmt.Errorf("dump: %w", unix.Errno(-int32(binary.NativeEndian.Uint32(head[uapi.SizeofNlMsghdr:]))))
		case binary.NativeEndian.Uint16(last[4:]) == uapi.MsgDone && binary.NativeEndian.Uint32(last[8:]) == r.seq:
			return size, nil
		}
	}
}

// delete sends deletes that are encoded already, and reads the answer to the last,
// which alone asks for one.
func (r *raw) delete(batch []byte, last uint32) error {
	if err := unix.Send(r.fd, batch, 0); err != nil {
		return err
	}
	for {
		n, err := unix.Read(r.fd, r.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n < uapi.SizeofNlMsghdr+4 {
			return fmt.Errorf("delete: an answer of %d bytes", n)
		}
		if e := binary.NativeEndian.Uint32(r.buf[uapi.SizeofNlMsghdr:]); e != 0 {
			return fmt.Errorf("delete: %w", unix.Errno(-int32(e)))
		}
		if binary.NativeEndian.Uint32(r.buf[8:]) == last {
			return nil
		}
	}
}

// deletion is IPCTNL_MSG_CT_DELETE of one IPv4 flow in the default zone.
func deletion(f *conntrack.Flow, flags uint16, seq uint32) []byte {
	var m nlmsg
	m.u32(0) // length
	m.u16(uapi.CtDelete, uapi.FRequest|flags)
	m.u32(seq, 0)
	m.b = append(m.b, byte(f.Family), uapi.NfnetlinkV1, 0, 0)
	m.attr(uapi.CtaTupleOrig|uapi.AttrNested, func() {
		m.attr(uapi.CtaTupleIP|uapi.AttrNested, func() {
			m.attr(uapi.CtaIPv4Src, func() { m.b = append(m.b, f.Orig.Src.AsSlice()...) })
			m.attr(uapi.CtaIPv4Dst, func() { m.b = append(m.b, f.Orig.Dst.AsSlice()...) })
		})
		m.attr(uapi.CtaTupleProto|uapi.AttrNested, func() {
			m.attr(uapi.CtaProtoNum, func() { m.b = append(m.b, f.Proto) })
			m.attr(uapi.CtaProtoSrcPort, func() { m.be16(f.Orig.SrcPort) })
			m.attr(uapi.CtaProtoDstPort, func() { m.be16(f.Orig.DstPort) })
		})
	})
	m.attr(uapi.CtaID, func() { m.be32(f.ID) })
	binary.NativeEndian.PutUint32(m.b, uint32(len(m.b)))
	return m.b
}

// request is IPCTNL_MSG_CT_GET as a dump with every criterion of the filter told
// to the kernel.
func request(f conntrack.Filter, seq uint32) []byte {
	var m nlmsg
	m.u32(0) // length
	m.u16(uapi.CtGet, uapi.FRequest|uapi.FDump)
	m.u32(seq, 0)
	m.b = append(m.b, byte(f.Family), uapi.NfnetlinkV1, 0, 0)

	var orig, reply uint32
	flag := func(flags *uint32, set bool, bit uint32) {
		if set {
			*flags |= bit
		}
	}
	flag(&orig, f.Proto != 0, uapi.FilterProtoNum)
	flag(&orig, f.OrigDst.IsValid(), uapi.FilterIPDst)
	flag(&orig, f.OrigDstPort != 0, uapi.FilterDstPort)
	flag(&reply, f.ReplySrc.IsValid(), uapi.FilterIPSrc)
	flag(&reply, f.ReplySrcPort != 0, uapi.FilterProtoNum|uapi.FilterSrcPort)
	if f.Family != 0 && orig|reply != 0 {
		m.attr(uapi.CtaFilter|uapi.AttrNested, func() {
			m.flags(uapi.CtaFilterOrigFlags, orig)
			m.flags(uapi.CtaFilterReplyFlags, reply)
		})
		m.tuple(uapi.CtaTupleOrig, orig, f.Proto, f.OrigDst, uapi.CtaIPv4Dst, f.OrigDstPort, uapi.CtaProtoDstPort)
		m.tuple(uapi.CtaTupleReply, reply, f.Proto, f.ReplySrc, uapi.CtaIPv4Src, f.ReplySrcPort, uapi.CtaProtoSrcPort)
	}
	if bits := f.Set | f.Clear; bits != 0 {
		m.attr(uapi.CtaStatus, func() { m.be32(uint32(f.Set)) })
		m.attr(uapi.CtaStatusMask, func() { m.be32(uint32(bits)) })
	}
	if f.Zone != nil {
		m.attr(uapi.CtaZone, func() { m.be16(*f.Zone) })
	}
	binary.NativeEndian.PutUint32(m.b, uint32(len(m.b)))
	return m.b
}

type nlmsg struct{ b []byte }

func (m *nlmsg) u16(vs ...uint16) {
	for _, v := range vs {
		m.b = binary.NativeEndian.AppendUint16(m.b, v)
	}
}

func (m *nlmsg) u32(vs ...uint32) {
	for _, v := range vs {
		m.b = binary.NativeEndian.AppendUint32(m.b, v)
	}
}

func (m *nlmsg) be16(v uint16) { m.b = binary.BigEndian.AppendUint16(m.b, v) }
func (m *nlmsg) be32(v uint32) { m.b = binary.BigEndian.AppendUint32(m.b, v) }

func (m *nlmsg) attr(typ uint16, value func()) {
	at := len(m.b)
	m.u16(0, typ)
	value()
	binary.NativeEndian.PutUint16(m.b[at:], uint16(len(m.b)-at))
	for len(m.b)%uapi.Align != 0 {
		m.b = append(m.b, 0)
	}
}

// flags appends filter flags, which the kernel reads in host byte order
// (ctnetlink_parse_filter).
func (m *nlmsg) flags(typ uint16, v uint32) {
	if v != 0 {
		m.attr(typ, func() { m.u32(v) })
	}
}

// tuple appends what the flags say of one direction; v4 is the attribute type of
// an IPv4 address, that of an IPv6 address is 2 more.
func (m *nlmsg) tuple(typ uint16, flags uint32, proto uint8, a netip.Addr, v4 uint16, port, portAttr uint16) {
	if flags == 0 {
		return
	}
	m.attr(typ|uapi.AttrNested, func() {
		if a.IsValid() {
			if a.Is6() {
				v4 += 2
			}
			m.attr(uapi.CtaTupleIP|uapi.AttrNested, func() {
				m.attr(v4, func() { m.b = append(m.b, a.AsSlice()...) })
			})
		}
		if flags&uapi.FilterProtoNum != 0 {
			m.attr(uapi.CtaTupleProto|uapi.AttrNested, func() {
				m.attr(uapi.CtaProtoNum, func() { m.b = append(m.b, proto) })
				if port != 0 {
					m.attr(portAttr, func() { m.be16(port) })
				}
			})
		}
	})
}
