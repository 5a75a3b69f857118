//go:build e2e && linux

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// reportFile is where the report is left.
const reportFile = binaries + "/report.md"

// report collects what was measured, from tests that run at once.
type report struct {
	mu   sync.Mutex
	rows []*row
	text strings.Builder // below the table
}

// caseKey says which case, in which mode.
type caseKey struct{ name, mode string }

// row is a line of the table.
type row struct {
	caseKey
	what         string
	alone, swept *measure
}

// measure is what became of a stream.
type measure struct {
	alone    bool
	outcomes []outcome
	rules    time.Duration // from the change to the first commit of rules
	did      string        // instead of outcomes, where nothing was to be repaired
}

// add notes a measure. What is measured again for the same frontend in the same case is a row of its
// own, in the same order without and with flowsweep.
func (r *report) add(key caseKey, what string, m measure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range r.rows {
		if row.caseKey == key && row.what == what && *row.of(m.alone) == nil {
			*row.of(m.alone) = &m
			return
		}
	}
	row := &row{caseKey: key, what: what}
	*row.of(m.alone) = &m
	r.rows = append(r.rows, row)
}

func (r *row) of(alone bool) **measure {
	if alone {
		return &r.alone
	}
	return &r.swept
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
	slices.SortStableFunc(r.rows, func(a, b *row) int {
		if a.name != b.name {
			return slices.IndexFunc(cases, func(c testCase) bool { return c.name == a.name }) -
				slices.IndexFunc(cases, func(c testCase) bool { return c.name == b.name })
		}
		return strings.Compare(b.mode, a.mode) // nftables first
	})
	var b strings.Builder
	b.WriteString("| case | flows to | mode | kube-proxy alone | with flowsweep: deleted by it " +
		"| rules after, ms | repaired after, ms | lost |\n|---|---|---|---|---|---|---|---|\n")
	for _, row := range r.rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", row.name, row.what, row.mode, row.alone.left(), row.swept.columns())
	}
	if r.text.Len() > 0 {
		b.WriteString("\n" + r.text.String())
	}
	t.Log("\n" + b.String())
	must(t, os.WriteFile(reportFile, []byte(b.String()), 0o644))
}

// left says what kube-proxy did without flowsweep.
func (m *measure) left() string {
	if m == nil {
		return ""
	}
	if m.did != "" {
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
func (m *measure) columns() string {
	switch {
	case m == nil:
		return " | | | "
	case m.did != "":
		return m.did + " | - | - | -"
	}
	return strings.Join([]string{
		each(m.outcomes, func(o outcome) string { return fmt.Sprint(o.deleted) }),
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
