package ruleset

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// reading is a hostState in the making.
type reading struct {
	*hostState
	hash   maphash.Hash
	tables map[uint32]int // index into routes
	count  int
	// What netconf says of rp_filter: by interface, and for all at least.
	filter    map[uint32]uint32
	filterAll uint32
	first     map[byte]bool // by family: the first rule of routing leads to the local table
	networks  map[uint32][2]bool
}

func newReading() *reading {
	r := &reading{
		hostState: &hostState{
			main: -1, links: map[uint32]link{}, sets: &interned{sets: map[string]*Interfaces{}},
		},
		tables: map[uint32]int{}, filter: map[uint32]uint32{}, first: map[byte]bool{}, networks: map[uint32][2]bool{},
	}
	r.hash.SetSeed(seed)
	return r
}

var seed = maphash.MakeSeed()

func (h *NetHost) read() (*hostState, bool, error) {
	r := newReading()
	again := false
	ask := func(req []byte, add func(typ uint16, b []byte)) error {
		interrupted, err := h.dump(req, add)
		again = again || interrupted
		return err
	}
	if err := ask(routeRequest(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, 0), r.link); err != nil {
		return nil, false, err
	}
	// Kernels without it tell nothing of rp_filter: then it is not strict.
	err := ask(routeRequest(unix.RTM_GETNETCONF, unix.AF_INET, align(sizeofNetconfmsg), 0), r.netconf)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return nil, false, err
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		// Kernels without rules of routing ask the local table first.
		r.first[family] = true
		req := routeRequest(unix.RTM_GETRULE, family, unix.SizeofRtMsg, 0)
		lowest := ^uint32(0)
		err := ask(req, func(_ uint16, b []byte) { lowest = r.rule(b, lowest) })
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EAFNOSUPPORT) {
			return nil, false, err
		}
		r.unruled = r.unruled || !r.first[family]
		req = routeRequest(unix.RTM_GETROUTE, family, unix.SizeofRtMsg, unix.RT_TABLE_LOCAL)
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
	r.hostState.crowd = h.crowd
	r.finish()
	return r.hostState, again, nil
}

// finish puts together what came apart.
func (r *reading) finish() {
	if i, ok := r.tables[unix.RT_TABLE_MAIN]; ok {
		r.main = i
	}
	outer := map[uint32]bool{} // bridges that lead to hardware
	for _, l := range r.links {
		if l.master != 0 && l.kind != "veth" && l.kind != "tun" {
			outer[l.master] = true
		}
	}
	for i, l := range r.links {
		if l.loopback || l.master != 0 {
			continue
		}
		// A bridge of nothing but containers and virtual machines of this host, in a
		// network of their own: only they send from it. Bridges without an address
		// connect networks of others.
		inner := [2]bool{}
		if l.kind == "bridge" && !outer[i] {
			inner = r.networks[i]
		}
		// What only passes a bridge is not filtered (br_netfilter).
		if strict := max(r.filter[i], r.filterAll) == 1 && l.kind != "bridge"; !strict && !inner[0] { // IN_DEV_RPFILTER
			r.open4 = append(r.open4, i)
		}
		if !inner[1] { // IPv6 has no rp_filter
			r.open6 = append(r.open6, i)
		}
	}
	slices.Sort(r.uplink)
	r.uplink = slices.Compact(r.uplink)
	r.sum = r.hash.Sum64()
}

func (r *reading) note(b ...byte) { _, _ = r.hash.Write(b) }

func (r *reading) link(typ uint16, b []byte) {
	if typ != unix.RTM_NEWLINK || len(b) < unix.SizeofIfInfomsg {
		return
	}
	index := binary.NativeEndian.Uint32(b[4:])
	l := link{loopback: binary.NativeEndian.Uint32(b[8:])&unix.IFF_LOOPBACK != 0}
	for a := walk(b[unix.SizeofIfInfomsg:]); a.next(); {
		switch a.typ {
		case unix.IFLA_IFNAME:
			l.name = string(a.text())
		case unix.IFLA_MASTER:
			l.master = a.host32()
		case unix.IFLA_AF_SPEC:
			if acceptLocal(find(find(a.val, unix.AF_INET), iflaInetConf)) {
				r.accept = true
				r.note(1)
			}
		case unix.IFLA_LINKINFO:
			kind := walk(find(a.val, unix.IFLA_INFO_KIND))
			kind.val = kind.rest
			l.kind = string(kind.text())
		}
	}
	r.note(b[4:8]...)
	r.note([]byte(l.name + "/" + l.kind)...)
	r.note(byte(l.master), byte(l.master>>8), byte(l.master>>16), byte(l.master>>24))
	r.links[index] = l
	r.vrf = r.vrf || l.kind == "vrf"
	r.ipvlan = r.ipvlan || l.kind == "ipvlan"
	r.bridge = r.bridge || l.kind == "bridge"
	if l.loopback {
		r.lo = &Interfaces{ID: ^uint32(0), List: []Interface{{index, l.name}}}
	}
}

// acceptLocal tells whether accept_local is among the settings of an interface, an
// array of numbers (inet_fill_link_af).
func acceptLocal(conf []byte) bool {
	at := 4 * (devconfAcceptLocal - 1)
	return len(conf) >= at+4 && binary.NativeEndian.Uint32(conf[at:]) != 0
}

// From linux/if_link.h, linux/ip.h and linux/netconf.h.
const (
	iflaInetConf       = 1  // IFLA_INET_CONF
	devconfAcceptLocal = 23 // IPV4_DEVCONF_ACCEPT_LOCAL

	sizeofNetconfmsg = 1 // struct netconfmsg
	netconfaIfindex  = 1 // NETCONFA_IFINDEX
	netconfaRPFilter = 3 // NETCONFA_RP_FILTER
	netconfaAll      = ^uint32(0)
)

// netconf takes in what inet_netconf_fill_devconf wrote.
func (r *reading) netconf(typ uint16, b []byte) {
	if typ != unix.RTM_NEWNETCONF || len(b) < align(sizeofNetconfmsg) {
		return
	}
	var index, filter uint32
	for a := walk(b[align(sizeofNetconfmsg):]); a.next(); {
		switch a.typ {
		case netconfaIfindex:
			index = a.host32()
		case netconfaRPFilter:
			filter = a.host32()
		}
	}
	r.note(byte(index), byte(index>>8), byte(filter))
	if index == netconfaAll {
		r.filterAll = filter
	} else {
		r.filter[index] = filter
	}
}

// rule takes in what fib_nl_fill_rule wrote, and returns the lowest priority so
// far. The rule of that one must be the one that every namespace begins with
// (fib_default_rules_init), or others are asked before the local table.
func (r *reading) rule(b []byte, lowest uint32) uint32 {
	if len(b) < unix.SizeofRtMsg {
		return lowest
	}
	priority, table, selects := uint32(0), uint32(b[4]), b[1] != 0 || b[2] != 0 || b[3] != 0
	for a := walk(b[unix.SizeofRtMsg:]); a.next(); {
		switch a.typ {
		case unix.FRA_PRIORITY:
			priority = a.host32()
		case unix.FRA_TABLE:
			table = a.host32()
		case unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_PROTOCOL:
		default:
			selects = true
		}
	}
	r.note(b...)
	if priority >= lowest {
		return lowest
	}
	r.first[b[0]] = table == unix.RT_TABLE_LOCAL && b[7] == unix.FR_ACT_TO_TBL && !selects
	return priority
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
		r.other(prefix, table, kind)
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
		} else if !addr.IsLinkLocalUnicast() && !addr.IsMulticast() {
			n := r.networks[p.index]
			n[index01(family == unix.AF_INET6)] = true
			r.networks[p.index] = n
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

// other takes in a route outside the local table that leads to no other host. What
// fib_props calls an error leaves an IPv4 address UNICAST, and no packet has a
// source there. IPv6 asks all tables.
func (r *reading) other(prefix netip.Prefix, table uint32, kind byte) {
	types := TypeUnicast
	switch kind {
	case unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
		types = 1 << kind
	}
	r.elsewhere = r.elsewhere || kind == unix.RTN_LOCAL
	if prefix.Addr().Is4() && table != unix.RT_TABLE_MAIN {
		return
	}
	r.special.add(prefix, func(t Types) Types { return t | types })
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
