//go:build engines && linux

package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/internal/nft"
)

const (
	// agentName is the name of the agent's process.
	agentName = "agent"

	// installed is the agent's configuration as the packages install it, where it is told nothing.
	// agentConfig comes behind it.
	installed   = "../../deploy/package/agent.yaml"
	agentConfig = `
stateFile: %q
log: {level: debug, auditFile: %q}
admin: {listen: "127.0.0.1:9633"}
`
	// unprivileged writes its process ID to the file $0 and becomes the program that follows, with
	// the one capability that the packages' service has.
	unprivileged = `echo $$ >"$0" && exec setpriv --bounding-set=-all,+net_admin --no-new-privs -- "$@"`
)

// startAgent starts "flowsweep run" on the host, until the test's end at the latest, and waits for
// its first pass.
func (s *stage) startAgent(t testing.TB) {
	t.Helper()
	config, err := os.ReadFile(installed)
	must(t, err)
	config = fmt.Appendf(config, agentConfig, s.path("state.json"), s.path("audit.jsonl"))
	must(t, os.WriteFile(s.path("agent.yaml"), config, 0o644))
	s.agentAt = time.Now()
	s.start(t, agentName, "sh", "-c", unprivileged, s.path("agent.pid"), program, "run", "--config", s.path("agent.yaml"))
	s.starts++
	eventually(t, soon, "the agent is ready", func() error {
		if n := strings.Count(s.log(t, agentName), " msg=ready "); n != s.starts {
			return fmt.Errorf("%d of %d times; run make build", n, s.starts)
		}
		return nil
	})
}

// endAgent ends the agent, which must not have had anything to complain about.
func (s *stage) endAgent(t testing.TB, signal string) {
	t.Helper()
	s.end(t, s.path("agent.pid"), signal)
	for line := range strings.Lines(s.log(t, agentName)) {
		if strings.Contains(line, " level=WARN ") || strings.Contains(line, " level=ERROR ") {
			t.Errorf("the agent complains: %s", line)
		}
	}
}

// audited returns what the agent has deleted so far.
func (s *stage) audited(t testing.TB) (list []staleFlow) {
	t.Helper()
	b, err := os.ReadFile(s.path("audit.jsonl"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var f staleFlow
		must(t, json.Unmarshal([]byte(line), &f))
		list = append(list, f)
	}
	return list
}

// staleFlow is a stale flow as flowsweep writes it.
type staleFlow struct {
	Time time.Time // in an audit: just before it is deleted
	Flow struct {
		Original struct {
			Source, Destination         netip.Addr
			SourcePort, DestinationPort uint16
		}
	}
	Verdict, Reason string
}

func (f *staleFlow) addrs() string {
	o := f.Flow.Original
	return fmt.Sprintf("%s > %s", netip.AddrPortFrom(o.Source, o.SourcePort), netip.AddrPortFrom(o.Destination, o.DestinationPort))
}

// commits are the times at which a host's rules have changed, exact to a few milliseconds.
type commits struct {
	mu    sync.Mutex
	times []time.Time
}

// noteCommits notes the commits on the host until the test ends.
func (h *host) noteCommits(t testing.TB) *commits {
	t.Helper()
	gens, err := nft.Open(h.ns.Path())
	must(t, err)
	c := &commits{}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		work.Wait()
		must(t, gens.Close())
	})
	last, _, err := gens.Get()
	must(t, err)
	work.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(2 * time.Millisecond)
			gen, _, err := gens.Get()
			if err != nil || gen == last {
				continue
			}
			c.mu.Lock()
			c.times = append(c.times, time.Now())
			c.mu.Unlock()
			last = gen
		}
	})
	return c
}

// before returns the last commit before a moment, the zero time where there is none.
func (c *commits) before(t time.Time) (last time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range c.times {
		if at.Before(t) {
			last = at
		}
	}
	return last
}

// since counts those since a moment.
func (c *commits) since(t time.Time) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range c.times {
		if at.After(t) {
			n++
		}
	}
	return n
}

// repaired asserts that the agent deletes those flows that are stale, each once, and since the last
// call no other. The report has a row of how long that took from the last commit, or from the agent's
// start where that was later.
func (s *scene) repaired(want verdicts) {
	s.Helper()
	var took []time.Duration
	for _, end := range s.deleted(want, soon) {
		took = append(took, end.Sub(latest(s.commits.before(end), s.agentAt)))
	}
	s.report.repair(s, staleOf(want), took)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// deleted asserts within a time what repaired does, and returns when each of the flows ended.
func (s *scene) deleted(want verdicts, within time.Duration) []time.Time {
	s.Helper()
	stale := staleOf(want)
	var audit []staleFlow
	eventually(s, within, "the agent deletes what is stale", func() error {
		audit = s.audited(s)[s.audits:]
		got := map[string]string{}
		for i := range audit {
			f := &audit[i]
			got[f.addrs()] = strings.TrimPrefix(got[f.addrs()]+", "+f.Reason, ", ")
		}
		if diff := cmp.Diff(stale, got); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
	s.audits += len(audit)
	var ends []time.Time
	for st := range want {
		i := slices.IndexFunc(audit, func(f staleFlow) bool { return f.addrs() == st.addrs() })
		if i < 0 {
			continue
		}
		eventually(s, soon, fmt.Sprintf("the flow of %s ends", st), func() error {
			all := s.destroyed(s, st)
			n := slices.IndexFunc(all, func(e ending) bool { return !e.at.Before(audit[i].Time) })
			if n < 0 {
				return fmt.Errorf("it has not since %s: %v", audit[i].Time, all)
			}
			ends = append(ends, all[n].at)
			return nil
		})
	}
	return ends
}

// shared asserts that the flows are soon right, of which the agent may have deleted some where the engine
// does so itself, a little later.
func (s *scene) shared(want verdicts) {
	s.Helper()
	eventually(s, soon, "every flow is right", func() error { return s.differ(want) })
	s.only(slices.Collect(maps.Keys(want)))
}

// only asserts that what the agent has deleted since the last call are flows of these streams. The report
// has a row of them.
func (s *scene) only(streams []*stream) {
	s.Helper()
	reasons := map[string]string{}
	for _, f := range s.audited(s)[s.audits:] {
		if !slices.ContainsFunc(streams, func(st *stream) bool { return st.addrs() == f.addrs() }) {
			s.Errorf("the agent deleted %s %s", f.Reason, f.addrs())
		}
		reasons[f.addrs()] = f.Reason
		s.audits++
	}
	s.report.repair(s, reasons, nil)
}

// gone asserts that the agent deletes those flows for which there is no rule any more, but only when the
// rules have been away for long enough.
func (s *scene) gone(want verdicts) {
	s.Helper()
	const patience = 30 * time.Second
	var took []time.Duration
	for _, end := range s.deleted(want, patience+soon) {
		took = append(took, end.Sub(latest(s.commits.before(end), s.agentAt)))
	}
	if least := slices.Min(took); least < patience {
		s.Errorf("a flow was deleted %s after the last commit and the agent's start", least)
	}
	s.report.repair(s, staleOf(want), took)
}

// lived asserts that the streams are answered by a server and right, whatever the rules were meanwhile;
// and that the flows of those that were there before have not ended.
func (s *scene) lived(by netip.AddrPort, before map[*stream]int, meanwhile []*stream) {
	s.Helper()
	old := slices.Collect(maps.Keys(before))
	want := verdicts{}
	for _, st := range slices.Concat(old, meanwhile) {
		want[st] = right(by)
	}
	eventually(s, soon, "every flow is right", func() error { return s.differ(want) })
	s.answered(by, old...)
	s.answered(by, meanwhile...)
	for st, n := range before {
		s.notEnded(st, n)
	}
	s.only(meanwhile)
}

// ends returns how often the flows of streams have ended.
func (s *scene) ends(streams ...*stream) map[*stream]int {
	s.Helper()
	n := map[*stream]int{}
	for _, st := range streams {
		n[st] = len(s.destroyed(s, st))
	}
	return n
}
