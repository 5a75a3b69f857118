package agent

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

// observed keeps what an Observer is told.
type observed struct {
	mu      sync.Mutex
	passes  []Pass
	settled []Settled

	disagrees []Disagreement
}

func (o *observed) Pass(p Pass) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.passes = append(o.passes, p)
}

func (o *observed) Settled(s Settled) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.settled = append(o.settled, s)
}

func (o *observed) Disagrees(d Disagreement) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.disagrees = append(o.disagrees, d)
}

// hungRules is a ruleset that answers one at a time, and not while turn is held.
type hungRules struct {
	*world
	turn chan struct{}
}

func (r *hungRules) Generation() (uint32, bool) {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	return r.world.Generation()
}

// observe runs an agent in a bubble whose world has one service with backend 1.
func observe(t *testing.T, play func(r *simRun, a *Agent, rules *hungRules, o *observed)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		rules := &hungRules{world: w, turn: make(chan struct{}, 1)}
		oneService(t, w, rules, nil, func(r *simRun, a *Agent, o *observed) { play(r, a, rules, o) })
	})
}

// oneService runs an agent in a world that has one service with backend 1, to
// which a sender sends, while play goes on.
func oneService(t *testing.T, w *world, commits Ruleset, rules Rules, play func(r *simRun, a *Agent, o *observed)) {
	r := &simRun{w: w, truth: map[int][]byte{0: {1}}}
	w.commit(0, []byte{1})
	src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
	o := &observed{}
	a := New(Options{
		Conn: w, Ruleset: commits, Rules: rules, Sources: []source.Source{src}, Observers: []Observer{o},
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
	play(r, a, o)
	cancel()
	work.Wait()
}

// The repair is the last stale flow that was found; the proof takes the window.
func TestSettledTells(t *testing.T) {
	observe(t, func(r *simRun, a *Agent, _ *hungRules, o *observed) {
		time.Sleep(2 * simWindow)
		o.mu.Lock()
		if len(o.settled) != 1 || o.settled[0].After < simWindow || o.settled[0].Repaired != 0 {
			t.Errorf("after the start: %v", o.settled)
		}
		o.settled = nil
		o.mu.Unlock()

		r.truth[0] = []byte{2}
		r.tell(0)
		time.Sleep(3 * time.Second)
		if s := a.Status(); s.UnsettledTotal != 1 || len(s.Unsettled) != 1 {
			t.Errorf("unsettled: %d, %v", s.UnsettledTotal, s.Unsettled)
		}
		r.w.commit(0, []byte{2})
		time.Sleep(2 * simWindow)
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.settled) != 1 {
			t.Fatalf("settled: %v", o.settled)
		}
		s := o.settled[0]
		if s.Repaired < 3*time.Second || s.Repaired > 3100*time.Millisecond {
			t.Errorf("repaired after %s, want 3 s, when the rules were committed", s.Repaired)
		}
		// The window starts with the pass that found the last one.
		if proof := s.After - s.Repaired - simWindow; proof.Abs() > time.Second {
			t.Errorf("settled after %s, want a window more than %s", s.After, s.Repaired)
		}
	})
}

// What only a full pass finds has no change to count from, until it comes back.
func TestSettledWithoutAChange(t *testing.T) {
	observe(t, func(r *simRun, _ *Agent, _ *hungRules, o *observed) {
		time.Sleep(2 * simWindow)
		time.Sleep(simPace / 2)  // between two packets
		r.w.commit(0, []byte{4}) // the proxy does what nobody told it
		r.w.mu.Lock()
		clear(r.w.flows)
		r.w.mu.Unlock()
		time.Sleep(simPace)
		r.w.commit(0, []byte{1})
		time.Sleep(time.Hour + 2*simWindow)
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.settled) != 2 || o.settled[1].Repaired != 0 {
			t.Errorf("settled: %v, want the start and one without a repair", o.settled)
		}
	})
}

// A kernel that does not answer shows in Alive, and holds up neither that nor
// Status.
func TestStatusDoesNotWait(t *testing.T) {
	observe(t, func(_ *simRun, a *Agent, rules *hungRules, _ *observed) {
		time.Sleep(time.Minute)
		if s := a.Status(); !a.Alive() || !s.Ready || s.Settling != "generation" {
			t.Errorf("alive %t, %+v", a.Alive(), s)
		}
		rules.turn <- struct{}{}
		begin := time.Now()
		if s := a.Status(); s.Settling != "generation" || !s.Time.Equal(begin) || time.Since(begin) > 0 {
			t.Errorf("Status took %s: %+v", time.Since(begin), s)
		}
		time.Sleep(time.Minute)
		if a.Alive() {
			t.Error("alive, though the loop stands")
		}
		<-rules.turn
		time.Sleep(time.Second)
		if !a.Alive() {
			t.Error("the loop moves again, and it does not say so")
		}
	})
}

// A new backend may be in the rules before the source tells of it. Its flows are
// left for a moment, and no longer.
func TestUnknownBackend(t *testing.T) {
	for _, tc := range []struct {
		name  string
		after time.Duration // until the source tells
		fault error         // of the source, until then
		want  int           // deleted within 5 s
	}{
		{"told in time", 900 * time.Millisecond, nil, 0},
		{"not told", time.Hour, nil, 1},
		{"told late by a source that knows it is", time.Hour, errors.New("no connection"), 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			observe(t, func(r *simRun, _ *Agent, _ *hungRules, _ *observed) {
				time.Sleep(2 * simWindow)
				r.truth[1] = []byte{}
				r.tell(1) // a Service comes before its EndpointSlice
				time.Sleep(100 * time.Millisecond)
				r.w.commit(1, []byte{2})
				r.w.send(1, 1)
				if tc.fault != nil {
					r.sink.Fault(tc.fault)
				}
				time.AfterFunc(tc.after, func() {
					r.truth[1] = []byte{2}
					r.tell(1)
				})
				time.Sleep(800 * time.Millisecond)
				if n := r.w.deleted(); n != 0 {
					t.Errorf("%d flows deleted at first sight", n)
				}
				time.Sleep(5 * time.Second)
				if n := r.w.deleted(); n != tc.want {
					t.Errorf("%d flows deleted, want %d", n, tc.want)
				}
				if tc.fault != nil {
					time.Sleep(10 * time.Minute)
					if n := r.w.deleted(); n != 0 {
						t.Errorf("%d flows deleted while the source has a fault", n)
					}
					r.sink.Fault(nil)
					time.Sleep(6 * time.Minute)
					if n := r.w.deleted(); n != 1 {
						t.Errorf("%d flows deleted after it, want 1", n)
					}
				}
			})
		})
	}
}

// Observers are told of a disagreement once, however long it lasts, and again
// when it comes back.
func TestDisagreesTells(t *testing.T) {
	observe(t, func(r *simRun, a *Agent, _ *hungRules, o *observed) {
		told := func(want int, when string) {
			t.Helper()
			o.mu.Lock()
			defer o.mu.Unlock()
			if len(o.disagrees) != want {
				t.Errorf("%s: told of %+v, want %d", when, o.disagrees, want)
			}
			for _, d := range o.disagrees {
				if d.Frontend != "203.0.113.0:53/UDP" || d.Owner != "s0" || d.Kind != frontend.ClusterIP ||
					d.Backend != simBackend(1) || d.Passes < disagreePasses || d.Since.IsZero() || d.Evidence == "" {
					t.Errorf("%s: told of %+v", when, d)
				}
			}
		}
		time.Sleep(2 * simWindow)
		told(0, "at the start")
		r.sink.Host(source.Host{Other: []netip.Addr{simVIP(0).Addr()}}) // so that two watches find its flows
		r.truth[0] = []byte{2}
		r.tell(0) // and the rules go on saying 1
		time.Sleep(30 * time.Second)
		told(0, "before the window is over")
		time.Sleep(2 * simWindow)
		told(1, "after it")
		time.Sleep(2 * time.Hour) // full passes, too, find the same
		told(1, "two hours later")
		r.w.commit(0, []byte{2})
		time.Sleep(10 * time.Minute)
		if s := a.Status(); len(s.Disagrees) != 0 {
			t.Errorf("still %+v", s.Disagrees)
		}
		told(1, "after the rules agree")
		r.w.commit(0, []byte{1})
		r.w.mu.Lock()
		clear(r.w.flows)
		r.w.mu.Unlock()
		r.tell(0)
		time.Sleep(2*time.Hour + 2*simWindow)
		told(2, "after they disagree again")
	})
}
