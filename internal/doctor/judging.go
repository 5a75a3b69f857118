package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
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
	// Shadowed are the rules that no packet meets, Nobody those that lead to nobody.
	Shadowed []ruleset.Shadow
	Nobody   []Nobody
	Others   ruleset.Translators
	// Flows is how many were judged, of the first of the table; Doubted is how
	// many of them it cannot be told of whether they are stale.
	Flows, Doubted int
}

// Nobody is a rule by which flows go to an address that does not answer.
type Nobody struct {
	By    ruleset.Rule
	To    netip.Addr
	Where string // and how that is known: "on eth1 (FAILED)"
	Flows int    // that are unanswered
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
			list = append(list, Finding{
				ID: "rules-understood", Level: Warn,
				What: fmt.Sprintf("%d of %s are not understood: %s", n, plural(r.Size.Rules, "rule"),
					some(n, func(i int) string { return fmt.Sprintf("%s (%s)", r.NotUnderstood[i].Rule, r.NotUnderstood[i].Effect) })),
				Why: "of a flow that may meet such a rule nothing can be told, so that it stays",
				Do:  "write what they do in another way, or " + elsewise,
			})
		}
		if n := len(r.Shadowed); n > 0 {
			are := "are"
			if n == 1 {
				are = "is"
			}
			list = append(list, Finding{
				ID: "rules-shadowed", Level: Warn,
				What: fmt.Sprintf("%s %s never met: %s", plural(n, "rule"), are,
					some(n, func(i int) string { return r.Shadowed[i].String() })),
				Why: "an earlier rule decides for all packets that such a rule is for: one of the two is left over, " +
					"and flows to where a left-over rule leads look right",
				Do: "nft -a list chain shows both; delete the one that is left over: nft delete rule ... handle N",
			})
		}
		if n := len(r.Nobody); n > 0 {
			list = append(list, Finding{
				ID: "rules-to-nobody", Level: Warn,
				What: some(n, func(i int) string {
					x := r.Nobody[i]
					return fmt.Sprintf("%s leads to %s, which does not answer %s: %s unanswered",
						x.By, x.To, x.Where, plural(x.Flows, "flow"))
				}),
				Why: "by the rules such flows are right, and stay, while nobody is there any more",
				Do:  "flowsweep explain ADDRESS:PORT/PROTOCOL shows the rule; delete it if it is left over, or start its server",
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

// some names the first of n things.
func some(n int, name func(i int) string) string {
	const most = 5
	var named []string
	for i := range min(n, most) {
		named = append(named, name(i))
	}
	if n > most {
		named = append(named, fmt.Sprintf("%d more", n-most))
	}
	return strings.Join(named, "; ")
}

var otherRules = check{
	id:  "rules-elsewhere",
	why: "a namespace that translates for itself has its own flows that go stale",
	run: func(ctx context.Context, e *exam) []Finding {
		s, err := e.processes()
		if err != nil {
			return unchecked(err)
		}
		list, all, err := e.Kernel.NAT(ctx, maps.Clone(s.namespaces))
		all = all && s.hidden == 0 && !s.more
		switch {
		case err != nil:
			return unchecked(err)
		case len(list) == 0 && all:
			return found(OK, "no NAT rules, iptables-legacy or IPVS in other namespaces", "")
		case len(list) == 0:
			f := found(Info, "no NAT rules, iptables-legacy or IPVS in those other namespaces that were looked into, which are not all",
				"flowsweep plan --netns looks into one")
			f[0].Unchecked = true
			return f
		}
		slices.SortFunc(list, func(a, b Elsewhere) int { return cmp.Compare(a.Path, b.Path) })
		do := ""
		var parts []string
		for _, by := range []struct {
			what, do string
			has      func(Elsewhere) bool
		}{
			{"NAT rules", "judges the flows there", func(x Elsewhere) bool { return x.Rules }},
			{"a nat table of iptables-legacy", "--state FILE judges the flows there", func(x Elsewhere) bool { return x.Legacy }},
			{"IPVS", "--state FILE judges the flows there", func(x Elsewhere) bool { return x.IPVS }},
		} {
			var paths []string
			for _, x := range list {
				if by.has(x) {
					paths = append(paths, x.Path)
				}
			}
			if len(paths) == 0 {
				continue
			}
			if do == "" {
				do = "flowsweep plan --netns " + paths[0] + " " + by.do
			}
			const most = 5
			part := by.what + " in " + strings.Join(paths[:min(len(paths), most)], ", ")
			if n := len(paths) - most; n > 0 {
				part += fmt.Sprintf(" and %d more", n)
			}
			parts = append(parts, part)
		}
		if !all {
			parts = append(parts, "not all were looked into")
		}
		return found(Info, strings.Join(parts, "; "), do+"; run an agent for each that matters")
	},
}

var sockets = check{
	id: "socket-balancer",
	why: "what a program chooses for a socket is no translation that conntrack could show: " +
		"the flow goes from the client to the backend, and cannot be judged or repaired here",
	run: func(_ context.Context, e *exam) []Finding {
		hooks, root, err := e.Kernel.SocketPrograms()
		switch {
		case err != nil:
			return unchecked(err)
		case len(hooks) == 0:
			return found(OK, "no BPF program at connect or sendmsg of the cgroup root", "")
		}
		return found(Info, fmt.Sprintf("BPF programs at %s of the cgroup root %s, which may choose backends for sockets (Cilium's do)",
			strings.Join(hooks, ", "), root),
			"flowsweep explain 'CLIENT:PORT>SERVICE:PORT/udp' shows where the client's socket sends instead")
	},
}
