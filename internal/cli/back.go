package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// comesBackIn is how long senders are given to make a flow anew: many times the
// pace of a stream. It is a variable for tests without traffic.
var comesBackIn = 250 * time.Millisecond

// maxBack is how many of the flows that a sweep deletes are looked for afterwards.
const maxBack = 1024

// deleted are the first flows that a sweep deletes.
type deleted []conntrack.Flow

func (d *deleted) add(f *conntrack.Flow) {
	if len(*d) < maxBack {
		*d = append(*d, *f)
	}
}

// back looks once, after a moment, which of the flows are there again as they were
// and stale again. Deleting them has helped nobody: what made them is still there.
// What late answers have made of them is deleted; of that, late are gone.
func (d deleted) back(ctx context.Context, conn *conntrack.Conn, sw *sweep.Sweeper, late int, s *summary) error {
	select {
	case <-ctx.Done():
		return nil // all was done
	case <-time.After(comesBackIn):
	}
	n, err := sw.Late.Clean(ctx, conn)
	if err != nil {
		return err
	}
	if late += n; late > 0 {
		s.note("late-answers", fmt.Sprintf("deleted %s more, which a late answer to a deleted one had begun", plural(late, "flow")))
	}
	var first conntrack.Flow
	for i := range d {
		now, ok, err := conn.Get(ctx, d[i])
		if err != nil {
			return err
		}
		const busy = conntrack.StatusOffload | conntrack.StatusHWOffload // not deleted
		if !ok || now.Status&busy != 0 || now.Reply.Src != d[i].Reply.Src || now.Reply.SrcPort != d[i].Reply.SrcPort ||
			sw.Judge.Judge(&now).Action != frontend.Delete {
			continue
		}
		if s.CameBack++; s.CameBack == 1 {
			first = now
		}
	}
	if s.CameBack > 0 {
		s.note("came-back", fmt.Sprintf("%d of %s came back stale within %v s, since what made it so is still there: flowsweep explain '%s>%s/%s'",
			s.CameBack, plural(len(d), "deleted flow"), comesBackIn.Seconds(), endpoint(first.Proto, first.Orig.Src, first.Orig.SrcPort),
			endpoint(first.Proto, first.Orig.Dst, first.Orig.DstPort), protoWord(&first)))
	}
	return nil
}
