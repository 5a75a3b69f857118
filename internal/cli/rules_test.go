//go:build linux

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/docker"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/sweep"
)

// Where the tests' clients send to, and where that may be translated to.
var (
	vips     = addrPorts("203.0.113.10:53", "203.0.113.11:53", "203.0.113.12:53", "203.0.113.13:53")
	backends = addrPorts("198.51.100.11:5353", "198.51.100.12:5353")
)

func addrPorts(list ...string) (ports []netip.AddrPort) {
	for _, s := range list {
		ports = append(ports, netip.MustParseAddrPort(s))
	}
	return ports
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// forwarding is a router's DNAT.
type forwarding map[netip.AddrPort]netip.AddrPort

func setNAT(tb testing.TB, ns *testnet.NS, f forwarding) {
	tb.Helper()
	var list []testnet.Forward
	for _, dst := range slices.SortedFunc(maps.Keys(f), netip.AddrPort.Compare) {
		list = append(list, testnet.Forward{Proto: conntrack.UDP, Dst: dst, Backends: []netip.AddrPort{f[dst]}})
	}
	must(tb, ns.SetNAT(list...))
}

// setIPTables does the same in the chain that Docker uses.
func setIPTables(tb testing.TB, ns *testnet.NS, f forwarding) {
	tb.Helper()
	rules := "*nat\n:DOCKER - [0:0]\n-A PREROUTING -m addrtype ! --dst-type BROADCAST -j DOCKER\n"
	for dst, b := range f {
		rules += fmt.Sprintf("-A DOCKER -d %s -p udp -m udp --dport %d -j DNAT --to-destination %s\n", dst.Addr(), dst.Port(), b)
	}
	must(tb, ns.Do(func() error {
		cmd := exec.CommandContext(tb.Context(), "iptables-nft-restore")
		cmd.Stdin = strings.NewReader(rules + "COMMIT\n")
		out, err := cmd.CombinedOutput()
		if err != nil {
			tb.Logf("%s", out)
		}
		return err
	}))
}

// newRouter returns a router between a client and two backends, to which also
// goes what is not translated.
func newRouter(t *testing.T) (client *testnet.NS, router *testnet.NS) {
	t.Helper()
	star := nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
	b := star.Leaf("backends")
	for _, a := range backends {
		must(t, b.AddAddr("eth0", netip.PrefixFrom(a.Addr(), 24)))
		nstest.Echo(t, b, a)
	}
	must(t, star.Router.AddRoute(netip.MustParsePrefix("203.0.113.0/24"), netip.MustParseAddr("198.51.100.2"), "backends"))
	return star.Leaf("client"), star.Router
}

// The whole story without any input: rules, flows, other rules, and exactly the
// flows are stale that these could not have translated so.
func TestByRules(t *testing.T) {
	for _, tt := range []struct {
		name    string
		set     func(testing.TB, *testnet.NS, forwarding)
		program string
	}{{"nft", setNAT, ""}, {"iptables-nft", setIPTables, "iptables-nft-restore"}} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := exec.LookPath(tt.program); tt.program != "" && err != nil {
				t.Skip(err)
			}
			client, router := newRouter(t)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			tt.set(t, router, forwarding{vips[0]: backends[0], vips[1]: backends[1], vips[3]: backends[0]})
			var senders []*testnet.Sender
			for i, vip := range vips {
				from := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(40000+i))
				senders = append(senders, nstest.Send(t, client, from, vip, 20*time.Millisecond))
			}
			answered := func(i int, by netip.AddrPort) {
				t.Helper()
				if _, err := senders[i].Await(ctx, by); err != nil {
					t.Fatalf("sender %d is not answered by %s: %v", i, by, err)
				}
			}
			answered(0, backends[0])
			answered(1, backends[1])
			answered(3, backends[0])
			right := flowTo(t, router, vips[1])
			flowTo(t, router, vips[2])

			args := []string{"--netns", router.Path()}
			listed := func(command string, want map[uint16]string) output {
				t.Helper()
				out, code, stderr := runJSON(t, append([]string{command}, args...)...)
				got := map[uint16]string{}
				for _, r := range out.Flows {
					got[*r.Flow.Original.SrcPort] = r.Verdict + " " + r.Reason
				}
				if code != 0 || stderr != "" || !maps.Equal(got, want) || len(out.Flows) != len(want) {
					t.Fatalf("%s: exit %d, %v, want %v\n%s", command, code, got, want, stderr)
				}
				if s := out.Summary; s.By != "rules" || s.Rules == 0 || s.Generation == 0 || s.Judged < len(vips) {
					t.Errorf("%s: %+v", command, s)
				}
				return out
			}
			listed("plan", nil)
			tt.set(t, router, forwarding{vips[0]: backends[1], vips[1]: backends[1], vips[2]: backends[1]})
			stale := map[uint16]string{
				40000: "delete backend-gone", 40002: "delete untranslated", 40003: "delete frontend-gone",
			}
			if m := ruleset.Others(router.Path()).Modules; len(m) > 0 {
				t.Logf("flows of rules that are gone are left, since %s loaded", m)
				delete(stale, 40003)
			}
			out := listed("plan", stale)
			for _, r := range out.Flows {
				if owned := r.Reason != "frontend-gone"; (r.Owner != "") != owned || owned && (r.Kind != "rule" || !strings.Contains(r.Owner, " handle ")) {
					t.Errorf("%s is %s %q", r.Reason, r.Kind, r.Owner)
				}
			}
			var text bytes.Buffer
			if code := Run(ctx, append([]string{"plan", "--fail-on-stale"}, args...), nil, &text, &text); code != exitStale {
				t.Errorf("exit %d: %s", code, &text)
			}
			if !regexp.MustCompile(`\njudged by the NAT rules of network namespace \S+: \d+ rules, generation \d+\nestablished TCP and SCTP flows were not looked at`).MatchString(text.String()) {
				t.Errorf("printed: %s", &text)
			}
			if out = listed("sweep", stale); out.Summary.Deleted != len(stale) {
				t.Errorf("%+v", out.Summary)
			}
			answered(0, backends[1])
			answered(2, backends[1])
			if now := flowTo(t, router, vips[1]); now.ID != right.ID || now.Reply != right.Reply {
				t.Errorf("%s became %s", &right, &now)
			}
			listed("plan", nil)
		})
	}
}

// flowTo waits for the flow to a destination.
func flowTo(t *testing.T, ns *testnet.NS, dst netip.AddrPort) conntrack.Flow {
	t.Helper()
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	must(t, err)
	defer c.Close()
	for range 500 {
		flows, err := c.List(t.Context(), to(conntrack.UDP, dst))
		must(t, err)
		if len(flows) == 1 {
			return flows[0]
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("no flow to %s", dst)
	return conntrack.Flow{}
}

// created returns a namespace with rules and flows to the first destination, every
// third of which goes to the second backend.
func created(t *testing.T, flows int) (*testnet.NS, *conntrack.Conn) {
	t.Helper()
	ns, c := kernelTable(t)
	setNAT(t, ns, forwarding{vips[0]: backends[0]})
	for i := range flows {
		b := backends[0]
		if i%3 == 2 {
			b = backends[1]
		}
		f := numbered(t, 1+i, b.Addr().String())
		f.Reply.SrcPort = b.Port()
		must(t, c.Create(t.Context(), f))
	}
	return ns, c
}

// moving lets something happen in the middle of each pass.
type moving struct {
	*conntrack.Conn
	pass int
	move func(pass int)
}

// Dump implements sweep.Conn.
func (m *moving) Dump(ctx context.Context, f conntrack.Filter) iter.Seq2[*conntrack.Flow, error] {
	if f.Proto != conntrack.UDP {
		return m.Conn.Dump(ctx, f)
	}
	m.pass++
	return func(yield func(*conntrack.Flow, error) bool) {
		n := 0
		for fl, err := range m.Conn.Dump(ctx, f) {
			if !yield(fl, err) {
				return
			}
			if n++; n == 50 {
				m.move(m.pass)
			}
		}
	}
}

// Rules that change while the table is walked are read anew at once, and what was
// judged before is judged again: no flow is left that is stale by the last rules,
// none is deleted that is right by them, and none is listed twice.
func TestRulesMove(t *testing.T) {
	const flows = 300
	for _, tt := range []struct {
		name   string
		moves  int // passes in which the rules change
		passes int
		fails  string
		dryRun bool
	}{
		{"not", 0, 1, "", false},
		{"once", 1, 2, "", false},
		{"once, nothing is deleted", 1, 2, "", true},
		{"in each pass", maxPasses, maxPasses, "the NAT rules changed during each of 4 passes; try again", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, c := created(t, flows)
			in := &inputs{netns: ns.Path()}
			r, err := in.readRules(t.Context(), frontend.DefaultPolicy, nil)
			must(t, err)
			defer r.Rules.Close()
			conn := &moving{Conn: c, move: func(pass int) {
				if pass <= tt.moves { // right becomes stale, and stale right
					setNAT(t, ns, forwarding{vips[0]: backends[pass%2]})
				}
			}}
			p, err := sweep.NewPlanner(t.Context(), conn, r, conntrack.IPv4)
			must(t, err)
			listed, seen := map[uint16]int{}, listed{}
			sw := sweep.Sweeper{Conn: conn, Judge: r, DryRun: tt.dryRun, OnFlow: func(f *conntrack.Flow, v frontend.Verdict) {
				if v.Action == frontend.Delete && seen.news(f, v) {
					listed[f.Orig.SrcPort]++
				}
				if v.Action == frontend.Keep && v.Reason != frontend.Serving {
					t.Errorf("%s: %s (%s)", f, v, v.Why)
				}
			}}
			report, err := r.passes(t.Context(), &sw, p.Full())
			if text := fmt.Sprint(err); tt.fails == "" && err != nil || !strings.Contains(text, tt.fails) {
				t.Errorf("%v, want %q", err, tt.fails)
			}
			if conn.pass != tt.passes {
				t.Errorf("%d passes, want %d", conn.pass, tt.passes)
			}
			now := backends[tt.moves%2]
			left, err := c.List(t.Context(), conntrack.Filter{})
			must(t, err)
			right := 0
			for _, f := range left {
				if f.Reply.Src == now.Addr() {
					right++
				}
			}
			want := map[bool]int{true: flows / 3, false: flows - flows/3}[now == backends[1]]
			switch {
			case right != want:
				t.Errorf("%d right flows are left of %d", right, want)
			case tt.dryRun && len(left) != flows, !tt.dryRun && len(left) != want:
				t.Errorf("%d flows are left, %d of them right", len(left), right)
			case report.Deleted+len(left) != flows, report.Judged != flows,
				tt.fails == "" && report.Count(frontend.Delete) != flows-want:
				t.Errorf("%d deleted, %d judged, %d to delete", report.Deleted, report.Judged, report.Count(frontend.Delete))
			}
			for port, n := range listed {
				if n > 1 {
					t.Errorf("the flow from port %d was listed %d times", port, n)
				}
			}
		})
	}
}

// committing lets somebody commit whenever flows are about to be deleted.
type committing struct {
	*rules
	commit func()
}

func (c committing) Confirm() error {
	c.commit()
	return c.rules.Confirm()
}

// Rules that are committed between the second judgement and the delete decide: no
// flow is deleted that they would make, and the table is walked until what they
// make stale is gone.
func TestRulesMoveBeforeDelete(t *testing.T) {
	const flows = 30 // ten to the second backend
	for _, tt := range []struct {
		name    string
		commits int
		other   bool // they change what the flows do not meet
		left    int
		fails   bool
	}{
		{"not", 0, false, 20, false},
		{"once", 1, false, 10, false},
		{"twice", 2, false, 20, false},
		{"without an end", 1000, false, 30, true},
		{"without an end, elsewhere", 1000, true, 30, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, c := created(t, flows)
			r, err := (&inputs{netns: ns.Path()}).readRules(t.Context(), frontend.DefaultPolicy, nil)
			must(t, err)
			defer r.Rules.Close()
			n := 0
			judge := committing{r, func() {
				if n++; n > tt.commits {
					return
				}
				if tt.other {
					setNAT(t, ns, forwarding{vips[0]: backends[0], vips[1]: backends[n%2]})
				} else {
					setNAT(t, ns, forwarding{vips[0]: backends[n%2]})
				}
			}}
			p, err := sweep.NewPlanner(t.Context(), c, r, conntrack.IPv4)
			must(t, err)
			sw := sweep.Sweeper{Conn: c, Judge: judge, OnFlow: func(*conntrack.Flow, frontend.Verdict) {}}
			report, err := r.passes(t.Context(), &sw, p.Full())
			if (err != nil) != tt.fails || tt.fails && !strings.Contains(err.Error(), "stale flows may be left") {
				t.Error(err)
			}
			left, err := c.List(t.Context(), conntrack.Filter{})
			must(t, err)
			if len(left) != tt.left || report.Deleted != flows-tt.left {
				t.Errorf("%d flows are left, want %d; %d deleted", len(left), tt.left, report.Deleted)
			}
		})
	}
}

// What rules say of a destination and of a flow.
func TestExplainByRules(t *testing.T) {
	ns, _ := created(t, 6)
	explain := func(what string) string {
		t.Helper()
		var out bytes.Buffer
		if code := Run(t.Context(), []string{"explain", "--netns", ns.Path(), what}, nil, &out, &out); code != 0 {
			t.Errorf("%s: exit %d", what, code)
		}
		return out.String()
	}
	for what, wants := range map[string][]string{
		"203.0.113.10:53/udp": {
			"203.0.113.10:53/UDP by the NAT rules of network namespace ",
			"(translates it to 198.51.100.11:5353)",
			"what they may do with a packet from anywhere: 198.51.100.11:5353\n",
			"flows to it in the conntrack table: 4 keep serving, 2 delete backend-gone\n",
		},
		"203.0.113.99:53/UDP":              {"what they may do with a packet from anywhere: untranslated\n", "table: none\n"},
		"192.0.2.50:3>203.0.113.10:53/udp": {"no rule may have translated it to 198.51.100.12:5353\n", "verdict: delete backend-gone ("},
		"192.0.2.50:1>203.0.113.10:53/udp": {"the present rules may leave a flow like that\n", "verdict: keep serving ("},
		"udp 17 9 src=192.0.2.50 dst=203.0.113.10 sport=9 dport=53 src=203.0.113.10 dst=192.0.2.50 sport=53 dport=9": {
			"verdict: delete untranslated (",
		},
	} {
		got := explain(what)
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q is missing in\n%s", what, want, got)
			}
		}
	}
}

// A rule that is left over before the right one leads to nobody: explain says so
// of a flow and of a destination.
func TestExplainLeftOver(t *testing.T) {
	client, router := newRouter(t)
	nobody := netip.MustParseAddrPort("198.51.100.99:5353")
	forward := testnet.Forward{Proto: conntrack.UDP, Dst: vips[0], Backends: []netip.AddrPort{nobody}}
	right := forward
	right.Backends = backends[:1]
	must(t, router.SetNAT(forward, right))
	from := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), 40000)
	nstest.Send(t, client, from, vips[0], 20*time.Millisecond)
	flowTo(t, router, vips[0])
	for _, what := range []string{"192.0.2.2:40000>203.0.113.10:53/udp", "203.0.113.10:53/udp"} {
		for name, args := range map[string][]string{
			"by rules": nil, "by a state": {"--state", writeFile(t, strings.ReplaceAll(oneService, "198.51.100.11:53", nobody.String()))},
		} {
			stdout, code, stderr := tryRun(t, append([]string{"explain", "--netns", router.Path(), what}, args...)...)
			for _, want := range []string{
				`no packet meets inet flowsweep-test forwards handle \d+: .* dnat to 198\.51\.100\.11:5353, since inet flowsweep-test forwards handle \d+ comes before it: .* dnat to 198\.51\.100\.99:5353\n`,
				`198\.51\.100\.99 does not answer on backends \(INCOMPLETE\), and flows to it are unanswered: nobody is there\n`,
				`keep serving`,
			} {
				if code != 0 || !regexp.MustCompile(want).MatchString(stdout) {
					t.Errorf("%s, %s: exit %d, %s is missing in\n%s%s", name, what, code, want, stdout, stderr)
				}
			}
		}
	}
}

// What is not judged is told with its cause.
func TestRulesDoubt(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	ns, c := created(t, 3)
	must(t, ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(`table ip odd {
	chain p { type nat hook prerouting priority -110
		ip daddr 203.0.113.11 udp dport 53 limit rate 1/second dnat to 198.51.100.11:5353
		ip daddr 203.0.113.12 udp dport 53 dnat ip to jhash ip saddr mod 2 map { 0 : 198.51.100.11, 1 : 198.51.100.12 }
	}
}
`)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Logf("%s", out)
		}
		return err
	}))
	f := numbered(t, 77, "203.0.113.11")
	f.Orig.Dst = f.Reply.Src
	must(t, c.Create(t.Context(), f))
	out, code, stderr := runJSON(t, "plan", "--netns", ns.Path(), "--all")
	want := regexp.MustCompile(`^flowsweep: warning: 1 flow not judged: ip odd p handle \d+: ` +
		`rules translate some flows like it and pass others, and which cannot be told\n$`)
	if code != 0 || !want.MatchString(stderr) || out.Summary.Reasons["unpredictable"] != 1 {
		t.Errorf("exit %d, %+v, %s", code, out.Summary, stderr)
	}
	for _, r := range out.Flows {
		if (r.Reason == "unpredictable") != (r.Why != "") {
			t.Errorf("%s: %q", r.Reason, r.Why)
		}
	}
}

// Rules that tell nothing of any flow are no verdict.
func TestRulesTellNothing(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	ns, _ := created(t, 3)
	plan := []string{"plan", "--netns", ns.Path(), "--fail-on-stale"}
	set := func(rule string) {
		t.Helper()
		must(t, ns.SetNAT())
		must(t, ns.Do(func() error {
			cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
			cmd.Stdin = strings.NewReader("table ip first\ndelete table ip first\n" +
				"table ip first { chain p { type nat hook prerouting priority -110; " + rule + "; }; }\n")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Logf("%s", out)
			}
			return err
		}))
	}
	set("ip daddr set 203.0.113.99") // writes into the packet
	stdout, code, stderr := tryRun(t, plan...)
	if code != exitFailed || !strings.Contains(stdout, "3 to keep") ||
		!strings.HasSuffix(stderr, "\nflowsweep: --fail-on-stale: nothing stale was found, but the NAT rules do not tell of any flow whether it is\n") {
		t.Errorf("exit %d: %s%s", code, stdout, stderr)
	}
	set("ip daddr 203.0.113.10 udp dport 53 dnat to 198.51.100.11-198.51.100.12:5353") // right, all of them
	if stdout, code, stderr = tryRun(t, plan...); code != 0 {
		t.Errorf("exit %d: %s%s", code, stdout, stderr)
	}
}

// What a plan asks the kernel for leaves answered connections out, and says so;
// there is nothing to say where all are looked at, or nobody may be left.
func TestPassedOver(t *testing.T) {
	ns, _ := created(t, 1)
	const both = "established TCP and SCTP flows were not looked at (--sweep tcp=all,sctp=all)"
	state := writeFile(t, oneService)
	tcp := writeFile(t, strings.ReplaceAll(oneService, `"UDP"`, `"TCP"`))
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"by rules":        {nil, both},
		"all":             {[]string{"--all"}, ""},
		"tcp":             {[]string{"--sweep", "tcp=all"}, "established SCTP flows were not looked at (--sweep sctp=all)"},
		"off":             {[]string{"--sweep", "tcp=off,sctp=off"}, ""},
		"no such service": {[]string{"--state", state}, ""},
		"one":             {[]string{"--state", tcp}, "established TCP flows were not looked at (--sweep tcp=all)"},
	} {
		out, code, stderr := runJSON(t, append([]string{"plan", "--netns", ns.Path()}, tt.args...)...)
		if got := noteOf(out, "not-looked-at"); code != 0 || got != tt.want {
			t.Errorf("%s: exit %d, %q, want %q: %s", name, code, got, tt.want, stderr)
		}
	}
}

// Rules that are not all the rules decide nothing.
func TestRulesNotAlone(t *testing.T) {
	if _, err := exec.LookPath("iptables-legacy"); err != nil {
		t.Skip(err)
	}
	ns, c := created(t, 3)
	must(t, ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), "iptables-legacy", "-w", "-t", "nat", "-N", "X")
		cmd.Env = append(cmd.Environ(), nstest.LockFile(t))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("%v: %s", err, out)
		}
		return nil
	}))
	var out, stderr bytes.Buffer
	code := Run(t.Context(), []string{"sweep", "--netns", ns.Path()}, nil, &out, &stderr)
	if n, err := c.Count(t.Context()); code != 1 || out.Len() > 0 || n != 3 || err != nil ||
		!strings.Contains(stderr.String(), "iptables-legacy has a nat table") || !strings.Contains(stderr.String(), "--state FILE") {
		t.Errorf("exit %d, %d flows, %v\n%s%s", code, n, err, &out, &stderr)
	}
}

// Where a Docker engine answers, its containers are the owners.
func TestContainerNames(t *testing.T) {
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip(err)
	}
	ns, _ := created(t, 3)
	must(t, ns.SetNAT())
	setIPTables(t, ns, forwarding{vips[0]: backends[0]})
	socket := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Api-Version", "1.41") })
	mux.HandleFunc("GET /v1.41/containers/json", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`[{"Names":["/dns"],"Ports":[{"IP":"203.0.113.10","PrivatePort":5353,"PublicPort":53,"Type":"udp"}]}]`))
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	defer func() {
		must(t, s.Close())
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	t.Setenv(docker.HostEnv, "unix://"+socket)
	out, code, stderr := runJSON(t, "plan", "--netns", ns.Path())
	if code != 0 || len(out.Flows) != 1 || out.Flows[0].Owner != "dns" {
		t.Errorf("exit %d, %+v\n%s", code, out.Flows, stderr)
	}
}

func TestOfKubeProxy(t *testing.T) {
	for rule, want := range map[string]bool{
		"ip6 kube-proxy service-667CNP7F-default/s/udp/dns handle 99": true,
		"ip nat KUBE-SVC-ABC handle 7":                                true,
		"ip nat DOCKER handle 13":                                     false,
		"collector":                                                   false,
		"":                                                            false,
	} {
		if got := ofKubeProxy(rule); got != want {
			t.Errorf("%q: %t", rule, got)
		}
	}
}
