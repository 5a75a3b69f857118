package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/netns"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

const (
	subsys = unix.NFNL_SUBSYS_NFTABLES << 8

	// initial is the generation of a namespace in which nothing was committed
	// (nf_tables_init_net).
	initial = 1

	// answerTime bounds the wait for an answer, which the kernel gives within
	// the send itself.
	answerTime = 2 * time.Second
)

// Generations asks a network namespace for the generation of its nftables
// ruleset. It holds one socket, which Close frees; its methods may be called
// from several goroutines.
type Generations struct {
	s   *socket
	req []byte
}

// Open opens a socket in a network namespace, given as a path; "" is that of
// the calling thread. Entering another one needs CAP_SYS_ADMIN, asking
// CAP_NET_ADMIN, which shows with the first [Generations.Get].
func Open(namespace string) (*Generations, error) {
	s, err := dial(namespace)
	if err != nil {
		return nil, err
	}
	return &Generations{s: s, req: newRequest(unix.NFT_MSG_GETGEN, 0)}, nil
}

// Close frees the socket.
func (g *Generations) Close() error { return g.s.close() }

// Get returns the generation, which moves by one with every commit that changes
// something: rules, chains, elements of sets, by nft, by iptables-nft and by
// anybody else in the namespace. It passes over 0. ok is false as long as
// nothing was committed since the namespace was made, so that nothing shows
// that rules are written with nftables there.
//
// The kernel counts just before it switches over (nf_tables_commit): for an
// instant after a move, packets may still meet the old rules.
//
// It takes one request of about 3 µs and allocates nothing. Where nf_tables is a
// module that is not loaded, asking loads it; without nf_tables the error is
// [ErrNoNFT].
func (g *Generations) Get() (gen uint32, ok bool, err error) {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	answer, err := g.s.ask(g.req)
	if err != nil {
		return 0, false, err
	}
	gen, found := generation(answer)
	if !found {
		return 0, false, errMalformed
	}
	return gen, gen != initial, nil
}

var errMalformed = errors.New("nftables: malformed answer from the kernel")

// generation reads what nf_tables_fill_gen_info wrote.
func generation(msg []byte) (gen uint32, ok bool) {
	if len(msg) < uapi.SizeofNlMsghdr ||
		binary.NativeEndian.Uint16(msg[4:]) != subsys|unix.NFT_MSG_NEWGEN {
		return 0, false
	}
	for b := msg[min(len(msg), uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg):]; len(b) >= uapi.SizeofNlAttr; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < uapi.SizeofNlAttr || n > len(b) {
			return 0, false
		}
		if binary.NativeEndian.Uint16(b[2:])&uapi.AttrTypeMask == unix.NFTA_GEN_ID {
			if n != uapi.SizeofNlAttr+4 {
				return 0, false
			}
			return binary.BigEndian.Uint32(b[uapi.SizeofNlAttr:]), true
		}
		b = b[min(align(n), len(b)):]
	}
	return 0, false
}

// Exist tells for each table and chain whether it is in the namespace, with one
// small request each, however large the ruleset is.
func Exist(namespace string, objects ...Object) ([]bool, error) {
	s, err := dial(namespace)
	if err != nil {
		return nil, err
	}
	defer s.close() //nolint:errcheck // nothing was written
	there := make([]bool, len(objects))
	for i, o := range objects {
		_, err := s.ask(o.request())
		switch {
		case err == nil:
			there[i] = true
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT):
			return nil, err
		}
	}
	return there, nil
}

func (o Object) request() []byte {
	if o.Chain == "" {
		return withText(newRequest(unix.NFT_MSG_GETTABLE, o.Family), unix.NFTA_TABLE_NAME, o.Table)
	}
	b := withText(newRequest(unix.NFT_MSG_GETCHAIN, o.Family), unix.NFTA_CHAIN_TABLE, o.Table)
	return withText(b, unix.NFTA_CHAIN_NAME, o.Chain)
}

// LegacyNAT tells whether iptables-legacy has a nat table in a network
// namespace, given as a path ("": that of the calling thread): its rules change
// without a generation. The table is there as soon as anybody has looked at it
// with iptables-legacy, with rules or without.
//
// A process that is neither root nor in root's group may not read that. Then the
// kernel's list of modules answers, for all namespaces at once: true may be too
// much. An error means that it is unknown.
func LegacyNAT(namespace string) (legacy bool, err error) {
	err = inside(namespace, func() (err error) {
		legacy, err = LegacyNATAt("/proc")
		return err
	})
	return legacy, err
}

// IPVS tells whether a network namespace, given as a path ("": that of the
// calling thread), has services of IPVS, which decides by a table of its own
// and not by rules. An error means that it is unknown.
func IPVS(namespace string) (used bool, err error) {
	err = inside(namespace, func() (err error) {
		used, err = IPVSAt("/proc")
		return err
	})
	return used, err
}

// IPVSHolds tells whether a network namespace, given as a path ("": that of the
// calling thread), has services of IPVS, and whether IPVS holds on to
// connections whose destination is gone: ip_vs_in then loses their packets until
// the sender pauses for long, whatever becomes of their conntrack entries. An
// error means that it is unknown; used is true where only the setting is.
func IPVSHolds(namespace string) (used, holds bool, err error) {
	err = inside(namespace, func() (err error) {
		used, holds, err = IPVSHoldsAt("/proc")
		return err
	})
	return used, holds, err
}

func inside(namespace string, f func() error) error {
	if namespace == "" {
		return f()
	}
	ns, err := os.Open(namespace)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	return netns.Do(ns, f)
}

// socket is a netlink socket connected to the kernel, which refuses what other
// processes send, so that a plain read(2) is enough and allocates nothing.
type socket struct {
	mu  sync.Mutex
	fd  int // -1 when closed
	seq uint32
	buf []byte
}

func dial(namespace string) (*socket, error) {
	s := &socket{buf: make([]byte, 8<<10)}
	err := inside(namespace, func() (err error) {
		s.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, fmt.Errorf("%w (%w)", ErrNoNFT, err)
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: open netlink socket: %w", err)
	}
	tv := unix.NsecToTimeval(int64(answerTime))
	err = errors.Join(
		unix.Connect(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nftables: set up netlink socket: %w", err), s.close())
	}
	return s, nil
}

func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil
	}
	fd := s.fd
	s.fd = -1
	return unix.Close(fd)
}

// ask sends a request and returns the message that answers it, which is good
// until the next.
func (s *socket) ask(req []byte) ([]byte, error) {
	order := binary.NativeEndian
	s.seq++
	order.PutUint32(req[8:], s.seq)
	if err := s.write(req); err != nil {
		return nil, fmt.Errorf("nftables: ask the kernel: %w", err)
	}
	for {
		b, err := s.read()
		if err != nil {
			return nil, fmt.Errorf("nftables: read the kernel's answer: %w", err)
		}
		if len(b) < uapi.SizeofNlMsghdr {
			return nil, errMalformed
		}
		n := order.Uint32(b)
		switch {
		case n < uapi.SizeofNlMsghdr || int64(n) > int64(len(b)):
			return nil, errMalformed
		case order.Uint32(b[8:]) != s.seq: // of a request that was given up
			continue
		case order.Uint16(b[4:]) != uapi.MsgError:
			return b[:n], nil
		case n < uapi.SizeofNlMsghdr+4:
			return nil, errMalformed
		}
		return nil, refused(unix.Errno(-int32(order.Uint32(b[uapi.SizeofNlMsghdr:]))))
	}
}

// refused explains an errno. nfnetlink_rcv_msg knows no subsystem of that number
// where nf_tables is missing.
func refused(errno unix.Errno) error {
	switch errno {
	case unix.EINVAL, unix.EOPNOTSUPP:
		return fmt.Errorf("%w (%w)", ErrNoNFT, errno)
	case unix.EPERM:
		return fmt.Errorf("nftables: %w: CAP_NET_ADMIN is missing; run as root, or grant it "+
			"(setcap cap_net_admin+ep, systemd AmbientCapabilities=, a container's capabilities)", errno)
	}
	return fmt.Errorf("nftables: %w", errno)
}

func (s *socket) write(b []byte) error {
	for {
		if _, err := unix.Write(s.fd, b); err != unix.EINTR {
			return err
		}
	}
}

func (s *socket) read() ([]byte, error) {
	for {
		n, err := unix.Read(s.fd, s.buf)
		switch err {
		case nil:
			return s.buf[:n], nil
		case unix.EINTR: // SO_RCVTIMEO makes it so even with SA_RESTART
		case unix.EAGAIN:
			return nil, errNoAnswer
		default:
			return nil, err
		}
	}
}

var errNoAnswer = errors.New("the kernel did not answer")

// newRequest returns a message without attributes.
func newRequest(msg uint16, family Family) []byte {
	order := binary.NativeEndian
	b := order.AppendUint32(nil, uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg)
	b = order.AppendUint16(b, subsys|msg)
	b = order.AppendUint16(b, uapi.FRequest)
	b = append(b, make([]byte, 8)...) // sequence, port
	return append(b, byte(family), unix.NFNETLINK_V0, 0, 0)
}

// withText appends a string attribute.
func withText(b []byte, typ uint16, text string) []byte {
	order := binary.NativeEndian
	b = order.AppendUint16(b, uint16(uapi.SizeofNlAttr+len(text)+1))
	b = order.AppendUint16(b, typ)
	b = append(append(b, text...), 0)
	b = append(b, make([]byte, align(len(b))-len(b))...)
	order.PutUint32(b, uint32(len(b)))
	return b
}

// align rounds up as NLMSG_ALIGN does.
func align(n int) int { return (n + uapi.Align - 1) &^ (uapi.Align - 1) }
