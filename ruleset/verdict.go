package ruleset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// Verdicts puts the judgements of a Judge into the words of package frontend, and
// applies a policy to them, so that a sweep may go by rules as it goes by a
// frontend.Table. The methods may be called from several goroutines; the fields
// are not to be changed meanwhile.
type Verdicts struct {
	Rules  *Judge
	Policy frontend.Policy
	// Families limits Scopes; none means both.
	Families []conntrack.Family
	// Owner, if set, tells whose a flow is that meets a rule which translates: the
	// name of a container, say. "" stands for the rule itself.
	Owner func(by Rule, f *conntrack.Flow) string

	mu    sync.Mutex
	names map[Rule]string // so that judging allocates nothing
}

// maxNames bounds the names of rules that are remembered: a megabyte or two.
const maxNames = 1 << 14

// words are the reasons that verdicts stand for. Each belongs to one action, which
// is the one that Verdict's comments name.
var words = [...]frontend.Reason{
	NotJudged:         frontend.NotSwept,
	OtherZone:         frontend.OtherZone,
	Expected:          frontend.ExpectedFlow,
	Plain:             frontend.NoFrontend,
	Right:             frontend.Serving,
	MayPass:           frontend.Unpredictable,
	Unpredictable:     frontend.Unpredictable,
	UnknownTranslator: frontend.UnknownTranslator,
	BackendGone:       frontend.BackendGone,
	Untranslated:      frontend.Untranslated,
	FrontendGone:      frontend.FrontendGone,
}

// whyMayPass is Judgement.Why for MayPass.
const whyMayPass = "rules translate some flows like it and pass others, and which cannot be told"

// Judge implements sweep.Judge. Its cost is that of Judge.Judge and a look-up.
func (v *Verdicts) Judge(f *conntrack.Flow) frontend.Verdict {
	if v.Policy.Of(f.Proto) == frontend.Off {
		return frontend.Verdict{Reason: frontend.NotSwept}
	}
	return v.verdict(f, v.Rules.Judge(f))
}

func (v *Verdicts) verdict(f *conntrack.Flow, j Judgement) frontend.Verdict {
	reason := words[j.Verdict]
	w := frontend.Verdict{Action: reason.Action(), Reason: reason, Why: j.Why}
	if w.Action == frontend.Ignore {
		return w
	}
	w.Kind = frontend.Rule
	if j.By != (Rule{}) {
		if v.Owner != nil && reason != frontend.Unpredictable { // then the rule itself is what matters
			w.Owner = v.Owner(j.By, f)
		}
		if w.Owner == "" {
			w.Owner = v.name(j.By)
		}
	}
	if j.Verdict == MayPass {
		w.Why = whyMayPass
	}
	if w.Action == frontend.Delete && v.Policy.Of(f.Proto) == frontend.Unreplied && f.Replied() {
		w.Action, w.Reason = frontend.Keep, frontend.ByPolicy
	}
	return w
}

func (v *Verdicts) name(r Rule) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	s, ok := v.names[r]
	if !ok {
		if v.names == nil || len(v.names) >= maxNames {
			v.names = map[Rule]string{}
		}
		s = r.String()
		v.names[r] = s
	}
	return s
}

// Again says whether rules would make a flow again that is stale by a desired
// state, if it were deleted: as it is, with the same backend.
type Again uint8

// The answers.
const (
	Untold Again = iota // it cannot be told
	Moved               // the rules have changed since they were read: reload, and ask again
	Never               // they would not
	Always              // they would
)

// Untranslating is what Ask names in place of a rule where none translates.
const Untranslating = "no rule translates it"

// Ask asks for a flow that is stale by a desired state what becomes of it when it
// is deleted, and names the rule that would make it again. *Verdicts has the
// methods; its policy must allow everything to be deleted, for what a policy
// keeps is not told. Of a zone that rules are not judged for, nothing is told.
func Ask(rules interface {
	Judge(f *conntrack.Flow) frontend.Verdict
	Err() error
}, f *conntrack.Flow,
) (again Again, by string) {
	switch v := rules.Judge(f); {
	case v.Reason == frontend.Serving:
		return Always, v.Owner
	case v.Reason == frontend.NoFrontend: // which is untranslated, as a new flow would be
		return Always, Untranslating
	case v.Action == frontend.Delete:
		return Never, ""
	case errors.Is(rules.Err(), ErrStale):
		return Moved, ""
	}
	return Untold, ""
}

// Explain judges a flow and tells the steps in words, one a line.
func (v *Verdicts) Explain(f *conntrack.Flow) (frontend.Verdict, []string) {
	sweep := v.Policy.Of(f.Proto)
	name := strings.ToUpper(conntrack.ProtoName(f.Proto))
	if sweep == frontend.Off {
		return frontend.Verdict{Reason: frontend.NotSwept},
			[]string{fmt.Sprintf("the protocol is %s, which the policy (%s) does not sweep", name, v.Policy)}
	}
	j, steps := v.Rules.Explain(f)
	w := v.verdict(f, j)
	if w.Action == frontend.Ignore && w.Reason != frontend.NoFrontend {
		return w, steps
	}
	steps = slices.Insert(steps, 0, fmt.Sprintf("the protocol is %s, swept by the policy %q; "+
		"the zone is %d; no helper expected the flow", name, sweep, f.Zone))
	if w.Reason == frontend.ByPolicy {
		steps = append(steps, fmt.Sprintf("it is stale, but the policy %q leaves what was answered", sweep))
	}
	return w, steps
}

// Scopes returns the families and protocols of which something may be deleted, in
// the order of frontend.Table.Scopes: whatever the rules are, there may be flows
// of rules that are gone.
func (v *Verdicts) Scopes() []frontend.Scope {
	families := v.Families
	if len(families) == 0 {
		families = []conntrack.Family{conntrack.IPv4, conntrack.IPv6}
	}
	var list []frontend.Scope
	for _, fam := range families {
		for _, proto := range []uint8{conntrack.SCTP, conntrack.UDP, conntrack.TCP} {
			if v.Policy.Of(proto) != frontend.Off {
				list = append(list, frontend.Scope{Family: fam, Proto: proto})
			}
		}
	}
	return list
}

// Most returns the most that may be deleted of a protocol, which is what the
// policy says.
func (v *Verdicts) Most(proto uint8) frontend.Sweep { return v.Policy.Of(proto) }

// Zones returns the zones that are judged: the default one alone, since a flow of
// another may have met other rules.
func (v *Verdicts) Zones() []uint16 { return []uint16{0} }

// Reload is Judge.Reload.
func (v *Verdicts) Reload(ctx context.Context) (Change, error) { return v.Rules.Reload(ctx) }

// Err is Judge.Err.
func (v *Verdicts) Err() error { return v.Rules.Err() }

// Confirm is Judge.Confirm.
func (v *Verdicts) Confirm() error { return v.Rules.Confirm() }

// Outcome is Judge.Outcome.
func (v *Verdicts) Outcome(d Destination) *Outcome { return v.Rules.Outcome(d) }

// Seen is Judge.Seen.
func (v *Verdicts) Seen() []Destination { return v.Rules.Seen() }

// See is Judge.See.
func (v *Verdicts) See(list ...Destination) { v.Rules.See(list...) }
