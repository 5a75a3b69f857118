package agent

import (
	"net/netip"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
)

// How certain it is that a flow is stale which looks so decides when it goes.
// What the rules are known not to make goes at once. Where that cannot be told
// (nobody reads the rules, or they may do anything):
//
//   - A flow to a backend that is known to have left goes at once, and so does one
//     that nothing has translated and nobody has answered.
//   - A flow to a backend that was never known goes when it still looks wrong a
//     moment later. The proxy and the source hear of a new backend apart, and where
//     the proxy is first its flows are right before anybody here can tell.
//   - Where such a translation has been answered it is the least certain of all:
//     somebody serves it, and a proxy that translates in two steps makes nothing
//     else. It goes last, when it has looked wrong for a while in which nothing
//     else of the frontend was stale, and once.
//
// What comes back after its delete is made by something, and a delete does not
// change that. So the same translation is deleted again after 1, 2, 4, ... 60 s
// and not before, whatever makes passes meanwhile. A flow of another translation
// does not wait for that. The least certain waits longer: where commits can be seen
// for one, and 10, 20, 40, 60 s at least, or an hour, and otherwise a minute.
const (
	// confirmAfter is how long a translation must look wrong that leads to a
	// backend which was never known, and lastAfter, how long one that is answered.
	confirmAfter = time.Second
	lastAfter    = 10 * time.Second

	// returnFirst and returnMost bound the time from the delete of what came back
	// to the next one.
	returnFirst = time.Second
	returnMost  = time.Minute
	// returnLeast is that time for the least certain, while there is no commit.
	returnLeast = time.Hour
)

// mostDoubts bounds what is remembered: 2 MB. What is in doubt and finds no room
// waits for the next pass; what is certain takes another's place.
const mostDoubts = 10_000

// doubt is a translation that looks wrong; untranslated, the backend is where the
// flow was sent.
type doubt struct {
	frontend frontend.Key
	backend  netip.AddrPort
}

func doubtOf(f *conntrack.Flow) doubt {
	return doubt{flowKey(f), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)}
}

// trail is what is remembered of a translation that looks wrong. Times are the
// starts of passes.
type trail struct {
	first   time.Time // seen, at all or since the last delete; zero: not yet
	last    time.Time // seen, or deleted
	deleted time.Time // last; zero: never
	wait    time.Duration
	gen     uint32 // of the rules, then
	back    bool   // it had been deleted before, and had come back

	answered bool // a flow of it was
	least    bool // it was of the least certain when it was deleted
	sure     bool // or the rules were known not to make it

	before *trail // the last delete; nil: nothing was known
}

// doubts are the translations that look wrong or did so.
type doubts map[doubt]trail

// confirmed notes a translation that a pass has found to be wrong, and tells
// whether it was so for some time before.
func (d doubts) confirmed(x doubt, pass time.Time, after time.Duration) bool {
	t, ok := d.see(x, pass, false)
	return ok && pass.Sub(t.first) >= after
}

// see notes a translation that a pass has found. It returns false where there is
// no room.
func (d doubts) see(x doubt, pass time.Time, answered bool) (trail, bool) {
	t, ok := d[x]
	if !ok && len(d) >= mostDoubts {
		return t, false
	}
	if t.first.IsZero() {
		t.first = pass
	}
	t.last, t.answered = pass, t.answered || answered
	d[x] = t
	return t, true
}

// delete notes that a pass deletes a translation, how certain it was, and the
// generation of the rules.
func (d doubts) delete(x doubt, pass time.Time, gen uint32, least, sure bool) {
	t, ok := d[x]
	before := t
	if t.before = nil; ok {
		before.before, t.before = nil, &before
	}
	if !ok && len(d) >= mostDoubts {
		for other := range d {
			delete(d, other)
			break
		}
	}
	first := returnFirst
	if least {
		first = lastAfter
	}
	t.back = !t.deleted.IsZero()
	t.wait = min(max(2*t.wait, first), returnMost)
	t.first, t.last, t.deleted, t.gen, t.least, t.sure = time.Time{}, pass, pass, gen, least, sure
	d[x] = t
}

// undo takes back the deletes of a pass that has failed: nobody knows how far it
// came.
func (d doubts) undo(pass time.Time) {
	for x, t := range d {
		switch {
		case !t.deleted.Equal(pass):
		case t.before != nil:
			d[x] = *t.before
		default:
			delete(d, x)
		}
	}
}

// renew forgets the translations that a change makes wrong anew: what was deleted
// before that was another matter.
func (d doubts) renew(ch frontend.Change) {
	for _, s := range ch.Suspects {
		if len(d) == 0 {
			return
		}
		if s.Key.Ports.Single() && !s.Key.Addr.IsUnspecified() {
			d.forgetLost(s.Key, s)
			continue
		}
		for x := range d {
			k := x.frontend
			if k.Proto == s.Key.Proto && k.Ports.First >= s.Key.Ports.First && k.Ports.First <= s.Key.Ports.Last &&
				k.Addr.Is4() == s.Key.Addr.Is4() && (s.Key.Addr.IsUnspecified() || s.Key.Addr == k.Addr) {
				d.forgetLost(k, s)
			}
		}
	}
}

// forgetLost forgets what a suspect makes wrong at one address and port.
func (d doubts) forgetLost(k frontend.Key, s frontend.Suspect) {
	if s.Cause == frontend.CauseFirstBackend {
		delete(d, doubt{k, netip.AddrPortFrom(k.Addr, k.Ports.First)})
	}
	for _, b := range s.Lost {
		if b.Port() == 0 {
			b = netip.AddrPortFrom(b.Addr(), k.Ports.First)
		}
		delete(d, doubt{k, b})
	}
}

// unsee forgets what was in doubt, and not what was deleted.
func (d doubts) unsee() {
	for x, t := range d {
		if t.first = (time.Time{}); t.deleted.IsZero() {
			delete(d, x)
		} else {
			d[x] = t
		}
	}
}

// forget drops what was not seen for a while.
func (d doubts) forget(before time.Time) {
	for x, t := range d {
		if t.last.Before(before) {
			delete(d, x)
		}
	}
}

// cautious is the table as a judge that waits where it is not certain.
type cautious struct {
	*Agent
	job *job
	// doubting: some translation is remembered.
	doubting bool
}

// Judge implements sweep.Judge.
func (c cautious) Judge(f *conntrack.Flow) frontend.Verdict {
	v := c.table.Judge(f)
	if v.Action != v.Settled().Action {
		if again, _ := c.rules(f); again == ruleset.Never {
			v = v.Settled()
		}
	}
	if v.Action != frontend.Delete {
		if c.doubting && v.Reason == frontend.Serving {
			c.mu.Lock()
			delete(c.doubts, doubtOf(f))
			c.mu.Unlock()
		}
		return v
	}
	switch m, by := c.rules(f); m {
	case ruleset.Always:
		rule := by
		if by == ruleset.Untranslating {
			rule = ""
		}
		c.leave(f, v, m, rule)
		v.Action, v.Reason, v.Why = frontend.Keep, frontend.RulesetDisagrees, by
		return v
	case ruleset.Moved: // a pass by the new ones follows at once
		c.leave(f, v, m, "")
	case ruleset.Never, ruleset.Untold:
		c.job.relied = c.job.relied || m == ruleset.Never
		if !c.waits(f, v, m) {
			return v
		}
	}
	v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
	return v
}

// waits tells whether a stale flow, of which the rules say m, is to be left for a
// later pass, and sees to it that there is one.
func (c cautious) waits(f *conntrack.Flow, v frontend.Verdict, m ruleset.Again) bool {
	a, x, pass := c.Agent, doubtOf(f), c.job.start
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.doubts[x]
	if t.deleted.Equal(pass) {
		return false // as others like it
	}
	keys := a.watches.find(f, a.table.Reaches)
	if m == ruleset.Never && !t.sure { // if it came back, nobody knew then what the rules make
		a.watches.unmade(keys, x.backend, a.agrees)
		delete(a.doubts, x)
		t = trail{}
	}
	known := func(k frontend.Key) bool { return a.watches.keys[k].lost(x.backend, f.Orig.DstPort) }
	doubted := confirmAfter
	least := false
	switch {
	case m == ruleset.Never, slices.ContainsFunc(keys, known), !f.Replied() && !f.Translated():
		doubted = 0
	case f.Replied() || t.answered:
		doubted, least = lastAfter, true
	}
	var until time.Time // when it may go
	switch {
	case doubted == 0:
	case a.faulty(): // the proxy may be ahead for any length of time
		until = pass.Add(10 * confirmAfter)
	default:
		seen, ok := a.doubts.see(x, pass, f.Replied())
		if until = seen.first.Add(doubted); !ok {
			until = pass.Add(confirmAfter)
		}
	}
	for _, k := range keys {
		switch x := a.watches.keys[k]; {
		case !least:
			x.others = pass
		case !x.alone:
			until = later(until, pass.Add(confirmAfter))
		case !x.others.IsZero():
			until = later(until, x.others.Add(lastAfter))
		}
	}
	back := !t.deleted.IsZero()
	switch {
	case !back:
	case least && !c.job.trusted:
		until = later(until, t.deleted.Add(returnMost))
	case least && c.job.gen == t.gen: // the same rules make the same again
		until = later(until, t.deleted.Add(returnLeast))
	case doubted > 0 || !a.watches.answers(keys, pass):
		until = later(until, t.deleted.Add(t.wait))
	}
	if !until.After(pass) {
		if !c.job.dryRun {
			a.doubts.delete(x, pass, c.job.gen, least, m == ruleset.Never)
		}
		return false
	}
	if len(keys) == 0 {
		if k := a.watchFound(c.job, f, v); k != nil {
			keys = append(keys, *k)
		}
	}
	for _, k := range keys {
		if d := a.watches.found(k, sight{flow: f, verdict: v, pass: pass, back: back}); d != nil {
			a.disagree(d)
		}
		a.watches.again(k, pass, until, doubted == confirmAfter && !back)
	}
	return true
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// faulty tells whether a source knows that it may be behind: the proxy may then
// be ahead for any length of time.
func (a *Agent) faulty() bool {
	return slices.ContainsFunc(a.feeds, func(f *feed) bool { return f.fault != nil })
}

// lost tells whether a backend is known to have left the frontend.
func (x *watch) lost(to netip.AddrPort, dport uint16) bool {
	return slices.ContainsFunc(x.change.Suspects, func(s frontend.Suspect) bool {
		return slices.Contains(s.Lost, to) ||
			to.Port() == dport && slices.Contains(s.Lost, netip.AddrPortFrom(to.Addr(), 0))
	})
}
