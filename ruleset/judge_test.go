//go:build linux

package ruleset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// flowOf is a flow of the packet of most tests that goes to a backend, or nowhere
// else.
func flowOf(to string) *conntrack.Flow {
	p := dns()
	f := &conntrack.Flow{
		Family: conntrack.IPv4, Proto: p.Proto, Status: conntrack.StatusConfirmed,
		Orig:  conntrack.Tuple{Src: p.Src, Dst: p.Dst, SrcPort: p.SrcPort, DstPort: p.DstPort},
		Reply: conntrack.Tuple{Src: p.Dst, Dst: p.Src, SrcPort: p.DstPort, DstPort: p.SrcPort},
	}
	if to != "" {
		a := netip.MustParseAddrPort(to)
		f.Reply.Src, f.Reply.SrcPort = a.Addr(), a.Port()
		f.Status |= conntrack.StatusDstNAT
	}
	return f
}

func forwards(backends ...string) testnet.Forward {
	f := testnet.Forward{Proto: conntrack.UDP, Dst: netip.AddrPortFrom(dns().Dst, dns().DstPort)}
	for _, b := range backends {
		f.Backends = append(f.Backends, netip.MustParseAddrPort(b))
	}
	return f
}

func newJudge(tb testing.TB, ns *testnet.NS, cfg Config) *Judge {
	tb.Helper()
	cfg.NetNS = ns.Path()
	if cfg.Host == nil {
		cfg.Host = &knowing{}
	}
	if cfg.Translators == nil {
		cfg.Translators = func() Translators { return Translators{} }
	}
	j, err := NewJudge(tb.Context(), cfg)
	must(tb, err)
	tb.Cleanup(func() { must(tb, j.Close()) })
	return j
}

func reload(tb testing.TB, j *Judge) Change {
	tb.Helper()
	c, err := j.Reload(tb.Context())
	must(tb, err)
	return c
}

func TestJudge(t *testing.T) {
	const one, two = "198.51.100.11:5353", "198.51.100.12:53"
	seen := []Destination{{conntrack.UDP, netip.AddrPortFrom(dns().Dst, dns().DstPort)}}
	noBit := flowOf(two)
	noBit.Status &^= conntrack.StatusDstNAT
	zone := flowOf(two)
	zone.Zone = 3
	expected := flowOf(two)
	expected.Status |= conntrack.StatusExpected
	icmp := flowOf("")
	icmp.Proto = conntrack.ICMP
	tests := []struct {
		name     string
		backends []string // none: no rule
		flow     *conntrack.Flow
		seen     []Destination
		others   Translators
		want     Verdict
	}{
		{"translated as the rule does", []string{one}, flowOf(one), nil, Translators{}, Right},
		{"as one of the rules may", []string{one, two}, flowOf(two), nil, Translators{}, Right},
		{"as no rule does", []string{one}, flowOf(two), nil, Translators{}, BackendGone},
		{"to another port", []string{one}, flowOf("198.51.100.11:53"), nil, Translators{}, BackendGone},
		{"untranslated", []string{one}, flowOf(""), nil, Translators{}, Untranslated},
		{"untranslated without a rule", nil, flowOf(""), nil, Translators{}, Plain},
		{"translated without a rule", nil, flowOf(two), nil, Translators{}, FrontendGone},
		{"the same without the DST_NAT bit", nil, noBit, nil, Translators{}, UnknownTranslator},
		{"without the bit, but a rule was seen", nil, noBit, seen, Translators{}, FrontendGone},
		{"tc may translate", nil, flowOf(two), nil, Translators{Modules: []string{"act_ct"}}, UnknownTranslator},
		{"tc may translate, but a rule was seen", nil, flowOf(two), seen, Translators{Modules: []string{"act_ct"}}, FrontendGone},
		{"tc may have chosen the backend", []string{one}, flowOf(two), nil, Translators{Modules: []string{"act_ct"}}, UnknownTranslator},
		{
			"a bridge may have passed it by the rules",
			[]string{one},
			flowOf(""), nil,
			Translators{Modules: []string{"nf_conntrack_bridge"}},
			UnknownTranslator,
		},
		{"iptables-legacy", []string{one}, flowOf(two), nil, Translators{Legacy: true}, Unpredictable},
		{"IPVS", []string{one}, flowOf(two), nil, Translators{IPVS: true}, Unpredictable},
		{"not known whether", []string{one}, flowOf(two), nil, Translators{Err: errors.New("x")}, Unpredictable},
		{"another zone", []string{one}, zone, nil, Translators{}, OtherZone},
		{"expected by a helper", []string{one}, expected, nil, Translators{}, Expected},
		{"no ports", []string{one}, icmp, nil, Translators{}, NotJudged},
	}
	nstest.Require(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ns := nstest.New(t)
			must(t, ns.SetNAT())
			if tt.backends != nil {
				must(t, ns.SetNAT(forwards(tt.backends...)))
			}
			j := newJudge(t, ns, Config{Seen: tt.seen, Translators: func() Translators { return tt.others }})
			got := j.Judge(tt.flow)
			if got.Verdict != tt.want {
				t.Errorf("%s (%s, %s), want %s", got.Verdict, got.By, got.Why, tt.want)
			}
			if again := j.Judge(tt.flow); again != got {
				t.Errorf("%+v the second time, %+v the first", again, got)
			}
			explained, steps := j.Explain(tt.flow)
			if explained.Verdict != got.Verdict || len(steps) == 0 {
				t.Errorf("explained: %+v\n%s", explained, strings.Join(steps, "\n"))
			}
			t.Log(strings.Join(steps, "\n"))
		})
	}
}

// A flow is called stale only by the rules of this moment.
func TestJudgeFollows(t *testing.T) {
	const one, two = "198.51.100.11:5353", "198.51.100.12:53"
	ns := nstest.New(t)
	must(t, ns.SetNAT(forwards(one)))
	j := newJudge(t, ns, Config{})
	is := func(f *conntrack.Flow, want Verdict) {
		t.Helper()
		if got := j.Judge(f); got.Verdict != want {
			t.Errorf("%s (%s), want %s", got.Verdict, got.Why, want)
		}
	}
	is(flowOf(two), BackendGone)
	must(t, ns.SetNAT(forwards(two)))
	is(flowOf(two), Unpredictable) // the rules are not the present ones any more
	is(flowOf(one), Unpredictable)
	if c := reload(t, j); c.Empty() || !c.Contains(conntrack.UDP, netip.AddrPortFrom(dns().Dst, dns().DstPort)) {
		t.Errorf("change %+v", c)
	}
	is(flowOf(two), Right)
	is(flowOf(one), BackendGone)
	if c := reload(t, j); !c.Empty() {
		t.Errorf("nothing changed, and yet %+v", c)
	}
	must(t, ns.SetNAT())
	reload(t, j)
	noBit := flowOf(two)
	noBit.Status &^= conntrack.StatusDstNAT
	is(noBit, FrontendGone) // a rule for it was seen
	if got := j.Seen(); len(got) != 1 || got[0].Addr != netip.AddrPortFrom(dns().Dst, dns().DstPort) {
		t.Errorf("seen %v", got)
	}
	j.Forget(j.Seen()[0])
	is(noBit, UnknownTranslator)
	must(t, j.Close())
	is(flowOf(one), Unpredictable)
	if _, err := j.Reload(t.Context()); err == nil {
		t.Error("reloaded though it is closed")
	}
}

// What was judged is confirmed as long as all that it was judged by still holds.
func TestConfirm(t *testing.T) {
	const one, two = "198.51.100.11:5353", "198.51.100.12:53"
	ns := nstest.New(t)
	must(t, ns.SetNAT(forwards(one)))
	host := &knowing{}
	var others Translators
	j := newJudge(t, ns, Config{Host: host, Translators: func() Translators { return others }})
	is := func(f *conntrack.Flow, verdict Verdict, confirm string) {
		t.Helper()
		if got := j.Judge(f); got.Verdict != verdict {
			t.Errorf("%s (%s), want %s", got.Verdict, got.Why, verdict)
		}
		if err := j.Confirm(); err == nil && confirm != "" || err != nil && err.Error() != confirm {
			t.Errorf("confirmed with %v, want %q", err, confirm)
		}
	}
	is(flowOf(two), BackendGone, "")
	host.epoch++
	if err := j.Confirm(); !errors.Is(err, errHost) {
		t.Errorf("after an address has come: %v", err)
	}
	is(flowOf(two), BackendGone, "")

	must(t, ns.SetNAT())
	if err := j.Confirm(); !errors.Is(err, ErrStale) || !errors.Is(j.Err(), ErrStale) {
		t.Errorf("after a commit: %v, %v", err, j.Err())
	}
	is(flowOf(two), Unpredictable, ErrStale.Error())
	reload(t, j)
	is(flowOf(two), FrontendGone, "")

	others.Modules = []string{"act_ct"}
	if err := j.Confirm(); !errors.Is(err, errOthers) {
		t.Errorf("after tc may translate: %v", err)
	}
	other := flowOf(two)
	other.Orig.DstPort++ // that no rule was seen for
	is(other, UnknownTranslator, "")
	others = Translators{IPVS: true}
	if err := j.Confirm(); !errors.Is(err, errOthers) {
		t.Errorf("after a service of IPVS has come: %v", err)
	}
	is(flowOf(two), Unpredictable, others.String())
	others = Translators{}
	if err := j.Confirm(); !errors.Is(err, errOthers) {
		t.Errorf("after it has gone: %v", err)
	}
	is(flowOf(two), FrontendGone, "")
	must(t, j.conn.Close())
	is(flowOf(two), Unpredictable, "nftables: file already closed")
}

// What else translates is looked for when a flow is about to be called stale, with
// a pause that is as short as the look.
func TestOthersLookedFor(t *testing.T) {
	ns := nstest.New(t)
	must(t, ns.SetNAT(forwards("198.51.100.11:5353")))
	var others Translators
	j := newJudge(t, ns, Config{Translators: func() Translators { return others }})
	f := flowOf("198.51.100.12:53")
	if v := j.Judge(f); v.Verdict != BackendGone {
		t.Fatalf("%+v", v)
	}
	others.Legacy = true
	j.othersAt = time.Now() // the pause is over
	if v := j.Judge(f); v.Verdict != Unpredictable || v.Why != others.String() {
		t.Errorf("%+v", v)
	}
}

// Elements that nobody has asked for belong to a generation, too.
func TestLazySets(t *testing.T) {
	s := newScene(t)
	s.run(t, `table ip t {
	map m { type inet_service : verdict; elements = { 53 : goto c } }
	chain c { dnat to 198.51.100.1
	}
	chain p { type nat hook prerouting priority -100; udp dport vmap @m
	}
}
`, "nft", "-f", "-")
	rs, err := s.rules.Load(t.Context())
	must(t, err)
	p := Packet{conntrack.UDP, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("203.0.113.1"), 40000, 53}
	s.run(t, "add element ip t m { 54 : goto c }", "nft", "-f", "-")
	if o := rs.Outcome(p, s.host); !o.Any || o.Why != ErrStale.Error() {
		t.Errorf("elements of another generation: %s", o)
	}
	rs, err = s.rules.Load(t.Context())
	must(t, err)
	if o := rs.Outcome(p, s.host); o.String() != "198.51.100.1:53" {
		t.Error(o)
	}
	s.run(t, "delete element ip t m { 53 }", "nft", "-f", "-")
	if o := rs.Outcome(p, s.host); o.String() != "198.51.100.1:53" {
		t.Errorf("what was fetched stays that generation's: %s", o)
	}
}

// While somebody commits without a pause, a load is of one generation or fails.
func TestLoadUnderCommits(t *testing.T) {
	ns := nstest.New(t)
	must(t, ns.SetNAT())
	c, err := Open(ns.Path())
	must(t, err)
	defer c.Close()
	stop := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			// Both addresses have the same backend, in every generation.
			b := fmt.Sprintf("198.51.100.%d:53", 1+i%200)
			one, two := forwards(b), forwards(b)
			two.Dst = netip.MustParseAddrPort("203.0.113.20:53")
			if err := ns.SetNAT(one, two); err != nil {
				t.Error(err)
				return
			}
		}
	})
	loaded, failed := 0, 0
	for start := time.Now(); time.Since(start) < time.Second || loaded == 0 && time.Since(start) < 10*time.Second; {
		rs, err := c.Load(t.Context())
		if errors.Is(err, ErrChanging) {
			failed++
			continue
		}
		must(t, err)
		loaded++
		p, q := dns(), dns()
		q.Dst = netip.MustParseAddr("203.0.113.20")
		if a, b := rs.Outcome(p, &knowing{}), rs.Outcome(q, &knowing{}); a.String() != b.String() {
			t.Fatalf("mixed generations: %s and %s", a, b)
		}
	}
	close(stop)
	work.Wait()
	t.Logf("%d loads, %d given up", loaded, failed)
}

func TestLoadErrors(t *testing.T) {
	ns := nstest.New(t)
	must(t, ns.SetNAT(forwards("198.51.100.1:53")))
	c, err := Open(ns.Path())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Load(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	must(t, c.Close())
	must(t, c.Close())
	if _, err := c.Load(t.Context()); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("closed: %v", err)
	}
	if _, err := Open("/nonexistent"); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("no such namespace: %v", err)
	}
}

// TestMemo asks for many flows twice: what is remembered is what is worked out.
func TestMemo(t *testing.T) {
	s := newScene(t)
	for seed := range uint64(8) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 7)), v6: seed%2 == 1}
		s.run(t, "flush ruleset", "nft", "-f", "-")
		count := tally{refused: map[string]int{}}
		s.nft(t, g.nft("t0"), &count)
		j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
		must(t, err)
		for range 2000 {
			p := g.packet()
			f := &conntrack.Flow{
				Family: conntrack.FamilyOf(p.Dst), Proto: p.Proto,
				Orig: conntrack.Tuple{Src: p.Src, Dst: p.Dst, SrcPort: p.SrcPort, DstPort: p.DstPort},
			}
			j.mu.Lock()
			for _, v := range []view{viewLikely, viewCertain, viewEither, viewAny} {
				got := j.outcome(f, v)
				host, origin := j.through(v, f)
				want, _ := j.rules.outcome(p, host, origin)
				if !got.equal(want) {
					t.Errorf("seed %d: view %d: %+v: remembered %s, worked out %s", seed, v, p, got, want)
				}
			}
			j.mu.Unlock()
		}
		must(t, j.Close())
	}
}

func (g *generator) packet() Packet {
	return Packet{
		conntrack.UDP, netip.MustParseAddr(g.client()), netip.MustParseAddr(g.dst()),
		uint16(40000 + g.IntN(3)), uint16(g.port()),
	}
}

// A flow to a destination that is known costs no memory, and few nanoseconds.
func TestJudgeAllocates(t *testing.T) {
	s := newScene(t)
	must(t, s.router.SetNAT(forwards("198.51.100.11:53")))
	j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path()}) // with a host of its own
	must(t, err)
	defer j.Close()
	for _, to := range []string{"", "198.51.100.11:53"} {
		f := flowOf(to)
		if to == "" {
			f.Orig.Dst = netip.MustParseAddr("203.0.113.99")
			f.Reply.Src = f.Orig.Dst
		}
		want := j.Judge(f)
		if want.Verdict.Stale() {
			t.Errorf("%+v", want)
		}
		if n := testing.AllocsPerRun(100, func() { j.Judge(f) }); n != 0 {
			t.Errorf("%s: %v allocations", want.Verdict, n)
		}
	}
}

// TestChange changes random rulesets a little, or not at all, and compares the
// outcomes of many packets: where they differ, the destination must be suspect.
func TestChange(t *testing.T) {
	s := newScene(t)
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	var differing, suspect, all, packets, same int
	seed := rand.Uint64()
	if v := os.Getenv(diffSeedEnv); v != "" {
		var err error
		seed, err = strconv.ParseUint(v, 0, 64)
		must(t, err)
		rounds = 1
	}
	t.Log("first seed: ", seed)
	for last := seed + uint64(rounds); seed != last; seed++ {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 8)), v6: seed%2 == 1}
		s.run(t, "flush ruleset", "nft", "-f", "-")
		count := tally{refused: map[string]int{}}
		s.nft(t, g.nft("t0"), &count)
		restore := map[bool]string{false: "iptables-nft-restore", true: "ip6tables-nft-restore"}[g.v6]
		list := map[bool]string{false: "iptables-nft-save", true: "ip6tables-nft-save"}[g.v6]
		s.run(t, g.iptables(), restore)
		j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
		must(t, err)
		var sent []Packet
		for range 400 {
			sent = append(sent, g.packet())
		}
		for range 6 {
			old := j.Rules()
			before := make([]*Outcome, len(sent))
			for i, p := range sent {
				before[i] = old.Outcome(p, s.host)
			}
			what := s.change(t, g, restore, list)
			c := reload(t, j)
			if c.All {
				all++
			}
			if c.Empty() {
				same++
			}
			for i, p := range sent {
				packets++
				in := c.Contains(p.Proto, netip.AddrPortFrom(p.Dst, p.DstPort))
				if in {
					suspect++
				}
				if before[i].equal(j.Rules().Outcome(p, s.host)) {
					continue
				}
				differing++
				if !in {
					t.Fatalf("%s=%d: after %s: to %s:%d was %s, is %s, and only these are suspect: %v\n%s", diffSeedEnv, seed,
						what, p.Dst, p.DstPort, before[i], j.Rules().Outcome(p, s.host), c.Suspects,
						s.run(t, "", "nft", "-a", "list", "ruleset"))
				}
			}
		}
		must(t, j.Close())
	}
	t.Logf("%d changes, %d of everything, %d of nothing; %d packets, %d differ, %d were suspect",
		6*rounds, all, same, packets, differing, suspect)
}

// A service that comes, with its rules that set marks, makes its own destinations
// suspect and no others.
func TestChangeOfMarks(t *testing.T) {
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip("install iptables: ", err)
	}
	s := newScene(t)
	s.run(t, kubeIPTables(200), "iptables-nft-restore")
	j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
	must(t, err)
	defer j.Close()
	s.run(t, kubeIPTables(204), "iptables-nft-restore")
	c := reload(t, j)
	if c.All || len(c.Suspects) != 1 || c.Suspects[0].String() != "udp "+benchService(50)+"/32:53" {
		t.Errorf("suspect: %+v", c)
	}
	s.run(t, "*nat\n-I KUBE-SEP-00007 -d "+benchService(7)+" -p udp -m udp --dport 53 -j MARK --set-mark 7\nCOMMIT\n", "iptables-nft-restore", "--noflush")
	c = reload(t, j)
	if c.All || len(c.Suspects) != 1 || c.Suspects[0].String() != "udp "+benchService(7)+"/32:53" {
		t.Errorf("after a mark is set, suspect: %+v", c)
	}
}

// change makes a small change to the ruleset of a generator.
func (s *scene) change(tb testing.TB, g *generator, restore, list string) string {
	tb.Helper()
	family := strings.Fields(s.run(tb, "", "nft", "list", "tables"))
	var in string
	for i := 0; i+2 < len(family); i += 3 {
		if family[i+2] == "t0" {
			in = family[i+1] + " t0"
		}
	}
	for {
		var line string
		switch g.IntN(9) {
		case 0: // the same again: every rule is another one, and does the same
			s.run(tb, s.run(tb, "", list, "-t", "nat"), restore)
			return "restoring the same"
		case 1:
			line = fmt.Sprintf("add element %s services { %s . udp . %d : %s }", in, g.dst(), g.port(), g.pick("accept", "drop", "return"))
		case 2:
			line = fmt.Sprintf("delete element %s services { %s . udp . %d }", in, g.dst(), g.port())
		case 3:
			line = fmt.Sprintf("add element %s addrs { %s }", in, g.dst())
		case 4:
			t := &nftTable{generator: g}
			line = fmt.Sprintf("%s rule %s %s %s %s", g.pick("add", "insert"), in, g.pick("prerouting0", "output0", "c0", "c1"),
				t.match(), t.action(0))
		case 5:
			line = fmt.Sprintf("add rule %s %s udp dport %d dnat to %s", in, g.pick("prerouting0", "c0"), g.port(), g.backend())
			if strings.HasPrefix(in, "inet") {
				line = ""
			}
		case 6:
			line = fmt.Sprintf("flush chain %s %s", in, g.pick("c0", "c1", "c2"))
		case 7:
			line = fmt.Sprintf("table %s x%d {\nchain p { type nat hook prerouting priority -100; %s daddr %s udp dport %d drop\n}\n}\n",
				g.family(), g.IntN(1000), g.family(), g.dst(), g.port())
		default:
			rule := strings.TrimPrefix(g.xtMatches("udp", false, false)+g.xtAction("udp", 0, 0), " ")
			text := fmt.Sprintf("*nat\n-A PREROUTING %s\nCOMMIT\n", rule)
			if _, err := s.try(text, restore, "--noflush"); err == nil {
				return rule
			}
		}
		if line == "" {
			continue
		}
		if _, err := s.try(line+"\n", "nft", "-f", "-"); err == nil {
			return line
		}
	}
}

// TestHost follows addresses and routes.
func TestHost(t *testing.T) {
	s := newScene(t)
	h := s.host
	a := netip.MustParseAddr
	names := func(i *Interfaces) (list []string) {
		if i == nil {
			return []string{"?"}
		}
		for _, x := range i.List {
			list = append(list, x.Name)
		}
		return list
	}
	for _, tt := range []struct {
		addr   string
		sent   Origin
		types  Types
		inputs string
		output string
	}{
		{"10.1.0.1", Own, TypeLocal, "[?]", "[lo]"},
		{"127.0.0.1", Own, TypeLocal, "[?]", "[lo]"},
		{"127.1.2.3", Own, TypeLocal, "[?]", "[lo]"},
		{"10.1.0.2", Foreign, TypeUnicast, "[r0]", "[r0]"},
		{"10.2.0.2", Foreign, TypeUnicast, "[r1]", "[r1]"},
		{"10.1.0.255", Foreign, TypeBroadcast, "[r0]", "[?]"},
		{"203.0.113.1", Foreign, TypeUnicast, "[s0]", "[s0]"},
		{"224.0.0.1", Foreign, TypeMulticast, "[s0]", "[?]"},
		{"255.255.255.255", Foreign, TypeBroadcast, "[s0]", "[s0]"},
		{"2001:db8:1::1", Own, TypeLocal, "[?]", "[lo]"},
		{"::1", Own, TypeLocal, "[?]", "[lo]"},
		{"2001:db8:2::2", Foreign, TypeUnicast | typeNowhere, "[r1]", "[r1]"},
		{"2001:db8:5::1", Foreign, TypeUnicast | typeNowhere, "[s0]", "[s0]"},
		{"fe80::99", Unsure, TypeLocal | TypeUnicast | typeNowhere, "[r0 r1 s0]", "[r0 r1 s0]"},
	} {
		addr := a(tt.addr)
		if got := h.Sent(addr); got != tt.sent {
			t.Errorf("%s: sent %d, want %d", addr, got, tt.sent)
		}
		if got := h.Types(addr); got != tt.types {
			t.Errorf("%s: types %#x, want %#x", addr, got, tt.types)
		}
		if got := fmt.Sprint(names(h.Inputs(addr))); got != tt.inputs {
			t.Errorf("%s: inputs %s, want %s", addr, got, tt.inputs)
		}
		if got := fmt.Sprint(names(h.Outputs(addr))); got != tt.output {
			t.Errorf("%s: outputs %s, want %s", addr, got, tt.output)
		}
	}
	if h.Inputs(a("10.1.0.2")) != h.Inputs(a("10.1.0.3")) {
		t.Error("equal sets of interfaces are not one")
	}

	await := func(what string, cond func() bool) {
		t.Helper()
		for start := time.Now(); !cond(); time.Sleep(time.Millisecond) {
			h.Epoch()
			if time.Since(start) > 10*time.Second {
				t.Fatal(what)
			}
		}
	}
	epoch := h.Epoch()
	extra := netip.MustParsePrefix("10.1.0.77/24")
	must(t, s.router.AddAddr("r0", extra))
	await("an address that came", func() bool { return h.Types(extra.Addr()) == TypeLocal })
	if h.Epoch() == epoch || h.Sent(extra.Addr()) != Unsure {
		t.Errorf("epoch %d after %d, sent %d", h.Epoch(), epoch, h.Sent(extra.Addr()))
	}
	must(t, s.router.DelAddr("r0", extra))
	await("an address that went", func() bool { return h.Types(extra.Addr()) == TypeUnicast })
	if h.Sent(extra.Addr()) != Unsure {
		t.Errorf("sent %d", h.Sent(extra.Addr()))
	}
	// A second way out: what is behind a gateway may come in by either.
	must(t, s.router.AddRoute(netip.MustParsePrefix("192.0.2.0/24"), a("10.2.0.2"), "r1"))
	await("a route", func() bool { return fmt.Sprint(names(h.Inputs(a("203.0.113.1")))) == "[r1 s0]" })
	if got := fmt.Sprint(names(h.Outputs(a("192.0.2.9")))); got != "[r1]" {
		t.Errorf("outputs %s", got)
	}
	must(t, h.Close())
	must(t, h.Close())
	if h.Sent(a("10.1.0.1")) != Unsure || h.Types(a("10.1.0.1")) != AllTypes || h.Inputs(a("10.1.0.2")) != nil {
		t.Error("a closed host knows something")
	}
}

// iptables-legacy is seen; its rules are not read.
func TestLegacy(t *testing.T) {
	if _, err := exec.LookPath("iptables-legacy"); err != nil {
		t.Skip("install iptables: ", err)
	}
	s := newScene(t)
	if o := Others(s.router.Path()); o.unread() {
		t.Skip("something else translates in every namespace: ", o)
	}
	if out, err := s.try("", "iptables-legacy", "-t", "nat", "-L", "-n"); err != nil {
		t.Skip("this kernel has no iptables-legacy: ", out)
	}
	o := Others(s.router.Path())
	if !o.Legacy || !strings.Contains(o.String(), "iptables-nft") {
		t.Errorf("%+v: %s", o, o)
	}
	j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
	must(t, err)
	defer j.Close()
	if v := j.Judge(flowOf("")); v.Verdict != Unpredictable || !strings.Contains(v.Why, "iptables-legacy") {
		t.Errorf("%+v", v)
	}
}
