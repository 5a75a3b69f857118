//go:build e2e && linux

package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/frontend"
)

// reportFile is where the report is left.
const reportFile = binaries + "/report.md"

// report collects what was measured, from tests that run at once.
type report struct {
	mu        sync.Mutex
	rows      []*row
	judged    map[string]*tally // by mode
	differing []differing
	text      strings.Builder // below the tables
}

// caseKey says which case, in which mode.
type caseKey struct{ name, mode string }

// row is a line of the first table, and of the second where it was measured with settling by time.
type row struct {
	caseKey
	what     string
	measures map[settling]measure
}

// measure is what became of a stream.
type measure struct {
	by       settling
	outcomes []outcome
	rules    time.Duration // from the change to the first commit of rules
	did      string        // instead of outcomes, where nothing was to be repaired
}

// tally counts what both judges said of flows.
type tally struct{ times, flows, both, stale, differ int }

// differing is a stream that the judges disagree about.
type differing struct {
	caseKey
	difference
}

// add notes a measure. What is measured again for the same frontend in the same case is a row of its
// own, in the same order without and with flowsweep.
func (r *report) add(key caseKey, what string, m measure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range r.rows {
		if _, measured := row.measures[m.by]; !measured && row.caseKey == key && row.what == what {
			row.measures[m.by] = m
			return
		}
	}
	r.rows = append(r.rows, &row{key, what, map[settling]measure{m.by: m}})
}

// compared notes what both judges said of every flow at a time.
func (r *report) compared(key caseKey, list []opinions, differences map[translation]difference) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.judged == nil {
		r.judged = map[string]*tally{}
	}
	n := r.judged[key.mode]
	if n == nil {
		n = &tally{}
		r.judged[key.mode] = n
	}
	n.times++
	for _, o := range list {
		n.flows++
		if o.table.Action() != frontend.Ignore && o.rules.Action() != frontend.Ignore {
			n.both++
		}
		switch {
		case !o.agree():
			n.differ++
		case condemns(o.table):
			n.stale++
		}
	}
	for _, d := range differences {
		if x := (differing{key, d}); !slices.Contains(r.differing, x) {
			r.differing = append(r.differing, x)
		}
	}
}

// note adds a line below the table.
func (r *report) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(&r.text, format+"\n", args...)
}

// write prints the report into the test's log and leaves it in a file.
func (r *report) write(t testing.TB) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.SortStableFunc(r.rows, func(a, b *row) int { return a.compare(b.caseKey) })
	slices.SortFunc(r.differing, func(a, b differing) int {
		return cmp.Or(a.compare(b.caseKey), strings.Compare(a.what, b.what))
	})
	var b strings.Builder
	b.WriteString("| case | flows to | mode | kube-proxy alone | with flowsweep: deleted by it " +
		"| rules after, ms | repaired after, ms | lost |\n|---|---|---|---|---|---|---|---|\n")
	for _, row := range r.rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", row.name, row.what, row.mode,
			row.measures[noAgent].left(), row.measures[byRules].columns())
	}
	b.WriteString("\nSettling by the rules and by time:\n\n" +
		"| case | flows to | mode | kube-proxy alone | by rules: deleted | repaired after, ms " +
		"| by time: deleted | repaired after, ms |\n|---|---|---|---|---|---|---|---|\n")
	for _, row := range r.rows {
		if timed, ok := row.measures[byTime]; ok {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", row.name, row.what, row.mode,
				row.measures[noAgent].left(), row.measures[byRules].repair(), timed.repair())
		}
	}
	b.WriteString("\nBoth judges, by the objects and by the rules, before and after each change:\n\n" +
		"| mode | times | flows | judged by both | stale by both | they differ |\n|---|---|---|---|---|---|\n")
	for _, mode := range slices.Sorted(maps.Keys(r.judged)) {
		n := r.judged[mode]
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d |\n", mode, n.times, n.flows, n.both, n.stale, n.differ)
	}
	b.WriteString("\n| case | flows to | mode | by the objects | by the rules | because |\n|---|---|---|---|---|---|\n")
	for _, d := range r.differing {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", d.name, d.what, d.mode,
			verdict(d.table), verdict(d.rules), d.why)
	}
	if r.text.Len() > 0 {
		b.WriteString("\n" + r.text.String())
	}
	t.Log("\n" + b.String())
	must(t, os.WriteFile(reportFile, []byte(b.String()), 0o644))
}

// compare orders by the cases as they are listed, nftables first.
func (k caseKey) compare(o caseKey) int {
	place := func(name string) int {
		return slices.IndexFunc(cases, func(c testCase) bool { return c.name == name })
	}
	return cmp.Or(cmp.Compare(place(k.name), place(o.name)), strings.Compare(o.mode, k.mode))
}

// left says what kube-proxy did without flowsweep.
func (m measure) left() string {
	if m.did != "" || len(m.outcomes) == 0 {
		return m.did
	}
	var stale int
	for _, o := range m.outcomes {
		if !o.right {
			stale++
		}
	}
	if stale > 0 {
		return fmt.Sprintf("left %d of %d", stale, len(m.outcomes))
	}
	return "cleaned after " + each(m.outcomes, outcome.millis) + " ms"
}

// columns says what happened with flowsweep, in four columns.
func (m measure) columns() string {
	switch {
	case m.did == "" && len(m.outcomes) == 0:
		return " | | | "
	case m.did != "":
		return m.did + " | - | - | -"
	}
	return strings.Join([]string{
		each(m.outcomes, outcome.deletes),
		fmt.Sprint(max(0, m.rules.Milliseconds())),
		each(m.outcomes, outcome.millis),
		each(m.outcomes, func(o outcome) string {
			if o.lost < 0 {
				return "-"
			}
			return fmt.Sprint(o.lost)
		}),
	}, " | ")
}

// repair says how often flowsweep deleted flows, and when they were right, in two columns.
func (m measure) repair() string {
	return each(m.outcomes, outcome.deletes) + " | " + each(m.outcomes, outcome.millis)
}

func (o outcome) deletes() string { return fmt.Sprint(o.deleted) }

func (o outcome) millis() string {
	if !o.right {
		return "never"
	}
	return fmt.Sprint(max(0, o.took.Milliseconds()))
}

// each lists a value of each family's sender, IPv4 first.
func each(list []outcome, value func(outcome) string) string {
	var s []string
	for _, o := range list {
		s = append(s, value(o))
	}
	return strings.Join(s, " / ")
}
