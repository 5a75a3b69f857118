package ruleset

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
	// answerTime bounds the wait for an answer, which the kernel gives within
	// the send itself (and the rest of a dump within each read).
	answerTime = 5 * time.Second

	// recvBuf holds any message of a dump: netlink_dump allocates at most 32 KiB.
	recvBuf = 64 << 10
)

// Conn reads the rules of a network namespace. It holds one socket, connected to
// the kernel, which refuses what other processes send, so that a plain read(2)
// is enough. Its methods may be called from several goroutines.
type Conn struct {
	namespace string
	limits    limits
	large     tooMuch
	effort    *effort

	mu  sync.Mutex
	fd  int // -1 when closed
	seq uint32
	buf []byte
	ask genRequest
}

// genRequest is a request for the generation and its answer. It is kept, so that
// asking, which is done for each stale flow, allocates nothing.
type genRequest struct {
	req    []byte
	answer answer
	gen    uint32
	found  bool
}

func (r *genRequest) take(typ uint16, _ Family, b []byte) error {
	if typ != uapi.NftNewGen {
		return errMalformed
	}
	r.gen, r.found = generation(b)
	return nil
}

// Open opens a socket in a network namespace, given as a path; "" is that of the
// calling thread. Entering another one needs CAP_SYS_ADMIN, reading
// CAP_NET_ADMIN, which shows with the first [Conn.Load].
func Open(namespace string) (*Conn, error) {
	c := &Conn{namespace: namespace, limits: usualLimits, effort: newEffort(), buf: make([]byte, recvBuf)}
	c.ask.req, c.ask.answer.each = generationRequest(), c.ask.take
	var err error
	if c.fd, err = dial(namespace); err != nil {
		return nil, err
	}
	return c, nil
}

func dial(namespace string) (fd int, err error) {
	err = inside(namespace, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("nftables: open netlink socket: %w", err)
	}
	tv := unix.NsecToTimeval(int64(answerTime))
	err = errors.Join(
		unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
	)
	if err != nil {
		return -1, errors.Join(fmt.Errorf("nftables: set up netlink socket: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// renew puts another socket in the place of one with a dump that is not read to its
// end, and tells whether it could. The kernel takes 30 s to dump a million elements
// (nf_tables_dump_set passes over all that were sent before, for each 32 KiB).
func (c *Conn) renew() bool {
	fd, err := dial(c.namespace)
	if err != nil {
		return false
	}
	old := c.fd
	if c.fd = fd; !sameNamespace(fd, old) { // the name may be another's by now
		c.fd, old = old, fd
	}
	_ = unix.Close(old) // nothing was written
	return c.fd == fd
}

// sameNamespace tells whether two sockets are known to be in one network namespace.
func sameNamespace(a, b int) bool {
	var of [2]unix.Stat_t
	for i, fd := range [2]int{a, b} {
		ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
		if err != nil {
			return false
		}
		err = unix.Fstat(ns, &of[i])
		_ = unix.Close(ns)
		if err != nil {
			return false
		}
	}
	return of[0].Ino == of[1].Ino && of[0].Dev == of[1].Dev
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

// Close frees the socket. Sets that a Ruleset has not met by then make outcomes
// anything.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return nil
	}
	fd := c.fd
	c.fd = -1
	return unix.Close(fd)
}

// exchange sends a request and hands the messages that answer it to each, until
// the last. interrupted tells that the ruleset changed meanwhile
// (nl_dump_check_consistent).
func (c *Conn) exchange(req []byte, each func(typ uint16, family Family, attrs []byte) error) (interrupted bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.send(req); err != nil {
		return false, err
	}
	dump := binary.NativeEndian.Uint16(req[6:])&uapi.FDump == uapi.FDump
	return c.receive(dump, &answer{seq: c.seq, each: each})
}

// send sends a request with the next sequence number.
func (c *Conn) send(req []byte) error {
	if c.fd < 0 {
		return fmt.Errorf("nftables: %w", os.ErrClosed)
	}
	c.seq++
	binary.NativeEndian.PutUint32(req[8:], c.seq)
	if err := retried(func() error { _, err := unix.Write(c.fd, req); return err }); err != nil {
		return fmt.Errorf("nftables: ask the kernel: %w", err)
	}
	return nil
}

// receive reads the messages that answer a request until the last, which for a
// dump is one that says so.
func (c *Conn) receive(dump bool, a *answer) (interrupted bool, err error) {
	for {
		var n int
		err := retried(func() (err error) { n, err = unix.Read(c.fd, c.buf); return err })
		switch {
		case errors.Is(err, unix.EAGAIN):
			return false, errors.New("nftables: the kernel does not answer")
		case err != nil:
			return false, fmt.Errorf("nftables: read the kernel's answer: %w", err)
		case n == 0 || n == len(c.buf): // read(2) shows no MSG_TRUNC
			return false, fmt.Errorf("nftables: %w", errMalformed)
		}
		if err := a.take(c.buf[:n]); err != nil {
			var errno unix.Errno
			if errors.As(err, &errno) {
				return a.interrupted, refused(errno)
			}
			return a.interrupted, fmt.Errorf("nftables: %w", err)
		}
		if a.err != nil && !a.done && dump && c.renew() {
			a.done = true
		}
		if a.done || !dump && a.any {
			if a.err != nil {
				a.err = fmt.Errorf("nftables: %w", a.err)
			}
			return a.interrupted, a.err
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

// Generation returns the generation of the namespace's ruleset, which moves with
// every commit, by nft, iptables-nft or anybody else, but neither for elements
// that packets add or that expire, nor for ipset, iptables-legacy, addresses and
// routes. It moves before packets meet anything new. It takes about 3 µs.
func (c *Conn) Generation() (gen uint32, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.generation(0)
}

// generation asks for the generation, behind a batch if there is one, whose
// refusal comes first.
func (c *Conn) generation(batch uint32) (gen uint32, err error) {
	r := &c.ask
	if err := c.send(r.req); err != nil {
		return 0, err
	}
	r.answer, r.found = answer{seq: c.seq, batch: batch, each: r.answer.each}, false
	if _, err := c.receive(false, &r.answer); err != nil {
		return 0, err
	}
	if !r.found {
		return 0, fmt.Errorf("nftables: generation: %w", errMalformed)
	}
	return r.gen, nil
}

// barrier waits until no commit is under way, and returns nil if the rules of a
// generation are then in force, all of them. [ErrStale] says that others are.
//
// The generation alone does not tell. It moves as a commit begins to switch over
// (nft_base_seq_inc in nf_tables_commit), and sets of intervals with
// concatenations get their new elements last (nft_set_commit_update): until then
// they look empty, and are empty for packets. An empty batch with the generation
// takes the mutex that a transaction holds from its first message until its commit
// is done, and is refused where the generation is another (nf_tables_valid_genid);
// its own commit changes nothing, not even the generation (nf_tables_commit).
//
// Kernels before 6.10 acknowledge no batch that succeeds. So the generation is
// asked for right behind it: the kernel works off what is sent within the send, so
// that an answer to that alone says that the batch was taken.
func (c *Conn) barrier(gen uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.send(emptyBatch(gen)); err != nil {
		return err
	}
	now, err := c.generation(c.seq)
	if errors.Is(err, unix.ERESTART) || err == nil && now != gen {
		return ErrStale
	}
	return err
}
