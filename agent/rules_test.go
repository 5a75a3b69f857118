package agent

import (
	"context"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
)

// simRules are the rules of a world as ruleset.Verdicts tells them.
type simRules struct {
	w    *world
	slow time.Duration // to read

	mu    sync.Mutex
	gen   uint32
	known map[int][]byte // as they were read last
	err   error
	seen  map[ruleset.Destination]bool
	// meanwhile, if set, happens once before what was judged is confirmed.
	meanwhile func()
}

func newSimRules(w *world, slow time.Duration) *simRules {
	return &simRules{w: w, slow: slow, known: map[int][]byte{}, seen: map[ruleset.Destination]bool{}}
}

func (r *simRules) Reload(context.Context) (ruleset.Change, error) {
	r.w.mu.Lock()
	gen, rules := r.w.gen, maps.Clone(r.w.rules)
	r.w.mu.Unlock()
	r.mu.Lock()
	same := gen == r.gen && r.err == nil
	r.mu.Unlock()
	if same {
		return ruleset.Change{}, nil
	}
	time.Sleep(r.slow)
	r.mu.Lock()
	defer r.mu.Unlock()
	var ch ruleset.Change
	for s := range simServices {
		if string(r.known[s]) != string(rules[s]) {
			a := simVIP(s)
			ch.Suspects = append(ch.Suspects, ruleset.Suspect{
				Proto: conntrack.UDP, Prefix: netip.PrefixFrom(a.Addr(), 32), MinPort: a.Port(), MaxPort: a.Port(),
			})
		}
	}
	r.gen, r.known, r.err = gen, rules, nil
	return ch, nil
}

// fresh notes when the rules are others by now.
func (r *simRules) fresh() bool {
	gen, _ := r.w.Generation()
	r.mu.Lock()
	defer r.mu.Unlock()
	if gen != r.gen {
		r.err = ruleset.ErrStale
	}
	return r.err == nil
}

func (r *simRules) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *simRules) Confirm() error {
	r.mu.Lock()
	do := r.meanwhile
	r.meanwhile = nil
	r.mu.Unlock()
	if do != nil {
		do()
	}
	r.fresh()
	return r.Err()
}

func (r *simRules) Judge(f *conntrack.Flow) frontend.Verdict {
	if !r.fresh() {
		return frontend.Verdict{Action: frontend.Keep, Reason: frontend.Unpredictable}
	}
	dst := netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
	d := ruleset.Destination{Proto: f.Proto, Addr: dst}
	o := r.Outcome(d)
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(o.To) > 0 {
		r.seen[d] = true
	}
	reason := frontend.BackendGone
	switch to := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort); {
	case o.Allows(to, 0):
		reason = frontend.Serving
	case !f.Translated() && len(o.To) == 0:
		reason = frontend.NoFrontend
	case len(o.To) == 0 && !r.seen[d]:
		reason = frontend.UnknownTranslator
	case len(o.To) == 0:
		reason = frontend.FrontendGone
	case !f.Translated():
		reason = frontend.Untranslated
	}
	return frontend.Verdict{Action: reason.Action(), Reason: reason}
}

func (r *simRules) Outcome(d ruleset.Destination) *ruleset.Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := &ruleset.Outcome{}
	for _, b := range r.known[int(d.Addr.Addr().As4()[3])] {
		o.To = append(o.To, simBackend(b))
	}
	slices.SortFunc(o.To, netip.AddrPort.Compare)
	o.Untranslated = len(o.To) == 0
	if !o.Untranslated {
		o.By = ruleset.Rule{Table: "proxy", Chain: "services", Handle: 7}
	}
	return o
}

func (r *simRules) Scopes() []frontend.Scope {
	return []frontend.Scope{{Family: conntrack.IPv4, Proto: conntrack.UDP}}
}
func (*simRules) Most(uint8) frontend.Sweep { return frontend.All }
func (*simRules) Zones() []uint16           { return []uint16{0} }

func (r *simRules) Seen() (list []ruleset.Destination) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for d := range r.seen {
		list = append(list, d)
	}
	return list
}

func (r *simRules) See(list ...ruleset.Destination) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range list {
		r.seen[d] = true
	}
}

// With the rules at hand nothing is deleted that they would make again, and what
// holds without them holds all the same.
func TestSimulationExact(t *testing.T) {
	for name, tc := range map[string]struct {
		slow    time.Duration
		oneHook bool
	}{
		"fast": {5 * time.Millisecond, false}, "slow": {200 * time.Millisecond, false}, "one hook": {5 * time.Millisecond, true},
	} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				script := rapid.SliceOfN(rapid.Custom(genStep), 1, 8).Draw(rt, "script")
				var err error
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(true)
					w.exact = tc.slow < slowReload
					var rules Rules = newSimRules(w, tc.slow)
					if tc.oneHook {
						rules = oneHook{newSimRules(w, tc.slow)}
					}
					err = simulate(t, w, rules, script)
				})
				if err != nil {
					rt.Fatal(err)
				}
			})
		})
	}
}

// exactly runs an agent with rules and a source in a bubble, whose one service
// has backend 1.
func exactly(t *testing.T, play func(r *simRun, a *Agent, o *observed)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		w.exact = true
		oneService(t, w, w, newSimRules(w, 0), func(r *simRun, a *Agent, o *observed) {
			time.Sleep(2 * simWindow) // the start is settled
			o.mu.Lock()
			o.settled = nil
			o.mu.Unlock()
			play(r, a, o)
		})
		if w.wrong != nil {
			t.Error(w.wrong)
		}
	})
}

// A frontend is settled a moment after the rules follow, and its flows are
// repaired at once.
func TestExactSettling(t *testing.T) {
	exactly(t, func(r *simRun, a *Agent, o *observed) {
		r.truth[0] = []byte{2}
		r.tell(0)
		time.Sleep(5 * time.Second)
		if n := r.w.deleted(); n != 0 {
			t.Errorf("%d flows were deleted while the rules made them", n)
		}
		o.mu.Lock()
		if last := o.passes[len(o.passes)-1].Report; last.Verdicts[frontend.RulesetDisagrees] != 1 || last.Verdicts[frontend.Unconfirmed] != 0 {
			t.Errorf("the flow that the rules would make again is kept as %v", last.Verdicts)
		}
		o.mu.Unlock()
		if s := a.Status(); s.UnsettledTotal != 1 || s.Settling != "rules" {
			t.Errorf("unsettled %d, settling by %s, want 1, rules", s.UnsettledTotal, s.Settling)
		}
		r.w.commit(0, []byte{2})
		time.Sleep(100 * time.Millisecond)
		if n := r.w.deleted(); n != 1 {
			t.Errorf("100 ms after the commit %d flows were deleted, want 1", n)
		}
		time.Sleep(proofAfter + 200*time.Millisecond)
		if s := a.Status(); s.UnsettledTotal != 0 {
			t.Errorf("not settled: %v", s.Unsettled)
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.settled) != 1 || o.settled[0].Repaired < 5*time.Second || o.settled[0].Repaired > 5100*time.Millisecond {
			t.Errorf("settled %v, want one repaired after 5 s", o.settled)
		}
	})
}

// A proxy that does not follow disagrees, as a fact, whether or not there are
// flows; when it comes back, all is repaired at once.
func TestExactDisagreement(t *testing.T) {
	exactly(t, func(r *simRun, a *Agent, o *observed) {
		r.truth[0] = []byte{2}
		r.tell(0)
		time.Sleep(2*simWindow + time.Second)
		s := a.Status()
		if len(s.Disagrees) != 1 || s.Disagrees[0].Rule == "" || s.Disagrees[0].Backend != simBackend(1) {
			t.Fatalf("disagreements: %+v", s.Disagrees)
		}
		if n := r.w.deleted(); n != 0 {
			t.Errorf("%d flows were deleted while the rules made them", n)
		}
		r.w.mu.Lock()
		walks := r.w.walks
		r.w.mu.Unlock()
		time.Sleep(10 * time.Minute)
		r.w.mu.Lock()
		if n := r.w.walks - walks; n > 11 {
			t.Errorf("%d walks in ten minutes of disagreement, want one a minute", n)
		}
		r.w.mu.Unlock()
		r.w.commit(0, []byte{2})
		time.Sleep(1100 * time.Millisecond) // the poll has slowed down
		if n := r.w.deleted(); n != 1 {
			t.Errorf("after the commit %d flows were deleted, want 1", n)
		}
		if s := a.Status(); len(s.Disagrees) != 0 {
			t.Errorf("it still disagrees: %+v", s.Disagrees[0])
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.disagrees) != 1 {
			t.Errorf("told of %d disagreements, want 1", len(o.disagrees))
		}
	})
}

// That holds where there is no flow: the frontend is not settled, and the
// disagreement ends with the rules that follow.
func TestExactDisagreementWithoutFlows(t *testing.T) {
	exactly(t, func(r *simRun, a *Agent, _ *observed) {
		r.truth[1] = []byte{2}
		r.w.commit(1, []byte{1})
		r.tell(1)
		time.Sleep(5*simWindow + time.Second)
		if s := a.Status(); len(s.Disagrees) != 1 || s.UnsettledTotal != 1 {
			t.Errorf("%d disagreements, %d unsettled, want 1 and 1", len(s.Disagrees), s.UnsettledTotal)
		}
		r.w.commit(1, []byte{2})
		time.Sleep(proofAfter + 2*time.Second)
		if s := a.Status(); len(s.Disagrees) != 0 || s.UnsettledTotal != 0 {
			t.Errorf("%d disagreements, %d unsettled, want none", len(s.Disagrees), s.UnsettledTotal)
		}
	})
}

// oneHook are rules of one hook: what they do with a destination, wherever packets
// come from, is not one thing.
type oneHook struct{ *simRules }

func (r oneHook) Outcome(d ruleset.Destination) *ruleset.Outcome {
	o := r.simRules.Outcome(d)
	o.Untranslated = true
	return o
}

// Where a frontend cannot be held against the rules, its flows tell: what is left
// for a whole window, since the rules would make it again, is a disagreement. It
// ends with the rules, or with the flow.
func TestExactDisagreementByFlow(t *testing.T) {
	for name, tc := range map[string]struct {
		rules []byte
		to    netip.AddrPort
	}{
		"to a wrong backend": {[]byte{1}, simBackend(1)},
		"untranslated":       {nil, simVIP(0)},
	} {
		for end, flowEnds := range map[string]bool{"the rules follow": false, "the flow ends": true} {
			t.Run(name+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(true)
					w.exact = true
					oneService(t, w, w, oneHook{newSimRules(w, 0)}, func(r *simRun, a *Agent, o *observed) {
						time.Sleep(2 * simWindow)
						w.commit(0, tc.rules)
						w.mu.Lock()
						clear(w.flows)
						w.mu.Unlock()
						time.Sleep(2 * simPace)
						r.truth[0] = []byte{2}
						r.tell(0)
						time.Sleep(simWindow / 2)
						if s := a.Status(); len(s.Disagrees) != 0 {
							t.Errorf("half a window later: %+v", s.Disagrees[0])
						}
						time.Sleep(2*simWindow - simWindow/2 + 5*time.Second) // one may go by until it is met
						s := a.Status()
						if len(s.Disagrees) != 1 || s.Disagrees[0].Backend != tc.to || s.Disagrees[0].Evidence == "" {
							t.Fatalf("disagreements: %+v", s.Disagrees)
						}
						w.mu.Lock()
						walks := w.walks
						w.mu.Unlock()
						time.Sleep(10 * time.Minute)
						w.mu.Lock()
						if n := w.walks - walks; n > 11 {
							t.Errorf("%d walks in ten minutes of disagreement, want one a minute", n)
						}
						w.mu.Unlock()
						if n := w.deleted(); n != 0 {
							t.Errorf("%d flows were deleted while the rules made them", n)
						}
						wait, want := wideAfter+1100*time.Millisecond, 1 // the poll has slowed down
						if flowEnds {
							w.mu.Lock()
							clear(w.flows)
							w.fullTill = time.Now().Add(time.Hour) // and none begins
							w.mu.Unlock()
							wait, want = disagreePause+time.Second, 0
						} else {
							w.commit(0, []byte{2})
						}
						time.Sleep(wait)
						if n := w.deleted(); n != want {
							t.Errorf("%d flows were deleted, want %d", n, want)
						}
						if s := a.Status(); len(s.Disagrees) != 0 {
							t.Errorf("it still disagrees: %+v", s.Disagrees[0])
						}
						time.Sleep(2 * simWindow)
						if s := a.Status(); s.UnsettledTotal != 0 {
							t.Errorf("not settled: %+v", s.Unsettled)
						}
						o.mu.Lock()
						defer o.mu.Unlock()
						if len(o.disagrees) != 1 {
							t.Errorf("told of %d disagreements, want 1", len(o.disagrees))
						}
					})
					w.verify(t)
				})
			})
		}
	}
}

// Without a source the rules are what is desired, also of before a restart.
func TestByRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		w.exact = true
		state := filepath.Join(t.TempDir(), "state.json")
		for s := range simServices {
			w.commit(s, []byte{1})
			w.knowRules(s)
		}
		run := func(slow time.Duration, play func(a *Agent)) {
			a := New(Options{
				Conn: w, Ruleset: w, Rules: newSimRules(w, slow),
				Config: Config{
					Policy: frontend.DefaultPolicy, Window: simWindow, FullPass: time.Hour, WalkBudget: 0.1, StateFile: state,
				},
			})
			ctx, cancel := context.WithCancel(t.Context())
			var work sync.WaitGroup
			work.Go(func() { _ = a.Run(ctx) })
			work.Go(func() {
				for ctx.Err() == nil {
					for s := range simServices {
						w.send(s, 1)
					}
					time.Sleep(simPace)
				}
			})
			time.Sleep(time.Minute)
			play(a)
			cancel()
			work.Wait()
		}
		change := func(service int, backends ...byte) {
			w.commit(service, backends)
			w.knowRules(service)
		}
		run(0, func(a *Agent) {
			if s := a.Status(); !s.Ready || w.deleted() != 0 {
				t.Fatalf("ready %t, deleted %d", s.Ready, w.deleted())
			}
			change(0, 2)
			time.Sleep(byRulesPoll + quietAfter + 50*time.Millisecond)
			if n := w.deleted(); n != 1 {
				t.Errorf("deleted %d flows, want that of the service that changed", n)
			}
			w.mu.Lock()
			walks := w.walks
			w.mu.Unlock()
			time.Sleep(time.Minute)
			w.mu.Lock()
			if n := w.walks - walks; n != 1 {
				t.Errorf("%d walks after the repair, want the proof", n)
			}
			w.mu.Unlock()
		})
		run(0, func(*Agent) { // rules that are away for a moment, twice, and then for good
			for range 2 {
				w.commit(2, nil)
				time.Sleep(goneAfter / 5)
				w.commit(2, []byte{1})
				time.Sleep(goneAfter)
			}
			if n := w.deleted(); n != 1 {
				t.Errorf("deleted %d flows, want none more", n)
			}
			change(2)
			time.Sleep(goneAfter - time.Second)
			if n := w.deleted(); n != 1 {
				t.Errorf("deleted %d flows before the rule was gone for %s", n, goneAfter)
			}
			time.Sleep(2 * time.Second)
			if n := w.deleted(); n != 2 {
				t.Errorf("deleted %d flows, want also that of the rule that is gone", n)
			}
		})
		change(1)             // gone while the agent is down
		run(0, func(*Agent) { // for a minute already
			if n := w.deleted(); n != 3 {
				t.Errorf("deleted %d flows, want also that of the rule that was seen before", n)
			}
		})
		run(150*time.Millisecond, func(*Agent) { // commits come while the rules are read
			for i := range 20 {
				change(0, 1+byte(i%2))
				time.Sleep(40 * time.Millisecond)
			}
			time.Sleep(2 * time.Second)
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, f := range w.flows {
				if !w.right(&f) {
					t.Errorf("still stale: %s", &f)
				}
			}
		})
		if w.wrong != nil {
			t.Error(w.wrong)
		}
	})
}

// Rules that are committed when flows are about to be deleted decide about these
// flows: none that is right by then is deleted, and none that is stale is forgotten.
func TestConfirmedBeforeDelete(t *testing.T) {
	t.Run("by a source", func(t *testing.T) {
		exactly(t, func(r *simRun, a *Agent, _ *observed) {
			rules := a.exact.(*simRules)
			rules.meanwhile = func() { r.w.commit(0, []byte{1}) }
			r.truth[0] = []byte{2}
			r.tell(0)
			r.w.commit(0, []byte{2})
			time.Sleep(5 * time.Second)
			if n := r.w.deleted(); n != 0 || rules.meanwhile != nil {
				t.Errorf("deleted %d flows that the rules would make again; asked %t", n, rules.meanwhile == nil)
			}
			r.w.commit(0, []byte{2})
			time.Sleep(2 * time.Second)
			if n := r.w.deleted(); n != 1 {
				t.Errorf("deleted %d flows, want 1", n)
			}
		})
	})
	t.Run("by the rules", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(true)
			w.exact = true
			w.commit(0, []byte{1})
			w.knowRules(0)
			rules := newSimRules(w, 0)
			a := New(Options{Conn: w, Ruleset: w, Rules: rules, Config: Config{
				Policy: frontend.DefaultPolicy, Window: simWindow, FullPass: time.Hour, WalkBudget: 0.1,
			}})
			ctx, cancel := context.WithCancel(t.Context())
			var work sync.WaitGroup
			work.Go(func() { _ = a.Run(ctx) })
			defer work.Wait()
			defer cancel()
			w.send(0, 1)
			time.Sleep(time.Second)
			change := func(b byte) {
				w.commit(0, []byte{b})
				w.knowRules(0)
			}
			rules.meanwhile = func() { change(1) }
			change(2)
			time.Sleep(5 * time.Second)
			if n := w.deleted(); n != 0 || rules.meanwhile != nil {
				t.Errorf("deleted %d flows that are right again; asked %t", n, rules.meanwhile == nil)
			}
			rules.meanwhile = func() { change(3) } // stale by these, too
			change(2)
			time.Sleep(5 * time.Second)
			if n := w.deleted(); n != 1 {
				t.Errorf("deleted %d flows, want 1", n)
			}
			if w.wrong != nil {
				t.Error(w.wrong)
			}
		})
	})
}

// knowRules makes the rules of a service what is right.
func (w *world) knowRules(service int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.known[service], w.ever[service] = w.rules[service], true
}
