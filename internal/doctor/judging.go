package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/flowsweep/flowsweep/ruleset"
)

// Ruleset is what came of reading the NAT rules and judging flows by them.
type Ruleset struct {
	Size ruleset.Size
	Took time.Duration // reading them
	// NotUnderstood are the rules with an expression of which too little is known.
	NotUnderstood []ruleset.Step
	Others        ruleset.Translators
	// Flows is how many were judged, of the first of the table; Doubted is how
	// many of them it cannot be told of whether they are stale.
	Flows, Doubted int
}

// judgedFlows is how many flows are judged by the rules: a tenth of a second.
const judgedFlows = 10_000

var rules = check{
	id: "rules",
	why: "where no desired state is given, plan, sweep and explain judge by the NAT rules of the kernel, " +
		"and leave alone what those cannot tell",
	run: func(ctx context.Context, e *exam) []Finding {
		const elsewise = "give the desired state with --state or --kubernetes"
		r, err := e.Kernel.Rules(ctx, judgedFlows)
		switch {
		case errors.Is(err, ruleset.ErrNoNFT):
			return found(Info, "this kernel has no nf_tables: flows can only be judged by a desired state", elsewise)
		case err != nil:
			return unchecked(err)
		}
		read := fmt.Sprintf("%s in %s, from %s on, read in %.1f ms", plural(r.Size.Rules, "rule"),
			plural(r.Size.Tables, "table"), plural(r.Size.Bases, "NAT base chain"), r.Took.Seconds()*1000)
		if r.Others.Legacy || r.Others.IPVS || r.Others.Err != nil {
			return found(Info, read+", and nothing is judged by them: "+r.Others.String(),
				"make them the only ones, or "+elsewise)
		}
		var list []Finding
		switch {
		case r.Flows == 0:
			list = found(OK, read, "")
		case r.Doubted == 0:
			list = found(OK, fmt.Sprintf("%s; each of %s can be judged by them", read, plural(r.Flows, "flow")), "")
		default:
			list = found(Info, fmt.Sprintf("%s; %d of %s cannot be judged by them", read, r.Doubted, plural(r.Flows, "flow")),
				"flowsweep plan --all -o wide tells for each of them why")
		}
		if n := len(r.NotUnderstood); n > 0 {
			const most = 5
			var named []string
			for _, s := range r.NotUnderstood[:min(n, most)] {
				named = append(named, fmt.Sprintf("%s (%s)", s.Rule, s.Effect))
			}
			if n > most {
				named = append(named, fmt.Sprintf("%d more", n-most))
			}
			list = append(list, Finding{
				ID: "rules-understood", Level: Warn,
				What: fmt.Sprintf("%d of %s are not understood: %s", n, plural(r.Size.Rules, "rule"), strings.Join(named, "; ")),
				Why:  "of a flow that may meet such a rule nothing can be told, so that it stays",
				Do:   "write what they do in another way, or " + elsewise,
			})
		}
		if len(r.Others.Modules) > 0 {
			list = append(list, Finding{
				ID: "other-translators", Level: Info, What: r.Others.String(),
				Why: "a flow that no rule translates any more may have been translated by them: it is left, " +
					"unless the agent has seen a rule for its destination",
				Do: "nothing, if they are in use; else unload them",
			})
		}
		return list
	},
}

var otherRules = check{
	id:  "rules-elsewhere",
	why: "a namespace that translates for itself has its own flows that go stale",
	run: func(ctx context.Context, e *exam) []Finding {
		s, err := e.processes()
		if err != nil {
			return unchecked(err)
		}
		where, all, err := e.Kernel.NAT(ctx, maps.Clone(s.namespaces))
		switch {
		case errors.Is(err, ruleset.ErrNoNFT):
			return found(OK, "no nf_tables", "")
		case err != nil:
			return unchecked(err)
		case len(where) == 0 && all:
			return found(OK, "no NAT rules in other namespaces", "")
		case len(where) == 0:
			f := found(Info, "no NAT rules in those other namespaces that were looked into, which are not all",
				"flowsweep plan --netns looks into one")
			f[0].Unchecked = true
			return f
		}
		slices.Sort(where)
		const most = 5
		what := "NAT rules in " + strings.Join(where[:min(len(where), most)], ", ")
		if n := len(where) - most; n > 0 {
			what += fmt.Sprintf(" and %d more", n)
		}
		return found(Info, what,
			"flowsweep plan --netns "+where[0]+" judges the flows there; run an agent for each that matters")
	},
}
