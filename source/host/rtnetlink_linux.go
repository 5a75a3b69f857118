package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/netns"
)

const (
	// answerTime bounds the wait for an answer, which the kernel gives within
	// the send itself (and the rest of a dump within each read).
	answerTime = 2 * time.Second

	// groups are those of both families' addresses, as bind(2) takes them.
	groups = 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)

	// recvBuf holds any message of a dump: netlink_dump allocates at most
	// 32 KiB.
	recvBuf = 64 << 10

	// attempts is how often a dump is made that changes interrupt. The last one
	// is taken as it is: those changes make for another one.
	attempts = 5
)

// link is two rtnetlink sockets of one namespace. One hears of changes, the
// other asks, so that no storm of changes can disturb an answer.
type link struct {
	events *os.File // in the runtime's poller: close ends a read
	ask    int
	port   uint32 // of ask: answers carry it
	seq    uint32
	buf    []byte
}

// dial opens both sockets and joins the groups of both families' addresses.
func dial(namespace string, rcvbuf int) (*link, error) {
	l := &link{ask: -1, buf: make([]byte, recvBuf)}
	open := func() error { return l.open(rcvbuf) }
	if namespace != "" {
		here := open
		open = func() error { return inside(namespace, here) }
	}
	if err := open(); err != nil {
		l.close()
		return nil, fmt.Errorf("host addresses: %w", err)
	}
	return l, nil
}

func inside(namespace string, f func() error) error {
	ns, err := os.Open(namespace)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	return netns.Do(ns, f)
}

func (l *link) open(rcvbuf int) error {
	events, err := socket(unix.SOCK_NONBLOCK)
	if err != nil {
		return err
	}
	l.events = os.NewFile(uintptr(events), "rtnetlink")
	if rcvbuf != 0 {
		if err := unix.SetsockoptInt(events, unix.SOL_SOCKET, unix.SO_RCVBUF, rcvbuf); err != nil {
			return err
		}
	}
	if err := unix.Bind(events, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return fmt.Errorf("listen to rtnetlink: %w", err)
	}
	if l.ask, err = socket(0); err != nil {
		return err
	}
	// Connected, it refuses what other processes send.
	tv := unix.NsecToTimeval(int64(answerTime))
	err = errors.Join(
		unix.Connect(l.ask, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(l.ask, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
	)
	if err != nil {
		return err
	}
	own, err := unix.Getsockname(l.ask)
	if err != nil {
		return err
	}
	l.port = own.(*unix.SockaddrNetlink).Pid
	return nil
}

func socket(flags int) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	return fd, nil
}

func (l *link) close() {
	if l.events != nil {
		_ = l.events.Close()
	}
	if l.ask >= 0 {
		_ = unix.Close(l.ask)
		l.ask = -1
	}
}

// watch leaves a token in changed for whatever is heard, until the socket is
// closed. What it says does not matter, nor that something was lost: ENOBUFS,
// netlink_overrun, is a sign of change like any other.
func (l *link) watch(changed chan<- struct{}) error {
	var first [1]byte
	for {
		_, err := l.events.Read(first[:])
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("host addresses: listen for changes: %w", err)
		}
		select {
		case changed <- struct{}{}:
		default: // one is waiting
		}
	}
}

// listening tells whether the socket that watch reads is there. One that was
// closed behind the program's back shows in no read: epoll forgets it.
func (l *link) listening() error {
	raw, err := l.events.SyscallConn()
	if err != nil {
		return err
	}
	protocol := -1
	cerr := raw.Control(func(fd uintptr) {
		protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL)
	})
	if err == nil && protocol != unix.NETLINK_ROUTE {
		err = unix.EBADF
	}
	return errors.Join(cerr, err)
}

// addresses asks for all addresses of the namespace. Several interfaces may
// have the same.
func (l *link) addresses() (list []netip.Addr, err error) {
	if err := l.listening(); err != nil {
		return nil, fmt.Errorf("host addresses: the socket for changes: %w", err)
	}
	for range attempts {
		var interrupted bool
		if list, interrupted, err = l.dump(); err != nil {
			return nil, fmt.Errorf("host addresses: %w", err)
		}
		if !interrupted {
			break
		}
	}
	return list, nil
}

func (l *link) dump() (list []netip.Addr, interrupted bool, err error) {
	l.seq++
	if err := retried(func() error { _, err := unix.Write(l.ask, dumpRequest(l.seq)); return err }); err != nil {
		return nil, false, fmt.Errorf("ask rtnetlink: %w", err)
	}
	for {
		var n int
		err := retried(func() (err error) { n, err = unix.Read(l.ask, l.buf); return err })
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil, false, errors.New("rtnetlink does not answer")
		case err != nil:
			return nil, false, fmt.Errorf("read rtnetlink's answer: %w", err)
		case n == len(l.buf): // read(2) shows no MSG_TRUNC
			return nil, false, errors.New("rtnetlink's answer is too long")
		case n == 0:
			return nil, false, errors.New("rtnetlink's answer is empty")
		}
		var a answer
		if list, a, err = decode(l.buf[:n], l.seq, l.port, list); err != nil {
			return nil, false, err
		}
		interrupted = interrupted || a.interrupted
		if a.done {
			return list, interrupted, nil
		}
	}
}

// retried repeats what a signal has interrupted, which SO_RCVTIMEO makes happen
// even with SA_RESTART.
func retried(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// dumpRequest is RTM_GETADDR for all families.
func dumpRequest(seq uint32) []byte {
	order := binary.NativeEndian
	b := order.AppendUint32(nil, unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg)
	b = order.AppendUint16(b, unix.RTM_GETADDR)
	b = order.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	b = order.AppendUint32(b, seq)
	b = order.AppendUint32(b, 0)                            // port: the kernel
	return append(b, make([]byte, unix.SizeofIfAddrmsg)...) // AF_UNSPEC, any interface
}

// answer is what a datagram of a dump says beside addresses.
type answer struct {
	done bool
	// interrupted: addresses changed between two datagrams (nl_dump_check_consistent),
	// so that some may be missing.
	interrupted bool
}

var errTruncated = errors.New("rtnetlink's answer is cut short")

// decode appends the addresses in a datagram that answers request seq of port.
func decode(b []byte, seq, port uint32, list []netip.Addr) ([]netip.Addr, answer, error) {
	var a answer
	order := binary.NativeEndian
	for len(b) > 0 {
		if len(b) < unix.SizeofNlMsghdr {
			return list, a, errTruncated
		}
		n := order.Uint32(b)
		if n < unix.SizeofNlMsghdr || int64(n) > int64(len(b)) {
			return list, a, errTruncated
		}
		typ, flags := order.Uint16(b[4:]), order.Uint16(b[6:])
		ours := order.Uint32(b[8:]) == seq && order.Uint32(b[12:]) == port
		payload := b[unix.SizeofNlMsghdr:n]
		b = b[min(align(int(n)), len(b)):]
		if !ours {
			continue
		}
		a.interrupted = a.interrupted || flags&unix.NLM_F_DUMP_INTR != 0
		switch typ {
		case unix.RTM_NEWADDR:
			if addr, ok := address(payload); ok {
				list = append(list, addr)
			}
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if len(payload) >= 4 {
				if errno := int32(order.Uint32(payload)); errno != 0 {
					return list, a, fmt.Errorf("rtnetlink: %w", unix.Errno(-errno))
				}
			}
			a.done = true
		}
	}
	return list, a, nil
}

// address reads what inet_fill_ifaddr and inet6_fill_ifaddr write behind the
// netlink header. ok is false for addresses that are not this host's to be
// spoken to: loopback, and those that another host was found to have
// (IFA_F_DADFAILED). Tentative and deprecated ones are, or soon will be.
func address(b []byte) (a netip.Addr, ok bool) {
	if len(b) < unix.SizeofIfAddrmsg {
		return a, false
	}
	family, flags := b[0], uint32(b[2])
	var local, addr []byte
	for typ, v := range attributes(b[unix.SizeofIfAddrmsg:]) {
		switch typ {
		case unix.IFA_LOCAL:
			local = v
		case unix.IFA_ADDRESS:
			addr = v
		case unix.IFA_FLAGS: // all 32 bits of what the header has 8 of
			if len(v) == 4 {
				flags = binary.NativeEndian.Uint32(v)
			}
		}
	}
	if local == nil { // IPv6 without a peer
		local = addr
	}
	switch {
	case family == unix.AF_INET && len(local) == 4, family == unix.AF_INET6 && len(local) == 16:
	default:
		return a, false
	}
	a, _ = netip.AddrFromSlice(local)
	return a, !a.IsLoopback() && !a.IsUnspecified() && flags&unix.IFA_F_DADFAILED == 0
}

// attributes yields type and value of each struct rtattr, up to the first that
// claims more than there is.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofRtAttr {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.SizeofRtAttr || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:]), b[unix.SizeofRtAttr:n]) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// align rounds up as NLMSG_ALIGN and RTA_ALIGN do.
func align(n int) int { return (n + 3) &^ 3 }
