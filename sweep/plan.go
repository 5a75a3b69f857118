package sweep

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// What a dump costs, measured on Linux 6.18 (2 cores, table of a million): the
// kernel walks every entry, and copies those that its filter lets through.
const (
	walkCost  = 0.3e-6 // seconds an entry
	copyCost  = 2.2e-6
	queryCost = 30e-6 // of any dump, however small the table
)

// Query is one dump: a walk of the kernel's table.
type Query struct {
	Filter conntrack.Filter
	Why    string // for people
}

// String describes the query, "ipv4 udp to 203.0.113.10:53: 1 frontend gone".
func (q Query) String() string {
	f := &q.Filter
	var b strings.Builder
	if f.Family == 0 {
		b.WriteString("all families")
	} else {
		b.WriteString(f.Family.String())
	}
	if f.Proto != 0 {
		b.WriteString(" " + conntrack.ProtoName(f.Proto))
	}
	end := func(word string, a netip.Addr, port uint16) {
		switch {
		case a.IsValid() && port != 0:
			fmt.Fprintf(&b, " %s %s", word, netip.AddrPortFrom(a, port))
		case a.IsValid():
			fmt.Fprintf(&b, " %s %s", word, a)
		case port != 0:
			fmt.Fprintf(&b, " %s port %d", word, port)
		}
	}
	end("to", f.OrigDst, f.OrigDstPort)
	end("answered from", f.ReplySrc, f.ReplySrcPort)
	if f.Clear&conntrack.StatusSeenReply != 0 {
		b.WriteString(" unreplied")
	}
	if f.Zone != nil {
		fmt.Fprintf(&b, " zone %d", *f.Zone)
	}
	if q.Why != "" {
		b.WriteString(": " + q.Why)
	}
	return b.String()
}

// Plan is a set of queries that together return every flow that may be stale.
type Plan struct {
	Queries []Query
	// Estimate is what the queries should take, deletes aside.
	Estimate time.Duration
}

// Scoper tells what a judge can ever have deleted. *frontend.Table is one.
type Scoper interface {
	// Scopes returns the families and protocols of which something may be deleted.
	Scopes() []frontend.Scope
	// Most returns the most that may be deleted of a protocol.
	Most(proto uint8) frontend.Sweep
	// Zones returns the conntrack zones that are judged.
	Zones() []uint16
}

// Planner turns what may have become stale into queries.
type Planner struct {
	Table    Scoper
	Features conntrack.Features
	// Flows is the number of flows in the kernel's table, the size of a walk.
	Flows int
	// Families limits the plan; none means both.
	Families []conntrack.Family
}

// Everything returns a plan that judges each flow of the table, whatever its
// protocol, so that it can be listed.
func (p *Planner) Everything() Plan {
	var qs []Query
	if len(p.Families) == 0 {
		qs = []Query{{Why: "the whole table"}}
	}
	for _, fam := range p.Families {
		qs = append(qs, Query{conntrack.Filter{Family: fam}, "the whole family"})
	}
	return p.plan(qs)
}

// Full returns a plan that finds every stale flow: one walk for each family and
// protocol that has frontends.
func (p *Planner) Full() Plan {
	var qs []Query
	for _, s := range p.Table.Scopes() {
		if p.wants(s.Family) {
			qs = append(qs, Query{p.scope(s), "full pass"})
		}
	}
	return p.plan(qs)
}

func (p *Planner) wants(f conntrack.Family) bool {
	return len(p.Families) == 0 || slices.Contains(p.Families, f)
}

// scope is the widest filter that still returns every flow of a family and
// protocol that could be deleted.
func (p *Planner) scope(s frontend.Scope) conntrack.Filter {
	f := conntrack.Filter{Family: s.Family, Proto: s.Proto}
	if p.Table.Most(s.Proto) == frontend.Unreplied {
		f.Clear = conntrack.StatusSeenReply
	}
	if zones := p.Table.Zones(); len(zones) == 1 {
		f.Zone = &zones[0]
	}
	return f
}

// Narrow returns the cheapest plan found for a change: by the backends that
// left and the destinations that changed, coarser where that is less work, or a
// full pass of a protocol.
func (p *Planner) Narrow(ch frontend.Change) Plan {
	var qs []Query
	for _, s := range p.Table.Scopes() {
		if !p.wants(s.Family) {
			continue
		}
		if aims := p.aims(s, ch); len(aims) > 0 {
			qs = append(qs, p.cheapest(s, aims)...)
		}
	}
	return p.plan(qs)
}

// aim is what one suspect wants to see: flows to a destination, or flows from a
// backend. A zero part is open.
type aim struct {
	dst, src         netip.Addr
	dstPort, srcPort uint16
}

func (p *Planner) aims(s frontend.Scope, ch frontend.Change) map[aim]int {
	aims := map[aim]int{}
	for _, a := range ch.Hosts {
		if conntrack.FamilyOf(a) == s.Family {
			aims[aim{dst: a}]++
		}
	}
	for _, r := range ch.Ranges {
		if conntrack.FamilyOf(r.Addr()) == s.Family {
			aims[aim{}]++
		}
	}
	for _, x := range ch.Suspects {
		if x.Key.Scope() != s {
			continue
		}
		if x.Cause == frontend.CauseBackendLost {
			// Whatever frontend a flow came in by, it is answered from the backend
			// that left: one walk for all of them.
			for _, b := range x.Lost {
				port := b.Port()
				if port == 0 && x.Key.Ports.Single() {
					port = x.Key.Ports.First
				}
				aims[aim{src: b.Addr(), srcPort: port}]++
			}
			continue
		}
		var a aim
		if !x.Key.Addr.IsUnspecified() {
			a.dst = x.Key.Addr
		}
		if x.Key.Ports.Single() {
			a.dstPort = x.Key.Ports.First
		}
		aims[a]++
	}
	return aims
}

// cheapest widens the aims step by step, each step merging more of them into
// one walk, and takes the step that costs least.
func (p *Planner) cheapest(s frontend.Scope, aims map[aim]int) []Query {
	whole := []Query{{p.scope(s), fmt.Sprintf("full pass for %s", count(len(aims), "change"))}}
	best, cost := whole, p.cost(whole)
	widen := []func(aim) aim{
		func(a aim) aim { return a },
		func(a aim) aim { a.dstPort, a.srcPort = 0, 0; return a },
		func(a aim) aim { a.dst, a.src = netip.Addr{}, netip.Addr{}; return a },
	}
	for _, w := range widen {
		merged := map[aim]int{}
		for a, n := range aims {
			merged[w(a)] += n
		}
		if _, open := merged[aim{}]; open {
			continue // as wide as the full pass
		}
		var qs []Query
		for a, n := range merged {
			f := p.scope(s)
			f.OrigDst, f.OrigDstPort, f.ReplySrc, f.ReplySrcPort = a.dst, a.dstPort, a.src, a.srcPort
			why := "suspect frontend"
			if a.src.IsValid() || a.srcPort != 0 {
				why = "lost backend"
			}
			qs = append(qs, Query{f, count(n, why)})
		}
		if c := p.cost(qs); c < cost {
			best, cost = qs, c
		}
	}
	slices.SortFunc(best, func(a, b Query) int { return cmp.Compare(a.String(), b.String()) })
	return best
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// cost estimates what queries take: each walks the whole table, and copies what
// the kernel cannot tell apart. How many flows that is, nobody knows before;
// the shares are those of a busy node, half of whose flows are UDP.
func (p *Planner) cost(qs []Query) time.Duration {
	n := float64(p.Flows)
	var sum float64
	for _, q := range qs {
		copied := n
		f := q.Filter
		for _, part := range []struct {
			asked  bool
			filter conntrack.Filter
			share  float64
		}{
			{f.Proto != 0, conntrack.Filter{Family: f.Family, Proto: f.Proto}, 2},
			{f.Clear != 0, conntrack.Filter{Family: f.Family, Clear: f.Clear}, 10},
			{
				f.OrigDstPort|f.ReplySrcPort != 0,
				conntrack.Filter{Family: f.Family, Proto: f.Proto, OrigDstPort: 1},
				5,
			},
			{
				f.OrigDst.IsValid() || f.ReplySrc.IsValid(),
				conntrack.Filter{Family: f.Family, OrigDst: cmp.Or(f.OrigDst, f.ReplySrc)},
				100,
			},
		} {
			if part.asked && p.Features.Narrow(&part.filter) {
				copied /= part.share
			}
		}
		sum += queryCost + n*walkCost + copied*copyCost
	}
	return time.Duration(sum * float64(time.Second))
}

func (p *Planner) plan(qs []Query) Plan { return Plan{qs, p.cost(qs)} }
