//go:build engines && linux

package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/ruleset"
)

const (
	// destroyed is the name of the process that logs each flow that ends.
	destroyed = "conntrack-destroyed"

	// pace is the time between a sender's datagrams.
	pace = 20 * time.Millisecond
	// bystanderPace is that of those that only have to go on.
	bystanderPace = 5 * pace
	// soon is in time for an answer, on a machine that is busy with other things too.
	soon = 20 * time.Second
)

// stage is a host on which cases are played, one after the other.
type stage struct {
	*host
	engine string
	report *report
	// bystanders are streams that are right, or none of the rules' business, whatever happens.
	bystanders verdicts
	ports      uint16 // the last that a stream was given
	commits    *commits
	agentAt    time.Time // when the agent was started last
	starts     int       // of the agent
}

// scene is one case on a stage.
type scene struct {
	*testing.T
	*stage
	name    string
	streams []*stream
	// gap is set where the rules are away for a moment: until they are back, all flows are those of
	// rules that are gone.
	gap   bool
	began time.Time
	// audits is how much of the agent's audit is known to be right.
	audits int
}

// stream is a sender whose datagrams are one flow.
type stream struct {
	*testnet.Sender            // or
	container       *container // that sends

	name     string
	from, to netip.AddrPort
}

func (st *stream) String() string { return st.name + ", " + st.addrs() }

// verdicts say of each stream what the rules say of its flow, and where it goes if it is translated:
// "right 172.17.0.2:5353".
type verdicts map[*stream]string

// newStage prepares a host for cases. What writes the rules there may be named later.
func newStage(t testing.TB, r *report, engine string, h *host) *stage {
	t.Helper()
	h.start(t, destroyed, "conntrack", "-E", "-e", "DESTROY", "-o", "timestamp", "-b", "4194304")
	return &stage{host: h, engine: engine, report: r, bystanders: verdicts{}, ports: 40000, commits: h.noteCommits(t)}
}

// scene makes a case, which the stage's test is part of.
func (s *stage) scene(t *testing.T, name string) *scene {
	return &scene{T: t, stage: s, name: name, began: time.Now(), audits: len(s.audited(t))}
}

// bystander starts a stream that all cases must leave alone.
func (s *stage) bystander(t testing.TB, name string, ns *testnet.NS, to netip.AddrPort, verdict string) {
	t.Helper()
	s.bystanders[s.send(t, name, ns, to, bystanderPace)] = verdict
}

// play plays a case, with the agent or without.
func (s *stage) play(t *testing.T, name string, play func(*scene)) {
	t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
		c := s.scene(t, name)
		t.Cleanup(func() { s.forget(t) }) // after the senders have ended
		ended := map[*stream]int{}
		for st := range s.bystanders {
			ended[st] = len(s.destroyed(t, st))
		}
		watch := s.watch(t)
		play(c)
		for _, event := range watch() {
			if !c.gap {
				t.Error(event)
			}
		}
		for st := range s.bystanders {
			c.notEnded(st, ended[st])
			c.goesOn(st)
		}
		for _, f := range s.audited(t)[c.audits:] {
			t.Errorf("the agent deleted %s %s", f.Reason, f.addrs())
		}
	})
}

// notEnded asserts that the flow of a stream has not ended since it had ended so often.
func (s *scene) notEnded(st *stream, before int) {
	s.Helper()
	if ends := s.destroyed(s, st); len(ends) > before {
		s.Errorf("%s: its flow was deleted: %q", st, ends[before:])
	}
}

// forget deletes all flows but the bystanders', which the rules of the next case might make stale.
func (s *stage) forget(t testing.TB) {
	t.Helper()
	ctx := context.Background() // the test's has ended
	flows, err := s.flows.List(ctx, conntrack.Filter{})
	must(t, err)
	c := &scene{stage: s}
	flows = slices.DeleteFunc(flows, func(f conntrack.Flow) bool { return c.nameOf(&f) != "" })
	_, err = s.flows.Delete(ctx, flows...)
	must(t, err)
}

// send starts a stream of the case: from the client, or from the host itself to one of its addresses.
func (s *scene) send(name string, ns *testnet.NS, to netip.AddrPort) *stream {
	s.Helper()
	st := s.stage.send(s, name, ns, to, pace)
	s.streams = append(s.streams, st)
	return st
}

func (s *stage) send(t testing.TB, name string, ns *testnet.NS, to netip.AddrPort, pace time.Duration) *stream {
	t.Helper()
	from := clientAddr
	if ns == s.ns {
		from = to.Addr() // as the kernel chooses it towards an address of its own
	}
	s.ports++
	st := &stream{name: name, from: netip.AddrPortFrom(from, s.ports), to: to}
	st.Sender = nstest.Send(t, ns, st.from, to, pace)
	return st
}

// resend starts a stream that was closed again, from the same port.
func (s *scene) resend(st *stream) {
	s.Helper()
	st.Sender = nstest.Send(s, s.client, st.from, st.to, pace)
}

// sendInside starts a container that sends.
func (s *stage) sendInside(t testing.TB, e *engine, name string, to netip.AddrPort) *stream {
	t.Helper()
	const from = 5000
	c := e.container(t, name, nil, "send", fmt.Sprint(from), to.String())
	return &stream{name: "from container " + name, container: c, from: c.at(from), to: to}
}

// sendFrom is sendInside for a stream of the case.
func (s *scene) sendFrom(e *engine, name string, to netip.AddrPort) *stream {
	s.Helper()
	st := s.sendInside(s, e, name, to)
	s.Cleanup(func() { st.container.remove(s) })
	s.streams = append(s.streams, st)
	return st
}

// listen starts a server that ends with the test.
func (s *stage) listen(t testing.TB, ns *testnet.NS, addr netip.AddrPort) {
	t.Helper()
	nstest.Echo(t, ns, addr)
}

// sample waits for the fate of the next n datagrams.
func (s *scene) sample(st *stream, n int) testnet.Tally {
	s.Helper()
	if st.container == nil {
		tally, err := st.Sample(within(s, soon), n)
		must(s, err)
		return tally
	}
	var fates []string
	start := len(st.container.fates(s)) + 1 // one is under way
	eventually(s, soon, fmt.Sprintf("%s is sent", st), func() error {
		if fates = st.container.fates(s); len(fates) < start+n {
			return fmt.Errorf("%d datagrams, want %d", len(fates)-start, n)
		}
		return nil
	})
	tally := testnet.Tally{Sent: n, From: map[netip.AddrPort]int{}}
	for _, fate := range fates[start : start+n] {
		if from, err := netip.ParseAddrPort(fate); err == nil {
			tally.From[from]++
		} else {
			tally.Lost++
		}
	}
	return tally
}

// sent waits until each stream has sent something after what was done last.
func (s *scene) sent(streams ...*stream) {
	s.Helper()
	for _, st := range streams {
		if st.container != nil {
			s.sample(st, 1)
			continue
		}
		n := len(st.Records()) + 2
		eventually(s, soon, fmt.Sprintf("%s is sent", st), func() error {
			if have := len(st.Records()); have < n {
				return fmt.Errorf("%d datagrams, want %d", have, n)
			}
			return nil
		})
	}
}

// answered asserts that each stream is soon answered by a server, and by no other any more.
func (s *scene) answered(by netip.AddrPort, streams ...*stream) {
	s.Helper()
	const n = 5
	for _, st := range streams {
		eventually(s, soon, fmt.Sprintf("%s is answered by %s", st, by), func() error {
			if tally := s.sample(st, n); tally.From[by] != n {
				return errors.New(tally.String())
			}
			return nil
		})
	}
}

// goesOn asserts that a stream is answered, by whatever server.
func (s *scene) goesOn(st *stream) {
	s.Helper()
	eventually(s, soon, fmt.Sprintf("%s is answered", st), func() error {
		if tally := s.sample(st, 1); tally.Lost > 0 {
			return errors.New(tally.String())
		}
		return nil
	})
}

// unanswered asserts that each stream loses everything.
func (s *scene) unanswered(streams ...*stream) {
	s.Helper()
	for _, st := range streams {
		if tally := s.sample(st, 5); tally.Lost != tally.Sent {
			s.Fatalf("%s: %s, want all lost", st, tally)
		}
	}
}

// judged asserts what the present rules say of the flow of each stream of the case and of each
// bystander, that no other flow in the table is stale, and that flowsweep plan says the same.
func (s *scene) judged(want verdicts) {
	s.Helper()
	s.sent(s.streams...)
	must(s, s.differ(want))
	plan, _ := s.flowsweep("plan")
	if diff := cmp.Diff(staleOf(want), plan); diff != "" {
		s.Fatalf("flowsweep plan would delete (-want +got):\n%s", diff)
	}
}

// differ tells whether the rules say something else of the flows than is expected.
func (s *scene) differ(want verdicts) error {
	s.Helper()
	j, err := ruleset.NewJudge(s.Context(), ruleset.Config{NetNS: s.ns.Path()})
	must(s, err)
	defer j.Close()
	flows, err := s.flows.List(s.Context(), conntrack.Filter{})
	must(s, err)
	got := map[string]string{}
	for i := range flows {
		f := &flows[i]
		v := j.Judge(f)
		name := s.nameOf(f)
		if name == "" && !v.Verdict.Stale() {
			continue // between a proxy and its containers, say
		}
		got[name] = v.Verdict.String()
		if f.Translated() {
			got[name] += " " + netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort).String()
		}
		if v.Why != "" {
			got[name] += ": " + v.Why
		}
		if name == "" {
			got[name] += ": " + f.String()
		}
	}
	all := map[string]string{}
	for _, list := range []verdicts{s.bystanders, want} {
		for st, word := range list {
			all[st.String()] = word
		}
	}
	if diff := cmp.Diff(all, got); diff != "" {
		return fmt.Errorf("the rules say of the flows (-want +got):\n%s", diff)
	}
	return nil
}

func (s *scene) nameOf(f *conntrack.Flow) string {
	from, to := netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
	for _, st := range slices.AppendSeq(slices.Clone(s.streams), maps.Keys(s.bystanders)) {
		if f.Proto == conntrack.UDP && st.from == from && st.to == to {
			return st.String()
		}
	}
	return ""
}

// swept asserts what judged does, and that flowsweep then deletes exactly the flows that are stale.
// The report has a row of what the engine had left.
func (s *scene) swept(want verdicts) {
	s.Helper()
	s.judged(want)
	ended := map[*stream]int{}
	for st := range want {
		ended[st] = len(s.destroyed(s, st))
	}
	stale := staleOf(want)
	got, took := s.flowsweep("sweep")
	if diff := cmp.Diff(stale, got); diff != "" {
		s.Fatalf("flowsweep sweep deletes (-want +got):\n%s", diff)
	}
	reasons := map[string]int{}
	for st, n := range ended {
		deleted := 0
		if reason, ok := stale[st.addrs()]; ok {
			deleted = 1
			reasons[reason]++
		}
		eventually(s, soon, fmt.Sprintf("the sweep deletes the flow of %s %d times", st, deleted), func() error {
			if now := s.destroyed(s, st); len(now) != n+deleted {
				return fmt.Errorf("it has ended %d times: %q", len(now)-n, now[n:])
			}
			return nil
		})
	}
	s.report.add(row{s.name, s.engine, len(want), reasons, took})
}

func (st *stream) addrs() string { return st.from.String() + " > " + st.to.String() }

// staleOf returns the reasons of the streams that are stale, by where they are sent from and to.
func staleOf(want verdicts) map[string]string {
	stale := map[string]string{}
	for st, word := range want {
		if word, _, _ = strings.Cut(word, " "); slices.Contains(staleWords, word) {
			stale[st.addrs()] = word
		}
	}
	return stale
}

var staleWords = []string{
	ruleset.BackendGone.String(), ruleset.Untranslated.String(), ruleset.FrontendGone.String(),
}

// program is flowsweep, as "make build" leaves it.
var program, _ = filepath.Abs("../../bin/flowsweep")

// flowsweep runs plan or sweep on the host, and returns what was stale and why, by where the flows
// were sent from and to, and how long that took.
func (s *scene) flowsweep(verb string) (map[string]string, time.Duration) {
	s.Helper()
	var out struct {
		Flows   []staleFlow
		Summary struct {
			Deleted    int
			DurationMs float64
		}
	}
	must(s, json.Unmarshal([]byte(s.run(s, nil, program, verb, "-o", "json")), &out))
	stale := map[string]string{}
	for _, f := range out.Flows {
		if f.Verdict == "delete" {
			stale[f.addrs()] = f.Reason
		}
	}
	if verb == "sweep" && out.Summary.Deleted != len(stale) {
		s.Fatalf("flowsweep deleted %d of the flows %v", out.Summary.Deleted, stale)
	}
	return stale, time.Duration(out.Summary.DurationMs * float64(time.Millisecond))
}

// watch judges the bystanders after each commit of rules until it is ended, and then returns which of
// them were stale: what an engine has written in part must not make them so.
func (s *stage) watch(t *testing.T) (end func() []string) {
	t.Helper()
	j, err := ruleset.NewJudge(t.Context(), ruleset.Config{NetNS: s.ns.Path()})
	must(t, err)
	conn, err := conntrack.Dial(conntrack.Config{NetNS: s.ns.Path()})
	must(t, err)
	var events []string
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer conn.Close()
		defer j.Close()
		for {
			select {
			case <-stop:
				return
			case <-time.After(pace):
			}
			before := j.Generation()
			if _, err := j.Reload(t.Context()); err != nil || j.Generation() == before {
				continue // it changes again: nothing is judged meanwhile
			}
			flows, err := conn.List(t.Context(), conntrack.Filter{})
			if err != nil {
				events = append(events, err.Error())
				return
			}
			c := &scene{stage: s}
			for i := range flows {
				if v := j.Judge(&flows[i]); v.Verdict.Stale() && c.nameOf(&flows[i]) != "" {
					events = append(events, fmt.Sprintf("%s was %s by the rules of generation %d",
						c.nameOf(&flows[i]), v.Verdict, j.Generation()))
				}
			}
		}
	}()
	end = sync.OnceValue(func() []string {
		close(stop)
		<-done
		return events
	})
	t.Cleanup(func() { end() })
	return end
}

// ending is the end of a flow.
type ending struct {
	at   time.Time
	line string // of conntrack
}

func (e ending) String() string { return e.line }

// destroyed returns what was logged of the ends of the stream's flow.
func (s *stage) destroyed(t testing.TB, st *stream) []ending {
	t.Helper()
	// Not those that a late answer to the stream began, of which it is the reply.
	addrs := fmt.Sprintf("src=%s dst=%s sport=%d dport=%d ", st.from.Addr(), st.to.Addr(), st.from.Port(), st.to.Port())
	var ends []ending
	for line := range strings.Lines(s.log(t, destroyed)) {
		if _, orig, _ := strings.Cut(line, "src="); !strings.HasPrefix("src="+orig, addrs) {
			continue
		}
		var sec, usec int64
		_, err := fmt.Sscanf(line, "[%d.%d", &sec, &usec)
		must(t, err)
		ends = append(ends, ending{time.Unix(sec, usec*1000), strings.TrimSpace(line)})
	}
	return ends
}

// within bounds the wait for something that should come soon.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
