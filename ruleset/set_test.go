//go:build linux

package ruleset

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
)

// A set that is too large is found to be so once, and not read to its end.
func TestSetTooLarge(t *testing.T) {
	s := newScene(t)
	var elements strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&elements, "10.64.%d.%d,", i>>8, i&0xff)
	}
	s.run(t, `table ip t {
	set blocked { type ipv4_addr; elements = { `+elements.String()+` }
	}
	set few { type ipv4_addr; elements = { 10.1.0.3 }
	}
	chain p { type nat hook prerouting priority -100
		udp dport 50 ip saddr @few dnat to 198.51.100.1
		udp dport 53 ip saddr != @blocked dnat to 198.51.100.1
	}
}
`, "nft", "-f", "-")
	small := usualLimits
	small.elements = 1000
	load := func(l limits) *Ruleset {
		s.rules.limits = l
		rs, err := s.rules.Load(t.Context())
		must(t, err)
		return rs
	}
	set := func(rs *Ruleset, name string) *set { return rs.model.tables[tableKey{IPv4, "t"}].sets[name] }
	packet := func(port uint16) Packet {
		return Packet{conntrack.UDP, netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("203.0.113.1"), 40000, port}
	}
	inode := func() uint64 {
		var st unix.Stat_t
		must(t, unix.Fstat(s.rules.fd, &st))
		return st.Ino
	}
	is := func(rs *Ruleset, why error, requests uint32) {
		t.Helper()
		before := s.rules.seq
		for range 20 {
			if o := rs.Outcome(packet(53), s.host); !o.Any || o.Why != why.Error() {
				t.Fatal(o)
			}
		}
		if n := s.rules.seq - before; n != requests {
			t.Errorf("%d requests for 20 packets, want %d", n, requests)
		}
		if o := rs.Outcome(packet(50), s.host); o.String() != "untranslated" {
			t.Errorf("a set that is not: %s", o)
		}
	}

	rs := load(small)
	if set(rs, "blocked").count != 0 { // this kernel tells how many there are
		is(rs, errHuge, 0)
	}
	// Others tell when they are read: two requests, for them and for the generation.
	for _, socket := range []string{"another", "the same"} {
		rs = load(small)
		s.rules.large.until = nil
		set(rs, "blocked").count = 0
		was, name := inode(), s.rules.namespace
		if socket == "the same" {
			s.rules.namespace = "/nonexistent" // no other is to be had
		}
		is(rs, errHuge, 2)
		s.rules.namespace = name
		if other := inode() != was; other != (socket == "another") {
			t.Errorf("the dump was left on another socket: %t, want %s", other, socket)
		}
		if _, err := s.rules.Load(t.Context()); err != nil {
			t.Errorf("after that, nothing can be read: %v", err)
		}
	}
	// The next generation need not look at once.
	rs = load(small)
	set(rs, "blocked").count = 0
	is(rs, errHuge, 0)
	for o := range s.rules.large.until {
		s.rules.large.until[o] = time.Now().Add(-time.Second)
	}
	rs = load(small)
	set(rs, "blocked").count = 0
	is(rs, errHuge, 2)
	s.rules.large.until = nil
	if o := load(usualLimits).Outcome(packet(53), s.host); o.String() != "198.51.100.1:53" {
		t.Errorf("with more room: %s", o)
	}

	// All sets together have a limit, too.
	few := usualLimits
	few.total = 1000
	rs = load(few)
	is(rs, errMany, 2)
	if held := rs.model.held; held == 0 || held > 1000 {
		t.Errorf("%d bytes are held", held)
	}
}

func TestOtherNamespace(t *testing.T) {
	s, other := newScene(t), newScene(t)
	if !sameNamespace(s.rules.fd, s.rules.fd) || sameNamespace(s.rules.fd, other.rules.fd) {
		t.Error("sockets of two namespaces are taken for those of one")
	}
	s.rules.namespace = other.router.Path() // the name was given to another
	gen, err := s.rules.Generation()
	must(t, err)
	if s.rules.renew() {
		t.Error("the other namespace's rules would be read")
	}
	if again, err := s.rules.Generation(); again != gen || err != nil {
		t.Errorf("generation %d, %d before, %v", again, gen, err)
	}
}

// A set that packets add to can be full, and the rule then does not match: what it
// translates may also pass.
func TestFullSet(t *testing.T) {
	s := newScene(t)
	s.run(t, `table inet track { chain c { type filter hook input priority 0; ct state new
	}
}
table ip t {
	set seen { type ipv4_addr; flags dynamic; size 1
	}
	chain p { type nat hook prerouting priority -100
		add @seen { ip saddr } dnat to 198.51.100.1
	}
}
`, "nft", "-f", "-")
	rs, err := s.rules.Load(t.Context())
	must(t, err)
	to := netip.MustParseAddrPort("203.0.113.1:53")
	translated := map[bool]int{}
	for i := range s.sockets {
		x := &s.sockets[i]
		if x.own || x.from.Addr().Is6() || x.from.Port() != 40000 {
			continue
		}
		o := rs.Outcome(Packet{conntrack.UDP, x.from.Addr(), to.Addr(), x.from.Port(), to.Port()}, s.host)
		if o.String() != "198.51.100.1:53, or untranslated" {
			t.Error(o)
		}
		x.send(to)
	}
	for f, err := range s.flows.Dump(t.Context(), conntrack.Filter{Proto: conntrack.UDP}) {
		must(t, err)
		if f.Orig.Dst == to.Addr() {
			translated[f.Translated()]++
		}
	}
	if translated[true] != 1 || translated[false] != 2 {
		t.Errorf("of three sources %v", translated)
	}
}
