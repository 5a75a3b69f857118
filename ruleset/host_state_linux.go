package ruleset

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
)

// hostState is what was read at one time. It does not change.
type hostState struct {
	epoch  uint64
	sum    uint64
	known  bool // false: nothing could be read
	local  prefixes[Types]
	routes []prefixes[[]hop] // to other hosts, of one table each, IPv4 and IPv6 together
	main   int               // index into routes; -1: the main table has none
	crowd  bool              // there are more routes than were read
	// special are the routes of the main table that lead to no other host, and for
	// IPv6 those of all tables: their types, as far as an address may have them.
	special prefixes[Types]
	uplink  []uint32
	// open4 and open6 are the interfaces on which any source may come in.
	open4, open6 []uint32
	links        map[uint32]link
	lo           *Interfaces
	sets         *interned
	vrf          bool
	// unruled: the rules of routing do not begin with the local table.
	unruled bool
	// elsewhere: routes of type local are in other tables than local. Transparent
	// proxies have them, for the answers to what they send from others' addresses.
	elsewhere bool
	ipvlan    bool // there are such links here
	accept    bool // accept_local is set for some interface
	bridge    bool // there are bridges
	signs     signs
	moved     map[netip.Addr]struct{}
	// gone are interfaces that are no more.
	gone map[Interface]struct{}
}

// link is a network interface.
type link struct {
	name     string
	kind     string // of rtnl_link_ops: "" for hardware
	master   uint32 // index; 0: none
	loopback bool
}

// signs are what makes packets with others' addresses begin at the hook output,
// and shows in no route.
type signs struct {
	nonlocal bool // net.ipv4.ip_nonlocal_bind, or IPv6's: sockets may have any address
	raw      bool // a raw socket writes headers of its own, as samplicators do
	synproxy bool // SYNPROXY sends to servers with the clients' addresses (synproxy_send_server_syn)
	ipvlan   bool // what the slaves of an L3 ipvlan send (ipvlan_process_v4_outbound)
	// accept: net.ipv4.conf.all.accept_local lets others send with this host's
	// addresses.
	accept bool
	// bridged: what passes bridges meets the rules of ip (br_netfilter).
	bridged bool
}

// foreign tells whether this host may send with others' addresses.
func (s signs) foreign() bool { return s.nonlocal || s.raw || s.synproxy || s.ipvlan }

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

// get returns the set of the interfaces with some indices, and of those that are
// gone if these count too.
func (s *interned) get(h *hostState, indices []uint32, gone bool) *Interfaces {
	slices.Sort(indices)
	indices = slices.Compact(indices)
	var key []byte
	for _, i := range indices {
		key = binary.NativeEndian.AppendUint32(key, i)
	}
	if gone = gone && len(h.gone) > 0; gone {
		key = append(key, 1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if set, ok := s.sets[string(key)]; ok {
		return set
	}
	set := &Interfaces{ID: uint32(len(s.sets) + 1)}
	for _, i := range indices {
		l, ok := h.links[i]
		if !ok {
			set = nil // made since the links were read
			break
		}
		set.List = append(set.List, Interface{i, l.name})
	}
	if set != nil && gone {
		for i := range h.gone {
			set.List = append(set.List, i)
		}
	}
	s.sets[string(key)] = set
	return set
}

// sent tells where packets with a source address begin. One that came or went
// since the host was opened is Unsure. Addresses of a VRF are in its own table
// (l3mdev_fib_table), and whether a socket is in the VRF an address does not tell.
func (s *hostState) sent(src netip.Addr) Origin {
	if !s.known || s.vrf || s.unruled || len(s.moved) >= maxMoved || src.IsUnspecified() {
		return Unsure
	}
	if len(s.moved) > 0 {
		if _, ok := s.moved[src]; ok {
			return Unsure
		}
	}
	switch types := s.types(src); {
	case types == TypeLocal:
		return Own
	case types&TypeLocal != 0:
		return Unsure
	}
	return Foreign
}

// types returns what fib and addrtype may say of an address.
func (s *hostState) types(a netip.Addr) Types {
	if !s.known || s.vrf || s.unruled {
		return AllTypes
	}
	if a.Is4() {
		return s.types4(a)
	}
	// __nft_fib6_eval_type looks for a route as for a packet, in all tables that
	// the rules of routing lead to.
	t, _, ok := s.local.find(a)
	switch {
	case a.IsLinkLocalUnicast(): // what is one interface's is none of another's
		return TypeLocal | TypeUnicast | typeNowhere
	case ok && t&^(TypeLocal|TypeAnycast) == 0:
		return t
	case a.IsMulticast():
		return TypeMulticast | typeNowhere
	}
	t, _, _ = s.special.find(a)
	return TypeUnicast | typeNowhere | t&(TypeLocal|TypeAnycast) | s.unread()
}

// types4 is __inet_dev_addr_type: it asks the local table, which is one trie with
// the main table until the first rule of routing is added, and stays apart from it
// then (fib_unmerge). In one trie the longest prefix counts. Both are possible.
func (s *hostState) types4(a netip.Addr) Types {
	switch {
	case a.IsMulticast():
		return TypeMulticast
	case a.As4()[0] == 0 || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return TypeBroadcast
	}
	types, length, ok := s.local.find(a)
	if !ok {
		types, length = TypeUnicast, -1
	}
	if length == 32 {
		return types
	}
	if s.main >= 0 {
		if _, n, ok := s.routes[s.main].find(a); ok && n >= length {
			types |= TypeUnicast
		}
	}
	if t, n, ok := s.special.find(a); ok && n >= length {
		types |= t
	}
	return types | s.unread()
}

// unread is what the routes that were not read may say of any address.
func (s *hostState) unread() Types {
	if s.crowd {
		return TypeUnicast | TypeLocal | TypeBroadcast
	}
	return 0
}

// inputs returns the interfaces that the routes to a source lead to.
func (s *hostState) inputs(src netip.Addr) []uint32 {
	if !s.known || s.vrf || s.crowd {
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
	if distant {
		list = append(list, s.uplink...)
	}
	return list
}

// outputs returns the interfaces that the routes to a destination lead to.
func (s *hostState) outputs(dst netip.Addr) *Interfaces {
	if !s.known || s.vrf || s.crowd {
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
	return s.sets.get(s, list, false)
}

// certain is what is true of every packet.
type certain struct{ *hostState }

// Epoch implements [Host].
func (c certain) Epoch() uint64 { return c.epoch }

// Current implements [Host].
func (certain) Current(uint8) bool { return true }

// Certain implements [Host].
func (c certain) Certain() Host { return c }

// Types implements [Host].
func (c certain) Types(a netip.Addr) Types { return c.types(a) }

// Sent implements [Host]. A source that is not this host's may be that of a
// transparent proxy here, of a SYNPROXY rule, or of an ipvlan slave, whose packets
// begin at the hook output. What comes in with a source of this host is dropped for
// IPv4 (fib_validate_source), unless accept_local is set, the source is local as
// part of a prefix (AnyIP), or it only passes a bridge (br_netfilter); for IPv6,
// that of ::1 alone (ip6_rcv_core).
func (c certain) Sent(src netip.Addr) Origin {
	switch c.sent(src) {
	case Own:
		_, length, _ := c.local.find(src)
		if src.IsLoopback() || src.Is4() && length == 32 && !c.accept && !c.signs.accept && !(c.bridge && c.signs.bridged) {
			return Own
		}
	case Foreign:
		if !c.elsewhere && !c.ipvlan && !c.crowd && !c.signs.foreign() {
			return Foreign
		}
	}
	return Unsure
}

// Inputs implements [Host]. Only a strict rp_filter, which IPv6 does not have,
// makes sure that a packet comes in where the routes to its source lead
// (fib_validate_source): two-legged clients, tunnels without routes and asymmetric
// ways do not do so.
func (c certain) Inputs(src netip.Addr) *Interfaces {
	if !c.known || c.vrf || c.crowd || len(c.gone) >= maxGone {
		return nil
	}
	list := c.inputs(src)
	if src.Is4() {
		list = append(list, c.open4...)
	} else {
		list = append(list, c.open6...)
	}
	if len(list) == 0 {
		return nil
	}
	return c.sets.get(c.hostState, list, true)
}

// Outputs implements [Host]. SO_BINDTODEVICE, marks and rules of routing choose
// another interface than the destination's route, for this host's own addresses
// too: fib_table_lookup passes over local routes of another interface.
func (c certain) Outputs(netip.Addr) *Interfaces { return nil }
