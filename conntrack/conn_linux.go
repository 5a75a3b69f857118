package conntrack

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/netns"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

const (
	// recvBuf holds any message of a dump: netlink_dump allocates at most
	// 32 KiB whatever the reader offers, so a full buffer means trouble.
	recvBuf = 64 << 10

	// batch is how many requests go into one sendmsg. Each may be answered by
	// an error of its own before the send returns, and an answer takes about
	// 1 KiB of the receive buffer (SKB_TRUESIZE of a small skb), so recvRoom
	// must hold that many.
	batch    = 256
	recvRoom = 1 << 20

	// answerTime bounds the wait for an answer. ctnetlink answers within the
	// send itself; nothing there by then means that the answer was lost.
	answerTime = 2 * time.Second
)

// Conn reaches the conntrack table of one network namespace. Its methods may be
// called from several goroutines, and Delete from inside a loop over Dump. A
// Conn holds two sockets and 64 KiB, whatever the table's size; Close frees
// them.
type Conn struct {
	nsfd *os.File // nil: the namespace of the process

	dumping sync.Mutex // held while a dump runs
	dump    *socket
	stats   DumpStats

	asking sync.Mutex // held for one request and its answers
	ask    *socket
	req    message

	buckets func() int // size of the hash table; 0 where it cannot be read

	features *Features // nil: what Probe finds
}

// Dial opens the table. It needs CAP_NET_ADMIN in the user namespace that owns
// the network namespace; the kernel says so only when it is first asked.
func Dial(cfg Config) (*Conn, error) {
	c := &Conn{features: cfg.Features, buckets: buckets}
	if cfg.NetNS != "" {
		f, err := os.Open(cfg.NetNS)
		if err != nil {
			return nil, &OpError{Op: "open", Err: fmt.Errorf("network namespace: %w", err)}
		}
		c.nsfd = f
	}
	var err error
	if c.dump, err = c.socket(); err == nil {
		c.ask, err = c.socket()
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Close frees the sockets. A dump that is running ends with an error.
func (c *Conn) Close() error {
	c.asking.Lock()
	defer c.asking.Unlock()
	c.dump.close()
	c.ask.close()
	if c.nsfd != nil {
		return c.nsfd.Close()
	}
	return nil
}

// socket is a netlink socket connected to the kernel. Connected, it refuses
// what other processes send (netlink_getsockbyportid: ECONNREFUSED), so that a
// plain read(2) is enough and allocates nothing.
type socket struct {
	mu  sync.Mutex
	fd  int // -1 when closed
	seq uint32
	buf []byte
	// stale: answers to an abandoned request may still come. A socket with a
	// dump under way takes no other, so it is replaced before the next use.
	stale bool
}

func (s *socket) close() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}

func (c *Conn) socket() (*socket, error) {
	s := &socket{fd: -1, buf: make([]byte, recvBuf)}
	return s, c.open(s)
}

func (c *Conn) open(s *socket) error {
	err := c.inside(func() (err error) {
		s.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		s.fd = -1
		if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT) {
			err = fmt.Errorf("%w (%w)", ErrNoCtnetlink, err)
		}
		return &OpError{Op: "open", Err: err}
	}
	tv := unix.NsecToTimeval(int64(answerTime))
	err = errors.Join(
		unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.Connect(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
	)
	if err != nil {
		_ = unix.Close(s.fd)
		s.fd = -1
		return &OpError{Op: "open", Err: err}
	}
	// Wanted but not needed: short errors, the kernel's words, room for answers.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	if unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, recvRoom) != nil {
		_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, recvRoom)
	}
	s.stale = false
	return nil
}

// room is how many requests may go into one send so that all their answers fit
// the receive buffer that the kernel granted.
func (s *socket) room() int {
	n, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return 1
	}
	return max(1, min(batch, n/1024))
}

// inside runs f in the Conn's namespace.
func (c *Conn) inside(f func() error) error {
	if c.nsfd == nil {
		return f()
	}
	return netns.Do(c.nsfd, f)
}

func (c *Conn) fresh(s *socket) error {
	if !s.stale {
		return nil
	}
	s.close()
	return c.open(s)
}

func (s *socket) send(b []byte) error {
	for {
		err := unix.Send(s.fd, b, 0)
		if err != unix.EINTR {
			return err
		}
	}
}

// read returns the next datagram. It does not outlive the next read.
func (s *socket) read() ([]byte, error) {
	for {
		n, err := unix.Read(s.fd, s.buf)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return nil, ErrNoAnswer
		case err != nil:
			return nil, err
		case n == len(s.buf): // read(2) shows no MSG_TRUNC
			return nil, ErrTruncated
		case n == 0:
			return nil, ErrNoAnswer
		}
		return s.buf[:n], nil
	}
}

// Dump returns the flows that satisfy the filter. It gives each as a pointer
// into the Conn that is overwritten by the next one: copy what is to be kept
// (List does). An error ends the loop, is its last value, and comes with a nil
// flow; the flows before it are good. ErrResized and ErrInterrupted say that
// flows may have been missed.
//
// The kernel applies what it is known to honour of the filter, this process
// the rest; Stats tells how much that was. The table changes under a dump: a
// flow that comes meanwhile may or may not be seen, and one may be seen twice
// where others are deleted (ctnetlink_dump_table starts a bucket over when it
// has lost its place).
//
// Leaving the loop early abandons the dump. ctx is looked at between messages
// of the kernel, the first of which may take a whole walk of the table where
// little matches: about 0.3 s a million entries.
func (c *Conn) Dump(ctx context.Context, f Filter) iter.Seq2[*Flow, error] {
	return func(yield func(*Flow, error) bool) {
		if !c.dumping.TryLock() {
			yield(nil, &OpError{Op: "dump", Err: ErrDumpRunning})
			return
		}
		defer c.dumping.Unlock()
		use, err := c.usable(ctx, &f)
		if err == nil {
			before := c.buckets()
			var stopped bool
			stopped, err = c.walk(ctx, &f, use, yield)
			if stopped {
				return
			}
			if err == nil && c.buckets() != before {
				err = ErrResized
			}
		}
		if err != nil {
			yield(nil, asOpError("dump", err))
		}
	}
}

// Stats returns the counts of the last Dump, whole only after its loop.
func (c *Conn) Stats() DumpStats { return c.stats }

// List is Dump into memory: one Flow (about 200 bytes) for each that matches.
func (c *Conn) List(ctx context.Context, f Filter) ([]Flow, error) {
	var list []Flow
	for fl, err := range c.Dump(ctx, f) {
		if err != nil {
			return list, err
		}
		list = append(list, *fl)
	}
	return list, nil
}

func asOpError(op string, err error) error {
	var oe *OpError
	if errors.As(err, &oe) {
		return err
	}
	return &OpError{Op: op, Err: err}
}

func (c *Conn) walk(ctx context.Context, f *Filter, use Features, yield func(*Flow, error) bool) (stopped bool, err error) {
	return c.walkAs(ctx, f, f, use, yield)
}

// walkAs sends the filter ask to the kernel and yields what satisfies want.
func (c *Conn) walkAs(ctx context.Context, ask, want *Filter, use Features,
	yield func(*Flow, error) bool,
) (stopped bool, err error) {
	c.stats = DumpStats{}
	s := c.dump
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if err := c.fresh(s); err != nil {
		return false, err
	}
	s.seq++
	s.stale = true // until the end was seen
	var m message
	m.b = make([]byte, 0, 256)
	m.dump(ask, use, s.seq)
	if err := s.send(m.b); err != nil {
		return false, err
	}
	var flow Flow
	var interrupted bool
	for {
		b, err := s.read()
		if err != nil {
			return false, err
		}
		for len(b) > 0 {
			typ, flags, seq, payload, rest, ok := nextMessage(b)
			if !ok {
				return false, ErrTruncated
			}
			b = rest
			if seq != s.seq {
				continue
			}
			interrupted = interrupted || flags&uapi.FDumpInt != 0
			switch typ {
			case uapi.CtNew:
				c.stats.Returned++
				if decodeFlow(payload, &flow) != nil {
					c.stats.Malformed++
					continue
				}
				if !want.Match(&flow) {
					continue
				}
				c.stats.Wanted++
				if !yield(&flow, nil) {
					return true, nil
				}
			case uapi.MsgDone, uapi.MsgError:
				s.stale = false
				if errno, msg := decodeError(typ, flags, payload); errno != 0 {
					return false, c.refused("dump", unix.Errno(errno), msg)
				}
				if interrupted {
					return false, ErrInterrupted
				}
				return false, nil
			case uapi.MsgOverrun:
				return false, unix.ENOBUFS
			}
		}
		if err := ctx.Err(); err != nil {
			return false, err
		}
	}
}

// refused tells a kernel without ctnetlink, where nfnetlink_rcv_msg knows no
// subsystem of that number, from one that dislikes a request.
func (c *Conn) refused(op string, errno unix.Errno, msg string) error {
	var err error = errno
	if errno == unix.EINVAL || errno == unix.EOPNOTSUPP {
		if _, _, serr := c.globalStats(context.Background()); errors.Is(serr, errno) {
			err = fmt.Errorf("%w (%w)", ErrNoCtnetlink, errno)
		}
	}
	return &OpError{Op: op, Err: err, Msg: msg}
}

// Delete deletes flows as they were seen: a flow whose tuple has been taken by
// another one since is left alone and counts as gone. Every flow needs both
// tuples and the ID; one without is refused with ErrIncomplete before anything
// is sent. The error says that the work was cut short; what was done until then
// is counted all the same.
func (c *Conn) Delete(ctx context.Context, flows ...Flow) (DeleteResult, error) {
	var res DeleteResult
	for i := range flows {
		if err := deletable(&flows[i]); err != nil {
			return res, &OpError{Op: "delete", Err: err}
		}
	}
	c.asking.Lock()
	defer c.asking.Unlock()
	for len(flows) > 0 {
		if err := ctx.Err(); err != nil {
			return res, &OpError{Op: "delete", Err: err}
		}
		if err := c.fresh(c.ask); err != nil {
			return res, err
		}
		n := min(len(flows), c.ask.room())
		part, err := c.deleteBatch(flows[:n])
		res.Add(part)
		if err != nil {
			return res, asOpError("delete", err)
		}
		flows = flows[n:]
	}
	return res, nil
}

// deleteBatch asks for an acknowledgement of the last request only. The kernel
// works a batch off in order before the send returns (netlink_rcv_skb) and
// reports each failure by its sequence number, so the others were deleted.
func (c *Conn) deleteBatch(flows []Flow) (res DeleteResult, err error) {
	s := c.ask
	c.req.b = c.req.b[:0]
	first := s.seq + 1
	for i := range flows {
		var flags uint16
		if i == len(flows)-1 {
			flags = uapi.FAck
		}
		s.seq++
		if err := c.req.delete(&flows[i], flags, s.seq); err != nil {
			return res, err
		}
	}
	s.stale = true
	if err := s.send(c.req.b); err != nil {
		return res, err
	}
	refused := 0
	for {
		b, err := s.read()
		if err != nil {
			return res, err
		}
		for len(b) > 0 {
			typ, flags, seq, payload, rest, ok := nextMessage(b)
			if !ok {
				return res, ErrTruncated
			}
			b = rest
			if typ != uapi.MsgError || seq-first >= uint32(len(flows)) {
				continue
			}
			errno, msg := decodeError(typ, flags, payload)
			switch e := unix.Errno(errno); e {
			case 0:
			case unix.ENOENT:
				res.Gone++
				refused++
			case unix.EPERM: // for the whole send (nfnetlink_rcv); no more answers come
				return res, &OpError{Op: "delete", Err: e, Msg: msg}
			case unix.EBUSY:
				res.Busy++
				refused++
				res.addErr(&OpError{Op: "delete", Err: e, Msg: msg})
			default:
				res.Failed++
				refused++
				res.addErr(&OpError{Op: "delete", Err: e, Msg: msg})
			}
			if seq == s.seq {
				s.stale = false
				res.Deleted = len(flows) - refused
				return res, nil
			}
		}
	}
}

// Create adds a flow to the table: for tests and tools. Status may carry
// StatusSeenReply and StatusAssured, the kernel sets the others itself.
func (c *Conn) Create(ctx context.Context, f Flow) error {
	return c.create(ctx, &f, nil)
}

// CreateExpected adds a flow as a helper would, expected by master, which must
// be in the table. It gets StatusExpected.
func (c *Conn) CreateExpected(ctx context.Context, f, master Flow) error {
	return c.create(ctx, &f, &master)
}

func (c *Conn) create(ctx context.Context, f, master *Flow) error {
	return c.roundTrip(ctx, "create", func(m *message, seq uint32) error {
		return m.create(f, master, seq)
	}, nil)
}

// Get returns the flow that has f's original tuple and zone now, whatever its
// id. ok is false where there is none.
func (c *Conn) Get(ctx context.Context, f Flow) (now Flow, ok bool, err error) {
	err = c.roundTrip(ctx, "get", func(m *message, seq uint32) error {
		return m.get(&f, seq)
	}, func(payload []byte) error { return decodeFlow(payload, &now) })
	if errors.Is(err, unix.ENOENT) {
		return Flow{}, false, nil
	}
	return now, err == nil, err
}

// roundTrip sends one request and waits for its one answer, an acknowledgement
// or a message, which goes to handle.
func (c *Conn) roundTrip(ctx context.Context, op string, encode func(*message, uint32) error,
	handle func([]byte) error,
) error {
	c.asking.Lock()
	defer c.asking.Unlock()
	if err := ctx.Err(); err != nil {
		return &OpError{Op: op, Err: err}
	}
	s := c.ask
	if err := c.fresh(s); err != nil {
		return err
	}
	s.seq++
	c.req.b = c.req.b[:0]
	if err := encode(&c.req, s.seq); err != nil {
		return &OpError{Op: op, Err: err}
	}
	s.stale = true
	if err := s.send(c.req.b); err != nil {
		return &OpError{Op: op, Err: err}
	}
	for {
		b, err := s.read()
		if err != nil {
			return &OpError{Op: op, Err: err}
		}
		for len(b) > 0 {
			typ, flags, seq, payload, rest, ok := nextMessage(b)
			if !ok {
				return &OpError{Op: op, Err: ErrTruncated}
			}
			b = rest
			if seq != s.seq {
				continue
			}
			s.stale = false
			if typ == uapi.MsgError || typ == uapi.MsgDone {
				if errno, msg := decodeError(typ, flags, payload); errno != 0 {
					return &OpError{Op: op, Err: unix.Errno(errno), Msg: msg}
				}
				return nil
			}
			if handle != nil {
				if err := handle(payload); err != nil {
					return &OpError{Op: op, Err: err}
				}
			}
			return nil
		}
	}
}

// globalStats asks for IPCTNL_MSG_CT_GET_STATS. limit is 0 on kernels that do
// not tell it.
func (c *Conn) globalStats(ctx context.Context) (count, limit int, err error) {
	err = c.roundTrip(ctx, "count", func(m *message, seq uint32) error {
		m.stats(seq)
		return nil
	}, func(payload []byte) error {
		if len(payload) < uapi.SizeofNfgenmsg {
			return errMalformed
		}
		for rest := payload[uapi.SizeofNfgenmsg:]; ; {
			typ, v, next, ok := nextAttr(rest)
			if !ok {
				return nil
			}
			rest = next
			switch typ {
			case uapi.CtaStatsGlobalEntries:
				count = int(be32(v))
			case uapi.CtaStatsGlobalMaxEntries:
				limit = int(be32(v))
			}
		}
	})
	return count, limit, err
}

// Count returns how many flows the namespace's table holds.
func (c *Conn) Count(ctx context.Context) (int, error) {
	n, _, err := c.globalStats(ctx)
	return n, err
}

// Max returns how many flows a namespace's table may hold (nf_conntrack_max,
// one setting for the whole host).
func (c *Conn) Max(ctx context.Context) (int, error) {
	_, n, err := c.globalStats(ctx)
	if err == nil && n == 0 { // a kernel that does not tell it over netlink
		return sysctl("nf_conntrack_max")
	}
	return n, err
}

// Buckets returns the size of the hash table, which all network namespaces of
// the host share.
func (c *Conn) Buckets() (int, error) { return sysctl("nf_conntrack_buckets") }

func buckets() int {
	n, err := sysctl("nf_conntrack_buckets")
	if err != nil {
		return 0 // unreadable before and after alike: a resize goes unnoticed
	}
	return n
}

func sysctl(name string) (int, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
