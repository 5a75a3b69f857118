//go:build linux

// Command bench measures flowsweep beside the kernel's floor and its peers, on
// the same conntrack table, in a network namespace of its own:
//
//	cd bench && go run .
//
// It needs root for tables larger than nf_conntrack_max; without, user namespaces
// are enough, and what is larger is skipped. It takes about half an hour, and a
// machine that does nothing else. docs/performance.md is made from what it prints.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
)

// The parts of the benchmark.
const (
	partTable   = "table"
	partLatency = "latency"
	partScale   = "scale"
)

type options struct {
	sizes    []int
	runs     int
	parts    []string
	match    *regexp.Regexp
	results  string
	render   bool
	docs     string
	profiles string
	program  string // flowsweep
	inside   bool   // this process is in the namespace made for it
	child    string // the work to be done in this process

	start time.Time
}

func parseFlags() (*options, error) {
	o := &options{start: time.Now(), match: regexp.MustCompile("")}
	sizes := flag.String("sizes", "10000,100000,1000000", "how many `flows` a table has: one size or several")
	parts := flag.String("parts", "scale,latency,table", "what is measured: some of these `parts`")
	flag.IntVar(&o.runs, "runs", 5, "how often each figure is measured")
	flag.Func("match", "measure only what has a `name` like this regular expression", func(s string) (err error) {
		o.match, err = regexp.Compile(s)
		return err
	})
	flag.StringVar(&o.results, "results", "", "write all samples to this `file`")
	flag.BoolVar(&o.render, "render", false, "measure nothing: read -results, and print")
	flag.StringVar(&o.docs, "docs", "", "update performance.md and performance.svg in this `folder`")
	flag.StringVar(&o.profiles, "profiles", "", "write CPU and heap profiles into this `folder`")
	flag.StringVar(&o.program, "flowsweep", "", "the `program` to measure, instead of one built here")
	flag.BoolVar(&o.inside, "inside", false, "of the benchmark's own use")
	flag.StringVar(&o.child, "child", "", "of the benchmark's own use")
	flag.Parse()
	for _, s := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("-sizes: %q is not a number of flows", s)
		}
		o.sizes = append(o.sizes, n)
	}
	for _, p := range strings.Split(*parts, ",") {
		if !slices.Contains([]string{partTable, partLatency, partScale}, p) {
			return nil, fmt.Errorf("-parts: %q is none of table, latency, scale", p)
		}
		o.parts = append(o.parts, p)
	}
	if o.runs < 1 {
		return nil, errors.New("-runs must be 1 or more")
	}
	return o, nil
}

func main() {
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		code = 1
	}
	os.Exit(code)
}

func run() (code int, err error) {
	o, err := parseFlags()
	if err != nil {
		return 2, err
	}
	switch {
	case o.child != "":
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		err := child(ctx, o)
		if ctx.Err() != nil {
			return 1, nil // the parent has said it
		}
		return 0, err
	case o.render:
		r, err := readResults(o.results)
		if err != nil {
			return 1, err
		}
		return 0, r.report(o)
	case o.inside:
		return inside(o)
	}
	return outside(o)
}

// outside prepares what needs the namespace that the benchmark was started in,
// runs it in one of its own, and puts everything back.
func outside(o *options) (code int, err error) {
	// From here on a signal must not end this process before it has cleaned up. The
	// one that Reexec starts gets it too, and ends.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGHUP, unix.SIGINT, unix.SIGTERM)

	if o.program == "" {
		dir, err := os.MkdirTemp("", "flowsweep-bench-")
		if err != nil {
			return 1, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		o.program = filepath.Join(dir, "flowsweep")
		build := exec.Command("go", "build", "-C", "..", "-o", o.program, "./cmd/flowsweep")
		if out, err := build.CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build flowsweep (is this run in its folder bench?): %w: %s", err, out)
		}
	}
	if largest := slices.Max(o.sizes); slices.Contains(o.parts, partTable) || slices.Contains(o.parts, partLatency) {
		restore, refused := raiseLimit(largest + largest/10)
		if refused != nil {
			fmt.Fprintln(os.Stderr, refused) // inside, it will show which sizes can be had
		} else {
			defer func() { err = errors.Join(err, restore()) }()
		}
	}
	select {
	case s := <-signals:
		return 1, fmt.Errorf("ended by %s", s)
	default:
	}
	os.Args = append(os.Args, "-inside", "-flowsweep", o.program)
	code, done, err := testnet.Reexec()
	if err == nil && !done {
		err = errors.New("started by another one, in its namespace: start it anew")
	}
	return code, err
}

// inside measures, in a namespace that holds nothing else.
func inside(o *options) (int, error) {
	if _, done, err := testnet.Reexec(); err != nil || done {
		return 1, cmp.Or(err, errors.New("-inside is for the benchmark's own use"))
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGHUP, unix.SIGINT, unix.SIGTERM)
	defer stop()
	if o.profiles != "" {
		if err := os.MkdirAll(o.profiles, 0o755); err != nil {
			return 1, err
		}
	}
	r := &results{Machine: thisMachine(), Started: time.Now().UTC().Truncate(time.Second), Runs: o.runs}
	err := r.measure(ctx, o)
	if o.results != "" { // also what there is of a run that was cut short
		err = errors.Join(err, r.write(o.results))
	}
	if err != nil {
		return 1, err
	}
	return 0, r.report(o)
}

func (r *results) measure(ctx context.Context, o *options) error {
	sizes, err := r.possible(o)
	if err != nil {
		return err
	}
	for _, part := range o.parts {
		switch part {
		case partScale:
			err = r.measureScale(ctx, o)
		case partLatency:
			if len(sizes) > 0 && o.match.MatchString("latency/") {
				var list []figures
				list, err = measureLatency(ctx, o, slices.Max(sizes))
				r.Figures = append(r.Figures, list...)
			}
		case partTable:
			for _, n := range sizes {
				if err = r.measureTable(ctx, o, n); err != nil {
					break
				}
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
	}
	return nil
}

// possible returns the sizes that a table may have here.
func (r *results) possible(o *options) (sizes []int, err error) {
	c, err := conntrack.Dial(conntrack.Config{})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	limit, err := c.Max(context.Background())
	if err != nil {
		return nil, err
	}
	for _, n := range o.sizes {
		if limit > 0 && n > limit {
			r.Skipped = append(r.Skipped, fmt.Sprintf("%d flows: nf_conntrack_max is %d, and raising it takes root", n, limit))
			continue
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// measureTable fills a table and measures all works in turn, run by run, so that
// whatever slows the machine for a while slows no work alone.
func (r *results) measureTable(ctx context.Context, o *options, size int) error {
	ns, err := testnet.New()
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }() // and with it go its flows
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		return err
	}
	defer c.Close()
	o.progress("%d flows: filling the table", size)
	if err := fill(ctx, c, size, nil); err != nil {
		return err
	}
	var list []work
	for _, w := range works(o) {
		if o.match.MatchString(w.name) && (w.most == 0 || size <= w.most) {
			list = append(list, w)
		}
	}
	first := len(r.Figures)
	for _, w := range list {
		r.Figures = append(r.Figures, figures{Work: w.name, Size: size})
	}
	for run := range o.runs {
		for i, w := range list {
			s, err := inChild(ctx, ns, o, w.name, size)
			if err != nil {
				return err
			}
			o.progress("%d flows, run %d of %d: %s: %s", size, run+1, o.runs, w.name, duration(s.Seconds))
			left, err := c.Count(ctx)
			if err != nil {
				return err
			}
			if want := size - count(size, w.deletes); left != want {
				return fmt.Errorf("%s left %d flows in the table instead of %d", w.name, left, want)
			}
			if w.deletes != nil {
				s.count("deleted", float64(size-left))
				if err := fill(ctx, c, size, w.deletes); err != nil {
					return fmt.Errorf("after %s: %w", w.name, err)
				}
			}
			r.Figures[first+i].Samples = append(r.Figures[first+i].Samples, s)
		}
	}
	return nil
}

func (r *results) measureScale(ctx context.Context, o *options) error {
	ns, err := testnet.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	for _, w := range scaleWorks(o) {
		if !o.match.MatchString(w.name) {
			continue
		}
		o.progress("%s", w.name)
		s, err := inChild(ctx, ns, o, w.name, 0)
		if err != nil {
			return err
		}
		r.Figures = append(r.Figures, figures{Work: w.name, Samples: []sample{s}})
	}
	return nil
}

// progress says on standard error what is going on.
func (o *options) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%8s  %s\n", time.Since(o.start).Truncate(time.Second), fmt.Sprintf(format, args...))
}
