//go:build linux

package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
)

// netlinkRequest is a message to nfnetlink.
type netlinkRequest struct {
	typ, flags uint16
	body       []byte
}

// netfilter sends messages in one datagram from the calling thread's namespace, and
// returns the first error that comes back. Those without NLM_F_ACK are silent when
// they succeed.
func netfilter(list []netlinkRequest) error {
	_, err := netlinkAsk(unix.NETLINK_NETFILTER, list)
	return err
}

// netlinkAsk does that for any protocol, and returns the last message that is no
// acknowledgement.
func netlinkAsk(protocol int, list []netlinkRequest) (reply []byte, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	order := binary.NativeEndian
	var b []byte
	acks := 0
	for i, r := range list {
		b = order.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(r.body)))
		b = order.AppendUint16(b, r.typ)
		b = order.AppendUint16(b, r.flags|unix.NLM_F_REQUEST)
		b = order.AppendUint32(b, uint32(i+1))
		b = order.AppendUint32(b, 0)
		b = append(b, r.body...)
		if r.flags&unix.NLM_F_ACK != 0 {
			acks++
		}
	}
	// As large as it must be, which takes CAP_NET_ADMIN.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, len(b)+1<<20)
	tv := unix.NsecToTimeval(int64(time.Minute))
	if err := errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})); err != nil {
		return nil, fmt.Errorf("send: %w", err)
	}
	answer := make([]byte, 64<<10)
	for acks > 0 {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err != nil {
			return nil, fmt.Errorf("receive: %w", err)
		}
		for m := answer[:n]; len(m) >= unix.SizeofNlMsghdr+4; {
			size := int(order.Uint32(m))
			if order.Uint16(m[4:]) == unix.NLMSG_ERROR {
				acks--
				if errno := int32(order.Uint32(m[unix.SizeofNlMsghdr:])); errno != 0 {
					return nil, fmt.Errorf("message %d: %w", order.Uint32(m[8:]), unix.Errno(-errno))
				}
			} else {
				reply = slices.Clone(m[unix.SizeofNlMsghdr:min(size, len(m))])
			}
			m = m[min(align(size), len(m)):]
		}
	}
	return reply, nil
}

// ipvs makes a service of one server in IPVS, by masquerading
// (include/uapi/linux/ip_vs.h).
func (s *site) ipvs(service, server netip.AddrPort) {
	s.t.Helper()
	const (
		getFamily, familyID, familyName                = 3, 1, 2 // of the family of families
		newService, newServer, flush                   = 1, 5, 17
		ofService, ofServer                            = 1, 2
		family, proto, addr, port, sched, flags        = 1, 2, 3, 4, 6, 7
		timeout, mask                                  = 8, 9
		serverAddr, serverPort, method, weight         = 1, 2, 3, 4
		upper, lower                                   = 5, 6
		nested                                  uint16 = unix.NLA_F_NESTED
	)
	order := binary.NativeEndian
	word := func(typ uint16, v uint32) []byte { return nla(typ, order.AppendUint32(nil, v)) }
	half := func(typ uint16, v uint16) []byte { return nla(typ, order.AppendUint16(nil, v)) }
	bigPort := func(typ uint16, v uint16) []byte { return nla(typ, []byte{byte(v >> 8), byte(v)}) }
	wide := func(typ uint16, a netip.Addr) []byte {
		return nla(typ, append(a.AsSlice(), make([]byte, 16-a.BitLen()/8)...))
	}
	af, width := uint16(unix.AF_INET), uint32(0xffffffff)
	if s.v6 {
		af, width = unix.AF_INET6, 128
	}
	at := nla(ofService|nested, half(family, af), half(proto, uint16(conntrack.UDP)), wide(addr, service.Addr()), bigPort(port, service.Port()),
		str(sched, "rr"), nla(flags, make([]byte, 8)), word(timeout, 0), word(mask, width))
	to := nla(ofServer|nested, wide(serverAddr, server.Addr()), bigPort(serverPort, server.Port()),
		word(method, 0), word(weight, 1), word(upper, 0), word(lower, 0))
	var id uint16
	ask := func(cmd byte, attrs ...[]byte) {
		s.t.Helper()
		must(s.t, s.host.Do(func() error {
			_, err := netlinkAsk(unix.NETLINK_GENERIC, []netlinkRequest{{id, unix.NLM_F_ACK, join(append([][]byte{{cmd, 1, 0, 0}}, attrs...)...)}})
			return err
		}))
	}
	must(s.t, s.host.Do(func() error {
		reply, err := netlinkAsk(unix.NETLINK_GENERIC, []netlinkRequest{{
			unix.GENL_ID_CTRL, unix.NLM_F_ACK, join([]byte{getFamily, 1, 0, 0}, str(familyName, "IPVS")),
		}})
		if err == nil {
			id = order.Uint16(find(reply[4:], familyID))
		}
		return err
	}))
	ask(newService, at)
	ask(newServer, at, to)
	s.t.Cleanup(func() { ask(flush) })
}

func listenTCP(tb testing.TB, ns *testnet.NS, at netip.AddrPort) {
	tb.Helper()
	must(tb, ns.Do(func() error {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err == nil {
			tb.Cleanup(func() { l.Close() })
		}
		return err
	}))
}

func dialTCP(tb testing.TB, ns *testnet.NS, from, to netip.AddrPort) (c net.Conn) {
	tb.Helper()
	must(tb, ns.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: 5 * time.Second}
		c, err = d.DialContext(tb.Context(), "tcp", to.String())
		return err
	}))
	return c
}
