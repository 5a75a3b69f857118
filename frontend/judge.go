package frontend

import (
	"net/netip"
	"slices"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Judge tells what is to be done with a flow, and why. It is a pure function of
// the table and the flow: where the flow was sent decides whose it is, where its
// answers come from whether it is right. Reply.Dst (masquerade, hairpin) does
// not matter, nor does anything else that shares a port or address with a
// service.
//
// The cost is that of at most four look-ups and, in a set of n valid backends,
// a binary search; it does not grow with the number of frontends.
func (t *Table) Judge(f *conntrack.Flow) Verdict { return t.judge(f, nil) }

func (t *Table) judge(f *conntrack.Flow, ex *explainer) Verdict {
	t.mu.RLock()
	defer t.mu.RUnlock()
	policy := t.policy.Of(f.Proto)
	switch {
	case t.most[f.Proto] == Off:
		return Verdict{Reason: NotSwept}
	case !slices.Contains(t.zones, f.Zone):
		if policy == Off {
			return Verdict{Reason: NotSwept}
		}
		return Verdict{Reason: OtherZone}
	case f.Status&conntrack.StatusExpected != 0:
		return Verdict{Reason: ExpectedFlow}
	}
	s := scene{
		table: t,
		src:   f.Orig.Src,
		to:    netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort),
		dport: f.Orig.DstPort,

		policy: policy,

		explain: ex,
	}
	t.survey(&s, f)
	v := s.verdict(f.Translated())
	if !s.limited {
		s.sweep = policy
	}
	switch {
	case policy == Off && s.sweep == Off:
		return Verdict{Reason: NotSwept}
	case s.sweep == Off || s.sweep == Unreplied && f.Replied():
		if v.Else = NotSwept; v.Action == Delete {
			v.Action, v.Reason = Keep, ByPolicy
		}
	}
	return v
}

// What is not known of an address, as Verdict.Why.
const (
	whyNodePort = "the proxy may or may not serve node ports on this address"
	whyLoopback = "on loopback kube-proxy serves node ports in its mode iptables alone"
	whyHidden   = "no Pods are known: a host port of this host may translate it"
	whyExternal = "the proxy may have been told to serve no external addresses (AllowServiceExternalIPs)"
)

// scene collects what the table says of one flow's destination.
type scene struct {
	table *Table
	src   netip.Addr     // who sends
	to    netip.AddrPort // where the flow goes
	dport uint16
	host  hostAddr // of the destination
	local bool     // the destination is this host's
	loop  bool     // it is loopback, on which there may be node ports

	first     *Frontend // of ours that matches
	serving   *Frontend // has the flow's backend among its valid ones
	backends  bool      // one of ours has a valid backend
	usable    *Frontend // certainly has backends for new flows
	uncertain *Frontend // may be served here
	perhaps   bool      // and may have backends for new flows
	certain   bool      // one of ours is certainly served here
	foreign   bool      // another proxy's

	hidden   bool      // the destination may be served by a host port that is not known
	balanced *Frontend // beside this one of ours

	gone      bool // a tombstone matches
	goneOwner string
	goneKind  Kind
	lbGone    bool // one of them is a load balancer's

	policy  Sweep // of the protocol
	sweep   Sweep // the least that what matches allows
	limited bool  // sweep is set

	explain *explainer // nil: nobody wants to know
}

func (t *Table) survey(s *scene, f *conntrack.Flow) {
	dst := f.Orig.Dst
	s.host, s.local = t.hosts[dst]
	if s.loop = !s.local && t.loops(dst); s.loop {
		s.host.ports = uncertain
	}
	s.hidden = t.hidden && s.local && !s.host.was
	t.surveyAt(s, dst, f)
	if t.anyLocal > 0 && (s.local || s.loop) {
		t.surveyAt(s, anyAddr(f.Family), f)
	}
	switch {
	case s.first != nil:
	case s.gone:
		s.explain.tombstone(s.goneOwner, s.goneKind)
	case !s.foreign && t.foreign[dst] == 0:
		if r := t.serviceRange(dst); r != nil {
			s.gone, s.goneOwner, s.goneKind = true, r.owner, ClusterIP
			s.explain.orphan(r)
		}
	}
}

func (t *Table) surveyAt(s *scene, addr netip.Addr, f *conntrack.Flow) {
	if e := t.entries[Key{addr, f.Proto, Port(f.Orig.DstPort)}]; e != nil {
		s.add(e)
	}
	if len(t.ranges) == 0 {
		return
	}
	if r := t.ranges[addrProto{addr, f.Proto}]; r != nil {
		r.find(f.Orig.DstPort, s.add)
	}
}

func (s *scene) add(e *entry) {
	for i := range e.tombs {
		tomb := &e.tombs[i]
		everyAddr := tomb.Key.Addr.IsUnspecified()
		// That of a node port at one address says itself that it was served there.
		if tomb.Kind == NodePort && !everyAddr || s.served(tomb.Kind, everyAddr) != unserved {
			s.bury(tomb.Owner, tomb.Kind, tomb.Sweep)
		}
	}
	for i := range e.claims {
		fe := e.claims[i].Frontend
		everyAddr := !fe.Addr.IsValid()
		served := s.served(fe.Kind, everyAddr)
		switch {
		case served == unserved:
			s.explain.unserved(fe)
			if s.loop {
				s.spare(fe)
			}
			continue
		case s.host.was && (everyAddr || fe.Kind == HostPort):
			if !fe.Foreign {
				s.bury(fe.Owner, fe.Kind, fe.Sweep)
			}
			continue
		}
		usable := fe.Usable > 0 || fe.Inside > 0 && s.inside()
		s.explain.claim(fe, served, s)
		if fe.Valid.Contains(s.to, s.dport) && (s.serving == nil || s.serving.Foreign) {
			s.serving = fe
		}
		if fe.Foreign {
			s.foreign = true
			continue
		}
		if s.first == nil {
			s.first = fe
			s.limited = false // what a tombstone allows does not matter any more
		}
		if s.hidden && fe.balanced() {
			s.balanced = fe
		}
		s.limit(fe.Sweep)
		s.backends = s.backends || fe.Valid.Len() > 0
		if served == uncertain && (usable || fe.Kind != ExternalIP) {
			if s.uncertain == nil || usable {
				s.uncertain, s.perhaps = fe, s.perhaps || usable
			}
			continue
		}
		s.certain = true
		if usable && s.usable == nil {
			s.usable = fe
		}
	}
}

// spare lets what is not judged on loopback, but may be served there all the same
// (a host port, by CNI's portmap), hold a node port's judgement back.
func (s *scene) spare(fe *Frontend) {
	s.foreign = true
	if s.serving == nil && fe.Valid.Contains(s.to, s.dport) {
		s.serving = fe
	}
}

// inside tells whether the sender is this host or one of its pods: the proxy sends
// their flows to any backend of the cluster, as if they had gone to a load balancer
// outside and come back (serviceExternalChainName of kube-proxy).
func (s *scene) inside() bool {
	if s.src.IsLoopback() {
		return true
	}
	if h, ok := s.table.hosts[s.src]; ok {
		return !h.was
	}
	for _, p := range s.table.pods {
		if p.Contains(s.src) {
			return true
		}
	}
	return false
}

// served tells whether a frontend of a kind can be met at the destination. Node
// ports, host ports and what stands for every address are met only on this
// host's own. External addresses a proxy may have been told not to serve
// (AllowServiceExternalIPs of kube-proxy 1.37).
func (s *scene) served(k Kind, everyAddr bool) certainty {
	switch {
	case k == NodePort:
		return s.host.ports // unserved where the destination is not this host's
	case (everyAddr || k == HostPort) && !s.local:
		return unserved
	case k == ExternalIP:
		return uncertain
	}
	return certain
}

// bury takes note of a tombstone. What it allows counts where nothing of ours is
// met.
func (s *scene) bury(owner string, k Kind, sweep *Sweep) {
	if s.first == nil {
		s.limit(sweep)
	}
	if !s.gone {
		s.gone, s.goneOwner, s.goneKind = true, owner, k
	}
	s.lbGone = s.lbGone || k == LoadBalancerIP
}

// limit takes note of what something that matches allows to be deleted.
func (s *scene) limit(sweep *Sweep) {
	if sweep == nil {
		sweep = &s.policy
	}
	if !s.limited || *sweep < s.sweep {
		s.sweep, s.limited = *sweep, true
	}
}

func (s *scene) verdict(translated bool) Verdict {
	say := func(a Action, r Reason, f *Frontend) Verdict {
		return Verdict{Action: a, Reason: r, Owner: f.Owner, Kind: f.Kind}
	}
	switch {
	case s.first == nil:
		if !s.gone || !translated || s.foreign {
			return Verdict{Reason: NoFrontend}
		}
		v := Verdict{Action: Delete, Reason: FrontendGone, Owner: s.goneOwner, Kind: s.goneKind}
		if s.hidden && s.lbGone {
			v = unsure(v, whyHidden)
		}
		return v
	case s.serving != nil:
		// Also where the flow is untranslated: a backend at the frontend's own
		// address and port (a host-network pod behind its node's address) is
		// reached by a translation that changes nothing.
		return say(Keep, Serving, s.serving)
	case translated:
		v := say(Delete, BackendGone, s.first)
		if !s.backends {
			v.Reason = NoBackends
		}
		if s.balanced != nil {
			v.Owner, v.Kind = s.balanced.Owner, s.balanced.Kind
			v = unsure(v, whyHidden)
		}
		return v
	case s.usable != nil:
		return say(Delete, Untranslated, s.usable)
	case s.uncertain != nil && (!s.certain || s.perhaps):
		v := say(Delete, Untranslated, s.uncertain)
		switch {
		case s.uncertain.Kind == ExternalIP:
			v = unsure(v, whyExternal)
		case s.loop:
			v = unsure(v, whyLoopback)
		default:
			v = unsure(v, whyNodePort)
		}
		if !s.perhaps { // nothing to translate it to, if it were
			v.Else = NotSwept
		}
		return v
	default:
		return say(Keep, AwaitingBackend, s.first)
	}
}

// unsure keeps what would be deleted.
func unsure(v Verdict, why string) Verdict {
	v.Else = v.Reason
	v.Action, v.Reason, v.Why = Keep, UncertainAddr, why
	return v
}
