//go:build linux

package testnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Veth creates a pair of virtual Ethernet devices, one end called name in this
// namespace, the other peerName in peer, brings both up and waits until they
// carry packets. Their IPv6 link-local addresses are fe80::1 and fe80::2.
func (n *NS) Veth(name string, peer *NS, peerName string) error {
	if err := n.veth(name, peer, peerName); err != nil {
		return fmt.Errorf("testnet: add veth pair %s and %s: %w", name, peerName, err)
	}
	return nil
}

func (n *NS) veth(name string, peer *NS, peerName string) error {
	// struct veth's only attribute, linux/veth.h.
	const vethInfoPeer = 1
	m := newMessage(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.IfInfomsg{})
	m.text(unix.IFLA_IFNAME, name)
	m.nest(unix.IFLA_LINKINFO, func() {
		m.text(unix.IFLA_INFO_KIND, "veth")
		m.nest(unix.IFLA_INFO_DATA, func() {
			m.nest(vethInfoPeer, func() {
				m.put(unix.IfInfomsg{})
				m.text(unix.IFLA_IFNAME, peerName)
				m.uint32(unix.IFLA_NET_NS_FD, uint32(peer.FD()))
			})
		})
	})
	if err := n.route.request(m); err != nil {
		return err
	}
	ends := []struct {
		ns        *NS
		name      string
		linkLocal netip.Prefix
	}{
		{n, name, netip.MustParsePrefix("fe80::1/64")},
		{peer, peerName, netip.MustParsePrefix("fe80::2/64")},
	}
	ipv6 := true
	for _, e := range ends {
		has, err := e.ns.withoutLinkLocal(e.name)
		if err != nil {
			return err
		}
		ipv6 = ipv6 && has
		if err := e.ns.SetUp(e.name); err != nil {
			return err
		}
	}
	for _, e := range ends {
		if err := e.ns.route.awaitCarrier(e.name); err != nil {
			return err
		}
		if ipv6 {
			if err := e.ns.AddAddr(e.name, e.linkLocal); err != nil {
				return err
			}
		}
	}
	return nil
}

// withoutLinkLocal keeps the kernel from giving an interface a link-local address,
// and tells whether it has IPv6. The kernel's own go through a second of duplicate
// address detection. Until then it has no source to ask for a neighbour with
// (ndisc_solicit), and drops what it should forward.
func (n *NS) withoutLinkLocal(ifname string) (ipv6 bool, err error) {
	const addrGenModeNone = "1"
	err = n.Sysctl("net/ipv6/conf/"+ifname+"/addr_gen_mode", addrGenModeNone)
	if errors.Is(err, unix.ENOENT) { // switched off at boot
		return false, nil
	}
	return err == nil, err
}

// SetUp brings up the interface called ifname.
func (n *NS) SetUp(ifname string) error { return n.route.setUp(ifname) }

// AddAddr adds an address with the length of its network to an interface that is
// up. It can be used at once: an IPv6 address skips duplicate address detection.
func (n *NS) AddAddr(ifname string, prefix netip.Prefix) error {
	err := n.route.changeAddr(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, ifname, prefix)
	if err == nil && prefix.Addr().Is6() {
		err = n.route.awaitLocal(prefix.Addr())
	}
	if err != nil {
		return fmt.Errorf("testnet: add address %s to %s: %w", prefix, ifname, err)
	}
	return nil
}

// DelAddr takes from an interface what AddAddr gave it.
func (n *NS) DelAddr(ifname string, prefix netip.Prefix) error {
	if err := n.route.changeAddr(unix.RTM_DELADDR, 0, ifname, prefix); err != nil {
		return fmt.Errorf("testnet: delete address %s from %s: %w", prefix, ifname, err)
	}
	return nil
}

// AddRoute adds a route to the main table. The zero via makes the destination
// directly reachable on the interface; an empty ifname leaves it to the kernel
// to find via.
func (n *NS) AddRoute(dst netip.Prefix, via netip.Addr, ifname string) error {
	if err := n.route.changeRoute(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, Route{Dst: dst, Via: via, Dev: ifname}); err != nil {
		return fmt.Errorf("testnet: add route to %s: %w", dst, err)
	}
	return nil
}

// netlink is a netlink socket. It belongs to the network namespace that it was
// opened in, whichever thread uses it.
type netlink struct {
	mu  sync.Mutex
	fd  int // -1 once closed
	seq uint32
}

// dialNetlink opens a socket of a netlink protocol in the namespace of the
// calling thread.
func dialNetlink(protocol int) (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("testnet: open netlink socket: %w", err)
	}
	// Both are there since Linux 4.12: acknowledgements without a copy of the
	// request, and with the kernel's own words for the error.
	for _, opt := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, opt, 1); err != nil {
			_ = unix.Close(fd)
			return nil, fmt.Errorf("testnet: set up netlink socket: %w", err)
		}
	}
	return &netlink{fd: fd}, nil
}

func (c *netlink) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
		c.fd = -1
	}
}

// request sends a message and returns what its acknowledgement says.
func (c *netlink) request(m *message) error {
	b, seq, err := c.exchange(m, unix.NLM_F_ACK)
	if err != nil {
		return err
	}
	return acknowledgement(b, seq)
}

// exchange sends a message, with flags added, and returns the datagram that
// answers it. It never waits: the kernel answers within sendto.
func (c *netlink) exchange(m *message, flags uint16) (answer []byte, seq uint32, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(c.fd, m.finish(flags, c.seq), 0, to); err != nil {
		return nil, 0, err
	}
	buf := make([]byte, 4096)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		if !errors.Is(err, unix.EINTR) {
			return buf[:max(n, 0)], c.seq, err
		}
	}
}

var errUnexpected = errors.New("unexpected answer from the kernel")

// acknowledgement reads struct nlmsgerr and the attributes behind it.
func acknowledgement(b []byte, seq uint32) error {
	const size = unix.SizeofNlMsghdr + unix.SizeofNlMsgerr
	order := binary.NativeEndian
	if len(b) < size || order.Uint16(b[4:]) != unix.NLMSG_ERROR || order.Uint32(b[8:]) != seq {
		return errUnexpected
	}
	flags, code := order.Uint16(b[6:]), int32(order.Uint32(b[unix.SizeofNlMsghdr:]))
	if code == 0 {
		return nil
	}
	errno := unix.Errno(-code)
	if flags&unix.NLM_F_CAPPED == 0 || flags&unix.NLM_F_ACK_TLVS == 0 {
		return errno
	}
	for b = b[size:]; len(b) >= unix.SizeofRtAttr; {
		n := int(order.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			break
		}
		if order.Uint16(b[2:]) == unix.NLMSGERR_ATTR_MSG {
			return fmt.Errorf("%w (%s)", errno, unix.ByteSliceToString(b[unix.SizeofRtAttr:n]))
		}
		b = b[min(align(n), len(b)):]
	}
	return errno
}

func (c *netlink) setUp(ifname string) error {
	m := newMessage(unix.RTM_NEWLINK, 0, unix.IfInfomsg{Flags: unix.IFF_UP, Change: unix.IFF_UP})
	m.text(unix.IFLA_IFNAME, ifname)
	if err := c.request(m); err != nil {
		return fmt.Errorf("testnet: bring up %s: %w", ifname, err)
	}
	return nil
}

func (c *netlink) changeAddr(typ, flags uint16, ifname string, prefix netip.Prefix) error {
	index, err := c.index(ifname)
	if err != nil {
		return err
	}
	m := newMessage(typ, flags, unix.IfAddrmsg{
		Family:    family(prefix.Addr()),
		Prefixlen: uint8(prefix.Bits()),
		Flags:     unix.IFA_F_NODAD, // ignored for IPv4
		Index:     index,
	})
	m.attr(unix.IFA_LOCAL, prefix.Addr().AsSlice())
	m.attr(unix.IFA_ADDRESS, prefix.Addr().AsSlice())
	return c.request(m)
}

// index returns the number of an interface. The ioctl asks the socket's
// namespace, as requests do.
func (c *netlink) index(ifname string) (uint32, error) {
	r, err := unix.NewIfreq(ifname)
	if err != nil {
		return 0, fmt.Errorf("interface name %q: %w", ifname, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFINDEX, r); err != nil {
		return 0, err
	}
	return r.Uint32(), nil
}

// awaitCarrier waits until an interface that is up, as its peer is, has a queue:
// the kernel gives it one from a work queue (linkwatch_do_dev), and drops what
// is sent before. Since Linux 6.8 the question itself makes it do so
// (linkwatch_sync_dev); older ones may take a second.
func (c *netlink) awaitCarrier(ifname string) error {
	err := await(func() (bool, error) {
		m := newMessage(unix.RTM_GETLINK, 0, unix.IfInfomsg{})
		m.text(unix.IFLA_IFNAME, ifname)
		var link unix.IfInfomsg
		err := c.get(m, unix.RTM_NEWLINK, &link)
		return link.Flags&unix.IFF_RUNNING != 0, err
	})
	if err != nil {
		return fmt.Errorf("carrier of %s: %w", ifname, err)
	}
	return nil
}

// awaitLocal waits until packets to an IPv6 address that was added are taken
// for the namespace's own: the kernel makes that route from a work queue too
// (addrconf_dad_work), even without duplicate address detection.
func (c *netlink) awaitLocal(a netip.Addr) error {
	return await(func() (bool, error) {
		m := newMessage(unix.RTM_GETROUTE, 0, unix.RtMsg{Family: unix.AF_INET6, Dst_len: 128})
		m.attr(unix.RTA_DST, a.AsSlice())
		var route unix.RtMsg
		err := c.get(m, unix.RTM_NEWROUTE, &route)
		if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
			return false, nil
		}
		return route.Type == unix.RTN_LOCAL, err
	})
}

// get sends a message and reads the fixed part of its answer, of type typ.
func (c *netlink) get(m *message, typ uint16, fixed any) error {
	b, seq, err := c.exchange(m, 0)
	if err != nil {
		return err
	}
	var h unix.NlMsghdr
	n, err := binary.Decode(b, binary.NativeEndian, &h)
	switch {
	case err != nil || h.Seq != seq:
		return errUnexpected
	case h.Type != typ:
		// An acknowledgement, which then is of an error.
		return acknowledgement(b, seq)
	}
	if _, err := binary.Decode(b[n:], binary.NativeEndian, fixed); err != nil {
		return errUnexpected
	}
	return nil
}

// await asks again and again, for ten seconds at most, what the kernel has no
// message for.
func await(cond func() (bool, error)) error {
	for start := time.Now(); ; time.Sleep(100 * time.Microsecond) {
		ok, err := cond()
		switch {
		case ok || err != nil:
			return err
		case time.Since(start) > 10*time.Second:
			return errors.New("not there after 10 s")
		}
	}
}

func family(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// message is a netlink request in the making: the header, the fixed part of its
// type, attributes.
type message struct{ b []byte }

func newMessage(typ, flags uint16, fixed any) *message {
	m := &message{}
	m.put(unix.NlMsghdr{Type: typ, Flags: unix.NLM_F_REQUEST | flags})
	m.put(fixed)
	return m
}

// put appends a kernel struct, whose size is a multiple of 4.
func (m *message) put(fixed any) {
	b, err := binary.Append(m.b, binary.NativeEndian, fixed)
	if err != nil {
		panic(err) // the type is not one of fixed size
	}
	m.b = b
}

func (m *message) attr(typ uint16, value []byte) {
	m.nest(typ, func() { m.b = append(m.b, value...) })
}

func (m *message) text(typ uint16, value string) { m.attr(typ, append([]byte(value), 0)) }

func (m *message) uint16(typ uint16, value uint16) {
	m.attr(typ, binary.NativeEndian.AppendUint16(nil, value))
}

func (m *message) uint32(typ uint16, value uint32) {
	m.attr(typ, binary.NativeEndian.AppendUint32(nil, value))
}

// nest appends an attribute (struct rtattr) whose value fill appends.
func (m *message) nest(typ uint16, fill func()) {
	start := len(m.b)
	m.b = append(m.b, 0, 0, 0, 0)
	fill()
	binary.NativeEndian.PutUint16(m.b[start:], uint16(len(m.b)-start))
	binary.NativeEndian.PutUint16(m.b[start+2:], typ)
	m.b = append(m.b, make([]byte, align(len(m.b))-len(m.b))...)
}

// finish fills in what the header still lacks, and returns the request.
func (m *message) finish(flags uint16, seq uint32) []byte {
	order := binary.NativeEndian
	order.PutUint32(m.b, uint32(len(m.b)))
	order.PutUint16(m.b[6:], order.Uint16(m.b[6:])|flags)
	order.PutUint32(m.b[8:], seq)
	return m.b
}

// align rounds up as NLMSG_ALIGN and RTA_ALIGN do.
func align(n int) int { return (n + 3) &^ 3 }
