package sweep

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// Judge tells what is to be done with a flow. frontend.Table is one. It must be
// safe to call while the world that it knows changes.
type Judge interface {
	Judge(f *conntrack.Flow) frontend.Verdict
}

// Confirmer is a Judge that can tell whether what it judged by still holds. Right
// before stale flows are deleted it is asked once for all of them: after an error
// they are judged anew, and none is deleted that is not confirmed.
type Confirmer interface {
	Confirm() error
}

// Conn is what a sweep needs of a table; *conntrack.Conn is one.
type Conn interface {
	Dump(ctx context.Context, f conntrack.Filter) iter.Seq2[*conntrack.Flow, error]
	Stats() conntrack.DumpStats
	Delete(ctx context.Context, flows ...conntrack.Flow) (conntrack.DeleteResult, error)
	Probe(ctx context.Context, families ...conntrack.Family) (conntrack.Features, error)
	Count(ctx context.Context) (int, error)
}

// pending is how many stale flows are held before they are deleted: the size of
// conntrack's batches. It is all that a sweep remembers of the table.
const pending = 256

// walks is how often a query is walked at most while the hash table changes its
// size under it.
const walks = 3

// confirms is how often a Confirmer is asked for one batch. What it judges by may
// change without an end.
const confirms = 3

// Sweeper walks the table, judges, and deletes what is stale.
type Sweeper struct {
	Conn  Conn
	Judge Judge
	// DryRun deletes nothing.
	DryRun bool
	// Pace, if set, waits until so many more flows may be deleted. What was found
	// stale is judged again after it, since a wait inside Conn.Delete would leave
	// time for a flow to become right.
	Pace func(ctx context.Context, flows int) error
	// Late, if set, remembers what late answers may make of deleted flows, and
	// deletes that when a run begins and when it ends.
	Late *LateAnswers
	// OnFlow, if set, sees each judged flow, which is borrowed as in Conn.Dump. A
	// walk that has to be repeated shows its flows again.
	OnFlow func(f *conntrack.Flow, v frontend.Verdict)
}

// Report is what a sweep did. Its counts are good also where it was cut short.
type Report struct {
	Queries  []QueryReport
	Returned int // flows that the kernel copied
	Judged   int
	// Verdicts counts the judged flows by reason, each of which belongs to one
	// action.
	Verdicts [frontend.Reasons]int
	conntrack.DeleteResult
	// Classes splits DeleteResult by what the flows have in common.
	Classes map[Class]conntrack.DeleteResult
	// Unconfirmed counts flows that were found stale and left, since what they were
	// judged by changed whenever they were to be deleted. Another pass may find them.
	Unconfirmed int
	Late        int // flows deleted that late answers had made
	Malformed   int // messages of the kernel that held no flow
	Duration    time.Duration
}

// Class is what flows that were to be deleted have in common.
type Class struct {
	Family conntrack.Family
	Reason frontend.Reason // of the judgement right before the delete
	Kind   frontend.Kind
}

// QueryReport is what one query of the plan cost and gave.
type QueryReport struct {
	Query
	Returned, Wanted int
	Walks            int // more than one where the hash table was resized
	Duration         time.Duration
	Deleting         time.Duration // part of Duration: spent on Pace and deletes
}

// delete has flows of one class deleted, and counts.
func (r *Report) delete(ctx context.Context, conn Conn, c Class, flows []conntrack.Flow) error {
	res, err := conn.Delete(ctx, flows...)
	r.DeleteResult.Add(res)
	if r.Classes == nil {
		r.Classes = map[Class]conntrack.DeleteResult{}
	}
	sum := r.Classes[c]
	sum.Add(res)
	r.Classes[c] = sum
	return err
}

// Count returns how many flows were judged to an action.
func (r *Report) Count(a frontend.Action) int {
	n := 0
	for reason, c := range r.Verdicts {
		if frontend.Reason(reason).Action() == a {
			n += c
		}
	}
	return n
}

// Run carries out a plan. It stops at once when ctx ends (at the next message
// of the kernel, see conntrack.Conn.Dump) and returns what it did until then;
// flows already judged stale are not deleted any more. A query that fails does
// not keep the others from being tried, except for want of permission.
func (s *Sweeper) Run(ctx context.Context, p Plan) (Report, error) {
	var r Report
	start := time.Now()
	var errs []error
	var done []Query
	late := func() {
		if s.DryRun || s.Late == nil || ctx.Err() != nil {
			return
		}
		n, err := s.Late.Clean(ctx, s.Conn)
		r.Late += n
		if err != nil {
			errs = append(errs, err)
		}
	}
	late()
	for _, q := range p.Queries {
		if err := s.query(ctx, done, q, &r); err != nil {
			errs = append(errs, err)
		} else {
			done = append(done, q)
		}
		err := errors.Join(errs...)
		if ctx.Err() != nil || errors.Is(err, conntrack.ErrNoCtnetlink) || errors.Is(err, fs.ErrPermission) {
			break
		}
	}
	late()
	r.Duration = time.Since(start)
	return r, errors.Join(errs...)
}

// query walks until the hash table keeps its size through a walk. A flow that
// an earlier query has returned is passed over.
func (s *Sweeper) query(ctx context.Context, earlier []Query, q Query, r *Report) error {
	start := time.Now()
	qr := QueryReport{Query: q}
	var err error
	for qr.Walks < walks {
		qr.Walks++
		w := walk{Sweeper: s, earlier: earlier, report: r}
		err = w.run(ctx, q.Filter)
		st := s.Conn.Stats()
		qr.Returned += st.Returned
		qr.Wanted = st.Wanted
		qr.Deleting += w.deleting
		r.Malformed += st.Malformed
		again := errors.Is(err, conntrack.ErrResized) || errors.Is(err, conntrack.ErrInterrupted)
		if again && qr.Walks < walks {
			// What was deleted stays counted. The rest is judged anew.
			w.keepDeletes()
		}
		r.Judged += w.judged
		for i, n := range w.verdicts {
			r.Verdicts[i] += n
		}
		r.Unconfirmed += w.unconfirmed
		if !again {
			break
		}
	}
	r.Returned += qr.Returned
	qr.Duration = time.Since(start)
	r.Queries = append(r.Queries, qr)
	return err
}

// walk is one dump of one query.
type walk struct {
	*Sweeper
	earlier  []Query
	report   *Report // of the deletes
	stale    []conntrack.Flow
	groups   []group
	judged   int
	verdicts [frontend.Reasons]int
	sent     [frontend.Reasons]int // verdicts of the flows that were to be deleted
	deleting time.Duration
	// unconfirmed is as in Report.
	unconfirmed int
}

// group is flows of one class that are about to be deleted.
type group struct {
	Class
	flows []conntrack.Flow
}

func (w *walk) run(ctx context.Context, f conntrack.Filter) error {
	for fl, err := range w.Conn.Dump(ctx, f) {
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			return errors.Join(err, w.flush(ctx)) // what is known to be stale still goes
		}
		if w.seen(fl) {
			continue
		}
		v := w.Judge.Judge(fl)
		w.judged++
		w.verdicts[v.Reason]++
		if w.OnFlow != nil {
			w.OnFlow(fl, v)
		}
		if v.Action != frontend.Delete || w.DryRun {
			continue
		}
		if w.stale == nil {
			w.stale = make([]conntrack.Flow, 0, pending)
		}
		w.stale = append(w.stale, *fl)
		if len(w.stale) == pending {
			if err := w.flush(ctx); err != nil {
				return err
			}
		}
	}
	return w.flush(ctx)
}

func (w *walk) seen(f *conntrack.Flow) bool {
	for i := range w.earlier {
		if w.earlier[i].Filter.Match(f) {
			return true
		}
	}
	return false
}

// flush deletes what has been found. Each flow is judged once more, since the
// desired state may have moved on during the walk, and a Confirmer is asked last.
// The kernel is asked class by class, so that it is known of which class the flows
// are that it deleted.
func (w *walk) flush(ctx context.Context) (err error) {
	if len(w.stale) == 0 {
		return nil
	}
	start := time.Now()
	defer func() { w.deleting += time.Since(start) }()
	if w.Pace != nil {
		if err := w.Pace(ctx, len(w.stale)); err != nil {
			return err
		}
	}
	w.judgeAgain()
	w.stale = w.stale[:0]
	for i := range w.groups {
		g := &w.groups[i]
		if len(g.flows) > 0 && err == nil {
			err = w.report.delete(ctx, w.Conn, g.Class, g.flows)
			if w.Late != nil {
				w.Late.note(g.flows)
			}
			w.sent[g.Reason] += len(g.flows)
		}
		g.flows = g.flows[:0]
	}
	return err
}

// judgeAgain groups the flows that are still stale, all judged by what holds now.
func (w *walk) judgeAgain() {
	c, asks := w.Judge.(Confirmer)
	for try := 1; ; try++ {
		n := 0
		for i := range w.stale {
			f := &w.stale[i]
			if v := w.Judge.Judge(f); v.Action == frontend.Delete {
				w.group(Class{f.Family, v.Reason, v.Kind}, f)
				n++
			}
		}
		if n == 0 || !asks || c.Confirm() == nil {
			return
		}
		for i := range w.groups {
			w.groups[i].flows = w.groups[i].flows[:0]
		}
		if try == confirms {
			w.unconfirmed += n
			return
		}
	}
}

func (w *walk) group(c Class, f *conntrack.Flow) {
	i := slices.IndexFunc(w.groups, func(g group) bool { return g.Class == c })
	if i < 0 {
		i = len(w.groups)
		w.groups = append(w.groups, group{Class: c})
	}
	w.groups[i].flows = append(w.groups[i].flows, *f)
}

// keepDeletes takes back all counts of a walk that is to be repeated but those
// of the flows that a repetition will not meet again.
func (w *walk) keepDeletes() {
	w.verdicts, w.judged, w.unconfirmed = w.sent, 0, 0
	for _, n := range w.sent {
		w.judged += n
	}
}

// CleanStaleEntries deletes the stale flows of one family: the one call for a
// service proxy that has just written its rules, as kube-proxy does at the end
// of a sync.
func CleanStaleEntries(ctx context.Context, conn Conn, family conntrack.Family,
	table *frontend.Table,
) (Report, error) {
	p, err := NewPlanner(ctx, conn, table, family)
	if err != nil {
		return Report{}, err
	}
	s := Sweeper{Conn: conn, Judge: table}
	return s.Run(ctx, p.Full())
}

// NewPlanner returns a planner that knows what the kernel honours and how large
// its table is now.
func NewPlanner(ctx context.Context, conn Conn, table Scoper,
	families ...conntrack.Family,
) (*Planner, error) {
	p := &Planner{Table: table, Families: families}
	var met []conntrack.Family
	for _, s := range table.Scopes() {
		if p.wants(s.Family) && !slices.Contains(met, s.Family) {
			met = append(met, s.Family)
		}
	}
	var err error
	if len(met) > 0 {
		if p.Features, err = conn.Probe(ctx, met...); err != nil {
			return nil, err
		}
	}
	p.Flows, err = conn.Count(ctx)
	return p, err
}
