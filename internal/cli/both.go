package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/sweep"
)

// both judges by a desired state, and asks the present NAT rules about what is
// stale by it: what they would make again is kept, since one of the two is not the
// whole truth. A proxy may translate in two steps, of which the host sees the
// first.
type both struct {
	*frontend.Table
	// look is what looks at a flow first: the table, or the table twice.
	look sweep.Judge
	// rules are nil where they are not asked, for the reason notAsked.
	rules    *rules
	notAsked string
	// held: IPVS goes on sending to servers that are gone.
	held bool
	// before is the state known earlier, nil where none is.
	before *frontend.Table
	// late: what is the least certain is left for a further pass, waiting tells
	// whether there is any.
	late, waiting bool
}

// askRules sets up what judges by the state, and by the rules where they can be
// read.
func (in *inputs) askRules(ctx context.Context, w *world) {
	w.both = &both{Table: w.table, look: w.table, before: w.before}
	if in.flows != "" {
		w.both.notAsked = "a saved table does not hold those of its host"
		return
	}
	_, w.both.held, _ = nft.IPVSHolds(in.namespace()) // what is not known, doctor tells
	if !slices.Contains(w.table.Zones(), 0) {
		w.both.notAsked = "they are told for conntrack zone 0 alone"
		return
	}
	everything := frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All}
	r, err := in.openRules(ctx, everything, w.families)
	if err != nil {
		w.both.notAsked = err.Error()
		return
	}
	if others := elsewhere(r.Rules.Translators()); others != "" {
		w.both.notAsked = others
		_ = r.Rules.Close() // nothing was written
		return
	}
	if r.Rules.Rules().Size().Bases == 0 {
		// Whatever translates here is no rule: that none would translate a flow says
		// nothing.
		w.both.notAsked = "there are none"
		_ = r.Rules.Close() // nothing was written
		return
	}
	r.beside = true
	w.both.rules = r
}

// elsewhere tells what else than nf_tables translates, "" where nothing does.
func elsewhere(t ruleset.Translators) string {
	switch {
	case t.Legacy:
		return "iptables-legacy has a nat table"
	case t.IPVS:
		return "IPVS has services"
	case t.Err != nil:
		return t.String()
	}
	return ""
}

// Judge implements sweep.Judge.
func (b *both) Judge(f *conntrack.Flow) frontend.Verdict {
	v := b.settle(f, b.look.Judge(f))
	switch {
	case v.Action != frontend.Delete:
	case b.rules != nil:
		b.weigh(f, &v)
	case b.late && b.least(f):
		v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
		b.waiting = true
	}
	return v
}

// settle asks the rules about what is uncertain by the state.
func (b *both) settle(f *conntrack.Flow, v frontend.Verdict) frontend.Verdict {
	if v.Action != v.Settled().Action && b.rules != nil {
		if again, _ := b.rules.ask(f); again == ruleset.Never {
			return v.Settled()
		}
	}
	return v
}

// least tells whether a flow is the least certain of those that are stale by the
// state alone: it is answered, and from where no backend was ever known.
func (b *both) least(f *conntrack.Flow) bool {
	return f.Replied() && (b.before == nil || b.before.Judge(f).Reason != frontend.Serving)
}

// run carries a plan out, and asks the rules where that is possible. Where it is
// not, what is the least certain is deleted after all others, in a pass of its
// own.
func (b *both) run(ctx context.Context, sw *sweep.Sweeper, plan sweep.Plan) (sweep.Report, error) {
	if b.rules != nil {
		return b.rules.passes(ctx, sw, plan)
	}
	b.late = !sw.DryRun
	r, err := sw.Run(ctx, plan)
	b.late = false
	if err != nil || !b.waiting {
		return r, err
	}
	second, err := sw.Run(ctx, plan)
	return oneAfterOther(r, second), err
}

// weigh holds a verdict of the state that says delete against the rules.
func (b *both) weigh(f *conntrack.Flow, v *frontend.Verdict) ruleset.Again {
	again, by := b.rules.ask(f)
	switch again {
	case ruleset.Always:
		v.Action, v.Reason, v.Why = frontend.Keep, frontend.RulesetDisagrees, by
		b.rules.left = true
	case ruleset.Moved:
		v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
		b.rules.left = true
	case ruleset.Never, ruleset.Untold:
	}
	return again
}

// Explain judges a flow and tells the steps in words.
func (b *both) Explain(f *conntrack.Flow) (frontend.Verdict, []string) {
	v, steps := b.Table.Explain(f)
	v = b.settle(f, v)
	switch {
	case v.Action != frontend.Delete:
		return v, steps
	case b.rules == nil:
		return v, append(steps, notAskedText(b.notAsked))
	}
	switch again := b.weigh(f, &v); {
	case v.Why == ruleset.Untranslating:
		steps = append(steps, "by the present NAT rules a new flow would be the same: "+v.Why)
	case again == ruleset.Always:
		steps = append(steps, "the present NAT rules would make it again: "+v.Why)
	case again == ruleset.Never:
		steps = append(steps, "the present NAT rules would not make it again")
	default:
		steps = append(steps, "whether the NAT rules would make it again cannot be told: "+b.untold(f))
	}
	return v, steps
}

// untold tells why the rules do not tell what becomes of a flow.
func (b *both) untold(f *conntrack.Flow) string {
	if err := b.rules.Err(); err != nil {
		return err.Error()
	}
	r := b.rules.Judge(f)
	return cmp.Or(r.Why, "the flow is in another conntrack zone than 0")
}

func notAskedText(why string) string { return "the NAT rules were not asked: " + why }

// tell says in the summary what came of asking the rules.
func (b *both) tell(s *summary) {
	if b.held {
		s.note("ipvs-holds", nft.IPVSHeld)
	}
	if b.rules == nil {
		s.note("rules-not-asked", notAskedText(b.notAsked))
		return
	}
	if others := elsewhere(b.rules.Rules.Translators()); others != "" {
		s.note("rules-not-asked", notAskedText(others)) // since they were read
	}
	n := 0
	for _, flows := range b.rules.again {
		n += flows
	}
	if n == 0 {
		return
	}
	const most = 5
	var causes []string
	for i, by := range slices.SortedFunc(maps.Keys(b.rules.again), func(x, y string) int {
		return cmp.Or(cmp.Compare(b.rules.again[y], b.rules.again[x]), cmp.Compare(x, y))
	}) {
		if i == most {
			causes = append(causes, fmt.Sprintf("%d more", len(b.rules.again)-most))
			break
		}
		causes = append(causes, fmt.Sprintf("%s (%d)", by, b.rules.again[by]))
	}
	are, they := "flows are stale by the desired state and are", "they"
	if n == 1 {
		are, they = "flow is stale by the desired state and is", "it"
	}
	s.note("ruleset-disagrees", fmt.Sprintf("%d %s kept, since by the NAT rules %s would only come back: %s",
		n, are, they, printable(strings.Join(causes, ", "))))
}
