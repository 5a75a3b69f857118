//go:build linux

package ruleset

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// Two variables make the differential test another one: how long it runs
// (a duration), and where it begins.
const (
	diffForEnv  = "FLOWSWEEP_DIFFERENTIAL_FOR"
	diffSeedEnv = "FLOWSWEEP_DIFFERENTIAL_SEED"
)

// scene is a router between two clients' networks and a sink, which swallows
// whatever is sent to other addresses.
type scene struct {
	router  *testnet.NS
	sockets []sender
	flows   *conntrack.Conn
	rules   *Conn
	host    *NetHost
}

// sender is a UDP socket of a client, or of the router itself.
type sender struct {
	conn *net.UDPConn
	from netip.AddrPort
	own  bool
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func newScene(tb testing.TB) *scene {
	tb.Helper()
	s := &scene{router: nstest.New(tb)}
	one, two, sink := nstest.New(tb), nstest.New(tb), nstest.New(tb)
	r := s.router
	must(tb, r.Sysctl("net.ipv4.ip_forward", "1"))
	must(tb, r.Sysctl("net.ipv6.conf.all.forwarding", "1"))
	must(tb, r.Veth("r0", one, "c0"))
	must(tb, r.Veth("r1", two, "c0"))
	must(tb, r.Veth("s0", sink, "r0"))
	addr := func(ns *testnet.NS, dev string, list ...string) {
		for _, a := range list {
			must(tb, ns.AddAddr(dev, netip.MustParsePrefix(a)))
		}
	}
	addr(r, "r0", "10.1.0.1/24", "10.1.0.9/24", "2001:db8:1::1/64", "2001:db8:1::9/64")
	addr(r, "r1", "10.2.0.1/24", "2001:db8:2::1/64")
	addr(r, "s0", "10.3.0.1/24", "2001:db8:3::1/64")
	addr(one, "c0", "10.1.0.2/24", "10.1.0.3/24", "2001:db8:1::2/64", "2001:db8:1::3/64")
	addr(two, "c0", "10.2.0.2/24", "2001:db8:2::2/64")
	addr(sink, "r0", "10.3.0.2/24", "2001:db8:3::2/64")
	route := func(ns *testnet.NS, dev, via4, via6 string) {
		must(tb, ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(via4), dev))
		must(tb, ns.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr(via6), dev))
	}
	route(r, "s0", "10.3.0.2", "2001:db8:3::2")
	route(one, "c0", "10.1.0.1", "2001:db8:1::1")
	route(two, "c0", "10.2.0.1", "2001:db8:2::1")

	for _, x := range []struct {
		ns    *testnet.NS
		addrs []string
	}{
		{one, []string{"10.1.0.2", "10.1.0.3", "2001:db8:1::2", "2001:db8:1::3"}},
		{two, []string{"10.2.0.2", "2001:db8:2::2"}},
		{r, []string{"10.1.0.1", "10.3.0.1", "2001:db8:1::1", "2001:db8:3::1"}},
	} {
		for _, a := range x.addrs {
			for port := range uint16(3) {
				from := netip.AddrPortFrom(netip.MustParseAddr(a), 40000+port)
				c, err := x.ns.ListenUDP(from)
				must(tb, err)
				tb.Cleanup(func() { c.Close() })
				s.sockets = append(s.sockets, sender{c, from, x.ns == r})
			}
		}
	}
	var err error
	s.flows, err = conntrack.Dial(conntrack.Config{NetNS: r.Path()})
	must(tb, err)
	tb.Cleanup(func() { s.flows.Close() })
	s.rules, err = Open(r.Path())
	must(tb, err)
	tb.Cleanup(func() { s.rules.Close() })
	s.host, err = OpenHost(r.Path())
	must(tb, err)
	tb.Cleanup(func() { s.host.Close() })
	return s
}

// run runs a program in the router's namespace.
func (s *scene) run(tb testing.TB, stdin, name string, args ...string) string {
	tb.Helper()
	out, err := s.try(stdin, name, args...)
	if err != nil {
		tb.Fatalf("%s %s: %v\n%s\n%s", name, strings.Join(args, " "), err, out, stdin)
	}
	return out
}

func (s *scene) try(stdin, name string, args ...string) (string, error) {
	var out bytes.Buffer
	err := s.router.Do(func() error {
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(stdin)
		cmd.Stdout, cmd.Stderr = &out, &out
		return cmd.Run()
	})
	return out.String(), err
}

// send sends a datagram; an error that an earlier one has brought back is passed
// over.
func (s *sender) send(to netip.AddrPort) {
	for range 3 {
		if _, err := s.conn.WriteToUDPAddrPort([]byte("x"), to); err == nil {
			return
		}
	}
}

// tally counts how much the predictions said.
type tally struct {
	rulesets, flows          int
	single, some, any        int
	dropped                  int // no flow, which was among what was predicted
	translated, untranslated int

	refused map[string]int // by nft, by what it says
	why     map[string]int // of any
}

func (t *tally) String() string {
	n := max(t.flows, 1)
	return fmt.Sprintf("%d rulesets, %d packets: %d single (%d %%), %d of several, %d any (%d.%d %%); "+
		"%d translated, %d untranslated, %d dropped",
		t.rulesets, t.flows, t.single, 100*t.single/n, t.some, t.any, 100*t.any/n, 1000*t.any/n%10,
		t.translated, t.untranslated, t.dropped)
}

// check sends packets, and compares what the kernel did with what was predicted.
func (s *scene) check(tb testing.TB, rs *Ruleset, packets []shot, t *tally) (ok bool) {
	tb.Helper()
	for i := range packets {
		packets[i].by.send(packets[i].to)
	}
	ctx := context.Background()
	type ends struct{ from, to netip.AddrPort }
	met := map[ends]conntrack.Flow{}
	var all []conntrack.Flow
	for f, err := range s.flows.Dump(ctx, conntrack.Filter{}) {
		must(tb, err)
		all = append(all, *f)
		if f.Proto == conntrack.UDP {
			met[ends{
				netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort),
			}] = *f
		}
	}
	ok = true
	for _, x := range packets {
		p := Packet{conntrack.UDP, x.by.from.Addr(), x.to.Addr(), x.by.from.Port(), x.to.Port()}
		o := rs.Outcome(p, s.host)
		f, there := met[ends{x.by.from, x.to}]
		got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
		var right bool
		t.flows++
		switch {
		case !there:
			right = o.Any || o.Dropped
			t.dropped++
		case !f.Translated():
			right = o.Any || o.Untranslated || o.Allows(got, local(s.host, got.Addr()))
			t.untranslated++
		default:
			right = o.Allows(got, local(s.host, got.Addr()))
			t.translated++
		}
		switch {
		case o.Any:
			t.any++
			t.why[o.Why]++
		case o.Single():
			t.single++
		default:
			t.some++
		}
		if !right {
			ok = false
			_, steps := rs.Explain(p, s.host)
			tb.Errorf("%s > %s (own %v): predicted %v; the kernel: there %v, to %v", x.by.from, x.to, x.by.own, o, there, got)
			for _, st := range steps {
				tb.Logf("  %s: %s: %s", st.Rule, st.Text, st.Effect)
			}
		}
	}
	if len(all) > 0 {
		_, err := s.flows.Delete(ctx, all...)
		must(tb, err)
	}
	return ok
}

// shot is one packet to be sent.
type shot struct {
	by *sender
	to netip.AddrPort
}

// budget returns how long random cases are to be tried, and the first seed: by
// default some, with FLOWSWEEP_DIFFERENTIAL_SEED one.
func budget(t *testing.T, span time.Duration) (time.Duration, uint64) {
	t.Helper()
	if v := os.Getenv(diffForEnv); v != "" {
		var err error
		span, err = time.ParseDuration(v)
		must(t, err)
	} else if testing.Short() {
		span = 3 * time.Second
	}
	seed := rand.Uint64()
	if v := os.Getenv(diffSeedEnv); v != "" {
		var err error
		seed, err = strconv.ParseUint(v, 0, 64)
		must(t, err)
		span = 0
	}
	t.Log("first seed: ", seed)
	return span, seed
}

// TestDifferential writes random rulesets with nft and iptables-nft, sends packets
// through them, and compares the connection that the kernel made with what was
// predicted: it must always be among it.
func TestDifferential(t *testing.T) {
	span, seed := budget(t, 20*time.Second)
	s := newScene(t)
	for _, tool := range []string{"nft", "iptables-nft-restore", "ip6tables-nft-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("install nftables and iptables: ", err)
		}
	}
	count := tally{refused: map[string]int{}, why: map[string]int{}}
	for start := time.Now(); ; seed++ {
		if !s.round(t, seed, &count) {
			t.Logf("%s=%d runs this one again", diffSeedEnv, seed)
			if count.rulesets > 3 || span == 0 {
				break
			}
		}
		if time.Since(start) > span {
			break
		}
	}
	t.Log(&count)
	t.Log("nft refused: ", count.refused)
	t.Log("any: ", count.why)
}

// round tries one ruleset.
func (s *scene) round(tb testing.TB, seed uint64, count *tally) bool {
	tb.Helper()
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 6)), v6: seed%2 == 1}
	var wrote []string
	// Connection tracking begins with the first rule that needs it. Packets come to the
	// NAT rules with any mark.
	s.run(tb, `flush ruleset
table inet track {
	chain c { type filter hook input priority 0; ct state new
	}
	chain pre { type filter hook prerouting priority -150; meta mark set numgen random mod 32; ct mark set numgen random mod 16
	}
	chain out { type filter hook output priority -150; meta mark set numgen random mod 32; ct mark set numgen random mod 16
	}
}
`, "nft", "-f", "-")
	kind := g.IntN(4)
	if kind != 1 {
		text := ""
		for i := range 1 + g.IntN(2) {
			text += g.nft(fmt.Sprintf("t%d", i))
		}
		wrote = append(wrote, s.nft(tb, text, count))
	}
	if kind == 1 || kind == 2 {
		text := g.iptables()
		s.run(tb, text, map[bool]string{false: "iptables-nft-restore", true: "ip6tables-nft-restore"}[g.v6])
		wrote = append(wrote, text)
	}
	rs, err := s.rules.Load(tb.Context())
	must(tb, err)
	var packets []shot
	for _, p := range distinct(160, func() [2]string {
		return [2]string{fmt.Sprint(g.IntN(len(s.sockets))), net.JoinHostPort(g.dst(), fmt.Sprint(g.port()))}
	}) {
		i, _ := strconv.Atoi(p[0])
		to := netip.MustParseAddrPort(p[1])
		if s.sockets[i].from.Addr().Is6() == g.v6 && to.Addr().Is6() == g.v6 {
			packets = append(packets, shot{&s.sockets[i], to})
		}
	}
	count.rulesets++
	ok := s.check(tb, rs, packets, count)
	if !ok {
		tb.Logf("seed %d:\n%s", seed, strings.Join(wrote, "\n"))
	}
	return ok
}

var refusedLine = regexp.MustCompile(`/dev/stdin:(\d+):\d+-\d+: Error: (.*)`)

// nft loads tables, and returns what it loaded: rules that contradict themselves,
// "tcp" and then "udp", are refused by nft and left out.
func (s *scene) nft(tb testing.TB, text string, count *tally) string {
	tb.Helper()
	for {
		out, err := s.try(text, "nft", "-f", "-")
		if err == nil {
			return text
		}
		lines := strings.Split(text, "\n")
		bad := refusedLine.FindAllStringSubmatch(out, -1)
		for _, m := range bad {
			n, _ := strconv.Atoi(m[1])
			if lines[n-1] != "" && !strings.HasPrefix(lines[n-1], "\t\t") {
				tb.Fatalf("nft: %s\n%s", out, text)
			}
			lines[n-1] = ""
			count.refused[m[2]]++
		}
		if len(bad) == 0 {
			tb.Fatalf("nft: %s\n%s", out, text)
		}
		text = strings.Join(lines, "\n")
	}
}
