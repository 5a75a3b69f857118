//go:build linux

package ruleset

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
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
