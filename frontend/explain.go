package frontend

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Explain judges a flow and tells the steps in words, one a line.
func (t *Table) Explain(f *conntrack.Flow) (Verdict, []string) {
	ex := &explainer{}
	v := t.judge(f, ex)
	var steps []string
	say := func(format string, args ...any) { steps = append(steps, fmt.Sprintf(format, args...)) }

	dst := netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
	src := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	name := strings.ToUpper(conntrack.ProtoName(f.Proto))
	sweep := t.policy.Of(f.Proto)
	switch v.Reason {
	case NotSwept:
		say("the protocol is %s, which the policy (%s) does not sweep", name, t.policy)
		return v, steps
	case OtherZone:
		say("the flow is in conntrack zone %d; the zones that are judged are %v", f.Zone, t.zones)
		return v, steps
	case ExpectedFlow:
		say("a connection-tracking helper announced the flow (status EXPECTED): no service translated it")
		return v, steps
	}
	say("the protocol is %s, swept by the policy %q; the zone is %d; no helper expected the flow", name, sweep, f.Zone)
	say("its original destination %s is on %s", dst, t.placeOf(dst.Addr()))
	steps = append(steps, ex.steps...)
	if len(ex.steps) == 0 {
		say("no frontend and no tombstone matches that destination")
	}
	if f.Translated() {
		say("it is translated: answers come from %s", src)
	} else {
		say("it is not translated: answers come from the original destination itself")
	}
	switch v.Reason {
	case Serving:
		say("%s is among the valid backends of %s", src, v.Owner)
	case BackendGone:
		say("%s is not among the valid backends", src)
	case NoBackends:
		say("the frontend has no valid backend at all")
	case Untranslated:
		say("there are usable backends, so that a new flow would be translated")
	case AwaitingBackend:
		say("no backend is usable here: deleting the flow would only make it come back")
	case UncertainAddr:
		say("%s: the flow may be right", v.Why)
	case FrontendGone:
		say("it is still translated for a frontend that is gone")
	case ByPolicy:
		say("it is stale, but the policy that counts for it leaves it: \"off\" leaves all, \"unreplied\" what was answered")
	}
	return v, steps
}

// ExplainDestination tells in words, one a line, what flows to a destination meet
// when they are judged, and whether that is anything.
func (t *Table) ExplainDestination(proto uint8, dst netip.AddrPort) (steps []string, known bool) {
	ex := &explainer{}
	f := conntrack.Flow{Family: conntrack.FamilyOf(dst.Addr()), Proto: proto}
	f.Orig.Dst, f.Orig.DstPort = dst.Addr(), dst.Port()
	t.mu.RLock()
	t.survey(&scene{explain: ex}, &f)
	t.mu.RUnlock()
	return append([]string{"it is on " + t.placeOf(dst.Addr())}, ex.steps...), len(ex.steps) > 0
}

// placeOf tells what an address is to this host.
func (t *Table) placeOf(a netip.Addr) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if h, ok := t.hosts[a]; ok {
		return "an address " + h.String()
	}
	if t.loops(a) {
		return "loopback, where the proxy may or may not serve node ports"
	}
	return "no address of this host that is known here"
}

// String completes "an address ...".
func (h hostAddr) String() string {
	switch {
	case h.was:
		return "that this host had and lost"
	case h.ports == certain:
		return "of this host"
	case h.ports == uncertain:
		return "of this host on which the proxy may or may not serve node ports"
	}
	return "of this host outside the node-port address ranges"
}

// explainer takes notes while a flow is judged; nil takes none.
type explainer struct{ steps []string }

func (x *explainer) say(format string, args ...any) {
	x.steps = append(x.steps, fmt.Sprintf(format, args...))
}

func (x *explainer) claim(f *Frontend, c certainty, s *scene) {
	if x == nil {
		return
	}
	note := ""
	if c == uncertain {
		note = ", perhaps not served on this address"
	}
	if f.Foreign {
		note += ", served by another proxy"
	}
	x.say("it matches the %s %s of %s%s: valid backends %s, %d usable for new flows",
		f.Kind, f.Key(), f.Owner, note, f.Valid, f.Usable)
	if f.Inside > 0 {
		who := "neither this host nor one of its pods"
		if s.inside() {
			who = "this host or one of its pods"
		}
		x.say("for what this host and its pods send, %d are usable; the source %s is %s", f.Inside, s.src, who)
	}
	if f.Sweep != nil {
		x.say("that service has its own policy for the protocol: %q", *f.Sweep)
	}
}

func (x *explainer) unserved(f *Frontend) {
	if x == nil {
		return
	}
	x.say("the %s %s of %s has its port but is not served on this address", f.Kind, f.Key(), f.Owner)
}

func (x *explainer) orphan(r *serviceRange) {
	if x == nil {
		return
	}
	x.say("it is in the %s, and no service has that address and port", r.owner)
}

func (x *explainer) tombstone(owner string, k Kind) {
	if x == nil {
		return
	}
	x.say("it matches a tombstone: the %s of %s, which is gone", k, owner)
}

// String names the first few backends.
func (b Backends) String() string {
	const most = 8
	if b.Len() == 0 {
		return "none"
	}
	var names []string
	for _, x := range b.All()[:min(most, b.Len())] {
		if x.Port() == 0 {
			names = append(names, x.Addr().String()+" (same port)")
		} else {
			names = append(names, x.String())
		}
	}
	s := strings.Join(names, ", ")
	if n := b.Len() - most; n > 0 {
		s += fmt.Sprintf(" and %d more", n)
	}
	return s
}

// named tells whether people may mean this frontend by a name: its owner, the
// Service that owns it among other ports, or where it is reached.
func named(name, owner string, k Key) bool {
	return owner == name || strings.HasPrefix(owner, name+":") || strings.EqualFold(k.String(), name)
}

// Of tells whether name stands for the tombstone, as in FrontendsOf.
func (t *Tombstone) Of(name string) bool { return named(name, t.Owner, t.Key) }

// FrontendsOf returns the frontends that a name stands for, in order: a whole
// owner ("default/dns:udp"), a service ("default/dns"), or a Key's text.
func (t *Table) FrontendsOf(name string) []Frontend {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var list []Frontend
	for _, fs := range t.units {
		for i := range fs {
			if named(name, fs[i].Owner, fs[i].Key()) {
				list = append(list, fs[i])
			}
		}
	}
	slices.SortFunc(list, func(a, b Frontend) int {
		return cmp.Or(strings.Compare(a.Owner, b.Owner), compareKeys(a.Key(), b.Key()))
	})
	return list
}

// Reaches tells whether a flow was sent to where a key is.
func (t *Table) Reaches(k Key, f *conntrack.Flow) bool {
	if k.Proto != f.Proto || !k.Ports.Contains(f.Orig.DstPort) {
		return false
	}
	if !k.Addr.IsUnspecified() {
		return k.Addr == f.Orig.Dst
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	_, local := t.hosts[f.Orig.Dst]
	return (local || t.loops(f.Orig.Dst)) && k.Addr.Is4() == f.Orig.Dst.Is4()
}
