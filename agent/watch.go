package agent

import (
	"net/netip"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// Settling. A sweep before the service proxy has written its rules is undone by
// the next packet, and nothing tells when the proxy is done. So a frontend that
// changed is watched: a pass at once, one after each commit to the ruleset (or,
// where commits cannot be seen, at growing intervals), and a last one at the
// window's end, as proof. A stale flow found starts the window over. The start
// of the agent counts as a change of everything.
//
// A narrow pass looks for what the change made stale: flows to the backends that
// left, say. That is fast, and all there is to find if the proxy writes what it
// should. A proxy that first writes something else makes flows that no change
// tells of, so that a wide pass, over all flows to the frontend, follows each
// commit at a distance, and is the proof at the end.
//
//	changed ──▶ watched ──(a window without stale flows)──▶ settled
//	              │ ▲
//	              └─┘ stale flows found: the window starts over; what comes back
//	                  after its delete waits ever longer (doubt.go); when the same
//	                  wrong translation comes back for a whole window, or is left
//	                  for one since the rules would make it again: disagrees
const (
	// timedFirst and timedMost bound the interval between passes where no
	// ruleset generation can be trusted: 1, 2, 4, ... 32 s.
	timedFirst = time.Second
	timedMost  = 32 * time.Second

	// wideAfter is the distance of the wide pass that follows a commit.
	wideAfter = 2 * time.Second

	// grain is what times of passes to come are rounded up to, so that watches
	// share them.
	grain = 100 * time.Millisecond

	// disagreePause is the interval between passes for a frontend whose rules
	// make what is wrong.
	disagreePause = time.Minute
	// disagreePasses is how many passes must find the same wrong translation, and
	// leftPasses how many where the rules are known to make it.
	disagreePasses = 3
	leftPasses     = 2
)

// everything is the watch that the agent begins with.
var everything = frontend.Key{}

// watch is one frontend, or one address of this host, that is not settled.
type watch struct {
	change  frontend.Change // what of it is suspect
	changed time.Time       // the first change that is not settled
	opened  time.Time       // start of the window

	lastStale time.Time // when a stale flow was found last; zero: never
	others    time.Time // the pass that found one last that is not of the least certain
	alone     bool      // the last wide pass found no such one

	fresh     bool      // changed since the last pass began
	answered  bool      // a pass has begun after the first commit that followed the change
	answer    time.Time // when that was
	unasked   bool      // a full pass found something, and nobody knows of a change
	lastPass  time.Time
	lastGen   uint32
	wideAt    time.Time     // when the next wide pass is due, but for that; zero: not known
	doubted   bool          // that is the second look at something that was in doubt
	looked    bool          // twice, since the change
	timed     time.Duration // interval to the next pass by time
	returning map[netip.AddrPort]*returning
	disagrees *Disagreement

	// Where the rules are known (rules.go): since when all that they may give is
	// right, or some of it wrong. Both zero: it cannot be told.
	followed time.Time
	behind   time.Time
	// settled: that is proved. The watch goes on through its window, since a proxy
	// that has not heard of all changes may write older ones yet.
	settled bool
}

// returning is a wrong translation that passes find again and again.
type returning struct {
	since  time.Time
	passes int
	seen   time.Time
	left   bool // it was left then, since the rules would make it again
}

// sight is a stale flow as a pass has met it, begun at the time given.
type sight struct {
	flow    *conntrack.Flow
	verdict frontend.Verdict
	pass    time.Time
	back    bool   // the translation had been deleted, and came back
	left    bool   // it is left, since the rules would make it again
	rule    string // which of them, where that is known
}

// Disagreement is a wrong translation that the rules make again and again, or
// would make if it were deleted.
type Disagreement struct {
	Frontend string         `json:"frontend"`
	Owner    string         `json:"owner"`
	Backend  netip.AddrPort `json:"backend"` // where flows are sent wrongly; the frontend itself where untranslated
	Since    time.Time      `json:"since"`
	Passes   int            `json:"passes"`         // that found it; 0: the rules alone tell of it
	Evidence string         `json:"evidence"`       // one such flow, or what the rules may give
	Rule     string         `json:"rule,omitempty"` // that makes it, where the rules could be read
	Kind     frontend.Kind  `json:"-"`
}

// byRule tells whether the rules alone tell of it, flows or not.
func (d *Disagreement) byRule() bool { return d.Passes == 0 }

// watches is the set of what is not settled.
type watches struct {
	window time.Duration
	keys   map[frontend.Key]*watch
	// ranges are the keys of more than one port, which a flow cannot look up.
	ranges map[frontend.Key]*watch
	// fresh are the keys that no pass has looked at since they changed.
	fresh map[frontend.Key]*watch

	// What spares next the look at thousands of watches for each that changes:
	// before the time at, none but fresh ones are due, provided that gen and
	// trusted are what they were.
	at      time.Time
	gen     uint32
	trusted bool

	lastOpened time.Time
}

func newWatches(window time.Duration) *watches {
	return &watches{
		window: window, keys: map[frontend.Key]*watch{}, ranges: map[frontend.Key]*watch{}, fresh: map[frontend.Key]*watch{},
	}
}

// hostKey stands for everything at one address of this host.
func hostKey(a netip.Addr) frontend.Key { return frontend.Key{Addr: a} }

// note opens or renews the watch of all that a change makes suspect.
func (w *watches) note(ch frontend.Change, now time.Time) {
	for _, s := range ch.Suspects {
		x := w.open(s.Key, now)
		x.change.Suspects = mergeSuspect(x.change.Suspects, s)
	}
	for _, a := range ch.Hosts {
		w.open(hostKey(a), now).change.Hosts = []netip.Addr{a}
	}
	if len(ch.Ranges) > 0 {
		w.open(everything, now)
	}
}

// mergeSuspect keeps one suspect for each cause, so that a frontend that changes
// again and again takes no more memory than what it lost.
func mergeSuspect(list []frontend.Suspect, s frontend.Suspect) []frontend.Suspect {
	for i := range list {
		if list[i].Cause != s.Cause {
			continue
		}
		for _, b := range s.Lost {
			if !slices.Contains(list[i].Lost, b) {
				list[i].Lost = append(list[i].Lost, b)
			}
		}
		list[i].Owner, list[i].Kind = s.Owner, s.Kind
		return list
	}
	return append(list, s)
}

func (w *watches) open(k frontend.Key, now time.Time) *watch {
	x := w.keys[k]
	if x == nil {
		x = &watch{changed: now}
		w.keys[k] = x
		if !k.Ports.Single() {
			w.ranges[k] = x
		}
	}
	if x.unasked {
		x.unasked, x.changed = false, now
	}
	x.opened, x.fresh, x.answered, x.timed = now, true, false, timedFirst
	x.doubted, x.looked, x.alone = false, false, false
	x.followed, x.behind, x.settled = time.Time{}, time.Time{}, false
	w.fresh[k], w.lastOpened = x, now
	return x
}

// openUnasked opens a watch of what the running pass has found unasked.
func (w *watches) openUnasked(k frontend.Key, pass time.Time, gen uint32) *watch {
	x := w.open(k, pass)
	delete(w.fresh, k)
	x.fresh, x.unasked, x.lastPass, x.lastGen = false, true, pass, gen
	w.at = time.Time{}
	return x
}

// again has a wide pass look at a watch, at a time after the present pass, unless
// another one comes before. doubted: what it is to look at is in doubt.
func (w *watches) again(k frontend.Key, pass, at time.Time, doubted bool) {
	x := w.keys[k]
	if x.wideAt.After(pass) && !at.Before(x.wideAt) {
		return
	}
	x.wideAt, w.at = at, time.Time{}
	x.doubted = doubted && !x.looked
}

// answers tells whether a pass is the first one after the first commit that
// followed a change of one of the watches: the proxy's answer, perhaps.
func (w *watches) answers(keys []frontend.Key, pass time.Time) bool {
	return slices.ContainsFunc(keys, func(k frontend.Key) bool { return w.keys[k].answer.Equal(pass) })
}

// restart makes a watch's window begin with a pass that has found something.
func (w *watches) restart(x *watch, pass time.Time) {
	x.opened, w.at = pass, time.Time{}
	if x.settled = false; !x.followed.IsZero() {
		x.followed = pass
	}
	if pass.After(w.lastOpened) {
		w.lastOpened = pass
	}
}

func (w *watches) drop(k frontend.Key) {
	delete(w.keys, k)
	delete(w.ranges, k)
	delete(w.fresh, k)
}

// due tells when the next pass for a watch is to begin, now or at a time to
// come, and whether it is a wide one. gen is the ruleset's generation, trusted
// whether it moves with every commit.
func (x *watch) due(now time.Time, window time.Duration, gen uint32, trusted bool) (at time.Time, wide bool) {
	if x.fresh || trusted && gen != x.lastGen {
		return now, false
	}
	at = x.proof(window)
	if x.disagrees != nil {
		at = x.lastPass.Add(disagreePause)
	}
	if !trusted && (x.disagrees == nil || x.timed < timedMost) {
		at = earlier(at, x.lastPass.Add(x.timed))
	}
	if !x.wideAt.IsZero() {
		at = earlier(at, x.wideAt)
	}
	return roundUp(at), true
}

// proof is when a pass that finds nothing settles the watch, or ends it.
func (x *watch) proof(window time.Duration) time.Time {
	if !x.followed.IsZero() && !x.settled {
		return x.followed.Add(proofAfter)
	}
	return x.opened.Add(window)
}

func roundUp(t time.Time) time.Time { return t.Add(grain - 1).Truncate(grain) }

// look is what a pass is to look at.
type look struct {
	change frontend.Change
	keys   map[frontend.Key]bool // the watches that it serves, and whether it is wide for them
	urgent bool                  // a change that no pass has looked at, the first commit since one, or a second look
	full   bool                  // at everything
}

// next returns what to look at now, and when to ask again, commits aside.
func (w *watches) next(now time.Time, gen uint32, trusted bool) (l look, at time.Time) {
	l.keys = map[frontend.Key]bool{}
	some := w.fresh
	if gen != w.gen || trusted != w.trusted || !now.Before(w.at) {
		some = w.keys
		w.gen, w.trusted, w.at = gen, trusted, now.Add(idle)
	}
	at = w.at
	for k, x := range some {
		due, wide := x.due(now, w.window, gen, trusted)
		if due.After(now) {
			at = earlier(at, due)
			continue
		}
		if !x.fresh {
			w.at = now // until a pass begins
		}
		l.keys[k] = wide
		l.urgent = l.urgent || x.fresh || !x.answered && gen != x.lastGen || wide && x.doubted
		switch {
		case k == everything:
			l.full = true
		case wide && k.Proto != 0:
			s := x.change.Suspects[0]
			l.change.Suspects = append(l.change.Suspects,
				frontend.Suspect{Key: k, Cause: frontend.CauseNew, Owner: s.Owner, Kind: s.Kind})
		default:
			l.change.Add(x.change)
		}
	}
	w.at = earlier(w.at, at)
	if l.full {
		l.keys = w.all()
	}
	return l, at
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// all returns every watch, as a full pass serves it.
func (w *watches) all() map[frontend.Key]bool {
	keys := make(map[frontend.Key]bool, len(w.keys))
	for k := range w.keys {
		keys[k] = true
	}
	return keys
}

// begin marks the start of a pass. Whatever changes from here on needs another
// one.
func (w *watches) begin(keys map[frontend.Key]bool, now time.Time, gen uint32) {
	for k, wide := range keys {
		x := w.keys[k]
		if !x.fresh {
			x.timed = min(2*x.timed, timedMost)
		}
		switch {
		case wide:
			x.looked = x.looked || x.doubted
			x.wideAt, x.doubted = time.Time{}, false
		case gen != x.lastGen && !x.lastPass.IsZero():
			if at := now.Add(wideAfter); x.wideAt.IsZero() || x.wideAt.After(at) {
				x.wideAt = at
			}
		}
		if !x.answered && gen != x.lastGen && !x.lastPass.IsZero() {
			x.answered, x.answer = true, now
		}
		x.fresh, x.lastPass, x.lastGen = false, now, gen
		delete(w.fresh, k)
		due, _ := x.due(now, w.window, gen, w.trusted)
		w.at = earlier(w.at, due)
	}
}

// find returns the watches that a stale flow belongs to.
func (w *watches) find(f *conntrack.Flow, reaches func(frontend.Key, *conntrack.Flow) bool) (keys []frontend.Key) {
	port := frontend.Port(f.Orig.DstPort)
	everywhere := netip.IPv4Unspecified()
	if f.Family == conntrack.IPv6 {
		everywhere = netip.IPv6Unspecified()
	}
	for _, k := range []frontend.Key{
		{Addr: f.Orig.Dst, Proto: f.Proto, Ports: port}, {Addr: everywhere, Proto: f.Proto, Ports: port}, hostKey(f.Orig.Dst),
	} {
		if w.keys[k] != nil {
			keys = append(keys, k)
		}
	}
	for k := range w.ranges {
		if reaches(k, f) {
			keys = append(keys, k)
		}
	}
	return keys
}

// found notes a stale flow for a watch, and returns a disagreement that this makes
// known.
func (w *watches) found(k frontend.Key, s sight) *Disagreement {
	x := w.keys[k]
	if x == nil {
		return nil
	}
	w.restart(x, s.pass)
	f := s.flow
	to := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	if x.returning == nil {
		x.returning = map[netip.AddrPort]*returning{}
	}
	r := x.returning[to]
	if r == nil {
		if len(x.returning) >= 64 { // enough evidence for any report
			return nil
		}
		r = &returning{since: s.pass}
		x.returning[to] = r
	}
	first := !r.seen.Equal(s.pass)
	if first {
		r.seen = s.pass
		r.passes++
	}
	r.left = s.left
	if d := x.disagrees; d != nil {
		if first && d.Backend == to && !d.byRule() {
			d.Passes, d.Evidence, d.Rule = r.passes, f.String(), s.rule
		}
		return nil
	}
	switch known := r.since.Add(w.window); {
	case s.left && r.passes < leftPasses, !s.left && (!s.back || r.passes < disagreePasses):
		return nil
	case s.pass.Before(known):
		w.again(k, s.pass, known, false)
		return nil
	}
	x.disagrees = &Disagreement{
		Frontend: flowKey(f).String(), Owner: s.verdict.Owner, Kind: s.verdict.Kind,
		Backend: to, Since: r.since, Passes: r.passes, Evidence: f.String(), Rule: s.rule,
	}
	return x.disagrees
}

// unmade ends the disagreements of watches of which flows tell, about a translation
// that the rules are known not to make now.
func (w *watches) unmade(keys []frontend.Key, to netip.AddrPort, agrees func(*Disagreement)) {
	for _, k := range keys {
		x := w.keys[k]
		if d := x.disagrees; d != nil && d.Backend == to && !d.byRule() {
			x.disagrees, w.at = nil, time.Time{}
			delete(x.returning, to)
			agrees(d)
		}
	}
}

// end closes a pass that was carried out whole: what did not come back is
// forgotten, and what was quiet for its whole window is settled.
func (w *watches) end(keys map[frontend.Key]bool, pass time.Time) (settled []settledWatch, cleared []*Disagreement) {
	for k, wide := range keys {
		x := w.keys[k]
		if x == nil || !wide {
			continue
		}
		x.alone = !x.others.Equal(pass)
		for to, r := range x.returning {
			// What was deleted comes back with the next packet, whenever that is.
			if !r.seen.Equal(pass) && (r.left || pass.Sub(r.seen) >= min(w.window, disagreePause)) {
				delete(x.returning, to)
				if x.disagrees != nil && x.disagrees.Backend == to {
					cleared = append(cleared, x.disagrees)
					x.disagrees = nil
					w.at = time.Time{}
				}
			}
		}
		if x.fresh || pass.Before(x.proof(w.window)) {
			continue
		}
		if !x.behind.IsZero() { // whether or not there are flows
			w.restart(x, pass)
			continue
		}
		if !x.settled {
			s := settledWatch{key: k, Settled: Settled{After: pass.Sub(x.changed)}}
			if x.lastStale.After(x.changed) {
				s.Repaired = x.lastStale.Sub(x.changed)
			}
			settled = append(settled, s)
		}
		if x.settled = true; !pass.Before(x.opened.Add(w.window)) {
			w.drop(k)
		}
	}
	return settled, cleared
}

type settledWatch struct {
	key frontend.Key
	Settled
}
