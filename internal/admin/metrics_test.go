package admin

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

var update = flag.Bool("update", false, "rewrite testdata and docs/metrics.md")

func scriptedStatus() agent.Status {
	at := func(clock string) time.Time {
		t, err := time.Parse(time.TimeOnly, clock)
		if err != nil {
			panic(err)
		}
		return t.AddDate(2026, 10, 13)
	}
	return agent.Status{
		Time: at("12:00:00"), Started: at("09:00:00"), Ready: true, Frontends: 1204, Tombstones: 3,
		Sources: []agent.SourceStatus{
			{Name: "host", Complete: true, Updated: at("09:00:01")},
			{Name: "static", Complete: true, Updated: at("11:59:58"), Frontends: 1204, Fault: "no such file", Held: "since then"},
			{Name: "kubernetes", Fault: "no connection"},
		},
		Settling: "generation",
		Unsettled: []agent.Unsettled{{
			Frontend: "203.0.113.10:53/UDP", Owner: "default/dns:udp", Causes: []string{"backend-lost"},
			Changed: at("11:59:48"), Opened: at("11:59:50"),
		}},
		UnsettledTotal: 2,
		Disagrees: []*agent.Disagreement{{
			Frontend: "203.0.113.10:53/UDP", Owner: "default/dns:udp", Backend: netip.MustParseAddrPort("198.51.100.19:53"),
			Since: at("11:50:00"), Passes: 10, Evidence: "udp 17 29",
		}},
		LastFull: at("11:57:30").Add(250 * time.Millisecond),
		LastPass: &agent.PassStatus{Start: at("11:59:59"), Returned: 2, Judged: 2, DurationMs: 1.5},
		Failures: 1, StateFile: "disk full",
	}
}

// scriptedPasses is a full pass that finds something of each family, a narrow
// one during which the hash table is resized, one that fails and one that the
// agent's end interrupts.
func scriptedPasses() []agent.Pass {
	query := func(fam conntrack.Family, walks int, d, deleting time.Duration) sweep.QueryReport {
		q := sweep.QueryReport{Walks: walks, Duration: d, Deleting: deleting}
		q.Filter.Family = fam
		return q
	}
	full := sweep.Report{
		Queries: []sweep.QueryReport{
			query(conntrack.IPv4, 1, 300*time.Millisecond, 60*time.Millisecond),
			query(conntrack.IPv6, 1, 3*time.Millisecond, 0),
		},
		Returned: 1000, Judged: 900, Malformed: 1, Duration: 303 * time.Millisecond,
		DeleteResult: conntrack.DeleteResult{Deleted: 40, Gone: 3, Busy: 2, Failed: 1},
		Classes: map[sweep.Class]conntrack.DeleteResult{
			{Family: conntrack.IPv4, Reason: frontend.BackendGone, Kind: frontend.ClusterIP}: {Deleted: 30, Gone: 3, Busy: 2, Failed: 1},
			{Family: conntrack.IPv4, Reason: frontend.Untranslated, Kind: frontend.NodePort}: {Deleted: 9},
			{Family: conntrack.IPv6, Reason: frontend.FrontendGone, Kind: frontend.Static}:   {Deleted: 1},
		},
	}
	full.Verdicts[frontend.NoFrontend] = 100
	full.Verdicts[frontend.Serving] = 754
	full.Verdicts[frontend.BackendGone] = 36
	full.Verdicts[frontend.Untranslated] = 9
	full.Verdicts[frontend.FrontendGone] = 1
	narrow := sweep.Report{
		Queries:  []sweep.QueryReport{query(conntrack.IPv4, 3, 900*time.Microsecond, 0)},
		Returned: 5, Judged: 5, Duration: time.Millisecond,
	}
	narrow.Verdicts[frontend.Serving] = 5
	return []agent.Pass{
		{Full: true, Report: full},
		{Report: narrow},
		{Err: errors.New("operation not permitted")},
		{Full: true, Err: fmt.Errorf("dump: %w", context.Canceled)},
	}
}

// page returns the whole page but for what the collectors of the Go runtime and
// of the process say.
func page(t *testing.T, s *Server) string {
	t.Helper()
	l := newPipe(loopback4, loopback4)
	start(t, s, l, nil)
	for {
		got := ask(t, l, "GET", "/metrics")
		if got.code != 200 {
			t.Fatalf("%d: %s", got.code, got.body)
		}
		if s.table.stats != nil && !strings.Contains(got.body, "\nflowsweep_table_entries ") {
			time.Sleep(time.Millisecond) // asked in the background
			continue
		}
		if problems, err := promlint.New(strings.NewReader(got.body)).Lint(); err != nil || len(problems) > 0 {
			t.Errorf("promlint: %v %v", problems, err)
		}
		return regexp.MustCompile(`(?m)^(# [A-Z]+ )?(go|process)_.*\n`).ReplaceAllString(got.body, "")
	}
}

func scriptedPage(t *testing.T) string {
	m := NewMetrics()
	for _, p := range scriptedPasses() {
		m.Pass(p)
	}
	m.Settled(agent.Settled{After: 63 * time.Second, Repaired: 40 * time.Millisecond})
	m.Settled(agent.Settled{After: 61 * time.Second})
	return page(t, New(Options{
		Agent: &fakeAgent{status: scriptedStatus()}, Metrics: m, Version: "v1.2.3",
		Table: func(context.Context) (int, int, error) { return 4711, 262144, nil },
	}))
}

// same compares with a file, which -update writes.
func same(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update rewrites it); got\n%s", file, got)
	}
}

func TestMetricsPage(t *testing.T) {
	same(t, "testdata/metrics.txt", scriptedPage(t))
}

// Every series whose labels are known is there before anything has happened.
func TestSeriesFromTheStart(t *testing.T) {
	names := func(page string) (list []string) {
		for line := range strings.Lines(page) {
			if !strings.HasPrefix(line, "#") {
				list = append(list, line[:strings.LastIndex(line, " ")])
			}
		}
		return list
	}
	first := names(page(t, New(Options{Agent: &fakeAgent{status: scriptedStatus()}, Metrics: NewMetrics(), Version: "v1.2.3"})))
	for _, series := range names(scriptedPage(t)) {
		if !slices.Contains(first, series) && !strings.HasPrefix(series, "flowsweep_table_") {
			t.Errorf("%s comes only with its first event", series)
		}
	}
}

// An agent that has not begun shows no times.
func TestAbsentUntilKnown(t *testing.T) {
	got := page(t, New(Options{Agent: &fakeAgent{status: agent.Status{Sources: []agent.SourceStatus{{Name: "static"}}}}}))
	for _, name := range []string{
		"flowsweep_last_full_pass_timestamp_seconds", "flowsweep_source_updated_timestamp_seconds", "flowsweep_table_entries",
	} {
		if strings.Contains(got, name) {
			t.Errorf("%s is shown", name)
		}
	}
	for _, line := range []string{"flowsweep_ready 0", `flowsweep_source_complete{source="static"} 0`} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("%q is not in\n%s", line, got)
		}
	}
}

var (
	helpLine   = regexp.MustCompile(`^# HELP (\S+) (.*)$`)
	typeLine   = regexp.MustCompile(`^# TYPE (\S+) (\S+)$`)
	labelNames = regexp.MustCompile(`[{,]([a-z_]+)="`)
	metricName = regexp.MustCompile(`\bflowsweep_[a-z_]+[a-z]\b`)
	suffix     = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// docs/metrics.md has a row for each metric, made from what /metrics says of it,
// and names no other metric.
func TestDocumented(t *testing.T) {
	const begin, end = "<!-- begin: made from /metrics -->\n", "<!-- end -->\n"
	var rows strings.Builder
	rows.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	var name, help, typ string
	known := map[string]bool{}
	for line := range strings.Lines(scriptedPage(t)) {
		line = strings.TrimSpace(line)
		if m := helpLine.FindStringSubmatch(line); m != nil {
			name, help = m[1], m[2]
			continue
		}
		if m := typeLine.FindStringSubmatch(line); m != nil {
			typ = m[2]
			continue
		}
		if known[name] { // the first series shows the labels
			continue
		}
		known[name] = true
		var labels []string
		for _, m := range labelNames.FindAllStringSubmatch(line, -1) {
			if m[1] != "le" {
				labels = append(labels, "`"+m[1]+"`")
			}
		}
		fmt.Fprintf(&rows, "| `%s` | %s | %s | %s |\n", name, typ, strings.Join(labels, ", "), help)
	}
	const file = "../../docs/metrics.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the metrics", file)
	}
	same(t, file, before+begin+rows.String()+end+after)
	for _, m := range metricName.FindAllString(before+after, -1) {
		if !known[m] && !known[suffix.ReplaceAllString(m, "")] {
			t.Errorf("%s names %s, which there is not", file, m)
		}
	}

	_, block, _ := strings.Cut(after, "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	var alerts struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For string
				Annotations      struct{ Summary string }
			}
		}
	}
	if err := yaml.UnmarshalStrict([]byte(block), &alerts); err != nil || len(alerts.Groups) != 1 {
		t.Fatalf("%s: the alerts: %v", file, err)
	}
	for _, r := range alerts.Groups[0].Rules {
		if r.Alert == "" || r.Annotations.Summary == "" || !metricName.MatchString(r.Expr) {
			t.Errorf("%s: %+v is no alert", file, r)
		}
	}
}
