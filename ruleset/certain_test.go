//go:build linux

package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// What is certain of a host is less than what is likely, and each thing that makes
// it less is seen at once.
func TestCertain(t *testing.T) {
	const client, neighbour, own = "203.0.113.1", "10.1.0.2", "10.1.0.1"
	a := netip.MustParseAddr
	// say is what is certain of a source: whose it is, and by which interfaces it may
	// come in.
	say := func(h *NetHost, src string) string {
		if !h.Current(conntrack.TCP) {
			return "not current"
		}
		c := h.Certain()
		var names []string
		if in := c.Inputs(a(src)); in != nil {
			for _, i := range in.List {
				names = append(names, i.Name)
			}
		}
		slices.Sort(names)
		return fmt.Sprint([...]string{"unsure", "foreign", "own"}[c.Sent(a(src))], " ", names)
	}
	sysctl := func(list ...string) func(*testing.T, *scene) {
		return func(t *testing.T, s *scene) {
			for i := 0; i < len(list); i += 2 {
				must(t, s.router.Sysctl(list[i], list[i+1]))
			}
		}
	}
	ip := func(lines ...string) func(*testing.T, *scene) {
		return func(t *testing.T, s *scene) {
			for _, line := range lines {
				s.run(t, "", "ip", strings.Fields(line)...)
			}
		}
	}
	strict := []string{"net.ipv4.conf.r0.rp_filter", "1", "net.ipv4.conf.r1.rp_filter", "1", "net.ipv4.conf.s0.rp_filter", "1"}
	for _, tt := range []struct {
		name string
		do   func(*testing.T, *scene)
		src  string
		want string
	}{
		{"nothing", sysctl(), client, "foreign [r0 r1 s0]"},
		{"nothing, own address", sysctl(), own, "own [r0 r1 s0]"},
		{"rp_filter is strict", sysctl(strict...), client, "foreign [s0]"},
		{"rp_filter is strict, connected", sysctl(strict...), neighbour, "foreign [r0]"},
		{"strict for all", sysctl("net.ipv4.conf.all.rp_filter", "1"), neighbour, "foreign [r0]"},
		{"strict but on one", sysctl(strict[:4]...), neighbour, "foreign [r0 s0]"},
		{"loose for all", sysctl(append(strict, "net.ipv4.conf.all.rp_filter", "2")...), neighbour, "foreign [r0 r1 s0]"},
		{"strict, IPv6", sysctl("net.ipv4.conf.all.rp_filter", "1"), "2001:db8:1::2", "foreign [r0 r1 s0]"},
		{"a rule behind the local one", ip("rule add fwmark 1 lookup 100"), client, "foreign [r0 r1 s0]"},
		{"a rule before the local one", ip("rule add pref 10 lookup local", "rule del pref 0"), client, "foreign [r0 r1 s0]"},
		{"rules that do not begin with local", ip("rule add pref 0 from 192.0.2.0/24 lookup main", "rule add pref 5 lookup local",
			"rule del pref 0 lookup local"), client, "unsure [r0 r1 s0]"},
		{"a local route of a proxy", ip("route add local 0.0.0.0/0 dev lo table 100"), client, "unsure [r0 r1 s0]"},
		{"the same for IPv6", ip("route add local ::/0 dev lo table 100"), client, "unsure [r0 r1 s0]"},
		{"a local route in main", ip("route add local 192.0.2.0/24 dev lo table main"), client, "unsure [r0 r1 s0]"},
		{"AnyIP", ip("route add local 192.0.2.0/24 dev lo"), "192.0.2.7", "unsure [r0 r1 s0]"},
		{"AnyIP, elsewhere", ip("route add local 192.0.2.0/24 dev lo"), client, "foreign [r0 r1 s0]"},
		{"own address, IPv6", sysctl(), "2001:db8:1::1", "unsure [r0 r1 s0]"},
		{"others may send with own addresses", sysctl("net.ipv4.conf.all.accept_local", "1"), own, "unsure [r0 r1 s0]"},
		{
			"others may, by one interface", func(t *testing.T, s *scene) {
				must(t, s.router.Sysctl("net.ipv4.conf.r1.accept_local", "1"))
				s.run(t, "", "ip", "link", "set", "r1", "alias", "x") // no event tells of the setting
			}, own, "unsure [r0 r1 s0]",
		},
		{"any address may be bound", sysctl("net.ipv4.ip_nonlocal_bind", "1"), client, "unsure [r0 r1 s0]"},
		{
			"an interface went", ip("link add gone type veth peer name other", "link del gone"), client,
			"foreign [gone other r0 r1 s0]",
		},
		{
			"containers behind a bridge", ip("link add br0 type bridge", "addr add 172.17.0.1/16 dev br0", "link set br0 up"),
			client, "foreign [r0 r1 s0]",
		},
		{
			"the containers themselves", ip("link add br0 type bridge", "addr add 172.17.0.1/16 dev br0", "link set br0 up"),
			"172.17.0.2", "foreign [br0 r0 r1 s0]",
		},
		{"a bridge without a network", ip("link add br0 type bridge"), client, "foreign [br0 r0 r1 s0]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			if tt.name == "an interface went" {
				ip("link add gone type veth peer name other")(t, s)
				say(s.host, client)
				ip("link del gone")(t, s)
			} else {
				tt.do(t, s)
			}
			// What no event tells of is read now and then.
			s.host.mu.Lock()
			s.host.signsAt = s.host.signsAt.Add(-signsFor)
			s.host.least = s.host.least.Add(-answerTime)
			s.host.mu.Unlock()
			if got := say(s.host, tt.src); got != tt.want {
				t.Errorf("%s is %s, want %s", tt.src, got, tt.want)
			}
		})
	}
}

// A host that has too many changes to be read is not current, and says so.
func TestCurrent(t *testing.T) {
	s := newScene(t)
	h := s.host
	must(t, s.router.AddAddr("r0", netip.MustParsePrefix("10.1.0.77/24")))
	h.mu.Lock()
	h.least = h.least.Add(answerTime)
	h.mu.Unlock()
	if h.Current(conntrack.UDP) {
		t.Error("current, though an address came that it did not read")
	}
	if got := h.Types(netip.MustParseAddr("10.1.0.77")); got != TypeUnicast {
		t.Errorf("types %#x", got)
	}
	h.mu.Lock()
	h.least = h.least.Add(-2 * answerTime)
	h.mu.Unlock()
	if !h.Current(conntrack.UDP) {
		t.Error("not current")
	}
	if got := h.Types(netip.MustParseAddr("10.1.0.77")); got != TypeLocal {
		t.Errorf("types %#x", got)
	}
}

// Only rules that have bridged packets tracked make their flows doubtful.
func TestBridgeTracks(t *testing.T) {
	for _, tt := range []struct {
		name  string
		exprs []byte
		want  bool
	}{
		{"ct state", join(ctKey(uapi.NftCtState), eq(2, 0, 0, 0)), true},
		{"connlimit", expr("connlimit"), true},
		{"a helper", expr("objref"), true},
		{"addresses", join(payload(1, 16, 4), eq(1, 2, 3, 4), dropIt()), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newModel()
			table := join(str(uapi.NftaTableName, "b"))
			must(t, m.addTable(bridgeFamily, table))
			must(t, m.addRule(bridgeFamily, join(str(uapi.NftaRuleTable, "b"), str(uapi.NftaRuleChain, "c"),
				nla(uapi.NftaRuleExpressions, tt.exprs))))
			if got := m.bridge != ""; got != tt.want || len(m.bridges) != 1 {
				t.Errorf("tracks %t, want %t; %d tables to read", got, tt.want, len(m.bridges))
			}
			j := &Judge{rules: &Ruleset{model: m}}
			why := j.doubt(flowOf(""), Untranslated)
			if got := strings.Contains(why, "table bridge"); got != tt.want {
				t.Errorf("doubt %q", why)
			}
		})
	}
}

// A raw socket whose packets are flows of the host's makes sources unsure.
func TestRawSockets(t *testing.T) {
	for proto, want := range map[int]string{255: "unsure", 17: "unsure", 1: "foreign", 89: "foreign"} {
		t.Run(fmt.Sprint(proto), func(t *testing.T) { testRawSocket(t, proto, want) })
	}
}

func testRawSocket(t *testing.T, proto int, want string) {
	t.Helper()
	s := newScene(t)
	var fd int
	must(t, s.router.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, proto)
		return err
	}))
	defer unix.Close(fd)
	s.host.mu.Lock()
	s.host.signsAt, s.host.least = time.Time{}, time.Time{}
	s.host.mu.Unlock()
	if !s.host.Current(conntrack.UDP) {
		t.Fatal("not current")
	}
	got := [...]string{"unsure", "foreign", "own"}[s.host.Certain().Sent(netip.MustParseAddr("10.1.0.2"))]
	if got != want {
		t.Errorf("beside a raw socket of protocol %d a client is %s, want %s", proto, got, want)
	}
}

// The counters of SYNPROXY, as synproxy_cpu_seq_show writes them.
func TestSYNsIn(t *testing.T) {
	const head = "entries\t\tsyn_received\tcookie_invalid\tcookie_valid\tcookie_retrans\tconn_reopened\n"
	for text, want := range map[string]bool{
		"":   false,
		head: false,
		head + "00000000\t00000000\t00000000\t00000000\t00000000\t00000000\n": false,
		head + "00000000\t00000000\t00000001\t00000000\t00000000\t00000000\n": false,
		head + "00000000\t00000000\t00000000\t00000000\t00000000\t00000000\n" +
			"00000000\t000000a0\t00000000\t00000000\t00000000\t00000000\n": true,
	} {
		if got := synsIn([]byte(text)); got != want {
			t.Errorf("%q: %t", text, got)
		}
	}
}

// What is certain is enough to call an untranslated flow stale where the rules leave
// no way around them; where they do, the flow is kept, and the reason names the way.
func TestWayPast(t *testing.T) {
	const dnat, client, public, own = "dnat to 198.51.100.11", "10.1.0.2:40000", "203.0.113.10:53", "10.1.0.1:53"
	strict := func(t *testing.T, s *scene) { must(t, s.router.Sysctl("net.ipv4.conf.all.rp_filter", "1")) }
	docker := func(t *testing.T, s *scene) {
		for _, line := range []string{"link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"} {
			s.run(t, "", "ip", strings.Fields(line)...)
		}
	}
	none := func(*testing.T, *scene) {}
	for _, tt := range []struct {
		name     string
		world    func(*testing.T, *scene)
		rule     string
		src, dst string
		want     Verdict
		why      string
	}{
		{"by address", none, "ip daddr 203.0.113.10 udp dport 53 " + dnat, client, public, Untranslated, ""},
		{"by type of address", none, "fib daddr type local udp dport 53 " + dnat, client, own, Untranslated, ""},
		{
			"by interface", none, `iifname "r0" udp dport 53 ` + dnat, client, public, Unpredictable,
			"no rule translates what comes in by r1, and it may have: rp_filter is not strict there",
		},
		{"by interface, strict", strict, `iifname "r0" udp dport 53 ` + dnat, client, public, Untranslated, ""},
		{"by index, strict", strict, `iif "r0" udp dport 53 ` + dnat, client, public, Untranslated, ""},
		{
			"by interface, strict, IPv6", strict, `iifname "r0" udp dport 53 dnat ip6 to 2001:db8:3::2`, "[2001:db8:1::2]:40000",
			"[2001:db8:5::1]:53", Unpredictable, "comes in by r1, and it may have: nothing makes sure of the interface for IPv6",
		},
		{"not from containers", docker, `iifname != "docker0" udp dport 53 ` + dnat, client, public, Untranslated, ""},
		{
			"not from a bridge of others", func(t *testing.T, s *scene) { s.run(t, "", "ip", "link", "add", "br0", "type", "bridge") },
			`iifname != "br0" udp dport 53 ` + dnat, client, public, Unpredictable, "comes in by br0",
		},
		{"by interface, older than all rules", none, `iifname "r0" udp dport 53 ` + dnat, client, public, Untranslated, "older"},
		{"to this host", none, "udp dport 53 redirect to :5353", client, public, Unpredictable, "transparent proxy"},
		{"to this host's address", none, "udp dport 53 dnat to 10.1.0.1:5353", client, public, Unpredictable, "transparent proxy"},
		{"beside a transparent proxy", func(t *testing.T, s *scene) {
			s.run(t, "", "ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo", "table", "100")
		}, "udp dport 53 " + dnat, client, public, Unpredictable, "transparent proxy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			tt.world(t, s)
			s.run(t, "table inet n { chain p { type nat hook prerouting priority -100; "+
				strings.Replace(tt.rule, "dnat to", "dnat ip to", 1)+"; }; }", "nft", "-f", "-")
			j := newJudge(t, s.router, Config{Host: s.host})
			s.host.mu.Lock()
			s.host.rest = s.host.least
			s.host.mu.Unlock()
			src, dst := netip.MustParseAddrPort(tt.src), netip.MustParseAddrPort(tt.dst)
			f := &conntrack.Flow{
				Family: conntrack.FamilyOf(dst.Addr()), Proto: conntrack.UDP, Status: conntrack.StatusConfirmed | conntrack.StatusDstNATDone,
				Orig:  conntrack.Tuple{Src: src.Addr(), Dst: dst.Addr(), SrcPort: src.Port(), DstPort: dst.Port()},
				Reply: conntrack.Tuple{Src: dst.Addr(), Dst: src.Addr(), SrcPort: dst.Port(), DstPort: src.Port()},
			}
			if tt.why == "older" {
				f.Status, tt.why = conntrack.StatusConfirmed, ""
			}
			v, steps := j.Explain(f)
			if v.Verdict != tt.want || !strings.Contains(v.Why, tt.why) || tt.why == "" && v.Why != "" {
				t.Errorf("%s: %q, want %s: %q\n%s", v.Verdict, v.Why, tt.want, tt.why, strings.Join(steps, "\n"))
			}
			if again := j.Judge(f); again != v {
				t.Errorf("judged again %+v, after %+v", again, v)
			}
		})
	}
}
