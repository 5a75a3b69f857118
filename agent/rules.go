package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/sweep"
)

// Rules is what the NAT rules of the moment can do with flows. *ruleset.Verdicts
// has the methods.
type Rules interface {
	// Judge judges by the rules: frontend.Serving is a flow as they may make it
	// now. The policy is to allow everything where the agent has sources.
	sweep.Judge
	sweep.Confirmer
	sweep.Scoper
	// Reload reads the rules anew if they have changed, and tells what that makes
	// suspect.
	Reload(ctx context.Context) (ruleset.Change, error)
	// Err tells why nothing is judged now; nil: it is.
	Err() error
	// Outcome tells what the rules may do with a packet to a destination, wherever
	// it comes from.
	Outcome(d ruleset.Destination) *ruleset.Outcome
	// Seen returns the destinations that rules are known to have translated, and
	// See adds some.
	Seen() []ruleset.Destination
	See(list ...ruleset.Destination)
}

// Where the rules can be read, settling is exact. A flow that is stale by the
// desired state and that the present rules would make again is left alone: the
// proxy is behind, and deleting would only make it anew. A frontend is settled
// when nothing that the rules can still give it is wrong and one more pass, a
// moment later, finds nothing. What cannot be told (rules that are not
// understood, ranges that are too wide) goes by time, as without the rules.
const (
	// proofAfter is when that pass is made: a packet may meet the old rules and
	// its flow enter the table when the pass after the commit has gone by
	// (__nf_conntrack_confirm comes last, NFQUEUE may be in between).
	proofAfter = time.Second

	// slowReload is from where on reading the rules waits until a pass is done
	// that a commit has made urgent.
	slowReload = 50 * time.Millisecond
	// reloadShare bounds such reading to a tenth of one core.
	reloadShare = 10

	// lookFor bounds the time in which frontends are held against the rules for
	// one pass, mostLooks the destinations of one frontend.
	lookFor   = 100 * time.Millisecond
	mostLooks = 128
)

// rulesState is what the worker, which alone reads rules, remembers.
type rulesState struct {
	gen    uint32        // of the rules as they were read last
	read   bool          // gen is set
	took   time.Duration // by the last reading that found a change
	pause  time.Time     // no reading before
	failed error         // of the last reading
}

// have tells whether the rules of a generation were read.
func (s *rulesState) have(gen uint32) bool { return s.read && s.gen == gen && s.failed == nil }

// readRules sees to it that the rules are those of the job's generation, and
// tells whether they are.
func (a *Agent) readRules(ctx context.Context, gen uint32) bool {
	s := &a.ruleState
	if s.have(gen) && a.exact.Err() == nil {
		return true
	}
	now := a.now()
	if s.pause.After(now) {
		return false
	}
	_, err := a.exact.Reload(ctx)
	took := a.now().Sub(now)
	if s.took = took; took > slowReload {
		s.pause = a.now().Add((reloadShare - 1) * took)
	}
	if err == nil {
		err = a.exact.Err()
	}
	moved := errors.Is(err, ruleset.ErrStale) // already: flows are left for the pass that follows
	if ctx.Err() == nil && !moved {
		a.noteFailed(err, "settling goes by time")
	}
	s.gen, s.read = gen, !moved
	return err == nil || moved
}

// noteFailed notes, and logs where it is new, why the rules cannot be told.
func (a *Agent) noteFailed(err error, so string) {
	s := &a.ruleState
	switch {
	case err != nil && (s.failed == nil || s.failed.Error() != err.Error()):
		a.log.Warn("what the NAT rules do cannot be told now; "+so, "err", err)
	case err == nil && s.failed != nil:
		a.log.Info("what the NAT rules do can be told again")
	}
	s.failed = err
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told, a.untold = err == nil, ""
	if err != nil {
		a.untold = err.Error()
	}
}

// compare compares the frontends of a job with the rules, before its pass begins.
func (a *Agent) compare(j *job) {
	until := a.now().Add(lookFor)
	for k := range j.keys {
		if a.now().After(until) {
			return
		}
		v := a.follows(k)
		a.mu.Lock()
		a.noteFollows(k, v, j.start)
		a.mu.Unlock()
	}
}

// following is how the rules stand to a frontend.
type following struct {
	known  bool // else it cannot be told
	behind bool
	// What they may still give, wrongly.
	to    netip.AddrPort
	owner string
	kind  frontend.Kind
	rule  ruleset.Rule
	text  string
}

// follows tells whether all that the rules may give to new flows of a frontend is
// right: what they may make is put before the table, as flows.
func (a *Agent) follows(k frontend.Key) (s following) {
	if k.Proto == 0 {
		return s
	}
	addrs := []netip.Addr{k.Addr}
	if k.Addr.IsUnspecified() {
		addrs = a.hostAddrs(conntrack.FamilyOf(k.Addr))
	}
	if ports := int(k.Ports.Last-k.Ports.First) + 1; len(addrs) == 0 || len(addrs)*ports > mostLooks {
		return s
	}
	s.known = true
	for _, addr := range addrs {
		for port := int(k.Ports.First); port <= int(k.Ports.Last); port++ {
			dst := netip.AddrPortFrom(addr, uint16(port))
			o := a.exact.Outcome(ruleset.Destination{Proto: k.Proto, Addr: dst})
			if o.Any || len(o.Ranges) > 0 || o.Untranslated && len(o.To) > 0 {
				return following{}
			}
			may := o.To
			if o.Untranslated {
				may = []netip.AddrPort{dst}
			}
			for _, to := range may {
				f := conntrack.Flow{Family: conntrack.FamilyOf(addr), Proto: k.Proto}
				f.Orig.Dst, f.Orig.DstPort = addr, uint16(port)
				f.Reply.Src, f.Reply.SrcPort = to.Addr(), to.Port()
				v := a.table.Judge(&f)
				if v.Action != frontend.Delete {
					continue
				}
				if to == dst { // or what translates is no rule: eBPF, a userland proxy
					return following{}
				}
				if !s.behind {
					s.behind, s.to, s.owner, s.kind, s.rule, s.text = true, to, v.Owner, v.Kind, o.By, o.String()
				}
			}
		}
	}
	return s
}

// hostAddrs are this host's addresses of a family, as the sources know them.
func (a *Agent) hostAddrs(family conntrack.Family) (list []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.feeds {
		for _, addrs := range [][]netip.Addr{f.host.Listed, f.host.Other} {
			for _, addr := range addrs {
				if conntrack.FamilyOf(addr) == family {
					list = append(list, addr)
				}
			}
		}
	}
	return list
}

// noteFollows notes how the rules stand to a frontend as a pass begins. Rules that
// are behind for a whole window disagree.
func (a *Agent) noteFollows(k frontend.Key, s following, pass time.Time) {
	x := a.watches.keys[k]
	if x == nil {
		return
	}
	switch {
	case !s.known:
		x.followed, x.behind = time.Time{}, time.Time{}
	case !s.behind:
		if x.behind = (time.Time{}); x.followed.IsZero() {
			x.followed = pass
		}
	default:
		if x.followed = (time.Time{}); x.behind.IsZero() {
			x.behind = pass
		}
	}
	a.watches.at = time.Time{}
	if d := x.disagrees; d != nil && d.byRule() && (!s.known || !s.behind || s.to != d.Backend) {
		x.disagrees = nil
		a.agrees(d)
	}
	if x.disagrees == nil && s.behind && pass.Sub(x.behind) >= a.watches.window {
		x.disagrees = &Disagreement{
			Frontend: k.String(), Owner: s.owner, Kind: s.kind, Backend: s.to, Since: x.behind, Rule: s.rule.String(),
			Evidence: "the rules may give: " + s.text,
		}
		a.disagree(x.disagrees)
	}
}

// rules asks the rules whether they would make a flow again that is stale by the
// desired state, and by which of them.
func (c cautious) rules(f *conntrack.Flow) (again ruleset.Again, by string) {
	if !c.job.exact {
		return ruleset.Untold, ""
	}
	return ruleset.Ask(c.exact, f)
}

// Confirm implements sweep.Confirmer. What the rules cannot tell goes by time, and
// is not for them to confirm. What they do not confirm is not deleted.
func (c cautious) Confirm() error {
	if !c.job.relied {
		return nil
	}
	err := c.exact.Err()
	if err != nil && !errors.Is(err, ruleset.ErrStale) {
		return nil
	}
	if err == nil {
		err = c.exact.Confirm()
	}
	if err != nil {
		c.mu.Lock()
		c.doubts.undo(c.job.start)
		c.mu.Unlock()
	}
	return err
}

// leave leaves a flow that the rules would make again, and sees to it that it is
// looked at when they change. When that is so for a whole window, they disagree:
// not every outcome can be told by the destination alone (rules of the hook
// prerouting, say, do nothing with what this host sends), so that a flow may know
// more than the comparison with a frontend. The rule is "" where none makes it.
func (c cautious) leave(f *conntrack.Flow, v frontend.Verdict, m ruleset.Again, rule string) {
	a, x := c.Agent, doubtOf(f)
	a.mu.Lock()
	defer a.mu.Unlock()
	if m == ruleset.Always || a.doubts[x].deleted.Equal(c.job.start) {
		delete(a.doubts, x) // it was not deleted, or is no wonder
	}
	keys := a.watches.find(f, a.table.Reaches)
	if len(keys) == 0 {
		if k := a.watchFound(c.job, f, v); k != nil {
			keys = append(keys, *k)
		}
	}
	for _, k := range keys {
		if m == ruleset.Moved {
			a.watches.restart(a.watches.keys[k], c.job.start)
			continue
		}
		s := sight{flow: f, verdict: v, pass: c.job.start, left: true, rule: rule}
		if d := a.watches.found(k, s); d != nil {
			a.disagree(d)
		}
	}
}

// An agent without sources goes by the rules alone: what they may give is what is
// desired. There is nothing to settle, but rules are not always written at once.
const (
	// byRulesPoll is the time between two questions for the generation, which is
	// all that tells of a change.
	byRulesPoll = 50 * time.Millisecond

	// quietAfter is how long the generation must stand still for a pass, and
	// quietMost how long one waits for that: a script of single commands makes
	// generations that nobody wants.
	quietAfter = 40 * time.Millisecond
	quietMost  = time.Second

	// goneAfter is how long there must be no rule for what is translated. A
	// firewall that is reloaded piece by piece, or dockerd when it starts beside
	// containers that live on, takes its rules away for seconds; and nothing is
	// lost by flows to what is not published any more.
	goneAfter = 30 * time.Second
)

// alone is what an agent by rules alone remembers. Fields are under Agent.mu.
type alone struct {
	gen        uint32    // of the last pass for a change, as it began
	moving     uint32    // the latest one known
	moved      time.Time // when it was noticed
	since      time.Time // the first that no pass has seen
	again      bool      // the last pass is to be made again
	pending    look      // what that was to look at
	proof      look      // what is to be looked at once more, at proofAt
	proofAt    time.Time
	goneAt     time.Time // when flows without a rule are to be looked at again
	candidates doubts
}

// planByRules is plan for such an agent.
func (a *Agent) planByRules(j *job, now time.Time, until func(time.Time)) *job {
	r := &a.alone
	if j.gen != r.moving {
		r.moving, r.moved = j.gen, now
		if r.since.IsZero() {
			r.since = now
		}
	}
	quiet := r.moved.Add(quietAfter)
	if most := r.since.Add(quietMost); most.Before(quiet) {
		quiet = most
	}
	due := func(t time.Time) bool {
		if t.IsZero() || t.After(now) {
			until(t)
			return false
		}
		return true
	}
	switch {
	case !due(a.nextPass) && !a.nextPass.IsZero():
		return nil
	case (j.gen != r.gen || r.again) && due(quiet):
		r.proofAt, r.proof = now.Add(proofAfter), look{}
		r.gen, r.again, r.since = j.gen, false, time.Time{}
		return j
	case due(r.proofAt):
		r.proofAt = time.Time{}
		j.look = r.proof
		return j
	case due(r.goneAt):
		r.goneAt = time.Time{}
		j.full = true
		return j
	}
	until(now.Add(byRulesPoll))
	return nil
}

// patient is the rules as a judge that waits before it takes one for gone.
type patient struct {
	*Agent
	job *job
	// waiting: some rule may be gone.
	waiting bool
}

// Judge implements sweep.Judge.
func (p patient) Judge(f *conntrack.Flow) frontend.Verdict {
	v := p.exact.Judge(f)
	gone := v.Reason == frontend.FrontendGone
	if !gone && !p.waiting {
		return v
	}
	a := p.Agent
	x := doubt{flowKey(f), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !gone {
		if v.Reason == frontend.Serving {
			delete(a.alone.candidates, x)
		}
		return v
	}
	if a.alone.candidates.confirmed(x, p.job.start, goneAfter) {
		return v
	}
	if at := p.job.start.Add(goneAfter); a.alone.goneAt.IsZero() || a.alone.goneAt.After(at) {
		a.alone.goneAt = at
	}
	v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
	return v
}

// Confirm implements sweep.Confirmer.
func (p patient) Confirm() error { return p.exact.Confirm() }

// readForPass reads the rules and tells a job what they have made suspect.
func (a *Agent) readForPass(ctx context.Context, j *job) error {
	ch, err := a.exact.Reload(ctx)
	if err != nil {
		return fmt.Errorf("reading the NAT rules: %w", err)
	}
	a.noteFailed(a.exact.Err(), "no flow is judged")
	made, full := suspects(ch)
	a.mu.Lock()
	defer a.mu.Unlock()
	r := &a.alone
	j.change.Add(made)
	j.change.Add(r.pending.change)
	j.full = j.full || full || r.pending.full
	r.pending = look{}
	if !r.proofAt.IsZero() {
		r.proof = look{change: j.change, full: j.full}
	}
	return nil
}

// keep keeps what a pass was about that failed, or whose rules changed under it.
func (a *Agent) keep(j *job, p *Pass) {
	stale := errors.Is(a.exact.Err(), ruleset.ErrStale) || p.Report.Unconfirmed > 0
	a.mu.Lock()
	defer a.mu.Unlock()
	a.saved.dirty = true // flows may have shown more of what rules translate
	a.alone.candidates.forget(j.start.Add(-2 * goneAfter))
	if p.Err == nil && !stale {
		return
	}
	a.alone.pending.change.Add(j.change)
	a.alone.pending.full = a.alone.pending.full || j.full
	a.alone.again = true
}

// suspects puts a change of the rules into the planner's words, perhaps wider.
func suspects(ch ruleset.Change) (c frontend.Change, full bool) {
	for _, s := range ch.Suspects {
		protos := []uint8{s.Proto}
		if s.Proto == 0 {
			protos = []uint8{conntrack.UDP, conntrack.TCP, conntrack.SCTP}
		}
		addrs := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
		if s.Prefix.IsValid() {
			addrs = []netip.Addr{s.Prefix.Addr()}
			if !s.Prefix.IsSingleIP() {
				addrs[0] = netip.IPv6Unspecified()
				if s.Prefix.Addr().Is4() {
					addrs[0] = netip.IPv4Unspecified()
				}
			}
		}
		for _, proto := range protos {
			for _, addr := range addrs {
				c.Suspects = append(c.Suspects, frontend.Suspect{
					Key:   frontend.Key{Addr: addr, Proto: proto, Ports: frontend.Ports{First: s.MinPort, Last: s.MaxPort}},
					Cause: frontend.CauseNew, Kind: frontend.Rule,
				})
			}
		}
	}
	return c, ch.All
}
