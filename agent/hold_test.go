package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

// simRange is where the services of the simulation have their addresses.
var simRange = netip.MustParsePrefix("203.0.113.0/24")

// holding is a configuration whose full passes would find in no time what ought
// to be held.
func holding() Config {
	return Config{
		Policy: frontend.DefaultPolicy, Window: 10 * time.Second, FullPass: 10 * time.Second, WalkBudget: 1,
		ShrinkHold: 5 * time.Minute, ShrinkMinimum: 2,
	}
}

// live runs an agent that has been told of nothing yet, until stop.
func live(t *testing.T, w *world, cfg Config) (r *simRun, a *Agent, stop func()) {
	t.Helper()
	src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
	a = New(Options{Conn: w, Ruleset: w, Sources: []source.Source{src}, Config: cfg})
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() {
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r = &simRun{w: w, truth: map[int][]byte{}, sink: <-src.sinks}
	return r, a, func() {
		cancel()
		work.Wait()
	}
}

// healthy gives each service one backend and a flow to it.
func (r *simRun) healthy() {
	for s := range simServices {
		r.truth[s] = []byte{1}
		r.w.commit(s, []byte{1})
		r.w.send(s, 1)
	}
	r.resync()
}

func (w *world) verify(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wrong != nil {
		t.Error(w.wrong)
	}
}

// A source whose frontends stay and whose backends vanish is held as well: an API
// server that has lost its EndpointSlices.
func TestHoldForBackends(t *testing.T) {
	for name, tc := range map[string]struct {
		left map[int][]byte // backends
		held bool
	}{
		"all vanish":             {map[int][]byte{0: {}, 1: {}, 2: {}}, true},
		"more than half vanish":  {map[int][]byte{0: {1}, 1: {}, 2: {}}, true},
		"some vanish":            {map[int][]byte{0: {1}, 1: {1}, 2: {}}, false},
		"all are others":         {map[int][]byte{0: {2}, 1: {2}, 2: {2}}, false},
		"frontends vanish":       {map[int][]byte{0: {1, 2, 3}}, true},
		"there are more of them": {map[int][]byte{0: {1, 2}, 1: {1, 2}, 2: {1, 2}}, false},
	} {
		for end, back := range map[string]bool{"confirmed by time": false, "they come back": true} {
			t.Run(name+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(true)
					r, a, stop := live(t, w, holding())
					r.healthy()
					time.Sleep(time.Minute)
					whole, stale := maps.Clone(r.truth), 0
					for s := range simServices {
						r.truth[s] = tc.left[s]
						w.commit(s, tc.left[s])
					}
					r.resync()
					for s := range simServices {
						if len(tc.left[s]) == 0 || tc.left[s][0] != 1 {
							stale++
						}
					}
					time.Sleep(holding().ShrinkHold - time.Second)
					if held := a.Status().Sources[0].Held; (held != "") != tc.held || tc.held == (w.deleted() != 0) && stale > 0 {
						t.Errorf("held %q, %d flows deleted of %d", held, w.deleted(), stale)
					}
					if tc.held && back {
						r.truth, stale = whole, 0
						r.resync()
					}
					time.Sleep(time.Minute)
					if held := a.Status().Sources[0].Held; held != "" || w.deleted() != stale {
						t.Errorf("held %q at the end, %d flows deleted, want %d", held, w.deleted(), stale)
					}
					stop()
					w.verify(t)
				})
			})
		}
	}
}

// The text of a held source says how much there was and is.
func TestHeldStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, a, stop := live(t, newWorld(true), holding())
		r.healthy()
		time.Sleep(time.Minute)
		for s := range simServices {
			r.truth[s] = []byte{}
		}
		r.resync()
		want := fmt.Sprintf("since %s: had 3 frontends and 3 backends, has 3 frontends and 0 backends", time.Now().Format(time.RFC3339))
		if got := a.Status().Sources[0].Held; got != want {
			t.Errorf("held %q, want %q", got, want)
		}
		stop()
	})
}

// What is told one by one while a list is held is right: it is never taken for
// stale, and counts when the hold ends. What is taken away stays until then.
func TestSetWhileHeld(t *testing.T) {
	for end, back := range map[string]bool{"confirmed by time": false, "they come back": true} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(true)
				r, a, stop := live(t, w, holding())
				r.sink.ServiceRanges([]netip.Prefix{simRange})
				r.healthy()
				time.Sleep(time.Minute)

				all := maps.Clone(r.truth)
				delete(r.truth, 1)
				delete(r.truth, 2)
				r.resync()
				time.Sleep(time.Second)
				// A backend is replaced, and there is a new service: the proxy has written
				// both, and new clients come.
				r.truth[0] = []byte{2}
				r.truth[7] = []byte{3}
				for _, s := range []int{0, 7} {
					w.commit(s, r.truth[s])
					r.tell(s)
					w.send(s, 2)
				}
				time.Sleep(holding().ShrinkHold - 10*time.Second)
				if held := a.Status().Sources[0].Held; held == "" {
					t.Error("not held")
				}
				if w.verify(t); w.deleted() != 0 {
					t.Errorf("%d flows deleted while held", w.deleted())
				}
				want := 3 // those to the old backend of 0, and to 1 and 2
				if back {
					all[0], all[7] = r.truth[0], r.truth[7]
					r.truth, want = all, 1
					for s := range all {
						w.mu.Lock()
						r.knows(s)
						w.mu.Unlock()
					}
					units := map[string][]frontend.Frontend{}
					for s, b := range all {
						units[fmt.Sprint("s", s)] = simFrontends(s, b)
					}
					r.sink.Replace(units)
				}
				time.Sleep(time.Minute)
				if held := a.Status().Sources[0].Held; held != "" || w.deleted() != want {
					t.Errorf("held %q at the end, %d flows deleted, want %d", held, w.deleted(), want)
				}
				if n := a.Status().Frontends; n != len(r.truth) {
					t.Errorf("%d frontends at the end, want %d", n, len(r.truth))
				}
				// And nothing of the hold is left that would keep a backend valid.
				r.truth[0] = []byte{4}
				w.commit(0, r.truth[0])
				r.tell(0)
				time.Sleep(time.Minute)
				if w.deleted() != want+1 {
					t.Errorf("%d flows deleted after a later change, want %d", w.deleted(), want+1)
				}
				stop()
				w.verify(t)
			})
		})
	}
}

// A restart that finds most of its frontends gone is in doubt whether it was told
// of all: what is in a service range and is no frontend is left alone for as long
// as a hold lasts. Without that doubt it is swept at once.
func TestDoubtAfterRestart(t *testing.T) {
	for name, tc := range map[string]struct {
		left   []int // of the services, after the restart
		doubts bool
	}{
		"nothing is left": {nil, true},
		"little is left":  {[]int{0}, true},
		"most is left":    {[]int{0, 1}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(true)
				cfg := holding()
				cfg.StateFile = filepath.Join(t.TempDir(), "state.json")
				r, _, stop := live(t, w, cfg)
				r.sink.ServiceRanges([]netip.Prefix{simRange})
				r.healthy()
				time.Sleep(time.Minute)
				stop()
				w.verify(t)

				for s := range simServices { // the proxy has done its part
					w.commit(s, nil)
				}
				r, a, stop := live(t, w, cfg)
				for _, s := range tc.left {
					r.truth[s] = []byte{1}
					w.commit(s, []byte{1})
				}
				r.sink.ServiceRanges([]netip.Prefix{simRange})
				r.resync()
				gone := simServices - len(tc.left)
				want := gone
				if tc.doubts {
					want = 0
				}
				time.Sleep(cfg.ShrinkHold - 10*time.Second)
				if s := a.Status(); !s.Ready || w.deleted() != want {
					t.Errorf("ready %t, %d flows deleted, want %d: %s", s.Ready, w.deleted(), want, s.NotReady)
				}
				time.Sleep(time.Minute)
				if w.deleted() != gone {
					t.Errorf("%d flows deleted after the hold, want %d", w.deleted(), gone)
				}
				stop()
			})
		})
	}
}

// Ranges of several sources are united, and each source's may change.
func TestServiceRangesOfSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Options{
			Conn: newWorld(true), Ruleset: newWorld(true), Config: holding(),
			Sources: []source.Source{&simSource{}, &simSource{}},
		})
		orphan, err := conntrack.Parse("udp 17 29 src=192.0.2.50 dst=203.0.113.99 sport=1 dport=53 " +
			"src=198.51.100.1 dst=192.0.2.50 sport=53 dport=1")
		if err != nil {
			t.Fatal(err)
		}
		for i, step := range []struct {
			feed   int
			ranges []netip.Prefix
			want   string
		}{
			{0, nil, "ignore no-frontend"},
			{0, []netip.Prefix{netip.MustParsePrefix("198.18.0.0/16")}, "ignore no-frontend"},
			{1, []netip.Prefix{simRange}, "delete frontend-gone"},
			{0, nil, "delete frontend-gone"},
			{0, []netip.Prefix{simRange}, "delete frontend-gone"},
			{1, nil, "delete frontend-gone"},
			{0, nil, "ignore no-frontend"},
		} {
			a.feeds[step.feed].ServiceRanges(step.ranges)
			if got := a.table.Judge(&orphan).String(); got != step.want {
				t.Errorf("step %d: %s, want %s", i, got, step.want)
			}
		}
	})
}

// A frontend's own policy survives in the state file, and with it what its
// tombstone allows.
func TestSavedSweep(t *testing.T) {
	key := frontend.Key{Addr: simVIP(0).Addr(), Proto: conntrack.UDP, Ports: frontend.Port(53)}
	for _, word := range []string{"", "off", "unreplied", "all"} {
		tomb := frontend.Tombstone{Key: key, Owner: "s0", Kind: frontend.ClusterIP}
		if own, ok := frontend.ParseSweep(word); ok {
			tomb.Sweep = &own
		}
		b, err := json.Marshal(saveEntry(tomb))
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf(`"sweep":%q`, word)
		if has := strings.Contains(string(b), `"sweep"`); has != (word != "") || has && !strings.Contains(string(b), want) {
			t.Errorf("%q is saved as %s", word, b)
		}
		var e savedEntry
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatal(err)
		}
		got, ok := e.tombstone()
		if d := cmp.Diff(tomb, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); !ok || d != "" {
			t.Errorf("%q: %t, tombstone (-saved +read):\n%s", word, ok, d)
		}
	}
	for _, word := range []string{"everything", "ALL", "0", " off"} {
		e := saveEntry(frontend.Tombstone{Key: key, Owner: "s0", Kind: frontend.ClusterIP})
		e.Sweep = word
		if got, ok := e.tombstone(); ok {
			t.Errorf("%q makes %+v", word, got)
		}
	}
}

// A service whose annotation says udp=off is deleted while the agent is away: its
// flows stay. An entry that makes no sense is left out, and the others count.
func TestSweepSurvivesRestart(t *testing.T) {
	for name, tc := range map[string]struct {
		sweep   string
		edit    func(state string) string
		deleted int
	}{
		"left alone":    {"off", nil, 1},
		"as configured": {"", nil, 2},
		"an entry is no longer one": {
			"off", func(s string) string { return strings.Replace(s, `"sweep":"off"`, `"sweep":"never"`, 1) }, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(true)
				cfg := holding()
				cfg.ShrinkHold = 0
				cfg.StateFile = filepath.Join(t.TempDir(), "state.json")
				r, _, stop := live(t, w, cfg)
				r.healthy()
				fs := simFrontends(0, []byte{1})
				if own, ok := frontend.ParseSweep(tc.sweep); ok {
					fs[0].Sweep = &own
				}
				r.sink.Set("s0", fs)
				time.Sleep(time.Minute)
				stop()
				if tc.edit != nil {
					b, err := os.ReadFile(cfg.StateFile)
					if err != nil {
						t.Fatal(err)
					}
					after := tc.edit(string(b))
					if after == string(b) {
						t.Fatalf("nothing to edit in %s", b)
					}
					if err := os.WriteFile(cfg.StateFile, []byte(after), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				for s := range simServices {
					w.commit(s, nil)
				}
				r, a, stop := live(t, w, cfg)
				r.truth[2] = []byte{1}
				w.commit(2, []byte{1})
				r.resync()
				time.Sleep(time.Minute)
				if !a.Status().Ready || w.deleted() != tc.deleted {
					t.Errorf("%d flows deleted, want %d", w.deleted(), tc.deleted)
				}
				stop()
			})
		})
	}
}

// A frontend goes whose place another one shares: what it allowed is remembered as
// long as any other tombstone, through a restart too.
func TestTombstoneUnderFrontend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		cfg := holding()
		cfg.StateFile = filepath.Join(t.TempDir(), "state.json")
		off := simFrontends(0, []byte{1})
		off[0].Owner, off[0].Sweep = "shares", new(frontend.Off)
		r, a, stop := live(t, w, cfg)
		r.healthy()
		r.sink.Set("shares", off)
		time.Sleep(time.Minute)
		r.sink.Set("shares", nil)
		if got := a.table.Tombstones(); len(got) != 1 || got[0].Owner != "shares" || got[0].Sweep == nil {
			t.Fatalf("tombstones %v", got)
		}
		time.Sleep(time.Minute)
		r.sink.Set("shares", off)
		time.Sleep(time.Minute)
		stop()

		r, a, stop = live(t, w, cfg) // it goes while the agent is away
		r.healthy()
		time.Sleep(time.Minute)
		if got := a.table.Tombstones(); len(got) != 1 || got[0].Owner != "shares" || got[0].Sweep == nil {
			t.Fatalf("after a restart: tombstones %v", got)
		}
		time.Sleep(graveTime + time.Minute)
		if st := a.Status(); st.Tombstones != 0 || st.Frontends != simServices {
			t.Errorf("%d tombstones, %d frontends", st.Tombstones, st.Frontends)
		}
		stop()
		w.verify(t)
	})
}
