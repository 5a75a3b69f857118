package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/agent"
)

const (
	// adminAddress is where an agent listens that is told nothing else.
	adminAddress = "127.0.0.1:9633"

	statusTimeout = 5 * time.Second
	statusBytes   = 16 << 20
	// statusRows is how many unsettled frontends are listed for people.
	statusRows = 20
)

func newStatus() *cobra.Command {
	var address, output string
	outputs := []string{"table", "json", "yaml"}
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what the running agent knows and does",
		Long: `status asks the agent of this host how it fares: its sources, which frontends are
not settled and since when, where the rules disagree with the desired state, and
what the last pass did. It ends with 1 where no agent answers.`,
		Example: `  flowsweep status
  flowsweep status -o json | jq .rulesetDisagrees`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains(outputs, output) {
				return usagef("--output: %q is none of %s", output, strings.Join(outputs, ", "))
			}
			if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
				return usagef("--address: %q is not HOST:PORT", address)
			}
			s, body, err := askStatus(cmd.Context(), address)
			if err != nil {
				return err
			}
			switch output {
			case "json":
			case "yaml":
				if body, err = yaml.JSONToYAML(body); err != nil {
					return err
				}
			default:
				body = statusText(s)
			}
			_, err = cmd.OutOrStdout().Write(body)
			return err
		},
	}
	f := c.Flags()
	f.StringVar(&address, "address", adminAddress, "where the agent listens, `HOST:PORT`")
	f.StringVarP(&output, "output", "o", "table", "table, json or yaml")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(outputs, cobra.ShellCompDirectiveNoFileComp))
	return c
}

// askStatus returns the status of the agent at an address, and as the agent wrote
// it: a newer one may tell more than this program knows.
func askStatus(ctx context.Context, address string) (*agent.Status, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	u := url.URL{Scheme: "http", Host: address, Path: "/statusz"}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return nil, nil, usagef("--address: %w", err)
	}
	client := http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true}, // and no proxy
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	res, err := client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, nil, fmt.Errorf("no agent answers at %s: %w; is \"flowsweep run\" running, "+
			"and is that the admin.listen of its configuration?", address, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, statusBytes))
	if err != nil {
		return nil, nil, fmt.Errorf("the answer of the agent at %s: %w", address, err)
	}
	switch res.StatusCode {
	case http.StatusOK:
	case http.StatusForbidden:
		return nil, nil, fmt.Errorf("the agent at %s shows its status on its own host only; ask it there, "+
			"or set admin.statusAnywhere in its configuration", address)
	default:
		return nil, nil, fmt.Errorf("what listens at %s has no status of an agent (%s); "+
			"give admin.listen of the agent's configuration, not admin.metricsListen", address, res.Status)
	}
	var s agent.Status
	if err := json.Unmarshal(body, &s); err != nil {
		return nil, nil, fmt.Errorf("what listens at %s is no agent: its answer is no status: %w", address, err)
	}
	return &s, body, nil
}

// statusText is a status for people, 80 columns wide where its words allow.
func statusText(s *agent.Status) []byte {
	t := &statusPage{now: s.Time}
	t.summary(s)
	t.sources(s)
	t.unsettled(s)
	t.disagrees(s)
	return []byte(printable(t.String()))
}

type statusPage struct {
	strings.Builder
	now time.Time // the agent's
}

// fact writes a name and what is to be said of it.
func (t *statusPage) fact(name, format string, args ...any) {
	t.wrap(fmt.Sprintf("%-11s ", name), strings.Repeat(" ", 12), fmt.Sprintf(format, args...))
}

// wrap writes words in lines of 80 columns.
func (t *statusPage) wrap(first, next, text string) {
	line := first
	begun := false
	for _, word := range strings.Fields(text) {
		if begun && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > lineWidth {
			t.WriteString(line + "\n")
			line, begun = next, false
		}
		if begun {
			line += " "
		}
		line, begun = line+word, true
	}
	t.WriteString(line + "\n")
}

// ago tells for how long something is so.
func (t *statusPage) ago(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	d := max(0, t.now.Sub(at)).Truncate(time.Second)
	h, m, s := int(d.Hours()), int(d.Minutes())%60, int(d.Seconds())%60
	switch {
	case h >= 24:
		return fmt.Sprintf("%dd%dh", h/24, h%24)
	case h > 0:
		return fmt.Sprintf("%dh%dm", h, m)
	case m > 0:
		return fmt.Sprintf("%dm%ds", m, s)
	}
	return fmt.Sprintf("%ds", s)
}

func (t *statusPage) summary(s *agent.Status) {
	if s.NotReady != "" || !s.Ready {
		t.fact("ready", "no: %s", s.NotReady)
	} else {
		t.fact("ready", "yes")
	}
	t.fact("up", "%s", t.ago(s.Started))
	if s.DryRun {
		t.fact("dry run", "yes: nothing is deleted")
	}
	switch {
	case s.ByRules && s.RulesFault != "":
		t.fact("judging", "nothing: %s", s.RulesFault)
	case s.ByRules:
		t.fact("judging", "by the NAT rules: no desired state is given")
	default:
		t.fact("frontends", "%d, and %s", s.Frontends, plural(s.Tombstones, "tombstone"))
	}
	switch {
	case s.ByRules:
	case s.Settling == "rules":
		t.fact("settling", "by the NAT rules")
	case s.Settling == "generation":
		t.fact("settling", "by the ruleset's generation")
	default:
		t.fact("settling", "by time: commits to the rules cannot be seen")
	}
	if !s.ByRules && s.RulesFault != "" {
		t.fact("NAT rules", "not asked: %s", s.RulesFault)
	}
	for _, w := range s.Warnings {
		t.fact("warning", "%s", w)
	}
	if p := s.LastPass; p != nil {
		kind := "narrow"
		if p.Full {
			kind = "full"
		}
		t.fact("last pass", "%s, %s ago, %.1f ms: %d judged of %d returned, %d stale, %d deleted, %d gone, %d busy, %d failed",
			kind, t.ago(p.Start), p.DurationMs, p.Judged, p.Returned, p.Stale, p.Deleted, p.Gone, p.Busy, p.Failed)
		if p.Error != "" {
			t.fact("error", "%s", p.Error)
		}
	}
	if s.Failures > 0 {
		t.fact("failing", "%s in a row", plural(s.Failures, "time"))
	}
	if s.LastFull.IsZero() {
		t.fact("full pass", "none yet")
	} else {
		t.fact("full pass", "%s ago", t.ago(s.LastFull))
	}
	if s.StateFile != "" {
		t.fact("state file", "not written: %s", s.StateFile)
	}
}

// rows writes aligned columns under a head, or where they do not fit, each row in
// lines of its own. After row i come the lines that more(i) writes.
func (t *statusPage) rows(head []string, rows [][]string, more func(i int)) {
	widths := make([]int, len(head))
	for _, row := range append([][]string{head}, rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	total := 2 * (len(head) - 1)
	for _, w := range widths {
		total += w
	}
	t.WriteByte('\n')
	if total > lineWidth {
		t.WriteString(head[0] + "\n")
		for i, row := range rows {
			var parts []string
			for j, cell := range row[1:] {
				parts = append(parts, strings.ToLower(head[j+1])+" "+cell)
			}
			t.wrap("", "", row[0])
			t.wrap("  ", "  ", strings.Join(parts, ", "))
			more(i)
		}
		return
	}
	for i, row := range append([][]string{head}, rows...) {
		var line strings.Builder
		for j, cell := range row {
			line.WriteString(cell + strings.Repeat(" ", widths[j]-utf8.RuneCountInString(cell)+2))
		}
		t.WriteString(strings.TrimRight(line.String(), " ") + "\n")
		if i > 0 {
			more(i - 1)
		}
	}
}

func (t *statusPage) sources(s *agent.Status) {
	if len(s.Sources) == 0 {
		return
	}
	var rows [][]string
	for _, src := range s.Sources {
		var state []string
		if !src.Complete {
			state = append(state, "incomplete")
		}
		if src.Held != "" {
			state = append(state, "held")
		}
		if src.Fault != "" {
			state = append(state, "fault")
		}
		if len(state) == 0 {
			state = []string{"ok"}
		}
		updated := t.ago(src.Updated)
		if !src.Updated.IsZero() {
			updated += " ago"
		}
		rows = append(rows, []string{src.Name, fmt.Sprint(src.Frontends), updated, strings.Join(state, ", ")})
	}
	t.rows([]string{"SOURCE", "FRONTENDS", "UPDATED", "STATE"}, rows, func(i int) {
		if held := s.Sources[i].Held; held != "" {
			t.wrap("  held ", "    ", held)
		}
		if fault := s.Sources[i].Fault; fault != "" {
			t.wrap("  fault: ", "    ", fault)
		}
	})
}

func (t *statusPage) unsettled(s *agent.Status) {
	if len(s.Unsettled) == 0 {
		if s.Ready && !s.ByRules {
			t.WriteString("\nevery frontend is settled\n")
		}
		return
	}
	var rows [][]string
	for _, u := range s.Unsettled[:min(len(s.Unsettled), statusRows)] {
		owner := u.Owner
		if owner == "" {
			owner = "-"
		}
		rows = append(rows, []string{
			u.Frontend, t.ago(u.Changed), t.ago(u.Opened), strings.Join(u.Causes, "+"), owner,
		})
	}
	t.rows([]string{"UNSETTLED", "SINCE", "QUIET", "CAUSE", "OWNER"}, rows, func(int) {})
	if n := s.UnsettledTotal - len(rows); n > 0 {
		fmt.Fprintf(t, "and %d more\n", n)
	}
}

func (t *statusPage) disagrees(s *agent.Status) {
	if len(s.Disagrees) == 0 {
		return
	}
	var rows [][]string
	for _, d := range s.Disagrees {
		rows = append(rows, []string{
			d.Frontend, d.Backend.String(), t.ago(d.Since), fmt.Sprint(d.Passes), d.Owner,
		})
	}
	t.rows([]string{"RULESET DISAGREES", "SENDS TO", "SINCE", "PASSES", "OWNER"}, rows, func(i int) {
		t.wrap("  ", "    ", s.Disagrees[i].Evidence)
		if rule := s.Disagrees[i].Rule; rule != "" {
			t.wrap("  by ", "    ", rule)
		}
	})
	t.WriteByte('\n')
	t.wrap("", "", "The rules go on making these translations, which are wrong by the desired state. "+
		"Is the service proxy running and up to date?")
}
