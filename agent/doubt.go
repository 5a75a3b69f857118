package agent

import (
	"net/netip"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
)

// confirmAfter is how long a translation must look wrong that leads to a backend
// which was never known. The proxy and the source hear of a new backend apart,
// and where the proxy is first its flows are right before anybody here can tell.
// What is known to have left goes at once.
const confirmAfter = time.Second

// mostDoubts bounds what is remembered; what finds no room waits for the next
// pass.
const mostDoubts = 10_000

// doubt is a translation that looks wrong.
type doubt struct {
	frontend frontend.Key
	backend  netip.AddrPort
}

// doubts are the translations to unknown backends, by when they were seen first
// and last.
type doubts map[doubt]struct{ first, last time.Time }

// confirmed notes a translation that a pass has found to be wrong, and tells
// whether it was so for some time before.
func (d doubts) confirmed(x doubt, pass time.Time, after time.Duration) bool {
	seen, ok := d[x]
	if !ok && len(d) >= mostDoubts {
		return false
	}
	if !ok {
		seen.first = pass
	}
	seen.last = pass
	d[x] = seen
	return pass.Sub(seen.first) >= after
}

// forget drops what was not seen for a while.
func (d doubts) forget(before time.Time) {
	for x, seen := range d {
		if seen.last.Before(before) {
			delete(d, x)
		}
	}
}

// cautious is the table as a judge that waits for confirmation.
type cautious struct {
	*Agent
	job *job
	// doubting: some translation is in doubt.
	doubting bool
}

// Judge implements sweep.Judge.
func (c cautious) Judge(f *conntrack.Flow) frontend.Verdict {
	v := c.table.Judge(f)
	if v.Action != frontend.Delete {
		if c.doubting && v.Reason == frontend.Serving {
			c.mu.Lock()
			delete(c.doubts, doubt{flowKey(f), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)})
			c.mu.Unlock()
		}
		return v
	}
	switch again, by := c.rules(f); again {
	case ruleset.Never:
		return v
	case ruleset.Always:
		c.leave(f, v)
		v.Action, v.Reason, v.Why = frontend.Keep, frontend.RulesetDisagrees, by
		return v
	case ruleset.Moved: // a pass by the new ones follows at once
		c.leave(f, v)
	case ruleset.Untold:
		if !f.Translated() || !c.doubtful(f, v) {
			return v
		}
	}
	v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
	return v
}

// doubtful tells whether a stale flow is to be left for a later pass, and sees to
// it that there is one.
func (c cautious) doubtful(f *conntrack.Flow, v frontend.Verdict) bool {
	a := c.Agent
	to := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	a.mu.Lock()
	defer a.mu.Unlock()
	keys := a.watches.find(f, a.table.Reaches)
	if slices.ContainsFunc(keys, func(k frontend.Key) bool { return a.watches.keys[k].lost(to, f.Orig.DstPort) }) {
		return false
	}
	pause := confirmAfter
	if a.faulty() {
		pause *= 10 // so long nothing is confirmed
	} else if a.doubts.confirmed(doubt{flowKey(f), to}, c.job.start, confirmAfter) {
		return false
	}
	if len(keys) == 0 {
		if k := a.watchFound(c.job, f, v); k != nil {
			keys = append(keys, *k)
		}
	}
	for _, k := range keys {
		a.watches.postpone(k, c.job.start, pause)
	}
	return true
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
