package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxRoutes is how many routes are read. A router with more has so many ways
	// that its interfaces count as unknown.
	maxRoutes = 1 << 16
	// maxMoved is how many addresses are remembered that came or went.
	maxMoved = 1 << 16
	// restFactor is how much longer than a refresh the time before the next is,
	// so that changes without end take a twentieth of a core.
	restFactor = 20

	routeGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
		1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1)
)

// NetHost is the [Host] that a network namespace's own addresses and routes make.
// It follows them over rtnetlink. An interface on which a source may come in is
// the one that its network is on, if that network is directly connected; behind
// a gateway it may be any that leads to a gateway or has a default route, since
// ways need not be symmetric.
type NetHost struct {
	events *os.File // in the runtime's poller: Close ends a read
	dirty  atomic.Bool
	state  atomic.Pointer[hostState]
	done   chan struct{}

	mu     sync.Mutex // of what follows
	ask    int        // -1 when closed
	seq    uint32
	buf    []byte
	rest   time.Time // no refresh before
	crowd  bool      // more routes than are read
	closed bool
}

// hostState is what was read at one time. It does not change.
type hostState struct {
	epoch  uint64
	sum    uint64
	known  bool // false: nothing could be read
	local  prefixes[Types]
	routes []prefixes[[]hop] // of one table each, IPv4 and IPv6 together
	uplink []uint32
	links  map[uint32]string
	lo     *Interfaces
	sets   *interned
	vrf    bool
	moved  map[netip.Addr]struct{}
}

type hop struct {
	index   uint32
	gateway bool
}

// prefixes finds the longest prefix of an address.
type prefixes[T any] struct {
	lengths4, lengths6 []int // those that occur, longest first
	m                  map[netip.Prefix]T
}

func (p *prefixes[T]) find(a netip.Addr) (v T, length int, ok bool) {
	lengths := p.lengths4
	if a.Is6() {
		lengths = p.lengths6
	}
	for _, n := range lengths {
		x, err := a.WithZone("").Prefix(n)
		if err != nil {
			return v, 0, false
		}
		if v, ok = p.m[x]; ok {
			return v, n, true
		}
	}
	return v, 0, false
}

func (p *prefixes[T]) add(x netip.Prefix, change func(T) T) {
	if p.m == nil {
		p.m = map[netip.Prefix]T{}
	}
	p.m[x] = change(p.m[x])
	lengths := &p.lengths4
	if x.Addr().Is6() {
		lengths = &p.lengths6
	}
	if i, ok := slices.BinarySearchFunc(*lengths, x.Bits(), func(a, b int) int { return b - a }); !ok {
		*lengths = slices.Insert(*lengths, i, x.Bits())
	}
}

// interned gives equal sets of interfaces one pointer.
type interned struct {
	mu   sync.Mutex
	sets map[string]*Interfaces
}

func (s *interned) get(h *hostState, indices []uint32) *Interfaces {
	slices.Sort(indices)
	indices = slices.Compact(indices)
	var key []byte
	for _, i := range indices {
		key = binary.NativeEndian.AppendUint32(key, i)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[string(key)]; set != nil {
		return set
	}
	set := &Interfaces{ID: uint32(len(s.sets) + 1)}
	for _, i := range indices {
		name, ok := h.links[i]
		if !ok {
			set = nil // made since the links were read
			break
		}
		set.List = append(set.List, Interface{i, name})
	}
	s.sets[string(key)] = set
	return set
}

// OpenHost reads addresses and routes of a network namespace, given as a path; ""
// is that of the calling thread. Entering another one needs CAP_SYS_ADMIN.
func OpenHost(namespace string) (*NetHost, error) {
	h := &NetHost{ask: -1, buf: make([]byte, recvBuf), done: make(chan struct{})}
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

// listen notes that something has changed; what does not matter, nor that
// messages were lost (ENOBUFS).
func (h *NetHost) listen() {
	defer close(h.done)
	var b [1]byte
	for {
		if _, err := h.events.Read(b[:]); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
		h.dirty.Store(true)
	}
}

func (h *NetHost) closeSockets() {
	if h.events != nil {
		_ = h.events.Close()
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

// Epoch reads addresses and routes anew if something has changed. Where that
// fails, nothing is known until it succeeds.
func (h *NetHost) Epoch() uint64 {
	if h.dirty.Load() {
		h.mu.Lock()
		if !h.closed && time.Now().After(h.rest) && h.dirty.Swap(false) && h.refresh() != nil {
			h.dirty.Store(true)
			h.rest = time.Now().Add(time.Second)
			h.state.Store(&hostState{epoch: h.state.Load().epoch + 1, moved: h.state.Load().moved})
		}
		h.mu.Unlock()
	}
	return h.state.Load().epoch
}

// Sent implements [Host]. An address that came or went since the host was opened
// is Unsure.
func (h *NetHost) Sent(src netip.Addr) Origin {
	s := h.state.Load()
	if !s.known || len(s.moved) >= maxMoved {
		return Unsure
	}
	if len(s.moved) > 0 {
		if _, ok := s.moved[src]; ok {
			return Unsure
		}
	}
	if t, _, ok := s.local.find(src); ok && t&TypeLocal != 0 {
		return Own
	}
	return Foreign
}

// Types implements [Host] as the kernel's local table answers (inet_addr_type,
// __nft_fib6_eval_type).
func (h *NetHost) Types(a netip.Addr) Types {
	s := h.state.Load()
	if !s.known || s.vrf { // a VRF has a local table of its own
		return AllTypes
	}
	t, _, ok := s.local.find(a)
	if a.Is4() {
		switch {
		case a.IsMulticast():
			return TypeMulticast
		case a.As4()[0] == 0 || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
			return TypeBroadcast
		case ok:
			return t
		}
		return TypeUnicast
	}
	switch {
	case ok && t&^(TypeLocal|TypeAnycast) == 0:
		return t
	case a.IsMulticast():
		return TypeMulticast | typeNowhere
	}
	return TypeUnicast | typeNowhere
}

// Inputs implements [Host].
func (h *NetHost) Inputs(src netip.Addr) *Interfaces {
	s := h.state.Load()
	if !s.known || s.vrf || s.routes == nil {
		return nil
	}
	if t, _, ok := s.local.find(src); ok && t&TypeLocal != 0 {
		return nil // not by its route: that is lo
	}
	var list []uint32
	distant := false
	for i := range s.routes {
		hops, length, ok := s.routes[i].find(src)
		if !ok {
			continue
		}
		for _, p := range hops {
			list = append(list, p.index)
			distant = distant || p.gateway || length == 0
		}
	}
	if len(list) == 0 {
		return nil
	}
	if distant {
		list = append(list, s.uplink...)
	}
	return s.sets.get(s, list)
}

// Outputs implements [Host].
func (h *NetHost) Outputs(dst netip.Addr) *Interfaces {
	s := h.state.Load()
	if !s.known || s.vrf || s.routes == nil {
		return nil
	}
	if t, _, ok := s.local.find(dst); ok {
		if t == TypeLocal {
			return s.lo
		}
		return nil
	}
	var list []uint32
	for i := range s.routes {
		hops, _, _ := s.routes[i].find(dst)
		for _, p := range hops {
			list = append(list, p.index)
		}
	}
	if len(list) == 0 || dst.IsMulticast() {
		return nil
	}
	return s.sets.get(s, list)
}

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
	h.rest = time.Now().Add(restFactor * time.Since(start))
	if old.known && old.sum == s.sum {
		return nil
	}
	s.epoch, s.known, s.moved = old.epoch+1, true, old.moved
	if old.known {
		s.moved = moved(old, s)
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

// reading is a hostState in the making.
type reading struct {
	*hostState
	hash   maphash.Hash
	tables map[uint32]int // index into routes
	count  int
}

var seed = maphash.MakeSeed()

func (h *NetHost) read() (*hostState, bool, error) {
	r := &reading{
		hostState: &hostState{links: map[uint32]string{}, sets: &interned{sets: map[string]*Interfaces{}}},
		tables:    map[uint32]int{},
	}
	r.hash.SetSeed(seed)
	again := false
	ask := func(req []byte, add func(typ uint16, b []byte)) error {
		interrupted, err := h.dump(req, add)
		again = again || interrupted
		return err
	}
	if err := ask(routeRequest(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, 0), r.link); err != nil {
		return nil, false, err
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		req := routeRequest(unix.RTM_GETROUTE, family, unix.SizeofRtMsg, unix.RT_TABLE_LOCAL)
		if err := ask(req, func(_ uint16, b []byte) { r.route(b, true) }); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, false, err
		}
		if h.crowd {
			continue
		}
		req = routeRequest(unix.RTM_GETROUTE, family, unix.SizeofRtMsg, unix.RT_TABLE_UNSPEC)
		if err := ask(req, func(_ uint16, b []byte) { r.route(b, false) }); err != nil {
			return nil, false, err
		}
		h.crowd = r.count > maxRoutes
	}
	if h.crowd {
		r.routes = nil
	}
	slices.Sort(r.uplink)
	r.uplink = slices.Compact(r.uplink)
	r.sum = r.hash.Sum64()
	return r.hostState, again, nil
}

func (r *reading) note(b ...byte) { _, _ = r.hash.Write(b) }

func (r *reading) link(typ uint16, b []byte) {
	if typ != unix.RTM_NEWLINK || len(b) < unix.SizeofIfInfomsg {
		return
	}
	index := binary.NativeEndian.Uint32(b[4:])
	flags := binary.NativeEndian.Uint32(b[8:])
	for a := walk(b[unix.SizeofIfInfomsg:]); a.next(); {
		switch a.typ {
		case unix.IFLA_IFNAME:
			r.links[index] = string(a.text())
			r.note(a.val...)
			if flags&unix.IFF_LOOPBACK != 0 {
				r.lo = &Interfaces{ID: ^uint32(0), List: []Interface{{index, r.links[index]}}}
			}
		case unix.IFLA_LINKINFO:
			kind := walk(find(a.val, unix.IFLA_INFO_KIND))
			kind.val = kind.rest
			r.vrf = r.vrf || string(kind.text()) == "vrf"
		}
	}
	r.note(b[4:8]...)
}

// route takes in what fib_dump_info or rt6_fill_node wrote.
func (r *reading) route(b []byte, local bool) {
	if len(b) < unix.SizeofRtMsg {
		return
	}
	family, bits, table, kind := b[0], int(b[1]), uint32(b[4]), b[7]
	flags := binary.NativeEndian.Uint32(b[8:])
	var dst, hops []byte
	one := hop{}
	for a := walk(b[unix.SizeofRtMsg:]); a.next(); {
		switch a.typ {
		case unix.RTA_TABLE:
			if len(a.val) == 4 {
				table = binary.NativeEndian.Uint32(a.val)
			}
		case unix.RTA_DST:
			dst = a.val
		case unix.RTA_OIF:
			if len(a.val) == 4 {
				one.index = binary.NativeEndian.Uint32(a.val)
			}
		case unix.RTA_GATEWAY, unix.RTA_VIA:
			one.gateway = true
		case unix.RTA_MULTIPATH:
			hops = a.val
		}
	}
	if (table == unix.RT_TABLE_LOCAL) != local || flags&unix.RTM_F_CLONED != 0 {
		return
	}
	addr := netip.IPv4Unspecified()
	if family == unix.AF_INET6 {
		addr = netip.IPv6Unspecified()
	}
	if dst != nil {
		a, ok := netip.AddrFromSlice(dst)
		if !ok || a.Is4() != addr.Is4() {
			return
		}
		addr = a
	}
	prefix, err := addr.Prefix(bits)
	if err != nil {
		return
	}
	r.note(b[:8]...)
	r.note(dst...)
	r.note(byte(one.index), byte(one.index>>8), byte(one.index>>16), byte(one.index>>24))
	r.note(hops...)
	if local {
		if kind < 16 {
			r.local.add(prefix, func(t Types) Types { return t | 1<<kind })
		}
		return
	}
	if r.count++; r.count > maxRoutes {
		return
	}
	if kind != unix.RTN_UNICAST {
		return
	}
	i, ok := r.tables[table]
	if !ok {
		i = len(r.routes)
		r.tables[table] = i
		r.routes = append(r.routes, prefixes[[]hop]{})
	}
	add := func(p hop) {
		r.routes[i].add(prefix, func(list []hop) []hop { return append(list, p) })
		if p.gateway || prefix.Bits() == 0 {
			r.uplink = append(r.uplink, p.index)
		}
	}
	if hops == nil {
		add(one) // index 0, of a nexthop object that is not resolved: no interface has it
	}
	for len(hops) >= unix.SizeofRtNexthop {
		n := int(binary.NativeEndian.Uint16(hops))
		if n < unix.SizeofRtNexthop || n > len(hops) {
			return
		}
		p := hop{index: binary.NativeEndian.Uint32(hops[4:])}
		for a := walk(hops[unix.SizeofRtNexthop:n]); a.next(); {
			p.gateway = p.gateway || a.typ == unix.RTA_GATEWAY || a.typ == unix.RTA_VIA
		}
		add(p)
		hops = hops[min(align(n), len(hops)):]
	}
}

// routeRequest is a dump request of rtnetlink with an empty fixed part, but for
// family and table (of struct rtmsg).
func routeRequest(typ uint16, family byte, fixed int, table byte) []byte {
	order := binary.NativeEndian
	b := order.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+fixed))
	b = order.AppendUint16(b, typ)
	b = order.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	b = append(b, make([]byte, 8+fixed)...)
	b[unix.SizeofNlMsghdr] = family
	if table != 0 {
		b[unix.SizeofNlMsghdr+4] = table
	}
	return b
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
