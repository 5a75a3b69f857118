package agent

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

// The simulation: a model of the kernel's table and NAT, in which a flow's
// translation is decided once, by the rules of that moment; a proxy that writes
// its rules late, wrongly, in parts or not at all; a source that delivers late,
// twice and in bursts; senders that never pause; an agent that is killed and
// comes back. Time is testing/synctest's, so hours take no time, and a failing
// script is shrunk and replayed by rapid.

const (
	simServices = 3
	simSenders  = 2 // of each service
	simPace     = 100 * time.Millisecond
	simWindow   = 60 * time.Second
)

// step is one thing that happens in a script.
type step struct {
	After   time.Duration // since the step before
	Service int
	// Backends are the service's from now on; nil: the service is deleted.
	Backends []byte
	Deliver  time.Duration // until the source tells
	Twice    bool          // and tells again
	Commit   time.Duration // until the proxy has written its rules; < 0: never
	Wrongly  bool          // it first writes something else
	Restart  bool          // the agent is killed and comes back
	Fault    error         // of the kernel, for the next second
	Full     bool          // the table takes no new flow for the next five seconds
	Resync   bool          // the source delivers everything anew
}

var simFaults = []error{syscall.EPERM, syscall.ENOBUFS, conntrack.ErrResized, conntrack.ErrNoAnswer}

func genStep(t *rapid.T) step {
	ms := func(name string, most int) time.Duration {
		return time.Duration(rapid.IntRange(0, most).Draw(t, name)) * time.Millisecond
	}
	s := step{
		After:   ms("after", 30_000),
		Service: rapid.IntRange(0, simServices-1).Draw(t, "service"),
		Deliver: ms("deliver", 2000),
		Commit:  ms("commit", 20_000),
		Twice:   rapid.Bool().Draw(t, "twice"),
		Wrongly: rapid.IntRange(0, 3).Draw(t, "wrongly") == 0,
		Full:    rapid.IntRange(0, 5).Draw(t, "full") == 0,
		Restart: rapid.IntRange(0, 5).Draw(t, "restart") == 0,
		Resync:  rapid.IntRange(0, 5).Draw(t, "resync") == 0,
	}
	if rapid.IntRange(0, 4).Draw(t, "deleted") > 0 {
		s.Backends = rapid.SliceOfNDistinct(rapid.ByteRange(1, 4), 0, 3, rapid.ID).Draw(t, "backends")
		if s.Backends == nil {
			s.Backends = []byte{}
		}
	}
	if rapid.IntRange(0, 5).Draw(t, "fault") == 0 {
		s.Fault = rapid.SampledFrom(simFaults).Draw(t, "errno")
	}
	return s
}

func simVIP(service int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(service)}), 53)
}

func simBackend(b byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, b}), 53)
}

func simFrontends(service int, backends []byte) []frontend.Frontend {
	if backends == nil {
		return nil
	}
	var bs []netip.AddrPort
	for _, b := range backends {
		bs = append(bs, simBackend(b))
	}
	return []frontend.Frontend{{
		Owner: fmt.Sprint("s", service), Kind: frontend.ClusterIP, Proto: conntrack.UDP,
		Addr: simVIP(service).Addr(), Ports: frontend.Port(53), Valid: frontend.NewBackends(bs...), Usable: len(bs),
	}}
}

// world is everything but the agent.
type world struct {
	trusted bool // the ruleset's generation can be trusted
	exact   bool // nothing may be deleted that the rules would make again

	mu        sync.Mutex
	rules     map[int][]byte // what the proxy has written
	gen       uint32
	flows     map[conntrack.Tuple]conntrack.Flow
	ids       uint32
	known     map[int][]byte // what the source has told the agent, by service
	ever      map[int]bool   // told at some time
	fault     error
	faultTill time.Time
	fullTill  time.Time
	deletes   map[conntrack.Tuple][]time.Time
	gone      map[doubt][]time.Time // deletes by translation, one for each moment
	news      map[int][]time.Time   // when the agent was told of a service, began, or could not delete
	answers   func(sender int) bool // whom backends answer; nobody answers what is untranslated
	before    map[int][]byte        // known, while the agent is being told; nil: it is not
	walks     int
	wrong     error // an invariant that does not hold
	stats     conntrack.DumpStats
	next      byte // round robin
}

func newWorld(trusted bool) *world {
	return &world{
		trusted: trusted, rules: map[int][]byte{}, flows: map[conntrack.Tuple]conntrack.Flow{},
		known: map[int][]byte{}, ever: map[int]bool{}, deletes: map[conntrack.Tuple][]time.Time{},
		gone: map[doubt][]time.Time{}, news: map[int][]time.Time{},
		answers: nobody,
	}
}

func nobody(int) bool       { return false }
func everybody(int) bool    { return true }
func everyOther(n int) bool { return n%2 == 1 }

// deleted returns how many tuples were deleted.
func (w *world) deleted() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.deletes)
}

func (w *world) fail(format string, args ...any) {
	if w.wrong == nil {
		w.wrong = fmt.Errorf(format, args...)
	}
}

// send is a packet of a sender: a flow that exists goes where it goes.
func (w *world) send(service, sender int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	dst := simVIP(service)
	o := conntrack.Tuple{
		Src: netip.AddrFrom4([4]byte{192, 0, 2, byte(sender)}), SrcPort: 4000,
		Dst: dst.Addr(), DstPort: dst.Port(),
	}
	if _, ok := w.flows[o]; ok || time.Now().Before(w.fullTill) { // a packet that gets no flow is dropped
		return
	}
	to := dst
	if bs := w.rules[service]; len(bs) > 0 {
		w.next++
		to = simBackend(bs[int(w.next)%len(bs)])
	}
	w.ids++
	f := conntrack.Flow{
		Family: conntrack.IPv4, Proto: conntrack.UDP, ID: w.ids, Orig: o,
		Reply: conntrack.Tuple{Src: to.Addr(), SrcPort: to.Port(), Dst: o.Src, DstPort: o.SrcPort},
	}
	if to != dst && w.answers(sender) {
		f.Status |= conntrack.StatusSeenReply
	}
	w.flows[o] = f
}

func (w *world) commit(service int, backends []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rules[service] = backends
	w.gen++
}

// right tells by what the source has told whether a flow may be kept, in the
// plainest words.
func (w *world) right(f *conntrack.Flow) bool { return w.rightBy(w.known, f) }

func (w *world) rightBy(known map[int][]byte, f *conntrack.Flow) bool {
	service := int(f.Orig.Dst.As4()[3])
	backends, exists := known[service]
	translated := f.Reply.Src != f.Orig.Dst
	switch {
	case !exists:
		return !translated || !w.ever[service]
	case translated:
		return slices.Contains(backends, f.Reply.Src.As4()[3])
	}
	return len(backends) == 0
}

func (w *world) broken() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Now().Before(w.faultTill) {
		for s := range simServices {
			w.news[s] = append(w.news[s], time.Now())
		}
		return w.fault
	}
	return nil
}

// Dump implements sweep.Conn.
func (w *world) Dump(ctx context.Context, f conntrack.Filter) iter.Seq2[*conntrack.Flow, error] {
	return func(yield func(*conntrack.Flow, error) bool) {
		time.Sleep(5 * time.Millisecond)
		w.mu.Lock()
		w.walks++
		var list []conntrack.Flow
		for _, fl := range w.flows {
			if f.Match(&fl) {
				list = append(list, fl)
			}
		}
		w.mu.Unlock()
		for i := range list {
			if !yield(&list[i], nil) {
				return
			}
		}
		if err := errors.Join(ctx.Err(), w.broken()); err != nil {
			yield(nil, err)
		}
	}
}

// Stats implements sweep.Conn.
func (w *world) Stats() conntrack.DumpStats { return w.stats }

// Delete implements sweep.Conn, as the kernel does: by both tuples and id.
func (w *world) Delete(_ context.Context, flows ...conntrack.Flow) (r conntrack.DeleteResult, err error) {
	if err := w.broken(); err != nil {
		return r, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range flows {
		now, ok := w.flows[f.Orig]
		if !ok || now.ID != f.ID {
			r.Gone++
			continue
		}
		if w.right(&now) && (w.before == nil || w.rightBy(w.before, &now)) {
			w.fail("%s: deleted a flow that is right: %s", time.Now().Format(time.TimeOnly), &now)
		}
		backends := w.rules[int(now.Orig.Dst.As4()[3])]
		again := slices.Contains(backends, now.Reply.Src.As4()[3])
		if !now.Translated() {
			again = len(backends) == 0
		}
		if w.exact && again {
			w.fail("%s: deleted a flow that the rules make again: %s", time.Now().Format(time.TimeOnly), &now)
		}
		delete(w.flows, f.Orig)
		w.deletes[f.Orig] = append(w.deletes[f.Orig], time.Now())
		x := doubtOf(&now)
		if n := len(w.gone[x]); n == 0 || !w.gone[x][n-1].Equal(time.Now()) {
			w.gone[x] = append(w.gone[x], time.Now())
		}
		r.Deleted++
	}
	return r, nil
}

// Probe implements sweep.Conn.
func (w *world) Probe(context.Context, ...conntrack.Family) (conntrack.Features, error) {
	ff := conntrack.FamilyFeatures{Proto: conntrack.Honoured, Addr: conntrack.Honoured, Ports: conntrack.Honoured}
	return conntrack.Features{V4: ff, V6: ff, Status: conntrack.Honoured, Zone: conntrack.Honoured}, nil
}

// Count implements sweep.Conn.
func (w *world) Count(context.Context) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.flows), nil
}

// Generation implements Ruleset.
func (w *world) Generation() (uint32, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gen, w.trusted
}

// simSource delivers what it is given.
type simSource struct {
	w     *world
	sinks chan source.Sink // the sink of the agent that runs, once
}

func (*simSource) Name() string { return "sim" }

func (s *simSource) Run(ctx context.Context, sink source.Sink) error {
	s.sinks <- sink
	<-ctx.Done()
	return nil
}

// simRun is one agent's life after the other.
type simRun struct {
	w      *world
	rules  Rules          // nil: they cannot be read
	ranges []netip.Prefix // of services, as the source tells
	state  string
	sink   source.Sink
	truth  map[int][]byte // what the source knows
	cancel context.CancelFunc
	ended  chan struct{}
}

func (r *simRun) start() {
	src := &simSource{w: r.w, sinks: make(chan source.Sink, 1)}
	a := New(Options{
		Conn: r.w, Ruleset: r.w, Rules: r.rules, Sources: []source.Source{src},
		Config: Config{
			Policy: frontend.DefaultPolicy, Window: simWindow, FullPass: 5 * time.Minute, WalkBudget: 0.1,
			DeletesPerSecond: 1000, StateFile: r.state,
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel, r.ended = cancel, make(chan struct{})
	go func() {
		defer close(r.ended)
		if err := a.Run(ctx); err != nil {
			r.w.mu.Lock()
			r.w.fail("the agent ended: %w", err)
			r.w.mu.Unlock()
		}
	}()
	r.sink = <-src.sinks
	r.sink.ServiceRanges(r.ranges)
	r.resync()
}

func (r *simRun) stop() {
	r.cancel()
	<-r.ended
}

// tell delivers one service.
func (r *simRun) tell(service int) {
	r.w.mu.Lock()
	r.w.before = maps.Clone(r.w.known)
	r.knows(service)
	r.w.mu.Unlock()
	r.sink.Set(fmt.Sprint("s", service), simFrontends(service, r.truth[service]))
	r.told()
}

func (r *simRun) told() {
	r.w.mu.Lock()
	r.w.before = nil
	r.w.mu.Unlock()
}

// knows notes that the agent is told of a service. Before it is, and what it knew
// before counts until it has been, so that a delete in between is wrong only where
// both states forbid it.
func (r *simRun) knows(service int) {
	r.w.news[service] = append(r.w.news[service], time.Now())
	if b := r.truth[service]; b != nil {
		r.w.known[service], r.w.ever[service] = b, true
	} else {
		delete(r.w.known, service)
	}
}

func (r *simRun) resync() {
	units := map[string][]frontend.Frontend{}
	r.w.mu.Lock()
	r.w.before = maps.Clone(r.w.known)
	for s := range simServices {
		r.knows(s)
		if fs := simFrontends(s, r.truth[s]); fs != nil {
			units[fmt.Sprint("s", s)] = fs
		}
	}
	r.w.mu.Unlock()
	r.sink.Replace(units)
	r.told()
}

// simulate plays a script and returns what did not hold.
func simulate(t *testing.T, w *world, rules Rules, script []step, ranges ...netip.Prefix) error {
	r := &simRun{w: w, rules: rules, ranges: ranges, state: filepath.Join(t.TempDir(), "state.json"), truth: map[int][]byte{}}
	w.answers = everyOther
	for s := range simServices { // a healthy world to begin with
		r.truth[s] = []byte{1, 2}
		w.commit(s, []byte{1, 2})
	}
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for s := range simServices {
		for n := range simSenders {
			senders.Go(func() {
				tick := time.NewTicker(simPace)
				defer tick.Stop()
				for {
					select {
					case <-stop:
						return
					case <-tick.C:
						w.send(s, n)
					}
				}
			})
		}
	}
	r.start()
	time.Sleep(10 * time.Second)
	w.mu.Lock()
	if len(w.deletes) > 0 {
		w.fail("a healthy table lost flows: %v", w.deletes)
	}
	w.mu.Unlock()

	var late sync.WaitGroup // the proxy's commits
	for _, st := range script {
		time.Sleep(st.After)
		r.truth[st.Service] = st.Backends
		if st.Full {
			w.mu.Lock()
			w.fullTill = time.Now().Add(5 * time.Second)
			w.mu.Unlock()
		}
		if st.Fault != nil {
			w.mu.Lock()
			w.fault, w.faultTill = st.Fault, time.Now().Add(time.Second)
			w.mu.Unlock()
		}
		if st.Wrongly {
			late.Go(func() {
				time.Sleep(st.Commit / 2)
				w.commit(st.Service, []byte{4, 3})
			})
		}
		truth := st.Backends
		late.Go(func() {
			time.Sleep(st.Commit)
			w.commit(st.Service, truth)
		})
		time.Sleep(st.Deliver)
		switch {
		case st.Restart:
			r.stop()
			time.Sleep(st.Deliver)
			r.start()
		case st.Resync:
			r.resync()
		default:
			r.tell(st.Service)
			if st.Twice {
				r.tell(st.Service)
			}
		}
	}
	late.Wait()
	for s := range simServices { // the proxy has caught up, whatever overtook what
		w.commit(s, r.truth[s])
	}
	quiet := time.Now()
	time.Sleep(simWindow + 2*timedMost)
	w.mu.Lock()
	for _, f := range w.flows {
		if !w.right(&f) {
			w.fail("still stale after a quiet window: %s", &f)
		}
	}
	for o, times := range w.deletes {
		n := 0
		for _, at := range times {
			if at.After(quiet) {
				n++
			}
		}
		if n > 1 {
			w.fail("%v was deleted %d times though the rules were right", o, n)
		}
		if most := 3*len(script)*10 + 10; len(times) > most {
			w.fail("%v was deleted %d times", o, len(times))
		}
	}
	if _, blind := rules.(vague); blind || rules == nil {
		w.backsOff()
	}
	walks := w.walks
	w.mu.Unlock()
	time.Sleep(10 * time.Minute) // at rest only full passes are made
	w.mu.Lock()
	if n := w.walks - walks; n > 8 {
		w.fail("%d walks in ten quiet minutes", n)
	}
	w.mu.Unlock()
	r.stop()
	close(stop)
	senders.Wait()
	return w.wrong
}

// backsOff checks that what came back waited 1, 2, 4, ... 60 s for its next delete,
// from one thing that the agent was told to the other. Once, the first commit after
// that may have ended the wait.
func (w *world) backsOff() {
	for x, times := range w.gone {
		news := w.news[int(x.frontend.Addr.As4()[3])]
		var last time.Time
		wait, early := time.Duration(0), 0
		for _, at := range times {
			told := slices.ContainsFunc(news, func(n time.Time) bool { return n.After(last) && !n.After(at) })
			switch {
			case told:
				wait, early = 0, 0
			case at.Sub(last) < wait-200*time.Millisecond: // a walk, and the rate of deletes
				early++
			}
			if early > 1 {
				w.fail("%v was deleted at %v", x, times)
			}
			last, wait = at, min(max(returnFirst, 2*wait), returnMost)
		}
	}
}

func TestSimulation(t *testing.T) {
	for name, tc := range map[string]struct {
		trusted bool
		vague   bool
		ranges  []netip.Prefix
	}{
		"generation": {true, false, nil}, "time, with service ranges": {false, false, []netip.Prefix{simRange}},
		"rules that are not understood": {true, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				script := rapid.SliceOfN(rapid.Custom(genStep), 1, 8).Draw(rt, "script")
				var err error
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(tc.trusted)
					var rules Rules
					if tc.vague {
						rules = vague{newSimRules(w, 0)}
					}
					err = simulate(t, w, rules, script, tc.ranges...)
				})
				if err != nil {
					rt.Fatal(err)
				}
			})
		})
	}
}

// The proxy never writes its rules: that is reported, once, the sweeping backs
// off to once a minute, and when the proxy comes back all is repaired.
func TestRulesetDisagrees(t *testing.T) {
	for name, trusted := range map[string]bool{"generation": true, "time": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(trusted)
				r := &simRun{w: w, truth: map[int][]byte{0: {1}}}
				w.commit(0, []byte{1})
				src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
				a := New(Options{
					Conn: w, Ruleset: w, Sources: []source.Source{src},
					Config: Config{Policy: frontend.DefaultPolicy, Window: simWindow, FullPass: time.Hour, WalkBudget: 0.1},
				})
				ctx, cancel := context.WithCancel(t.Context())
				var work sync.WaitGroup
				work.Go(func() { _ = a.Run(ctx) })
				r.sink = <-src.sinks
				r.resync()
				work.Go(func() {
					for ctx.Err() == nil {
						w.send(0, 1)
						time.Sleep(simPace)
					}
				})
				time.Sleep(time.Second)
				r.truth[0] = []byte{2}
				r.tell(0) // and the rules go on saying 1
				time.Sleep(10 * time.Minute)
				ds := a.Status().Disagrees
				if len(ds) != 1 || ds[0].Frontend != "203.0.113.0:53/UDP" || ds[0].Backend != simBackend(1) || ds[0].Owner != "s0" {
					t.Errorf("disagreements %+v", ds)
				}
				w.mu.Lock()
				n := 0
				for _, at := range slices.Concat(slices.Collect(maps.Values(w.deletes))...) {
					if time.Since(at) < 5*time.Minute {
						n++
					}
				}
				w.mu.Unlock()
				if n < 4 || n > 6 {
					t.Errorf("%d deletes in five minutes of disagreement, want one a minute", n)
				}
				w.commit(0, []byte{2})
				time.Sleep(disagreePause + time.Second)
				w.mu.Lock()
				for _, f := range w.flows {
					if !w.right(&f) {
						t.Errorf("not repaired: %s", &f)
					}
				}
				w.mu.Unlock()
				time.Sleep(3 * time.Minute)
				if s := a.Status(); len(s.Disagrees) != 0 || len(s.Unsettled) != 0 {
					t.Errorf("still %+v, %+v", s.Disagrees, s.Unsettled)
				}
				cancel()
				work.Wait()
			})
		})
	}
}

// A day of changes every minute leaves nothing behind: no goroutine, and a heap
// that does not grow.
func TestDay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		r := &simRun{w: w, truth: map[int][]byte{}, state: filepath.Join(t.TempDir(), "state.json")}
		for s := range simServices {
			r.truth[s] = []byte{1}
			w.commit(s, []byte{1})
		}
		r.start()
		heap := func() (n uint64, goroutines int) {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc, runtime.NumGoroutine()
		}
		var first uint64
		var goroutines int
		for minute := range 24 * 60 {
			s := minute % simServices
			switch {
			case minute%7 == 0:
				r.truth[s] = nil
			default:
				r.truth[s] = []byte{byte(minute%4 + 1), byte(minute/4%4 + 1)}
			}
			r.tell(s)
			time.Sleep(time.Second)
			w.commit(s, r.truth[s])
			for range 10 {
				for s := range simServices {
					w.send(s, minute%50)
				}
				time.Sleep(59 * time.Second / 10)
			}
			w.mu.Lock()
			clear(w.deletes)
			w.mu.Unlock()
			if minute == 120 {
				first, goroutines = heap()
			}
		}
		last, now := heap()
		t.Logf("heap after two hours %d KiB, after a day %d KiB", first>>10, last>>10)
		if last > first+first/2+256<<10 || now > goroutines+2 {
			t.Errorf("heap %d KiB became %d KiB; goroutines %d became %d", first>>10, last>>10, goroutines, now)
		}
		r.stop()
		if w.wrong != nil {
			t.Error(w.wrong)
		}
	})
}

// A source that loses more than half of its frontends at once is held: nothing
// is deleted for it until that has lasted, and nothing at all if they come back.
func TestShrinkHold(t *testing.T) {
	for name, back := range map[string]bool{"confirmed by time": false, "they come back": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(true)
				src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
				a := New(Options{
					Conn: w, Ruleset: w, Sources: []source.Source{src},
					Config: Config{
						Policy: frontend.DefaultPolicy, Window: simWindow, FullPass: time.Hour, WalkBudget: 0.1,
						ShrinkHold: time.Minute, ShrinkMinimum: 2,
					},
				})
				r := &simRun{w: w, truth: map[int][]byte{}}
				for s := range simServices {
					r.truth[s] = []byte{1}
					w.commit(s, []byte{1})
					w.send(s, 1)
				}
				ctx, cancel := context.WithCancel(t.Context())
				var work sync.WaitGroup
				work.Go(func() { _ = a.Run(ctx) })
				r.sink = <-src.sinks
				r.resync()
				time.Sleep(2 * simWindow)

				whole := maps.Clone(r.truth)
				delete(r.truth, 1)
				delete(r.truth, 2)
				r.resync()
				time.Sleep(50 * time.Second)
				if held, n := a.Status().Sources[0].Held, w.deleted(); held == "" || n != 0 {
					t.Errorf("held %q, %d flows deleted", held, n)
				}
				if back {
					r.truth = whole
					r.resync()
				}
				time.Sleep(2 * simWindow)
				want := 2
				if back {
					want = 0
				}
				if held, n := a.Status().Sources[0].Held, w.deleted(); held != "" || n != want {
					t.Errorf("held %q, %d flows deleted, want %d", held, n, want)
				}
				cancel()
				work.Wait()
				if w.wrong != nil {
					t.Error(w.wrong)
				}
			})
		})
	}
}
