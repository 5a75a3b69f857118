//go:build engines && linux

package engines

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/internal/testnet"
)

var (
	// public is an address of the router, on the client's side.
	public   = netip.MustParseAddr("203.0.113.10")
	backends = []netip.Addr{netip.MustParseAddr("198.51.100.11"), netip.MustParseAddr("198.51.100.12")}
)

// firewall is a tool that an administrator writes rules with.
type firewall struct {
	name string
	// tool replaces all rules by those on standard input, in one commit.
	tool []string
	// filter has no NAT; nat, behind it, forwards a range to a backend and another one to the first.
	filter, nat string
	// flush is the first half of a reload that is not one commit, script the other, in single commands.
	flush  []string
	script string
}

var firewalls = []firewall{
	{
		name: "nft",
		tool: []string{"nft", "-f", "-"},
		filter: `
flush ruleset
table inet filter {
	chain forward {
		type filter hook forward priority filter; policy accept;
		ct state invalid drop
	}
}
`,
		nat: `
table ip nat {
	chain prerouting {
		type nat hook prerouting priority dstnat;
		iifname "client" ip daddr 203.0.113.10 udp dport 50000-%[1]d dnat to %[2]s
		iifname "client" ip daddr 203.0.113.10 udp dport 51000-51009 dnat to 198.51.100.11
	}
	chain postrouting {
		type nat hook postrouting priority srcnat;
		oifname "backends" masquerade
	}
}
`,
		flush: []string{"nft", "flush", "table", "ip", "nat"},
		script: `
nft add rule ip nat prerouting iifname client ip daddr 203.0.113.10 udp dport 50000-%[1]d dnat to %[2]s
nft add rule ip nat prerouting iifname client ip daddr 203.0.113.10 udp dport 51000-51009 dnat to 198.51.100.11
nft add rule ip nat postrouting oifname backends masquerade`,
	},
	{
		name: "iptables",
		tool: []string{"iptables-nft-restore"},
		filter: `
*filter
-A FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
`,
		nat: `
*nat
-A PREROUTING -i client -d 203.0.113.10/32 -p udp -m udp --dport 50000:%[1]d -j DNAT --to-destination %[2]s
-A PREROUTING -i client -d 203.0.113.10/32 -p udp -m udp --dport 51000:51009 -j DNAT --to-destination 198.51.100.11
-A POSTROUTING -o backends -j MASQUERADE
COMMIT
`,
		flush: []string{"iptables-nft", "-t", "nat", "-F"},
		script: `
iptables-nft -t nat -A PREROUTING -i client -d 203.0.113.10 -p udp --dport 50000:%[1]d -j DNAT --to-destination %[2]s
iptables-nft -t nat -A PREROUTING -i client -d 203.0.113.10 -p udp --dport 51000:51009 -j DNAT --to-destination 198.51.100.11
iptables-nft -t nat -A POSTROUTING -o backends -j MASQUERADE`,
	},
}

// rules returns all rules, with a forward of ports 50000 to a last one to a backend.
func (fw *firewall) rules(last int, backend netip.Addr) string {
	return fw.filter + fmt.Sprintf(fw.nat, last, backend)
}

// load replaces all rules.
func (fw *firewall) load(t testing.TB, h *host, rules string) {
	t.Helper()
	h.run(t, strings.NewReader(rules), fw.tool...)
}

// newRouter makes a router with backends, and without rules.
func newRouter(t testing.TB, r *report, fw firewall) *stage {
	t.Helper()
	network := netip.MustParsePrefix("198.51.100.0/24")
	h := newHost(t, testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{network}})
	must(t, h.ns.AddAddr("client", netip.PrefixFrom(public, 32)))
	strict(t, h, "1") // or it would not be certain by which interface a flow came in
	s := newStage(t, r, "router, "+fw.name, h)
	for _, b := range backends {
		must(t, h.star.Leaf("backends").AddAddr("eth0", netip.PrefixFrom(b, network.Bits())))
		for _, port := range []uint16{50000, 50099, 51000} {
			s.listen(t, h.star.Leaf("backends"), at(b, port))
		}
	}
	s.listen(t, s.ns, at(public, 51000))
	return s
}

// strict sets rp_filter, 1 of which is strict.
func strict(t testing.TB, h *host, value string) {
	t.Helper()
	must(t, h.ns.Sysctl("net.ipv4.conf.all.rp_filter", value))
}

// bystandRouter starts what cases must leave alone, once there are rules.
func (s *stage) bystandRouter(t testing.TB) {
	t.Helper()
	s.bystander(t, "to a backend that stays", s.client, at(public, 51000), right(at(backends[0], 51000)))
	s.bystander(t, "from the router to itself", s.ns, at(public, 51000), "plain")
	s.bystander(t, "past the rules", s.client, at(backends[0], 51000), "plain")
}

// keptRouter plays the cases on a router that the agent keeps clean.
func keptRouter(t *testing.T, r *report, fw firewall) {
	s := newRouter(t, r, fw)
	s.startAgent(t)
	boot := s.scene(t, "streams before the rules")
	fw.load(t, s.host, fw.filter) // or there would be no connection tracking yet
	first := s.send(t, "to the first port", s.client, at(public, 50000), pace)
	last := s.send(t, "to the last port", s.client, at(public, 50099), pace)
	boot.sent(first, last)
	fw.load(t, s.host, fw.rules(50099, backends[0]))
	boot.repaired(verdicts{first: "untranslated", last: "untranslated"})
	boot.answered(at(backends[0], 50000), first)
	boot.answered(at(backends[0], 50099), last)
	s.bystandRouter(t)

	// moved plays that another backend is forwarded to.
	now := 0
	moved := func(name string, move func(s *scene, load func())) {
		s.play(t, name, func(s *scene) {
			first := s.send("to the first port", s.client, at(public, 50000))
			last := s.send("to the last port", s.client, at(public, 50099))
			s.answered(at(backends[now], 50000), first)
			s.answered(at(backends[now], 50099), last)
			now = 1 - now
			move(s, func() { fw.load(s, s.host, fw.rules(50099, backends[now])) })
			s.repaired(verdicts{first: "backend-gone", last: "backend-gone"})
			s.answered(at(backends[now], 50000), first)
			s.answered(at(backends[now], 50099), last)
			s.judged(verdicts{first: right(at(backends[now], 50000)), last: right(at(backends[now], 50099))})
		})
	}
	must(t, first.Close())
	must(t, last.Close())
	s.forget(t)
	moved("forwarded to another backend", func(_ *scene, load func()) { load() })
	moved("forwarded while the agent is away", func(s *scene, load func()) {
		s.endAgent(s, "KILL")
		load()
		s.startAgent(s)
	})

	s.play(t, "flushed and loaded by single commands", func(s *scene) {
		to := at(backends[now], 50000)
		old := s.send("to the first port", s.client, at(public, 50000))
		s.answered(to, old)
		s.gap = true
		lives := s.ends(old)
		s.run(s, nil, fw.flush...)
		meanwhile := []*stream{s.send("begun meanwhile", s.client, at(public, 50000))}
		for command := range strings.Lines(strings.TrimSpace(fmt.Sprintf(fw.script, 50099, backends[now]))) {
			time.Sleep(time.Second) // in which the agent acts by what there is
			s.run(s, nil, strings.Fields(command)...)
			meanwhile = append(meanwhile, s.send("begun meanwhile", s.client, at(public, 50000)))
		}
		s.lived(to, lives, meanwhile)
	})
	s.endAgent(t, "TERM")
}

// router plays the cases on a router whose rules are written by hand.
func router(t *testing.T, r *report, fw firewall) {
	t.Run("agent", func(t *testing.T) { keptRouter(t, r, fw) })

	s := newRouter(t, r, fw)
	load := func(t testing.TB, rules string) {
		t.Helper()
		fw.load(t, s.host, rules)
	}

	s.play(t, "streams before the rules", func(s *scene) {
		load(s, fw.filter)
		s.listen(s, s.ns, at(public, 50099))
		first := s.send("to the first port", s.client, at(public, 50000))
		last := s.send("to the last port", s.client, at(public, 50099))
		beside := s.send("beside the range", s.client, at(public, 50100))
		own := s.send("from the router", s.ns, at(public, 50099))
		past := s.send("past the rules", s.client, at(backends[0], 50000))
		s.answered(at(public, 50099), last, own)
		s.answered(at(backends[0], 50000), past)
		s.judged(verdicts{first: "plain", last: "plain", beside: "plain", own: "plain", past: "plain"})

		load(s, fw.rules(50099, backends[0]))
		s.unanswered(first, beside)
		s.swept(verdicts{first: "untranslated", last: "untranslated", beside: "plain", own: "plain", past: "plain"})
		s.answered(at(backends[0], 50000), first, past)
		s.answered(at(backends[0], 50099), last)
		s.answered(at(public, 50099), own)
		s.judged(verdicts{
			first: right(at(backends[0], 50000)), last: right(at(backends[0], 50099)),
			beside: "plain", own: "plain", past: "plain",
		})
	})

	s.bystandRouter(t)

	s.play(t, "forwarded to another backend", func(s *scene) {
		first := s.send("to the first port", s.client, at(public, 50000))
		last := s.send("to the last port", s.client, at(public, 50099))
		s.answered(at(backends[0], 50000), first)
		s.answered(at(backends[0], 50099), last)
		load(s, fw.rules(50099, backends[1]))
		s.swept(verdicts{
			first: "backend-gone " + at(backends[0], 50000).String(), last: "backend-gone " + at(backends[0], 50099).String(),
		})
		s.answered(at(backends[1], 50000), first)
		s.answered(at(backends[1], 50099), last)
	})

	s.play(t, "range made smaller", func(s *scene) {
		first := s.send("to the first port", s.client, at(public, 50000))
		last := s.send("to the last port", s.client, at(public, 50099))
		s.answered(at(backends[1], 50000), first)
		s.answered(at(backends[1], 50099), last)
		load(s, fw.rules(50049, backends[1]))
		s.swept(verdicts{first: right(at(backends[1], 50000)), last: "frontend-gone " + at(backends[1], 50099).String()})
		s.judged(verdicts{first: right(at(backends[1], 50000)), last: "plain"})
	})

	s.play(t, "reloaded while traffic runs", func(s *scene) {
		load(s, fw.rules(50099, backends[1]))
		old := s.send("to the first port", s.client, at(public, 50000))
		s.answered(at(backends[1], 50000), old)
		want := verdicts{old: right(at(backends[1], 50000))}
		ended := len(s.destroyed(s, old))

		const reloads = 20
		done := make(chan error, 1)
		go func() {
			var err error
			for n := 0; n < reloads && err == nil; n++ {
				_, err = s.try(strings.NewReader(fw.rules(50099, backends[1])), fw.tool...)
				time.Sleep(pace)
			}
			done <- err
		}()
		for reloading := true; reloading; {
			st := s.send("meanwhile", s.client, at(public, 50099))
			want[st] = right(at(backends[1], 50099))
			if stale, _ := s.flowsweep("sweep"); len(stale) > 0 {
				s.Errorf("flowsweep deleted %v", stale)
			}
			select {
			case err := <-done:
				must(s, err)
				reloading = false
			default:
			}
		}
		s.swept(want)
		s.notEnded(old, ended)
	})

	s.play(t, "reloaded with a gap", func(s *scene) {
		s.gap = true
		old := s.send("to the first port", s.client, at(public, 50000))
		s.answered(at(backends[1], 50000), old)
		s.run(s, nil, fw.flush...)
		in := s.send("begun in the gap", s.client, at(public, 50099))
		s.sent(in)
		load(s, fw.rules(50099, backends[1]))
		strict(s, s.host, "2")
		const open = "unpredictable: no rule translates what comes in by backends, and it may have: rp_filter is not strict there"
		s.judged(verdicts{old: right(at(backends[1], 50000)), in: open})
		strict(s, s.host, "1")
		s.swept(verdicts{old: right(at(backends[1], 50000)), in: "untranslated"})
		s.answered(at(backends[1], 50000), old)
		s.answered(at(backends[1], 50099), in)
	})
}
