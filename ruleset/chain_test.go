//go:build linux

package ruleset

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Of a chain that is too long nothing is known; the others are judged as ever.
func TestChainTooLong(t *testing.T) {
	s := newScene(t)
	var long strings.Builder
	for i := range 300 {
		fmt.Fprintf(&long, "add rule ip t long udp dport %d dnat to 198.51.100.7\n", 1000+i)
	}
	s.run(t, `table ip t {
	chain short { dnat to 198.51.100.1
	}
	chain long {
	}
	chain p { type nat hook prerouting priority -100
		udp dport 50 jump short
		udp dport 51 jump long
		udp dport 52 jump short
	}
}
`+long.String(), "nft", "-f", "-")
	s.rules.limits.rules = 100
	j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
	must(t, err)
	defer j.Close()
	j.conn.limits.rules = 100
	var rs *Ruleset
	is := func(port uint16, want string) {
		t.Helper()
		p := Packet{conntrack.UDP, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("203.0.113.1"), 40000, port}
		if o := rs.Outcome(p, s.host); o.String() != want {
			t.Errorf("port %d: %s, want %s", port, o, want)
		}
	}
	var requests [2]uint32
	for i := range requests {
		before := s.rules.seq
		rs, err = s.rules.Load(t.Context())
		must(t, err)
		requests[i] = s.rules.seq - before
		is(50, "198.51.100.1:50")
		is(51, "anything: "+whyLong)
		is(52, "198.51.100.1:52")
		if n := rs.NotUnderstood(); len(n) != 1 || n[0].String() != "ip t long ("+whyLong+")" {
			t.Errorf("not understood: %v", n)
		}
		if known := len(s.rules.large.until) == 1; !known || rs.model.raw > 3000 {
			t.Errorf("load %d: noted %v, %d bytes are held", i+1, s.rules.large.until, rs.model.raw)
		}
	}
	if requests[1] != requests[0]-1 {
		t.Errorf("%v requests for two loads: the chain was asked for again", requests)
	}
	s.rules.limits.rules = usualLimits.rules
	rs, err = s.rules.Load(t.Context())
	must(t, err)
	is(51, "untranslated")

	// What is judged is compared; what is not is stale by no rule.
	s.run(t, "add rule ip t short accept", "nft", "-f", "-")
	reload(t, j)
	s.run(t, "insert rule ip t short ip daddr 203.0.113.9 accept", "nft", "-f", "-")
	c := reload(t, j)
	if c.All || !c.Contains(conntrack.UDP, netip.MustParseAddrPort("203.0.113.9:50")) ||
		c.Contains(conntrack.UDP, netip.MustParseAddrPort("203.0.113.9:51")) {
		t.Errorf("suspect: %+v", c)
	}
	s.run(t, "flush chain ip t long", "nft", "-f", "-")
	if c := reload(t, j); !c.All || c.Why != whyLong {
		t.Errorf("what was not known before is not suspect: %+v", c)
	}
}

// Rules are asked for as it takes the kernel less.
func TestByChain(t *testing.T) {
	for _, tt := range []struct {
		name  string
		rules []int // of each chain
		times int   // so many chains
		want  bool
	}{
		{"few rules", []int{3, 10, 200}, 1, false},
		{"many small chains", []int{4}, 1000, false},
		{"very many", []int{4}, 12_500, true},
		{"larger chains", []int{25}, 2000, true},
		{"one that may be too long", []int{3, usualLimits.rules + 1}, 1, true},
		{"nothing", nil, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := &table{chains: map[string]*chain{}}
			for i := range tt.times {
				for _, n := range tt.rules {
					tab.chains[fmt.Sprint(i, n)] = &chain{use: uint32(n)}
				}
			}
			if got := tab.byChain(usualLimits); got != tt.want {
				t.Error(got)
			}
		})
	}
}

// Packets that take long have a share of the time, and others are followed as ever.
func TestEffort(t *testing.T) {
	r := newRig(t, IPv4)
	r.base("pre", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	numgen := expr("numgen", num(uapi.NftaNgDreg, 1), num(uapi.NftaNgModulus, 4000))
	r.rule("pre", payload(th, 2, 2), eq(0, 50), dnat("198.51.100.1:0"))
	r.rule("pre", payload(nh, 12, 4), cmpTo(uapi.NftCmpNeq, 9, 9, 9, 9), payload(th, 2, 2), cmpTo(uapi.NftCmpGt, 1, 0),
		numgen, numgen, numgen, eq(1, 2, 3, 4), accept())
	rs := r.ruleset()
	now := time.Now()
	const left = 4 * maxSteps
	rs.effort = &effort{left: left, now: func() time.Time { return now }}
	j := &Judge{host: &knowing{}, rules: rs, seen: map[memoKey]struct{}{}}
	steps := 0
	outcome := func(port uint16, source byte) *Outcome {
		f := flowOf("")
		f.Orig.DstPort, f.Orig.Src = port, netip.AddrFrom4([4]byte{198, 18, 0, source})
		rs.eval.limit, rs.eval.steps = 0, 0
		o := j.outcome(f, viewLikely)
		steps += rs.eval.limit - rs.eval.steps
		return o
	}
	is := func(port uint16, source byte, want string) {
		t.Helper()
		if o := outcome(port, source); o.String() != want {
			t.Errorf("port %d: %s, want %s", port, o, want)
		}
	}
	const work, busy, cheap = "anything: " + whyWork, "anything: " + whyBusy, "198.51.100.1:50"
	is(1000, 1, work)
	before := steps
	for source := range byte(200) { // the rule reads the source
		is(1000, source, work)
	}
	if steps != before {
		t.Errorf("%d steps for more packets to a destination that took too many", steps-before)
	}
	slow := 0
	for port := range uint16(100) {
		o := outcome(2000+port, 1)
		if !o.Any {
			t.Fatalf("port %d: %s", port, o)
		}
		if o.Why == whyWork {
			slow++
		}
		is(50, byte(port), cheap)
	}
	if most := left + maxSteps + 200*(freeSteps+2); steps > most {
		t.Errorf("%d steps, want at most %d", steps, most)
	}
	if slow < 2 || slow > 5 {
		t.Errorf("%d packets were followed as far as one may be", slow)
	}
	is(2099, 2, busy)
	now = now.Add(time.Second)
	is(2099, 2, busy) // that destination has to wait
	is(3000, 1, work)
	k := memoKey{dst: dns().Dst.As16(), port: 2099, proto: dns().Proto, v4: true, origin: Foreign}
	entry := j.memo.byDst[k]
	if entry.until.Before(time.Now()) || entry.until.After(time.Now().Add(busyFor)) {
		t.Errorf("it waits until %s", entry.until)
	}
	entry.until = time.Now().Add(-1)
	j.memo.byDst[k] = entry
	is(2099, 3, work)
	now = now.Add(time.Hour)
	rs.effort.refill()
	if rs.effort.left != mostEffort {
		t.Errorf("%d steps are left", rs.effort.left)
	}
	// A person may ask at any time.
	rs.effort.left = -maxSteps
	p := dns()
	p.DstPort = 4000
	if o, _ := rs.Explain(p, &knowing{}); o.Why != whyWork {
		t.Error(o)
	}
}
