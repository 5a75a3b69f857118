//go:build linux

package ruleset

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// TestBesideCommits judges a right flow while its rule's set is replaced by the same
// again, without a pause, in transactions that take the kernel long: it moves the
// generation first, and puts the set's elements in place last. Judges are opened just
// when the generation has moved.
func TestBesideCommits(t *testing.T) {
	span := 6 * time.Second
	if v := os.Getenv(diffForEnv); v != "" {
		var err error
		span, err = time.ParseDuration(v)
		must(t, err)
	} else if testing.Short() {
		span = 2 * time.Second
	}
	ns := nstest.New(t)
	vip, backend := netip.MustParseAddrPort("203.0.113.10:53"), netip.MustParseAddrPort("198.51.100.11:53")
	c, err := testnet.NewChurn(ns, conntrack.UDP, backend, 60_000, vip, netip.MustParseAddrPort("203.0.113.11:53"))
	must(t, err)
	t.Cleanup(func() { _, _ = c.Stop() })
	f := flowOf(backend.String())
	open := func() (*Judge, error) {
		return NewJudge(t.Context(), Config{
			NetNS: ns.Path(), Host: &knowing{}, Translators: func() Translators { return Translators{} },
		})
	}
	agent, err := open()
	must(t, err)
	defer agent.Close()
	if v := agent.Judge(f); v.Verdict != Right {
		t.Fatalf("before anything: %+v", v)
	}
	c.Start()
	var opened, refused, judged, right, stale int
	// judge judges for some time: a set is fetched when a flow reaches it, and a judge
	// may believe for a moment what it has read.
	judge := func(j *Judge) {
		for range 50 {
			v := j.Judge(f).Verdict
			judged++
			switch {
			case v.Stale():
				stale++
			case v == Right:
				right++
			}
		}
	}
	moved, err := Open(ns.Path())
	must(t, err)
	defer moved.Close()
	last := agent.Generation()
	for start := time.Now(); time.Since(start) < span; {
		gen := last
		for gen == last && time.Since(start) < span {
			gen, err = moved.Generation()
			must(t, err)
		}
		last = gen
		switch j, err := open(); {
		case errors.Is(err, ErrChanging):
			refused++
		case err != nil:
			t.Fatal(err)
		default:
			opened++
			judge(j)
			must(t, j.Close())
		}
		if _, err := agent.Reload(t.Context()); err != nil && !errors.Is(err, ErrChanging) {
			t.Fatal(err)
		}
		judge(agent)
	}
	commits, err := c.Stop()
	must(t, err)
	t.Logf("%d commits; %d judges opened, %d times the rules were changing; %d judgements, %d right, %d stale",
		commits, opened, refused, judged, right, stale)
	if stale > 0 {
		t.Errorf("%d of %d judgements call a right flow stale", stale, judged)
	}
	if right == 0 {
		t.Error("nothing was ever judged")
	}
	reload(t, agent)
	if v := agent.Judge(f); v.Verdict != Right {
		t.Errorf("in the end %+v", v)
	}
}
