//go:build engines && linux

package engines

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// reportFile is where the report is left.
const reportFile = "../../bin/engines/report.md"

// report collects what was left and swept, and what the agent has repaired.
type report struct {
	rows    []row
	repairs []repair
}

// repair is a line of the agent's table.
type repair struct {
	name, engine string
	reasons      map[string]int
	took         []time.Duration // for each flow, where there are some for certain
	commits      int             // in the case so far
}

func (r *report) repair(s *scene, stale map[string]string, took []time.Duration) {
	reasons := map[string]int{}
	for _, reason := range stale {
		reasons[reason]++
	}
	r.repairs = append(r.repairs, repair{s.name, s.engine, reasons, took, s.commits.since(s.began)})
}

// row is a line of the table.
type row struct {
	name, engine string
	streams      int
	stale        map[string]int // by reason
	took         time.Duration  // of the sweep, with the program's start
}

func (r *report) add(row row) { r.rows = append(r.rows, row) }

// write prints the report into the test's log and leaves it in a file.
func (r *report) write(t testing.TB) {
	t.Helper()
	var b strings.Builder
	b.WriteString("| engine | case | streams | left stale by the engine | flowsweep |\n|---|---|---|---|---|\n")
	for _, row := range r.rows {
		did := "deletes nothing"
		if n := row.deleted(); n > 0 {
			did = fmt.Sprintf("deletes %d in %d ms", n, row.took.Milliseconds())
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %s |\n", row.engine, row.name, row.streams, counted(row.stale), did)
	}
	b.WriteString("\n| engine | case beside the agent | commits | it deletes | after the last commit, or its start |\n" +
		"|---|---|---|---|---|\n")
	for _, x := range r.repairs {
		after := ""
		if len(x.took) > 0 {
			after = fmt.Sprintf("%d to %d ms", slices.Min(x.took).Milliseconds(), slices.Max(x.took).Milliseconds())
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %s |\n", x.engine, x.name, x.commits, counted(x.reasons), after)
	}
	t.Log("\n" + b.String())
	must(t, os.MkdirAll(filepath.Dir(reportFile), 0o755))
	must(t, os.WriteFile(reportFile, []byte(b.String()), 0o644))
}

// counted writes "2 backend-gone, 1 untranslated".
func counted(reasons map[string]int) string {
	var parts []string
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		parts = append(parts, fmt.Sprintf("%d %s", reasons[reason], reason))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func (r row) deleted() int {
	n := 0
	for _, k := range r.stale {
		n += k
	}
	return n
}
