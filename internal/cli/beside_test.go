//go:build linux

package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/ruleset"
)

// besideHost is a router whose rules can be replaced by the same without a pause, and
// whose flows have come in ways that their addresses do not tell. All of them are
// right; what they seem to be is the work of rules that have another backend.
type besideHost struct {
	*node
	churn *testnet.Churn
	conn  *conntrack.Conn
	flows map[uint32]conntrack.Flow // by id
}

func newBesideHost(t *testing.T) *besideHost {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("install nftables: ", err)
	}
	h := &besideHost{node: newNode(t), flows: map[uint32]conntrack.Flow{}}
	router, client := h.net.Router, h.net.Leaf("client")
	must(t, router.SetNAT()) // no rules but these
	at, port := netip.MustParseAddr, func(a string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), 53) }
	must(t, router.AddRoute(netip.MustParsePrefix("203.0.113.0/24"), at("198.51.100.2"), "backends"))
	for _, i := range []string{"all", "client"} {
		must(t, router.Sysctl("net.ipv4.conf."+i+".rp_filter", "0"))
	}
	must(t, h.nft(`table ip beside {
	chain pre { type nat hook prerouting priority -90
		iifname "client" ip daddr 203.0.113.20 udp dport 53 dnat to 198.51.100.12
		ip daddr 203.0.113.20 udp dport 53 dnat to 198.51.100.11
		fib daddr type local udp dport 53 dnat to 198.51.100.12
		ip daddr 192.0.2.80 udp dport 53 dnat to 198.51.100.11
		ip daddr 203.0.113.21 udp dport 53 dnat to 198.51.100.11
	}
	chain out { type nat hook output priority -90
		ip daddr 203.0.113.21 udp dport 53 dnat to 198.51.100.12
	}
}
`))
	var err error
	h.churn, err = testnet.NewChurn(router, conntrack.UDP, h.backends[0], 60_000, h.vip, port("203.0.113.11"))
	must(t, err)
	t.Cleanup(func() { _, _ = h.churn.Stop() })
	h.conn, err = conntrack.Dial(conntrack.Config{NetNS: router.Path()})
	must(t, err)
	t.Cleanup(func() { h.conn.Close() })

	shared := netip.MustParsePrefix("192.0.2.80/24")
	must(t, router.AddAddr("client", shared))
	outside, err := client.OpenRaw(false, testnet.SocketOptions{})
	must(t, err)
	defer outside.Close()
	own, err := router.OpenRaw(false, testnet.SocketOptions{})
	must(t, err)
	defer own.Close()
	var want int
	send := func(r *testnet.Raw, n int, from, to string) {
		t.Helper()
		for i := range n {
			want++
			must(t, r.Send(conntrack.UDP, netip.AddrPortFrom(at(from), uint16(10_000+i)), port(to)))
		}
	}
	send(outside, 200, "192.0.2.2", "203.0.113.10")    // as the rules that are replaced say
	send(outside, 10, "198.51.100.77", "203.0.113.20") // a second leg
	send(outside, 10, "192.0.2.2", "192.0.2.80")       // an address that moves to another host
	send(own, 10, "192.0.2.2", "203.0.113.21")         // a proxy with its client's address
	must(t, router.DelAddr("client", shared))
	h.await("flows", func() bool {
		for _, f := range h.list() {
			h.flows[f.ID] = f
		}
		return len(h.flows) == want
	})
	for _, f := range h.flows {
		if !f.Translated() {
			t.Fatalf("not as it was meant to be: %s", &f)
		}
	}
	return h
}

func (h *besideHost) nft(rules string) error {
	return h.net.Router.Do(func() error {
		cmd := exec.CommandContext(h.t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func (h *besideHost) list() []conntrack.Flow {
	h.t.Helper()
	all, err := h.conn.List(h.t.Context(), conntrack.Filter{})
	must(h.t, err)
	var list []conntrack.Flow
	for _, f := range all {
		if f.Proto == conntrack.UDP && f.Orig.DstPort == 53 {
			list = append(list, f)
		}
	}
	return list
}

// whole fails where a flow is missing.
func (h *besideHost) whole(after string) bool {
	h.t.Helper()
	missing := map[netip.Addr]int{}
	left := map[uint32]bool{}
	for _, f := range h.list() {
		left[f.ID] = true
	}
	for id, f := range h.flows {
		if !left[id] {
			missing[f.Orig.Dst]++
		}
	}
	for dst, n := range missing {
		h.t.Errorf("%s: %d right flows to %s are gone", after, n, dst)
	}
	return len(missing) == 0
}

// Commands name and delete nothing that is right.
func TestSweepBeside(t *testing.T) {
	h := newBesideHost(t)
	for _, command := range []string{"plan", "sweep"} {
		out, code, stderr := runJSON(t, command, "--netns", h.net.Router.Path())
		if code != 0 || out.Summary.Delete != 0 || out.Summary.Deleted != 0 {
			t.Errorf("%s: exit %d, %+v\n%s", command, code, out.Summary, stderr)
		}
		h.whole(command)
	}
}

// Nor do they when they begin just when the generation has moved, beside large
// transactions.
func TestSweepBesideCommits(t *testing.T) {
	h := newBesideHost(t)
	moved, err := ruleset.Open(h.net.Router.Path())
	must(t, err)
	defer moved.Close()
	last, err := moved.Generation()
	must(t, err)
	h.churn.Start()
	var runs, failed, wrong int
	// Long enough for one that comes to its end.
	for start := time.Now(); time.Since(start) < 6*time.Second || failed == runs && time.Since(start) < 30*time.Second; runs++ {
		for {
			gen, err := moved.Generation()
			must(t, err)
			if gen != last {
				last = gen
				break
			}
		}
		command := []string{"plan", "sweep"}[runs%2]
		var out, stderr bytes.Buffer
		if code := Run(t.Context(), []string{command, "--netns", h.net.Router.Path(), "--all", "-o", "json"}, nil, &out, &stderr); code != 0 {
			// Large transactions one behind the other may keep a command from its work.
			if failed++; !strings.Contains(stderr.String(), "chang") {
				t.Fatalf("%s: exit %d: %s", command, code, &stderr)
			}
			continue
		}
		var o output
		must(t, json.Unmarshal(out.Bytes(), &o))
		stale := 0
		for _, r := range o.Flows {
			if r.Verdict == "delete" && r.Flow.Original.Dst == h.vip.Addr() {
				stale++
			}
		}
		if stale > 0 {
			wrong++
			t.Logf("%s: %d of the flows to %s are to be deleted", command, stale, h.vip)
		}
	}
	commits, err := h.churn.Stop()
	must(t, err)
	t.Logf("%d runs, %d gave up; %d commits", runs, failed, commits)
	if failed == runs {
		t.Error("no run came to its end")
	}
	if wrong > 0 {
		t.Errorf("%d of %d runs take right flows for stale", wrong, runs)
	}
}

// An agent that goes by the rules deletes nothing that is right, at its start or
// while rules are replaced.
func TestRunBeside(t *testing.T) {
	h := newBesideHost(t)
	h.write("agent.yaml", fmt.Sprintf(`apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
sources: {static: {files: []}}
settling: {window: 5s, fullPass: 30s}
stateFile: %q
admin: {listen: "127.0.0.1:9633"}
`, h.path("state.json")))
	h.start()
	h.ready()
	status := func() (s agent.Status) {
		_, text := h.get("/statusz")
		must(t, json.Unmarshal([]byte(text), &s))
		return s
	}
	h.await("a full pass", func() bool { s := status(); return !s.LastFull.IsZero() })
	h.whole("at its start")
	h.churn.Start()
	var passes int
	last := status().LastPass
	for i := range 25 {
		// Another commit, beside the large ones, and a pass for it.
		must(t, h.nft(fmt.Sprintf("add rule ip beside pre ip daddr 203.0.113.%d udp dport 53 dnat to 198.51.100.12", 30+i)))
		time.Sleep(200 * time.Millisecond)
		if now := status().LastPass; now.Start != last.Start {
			passes++
			last = now
		}
		if !h.whole("beside commits") {
			break
		}
	}
	commits, err := h.churn.Stop()
	must(t, err)
	t.Logf("%d commits, at least %d passes", commits, passes)
	if passes == 0 {
		t.Error("the agent made no pass")
	}
	if err := h.end(syscall.SIGTERM); err != nil {
		t.Errorf("%v\n%s", err, h.stderr)
	}
	h.whole("at its end")
	if t.Failed() {
		t.Log(h.stderr)
	}
}
