// Package agent keeps a host clean continuously: it takes frontends from
// sources, watches what changes until it is settled, and sweeps.
//
//	source ──▶ feed ──▶ frontend.Table ──▶ Change ──▶ watches ──▶ sweep.Planner
//	                          ▲                          ▲              │
//	                          │ judge                    │ found        ▼
//	                          └──────────────────── sweep.Sweeper ◀── Plan
//
// Sources only ever wait for a lock that is held for moments; what asks the
// kernel runs in one worker, one pass at a time.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/sweep"
)

// Config is what an Agent goes by. Live changes are made with Agent.Reconfigure.
type Config struct {
	Policy    frontend.Policy
	Zones     []uint16
	Families  []conntrack.Family
	NodePorts []netip.Prefix

	// DryRun judges and deletes nothing.
	DryRun bool

	Window     time.Duration // without a stale flow until a change is settled
	FullPass   time.Duration // between periodic full passes; 0: none
	WalkBudget float64       // share of one core over a minute that walks may take

	DeletesPerSecond int           // 0: no limit
	ShrinkHold       time.Duration // 0: no hold
	ShrinkMinimum    int           // frontends that must vanish at once for a hold

	StateFile string // "": none
}

// Ruleset tells of the service proxy's commits.
type Ruleset interface {
	// Generation returns a number that moves with every commit. trusted is false
	// where commits may go by unseen (iptables-legacy, IPVS, no nf_tables).
	Generation() (gen uint32, trusted bool)
}

// Observer is told what happens. Its methods must return at once, and must not
// ask the Agent anything.
type Observer interface {
	// Pass tells of a pass that has ended.
	Pass(p Pass)
	// Settled tells that a frontend, or an address of this host, is settled.
	Settled(s Settled)
	// Disagrees tells of a disagreement when it becomes known.
	Disagrees(d Disagreement)
}

// Settled is what became of a change.
type Settled struct {
	// After is the time from the first change that was not settled to the proof.
	After time.Duration
	// Repaired is the time from that change to the last stale flow that was found,
	// 0 where there was none, or only what a full pass found unasked.
	Repaired time.Duration
}

// Pass is one walk of the agent.
type Pass struct {
	Full   bool
	Start  time.Time
	Report sweep.Report
	Stale  []StaleCount
	Err    error
}

// StaleCount counts the stale flows that a pass found, by what they have in
// common.
type StaleCount struct {
	Owner    string
	Frontend string
	Kind     frontend.Kind
	Family   conntrack.Family
	Reason   frontend.Reason
	Flows    int
}

// Agent is made by New and runs once.
type Agent struct {
	conn      sweep.Conn
	rules     Ruleset
	exact     Rules // nil: the rules cannot be read
	noRules   string
	byRules   bool // without sources
	ruleState rulesState
	log       *slog.Logger
	observers []Observer
	onFlow    func(f *conntrack.Flow, v frontend.Verdict, dryRun bool)
	warns     func() []string
	sources   []source.Source
	table     *frontend.Table
	wake      chan struct{}

	mu        sync.Mutex
	cfg       Config
	feeds     []*feed
	watches   *watches
	started   time.Time
	beat      time.Time // the loop's last turn
	trusted   bool      // as of then, whether the ruleset's generation is
	told      bool      // what the rules do was known when they were read last
	untold    string    // why it was not
	unasked   string    // why the rules are not asked at all; "": they are
	warnings  []string  // of what the agent can do nothing about
	ready     bool      // all sources complete and a first pass done
	lastFull  time.Time
	lastPass  *Pass
	nextPass  time.Time // no pass begins before, so that changes share one
	budget    float64   // seconds of walking that may be spent now
	budgetAt  time.Time
	failures  int // in a row
	retryAt   time.Time
	disagrees map[string]*Disagreement // by frontend and backend
	graves    map[frontend.Key]time.Time
	doubts    doubts
	forgot    time.Time // when doubts were
	saved     saver
	// doubtUntil: the first lists lacked most of what the state file told of.
	doubtUntil time.Time

	alone alone // of an agent that goes by rules alone
	late  sweep.LateAnswers
}

// Options are what an Agent works with.
type Options struct {
	Config  Config
	Conn    sweep.Conn
	Ruleset Ruleset
	// Rules, if set, makes settling exact. Without sources it is what flows are
	// judged by.
	Rules Rules
	// NoRules tells in words why Rules is not set.
	NoRules   string
	Sources   []source.Source
	Log       *slog.Logger // nil: none
	Observers []Observer
	// Warnings, if set, tells what else the status is to warn of. It must return at
	// once.
	Warnings func() []string
	// OnFlow, if set, is told of each stale flow before it is deleted: an audit.
	OnFlow func(f *conntrack.Flow, v frontend.Verdict, dryRun bool)
}

// New returns an agent that Run starts.
func New(o Options) *Agent {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.NoRules == "" {
		o.NoRules = "they are not read"
	}
	a := &Agent{
		conn: o.Conn, rules: o.Ruleset, exact: o.Rules, noRules: o.NoRules, byRules: o.Rules != nil && len(o.Sources) == 0,
		log: o.Log, observers: o.Observers, onFlow: o.OnFlow, warns: o.Warnings, sources: o.Sources,
		cfg:       o.Config,
		table:     frontend.NewTable(frontend.Options{Policy: o.Config.Policy, Zones: o.Config.Zones}),
		wake:      make(chan struct{}, 1),
		watches:   newWatches(o.Config.Window),
		disagrees: map[string]*Disagreement{},
		graves:    map[frontend.Key]time.Time{},
		doubts:    doubts{},
		alone:     alone{candidates: doubts{}},
	}
	for _, s := range o.Sources {
		a.feeds = append(a.feeds, &feed{a: a, name: s.Name(), units: map[string]size{}})
	}
	return a
}

func (a *Agent) now() time.Time { return time.Now() }

// stir makes the loop look at the state again. It never waits.
func (a *Agent) stir() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Reconfigure changes what can change while the agent runs: everything of
// Config but Policy, Zones, Families and StateFile.
func (a *Agent) Reconfigure(c Config) {
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.stir()
	c.Policy, c.Zones, c.Families, c.StateFile = a.cfg.Policy, a.cfg.Zones, a.cfg.Families, a.cfg.StateFile
	a.cfg = c
	a.watches.window, a.watches.at = c.Window, time.Time{}
	a.setHost()
}

// setHost unites what all sources know of this host's addresses.
func (a *Agent) setHost() {
	h := frontend.Host{NodePorts: a.cfg.NodePorts}
	for _, f := range a.feeds {
		h.Listed = append(h.Listed, f.host.Listed...)
		h.Other = append(h.Other, f.host.Other...)
		h.Pods = append(h.Pods, f.host.Pods...)
		h.HostPortsUnknown = h.HostPortsUnknown || f.host.HostPortsUnknown
	}
	a.changed(a.table.SetHost(h))
}

// setServiceRanges unites what all sources know of service ranges. While it is
// doubtful whether the first lists were whole, none counts: in them, whatever is
// missing would be taken for gone.
func (a *Agent) setServiceRanges() {
	var ranges []netip.Prefix
	if !a.doubtUntil.After(a.now()) {
		for _, f := range a.feeds {
			ranges = append(ranges, f.ranges...)
		}
	}
	a.changed(a.table.SetServiceRanges(ranges...))
}

// changed notes what became suspect. Before the first pass, which is a full one,
// there is nothing to note.
func (a *Agent) changed(ch frontend.Change) {
	for _, k := range ch.Buried {
		a.graves[k] = a.now()
	}
	a.doubts.renew(ch)
	if a.ready {
		a.watches.note(ch, a.now())
	}
	a.saved.dirty = true
}

// Run feeds from the sources and sweeps until ctx ends. It returns early only
// if a source cannot go on, or with a *StateFileError at once.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.mu.Lock()
	a.started, a.beat, a.budgetAt = a.now(), a.now(), a.now()
	a.budget = a.cfg.WalkBudget * 60
	a.mu.Unlock()
	if err := a.restore(); err != nil {
		return err
	}
	defer a.saved.file.release()

	var work sync.WaitGroup
	failed := make(chan error, len(a.sources))
	for i, s := range a.sources {
		work.Go(func() {
			if err := s.Run(ctx, a.feeds[i]); err != nil && ctx.Err() == nil {
				failed <- fmt.Errorf("source %s: %w", s.Name(), err)
			}
		})
	}
	err := a.loop(ctx, failed, &work)
	cancel()
	work.Wait()
	a.save()
	return err
}

// idle is the longest sleep of the loop, which shows by it that it lives.
const idle = 5 * time.Second

func (a *Agent) loop(ctx context.Context, failed <-chan error, work *sync.WaitGroup) error {
	done := make(chan Pass, 1)
	var pass chan Pass // done while a pass runs
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			if pass != nil {
				a.finish(<-pass)
			}
			return nil
		case err := <-failed:
			return err
		case <-a.wake:
		case <-timer.C:
		case p := <-pass:
			pass = nil
			a.finish(p)
		}
		job, sleep := a.plan(pass != nil)
		if job != nil {
			pass = done
			work.Go(func() { done <- a.run(ctx, job) })
		}
		timer.Reset(sleep)
		a.saveSometimes()
	}
}

// job is a pass to be made.
type job struct {
	look
	start   time.Time
	gen     uint32
	trusted bool // whether it moves with every commit
	dryRun  bool
	rate    int
	exact   bool // the rules are known as they are
	relied  bool // a flow is to go because they would not make it
}

// plan decides what to do now, and how long to sleep if nothing happens.
func (a *Agent) plan(busy bool) (*job, time.Duration) {
	gen, trusted := a.rules.Generation()
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	a.beat, a.trusted = now, trusted
	a.noteCircumstances(trusted)
	sleep := idle
	until := func(t time.Time) {
		if !t.IsZero() {
			sleep = max(0, min(sleep, t.Sub(now)))
		}
	}
	complete := true
	for _, f := range a.feeds {
		until(f.confirm(now))
		until(f.sayFault(now))
		complete = complete && f.complete
	}
	a.refill(now)
	if busy || !complete {
		return nil, sleep
	}
	if a.retryAt.After(now) {
		until(a.retryAt)
		return nil, sleep
	}
	if !a.ready && a.lastFull.IsZero() {
		a.bury()
	}
	if !a.doubtUntil.IsZero() {
		if until(a.doubtUntil); !a.doubtUntil.After(now) {
			a.doubtUntil = time.Time{}
			a.setServiceRanges()
		}
	}
	j := &job{start: now, gen: gen, trusted: trusted, dryRun: a.cfg.DryRun, rate: a.cfg.DeletesPerSecond}
	fullDue := a.cfg.FullPass > 0 && now.Sub(a.lastFull) >= a.cfg.FullPass
	if a.lastFull.IsZero() || fullDue && a.budget > 0 {
		if a.byRules {
			a.alone.gen, a.alone.moving, a.alone.again, a.alone.since = gen, gen, false, time.Time{}
		} else if a.lastFull.IsZero() && a.watches.keys[everything] == nil {
			a.watches.open(everything, now)
		}
		j.look = look{full: true, keys: a.watches.all()}
		a.begin(j, gen)
		return j, sleep
	}
	// afford is when walks will be within their share again.
	afford := now.Add(time.Duration(max(0, -a.budget)/a.cfg.WalkBudget*float64(time.Second)) + time.Millisecond)
	switch {
	case fullDue:
		until(afford)
	case a.cfg.FullPass > 0:
		until(a.lastFull.Add(a.cfg.FullPass))
	}
	if a.byRules {
		j = a.planByRules(j, now, until)
		return j, sleep
	}
	if a.nextPass.After(now) {
		until(a.nextPass)
		return nil, sleep
	}
	l, at := a.watches.next(now, gen, trusted)
	until(at)
	if len(a.watches.keys) > 0 && trusted {
		until(now.Add(a.poll(now)))
	}
	switch {
	case len(l.keys) == 0:
		return nil, sleep
	case a.budget <= 0 && !l.urgent:
		until(afford) // what just changed need not wait, nor the commit that follows
		return nil, sleep
	}
	j.look = l
	a.begin(j, gen)
	return j, sleep
}

func (a *Agent) begin(j *job, gen uint32) {
	a.watches.begin(j.keys, j.start, gen)
}

// poll is how long to wait before the ruleset's generation is asked for again: a
// few microseconds' work, so often at first, when the proxy is expected to
// write, and less later.
func (a *Agent) poll(now time.Time) time.Duration {
	return min(max(50*time.Millisecond, (now.Sub(a.watches.lastOpened)-20*time.Second)/20), time.Second)
}

func (a *Agent) refill(now time.Time) {
	a.budget = min(a.budget+a.cfg.WalkBudget*now.Sub(a.budgetAt).Seconds(), a.cfg.WalkBudget*60)
	a.budgetAt = now
}

// run makes one pass. It holds no lock while the kernel works.
func (a *Agent) run(ctx context.Context, j *job) (p Pass) {
	p = Pass{Full: j.full, Start: j.start}
	var scoper sweep.Scoper = a.table
	a.mu.Lock()
	var judge sweep.Judge = cautious{a, j, len(a.doubts) > 0}
	a.mu.Unlock()
	late := false // the rules are read after the pass
	switch {
	case a.byRules:
		defer func() { a.keep(j, &p) }()
		if p.Err = a.readForPass(ctx, j); p.Err != nil {
			return p
		}
		a.mu.Lock()
		scoper, judge = a.exact, patient{a, j, len(a.alone.candidates) > 0}
		a.mu.Unlock()
		p.Full = j.full
	case a.exact != nil && j.trusted && slices.Contains(a.table.Zones(), 0):
		late = j.urgent && a.ruleState.took > slowReload && !a.ruleState.have(j.gen)
		if j.exact = !late && a.readRules(ctx, j.gen); j.exact {
			a.compare(j)
		}
	}
	reading := a.now().Sub(j.start)
	planner, err := sweep.NewPlanner(ctx, a.conn, scoper, a.cfg.Families...)
	if err != nil {
		p.Err = err
		return p
	}
	plan := planner.Full()
	if !j.full {
		plan = planner.Narrow(j.change)
	}
	counts := map[StaleCount]int{}
	s := sweep.Sweeper{Conn: a.conn, Judge: judge, DryRun: j.dryRun, Late: &a.late}
	if j.rate > 0 {
		s.Pace = (&pace{perSecond: j.rate}).wait
	}
	s.OnFlow = func(f *conntrack.Flow, v frontend.Verdict) {
		if v.Action != frontend.Delete {
			return
		}
		if a.onFlow != nil {
			a.onFlow(f, v, j.dryRun)
		}
		c := StaleCount{Owner: v.Owner, Frontend: flowKey(f).String(), Kind: v.Kind, Family: f.Family, Reason: v.Reason}
		if counts[c] > 0 || len(counts) < mostCounts {
			counts[c]++
		} else { // memory does not grow with what a hostile table holds
			counts[StaleCount{Owner: "(others)", Kind: v.Kind, Family: f.Family, Reason: v.Reason}]++
		}
		a.foundStale(j, f, v)
	}
	p.Report, p.Err = s.Run(ctx, plan)
	if late {
		a.readRules(ctx, j.gen) // the wide pass that follows a commit goes by them
	}
	for c, n := range counts {
		c.Flows = n
		p.Stale = append(p.Stale, c)
	}
	slices.SortFunc(p.Stale, func(x, y StaleCount) int { return y.Flows - x.Flows })
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rest(j.start, reading+walking(&p.Report))
	if p.Err == nil {
		a.settle(j)
	} else {
		a.doubts.undo(j.start)
	}
	return p
}

// coalesce is the time between the starts of two passes at least: what changes
// faster shares a pass.
const coalesce = 20 * time.Millisecond

// rest accounts for a pass that has walked for so long. Where changes come
// without end and have used up the budget, their passes take a quarter of a core.
func (a *Agent) rest(start time.Time, walked time.Duration) {
	if a.ready { // the pass at the start happens once
		a.budget -= walked.Seconds()
	}
	a.nextPass = start.Add(coalesce)
	if t := a.now().Add(3 * walked); a.budget <= 0 && t.After(a.nextPass) {
		a.nextPass = t
	}
}

// mostCounts bounds what one pass remembers of the flows that it found.
const mostCounts = 1024

// walking is how long the kernel was kept busy walking.
func walking(r *sweep.Report) (d time.Duration) {
	for _, q := range r.Queries {
		d += q.Duration - q.Deleting
	}
	return d
}

func flowKey(f *conntrack.Flow) frontend.Key {
	return frontend.Key{Addr: f.Orig.Dst, Proto: f.Proto, Ports: frontend.Port(f.Orig.DstPort)}
}

func (a *Agent) foundStale(j *job, f *conntrack.Flow, v frontend.Verdict) {
	if j.dryRun || a.byRules {
		return // it stays, so that finding it again says nothing
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	keys := a.watches.find(f, a.table.Reaches)
	if len(keys) == 0 {
		if k := a.watchFound(j, f, v); k != nil {
			keys = append(keys, *k)
		}
	}
	t := a.doubts[doubtOf(f)]
	var next time.Time // to look whether it comes back
	switch {
	case t.least:
		next = j.start.Add(confirmAfter)
	case !j.trusted:
		next = j.start.Add(t.wait)
	}
	for _, k := range keys {
		if x := a.watches.keys[k]; !x.unasked {
			x.lastStale = a.now()
		}
		if d := a.watches.found(k, sight{flow: f, verdict: v, pass: j.start, back: t.back}); d != nil {
			a.disagree(d)
		}
		if next.After(j.start) {
			a.watches.again(k, j.start, next, false)
		}
	}
}

// disagree makes a disagreement known.
func (a *Agent) disagree(d *Disagreement) {
	id := d.Frontend + " " + d.Backend.String()
	if a.disagrees[id] != nil {
		return
	}
	a.disagrees[id] = d
	args := []any{"frontend", d.Frontend, "owner", d.Owner, "backend", d.Backend}
	if d.Rule != "" {
		args = append(args, "rule", d.Rule)
	}
	if args = append(args, "since", d.Since); !d.byRule() {
		args = append(args, "passes", d.Passes, "flow", d.Evidence)
	}
	a.log.Warn("ruleset-disagrees: the rules make a translation that is wrong by the desired state; "+
		"is the service proxy running and up to date?", args...)
	for _, o := range a.observers {
		o.Disagrees(*d)
	}
}

// agrees ends a disagreement.
func (a *Agent) agrees(d *Disagreement) {
	id := d.Frontend + " " + d.Backend.String()
	if a.disagrees[id] == nil {
		return // another watch has said so
	}
	delete(a.disagrees, id)
	a.log.Info("ruleset agrees again", "frontend", d.Frontend, "owner", d.Owner, "backend", d.Backend)
}

// watchFound looks after the frontend of a flow that a full pass has found, and
// nothing had told of. It returns nil where there is no room.
func (a *Agent) watchFound(j *job, f *conntrack.Flow, v frontend.Verdict) *frontend.Key {
	if len(a.watches.keys) >= mostWatches {
		return nil
	}
	k := flowKey(f)
	x := a.watches.openUnasked(k, j.start, j.gen)
	x.change.Suspects = []frontend.Suspect{{Key: k, Cause: frontend.CauseNew, Owner: v.Owner, Kind: v.Kind}}
	return &k
}

// mostWatches bounds the watches that a full pass opens.
const mostWatches = 10_000

// settle closes a pass that was carried out whole.
func (a *Agent) settle(j *job) {
	settled, cleared := a.watches.end(j.keys, j.start)
	for _, d := range cleared {
		a.agrees(d)
	}
	for _, s := range settled {
		a.log.Debug("settled", "frontend", s.key.String(), "after", s.After, "repaired", s.Repaired)
		for _, o := range a.observers {
			o.Settled(s.Settled)
		}
	}
	now := a.now()
	if now.Sub(a.forgot) >= returnMost {
		a.forgot = now
		a.doubts.forget(now.Add(-2 * max(returnMost, a.cfg.Window, a.cfg.FullPass)))
	}
	for k, gone := range a.graves {
		// A proxy that is stuck may go on translating for a while after its
		// service is gone, so tombstones outlive their window.
		if a.watches.keys[k] == nil && now.Sub(gone) >= graveTime {
			delete(a.graves, k)
			a.table.Forget(k)
			a.saved.dirty = true
		}
	}
}

// graveTime is how long a tombstone is kept at least.
const graveTime = time.Hour

// finish takes over the outcome of a pass.
func (a *Agent) finish(p Pass) {
	a.mu.Lock()
	a.lastPass = &p
	switch {
	case p.Err == nil:
		if a.failures > 0 {
			a.log.Info("passes succeed again", "failures", a.failures)
		}
		a.failures, a.retryAt = 0, time.Time{}
		if p.Full {
			a.lastFull = p.Start
			if !a.ready {
				a.ready = true
				a.log.Info("ready", "after", a.now().Sub(a.started))
			}
		}
	case !errors.Is(p.Err, context.Canceled):
		a.failures++
		pause := min(time.Second<<min(a.failures-1, 6), time.Minute)
		pause += time.Duration(rand.Int64N(int64(pause)/4 + 1))
		a.retryAt = a.now().Add(pause)
		if a.failures == 1 || a.failures&(a.failures-1) == 0 { // ever more rarely
			a.log.Error("a pass failed", "err", p.Err, "failures", a.failures, "retry", pause)
		}
	}
	a.mu.Unlock()
	a.report(&p)
	for _, o := range a.observers {
		o.Pass(p)
	}
}

// report logs what a pass did: a line for each frontend and reason, a few at
// the most.
func (a *Agent) report(p *Pass) {
	const most = 10
	verb := "swept"
	if p.Report.Deleted == 0 {
		verb = "found stale"
	}
	for i, c := range p.Stale {
		level := slog.LevelInfo
		if a.expected(c) {
			level = slog.LevelDebug // said already, as ruleset-disagrees
		}
		if i == most {
			a.log.Info("and more frontends", "count", len(p.Stale)-most)
			break
		}
		a.log.Log(context.Background(), level, verb, "owner", c.Owner, "frontend", c.Frontend,
			"reason", c.Reason.String(), "flows", c.Flows, "duration", p.Report.Duration)
	}
	for _, err := range p.Report.Errs {
		a.log.Debug("deleting", "err", err)
	}
	a.log.Debug("pass", "full", p.Full, "queries", len(p.Report.Queries), "returned", p.Report.Returned,
		"judged", p.Report.Judged, "deleted", p.Report.Deleted, "gone", p.Report.Gone, "busy", p.Report.Busy,
		"failed", p.Report.Failed, "duration", p.Report.Duration)
}

func (a *Agent) expected(c StaleCount) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, d := range a.disagrees {
		if d.Frontend == c.Frontend {
			return true
		}
	}
	return false
}

// pace spreads deletes over time.
type pace struct {
	perSecond int
	next      time.Time
}

// wait waits until the deletes before have had their time.
func (p *pace) wait(ctx context.Context, flows int) error {
	if wait := time.Until(p.next); wait > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
	p.next = time.Now().Add(time.Duration(flows) * time.Second / time.Duration(p.perSecond))
	return nil
}
