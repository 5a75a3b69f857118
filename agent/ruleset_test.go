package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/source"
)

// logged runs an agent in a bubble, with or without rules, and returns what it has
// logged.
func logged(t *testing.T, o Options, play func(r *simRun, a *Agent)) string {
	t.Helper()
	var log bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(true)
		if o.Rules != nil {
			o.Rules = newSimRules(w, 0)
		}
		src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
		o.Conn, o.Sources = w, []source.Source{src}
		if o.Ruleset == nil {
			o.Ruleset = w
		}
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
		o.Config = Config{Policy: frontend.DefaultPolicy, Zones: o.Config.Zones, Window: simWindow, WalkBudget: 0.1}
		a := New(o)
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { _ = a.Run(ctx) })
		r := &simRun{w: w, truth: map[int][]byte{0: {1}}, sink: <-src.sinks}
		r.resync()
		time.Sleep(time.Minute)
		play(r, a)
		cancel()
		work.Wait()
	})
	return log.String()
}

// Why the NAT rules are not asked is told once, and in the status.
func TestRulesNotAsked(t *testing.T) {
	never := func() (bool, error) { return false, nil }
	none := func() (used, holds bool, err error) { return false, false, nil }
	for name, tc := range map[string]struct {
		o    Options
		want string
	}{
		"they are asked":    {Options{Rules: &simRules{}}, ""},
		"switched off":      {Options{NoRules: "settling.rules is off"}, "settling.rules is off"},
		"nobody says why":   {Options{}, "they are not read"},
		"zone 0 left out":   {Options{Rules: &simRules{}, Config: Config{Zones: []uint16{5}}}, "zone 0 is not judged"},
		"iptables-legacy":   {Options{Rules: &simRules{}, Ruleset: &nftRuleset{legacy: func() (bool, error) { return true, nil }, ipvs: none}}, "iptables-legacy has a nat table here"},
		"it is not known":   {Options{Rules: &simRules{}, Ruleset: &nftRuleset{legacy: func() (bool, error) { return false, errors.New("no proc") }, ipvs: none}}, "no proc"},
		"without nf_tables": {Options{Rules: &simRules{}, Ruleset: &nftRuleset{legacy: never, ipvs: none}}, "the generation of nftables cannot be asked for"},
		"IPVS": {Options{Rules: &simRules{}, Ruleset: &nftRuleset{
			legacy: never, ipvs: func() (used, holds bool, err error) { return true, false, errors.New("no sysctl") },
		}}, "IPVS forwards here"},
	} {
		t.Run(name, func(t *testing.T) {
			log := logged(t, tc.o, func(_ *simRun, a *Agent) {
				if s := a.Status(); !strings.HasPrefix(s.RulesFault, tc.want) || tc.want == "" && s.RulesFault != "" {
					t.Errorf("status says %q, want %q", s.RulesFault, tc.want)
				}
			})
			lines := strings.Count(log, "the NAT rules are not asked")
			if want := min(len(tc.want), 1); lines != want || !strings.Contains(log, tc.want) {
				t.Errorf("logged %d times:\n%s", lines, log)
			}
		})
	}
}

// Where IPVS holds on to servers that are gone, no delete helps: that is told when
// it begins, and for as long as it lasts.
func TestIPVSHolds(t *testing.T) {
	proc := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(proc, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("thread-self/net/ip_vs", "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n"+
		"  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\nUDP  CB007100:0035 rr  \n")
	write("sys/net/ipv4/vs/expire_nodest_conn", "0\n")
	ruleset := &nftRuleset{
		legacy: func() (bool, error) { return nft.LegacyNATAt(proc) },
		ipvs:   func() (bool, bool, error) { return nft.IPVSHoldsAt(proc) },
	}
	log := logged(t, Options{Ruleset: ruleset}, func(_ *simRun, a *Agent) {
		if s := a.Status(); len(s.Warnings) != 1 || s.Warnings[0] != nft.IPVSHeld || s.Settling != "time" {
			t.Errorf("warnings %q, settling by %s", s.Warnings, s.Settling)
		}
		write("sys/net/ipv4/vs/expire_nodest_conn", "1\n")
		time.Sleep(time.Minute)
		if s := a.Status(); len(s.Warnings) != 0 {
			t.Errorf("warnings after the setting was changed: %q", s.Warnings)
		}
	})
	if n := strings.Count(log, "expire_nodest_conn is 0"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, log)
	}
}
