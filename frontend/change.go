package frontend

import (
	"net/netip"
	"slices"
)

// Cause says why flows of a frontend may have become stale.
type Cause uint8

// The causes. Everything else that can happen to a frontend (a further backend,
// say) leaves each flow as right or wrong as it was.
const (
	// CauseBackendLost: flows to the backends in Suspect.Lost.
	CauseBackendLost Cause = iota
	// CauseFirstBackend: untranslated flows, which nothing could be done for
	// until now.
	CauseFirstBackend
	// CauseGone: translated flows to a frontend that is gone.
	CauseGone
	// CauseNew: all flows, which were nobody's, or not to be deleted, until now.
	CauseNew
)

var causeNames = [...]string{"backend-lost", "first-backend", "frontend-gone", "frontend-new"}

// String returns the cause's word in reports.
func (c Cause) String() string { return causeNames[c] }

// Suspect is a frontend some of whose flows may have become stale.
type Suspect struct {
	Key   Key
	Cause Cause
	// Lost are the backends that are no longer valid, for CauseBackendLost and
	// CauseGone. Port 0 stands for the port that the client sent to.
	Lost  []netip.AddrPort
	Owner string
	Kind  Kind
}

// Change is what an update of the Table makes suspect. No flow outside it can
// have become stale by the update.
type Change struct {
	Suspects []Suspect
	// Hosts are addresses that this host got or lost, or on which node ports are
	// now served otherwise: all flows to them are suspect.
	Hosts []netip.Addr
	// Ranges are new service ranges, or loopback where node ports are now served:
	// all flows to addresses in them are suspect.
	Ranges []netip.Prefix
	// Buried are the keys at which the update left a tombstone, for whoever is to
	// forget it. What it makes suspect is said by the others.
	Buried []Key
}

// Empty tells whether nothing became suspect.
func (c *Change) Empty() bool { return len(c.Suspects)+len(c.Hosts)+len(c.Ranges) == 0 }

// Add makes c the union of both changes, the order of their suspects kept.
func (c *Change) Add(o Change) {
	c.Suspects = append(c.Suspects, o.Suspects...)
	for _, a := range o.Hosts {
		if !slices.Contains(c.Hosts, a) {
			c.Hosts = append(c.Hosts, a)
		}
	}
	c.Ranges = append(c.Ranges, o.Ranges...)
	c.Buried = append(c.Buried, o.Buried...)
}

// ours tells whether one of the claims is not a foreign proxy's.
func ours(claims []claim) bool {
	return slices.ContainsFunc(claims, func(c claim) bool { return !c.Foreign })
}

// begins tells whether a step gives new flows a backend to go to that they did not
// have: those from anywhere, those that this host and its pods send, and those to
// what is not perhaps switched off (ExternalIP; whoever can ask the rules has to look
// there too).
func begins(before, after []claim) bool {
	for _, has := range []func(claim) bool{
		func(c claim) bool { return c.Usable > 0 },
		func(c claim) bool { return c.Usable+c.Inside > 0 },
		func(c claim) bool { return c.Usable > 0 && c.Kind != ExternalIP },
		func(c claim) bool { return c.Usable+c.Inside > 0 && c.Kind != ExternalIP },
	} {
		ours := func(c claim) bool { return !c.Foreign && has(c) }
		if !slices.ContainsFunc(before, ours) && slices.ContainsFunc(after, ours) {
			return true
		}
	}
	return false
}

// balanced tells whether a claim may have a host port beside it that is not known.
func balanced(claims []claim) bool {
	return slices.ContainsFunc(claims, func(c claim) bool { return !c.Foreign && c.balanced() })
}

// allows returns what may be deleted of the flows to all of the claims, at least
// one of which is ours, under a policy.
func allows(claims []claim, policy Sweep) Sweep {
	least := All
	for _, c := range claims {
		if !c.Foreign {
			least = min(least, c.sweep(policy))
		}
	}
	return least
}

// sweep returns what may be deleted of the frontend's flows under a policy.
func (f *Frontend) sweep(policy Sweep) Sweep {
	if f.Sweep != nil {
		return *f.Sweep
	}
	return policy
}

// compare adds what the step from one set of claims to the other makes suspect
// at a key. Each key counts by itself, which is enough though several keys may
// match one flow: a flow is kept by the union of what they say, so that it can
// only become stale where one of them takes something back or begins to ask for
// something.
//
// For the same reason node ports, host ports and the others count apart: at one
// address a node port may be served where a host port is not, so that the claim
// of one kind is no substitute for that of another.
func (c *Change) compare(k Key, policy Sweep, before, after []claim) {
	for _, class := range []func(claim) bool{
		func(x claim) bool { return x.Kind == NodePort },
		func(x claim) bool { return x.Kind == HostPort },
		func(x claim) bool { return x.Kind != NodePort && x.Kind != HostPort },
	} {
		c.compareClass(k, policy, only(before, class), only(after, class))
	}
}

func only(claims []claim, class func(claim) bool) (list []claim) {
	for _, x := range claims {
		if class(x) {
			list = append(list, x)
		}
	}
	return list
}

func (c *Change) compareClass(k Key, policy Sweep, before, after []claim) {
	was, is := ours(before), ours(after)
	// What held flows back that overlapping claims or tombstones allow.
	freed := balanced(before) && !balanced(after)
	s := Suspect{Key: k}
	if is {
		i := slices.IndexFunc(after, func(c claim) bool { return !c.Foreign })
		s.Owner, s.Kind = after[i].Owner, after[i].Kind
	} else if len(before) > 0 {
		s.Owner, s.Kind = before[0].Owner, before[0].Kind
	}
	switch {
	case !was && is, is && (freed || allows(after, policy) > allows(before, policy)):
		s.Cause = CauseNew
		c.Suspects = append(c.Suspects, s)
		return
	case len(after) == 0 && len(before) > 0, was && !is && (freed || allows(before, policy) < All):
		// A foreign claim that goes counts too: it may have covered a tombstone
		// for every address of this host. One of ours that leaves a foreign one
		// behind may have held back what an overlapping one allows.
		s.Cause, s.Lost = CauseGone, lost(before, after)
		c.Suspects = append(c.Suspects, s)
		return
	}
	// Also where it is another proxy's now, and nothing of it ours to clean: its
	// backends count where a frontend of ours overlaps (a range, every address).
	if s.Lost = lost(before, after); len(s.Lost) > 0 {
		s.Cause = CauseBackendLost
		c.Suspects = append(c.Suspects, s)
	}
	if begins(before, after) {
		s.Cause, s.Lost = CauseFirstBackend, nil
		c.Suspects = append(c.Suspects, s)
	}
}

// lost returns the backends that were valid by the claims before and are not by
// those after.
func lost(before, after []claim) []netip.AddrPort {
	var list []netip.AddrPort
	for _, b := range before {
		if slices.ContainsFunc(after, func(a claim) bool { return slices.Equal(a.Valid.sorted, b.Valid.sorted) }) {
			continue
		}
		for _, x := range b.Valid.sorted {
			if !slices.ContainsFunc(after, func(a claim) bool { return a.Valid.has(x) }) {
				list = append(list, x)
			}
		}
	}
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}
