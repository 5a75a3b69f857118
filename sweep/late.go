package sweep

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
)

// LateAnswers remembers untranslated flows that were deleted though a process of
// this host had answered them (a userland proxy, say). If that process answers once
// more, to what it got before, its answer begins a flow of its own, from the
// frontend to the client; and the client's datagrams then count as that flow's
// answers, which meet no rule. So the client stays where it was, by a flow that
// nothing calls stale.
//
// Nothing but such an answer can have made it: while the deleted flow was there, it
// held both tuples. So it is deleted, too. The zero LateAnswers is ready for use, by
// several goroutines.
type LateAnswers struct {
	mu   sync.Mutex
	list []lateAnswer
}

type lateAnswer struct {
	flow  conntrack.Flow
	until time.Time
}

const (
	// lateFor is how long an answer may take: the process has what it answers.
	lateFor = 3 * time.Second
	// mostLate bounds what is remembered. What finds no room is what a process that
	// serves thousands of senders had answered.
	mostLate = 1024
)

// Getter is what a Conn needs for late answers. *conntrack.Conn is one.
type Getter interface {
	Get(ctx context.Context, f conntrack.Flow) (now conntrack.Flow, ok bool, err error)
}

// note remembers those of deleted flows that may be answered late.
func (l *LateAnswers) note(flows []conntrack.Flow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	until := time.Now().Add(lateFor)
	for i := range flows {
		f := &flows[i]
		if f.Translated() || !f.Replied() || f.Proto != conntrack.UDP || len(l.list) >= mostLate {
			continue
		}
		l.list = append(l.list, lateAnswer{*f, until})
	}
}

// Clean deletes the flows that late answers have made by now, and returns how many.
// Those that may still come are looked for by the next call. A Conn that is no
// [Getter] has none.
func (l *LateAnswers) Clean(ctx context.Context, conn Conn) (deleted int, err error) {
	c, ok := conn.(Getter)
	if l == nil || !ok {
		return 0, nil
	}
	l.mu.Lock()
	list := l.list
	l.list = nil
	l.mu.Unlock()
	var errs []error
	keep := list[:0]
	for _, a := range list {
		late, err := a.find(ctx, c)
		if err != nil {
			errs = append(errs, err)
		} else if late != nil {
			res, err := conn.Delete(ctx, *late)
			deleted += res.Deleted
			errs = append(errs, err)
		}
		if time.Now().Before(a.until) {
			keep = append(keep, a)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(keep, l.list...)
	return deleted, errors.Join(errs...)
}

// find returns the flow that a late answer has made, nil where there is none. The
// kernel finds a flow by either tuple: one that the client has made anew has the
// same, the other way round.
func (a *lateAnswer) find(ctx context.Context, c Getter) (*conntrack.Flow, error) {
	now, ok, err := c.Get(ctx, conntrack.Flow{
		Family: a.flow.Family, Proto: a.flow.Proto, Zone: a.flow.Zone, Orig: a.flow.Reply, Reply: a.flow.Orig,
	})
	if err != nil || !ok || now.Orig != a.flow.Reply || now.Reply != a.flow.Orig {
		return nil, err
	}
	return &now, nil
}
