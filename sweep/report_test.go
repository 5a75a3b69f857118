package sweep

import (
	"context"
	"errors"
	"iter"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// fakeConn is a table whose deletes come out as told.
type fakeConn struct {
	Conn
	flows   []conntrack.Flow
	outcome func(f *conntrack.Flow, r *conntrack.DeleteResult)
	calls   int
	fails   int // the call that fails, from 1
}

func (c *fakeConn) Dump(context.Context, conntrack.Filter) iter.Seq2[*conntrack.Flow, error] {
	return func(yield func(*conntrack.Flow, error) bool) {
		for i := range c.flows {
			if !yield(&c.flows[i], nil) {
				return
			}
		}
	}
}

func (c *fakeConn) Stats() conntrack.DumpStats { return conntrack.DumpStats{Returned: len(c.flows)} }

var errDelete = errors.New("no answer")

func (c *fakeConn) Delete(_ context.Context, flows ...conntrack.Flow) (r conntrack.DeleteResult, err error) {
	time.Sleep(time.Millisecond)
	if c.calls++; c.calls == c.fails {
		return r, errDelete
	}
	for i := range flows {
		c.outcome(&flows[i], &r)
	}
	return r, nil
}

// judge tells the class by the flow's mark.
type judge []Class

func (j judge) Judge(f *conntrack.Flow) frontend.Verdict {
	c := j[f.Mark]
	return frontend.Verdict{Action: c.Reason.Action(), Reason: c.Reason, Kind: c.Kind}
}

// How the deletes of each class came out is known exactly, though the classes
// are mixed in one batch.
func TestReportClasses(t *testing.T) {
	classes := judge{
		{conntrack.IPv4, frontend.BackendGone, frontend.ClusterIP},
		{conntrack.IPv4, frontend.Serving, frontend.ClusterIP},
		{conntrack.IPv4, frontend.BackendGone, frontend.NodePort},
		{conntrack.IPv6, frontend.FrontendGone, frontend.NodePort},
	}
	const n = 3 * pending
	var flows []conntrack.Flow
	for i := range n {
		mark := i % len(classes)
		flows = append(flows, conntrack.Flow{Family: classes[mark].Family, ID: uint32(i + 1), Mark: uint32(mark)})
	}
	outcome := func(f *conntrack.Flow, r *conntrack.DeleteResult) {
		switch {
		case f.Mark == 0 && f.ID%8 == 1:
			r.Gone++
		case f.Mark == 2:
			r.Busy++
		default:
			r.Deleted++
		}
	}
	all := map[Class]conntrack.DeleteResult{
		classes[0]: {Deleted: n / 8, Gone: n / 8},
		classes[2]: {Busy: n / 4},
		classes[3]: {Deleted: n / 4},
	}
	for _, tt := range []struct {
		name   string
		dryRun bool
		fails  int
		want   map[Class]conntrack.DeleteResult
	}{
		{"all are asked for", false, 0, all},
		{"a dry run asks for none", true, 0, nil},
		// What the kernel did not confirm is in no class, and the next class is not
		// asked for any more.
		{"cut short", false, 2, map[Class]conntrack.DeleteResult{
			classes[0]: {Deleted: 43, Gone: 43}, classes[2]: {},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &fakeConn{flows: slices.Clone(flows), outcome: outcome, fails: tt.fails}
			s := Sweeper{Conn: c, Judge: classes, DryRun: tt.dryRun}
			r, err := s.Run(t.Context(), Plan{Queries: []Query{{}}})
			if cut := tt.fails > 0; errors.Is(err, errDelete) != cut {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, r.Classes); diff != "" {
				t.Errorf("classes (-want +got):\n%s", diff)
			}
			var sum conntrack.DeleteResult
			for _, d := range r.Classes {
				sum.Add(d)
			}
			if diff := cmp.Diff(sum, r.DeleteResult); diff != "" {
				t.Errorf("the classes do not add up (-sum +total):\n%s", diff)
			}
			q := r.Queries[0]
			if least := time.Duration(c.calls) * time.Millisecond; q.Deleting < least || q.Deleting > q.Duration {
				t.Errorf("deleting took %s of %s, want at least %s", q.Deleting, q.Duration, least)
			}
		})
	}
}

// The world moves on while deletes wait for their turn.
func TestPace(t *testing.T) {
	world := judge{{conntrack.IPv4, frontend.BackendGone, frontend.ClusterIP}}
	c := &fakeConn{
		flows:   make([]conntrack.Flow, pending+10),
		outcome: func(_ *conntrack.Flow, r *conntrack.DeleteResult) { r.Deleted++ },
	}
	var paced []int
	s := Sweeper{Conn: c, Judge: world, Pace: func(_ context.Context, flows int) error {
		if paced = append(paced, flows); len(paced) == 2 {
			world[0].Reason = frontend.Serving
		}
		return nil
	}}
	r, err := s.Run(t.Context(), Plan{Queries: []Query{{}}})
	if err != nil || r.Deleted != pending {
		t.Errorf("deleted %d, want %d; %v", r.Deleted, pending, err)
	}
	if want := []int{pending, 10}; !slices.Equal(paced, want) {
		t.Errorf("paced for %v flows, want %v", paced, want)
	}
	c.calls = 0
	world[0].Reason = frontend.BackendGone
	s.Pace = func(context.Context, int) error { return context.Canceled }
	if _, err := s.Run(t.Context(), Plan{Queries: []Query{{}}}); !errors.Is(err, context.Canceled) || c.calls != 0 {
		t.Errorf("%v; %d deletes without leave", err, c.calls)
	}
}

// moody is a judge whose world moves on before it confirms anything.
type moody struct {
	judge
	confirm func() error
}

func (m *moody) Confirm() error { return m.confirm() }

var errMoved = errors.New("the world has moved on")

// What was judged is deleted only by a world that still holds at that moment.
func TestConfirm(t *testing.T) {
	const right, wrong = frontend.Serving, frontend.BackendGone
	for _, tt := range []struct {
		name                 string
		worlds               []frontend.Reason // after each time that it is asked
		errs                 []error           // what it says
		deleted, unconfirmed int
	}{
		{"confirmed", []frontend.Reason{wrong}, []error{nil}, 10, 0},
		{"the flows are right by now", []frontend.Reason{right}, []error{errMoved}, 0, 0},
		{"they are stale in the new world, too", []frontend.Reason{wrong, wrong}, []error{errMoved, nil}, 10, 0},
		{"it moves on and on", []frontend.Reason{wrong, wrong, wrong}, []error{errMoved, errMoved, errMoved}, 0, 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			world := &moody{judge: judge{{conntrack.IPv4, wrong, frontend.ClusterIP}}}
			asked := 0
			c := &fakeConn{flows: make([]conntrack.Flow, 10)}
			world.confirm = func() error {
				if asked++; c.calls > 0 || asked > len(tt.errs) {
					t.Fatalf("asked %d times, after %d deletes", asked, c.calls)
				}
				world.judge[0].Reason = tt.worlds[asked-1]
				return tt.errs[asked-1]
			}
			c.outcome = func(_ *conntrack.Flow, r *conntrack.DeleteResult) { r.Deleted++ }
			s := Sweeper{Conn: c, Judge: world}
			r, err := s.Run(t.Context(), Plan{Queries: []Query{{}}})
			if err != nil || r.Deleted != tt.deleted || r.Unconfirmed != tt.unconfirmed || asked != len(tt.errs) {
				t.Errorf("asked %d times, %+v, %v", asked, r, err)
			}
			if r.Judged != 10 || r.Verdicts[wrong] != 10 {
				t.Errorf("%d of %d were found stale", r.Verdicts[wrong], r.Judged)
			}
			asked, c.calls, world.judge[0].Reason, s.DryRun = 0, 0, wrong, true
			if _, err := s.Run(t.Context(), Plan{Queries: []Query{{}}}); err != nil || asked != 0 {
				t.Errorf("a dry run asked %d times, %v", asked, err)
			}
		})
	}
}
