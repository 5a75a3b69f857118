//go:build linux

package sweep

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func kernelTable(t testing.TB) *conntrack.Conn {
	t.Helper()
	ns := nstest.New(t)
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// flow is number n of the flows from dst to src.
func flow(proto uint8, dst, src string, n int) conntrack.Flow {
	d, s := netip.MustParseAddrPort(dst), netip.MustParseAddrPort(src)
	client := netip.AddrFrom4([4]byte{192, 0, 2, byte(50 + n>>15)})
	if d.Addr().Is6() {
		client = netip.MustParseAddr("2001:db8:9::5")
	}
	port := uint16(1000 + n&0x7fff)
	f := conntrack.Flow{
		Family: conntrack.FamilyOf(d.Addr()), Proto: proto, Timeout: 600, Status: conntrack.StatusConfirmed,
		Orig:  conntrack.Tuple{Src: client, Dst: d.Addr(), SrcPort: port, DstPort: d.Port()},
		Reply: conntrack.Tuple{Src: s.Addr(), Dst: client, SrcPort: s.Port(), DstPort: port},
	}
	if proto == conntrack.TCP || proto == conntrack.SCTP {
		f.State = 1
	}
	return f
}

func create(t testing.TB, c *conntrack.Conn, flows ...conntrack.Flow) {
	t.Helper()
	for _, f := range flows {
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatalf("%v: %s", err, &f)
		}
	}
}

func clean(t testing.TB, c *conntrack.Conn, tab *frontend.Table) Report {
	t.Helper()
	var sum Report
	for _, fam := range []conntrack.Family{conntrack.IPv4, conntrack.IPv6} {
		r, err := CleanStaleEntries(t.Context(), c, fam, tab)
		if err != nil {
			t.Fatal(err)
		}
		sum.Judged += r.Judged
		sum.DeleteResult.Add(r.DeleteResult)
		for i, n := range r.Verdicts {
			sum.Verdicts[i] += n
		}
	}
	return sum
}

const (
	vip   = "203.0.113.10:53"
	alive = "198.51.100.11:5353"
	dead  = "198.51.100.19:5353"
)

// 100 stale flows among 10 000 that are right or nobody's: exactly the 100 go.
func TestCollateral(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	var others []conntrack.Flow
	for i := range 2000 {
		unanswered := flow(conntrack.TCP, "203.0.113.11:443", "198.51.100.13:443", i)
		established := flow(conntrack.TCP, "203.0.113.11:443", dead, 5000+i)
		established.State, established.Status = 3, established.Status|conntrack.StatusSeenReply|conntrack.StatusAssured
		others = append(others, unanswered, established,
			flow(conntrack.UDP, vip, alive, i),
			flow(conntrack.UDP, "[2001:db8:1::10]:53", "[2001:db8:2::11]:53", i))
		switch i % 4 {
		case 0: // an outgoing flow to the port of a service
			others = append(others, flow(conntrack.UDP, "203.0.113.200:53", "203.0.113.200:53", i))
		case 1: // to the same backend address by another way
			others = append(others, flow(conntrack.UDP, "203.0.113.77:53", dead, i))
		case 2:
			f := flow(conntrack.UDP, vip, dead, 10000+i)
			f.Zone = 5
			others = append(others, f)
		case 3:
			f := flow(conntrack.SCTP, "203.0.113.10:53", dead, i)
			others = append(others, f)
		}
	}
	create(t, c, others...)
	for i := range 50 {
		create(t, c, flow(conntrack.UDP, vip, dead, 20000+i),
			flow(conntrack.UDP, "[2001:db8:1::10]:53", "[2001:db8:2::19]:53", 20000+i))
	}
	r := clean(t, c, tab)
	if r.Deleted != 100 || r.Gone+r.Busy+r.Failed != 0 || r.Verdicts[frontend.BackendGone] != 100 {
		t.Errorf("%+v", r)
	}
	left, err := c.List(t.Context(), conntrack.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	type key struct {
		conntrack.Tuple
		proto uint8
		zone  uint16
	}
	want := map[key]bool{}
	for _, f := range others {
		want[key{f.Orig, f.Proto, f.Zone}] = true
	}
	for _, f := range left {
		k := key{f.Orig, f.Proto, f.Zone}
		if !want[k] {
			t.Errorf("should be gone: %s", &f)
		}
		delete(want, k)
	}
	if len(want) > 0 {
		t.Errorf("%d flows are gone that are none of ours", len(want))
	}
	if again := clean(t, c, tab); again.Deleted != 0 {
		t.Errorf("a second sweep deleted %d", again.Deleted)
	}
}

// racing judges like a table, and lets something happen at the first stale flow.
type racing struct {
	*frontend.Table
	meanwhile func(f *conntrack.Flow)
	met       map[conntrack.Tuple]bool
}

func (r *racing) Judge(f *conntrack.Flow) frontend.Verdict {
	v := r.Table.Judge(f)
	if v.Action == frontend.Delete && !r.met[f.Orig] {
		r.met[f.Orig] = true
		r.meanwhile(f)
	}
	return v
}

// Flows that are deleted by somebody else and come back with a right
// translation between the dump and the delete survive.
func TestRecreationRace(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	const n = 1000
	for i := range n {
		create(t, c, flow(conntrack.UDP, vip, dead, i))
	}
	other := c // the Conn may be used inside a dump
	judge := &racing{Table: tab, met: map[conntrack.Tuple]bool{}}
	judge.meanwhile = func(f *conntrack.Flow) {
		if f.Orig.SrcPort%2 == 0 {
			return
		}
		if res, err := other.Delete(t.Context(), *f); err != nil || res.Deleted != 1 {
			t.Fatalf("%+v, %v", res, err)
		}
		right := *f
		right.Reply.Src = netip.MustParseAddrPort(alive).Addr()
		create(t, other, right)
	}
	p, err := NewPlanner(t.Context(), c, tab)
	if err != nil {
		t.Fatal(err)
	}
	s := Sweeper{Conn: c, Judge: judge}
	r, err := s.Run(t.Context(), p.Full())
	if err != nil {
		t.Fatal(err)
	}
	flows, err := c.List(t.Context(), conntrack.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range flows {
		if v := tab.Judge(&f); v.Reason != frontend.Serving {
			t.Errorf("%s: %v", &f, v)
		}
	}
	if len(flows) != n/2 || r.Deleted != n/2 || r.Gone != n/2 {
		t.Errorf("%d flows left of %d, %+v", len(flows), n, r)
	}
}

// The desired state moves on during the walk: what it makes right is kept.
func TestStateMovesOn(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	for i := range 100 {
		create(t, c, flow(conntrack.UDP, vip, dead, i))
	}
	judge := &racing{Table: tab, met: map[conntrack.Tuple]bool{}}
	judge.meanwhile = func(*conntrack.Flow) {
		if len(judge.met) == 100 {
			tab.Set(service("dns", vip, conntrack.UDP, dead))
		}
	}
	p, err := NewPlanner(t.Context(), c, tab)
	if err != nil {
		t.Fatal(err)
	}
	s := Sweeper{Conn: c, Judge: judge}
	if r, err := s.Run(t.Context(), p.Full()); err != nil || r.Deleted != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if n, err := c.Count(t.Context()); err != nil || n != 100 {
		t.Errorf("%d flows, %v", n, err)
	}
}

func TestDryRunAndOverlap(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	for i := range 10 {
		create(t, c, flow(conntrack.UDP, vip, dead, i))
	}
	listed := 0
	s := Sweeper{Conn: c, Judge: tab, DryRun: true, OnFlow: func(*conntrack.Flow, frontend.Verdict) { listed++ }}
	d := netip.MustParseAddrPort(vip)
	r, err := s.Run(t.Context(), Plan{Queries: []Query{
		{Filter: conntrack.Filter{Family: conntrack.IPv4, Proto: conntrack.UDP, OrigDst: d.Addr()}},
		{Filter: conntrack.Filter{Family: conntrack.IPv4, Proto: conntrack.UDP, OrigDstPort: d.Port()}},
		{Filter: conntrack.Filter{}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if r.Count(frontend.Delete) != 10 || r.Deleted != 0 || listed != 10 || r.Judged != 10 {
		t.Errorf("%d listed, %+v", listed, r)
	}
	if n, _ := c.Count(t.Context()); n != 10 {
		t.Errorf("%d flows left", n)
	}
}

func TestCancelKeepsCounts(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	const n = 3000
	for i := range n {
		create(t, c, flow(conntrack.UDP, vip, dead, i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := 0
	s := Sweeper{Conn: c, Judge: tab, OnFlow: func(*conntrack.Flow, frontend.Verdict) {
		if seen++; seen == n/2 {
			cancel()
		}
	}}
	p, err := NewPlanner(t.Context(), c, tab)
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Run(ctx, p.Full())
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	left, err := c.Count(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if r.Deleted == 0 || r.Deleted >= n || left != n-r.Deleted || r.Judged < seen {
		t.Errorf("deleted %d, judged %d, left %d of %d", r.Deleted, r.Judged, left, n)
	}
}

// One change, asked for narrowly, deletes what a full pass would.
func TestNarrowInTheKernel(t *testing.T) {
	c := kernelTable(t)
	tab := newTable()
	for i := range 500 {
		create(t, c, flow(conntrack.UDP, vip, "198.51.100.11:5353", i), flow(conntrack.UDP, vip, "198.51.100.12:5353", 1000+i),
			flow(conntrack.UDP, "192.0.2.1:30053", "198.51.100.12:5353", 2000+i),
			flow(conntrack.UDP, "[2001:db8:1::10]:53", "[2001:db8:2::12]:53", i))
	}
	for _, step := range []struct {
		change   func() frontend.Change
		deleted  int
		returned int // at most
	}{
		{func() frontend.Change { return tab.Set(service("dns", vip, conntrack.UDP, "198.51.100.11:5353")) }, 1000, 1000},
		{func() frontend.Change {
			return tab.Set(service("six", "[2001:db8:1::10]:53", conntrack.UDP, "[2001:db8:2::11]:53"))
		}, 500, 500},
		{func() frontend.Change { return tab.Set("dns", nil) }, 500, 500},
	} {
		p, err := NewPlanner(t.Context(), c, tab)
		if err != nil {
			t.Fatal(err)
		}
		plan := p.Narrow(step.change())
		r, err := (&Sweeper{Conn: c, Judge: tab}).Run(t.Context(), plan)
		if err != nil || r.Deleted != step.deleted || r.Returned > step.returned {
			t.Errorf("%q: deleted %d, want %d; returned %d, %v", texts(plan), r.Deleted, step.deleted, r.Returned, err)
		}
	}
	if n, _ := c.Count(t.Context()); n != 0 {
		t.Errorf("%d flows left", n)
	}
}

// An expected flow was translated by a helper, not by a service.
func TestExpectedFlowsStay(t *testing.T) {
	c := kernelTable(t)
	master := flow(conntrack.UDP, "203.0.113.99:5060", "203.0.113.99:5060", 1)
	media := flow(conntrack.UDP, vip, dead, 2)
	create(t, c, master)
	if err := c.CreateExpected(t.Context(), media, master); err != nil {
		t.Fatal(err)
	}
	r := clean(t, c, newTable())
	if r.Deleted != 0 || r.Verdicts[frontend.ExpectedFlow] != 1 {
		t.Errorf("%+v", r)
	}
}

func BenchmarkSweep(b *testing.B) {
	for _, n := range []int{1000, 20_000} {
		b.Run(fmt.Sprintf("nothing stale/flows=%d", n), func(b *testing.B) {
			c := kernelTable(b)
			tab := newTable()
			for i := range n {
				create(b, c, flow(conntrack.UDP, vip, alive, i))
			}
			b.ReportAllocs()
			start := time.Now()
			runs := 0
			for b.Loop() {
				if _, err := CleanStaleEntries(b.Context(), c, conntrack.IPv4, tab); err != nil {
					b.Fatal(err)
				}
				runs++
			}
			b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(runs)/float64(n), "ns/flow")
		})
	}
}

// An answer that comes after the delete makes a flow of the other direction, which
// holds the client. It is deleted, too, and the client's next datagram is the first
// of a new flow again; a flow that the client has made anew meanwhile stays.
func TestLateAnswers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		again func(f conntrack.Flow) conntrack.Flow // what is there after the delete
		late  int
	}{
		{"a late answer", func(f conntrack.Flow) conntrack.Flow {
			f.Orig, f.Reply = f.Reply, f.Orig
			return f
		}, 1},
		{"made anew, untranslated", func(f conntrack.Flow) conntrack.Flow { return f }, 0},
		{"made anew, translated", func(f conntrack.Flow) conntrack.Flow {
			f.Reply.Src, f.Reply.SrcPort = netip.MustParseAddr("198.51.100.11"), 5353
			return f
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := kernelTable(t)
			tab := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
			tab.Set("s", []frontend.Frontend{{
				Owner: "s", Proto: conntrack.UDP, Addr: netip.MustParseAddr("203.0.113.10"), Ports: frontend.Port(53),
				Valid: frontend.NewBackends(netip.MustParseAddrPort(alive)), Usable: 1,
			}})
			stale := flow(conntrack.UDP, vip, vip, 1) // not translated
			stale.Status |= conntrack.StatusSeenReply
			silent := flow(conntrack.UDP, vip, vip, 2)
			create(t, c, stale, silent)
			p, err := NewPlanner(t.Context(), c, tab, conntrack.IPv4)
			if err != nil {
				t.Fatal(err)
			}
			s := Sweeper{Conn: c, Judge: tab, Late: &LateAnswers{}}
			if r, err := s.Run(t.Context(), p.Full()); err != nil || r.Deleted != 2 || r.Late != 0 {
				t.Fatalf("%v, %+v", err, r)
			}
			made := tt.again(stale)
			late := tt.again(silent) // which nobody had answered: whoever made it meant to
			create(t, c, made, late)
			if n, err := s.Late.Clean(t.Context(), c); err != nil || n != tt.late {
				t.Errorf("%d deleted, %v, want %d", n, err, tt.late)
			}
			for _, x := range []struct {
				f    conntrack.Flow
				want bool
			}{{made, tt.late == 0}, {late, true}} {
				if _, ok, err := c.Get(t.Context(), x.f); ok != x.want || err != nil {
					t.Errorf("%s is there: %t, %v", &x.f, ok, err)
				}
			}
		})
	}
}
