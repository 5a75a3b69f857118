//go:build linux

package testnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// SocketOptions are what a socket may be beside an ordinary one.
type SocketOptions struct {
	// Transparent (IP_TRANSPARENT) lets it have any address, and send from it.
	Transparent bool
	// Freebind (IP_FREEBIND) lets it have any address. IPv4 does not send from one
	// that is no address of the namespace.
	Freebind bool
	// Device (SO_BINDTODEVICE) is the interface that all goes through.
	Device string
	// Mark (SO_MARK) is the mark of what it sends.
	Mark uint32
}

func (o SocketOptions) set(fd int, v6 bool) error {
	var errs []error
	integer := func(is bool, level, option, value int) {
		if is {
			errs = append(errs, unix.SetsockoptInt(fd, level, option, value))
		}
	}
	if v6 {
		integer(o.Transparent, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		integer(o.Freebind, unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
	} else {
		integer(o.Transparent, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		integer(o.Freebind, unix.SOL_IP, unix.IP_FREEBIND, 1)
	}
	if o.Device != "" {
		errs = append(errs, unix.BindToDevice(fd, o.Device))
	}
	integer(o.Mark != 0, unix.SOL_SOCKET, unix.SO_MARK, int(o.Mark))
	return errors.Join(errs...)
}

// ListenUDPAs is ListenUDP for a socket with options.
func (n *NS) ListenUDPAs(addr netip.AddrPort, o SocketOptions) (*net.UDPConn, error) {
	var c net.PacketConn
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = o.set(int(fd), addr.Addr().Is6()) }), err)
	}}
	err := n.Do(func() (err error) {
		c, err = config.ListenPacket(context.Background(), udpNetwork(addr), addr.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("testnet: %w", err)
	}
	return c.(*net.UDPConn), nil
}

// Raw is a socket for packets whose sender need not exist. It is used by one
// goroutine at a time.
type Raw struct {
	fd   int
	to   unix.Sockaddr // of a link
	head []byte        // the Ethernet header, of a link
	buf  []byte
}

// OpenRaw opens a socket for packets of a family that the namespace then sends as
// its own: they meet the rules of the output hook.
func (n *NS) OpenRaw(v6 bool, o SocketOptions) (*Raw, error) {
	r := &Raw{fd: -1}
	err := n.Do(func() (err error) {
		domain, level, option := unix.AF_INET, unix.SOL_IP, unix.IP_HDRINCL
		if v6 {
			domain, level, option = unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_HDRINCL
		}
		if r.fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW); err != nil {
			return err
		}
		return errors.Join(unix.SetsockoptInt(r.fd, level, option, 1), o.set(r.fd, v6))
	})
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("testnet: open raw socket: %w", err)
	}
	return r, nil
}

// OpenLink opens a socket that puts packets on the link behind an interface of the
// namespace, as if a host there had sent them to the one with a hardware address.
func (n *NS) OpenLink(ifname string, to net.HardwareAddr) (*Raw, error) {
	i, err := n.Interface(ifname)
	if err != nil {
		return nil, err
	}
	r := &Raw{fd: -1, to: &unix.SockaddrLinklayer{Ifindex: i.Index}, head: append(append([]byte{}, to...), i.HardwareAddr...)}
	err = n.Do(func() (err error) {
		// Without a protocol it receives nothing.
		r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("testnet: open link %s: %w", ifname, err)
	}
	return r, nil
}

// Send sends the first packet of a flow: a UDP datagram of one byte, or a TCP
// segment with SYN.
func (r *Raw) Send(proto uint8, src, dst netip.AddrPort) error {
	v6 := dst.Addr().Is6()
	to := r.to
	r.buf = append(r.buf[:0], r.head...)
	switch {
	case r.to != nil:
		kind := uint16(unix.ETH_P_IP)
		if v6 {
			kind = unix.ETH_P_IPV6
		}
		r.buf = append(r.buf, byte(kind>>8), byte(kind))
	case v6:
		to = &unix.SockaddrInet6{Addr: dst.Addr().As16()}
	default:
		to = &unix.SockaddrInet4{Addr: dst.Addr().As4()}
	}
	r.buf = appendPacket(r.buf, proto, src, dst)
	for {
		// An ICMP error for an earlier packet stands in the way of this one.
		err := unix.Sendto(r.fd, r.buf, 0, to)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Close closes the socket.
func (r *Raw) Close() {
	if r.fd >= 0 {
		_ = unix.Close(r.fd)
		r.fd = -1
	}
}

// appendPacket writes headers as in struct iphdr, ipv6hdr, udphdr and tcphdr.
func appendPacket(b []byte, proto uint8, src, dst netip.AddrPort) []byte {
	port := func(b []byte, p uint16) []byte { return append(b, byte(p>>8), byte(p)) }
	seg := port(port(nil, src.Port()), dst.Port())
	sum := 6
	if proto == unix.IPPROTO_TCP {
		const syn = 0x02
		seg = append(seg, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, syn, 0xff, 0xff, 0, 0, 0, 0)
		sum = 16
	} else {
		seg = append(seg, 0, 9, 0, 0, 'x')
	}
	from, to := src.Addr().AsSlice(), dst.Addr().AsSlice()
	pseudo := append(append([]byte{}, from...), to...)
	pseudo = append(pseudo, 0, proto, byte(len(seg)>>8), byte(len(seg)))
	c := checksum(pseudo, seg)
	if c == 0 {
		c = 0xffff // 0 stands for none
	}
	seg[sum], seg[sum+1] = byte(c>>8), byte(c)
	if dst.Addr().Is6() {
		b = append(b, 0x60, 0, 0, 0, byte(len(seg)>>8), byte(len(seg)), proto, 64)
		return append(append(append(b, from...), to...), seg...)
	}
	n := 20 + len(seg)
	head := []byte{0x45, 0, byte(n >> 8), byte(n), 0, 1, 0, 0, 64, proto, 0, 0}
	head = append(append(head, from...), to...)
	c = checksum(head)
	head[10], head[11] = byte(c>>8), byte(c)
	return append(append(b, head...), seg...)
}

// checksum is the Internet checksum of parts, all but the last of even length.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, b := range parts {
		for i, x := range b {
			if i%2 == 0 {
				sum += uint32(x) << 8
			} else {
				sum += uint32(x)
			}
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
