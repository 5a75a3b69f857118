package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/flowsweep/flowsweep/agent/config"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/docker"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/source/static"
	"github.com/flowsweep/flowsweep/sweep"
)

const (
	// maxPasses is how often the table is walked at most while the rules change
	// under the walk.
	maxPasses = 4
	// maxListed is how many flows are remembered that were listed: 8 MB.
	maxListed = 1 << 18
	// maxDoubts is how many causes are told apart why flows are not judged.
	maxDoubts = 64
)

// rules judges by the NAT rules of the moment: when they have changed it reads
// them anew, and judges by those. One goroutine uses it.
type rules struct {
	*ruleset.Verdicts
	of     string // whose they are
	reload func() (ruleset.Change, error)
	// beside: a desired state decides, and they tell what would come back.
	beside bool

	// Of the present pass.
	changed bool           // flows that were judged may be stale by now
	failed  bool           // they could not be read when they had changed
	kube    bool           // some are stale by kube-proxy's rules
	doubts  map[doubt]int  // flows that were not judged
	again   map[string]int // flows that a state has for stale and a rule would make again, by the rule
	left    bool           // there are such, or some for which the rules could not be asked
}

// listed are the flows that were listed.
type listed struct {
	seed maphash.Seed
	keys map[uint64]struct{}
}

// doubt is a cause why flows are not judged.
type doubt struct{ owner, why string }

// readRules reads the rules of the namespace.
func (in *inputs) readRules(ctx context.Context, policy frontend.Policy,
	families []conntrack.Family,
) (*rules, error) {
	const instead = "; or give the desired state with --state FILE or --kubernetes"
	r, err := in.openRules(ctx, policy, families)
	if errors.Is(err, fs.ErrPermission) { // which judging by a state takes as well
		return nil, fmt.Errorf("reading the NAT rules to judge by: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the NAT rules to judge by: %w%s", err, instead)
	}
	r.Owner = in.containers(ctx)
	return r, nil
}

func (in *inputs) openRules(ctx context.Context, policy frontend.Policy,
	families []conntrack.Family,
) (*rules, error) {
	j, err := ruleset.NewJudge(ctx, ruleset.Config{NetNS: in.namespace()})
	if err != nil {
		return nil, err
	}
	if j.Generation() == 0 {
		_ = j.Close() // nothing was written
		return nil, ruleset.ErrNoNFT
	}
	r := &rules{
		Verdicts: &ruleset.Verdicts{Rules: j, Policy: policy, Families: families},
		of:       "this network namespace", again: map[string]int{},
	}
	if in.netns != "" {
		r.of = "network namespace " + in.netns
	}
	r.reload = func() (ruleset.Change, error) { return j.Reload(ctx) }
	return r, nil
}

// rules reads the rules for an agent: to judge by, or only to know whether the
// proxy has caught up, where what may be deleted does not matter.
func (d *daemon) rules(ctx context.Context, in *inputs, byRules bool) (*ruleset.Verdicts, error) {
	j, err := ruleset.NewJudge(ctx, ruleset.Config{NetNS: in.namespace()})
	if err != nil {
		return nil, fmt.Errorf("reading the NAT rules: %w", err)
	}
	v := &ruleset.Verdicts{
		Rules: j, Families: d.cfg.Families,
		Policy: frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All},
	}
	if byRules {
		v.Policy, v.Owner = d.cfg.Sweep, in.followContainers(ctx)
		d.log.Info("no desired state is given; going by the NAT rules",
			"rules", j.Rules().Size().Rules, "generation", j.Generation())
	}
	return v, nil
}

// nothingIn tells whether files are those of the default and there is none: then
// nobody has given a desired state.
func nothingIn(files []string) bool {
	if len(files) > 0 && !slices.Equal(files, config.Default().Sources.Static.Files) {
		return false
	}
	for _, dir := range files {
		found, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false // there may be some
		}
		if slices.ContainsFunc(found, func(f fs.DirEntry) bool { return static.Reads(f.Name()) }) {
			return false
		}
	}
	return true
}

// namesPause is the time between two questions for the containers.
const namesPause = 30 * time.Second

// followContainers is containers for a long time.
func (in *inputs) followContainers(ctx context.Context) func(by ruleset.Rule, f *conntrack.Flow) string {
	var now atomic.Pointer[func(by ruleset.Rule, f *conntrack.Flow) string]
	ask := func() {
		if names := in.containers(ctx); names != nil {
			now.Store(&names)
		}
	}
	ask()
	go func() {
		tick := time.NewTicker(namesPause)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				ask()
			}
		}
	}()
	return func(by ruleset.Rule, f *conntrack.Flow) string {
		if names := now.Load(); names != nil {
			return (*names)(by, f)
		}
		return ""
	}
}

// containers returns what names the container that a flow goes to, nil where no
// Docker engine answers. Names are good to have, and nothing depends on them.
func (in *inputs) containers(ctx context.Context) func(by ruleset.Rule, f *conntrack.Flow) string {
	if in.netns != "" && os.Getenv(docker.HostEnv) == "" {
		return nil // another host's, as it were
	}
	c, err := docker.List(ctx)
	if err != nil {
		return nil
	}
	return func(by ruleset.Rule, f *conntrack.Flow) string {
		if by.Chain != "DOCKER" && by.Table != "docker-bridges" {
			return ""
		}
		return c.Published(f.Proto, f.Orig.Dst, f.Orig.DstPort)
	}
}

// String tells by what flows are judged.
func (r *rules) String() string {
	return fmt.Sprintf("the NAT rules of %s: %s, generation %d",
		r.of, plural(r.Rules.Rules().Size().Rules, "rule"), r.Rules.Generation())
}

// Judge implements sweep.Judge.
func (r *rules) Judge(f *conntrack.Flow) frontend.Verdict {
	v := r.Verdicts.Judge(f)
	if v.Reason == frontend.Unpredictable && r.renew() {
		v = r.Verdicts.Judge(f)
	}
	return v
}

// Explain judges a flow and tells the steps in words.
func (r *rules) Explain(f *conntrack.Flow) (frontend.Verdict, []string) {
	v, steps := r.Verdicts.Explain(f)
	if v.Reason == frontend.Unpredictable && r.renew() {
		v, steps = r.Verdicts.Explain(f)
	}
	if v.Reason == frontend.BackendGone && ofKubeProxy(v.Owner) {
		steps = append(steps, askCluster)
	}
	return v, steps
}

// renew reads the rules anew if they are not the present ones any more. What it
// fails with shows at the end of the pass.
func (r *rules) renew() bool {
	if !errors.Is(r.Rules.Err(), ruleset.ErrStale) {
		return false
	}
	c, err := r.reload()
	r.changed = r.changed || !c.Empty()
	r.failed = err != nil
	return err == nil
}

// ask asks what becomes of a flow that is stale by a desired state, as ruleset.Ask
// does. Moved are rules that could not be read anew.
func (r *rules) ask(f *conntrack.Flow) (again ruleset.Again, by string) {
	again, by = ruleset.Ask(r.Verdicts, f)
	if again == ruleset.Moved && r.renew() {
		again, by = ruleset.Ask(r.Verdicts, f)
	}
	if again == ruleset.Untold && r.failed {
		again = ruleset.Moved
	}
	return again, by
}

// passes carries a plan out, and again while the rules change meanwhile in a way
// that may have made flows stale which were judged before. Beside a state these
// are the ones that were left because of the rules.
func (r *rules) passes(ctx context.Context, sw *sweep.Sweeper, plan sweep.Plan) (sweep.Report, error) {
	var all sweep.Report
	onFlow := sw.OnFlow
	sw.OnFlow = func(f *conntrack.Flow, v frontend.Verdict) {
		switch {
		case v.Reason == frontend.RulesetDisagrees:
			r.disagree(v.Why)
		case v.Why != "" && v.Action == frontend.Keep:
			r.doubt(v)
		}
		r.kube = r.kube || v.Action == frontend.Delete && ofKubeProxy(v.Owner)
		onFlow(f, v)
	}
	for pass := 1; ; pass++ {
		r.changed, r.failed, r.left = false, false, false
		r.doubts, r.again = map[doubt]int{}, map[string]int{}
		one, err := sw.Run(ctx, plan)
		all = oneAfterOther(all, one)
		if err != nil || r.beside && !r.left {
			return all, err
		}
		r.changed = r.changed || one.Unconfirmed > 0
		c, err := r.reload()
		if err == nil {
			err = r.Rules.Err()
		}
		switch {
		case err == nil && !r.changed && c.Empty():
			return all, nil
		case pass < maxPasses:
		case err != nil:
			return all, fmt.Errorf("stale flows may be left: %w", err)
		default:
			return all, fmt.Errorf("stale flows may be left: "+
				"the NAT rules changed during each of %d passes; try again", maxPasses)
		}
	}
}

// ofKubeProxy tells whether a rule, as Rule.String writes it, is kube-proxy's.
func ofKubeProxy(rule string) bool {
	_, rest, _ := strings.Cut(rule, " ") // the family
	table, chain, _ := strings.Cut(rest, " ")
	return table == "kube-proxy" || strings.HasPrefix(chain, "KUBE-")
}

// askCluster is what is to be done about that.
const askCluster = "kube-proxy's rules name no endpoint that serves while it terminates, so that its flows look stale; " +
	"on a node, judge by the cluster: --kubernetes"

// oneAfterOther is the report of two passes over the same flows. Those that the
// first has deleted, the second has not met.
func oneAfterOther(first, second sweep.Report) sweep.Report {
	sum := second
	sum.Queries = slices.Concat(first.Queries, second.Queries)
	sum.Returned += first.Returned
	sum.Malformed += first.Malformed
	sum.Late += first.Late
	sum.Duration += first.Duration
	sum.Classes = maps.Clone(second.Classes)
	for c, res := range first.Classes {
		gone := conntrack.DeleteResult{Deleted: res.Deleted, Gone: res.Gone}
		sum.DeleteResult.Add(gone)
		sum.Judged += res.Deleted + res.Gone
		sum.Verdicts[c.Reason] += res.Deleted + res.Gone
		if sum.Classes == nil {
			sum.Classes = map[sweep.Class]conntrack.DeleteResult{}
		}
		both := sum.Classes[c]
		both.Add(gone)
		sum.Classes[c] = both
	}
	return sum
}

// news tells whether a flow has not been listed with the same verdict by an
// earlier pass.
func (l *listed) news(f *conntrack.Flow, v frontend.Verdict) bool {
	if l.keys == nil {
		l.seed, l.keys = maphash.MakeSeed(), map[uint64]struct{}{}
	}
	key := maphash.Comparable(l.seed, struct {
		orig, reply conntrack.Tuple
		id          uint32
		proto       uint8
		zone        uint16
		reason      frontend.Reason
	}{f.Orig, f.Reply, f.ID, f.Proto, f.Zone, v.Reason})
	if _, old := l.keys[key]; old {
		return false
	}
	if len(l.keys) < maxListed {
		l.keys[key] = struct{}{}
	}
	return true
}

func (r *rules) doubt(v frontend.Verdict) {
	d := doubt{v.Owner, v.Why}
	if _, ok := r.doubts[d]; !ok && len(r.doubts) >= maxDoubts {
		d = doubt{why: "of other causes"}
	}
	r.doubts[d]++
}

// disagree counts a flow that the rules would make again.
func (r *rules) disagree(by string) {
	if _, ok := r.again[by]; !ok && len(r.again) >= maxDoubts {
		by = "other rules"
	}
	r.again[by]++
}

// tell says by what was judged, and on stderr what was not.
func (r *rules) tell(s *summary, stderr io.Writer) {
	s.By, s.by = "rules", r.String()
	s.Generation, s.Rules = r.Rules.Generation(), r.Rules.Rules().Size().Rules
	if r.kube {
		fmt.Fprintf(stderr, "flowsweep: warning: %s\n", askCluster)
	}
	const most = 5
	causes := slices.SortedFunc(maps.Keys(r.doubts), func(a, b doubt) int {
		return cmp.Or(cmp.Compare(r.doubts[b], r.doubts[a]),
			cmp.Compare(a.owner, b.owner), cmp.Compare(a.why, b.why))
	})
	for i, d := range causes {
		if i == most {
			fmt.Fprintf(stderr, "flowsweep: warning: and flows of %s more, see \"flowsweep plan --all -o wide\"\n",
				plural(len(causes)-most, "cause"))
			break
		}
		at := ""
		if d.owner != "" {
			at = d.owner + ": "
		}
		fmt.Fprintf(stderr, "flowsweep: warning: %s not judged: %s%s\n",
			plural(r.doubts[d], "flow"), at, printable(d.why))
	}
}
