//go:build linux

package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
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
		return fmt.Errorf("send: %w", err)
	}
	answer := make([]byte, 64<<10)
	for acks > 0 {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		for m := answer[:n]; len(m) >= unix.SizeofNlMsghdr+4; {
			size := int(order.Uint32(m))
			if order.Uint16(m[4:]) == unix.NLMSG_ERROR {
				acks--
				if errno := int32(order.Uint32(m[unix.SizeofNlMsghdr:])); errno != 0 {
					return fmt.Errorf("message %d: %w", order.Uint32(m[8:]), unix.Errno(-errno))
				}
			}
			m = m[min(align(size), len(m)):]
		}
	}
	return nil
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
