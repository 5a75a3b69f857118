package frontend

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Key is where a frontend is reached. The unspecified address of a family
// stands for every address of this host of that family.
type Key struct {
	Addr  netip.Addr
	Proto uint8
	Ports Ports
}

// String returns "203.0.113.10:53/UDP", "[2001:db8::1]:53/UDP",
// "192.0.2.1:50000-50099/UDP", or for every address of this host "*:30053/UDP"
// (IPv4) and "[*]:30053/UDP" (IPv6).
func (k Key) String() string {
	host := k.Addr.String()
	if k.Addr.IsUnspecified() {
		host = "*"
	}
	if k.Addr.Is6() {
		host = "[" + host + "]"
	}
	ports := strconv.Itoa(int(k.Ports.First))
	if !k.Ports.Single() {
		ports += "-" + strconv.Itoa(int(k.Ports.Last))
	}
	return host + ":" + ports + "/" + ProtoName(k.Proto)
}

// ProtoName returns "UDP", "TCP" or "SCTP", and the number of any other
// protocol.
func ProtoName(proto uint8) string {
	switch proto {
	case conntrack.UDP:
		return "UDP"
	case conntrack.TCP:
		return "TCP"
	case conntrack.SCTP:
		return "SCTP"
	}
	return strconv.Itoa(int(proto))
}

func anyAddr(fam conntrack.Family) netip.Addr {
	if fam == conntrack.IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Key returns where the frontend is reached.
func (f *Frontend) Key() Key {
	k := Key{f.Addr, f.Proto, f.Ports}
	if !f.Addr.IsValid() {
		k.Addr = anyAddr(f.Family)
	}
	return k
}

// entry is all that is known of one Key.
//
//	owners ──Set──▶ claims ──▶ entry ◀── Judge looks up by destination
//	                  │          ▲
//	         one of ours goes ──▶ tombstone ──Forget, or one like it comes──▶ nothing
//
// A tombstone lies under the claims that are left: it speaks where none of them is
// met, be it that they go too or that they are not served where a flow was sent.
// So what is known at last does not depend on the order in which claims come and
// go. Tombstones of one kind and policy are one, since nothing tells them apart
// but the name, so that an entry has a few at the most.
type entry struct {
	claims []claim
	tombs  []Tombstone // by kind and policy
}

// like tells whether two tombstones of one key say the same but for the name.
func (t *Tombstone) like(o *Tombstone, p Policy) bool {
	return t.Kind == o.Kind && t.sweep(p) == o.sweep(p)
}

// tombstone is what a frontend of ours leaves when it goes.
func (t *Table) tombstone(f *Frontend) Tombstone {
	tomb := Tombstone{Key: f.Key(), Owner: f.Owner, Kind: f.Kind}
	if f.Sweep != nil && *f.Sweep != t.policy.Of(f.Proto) {
		tomb.Sweep = f.Sweep
	}
	return tomb
}

// lives tells whether a claim will leave a tombstone like this one.
func (t *Table) lives(e *entry, tomb *Tombstone) bool {
	return slices.ContainsFunc(e.claims, func(c claim) bool {
		left := t.tombstone(c.Frontend)
		return !c.Foreign && left.like(tomb, t.policy)
	})
}

// bury adds a tombstone to an entry of its key, unless a claim stands for it.
func (t *Table) bury(e *entry, tomb Tombstone) bool {
	if t.lives(e, &tomb) {
		return false
	}
	if i := slices.IndexFunc(e.tombs, func(o Tombstone) bool { return o.like(&tomb, t.policy) }); i >= 0 {
		e.tombs[i].Owner = tomb.Owner
		return true
	}
	e.tombs = append(e.tombs, tomb)
	slices.SortFunc(e.tombs, func(a, b Tombstone) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.sweep(t.policy), b.sweep(t.policy)))
	})
	return true
}

type claim struct {
	unit string
	*Frontend
}

// Tombstone is a frontend that was ours and is gone. What was translated for it
// is still ours to clean.
//
// That of a node port at one address is what SetHost leaves where node ports are
// served no more.
type Tombstone struct {
	Key   Key
	Owner string
	Kind  Kind
	Sweep *Sweep // as in Frontend
}

func (t *Tombstone) sweep(p Policy) Sweep {
	if t.Sweep != nil {
		return *t.Sweep
	}
	return p.Of(t.Key.Proto)
}

// Table is the desired state: all frontends, by where they are reached. It is
// safe for concurrent use; a judgement takes a read lock and allocates nothing.
type Table struct {
	mu      sync.RWMutex
	policy  Policy
	zones   []uint16
	units   map[string][]Frontend
	entries map[Key]*entry
	// ranges indexes the entries of more than one port by address and protocol.
	ranges map[addrProto]*segments
	// dirty: ranges came or went and their segments are to be made anew.
	dirty bool
	hosts map[netip.Addr]hostAddr
	pods  []netip.Prefix
	// loopback are the ranges in which there may be node ports on loopback.
	loopback []netip.Prefix
	// hidden: there may be host ports that are not known.
	hidden bool
	// anyLocal counts the entries that stand for every address of this host.
	anyLocal int
	// scope counts the entries by family and protocol.
	scope map[Scope]int
	// What Len returns.
	frontends, tombstones int
	// most is the most that the policy or any frontend so far has allowed to be
	// deleted, by protocol. It never shrinks.
	most [256]Sweep
	// inside are the keys at which a claim of ours has backends for what this host
	// and its pods send and for nobody else, and how many.
	inside map[Key]int
	// services are the ranges of service addresses; foreign counts the claims of
	// other proxies by address, which exempts an address from them.
	services []serviceRange
	foreign  map[netip.Addr]int
}

// serviceRange is a range that only services have addresses in.
type serviceRange struct {
	netip.Prefix
	owner string
}

// Scope is a family and protocol.
type Scope struct {
	Family conntrack.Family
	Proto  uint8
}

// Scopes returns the families and protocols that have frontends, tombstones or
// service ranges and of which something may be deleted, in order: flows of all
// others are ignored.
func (t *Table) Scopes() []Scope {
	t.mu.RLock()
	defer t.mu.RUnlock()
	scopes := maps.Clone(t.scope)
	for _, r := range t.services {
		for _, proto := range []uint8{conntrack.UDP, conntrack.TCP, conntrack.SCTP} {
			scopes[Scope{conntrack.FamilyOf(r.Addr()), proto}]++
		}
	}
	var list []Scope
	for s := range scopes {
		if t.most[s.Proto] != Off {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b Scope) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), -cmp.Compare(a.Proto, b.Proto))
	})
	return list
}

// Scope returns the key's family and protocol.
func (k Key) Scope() Scope { return Scope{conntrack.FamilyOf(k.Addr), k.Proto} }

type addrProto struct {
	addr  netip.Addr
	proto uint8
}

// hostAddr says what an address is to this host.
type hostAddr struct {
	// was: an address that this host had and lost. Its frontends are tombstones.
	was bool
	// ports: whether a proxy serves node ports there.
	ports certainty
}

type certainty uint8

const (
	unserved certainty = iota
	uncertain
	certain
)

// Options are the parts of the judgement that are not frontends.
type Options struct {
	Policy Policy
	// Zones are the conntrack zones that are judged; none stands for the
	// default zone, 0.
	Zones []uint16
}

// NewTable returns an empty table, in which every flow is ignored.
func NewTable(o Options) *Table {
	if len(o.Zones) == 0 {
		o.Zones = []uint16{0}
	}
	return &Table{
		policy:  o.Policy,
		zones:   slices.Clone(o.Zones),
		units:   map[string][]Frontend{},
		entries: map[Key]*entry{},
		ranges:  map[addrProto]*segments{},
		hosts:   map[netip.Addr]hostAddr{},
		scope:   map[Scope]int{},
		most:    [256]Sweep{conntrack.UDP: o.Policy.UDP, conntrack.TCP: o.Policy.TCP, conntrack.SCTP: o.Policy.SCTP},
		foreign: map[netip.Addr]int{},
		inside:  map[Key]int{},
	}
}

// Policy returns what the table was made with.
func (t *Table) Policy() Policy { return t.policy }

// Most returns the most that may be deleted of a protocol, by the policy or by
// any frontend.
func (t *Table) Most(proto uint8) Sweep {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.most[proto]
}

// Zones returns the zones that are judged.
func (t *Table) Zones() []uint16 { return slices.Clone(t.zones) }

// Len returns the number of frontends and of tombstones.
func (t *Table) Len() (frontends, tombstones int) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.frontends, t.tombstones
}

// count adds n for what the entry of a key is.
func (t *Table) count(k Key, n int) {
	e := t.entries[k]
	if e == nil {
		return
	}
	t.tombstones += n * len(e.tombs)
	if ours(e.claims) {
		t.frontends += n
	}
}

// Set replaces what one unit contributes: all frontends of a Service, a Pod or
// an item of a file; none removes the unit. A frontend with port 0, an unknown
// protocol or neither address nor family contributes nothing. The work is that
// of the frontends given and replaced, whatever the table's size. The slice
// belongs to the table from here on.
func (t *Table) Set(unit string, fs []Frontend) Change {
	fs = slices.DeleteFunc(fs, func(f Frontend) bool { return !f.sound() })
	defer t.lock()()
	return t.set(unit, fs)
}

// lock begins an update and returns what ends it.
func (t *Table) lock() (unlock func()) {
	t.mu.Lock()
	return func() {
		if t.dirty {
			for _, s := range t.ranges {
				s.build()
			}
			t.dirty = false
		}
		t.mu.Unlock()
	}
}

func (f *Frontend) sound() bool {
	if f.Ports.First == 0 || f.Ports.Last < f.Ports.First {
		return false
	}
	if !f.Addr.IsValid() && f.Family != conntrack.IPv4 && f.Family != conntrack.IPv6 {
		return false
	}
	return f.Proto == conntrack.UDP || f.Proto == conntrack.TCP || f.Proto == conntrack.SCTP
}

// Replace makes units all that there is. Units are added before others are
// removed, so that a frontend that changes hands is never without an owner.
func (t *Table) Replace(units map[string][]Frontend) Change {
	defer t.lock()()
	var ch Change
	for _, unit := range sortedKeys(units) {
		fs := slices.DeleteFunc(units[unit], func(f Frontend) bool { return !f.sound() })
		ch.Add(t.set(unit, fs))
	}
	for _, unit := range sortedKeys(t.units) {
		if _, ok := units[unit]; !ok {
			ch.Add(t.set(unit, nil))
		}
	}
	return ch
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (t *Table) set(unit string, fs []Frontend) Change {
	old := t.units[unit]
	before := make(map[Key][]claim, len(old)+len(fs))
	for _, list := range [][]Frontend{old, fs} {
		for i := range list {
			k := list[i].Key()
			if _, ok := before[k]; !ok {
				before[k] = nil
				if e := t.entries[k]; e != nil {
					before[k] = slices.Clone(e.claims)
				}
				t.count(k, -1)
			}
		}
	}
	for i := range old {
		e := t.entries[old[i].Key()]
		e.claims = slices.DeleteFunc(e.claims, func(c claim) bool { return c.unit == unit })
		t.countForeign(&old[i], -1)
		t.countInside(&old[i], -1)
	}
	for i := range fs {
		e := t.entry(fs[i].Key())
		e.claims = append(e.claims, claim{unit, &fs[i]})
		t.allow(fs[i].Proto, fs[i].Sweep)
		t.countForeign(&fs[i], 1)
		t.countInside(&fs[i], 1)
	}
	if fs == nil {
		delete(t.units, unit)
	} else {
		t.units[unit] = fs
	}
	var ch Change
	for _, k := range sortedByKey(before) {
		e := t.entries[k]
		slices.SortStableFunc(e.claims, func(a, b claim) int { return cmp.Compare(a.Owner, b.Owner) })
		ch.compare(k, t.policy.Of(k.Proto), before[k], e.claims)
		e.tombs = slices.DeleteFunc(e.tombs, func(tomb Tombstone) bool { return t.lives(e, &tomb) })
		buried := false
		for _, c := range before[k] {
			// One that was edited has not gone.
			edited := func(x claim) bool { return x.unit == unit && x.Kind == c.Kind && !x.Foreign }
			if c.unit == unit && !c.Foreign && !slices.ContainsFunc(e.claims, edited) && t.bury(e, t.tombstone(c.Frontend)) {
				buried = true
			}
		}
		if buried {
			ch.Buried = append(ch.Buried, k)
		}
		t.settle(k)
	}
	for i := range old {
		// The last foreign claim exempted its whole address from the service ranges.
		if a := old[i].Addr; old[i].Foreign && a.IsValid() && t.foreign[a] == 0 && t.serviceRange(a) != nil {
			ch.Add(Change{Hosts: []netip.Addr{a}})
		}
	}
	return ch
}

// settle counts the entry of a key again, or removes it if nothing is left of it.
func (t *Table) settle(k Key) {
	if e := t.entries[k]; len(e.claims)+len(e.tombs) == 0 {
		t.remove(k)
		return
	}
	t.count(k, 1)
}

func (t *Table) allow(proto uint8, s *Sweep) {
	if s != nil {
		t.most[proto] = max(t.most[proto], *s)
	}
}

func (t *Table) countForeign(f *Frontend, n int) {
	if !f.Foreign || !f.Addr.IsValid() {
		return
	}
	if t.foreign[f.Addr] += n; t.foreign[f.Addr] == 0 {
		delete(t.foreign, f.Addr)
	}
}

func (t *Table) countInside(f *Frontend, n int) {
	if f.Foreign || f.Inside == 0 || f.Usable > 0 {
		return
	}
	k := f.Key()
	if t.inside[k] += n; t.inside[k] == 0 {
		delete(t.inside, k)
	}
}

// SetServiceRanges replaces the ranges in which only services have addresses: a
// flow that is translated although it was sent to an address there that is no
// frontend is judged as if there were a tombstone. Addresses of which another
// proxy serves any port are exempt.
func (t *Table) SetServiceRanges(ranges ...netip.Prefix) Change {
	defer t.lock()()
	var ch Change
	var next []serviceRange
	for _, r := range ranges {
		r = r.Masked()
		switch {
		case !r.IsValid() || slices.ContainsFunc(next, func(x serviceRange) bool { return x.Prefix == r }):
			continue
		case !slices.ContainsFunc(t.services, func(x serviceRange) bool { return x.Prefix == r }):
			ch.Ranges = append(ch.Ranges, r)
		}
		next = append(next, serviceRange{r, "service range " + r.String()})
	}
	t.services = next
	return ch
}

func (t *Table) serviceRange(a netip.Addr) *serviceRange {
	for i := range t.services {
		if t.services[i].Contains(a) {
			return &t.services[i]
		}
	}
	return nil
}

func sortedByKey(m map[Key][]claim) []Key {
	keys := make([]Key, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, compareKeys)
	return keys
}

func compareKeys(a, b Key) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Proto, b.Proto),
		cmp.Compare(a.Ports.First, b.Ports.First), cmp.Compare(a.Ports.Last, b.Ports.Last))
}

// entry returns the entry of a key, a new one where there is none.
func (t *Table) entry(k Key) *entry {
	e := t.entries[k]
	if e == nil {
		e = &entry{}
		t.entries[k] = e
		t.scope[k.Scope()]++
		if k.Addr.IsUnspecified() {
			t.anyLocal++
		}
		if !k.Ports.Single() {
			ap := addrProto{k.Addr, k.Proto}
			if t.ranges[ap] == nil {
				t.ranges[ap] = &segments{}
			}
			t.ranges[ap].add(k.Ports, e)
			t.dirty = true
		}
	}
	return e
}

func (t *Table) remove(k Key) {
	e := t.entries[k]
	delete(t.entries, k)
	if t.scope[k.Scope()]--; t.scope[k.Scope()] == 0 {
		delete(t.scope, k.Scope())
	}
	if k.Addr.IsUnspecified() {
		t.anyLocal--
	}
	if !k.Ports.Single() {
		ap := addrProto{k.Addr, k.Proto}
		if t.ranges[ap].remove(e); len(t.ranges[ap].all) == 0 {
			delete(t.ranges, ap)
		}
		t.dirty = true
	}
}

// SetHost replaces what is known of this host's addresses. An address that it
// had and lost keeps the frontends that it had as tombstones, one that it has and
// on which node ports were certainly served and are not any more the node ports.
func (t *Table) SetHost(h Host) Change {
	now := map[netip.Addr]hostAddr{}
	for _, list := range [][]netip.Addr{h.Other, h.Served, h.Listed} {
		for _, a := range list {
			if !a.IsLoopback() {
				now[a.Unmap()] = hostAddr{ports: h.serves(a.Unmap())}
			}
		}
	}
	defer t.lock()()
	var ch Change
	for a, old := range t.hosts {
		if _, ok := now[a]; !ok {
			now[a] = hostAddr{was: true, ports: old.ports}
		}
	}
	var left []netip.Addr
	insiders := slices.ContainsFunc(h.Pods, func(p netip.Prefix) bool { return !slices.Contains(t.pods, p) })
	for a, is := range now {
		old, ok := t.hosts[a]
		if !ok || old != is || t.hidden && !h.HostPortsUnknown {
			ch.Hosts = append(ch.Hosts, a)
		}
		insiders = insiders || !is.was && (!ok || old.was)
		if old.ports == certain && is.ports == unserved {
			left = append(left, a)
		}
	}
	t.hidden = h.HostPortsUnknown
	slices.SortFunc(ch.Hosts, netip.Addr.Compare)
	loopback := h.loopback()
	if slices.ContainsFunc(loopback, func(p netip.Prefix) bool { return !slices.Contains(t.loopback, p) }) {
		ch.Ranges = append(ch.Ranges, loopback4)
	}
	t.hosts, t.pods, t.loopback = now, slices.Clone(h.Pods), loopback
	t.leave(left, &ch)
	if insiders {
		t.suspectInside(&ch)
	}
	return ch
}

// loops tells whether an address is loopback on which there may be node ports.
func (t *Table) loops(a netip.Addr) bool {
	if !a.Is4() || !a.IsLoopback() {
		return false
	}
	for _, p := range t.loopback {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// suspectInside notes that more flows come from inside than before.
func (t *Table) suspectInside(ch *Change) {
	for _, k := range slices.SortedFunc(maps.Keys(t.inside), compareKeys) {
		for _, c := range t.entries[k].claims {
			if !c.Foreign && c.Inside > 0 && c.Usable == 0 {
				ch.Suspects = append(ch.Suspects, Suspect{Key: k, Cause: CauseFirstBackend, Owner: c.Owner, Kind: c.Kind})
				break
			}
		}
	}
}

// leave buries the node ports of addresses on which they are not served any more.
func (t *Table) leave(addrs []netip.Addr, ch *Change) {
	if len(addrs) == 0 {
		return
	}
	var tombs []Tombstone
	for k, e := range t.entries {
		if !k.Addr.IsUnspecified() {
			continue
		}
		list := slices.Clone(e.tombs)
		for _, c := range e.claims {
			if !c.Foreign {
				list = append(list, t.tombstone(c.Frontend))
			}
		}
		for _, a := range addrs {
			for _, tomb := range list {
				if tomb.Kind == NodePort && a.Is4() == k.Addr.Is4() {
					tomb.Key.Addr = a
					tombs = append(tombs, tomb)
				}
			}
		}
	}
	slices.SortFunc(tombs, compareTombs)
	for _, tomb := range tombs {
		t.count(tomb.Key, -1)
		if t.bury(t.entry(tomb.Key), tomb) {
			ch.Buried = append(ch.Buried, tomb.Key)
		}
		t.settle(tomb.Key)
	}
	ch.Buried = slices.Compact(ch.Buried)
}

func compareTombs(a, b Tombstone) int {
	return cmp.Or(compareKeys(a.Key, b.Key), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Owner, b.Owner))
}

// HostPortsMatter tells whether flows may be left since host ports are not known.
func (t *Table) HostPortsMatter() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if !t.hidden {
		return false
	}
	for k, e := range t.entries {
		if h, ok := t.hosts[k.Addr]; !ok || h.was {
			continue
		}
		if slices.ContainsFunc(e.claims, func(c claim) bool { return c.balanced() }) ||
			slices.ContainsFunc(e.tombs, func(tomb Tombstone) bool { return tomb.Kind == LoadBalancerIP }) {
			return true
		}
	}
	return false
}

func (f *Frontend) balanced() bool { return f.Kind == LoadBalancerIP || f.Balanced }

// Has tells whether a frontend of ours is reached at a key.
func (t *Table) Has(k Key) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	e := t.entries[k]
	return e != nil && ours(e.claims)
}

// Frontends returns the frontends of ours, in order, each as the tombstone that
// it would leave.
func (t *Table) Frontends() []Tombstone {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var list []Tombstone
	for _, e := range t.entries {
		begin := len(list)
		for _, c := range e.claims {
			tomb := t.tombstone(c.Frontend)
			if !c.Foreign && !slices.ContainsFunc(list[begin:], func(o Tombstone) bool { return o.like(&tomb, t.policy) }) {
				list = append(list, tomb)
			}
		}
	}
	slices.SortFunc(list, compareTombs)
	return list
}

// Tombstones returns the frontends that are gone and not forgotten, in order.
// Others may live at the same place.
func (t *Table) Tombstones() []Tombstone {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var list []Tombstone
	for _, e := range t.entries {
		list = append(list, e.tombs...)
	}
	slices.SortStableFunc(list, compareTombs)
	return list
}

// Bury adds tombstones known from elsewhere (an earlier run). A frontend that
// exists is none.
func (t *Table) Bury(list ...Tombstone) Change {
	defer t.lock()()
	var ch Change
	for _, tomb := range list {
		f := Frontend{Proto: tomb.Key.Proto, Addr: tomb.Key.Addr, Ports: tomb.Key.Ports}
		if !f.sound() {
			continue
		}
		e := t.entries[tomb.Key]
		if e != nil && (t.lives(e, &tomb) ||
			slices.ContainsFunc(e.claims, func(c claim) bool {
				return !c.Foreign && c.Owner == tomb.Owner && c.Kind == tomb.Kind
			}) ||
			slices.ContainsFunc(e.tombs, func(o Tombstone) bool { return o.like(&tomb, t.policy) })) {
			continue
		}
		t.count(tomb.Key, -1)
		t.bury(t.entry(tomb.Key), tomb)
		t.settle(tomb.Key)
		t.allow(tomb.Key.Proto, tomb.Sweep)
		ch.Suspects = append(ch.Suspects, Suspect{
			Key: tomb.Key, Cause: CauseGone, Owner: tomb.Owner, Kind: tomb.Kind,
		})
		ch.Buried = append(ch.Buried, tomb.Key)
	}
	return ch
}

// Forget drops the tombstones at some keys: nothing that was translated for them
// is left.
func (t *Table) Forget(keys ...Key) {
	defer t.lock()()
	for _, k := range keys {
		if e := t.entries[k]; e != nil {
			t.count(k, -1)
			e.tombs = nil
			t.settle(k)
		}
	}
}
