package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
)

const (
	// maxRoutes is how many routes are read. A router with more has so many ways
	// that its interfaces count as unknown.
	maxRoutes = 1 << 16
	// maxMoved is how many addresses are remembered that came or went, and maxGone
	// how many interfaces that went.
	maxMoved = 1 << 16
	maxGone  = 256
	// restFactor is how much longer than a refresh the time before the next is,
	// so that changes without end take a twentieth of a core. Where a flow would be
	// called stale it is as long.
	restFactor = 20
	// signsFor is how long what no event tells of is believed: a few small files.
	signsFor = 100 * time.Millisecond

	routeGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
		1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
		1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1) | 1<<(unix.RTNLGRP_IPV4_NETCONF-1)
)

// NetHost is the [Host] that a network namespace's own addresses and routes make.
// It follows them over rtnetlink. An interface on which a source may come in is
// the one that its network is on, if that network is directly connected; behind
// a gateway it may be any that leads to a gateway or has a default route, since
// ways need not be symmetric.
type NetHost struct {
	namespace string
	events    *os.File // in the runtime's poller: Close ends a read
	raw       syscall.RawConn
	heard     sync.Mutex // held from the reading of an event until dirty is set
	dirty     atomic.Bool
	state     atomic.Pointer[hostState]
	done      chan struct{}

	mu      sync.Mutex // of what follows
	ask     int        // -1 when closed
	seq     uint32
	buf     []byte
	rest    time.Time // no refresh before
	least   time.Time // nor where a flow would be called stale
	signs   signs     // as they were at signsAt
	signsAt time.Time
	syn     *os.File // the counters of SYNPROXY; nil: there were none yet
	crowd   bool     // more routes than are read
	closed  bool
}

// OpenHost reads addresses and routes of a network namespace, given as a path; ""
// is that of the calling thread. Entering another one needs CAP_SYS_ADMIN.
func OpenHost(namespace string) (*NetHost, error) {
	h := &NetHost{namespace: namespace, ask: -1, buf: make([]byte, recvBuf), done: make(chan struct{})}
	if err := inside(namespace, h.dial); err != nil {
		h.closeSockets()
		return nil, fmt.Errorf("addresses and routes: %w", err)
	}
	h.state.Store(&hostState{})
	if err := h.refresh(); err != nil {
		h.closeSockets()
		return nil, err
	}
	go h.listen()
	return h, nil
}

func (h *NetHost) dial() error {
	events, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open rtnetlink socket: %w", err)
	}
	h.events = os.NewFile(uintptr(events), "rtnetlink")
	if err := unix.Bind(events, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: routeGroups}); err != nil {
		return fmt.Errorf("listen to rtnetlink: %w", err)
	}
	if h.raw, err = h.events.SyscallConn(); err != nil {
		return fmt.Errorf("listen to rtnetlink: %w", err)
	}
	if h.ask, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open rtnetlink socket: %w", err)
	}
	tv := unix.NsecToTimeval(int64(answerTime))
	// Strict, the kernel leaves other tables out of a dump; older ones ignore
	// what was asked for and send everything (since Linux 4.20).
	_ = unix.SetsockoptInt(h.ask, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	return errors.Join(
		unix.Connect(h.ask, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(h.ask, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
	)
}

// listen notes that something has changed.
func (h *NetHost) listen() {
	defer close(h.done)
	for h.raw.Read(func(fd uintptr) bool { return h.hear(int(fd)) }) == nil {
	}
}

// hear takes events off the socket and tells whether there were any. What has
// changed does not matter, nor that messages were lost (ENOBUFS).
func (h *NetHost) hear(fd int) (some bool) {
	h.heard.Lock()
	defer h.heard.Unlock()
	var b [1]byte
	for {
		_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return some
		case errors.Is(err, unix.EINTR):
			continue
		}
		some = true
		h.dirty.Store(true)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return true
		}
	}
}

func (h *NetHost) closeSockets() {
	if h.events != nil {
		_ = h.events.Close()
	}
	if h.syn != nil {
		_ = h.syn.Close()
	}
	if h.ask >= 0 {
		_ = unix.Close(h.ask)
		h.ask = -1
	}
}

// Close ends the following of changes. Afterwards nothing is known.
func (h *NetHost) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	h.closeSockets()
	<-h.done
	h.state.Store(&hostState{epoch: h.state.Load().epoch + 1})
	return nil
}

// Epoch reads addresses and routes anew if something has changed, unless that was
// done a moment ago. Where it fails, nothing is known until it succeeds.
func (h *NetHost) Epoch() uint64 {
	if h.dirty.Load() {
		h.mu.Lock()
		h.renew(h.rest)
		h.mu.Unlock()
	}
	return h.state.Load().epoch
}

// Current implements [Host]. The kernel tells of a change before the call that
// makes it returns, so that all that is done by now has been heard of.
func (h *NetHost) Current(proto uint8) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return true // nothing is known
	}
	_ = h.raw.Control(func(fd uintptr) { h.hear(int(fd)) })
	if h.readSigns(proto) != h.state.Load().signs {
		h.dirty.Store(true)
	}
	if h.dirty.Load() {
		h.renew(h.least)
	}
	return !h.dirty.Load()
}

// renew reads everything anew, but not before a time. It is to be called with the
// lock held.
func (h *NetHost) renew(after time.Time) {
	if h.closed || !time.Now().After(after) || !h.dirty.Swap(false) || h.refresh() == nil {
		return
	}
	h.dirty.Store(true)
	h.rest = time.Now().Add(time.Second)
	h.least = h.rest
	old := h.state.Load()
	h.state.Store(&hostState{epoch: old.epoch + 1, moved: old.moved, gone: old.gone})
}

// Certain implements [Host].
func (h *NetHost) Certain() Host { return certain{h.state.Load()} }

// Sent implements [Host].
func (h *NetHost) Sent(src netip.Addr) Origin { return h.state.Load().sent(src) }

// Types implements [Host].
func (h *NetHost) Types(a netip.Addr) Types { return h.state.Load().types(a) }

// Inputs implements [Host].
func (h *NetHost) Inputs(src netip.Addr) *Interfaces {
	s := h.state.Load()
	list := s.inputs(src)
	if len(list) == 0 {
		return nil
	}
	return s.sets.get(s, list, false)
}

// Outputs implements [Host].
func (h *NetHost) Outputs(dst netip.Addr) *Interfaces { return h.state.Load().outputs(dst) }

// refresh reads everything. It is to be called with the lock held, or before
// anybody else has the host.
func (h *NetHost) refresh() error {
	start := time.Now()
	old := h.state.Load()
	var s *hostState
	for try := range attempts {
		var interrupted bool
		var err error
		if s, interrupted, err = h.read(); err != nil {
			return fmt.Errorf("addresses and routes: %w", err)
		}
		if !interrupted {
			break
		}
		if try == attempts-1 {
			return errors.New("addresses and routes: they changed whenever they were read")
		}
	}
	s.signs = h.readSigns(conntrack.TCP)
	end := time.Now()
	h.least, h.rest = end.Add(end.Sub(start)), end.Add(restFactor*end.Sub(start))
	if old.known && old.sum == s.sum && old.signs == s.signs {
		return nil
	}
	s.epoch, s.known, s.moved, s.gone = old.epoch+1, true, old.moved, old.gone
	if old.known {
		s.moved, s.gone = moved(old, s), vanished(old, s)
	}
	h.state.Store(s)
	return nil
}

// moved adds the addresses that two states differ in to what the older one
// knows.
func moved(old, s *hostState) map[netip.Addr]struct{} {
	m := map[netip.Addr]struct{}{}
	for a := range old.moved {
		m[a] = struct{}{}
	}
	note := func(x, y *hostState) {
		for p, t := range x.local.m {
			if t&TypeLocal != 0 && y.local.m[p]&TypeLocal == 0 && p.IsSingleIP() && len(m) < maxMoved {
				m[p.Addr()] = struct{}{}
			}
		}
	}
	note(old, s)
	note(s, old)
	return m
}

// vanished adds the interfaces that a later state lacks to what the older one knows.
// Those of a bridge have no packets of their own.
func vanished(old, s *hostState) map[Interface]struct{} {
	m := maps.Clone(old.gone)
	for i, l := range old.links {
		if s.links[i].name != l.name && l.master == 0 && !l.loopback && len(m) < maxGone {
			if m == nil {
				m = map[Interface]struct{}{}
			}
			m[Interface{i, l.name}] = struct{}{}
		}
	}
	return m
}

// readSigns reads what no event tells of, for flows of a protocol. What cannot be
// read may be.
func (h *NetHost) readSigns(proto uint8) signs {
	if time.Since(h.signsAt) >= signsFor {
		h.signsAt, h.signs = time.Now(), signs{nonlocal: true, raw: true, accept: true, bridged: true, ipvlan: true, synproxy: h.signs.synproxy}
		_ = inside(h.namespace, func() error { h.signs.at("/proc"); return nil })
		// The slaves are mostly in other namespaces, where they cannot be seen.
		modules, err := modulesAt("/proc/modules", "ipvlan")
		h.signs.ipvlan = err != nil || len(modules) > 0
	}
	h.signs.synproxy = h.signs.synproxy || proto == conntrack.TCP && h.synproxy()
	return h.signs
}

// at reads the signs of the calling thread's namespace by the proc file system
// mounted at proc.
func (s *signs) at(proc string) {
	sys := func(name string) bool {
		b, err := os.ReadFile(filepath.Join(proc, "sys/net", name))
		return err != nil && !errors.Is(err, fs.ErrNotExist) || strings.TrimSpace(string(b)) == "1"
	}
	s.nonlocal = sys("ipv4/ip_nonlocal_bind") || sys("ipv6/ip_nonlocal_bind")
	s.accept = sys("ipv4/conf/all/accept_local")
	s.bridged = sys("bridge/bridge-nf-call-iptables")
	s.raw = false
	for _, name := range []string{"raw", "raw6"} {
		b, err := os.ReadFile(filepath.Join(proc, "thread-self/net", name))
		s.raw = s.raw || err != nil && !errors.Is(err, fs.ErrNotExist) || sendsAny(b)
	}
}

// sendsAny tells whether a list of raw sockets has one whose packets may have ports:
// of a protocol that has them, or of IPPROTO_RAW. It is a heading, then for each
// socket an index, the local address, a colon and the protocol in hexadecimal digits
// (raw_sock_seq_show).
func sendsAny(list []byte) bool {
	for line := range bytes.Lines(list) {
		if f := bytes.Fields(line); len(f) > 1 {
			_, proto, _ := bytes.Cut(f[1], []byte{':'})
			switch string(proto) {
			case "0006", "0011", "0084", "00FF":
				return true
			}
		}
	}
	return false
}

// synproxyCounters is in every namespace, once the module is there.
const synproxyCounters = "/proc/thread-self/net/stat/synproxy"

// synproxy tells whether a SYNPROXY rule of the namespace was met.
func (h *NetHost) synproxy() bool {
	if h.syn == nil {
		if _, err := os.Stat(synproxyCounters); errors.Is(err, fs.ErrNotExist) {
			return false
		}
		err := inside(h.namespace, func() (err error) {
			h.syn, err = os.Open(synproxyCounters)
			return err
		})
		if err != nil {
			return true
		}
	}
	var b [16 << 10]byte
	n, err := h.syn.ReadAt(b[:], 0)
	return err != nil && !errors.Is(err, io.EOF) || synsIn(b[:n])
}

// synsIn tells whether the counters show a SYN: a heading, then for each CPU
// hexadecimal numbers, of which the second is that (synproxy_cpu_seq_show).
func synsIn(b []byte) bool {
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) != "entries" && len(bytes.Trim(f[1], "0")) > 0 {
			return true
		}
	}
	return false
}

func (h *NetHost) dump(req []byte, add func(typ uint16, b []byte)) (interrupted bool, err error) {
	if h.ask < 0 {
		return false, os.ErrClosed
	}
	h.seq++
	order := binary.NativeEndian
	order.PutUint32(req[8:], h.seq)
	if err := retried(func() error { _, err := unix.Write(h.ask, req); return err }); err != nil {
		return false, fmt.Errorf("ask rtnetlink: %w", err)
	}
	for {
		var n int
		err := retried(func() (err error) { n, err = unix.Read(h.ask, h.buf); return err })
		switch {
		case errors.Is(err, unix.EAGAIN):
			return false, errors.New("rtnetlink does not answer")
		case err != nil:
			return false, fmt.Errorf("read rtnetlink's answer: %w", err)
		case n == 0 || n == len(h.buf):
			return false, errMalformed
		}
		for b := h.buf[:n]; len(b) > 0; {
			if len(b) < unix.SizeofNlMsghdr {
				return false, errMalformed
			}
			size := order.Uint32(b)
			if size < unix.SizeofNlMsghdr || int64(size) > int64(len(b)) {
				return false, errMalformed
			}
			typ, flags, seq := order.Uint16(b[4:]), order.Uint16(b[6:]), order.Uint32(b[8:])
			payload := b[unix.SizeofNlMsghdr:size]
			b = b[min(align(int(size)), len(b)):]
			if seq != h.seq {
				continue
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch typ {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if len(payload) >= 4 {
					if errno := int32(order.Uint32(payload)); errno < 0 {
						return interrupted, fmt.Errorf("rtnetlink: %w", unix.Errno(-errno))
					}
				}
				return interrupted, nil
			default:
				add(typ, payload)
			}
		}
	}
}
