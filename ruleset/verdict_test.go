//go:build linux

package ruleset

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestVerdicts(t *testing.T) {
	docker := Rule{IPv4, "nat", "DOCKER", 12}
	answered := flowOf("198.51.100.12:53")
	answered.Proto = conntrack.TCP
	answered.Status |= conntrack.StatusSeenReply
	syn := *answered
	syn.Status &^= conntrack.StatusSeenReply
	lite := flowOf("")
	lite.Proto = conntrack.UDPLite
	udp, std := flowOf("198.51.100.12:53"), frontend.DefaultPolicy
	off := frontend.Policy{UDP: frontend.Off}
	named := func(Rule, *conntrack.Flow) string { return "web" }
	unnamed := func(Rule, *conntrack.Flow) string { return "" }
	const ruleName = "ip nat DOCKER handle 12"
	tests := []struct {
		name   string
		flow   *conntrack.Flow
		policy frontend.Policy
		owner  func(Rule, *conntrack.Flow) string
		in     Judgement
		want   string // the verdict, the owner and why
	}{
		{"not judged", lite, frontend.Policy{}, nil, Judgement{Verdict: NotJudged}, "ignore protocol"},
		{"switched off", udp, off, nil, Judgement{Verdict: BackendGone, By: docker}, "ignore protocol"},
		{"another zone", udp, std, nil, Judgement{Verdict: OtherZone}, "ignore zone"},
		{"expected", udp, std, nil, Judgement{Verdict: Expected}, "ignore expected"},
		{"plain", udp, std, nil, Judgement{Verdict: Plain}, "ignore no-frontend"},
		{"right", udp, std, nil, Judgement{Verdict: Right, By: docker}, "keep serving by " + ruleName},
		{"right, with a name", udp, std, named, Judgement{Verdict: Right, By: docker}, "keep serving by web"},
		{"right, without", udp, std, unnamed, Judgement{Verdict: Right, By: docker}, "keep serving by " + ruleName},
		{"may pass", udp, std, nil, Judgement{Verdict: MayPass, By: docker}, "keep unpredictable by " + ruleName + ": " + whyMayPass},
		{"unpredictable", udp, std, named, Judgement{Verdict: Unpredictable, By: docker, Why: "x"}, "keep unpredictable by " + ruleName + ": x"},
		{"unpredictable by no rule", udp, std, nil, Judgement{Verdict: Unpredictable, Why: "x"}, "keep unpredictable: x"},
		{"unknown translator", udp, std, nil, Judgement{Verdict: UnknownTranslator, Why: "x"}, "keep unknown-translator: x"},
		{"backend gone", udp, std, nil, Judgement{Verdict: BackendGone, By: docker}, "delete backend-gone by " + ruleName},
		{"untranslated", udp, std, named, Judgement{Verdict: Untranslated, By: docker}, "delete untranslated by web"},
		{"frontend gone", udp, std, named, Judgement{Verdict: FrontendGone}, "delete frontend-gone"},
		{"an answered connection", answered, std, nil, Judgement{Verdict: BackendGone, By: docker}, "keep policy by " + ruleName},
		{"one that is not answered", &syn, std, nil, Judgement{Verdict: BackendGone, By: docker}, "delete backend-gone by " + ruleName},
		{"tcp=all", answered, frontend.Policy{TCP: frontend.All}, nil, Judgement{Verdict: BackendGone, By: docker}, "delete backend-gone by " + ruleName},
	}
	met := map[Verdict]bool{}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := &Verdicts{Policy: tt.policy, Owner: tt.owner}
			met[tt.in.Verdict] = true
			var got frontend.Verdict
			if tt.policy.Of(tt.flow.Proto) == frontend.Off {
				got = v.Judge(tt.flow) // which needs no judge
			} else {
				got = v.verdict(tt.flow, tt.in)
			}
			text := got.String()
			if got.Owner != "" {
				text += " by " + got.Owner
			}
			if got.Why != "" {
				text += ": " + got.Why
			}
			if text != tt.want {
				t.Errorf("%s, want %s", text, tt.want)
			}
			if (got.Kind == frontend.Rule) != (got.Action != frontend.Ignore) {
				t.Errorf("kind %s of %s", got.Kind, got)
			}
		})
	}
	for v := range FrontendGone + 1 {
		if !met[v] {
			t.Errorf("%s is not tested", v)
		}
		if words[v].Action() == frontend.Delete != v.Stale() {
			t.Errorf("%s is %s", v, words[v].Action())
		}
	}
}

// What the rules would make of a flow again, with the rule that would. They are
// never asked by what a policy leaves, and what moved is not believed.
func TestAsk(t *testing.T) {
	ns := nstest.New(t)
	forward := forwards("198.51.100.11:53")
	must(t, ns.SetNAT(forward))
	judge := func(modules ...string) *Verdicts {
		others := Translators{Modules: modules}
		return &Verdicts{
			Rules:  newJudge(t, ns, Config{Translators: func() Translators { return others }}),
			Policy: frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All},
		}
	}
	v := judge()
	to := func(dst string, f *conntrack.Flow) *conntrack.Flow {
		if !f.Translated() {
			f.Reply.Src = netip.MustParseAddr(dst)
		}
		f.Orig.Dst = netip.MustParseAddr(dst)
		return f
	}
	zone := flowOf("198.51.100.11:53")
	zone.Zone = 7
	ask := func(name string, f *conntrack.Flow, want Again, by string) {
		t.Helper()
		again, got := Ask(v, f)
		if again != want || !strings.HasPrefix(got, by) || (got != "") != (want == Always) {
			t.Errorf("%s: %d by %q, want %d by %q", name, again, got, want, by)
		}
		if n := testing.AllocsPerRun(100, func() { Ask(v, f) }); n != 0 && want != Moved {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	ask("its backend", flowOf("198.51.100.11:53"), Always, "inet flowsweep-test forwards handle ")
	ask("another backend", flowOf("198.51.100.12:53"), Never, "")
	ask("untranslated, and a rule translates", flowOf(""), Never, "")
	ask("untranslated, and none does", to("203.0.113.99", flowOf("")), Always, Untranslating)
	ask("another zone", zone, Untold, "")
	alone := v
	v = judge("act_ct")
	ask("translated, and by whom is not known", to("203.0.113.99", flowOf("198.51.100.11:53")), Untold, "")
	ask("another backend, and by whom is not known", flowOf("198.51.100.12:53"), Untold, "")
	v = alone
	must(t, ns.SetNAT(forwards("198.51.100.12:53")))
	ask("the rules have moved", flowOf("198.51.100.12:53"), Moved, "")
	if _, err := v.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	ask("after a reload", flowOf("198.51.100.12:53"), Always, "inet flowsweep-test forwards handle ")
	ask("and the former backend", flowOf("198.51.100.11:53"), Never, "")
}

// What a sweep asks the kernel for is what may be deleted, in the order of a
// table's scopes.
func TestScopes(t *testing.T) {
	v := &Verdicts{Policy: frontend.DefaultPolicy}
	table := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	table.SetServiceRanges(netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/32"))
	if got, want := v.Scopes(), table.Scopes(); !slices.Equal(got, want) {
		t.Errorf("scopes %v, want %v", got, want)
	}
	v = &Verdicts{Policy: frontend.Policy{UDP: frontend.All}, Families: []conntrack.Family{conntrack.IPv6}}
	if got, want := v.Scopes(), []frontend.Scope{{Family: conntrack.IPv6, Proto: conntrack.UDP}}; !slices.Equal(got, want) {
		t.Errorf("scopes %v, want %v", got, want)
	}
	if v.Most(conntrack.UDP) != frontend.All || v.Most(conntrack.TCP) != frontend.Off || !slices.Equal(v.Zones(), []uint16{0}) {
		t.Errorf("%s, %s, zones %v", v.Most(conntrack.UDP), v.Most(conntrack.TCP), v.Zones())
	}
}

// A flow that is kept costs no memory.
func TestVerdictsAllocate(t *testing.T) {
	ns := nstest.New(t)
	elsewhere := testnet.Forward{
		Proto: conntrack.TCP, Dst: netip.MustParseAddrPort("203.0.113.30:80"),
		Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.30:80")},
	}
	must(t, ns.SetNAT(forwards("198.51.100.11:53"), elsewhere))
	judge := func(list ...string) *Verdicts {
		others := Translators{Modules: list}
		return &Verdicts{Rules: newJudge(t, ns, Config{Translators: func() Translators { return others }}), Policy: frontend.DefaultPolicy}
	}
	alone, beside := judge(), judge("act_ct")
	other := func(f *conntrack.Flow) *conntrack.Flow {
		f.Orig.Dst = netip.MustParseAddr("203.0.113.99")
		return f
	}
	answered := flowOf("198.51.100.31:80")
	answered.Proto, answered.Orig.Dst, answered.Orig.DstPort = conntrack.TCP, netip.MustParseAddr("203.0.113.30"), 80
	answered.Status |= conntrack.StatusSeenReply
	plain := other(flowOf(""))
	plain.Reply.Src = plain.Orig.Dst
	for want, f := range map[string]*conntrack.Flow{
		"ignore no-frontend":      plain,
		"keep serving":            flowOf("198.51.100.11:53"),
		"keep unknown-translator": other(flowOf("198.51.100.11:53")),
		"keep policy":             answered,
	} {
		v := beside
		if f == answered {
			v = alone
		}
		if got := v.Judge(f); got.String() != want {
			t.Errorf("%s (%s), want %s", got, got.Why, want)
		}
		if n := testing.AllocsPerRun(100, func() { v.Judge(f) }); n != 0 {
			t.Errorf("%s: %v allocations", want, n)
		}
	}
}

// The verdict that is explained is the one that is given, and the steps begin with
// the policy.
func TestVerdictsExplain(t *testing.T) {
	ns := nstest.New(t)
	must(t, ns.SetNAT(forwards("198.51.100.11:53")))
	v := &Verdicts{Rules: newJudge(t, ns, Config{}), Policy: frontend.DefaultPolicy}
	for _, f := range []*conntrack.Flow{flowOf(""), flowOf("198.51.100.11:53"), flowOf("198.51.100.12:53")} {
		w, steps := v.Explain(f)
		if w != v.Judge(f) || !strings.HasPrefix(steps[0], `the protocol is UDP, swept by the policy "all"`) {
			t.Errorf("%s\n%s", w, strings.Join(steps, "\n"))
		}
	}
	v.Policy.UDP = frontend.Off
	if w, steps := v.Explain(flowOf("")); w.Reason != frontend.NotSwept || len(steps) != 1 {
		t.Errorf("%s\n%s", w, strings.Join(steps, "\n"))
	}
}

// What may happen to a packet from anywhere is at least what may happen to a
// packet from somewhere.
func TestAnySource(t *testing.T) {
	s := newScene(t)
	narrower := 0
	for seed := range uint64(12) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 9)), v6: seed%2 == 1}
		s.run(t, "flush ruleset", "nft", "-f", "-")
		count := tally{refused: map[string]int{}}
		s.nft(t, g.nft("t0"), &count)
		s.run(t, g.iptables(), map[bool]string{false: "iptables-nft-restore", true: "ip6tables-nft-restore"}[g.v6])
		j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
		must(t, err)
		for range 500 {
			p := g.packet()
			wide, _ := j.To(Destination{p.Proto, netip.AddrPortFrom(p.Dst, p.DstPort)})
			narrow := j.Rules().Outcome(p, s.host)
			if !covers(wide, narrow) {
				t.Fatalf("seed %d: to %s:%d from anywhere %s, from %s:%d %s\n%s", seed, p.Dst, p.DstPort, wide,
					p.Src, p.SrcPort, narrow, s.run(t, "", "nft", "-a", "list", "ruleset"))
			}
			if !wide.equal(narrow) {
				narrower++
			}
		}
		must(t, j.Close())
	}
	if narrower == 0 {
		t.Error("the source never mattered")
	}
}
