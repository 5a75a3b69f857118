package agent

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
)

// vague are rules that can be read and not understood.
type vague struct{ *simRules }

func (vague) Judge(*conntrack.Flow) frontend.Verdict {
	return frontend.Verdict{Action: frontend.Keep, Reason: frontend.Unpredictable}
}

func (vague) Outcome(ruleset.Destination) *ruleset.Outcome {
	return &ruleset.Outcome{Any: true, Why: "a rule is not understood"}
}

// times returns when a translation of a service was deleted, counted from a
// moment.
func (w *world) times(service int, to netip.AddrPort, since time.Time) (list []time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	vip := simVIP(service)
	key := frontend.Key{Addr: vip.Addr(), Proto: conntrack.UDP, Ports: frontend.Port(vip.Port())}
	for _, at := range w.gone[doubt{key, to}] {
		if !at.Before(since) {
			list = append(list, at.Sub(since))
		}
	}
	return list
}

// busy makes commits that change nothing for any service, ten a second.
func (w *world) busy(until time.Time) {
	for time.Now().Before(until) {
		w.mu.Lock()
		w.gen++
		w.mu.Unlock()
		time.Sleep(simPace)
	}
}

// The worlds in which it cannot be told what the rules do.
var blindWorlds = map[string]struct {
	trusted bool
	vague   bool
}{
	"by time": {false, false}, "by commits": {true, false}, "by rules that are not understood": {true, true},
}

func eachBlind(t *testing.T, play func(t *testing.T, r *simRun, a *Agent)) {
	for name, tc := range blindWorlds {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(tc.trusted)
				var rules Rules
				if tc.vague {
					rules = vague{newSimRules(w, 0)}
				}
				oneService(t, w, w, rules, func(r *simRun, a *Agent, _ *observed) {
					time.Sleep(2 * simWindow) // the start is settled
					play(t, r, a)
				})
			})
		})
	}
}

// What comes back after its delete waits 1, 2, 4, ... 60 s for the next one,
// whatever makes passes meanwhile, and is reported when a window is over.
func TestBackOff(t *testing.T) {
	for name, wrong := range map[string]struct {
		rules []byte // of the service, whose backend is 2 as the source tells
		to    netip.AddrPort
		first time.Duration // to the first delete, at most
	}{
		"to a backend that has left":          {[]byte{1}, simBackend(1), 100 * time.Millisecond},
		"to a backend that was never known":   {[]byte{9}, simBackend(9), 3500 * time.Millisecond},
		"untranslated, as was nothing before": {nil, simVIP(0), 2500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			eachBlind(t, func(t *testing.T, r *simRun, a *Agent) {
				r.w.commit(0, wrong.rules)
				if wrong.to != simBackend(1) { // flows go there, as before
					r.w.mu.Lock()
					clear(r.w.flows)
					r.w.mu.Unlock()
					time.Sleep(2 * simPace)
				}
				begin := time.Now()
				go r.w.busy(begin.Add(10 * time.Minute))
				r.truth[0] = []byte{2}
				r.tell(0)
				time.Sleep(simWindow + 5*time.Second)
				if d := a.Status().Disagrees; len(d) != 1 || d[0].Backend != wrong.to || d[0].Passes < disagreePasses {
					t.Errorf("a window later: %+v", d)
				}
				time.Sleep(9 * time.Minute)
				times := r.w.times(0, wrong.to, begin)
				t.Log(times)
				if len(times) < 12 || times[0] > wrong.first {
					t.Errorf("deleted at %v", times)
					return
				}
				wait := returnFirst
				early := 0
				for i := range times[1:] {
					gap := times[i+1] - times[i]
					if gap < wait-10*time.Millisecond {
						early++ // with the first commit after the change
					}
					if gap > wait+2500*time.Millisecond { // the wide pass after a commit, and a doubt
						t.Errorf("delete %d comes %s after the one before, want %s", i+2, gap, wait)
					}
					wait = min(2*wait, returnMost)
				}
				if early > 1 {
					t.Errorf("deleted at %v, too often", times)
				}
				r.w.commit(0, []byte{2})
				time.Sleep(returnMost + simWindow + 5*time.Second)
				s := a.Status()
				if n := len(r.w.times(0, wrong.to, begin)); n > len(times)+1 || len(s.Disagrees) != 0 {
					t.Errorf("after the rules are right, deleted %d times more; %+v", n-len(times), s.Disagrees)
				}
			})
		})
	}
}

// partial are rules that are understood, and beside which something else makes
// flows.
type partial struct{ *simRules }

func (partial) Judge(*conntrack.Flow) frontend.Verdict {
	return frontend.Verdict{Action: frontend.Delete, Reason: frontend.BackendGone}
}

// What the rules cannot make, and comes back all the same, waits like anything
// else: they are not all that there is.
func TestBackOffBesideTheRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		oneService(t, w, w, partial{newSimRules(w, 0)}, func(r *simRun, a *Agent, _ *observed) {
			time.Sleep(2 * simWindow)
			begin := time.Now()
			go w.busy(begin.Add(10 * time.Minute))
			r.truth[0] = []byte{2}
			r.tell(0)
			time.Sleep(10 * time.Minute)
			times := w.times(0, simBackend(1), begin)
			if n := len(times); n < 12 || n > 17 {
				t.Errorf("deleted at %v", times)
			}
			if d := a.Status().Disagrees; len(d) != 1 || d[0].Backend != simBackend(1) {
				t.Errorf("%+v", d)
			}
		})
	})
}

// What was answered, by what was never known, is deleted last and once: a minute
// passes until it is tried again, and where commits can be seen an hour, or one of
// them and 10, 20, 40, ... s.
func TestLeastCertain(t *testing.T) {
	for name, busy := range map[string]bool{"no commits": false, "many commits": true} {
		t.Run(name, func(t *testing.T) {
			eachBlind(t, func(t *testing.T, r *simRun, a *Agent) {
				r.w.mu.Lock()
				r.w.answers = everybody
				clear(r.w.flows)
				r.w.mu.Unlock()
				r.w.commit(0, []byte{9})
				time.Sleep(2 * simPace)
				r.truth[0] = []byte{1, 3} // so that there is something to watch
				begin := time.Now()
				if busy {
					go r.w.busy(begin.Add(10 * time.Minute))
				}
				r.tell(0)
				r.truth[0] = []byte{1}
				r.tell(0)
				time.Sleep(2*simWindow + 5*time.Second) // one may go by until it is met
				if d := a.Status().Disagrees; len(d) != 1 || d[0].Backend != simBackend(9) {
					t.Errorf("it came back, and is not told of: %+v", d)
				}
				time.Sleep(8 * time.Minute)
				times := r.w.times(0, simBackend(9), begin)
				t.Log(times)
				least, most, wait := 1, 1, returnMost
				if busy || !r.w.trusted {
					least, most = 8, 13
				}
				if busy && r.w.trusted {
					wait = lastAfter
				}
				if n := len(times); n < least || n > most || times[0] < lastAfter {
					t.Errorf("deleted at %v, want %d to %d times, and not before %s", times, least, most, lastAfter)
				}
				for i := range times[1:] {
					if gap := times[i+1] - times[i]; gap < wait-10*time.Millisecond {
						t.Errorf("delete %d comes %s after the one before", i+2, gap)
					}
					wait = min(2*wait, returnMost)
				}
				r.w.commit(0, []byte{1}) // it was wrong after all
				time.Sleep(returnMost + lastAfter + 5*time.Second)
				r.w.mu.Lock()
				defer r.w.mu.Unlock()
				for _, f := range r.w.flows {
					if !r.w.right(&f) {
						t.Errorf("still stale: %s", &f)
					}
				}
			})
		})
	}
}

// While something else of the frontend is stale and comes back, the proxy is not
// done, and the least certain is not touched.
func TestLastComesLast(t *testing.T) {
	eachBlind(t, func(t *testing.T, r *simRun, _ *Agent) {
		r.w.mu.Lock()
		r.w.answers = everybody
		r.w.mu.Unlock()
		r.w.commit(0, []byte{9})
		time.Sleep(2 * simPace)
		r.w.send(0, 2) // goes to 9, as that of sender 1 goes to 1
		begin := time.Now()
		go r.w.busy(begin.Add(time.Minute))
		r.truth[0] = []byte{2}
		r.w.commit(0, []byte{1})
		r.tell(0)
		time.Sleep(40 * time.Second)
		if n := len(r.w.times(0, simBackend(1), begin)); n < 4 {
			t.Errorf("what has left was deleted %d times in 40 s", n)
		}
		if times := r.w.times(0, simBackend(9), begin); times != nil {
			t.Errorf("the least certain was deleted at %v, before what comes back is gone", times)
		}
		r.w.commit(0, []byte{2})
		time.Sleep(time.Minute)
		if times := r.w.times(0, simBackend(9), begin); len(times) != 1 {
			t.Errorf("the least certain was deleted at %v, want once", times)
		}
	})
}

// A flow of another translation does not wait because one comes back.
func TestOthersDoNotWait(t *testing.T) {
	eachBlind(t, func(t *testing.T, r *simRun, a *Agent) {
		r.truth[0] = []byte{3} // the rules go on saying 1
		r.tell(0)
		time.Sleep(3 * time.Minute)
		if len(a.Status().Disagrees) != 1 {
			t.Fatalf("%+v", a.Status().Disagrees)
		}
		for _, service := range []int{0, 1} { // that frontend, and another one
			r.truth[service] = []byte{3, 4}
			r.w.commit(service, []byte{4})
			r.tell(service)
			r.w.send(service, 5)
			time.Sleep(time.Second)
			begin := time.Now()
			r.truth[service] = []byte{3}
			r.tell(service)
			time.Sleep(50 * time.Millisecond)
			if times := r.w.times(service, simBackend(4), begin); len(times) != 1 {
				t.Errorf("service %d: deleted at %v, want at once", service, times)
			}
			r.w.send(service, 5)
			time.Sleep(3 * time.Second)
			r.w.commit(service, []byte{3}) // and the proxy follows
			late := 4 * time.Second
			if r.w.trusted {
				late = 100 * time.Millisecond
			}
			time.Sleep(late)
			r.w.mu.Lock()
			for _, f := range r.w.flows {
				if doubtOf(&f).backend == simBackend(4) {
					t.Errorf("service %d: still stale %s after the commit: %s", service, late, &f)
				}
			}
			r.w.mu.Unlock()
		}
	})
}

// The first commit after a change is the proxy's answer to it: what came back
// before goes at once. Later ones end no wait.
func TestAnswerEndsTheWait(t *testing.T) {
	observe(t, func(r *simRun, _ *Agent, _ *hungRules, _ *observed) {
		time.Sleep(2 * simWindow)
		for range 5 { // one rollout after the other
			from, to := r.truth[0][0], 3-r.truth[0][0]
			begin := time.Now()
			r.truth[0] = []byte{to}
			r.tell(0)
			time.Sleep(300 * time.Millisecond) // the proxy is late
			r.w.commit(0, []byte{to})
			time.Sleep(simPace)
			times := r.w.times(0, simBackend(from), begin)
			if len(times) != 2 || times[1] > 300*time.Millisecond+simPace {
				t.Errorf("deleted at %v, want at once and after the commit", times)
			}
			time.Sleep(500 * time.Millisecond)
		}
		begin := time.Now()
		from := r.truth[0][0]
		r.truth[0] = []byte{4}
		r.tell(0)
		time.Sleep(100 * time.Millisecond)
		for range 8 { // commits that change nothing
			r.w.commit(1, []byte{1})
			time.Sleep(100 * time.Millisecond)
		}
		if times := r.w.times(0, simBackend(from), begin); len(times) != 2 {
			t.Errorf("deleted at %v, want at once and after the first commit", times)
		}
	})
}

// foggy are rules that are not understood for a while.
type foggy struct {
	*simRules
	fog atomic.Bool
}

func (r *foggy) Judge(f *conntrack.Flow) frontend.Verdict {
	if r.fog.Load() {
		return vague{r.simRules}.Judge(f)
	}
	return r.simRules.Judge(f)
}

func (r *foggy) Outcome(d ruleset.Destination) *ruleset.Outcome {
	if r.fog.Load() {
		return vague{r.simRules}.Outcome(d)
	}
	return r.simRules.Outcome(d)
}

// What came back while nobody knew what the rules make goes at once when they are
// known not to make it.
func TestKnowledgeEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		rules := &foggy{simRules: newSimRules(w, 0)}
		oneService(t, w, w, rules, func(r *simRun, a *Agent, _ *observed) {
			time.Sleep(2 * simWindow)
			rules.fog.Store(true)
			go w.busy(time.Now().Add(5 * time.Minute))
			r.truth[0] = []byte{2}
			r.tell(0)
			time.Sleep(5 * time.Minute)
			begin := time.Now()
			rules.fog.Store(false)
			w.commit(0, []byte{2})
			time.Sleep(wideAfter + 1100*time.Millisecond) // the poll has slowed down
			if times := w.times(0, simBackend(1), begin); len(times) != 1 || len(a.Status().Disagrees) != 0 {
				t.Errorf("deleted at %v; %+v", times, a.Status().Disagrees)
			}
		})
	})
}

// A pass that fails has deleted nothing, as far as anybody knows, so that what it
// meant to delete has not come back.
func TestFailedPassDeletesNothing(t *testing.T) {
	eachBlind(t, func(t *testing.T, r *simRun, _ *Agent) {
		r.w.mu.Lock()
		r.w.answers = everybody
		clear(r.w.flows)
		r.w.mu.Unlock()
		r.w.commit(0, []byte{9})
		begin := time.Now()
		r.truth[0] = []byte{1, 3}
		r.tell(0)
		r.truth[0] = []byte{1}
		r.tell(0)
		time.Sleep(100 * time.Millisecond)
		r.w.commit(0, []byte{9}) // so that its flow is met in two seconds
		time.Sleep(lastAfter - time.Second)
		r.w.mu.Lock()
		r.w.fault, r.w.faultTill = syscall.ENOBUFS, begin.Add(lastAfter+5*time.Second)
		r.w.mu.Unlock()
		time.Sleep(3 * lastAfter)
		if times := r.w.times(0, simBackend(9), begin); len(times) != 1 {
			t.Errorf("deleted at %v, want once, when the kernel answers again", times)
		}
	})
}

// A fault of the source ends doubts, but not what is known of what came back.
func TestUnsee(t *testing.T) {
	now := time.Now()
	x, y := doubt{backend: simBackend(1)}, doubt{backend: simBackend(2)}
	d := doubts{}
	d.see(x, now, false)
	d.delete(y, now, 1, false, false)
	d.see(y, now.Add(time.Second), true)
	d.unsee()
	if _, is := d[x]; is {
		t.Error("a doubt is left")
	}
	if got := d[y]; !got.first.IsZero() || !got.deleted.Equal(now) || got.wait != returnFirst {
		t.Errorf("%+v", got)
	}
}

// A translation that was wrong once is not known to be wrong for ever: its backend
// may come to life, and the proxy know of it first.
func TestConfirmedOnce(t *testing.T) {
	eachBlind(t, func(t *testing.T, r *simRun, _ *Agent) {
		go r.w.busy(time.Now().Add(time.Hour)) // so that passes look
		for phase := range 12 {
			look := func(backends ...byte) { // something for the agent to watch
				r.truth[1] = append([]byte{1, 3}, backends...)
				r.tell(1)
				r.truth[1] = append([]byte{1}, backends...)
				r.tell(1)
			}
			flow := func() {
				r.w.commit(1, []byte{9})
				r.w.send(1, phase)
				r.w.commit(1, []byte{1})
			}
			look()
			flow()
			time.Sleep(2 * simWindow)
			begin := time.Now()
			look()
			time.Sleep(time.Second + time.Duration(phase)*200*time.Millisecond)
			flow() // the proxy knows, for a moment alone
			time.Sleep(900 * time.Millisecond)
			look(9)
			time.Sleep(2 * simWindow)
			if times := r.w.times(1, simBackend(9), begin); times != nil {
				t.Errorf("deleted at %v, though it was right", times)
			}
			look() // deleted, as it has left
			time.Sleep(2 * simWindow)
		}
	})
}

// A dry run deletes nothing, so that nothing can come back.
func TestBackOffDryRun(t *testing.T) {
	eachBlind(t, func(t *testing.T, r *simRun, a *Agent) {
		a.mu.Lock()
		cfg := a.cfg
		a.mu.Unlock()
		cfg.DryRun, cfg.FullPass = true, 10*time.Second
		a.Reconfigure(cfg)
		r.truth[0] = []byte{2}
		r.tell(0)
		time.Sleep(2 * time.Minute)
		s := a.Status()
		if s.LastPass.Stale != 1 || r.w.deleted() != 0 || len(s.Disagrees) != 0 {
			t.Errorf("%d stale, %d deleted, %+v", s.LastPass.Stale, r.w.deleted(), s.Disagrees)
		}
	})
}

// What is remembered has a bound, and what is certain is never kept from being
// deleted by it.
func TestDoubtsAreBounded(t *testing.T) {
	now := time.Now()
	at := func(i int) doubt {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		return doubt{frontend.Key{Addr: addr, Proto: conntrack.UDP, Ports: frontend.Port(53)}, simBackend(1)}
	}
	d := doubts{}
	for i := range 3 * mostDoubts {
		if _, ok := d.see(at(i), now, false); ok != (i < mostDoubts) {
			t.Fatalf("doubt %d finds room: %t", i, ok)
		}
	}
	for i := range 3 * mostDoubts {
		d.delete(at(i), now, 1, false, false)
		if d[at(i)].deleted.IsZero() {
			t.Fatalf("delete %d is not remembered", i)
		}
	}
	if len(d) != mostDoubts {
		t.Errorf("%d are remembered, want %d", len(d), mostDoubts)
	}
	if d.forget(now.Add(1)); len(d) != 0 {
		t.Errorf("%d are remembered for ever", len(d))
	}
}

// What a change makes wrong anew has not come back.
func TestRenew(t *testing.T) {
	vip, other := simVIP(0), simVIP(1)
	key := func(a netip.AddrPort) frontend.Key {
		return frontend.Key{Addr: a.Addr(), Proto: conntrack.UDP, Ports: frontend.Port(a.Port())}
	}
	lost := func(k frontend.Key, c frontend.Cause, b ...netip.AddrPort) frontend.Suspect {
		return frontend.Suspect{Key: k, Cause: c, Lost: b}
	}
	everywhere := frontend.Key{Addr: netip.IPv4Unspecified(), Proto: conntrack.UDP, Ports: frontend.Ports{First: 50, Last: 60}}
	tcp := everywhere
	tcp.Proto = conntrack.TCP
	elsewhere := everywhere
	elsewhere.Ports.First = 54
	six := everywhere
	six.Addr = netip.IPv6Unspecified()
	for name, tc := range map[string]struct {
		s    frontend.Suspect
		left []doubt
	}{
		"a backend":                            {lost(key(vip), frontend.CauseBackendLost, simBackend(1)), []doubt{{key(vip), vip}, {key(other), simBackend(1)}}},
		"another backend":                      {lost(key(vip), frontend.CauseBackendLost, simBackend(2)), nil},
		"the same port":                        {lost(key(vip), frontend.CauseGone, netip.AddrPortFrom(simBackend(1).Addr(), 0)), []doubt{{key(vip), vip}, {key(other), simBackend(1)}}},
		"the first backend":                    {lost(key(vip), frontend.CauseFirstBackend), []doubt{{key(vip), simBackend(1)}, {key(other), simBackend(1)}}},
		"of a range, on every address":         {lost(everywhere, frontend.CauseBackendLost, simBackend(1)), []doubt{{key(vip), vip}}},
		"of another protocol":                  {lost(tcp, frontend.CauseBackendLost, simBackend(1)), nil},
		"of a range elsewhere":                 {lost(elsewhere, frontend.CauseBackendLost, simBackend(1)), nil},
		"of every address of the other family": {lost(six, frontend.CauseBackendLost, simBackend(1)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			all := []doubt{{key(vip), simBackend(1)}, {key(vip), vip}, {key(other), simBackend(1)}}
			d := doubts{}
			for _, x := range all {
				d.delete(x, time.Now(), 1, false, false)
			}
			d.renew(frontend.Change{Suspects: []frontend.Suspect{tc.s}})
			want := tc.left
			if want == nil {
				want = all
			}
			for _, x := range all {
				if _, is := d[x]; is != slices.Contains(want, x) {
					t.Errorf("%v is remembered: %t", x, is)
				}
			}
		})
	}
}
