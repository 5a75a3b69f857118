//go:build linux

package agent_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/source"
)

// The tests of this package that need no kernel run in the same process, so that
// both kinds share this TestMain.
func TestMain(m *testing.M) { nstest.Main(m) }

var (
	vip = netip.MustParseAddrPort("203.0.113.10:53")
	b1  = netip.MustParseAddrPort("198.51.100.11:53")
	b2  = netip.MustParseAddrPort("198.51.100.12:53")
	b3  = netip.MustParseAddrPort("198.51.100.13:53")
)

// told is a source that says what the test says.
type told struct{ sinks chan source.Sink }

func (told) Name() string { return "test" }

func (s told) Run(ctx context.Context, sink source.Sink) error {
	s.sinks <- sink
	<-ctx.Done()
	return nil
}

// bed is a node with an agent beside a proxy, a client and three backends.
type bed struct {
	t      *testing.T
	net    *testnet.Star
	agent  *agent.Agent
	sink   source.Sink
	commit func(backends ...netip.AddrPort) // the proxy: it writes rules
	passes passes
}

// passes is an Observer that keeps when flows were deleted.
type passes struct {
	mu      sync.Mutex
	deleted []time.Time // a pass that deleted one or more
}

func (p *passes) Pass(pass agent.Pass) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pass.Report.Deleted > 0 {
		p.deleted = append(p.deleted, pass.Start)
	}
}

func (*passes) Settled(agent.Settled)        {}
func (*passes) Disagrees(agent.Disagreement) {}

func (p *passes) times() []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.deleted)
}

// proxies are the ways in which rules get into the kernel.
var proxies = map[string]func(b *bed) func(...netip.AddrPort){
	"nft": func(b *bed) func(...netip.AddrPort) {
		return func(backends ...netip.AddrPort) {
			b.t.Helper()
			if err := b.net.Router.SetNAT(testnet.Forward{Proto: conntrack.UDP, Dst: vip, Backends: backends}); err != nil {
				b.t.Fatal(err)
			}
		}
	},
	"iptables-nft": func(b *bed) func(...netip.AddrPort) { return restore(b, "iptables-nft-restore") },
}

// legacy is a proxy whose commits nobody can see and whose rules nobody reads.
func legacy(b *bed) func(...netip.AddrPort) { return restore(b, "iptables-legacy-restore") }

// restore writes rules of the hook prerouting alone.
func restore(b *bed, program string) func(...netip.AddrPort) {
	b.t.Helper()
	restore, err := exec.LookPath(program)
	if err != nil {
		if os.Getenv(nstest.RequireEnv) == "1" {
			b.t.Fatal(err)
		}
		b.t.Skip("needs the package iptables: ", err)
	}
	return func(backends ...netip.AddrPort) {
		b.t.Helper()
		// This rule has connections tracked when there is no other.
		rules := "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n" +
			"-A PREROUTING -d 192.0.2.254/32 -p udp --dport 9 -j DNAT --to-destination 198.51.100.254\n"
		for _, to := range backends {
			rules += fmt.Sprintf("-A PREROUTING -d %s/32 -p udp --dport %d -j DNAT --to-destination %s\n", vip.Addr(), vip.Port(), to)
		}
		cmd := exec.CommandContext(b.t.Context(), restore)
		cmd.Stdin = strings.NewReader(rules + "COMMIT\n")
		cmd.Env = append(cmd.Environ(), nstest.LockFile(b.t))
		if err := b.net.Router.Do(func() error {
			out, err := cmd.CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		}); err != nil {
			b.t.Fatal(err)
		}
	}
}

func newBed(t *testing.T, proxy string, window time.Duration) *bed {
	t.Helper()
	return newBedWith(t, proxies[proxy], nil, window)
}

// newBedWith takes any proxy, and what makes the rules that the agent reads; nil:
// it reads none.
func newBedWith(t *testing.T, proxy func(b *bed) func(...netip.AddrPort), rules func(b *bed) agent.Rules,
	window time.Duration,
) *bed {
	t.Helper()
	b := &bed{t: t}
	b.net = nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
	for _, a := range []netip.AddrPort{b1, b2, b3} {
		if err := b.net.Leaf("backends").AddAddr("eth0", netip.PrefixFrom(a.Addr(), 24)); err != nil {
			t.Fatal(err)
		}
		nstest.Echo(t, b.net.Leaf("backends"), a)
	}
	b.commit = proxy(b)
	b.commit(b1)
	conn, err := conntrack.Dial(conntrack.Config{NetNS: b.net.Router.Path()})
	if err != nil {
		t.Fatal(err)
	}
	gens, err := nft.Open(b.net.Router.Path())
	if err != nil {
		t.Fatal(err)
	}
	src := told{make(chan source.Sink, 1)}
	options := agent.Options{
		Conn: conn, Ruleset: agent.NewRuleset(gens, b.net.Router.Path()), Sources: []source.Source{src},
		Observers: []agent.Observer{&b.passes},
		Config:    agent.Config{Policy: frontend.DefaultPolicy, Window: window, FullPass: time.Hour, WalkBudget: 0.5},
	}
	if rules != nil {
		options.Rules = rules(b)
	}
	b.agent = agent.New(options)
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() {
		if err := b.agent.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		work.Wait()
		_ = conn.Close()
		_ = gens.Close()
	})
	b.sink = <-src.sinks
	b.sink.Replace(map[string][]frontend.Frontend{"dns": dns(b1)})
	b.await(func(s agent.Status) bool { return s.Ready })
	return b
}

func dns(backends ...netip.AddrPort) []frontend.Frontend {
	return []frontend.Frontend{{
		Owner: "dns", Kind: frontend.ClusterIP, Proto: conntrack.UDP, Addr: vip.Addr(), Ports: frontend.Port(vip.Port()),
		Valid: frontend.NewBackends(backends...), Usable: len(backends),
	}}
}

func (b *bed) await(cond func(agent.Status) bool) {
	b.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(b.agent.Status()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("not in time: %+v", b.agent.Status())
		}
	}
}

func (b *bed) sender() *testnet.Sender {
	b.t.Helper()
	s := nstest.Send(b.t, b.net.Leaf("client"), netip.AddrPort{}, vip, 20*time.Millisecond)
	b.answered(s, b1)
	return s
}

// answered waits until a server answers, and returns when that datagram was
// sent.
func (b *bed) answered(s *testnet.Sender, by netip.AddrPort) time.Time {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	r, err := s.Await(ctx, by)
	if err != nil {
		b.t.Fatalf("no answer from %s: %v; %+v", by, err, b.agent.Status())
	}
	return r.Sent
}

// What the sender received is the judge: it is answered by the new backend once
// the rules say so, however late that is.
func TestProxyCommits(t *testing.T) {
	for _, tc := range []struct {
		name  string
		proxy func(b *bed)
	}{
		{"before the source tells", func(b *bed) {
			b.commit(b2)
			time.Sleep(200 * time.Millisecond)
			b.sink.Set("dns", dns(b2))
		}},
		{"3 s late", func(b *bed) {
			b.sink.Set("dns", dns(b2))
			time.Sleep(3 * time.Second)
			b.commit(b2)
		}},
		{"wrongly, and rightly 20 s later", func(b *bed) {
			b.sink.Set("dns", dns(b2))
			b.commit(b3)
			time.Sleep(20 * time.Second)
			b.commit(b2)
		}},
	} {
		eachProxy(t, tc.name, func(t *testing.T, proxy string) {
			t.Parallel()
			b := newBed(t, proxy, 25*time.Second)
			s := b.sender()
			tc.proxy(b)
			committed := time.Now()
			repaired := b.answered(s, b2)
			t.Logf("repaired %s after the rules were right", repaired.Sub(committed))
			if tally, err := s.Sample(t.Context(), 20); err != nil || tally.From[b2] != tally.Sent {
				t.Errorf("afterwards %s, %v", tally, err)
			}
		})
	}
}

func eachProxy(t *testing.T, name string, f func(t *testing.T, proxy string)) {
	for proxy := range proxies {
		t.Run(name+"/"+proxy, func(t *testing.T) { f(t, proxy) })
	}
}

// A proxy that never commits: the flow is swept now and then, not without end,
// and that is reported.
func TestProxyNeverCommits(t *testing.T) {
	eachProxy(t, "never", func(t *testing.T, proxy string) {
		t.Parallel()
		neverCommits(newBed(t, proxy, 5*time.Second))
	})
}

func neverCommits(b *bed) {
	t := b.t
	s := b.sender()
	b.sink.Set("dns", dns(b2))
	b.await(func(st agent.Status) bool { return len(st.Disagrees) == 1 })
	d := b.agent.Status().Disagrees[0]
	if d.Frontend != vip.String()+"/UDP" || d.Backend != b1 || d.Owner != "dns" {
		t.Errorf("%+v", d)
	}
	// A pass may delete the flow while an answer is on its way, which is lost then.
	if tally, err := s.Sample(t.Context(), 20); err != nil || tally.From[b1] < tally.Sent-1 {
		t.Errorf("the rules still say %s: %s, %v", b1, tally, err)
	}
}

// Not a test of time, but its measurement: FLOWSWEEP_MEASURE=100 prints how long
// after the rules' commit a stale flow is gone, by so many rounds.
func TestMeasureRepair(t *testing.T) {
	rounds := 5
	if n, err := fmt.Sscan(os.Getenv("FLOWSWEEP_MEASURE"), &rounds); n != 1 && os.Getenv("FLOWSWEEP_MEASURE") != "" {
		t.Fatal(err)
	}
	eachProxy(t, "repair", func(t *testing.T, proxy string) { measureRepair(newBed(t, proxy, 20*time.Second), rounds) })
}

func measureRepair(b *bed, rounds int) {
	t := b.t
	s := b.sender()
	var took []time.Duration
	from, to := b1, b2
	for range rounds {
		b.sink.Set("dns", dns(to))
		time.Sleep(300 * time.Millisecond) // the proxy is late
		b.commit(to)
		committed := time.Now()
		took = append(took, b.answered(s, to).Sub(committed))
		from, to = to, from
	}
	slices.Sort(took)
	t.Logf("repair after the commit, %d rounds, a datagram every 20 ms: median %s, worst %s", rounds, took[rounds/2], took[rounds-1])
}

// Rules that nobody can read make a translation that is wrong by the desired
// state, whatever is deleted: it is deleted ever more rarely, and reported.
func TestComesBack(t *testing.T) {
	const window = 10 * time.Second
	for name, tc := range map[string]struct {
		play func(b *bed) (wrong netip.AddrPort)
		// most is how many deletes there may be in a time.
		most func(time.Duration) int
	}{
		"to a backend that has left": {
			func(b *bed) netip.AddrPort {
				b.sender()
				b.sink.Set("dns", dns(b2))
				return b1
			}, backOff,
		},
		"to a backend that was never known, and answers": {
			func(b *bed) netip.AddrPort {
				b.commit(b3)
				nstest.Send(b.t, b.net.Leaf("client"), netip.AddrPort{}, vip, 20*time.Millisecond)
				return b3
			},
			func(d time.Duration) int { return 1 + int(d/time.Minute) },
		},
		"untranslated": {
			func(b *bed) netip.AddrPort {
				if err := b.net.Router.AddAddr("lo", netip.PrefixFrom(vip.Addr(), 32)); err != nil {
					b.t.Fatal(err)
				}
				b.commit()
				nstest.Send(b.t, b.net.Leaf("client"), netip.AddrPort{}, vip, 20*time.Millisecond)
				b.sink.Set("dns", dns(b2))
				return vip
			}, backOff,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBedWith(t, legacy, readRules, window)
			wrong := tc.play(b)
			b.await(func(st agent.Status) bool { return len(st.Disagrees) == 1 })
			at := time.Now()
			deleted := b.passes.times()
			if len(deleted) == 0 {
				t.Fatal("nothing was deleted")
			}
			after := at.Sub(deleted[0])
			t.Logf("%d passes deleted in %s", len(deleted), after.Round(time.Second))
			if most := tc.most(after); len(deleted) > most {
				t.Errorf("%d passes deleted in %s, want %d at most", len(deleted), after, most)
			}
			s := b.agent.Status()
			if !strings.Contains(s.RulesFault, "iptables-legacy has a nat table") {
				t.Errorf("why the rules are not asked: %q", s.RulesFault)
			}
			d := s.Disagrees[0]
			if d.Frontend != vip.String()+"/UDP" || d.Backend != wrong || d.Owner != "dns" || !strings.Contains(d.Evidence, "dport=53") {
				t.Errorf("%+v", d)
			}
		})
	}
}

// backOff is how many deletes there are in a time, one at its beginning and the
// others 1, 2, 4, ... s apart.
func backOff(d time.Duration) (n int) {
	wait := time.Second
	for n = 1; d >= wait; n++ {
		d -= wait
		wait = min(2*wait, time.Minute)
	}
	return n
}

// readRules has an agent read the rules, as the program does.
func readRules(b *bed) agent.Rules {
	b.t.Helper()
	j, err := ruleset.NewJudge(b.t.Context(), ruleset.Config{NetNS: b.net.Router.Path()})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = j.Close() })
	return &ruleset.Verdicts{Rules: j, Policy: frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All}}
}

// A plain router translates in the hook prerouting alone, so that its rules do
// nothing with what it sends itself, and what they do with a destination is not
// one thing. A flow that they would make again, wrongly, tells all the same.
func TestDisagreesOnARouter(t *testing.T) {
	t.Parallel()
	b := newBedWith(t, proxies["iptables-nft"], readRules, 5*time.Second)
	s := b.sender()
	b.sink.Set("dns", dns(b2)) // the rules go on saying b1
	b.await(func(st agent.Status) bool { return len(st.Disagrees) == 1 })
	d := b.agent.Status().Disagrees[0]
	if d.Frontend != vip.String()+"/UDP" || d.Backend != b1 || d.Owner != "dns" ||
		!strings.Contains(d.Evidence, "dport=53") || !strings.HasPrefix(d.Rule, "ip nat PREROUTING handle ") {
		t.Errorf("%+v", d)
	}
	if tally, err := s.Sample(t.Context(), 20); err != nil || tally.From[b1] != tally.Sent {
		t.Errorf("the rules say %s: %s, %v", b1, tally, err)
	}
	if n := b.passes.times(); n != nil {
		t.Errorf("deleted at %v what the rules make again", n)
	}
	b.commit(b2)
	b.answered(s, b2)
	b.await(func(st agent.Status) bool { return len(st.Disagrees) == 0 && st.UnsettledTotal == 0 })
}
