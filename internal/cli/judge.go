package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// judging is what plan and sweep have in common.
type judging struct {
	inputs
	output      string
	all         bool
	changedOnly bool
	verbose     bool
	dryRun      bool
	failOnStale bool
	force       bool
}

func (j *judging) register(c *cobra.Command) {
	j.inputs.register(c)
	f := c.Flags()
	f.StringVarP(&j.output, "output", "o", "table", "`FORMAT`: table, wide, json, jsonl or yaml")
	f.BoolVar(&j.all, "all", false, "list every flow of the live table, not only those to delete")
	f.BoolVar(&j.changedOnly, "changed-only", false,
		"ask the kernel only about what differs between --before and --state")
	f.BoolVarP(&j.verbose, "verbose", "v", false, "say on stderr what the kernel is asked, and what came of it")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

func newPlan() *cobra.Command {
	j := &judging{dryRun: true}
	c := &cobra.Command{
		Use:   "plan",
		Short: "Judge every flow, delete nothing",
		Long: `plan judges every flow and lists those that sweep would delete.

Without a desired state the NAT rules of this host decide, whoever wrote them: a
flow is stale that the present rules could not have translated so. With one, what
is stale by it is kept where the rules would only make it again.`,
		Example: `  flowsweep plan
  kubectl get services,endpointslices,nodes,pods -A -o yaml | flowsweep plan --state - --node n1
  flowsweep plan --state svc.yaml --flows dump.txt -o json`,
		RunE: func(cmd *cobra.Command, _ []string) error { return j.run(cmd) },
	}
	j.register(c)
	c.Flags().BoolVar(&j.failOnStale, "fail-on-stale", false, "exit with 3 where something is stale")
	return c
}

func newSweep() *cobra.Command {
	j := &judging{}
	c := &cobra.Command{
		Use:   "sweep",
		Short: "Judge every flow and delete the stale ones, once",
		Long: `sweep judges every flow and deletes those that are stale.

Without a desired state the NAT rules of this host decide, whoever wrote them: a
flow is stale that the present rules could not have translated so. With one, what
is stale by it is kept where the rules would only make it again.`,
		Example: `  flowsweep sweep
  flowsweep sweep --state frontends.yaml --dry-run
  flowsweep sweep --before old.yaml --state new.yaml --node n1 --changed-only`,
		RunE: func(cmd *cobra.Command, _ []string) error { return j.run(cmd) },
	}
	j.register(c)
	c.Flags().BoolVar(&j.dryRun, "dry-run", false, "delete nothing")
	c.Flags().BoolVar(&j.force, "force", false,
		"delete though part of the state that may hold backends cannot be read")
	return c
}

func (j *judging) run(cmd *cobra.Command) error {
	switch {
	case j.changedOnly && (len(j.before) == 0 || j.flows != "" || j.all):
		return usagef("--changed-only compares --before with --state and asks the live table: " +
			"it needs --before and excludes --flows and --all")
	case j.flows != "" && !j.dryRun:
		return usagef("sweep deletes from the live table; to judge a saved one use \"flowsweep plan --flows\" (or --dry-run)")
	}
	out, err := newWriter(j.output, cmd.OutOrStdout(), j.flows == "")
	if err != nil {
		return err
	}
	w, err := j.load(cmd)
	if err != nil {
		return err
	}
	defer w.close()
	if w.rules != nil {
		if err := w.rules.Rules.Err(); err != nil {
			return fmt.Errorf("the NAT rules do not tell which flows are stale: %w; "+
				"or give the desired state with --state FILE", err)
		}
	}
	if w.doubtful > 0 && !j.dryRun && !j.force {
		return &exitError{exitFailed, fmt.Errorf("nothing is deleted: %s of the state could not be read and may hold backends, "+
			"whose flows would count as stale; mend the input, see \"flowsweep plan\", or give --force", plural(w.doubtful, "part"))}
	}
	s := summary{Problems: w.problems, DryRun: j.dryRun, Reasons: map[string]int{}}
	if j.flows != "" {
		err = j.saved(cmd, w, out, &s)
	} else {
		err = j.live(cmd, w, out, &s)
	}
	if werr := out.end(&s); werr != nil && err == nil {
		err = werr
	}
	switch {
	case errors.Is(err, context.Canceled):
		return &exitError{exitFailed, errors.New("interrupted; what is counted above was done")}
	case err != nil:
		return err
	case s.Failed > 0:
		return &exitError{exitFailed, fmt.Errorf("%s could not be deleted", plural(s.Failed, "flow"))}
	case !j.failOnStale:
		return nil
	case s.Delete > 0:
		return &exitError{exitStale, nil}
	}
	if why := j.unjudged(w, &s); why != "" {
		return &exitError{exitFailed, fmt.Errorf("--fail-on-stale: nothing stale was found, but %s", why)}
	}
	return nil
}

// unjudged tells what keeps a verdict from being one, "" where nothing does.
func (j *judging) unjudged(w *world, s *summary) string {
	told := 0 // by the rules
	for _, r := range []frontend.Reason{
		frontend.NoFrontend, frontend.Serving, frontend.ByPolicy,
	} {
		told += s.Reasons[r.String()]
	}
	untold := s.Reasons[frontend.Unpredictable.String()] + s.Reasons[frontend.UnknownTranslator.String()]
	switch {
	case w.lost > 0:
		return plural(w.lost, "part") + " of the state could not be read"
	case s.BadLines > 0:
		return fmt.Sprintf("%s of %s could not be read", plural(s.BadLines, "line"), j.flows)
	case j.flows != "" && s.lines == 0:
		return j.flows + " holds no flow"
	case w.rules != nil && untold > 0 && told == 0:
		return "the NAT rules do not tell of any flow whether it is"
	}
	return ""
}

// saved judges a saved table and lists each line.
func (j *judging) saved(cmd *cobra.Command, w *world, out writer, s *summary) error {
	start := time.Now()
	var verdicts [frontend.Reasons]int
	bad, err := j.eachLine(cmd, func(line int, f *conntrack.Flow) error {
		s.lines++
		if !wanted(w.families, f) {
			return nil
		}
		v := w.both.Judge(f)
		verdicts[v.Reason]++
		return out.flow(line, f, v)
	})
	s.count(verdicts)
	s.BadLines = bad
	s.duration(time.Since(start))
	w.both.tell(s)
	return err
}

func wanted(families []conntrack.Family, f *conntrack.Flow) bool {
	return len(families) == 0 || families[0] == f.Family
}

// live judges the kernel's table, deletes unless told not to, and lists what is
// stale.
func (j *judging) live(cmd *cobra.Command, w *world, out writer, s *summary) error {
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	conn, err := conntrack.Dial(conntrack.Config{NetNS: j.namespace()})
	if err != nil {
		return err
	}
	defer conn.Close()
	p, err := sweep.NewPlanner(ctx, conn, w.judge(), w.families...)
	if err != nil {
		return err
	}
	var plan sweep.Plan
	switch {
	case j.all:
		plan = p.Everything()
	case j.changedOnly:
		plan = p.Narrow(w.change)
	default:
		plan = p.Full()
	}
	defer s.passedOver(plan)
	stderr := cmd.ErrOrStderr()
	if j.verbose {
		fmt.Fprintf(stderr, "kernel filters: %s\n", p.Features)
		fmt.Fprintf(stderr, "plan: %s over %s, estimated %s\n", queries(len(plan.Queries)),
			plural(p.Flows, "flow"), plan.Estimate.Round(10*time.Microsecond))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !j.dryRun {
		// A reader that goes away must not keep flows from being deleted: with the
		// signal caught, the write fails instead.
		pipe := make(chan os.Signal, 1)
		signal.Notify(pipe, syscall.SIGPIPE)
		defer signal.Stop(pipe)
	}
	if j.cluster.given() && !j.dryRun {
		if w.both.look, err = j.again(ctx, cmd, conn, plan, w.table); err != nil {
			return err
		}
	}
	var werr error
	var listed listed // a flow may be met by several passes
	var gone deleted
	sw := sweep.Sweeper{Conn: conn, Judge: w.judge(), DryRun: j.dryRun, Late: &sweep.LateAnswers{}}
	sw.OnFlow = func(f *conntrack.Flow, v frontend.Verdict) {
		if v.Action == frontend.Delete && !j.dryRun {
			gone.add(f)
		}
		if (j.all || v.Action == frontend.Delete) && werr == nil && listed.news(f, v) {
			if werr = out.flow(0, f, v); werr != nil && j.dryRun {
				cancel() // nobody reads any more, and there is nothing else to do
			}
		}
	}
	var r sweep.Report
	if w.rules != nil {
		r, err = w.rules.passes(ctx, &sw, plan)
		w.rules.tell(s, stderr)
	} else {
		r, err = w.both.run(ctx, &sw, plan)
		w.both.tell(s)
	}
	s.add(&r)
	if err == nil && s.Deleted > 0 {
		err = gone.back(ctx, conn, &sw, r.Late, s)
	}
	if j.verbose {
		for _, q := range r.Queries {
			fmt.Fprintf(stderr, "  %s: returned %d, wanted %d, %s\n", q.Query, q.Returned, q.Wanted,
				q.Duration.Round(10*time.Microsecond))
		}
	}
	for _, e := range r.Errs {
		fmt.Fprintf(stderr, "flowsweep: warning: %v\n", e)
	}
	return cmp.Or(werr, err)
}

// again judges all flows by what the cluster was, reads the cluster once more, and
// returns the judge that deletes what is stale by both. A flow that came between
// may go to a backend that came between.
func (j *judging) again(ctx context.Context, cmd *cobra.Command, conn sweep.Conn, plan sweep.Plan, t *frontend.Table) (sweep.Judge, error) {
	seen := map[translation]bool{}
	first := sweep.Sweeper{Conn: conn, Judge: t, DryRun: true}
	first.OnFlow = func(f *conntrack.Flow, v frontend.Verdict) {
		if v.Action == frontend.Delete {
			seen[translationOf(f)] = true
		}
	}
	if _, err := first.Run(ctx, plan); err != nil {
		return nil, err
	}
	if len(seen) == 0 {
		return confirmed{t, seen}, nil
	}
	cmd.SetErr(io.Discard) // what does not count was said
	defer cmd.SetErr(nil)
	w, err := j.loadState(cmd)
	if err != nil {
		return nil, err
	}
	return confirmed{w.table, seen}, nil
}

// translation is where flows were sent and where they go.
type translation struct {
	proto    uint8
	dst, src netip.AddrPort
}

func translationOf(f *conntrack.Flow) translation {
	return translation{
		f.Proto, netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort),
	}
}

// confirmed deletes what is stale now and was when it was seen.
type confirmed struct {
	table *frontend.Table
	seen  map[translation]bool
}

// Judge implements sweep.Judge.
func (c confirmed) Judge(f *conntrack.Flow) frontend.Verdict {
	v := c.table.Judge(f)
	if v.Action == frontend.Delete && !c.seen[translationOf(f)] {
		v.Action, v.Reason = frontend.Keep, frontend.Unconfirmed
	}
	return v
}

func queries(n int) string {
	if n == 1 {
		return "1 query"
	}
	return fmt.Sprintf("%d queries", n)
}
