package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

var formats = []string{"table", "wide", "json", "jsonl", "yaml"}

// writer writes judged flows one by one, holding no more than a page of them.
type writer interface {
	flow(line int, f *conntrack.Flow, v frontend.Verdict) error
	end(s *summary) error
}

// newWriter returns a writer of verdicts on the live table, of which some have a
// reason in words, or on the lines of a saved one.
func newWriter(format string, w io.Writer, live bool) (writer, error) {
	switch format {
	case "table", "wide":
		return &tableWriter{w: w, wide: format == "wide", live: live, color: isTerminal(w)}, nil
	case "json":
		return &jsonWriter{w: w}, nil
	case "jsonl":
		return &jsonlWriter{json.NewEncoder(w)}, nil
	case "yaml":
		return &yamlWriter{w: w}, nil
	}
	return nil, usagef("--output: %q is none of %s", format, strings.Join(formats, ", "))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if term := os.Getenv("TERM"); !ok || os.Getenv("NO_COLOR") != "" || term == "dumb" || term == "" {
		return false
	}
	return isTTY(f)
}

// row is a judged flow in JSON. docs/output.md describes it; fields are added,
// never renamed.
type row struct {
	Line     int      `json:"line,omitempty"` // of the saved table
	Flow     flowJSON `json:"flow"`
	Verdict  string   `json:"verdict"`
	Reason   string   `json:"reason"`
	Frontend string   `json:"frontend,omitempty"`
	Kind     string   `json:"kind,omitempty"`
	Owner    string   `json:"owner,omitempty"`
	Why      string   `json:"why,omitempty"` // it is not judged
}

type flowJSON struct {
	Family   string    `json:"family"`
	Protocol string    `json:"protocol"`
	Number   uint8     `json:"protocolNumber"`
	Original tupleJSON `json:"original"`
	Reply    tupleJSON `json:"reply"`
	Zone     uint16    `json:"zone"`
	ZoneDir  string    `json:"zoneDirection,omitempty"`
	ID       uint32    `json:"id,omitempty"`
	Replied  bool      `json:"replied"`
	Assured  bool      `json:"assured"`
	Offload  bool      `json:"offloaded,omitempty"`
	State    string    `json:"state,omitempty"`
	Mark     uint32    `json:"mark,omitempty"`
	Timeout  uint32    `json:"timeoutSeconds"`
}

type tupleJSON struct {
	Src      netip.Addr `json:"source"`
	SrcPort  *uint16    `json:"sourcePort,omitempty"`
	Dst      netip.Addr `json:"destination"`
	DstPort  *uint16    `json:"destinationPort,omitempty"`
	ICMPType *uint8     `json:"icmpType,omitempty"`
	ICMPCode *uint8     `json:"icmpCode,omitempty"`
	ICMPID   *uint16    `json:"icmpId,omitempty"`
}

func newRow(line int, f *conntrack.Flow, v frontend.Verdict) row {
	r := row{
		Line: line, Verdict: v.Action.String(), Reason: v.Reason.String(), Owner: v.Owner, Why: v.Why,
		Flow: flowJSON{
			Family: f.Family.String(), Protocol: conntrack.ProtoName(f.Proto), Number: f.Proto,
			Original: newTuple(f.Proto, f.Orig), Reply: newTuple(f.Proto, f.Reply),
			Zone: f.Zone, ID: f.ID, Replied: f.Replied(),
			Assured: f.Status&conntrack.StatusAssured != 0,
			Offload: f.Status&(conntrack.StatusOffload|conntrack.StatusHWOffload) != 0,
			State:   f.StateName(), Mark: f.Mark, Timeout: f.Timeout,
		},
	}
	switch f.ZoneDir {
	case conntrack.ZoneOrig:
		r.Flow.ZoneDir = "original"
	case conntrack.ZoneReply:
		r.Flow.ZoneDir = "reply"
	}
	if v.Owner != "" {
		r.Frontend, r.Kind = destination(f), v.Kind.String()
	}
	return r
}

func newTuple(proto uint8, t conntrack.Tuple) tupleJSON {
	j := tupleJSON{Src: t.Src, Dst: t.Dst}
	switch {
	case conntrack.HasPorts(proto):
		j.SrcPort, j.DstPort = &t.SrcPort, &t.DstPort
	case proto == conntrack.ICMP || proto == conntrack.ICMPv6:
		j.ICMPType, j.ICMPCode, j.ICMPID = &t.ICMPType, &t.ICMPCode, &t.ICMPID
	}
	return j
}

// destination is the frontend that a flow was sent to.
func destination(f *conntrack.Flow) string {
	return endpoint(f.Proto, f.Orig.Dst, f.Orig.DstPort) + "/" + strings.ToUpper(protoWord(f))
}

func protoWord(f *conntrack.Flow) string {
	if s := conntrack.ProtoName(f.Proto); s != "unknown" {
		return s
	}
	return fmt.Sprint(f.Proto)
}

func endpoint(proto uint8, a netip.Addr, port uint16) string {
	if conntrack.HasPorts(proto) {
		return netip.AddrPortFrom(a, port).String()
	}
	return a.String()
}

// summary is what a command did, in the words of docs/output.md.
type summary struct {
	KernelReturned int            `json:"kernelReturned"`
	Judged         int            `json:"judged"`
	Delete         int            `json:"delete"`
	Keep           int            `json:"keep"`
	Ignore         int            `json:"ignore"`
	Deleted        int            `json:"deleted"`
	Gone           int            `json:"gone"`
	Busy           int            `json:"busy"`
	Failed         int            `json:"failed"`
	CameBack       int            `json:"cameBack,omitempty"`
	DurationMs     float64        `json:"durationMs"`
	DryRun         bool           `json:"dryRun"`
	Reasons        map[string]int `json:"reasons"`
	Problems       int            `json:"problems"`           // in the state
	BadLines       int            `json:"badLines,omitempty"` // in the saved table
	Malformed      int            `json:"malformed,omitempty"`
	Queries        []queryJSON    `json:"queries,omitempty"`
	By             string         `json:"by,omitempty"`         // "rules", where no desired state was given
	Generation     uint32         `json:"generation,omitempty"` // of those
	Rules          int            `json:"rules,omitempty"`
	Notes          []note         `json:"notes,omitempty"`

	by    string // in words
	lines int    // of a saved table that are flows
}

// note is a line of the summary about what the counts do not tell.
type note struct {
	ID   string `json:"id"` // stable
	Text string `json:"text"`
}

func (s *summary) note(id, text string) { s.Notes = append(s.Notes, note{id, text}) }

// passedOver notes of which protocols a plan asks only for flows that were never
// answered, since the policy leaves the others.
func (s *summary) passedOver(p sweep.Plan) {
	var names, policy []string
	for _, q := range p.Queries {
		name := conntrack.ProtoName(q.Filter.Proto)
		if word := strings.ToUpper(name); q.Filter.Clear&conntrack.StatusSeenReply != 0 && !slices.Contains(names, word) {
			names, policy = append(names, word), append(policy, name+"=all")
		}
	}
	if len(names) > 0 {
		slices.Reverse(names) // scopes have them by number, SCTP first
		slices.Reverse(policy)
		s.note("not-looked-at", fmt.Sprintf("established %s flows were not looked at (--sweep %s)",
			strings.Join(names, " and "), strings.Join(policy, ",")))
	}
}

type queryJSON struct {
	Query      string  `json:"query"`
	Returned   int     `json:"returned"`
	Wanted     int     `json:"wanted"`
	Walks      int     `json:"walks"`
	DurationMs float64 `json:"durationMs"`
}

func (s *summary) count(verdicts [frontend.Reasons]int) {
	for i, n := range verdicts {
		reason := frontend.Reason(i)
		s.Judged += n
		switch reason.Action() {
		case frontend.Delete:
			s.Delete += n
		case frontend.Keep:
			s.Keep += n
		case frontend.Ignore:
			s.Ignore += n
		}
		if n > 0 {
			s.Reasons[reason.String()] = n
		}
	}
}

func (s *summary) duration(d time.Duration) { s.DurationMs = millis(d) }

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (s *summary) add(r *sweep.Report) {
	s.count(r.Verdicts)
	s.KernelReturned = r.Returned
	s.Deleted, s.Gone, s.Busy, s.Failed = r.Deleted, r.Gone, r.Busy, r.Failed
	s.Malformed = r.Malformed
	s.duration(r.Duration)
	for _, q := range r.Queries {
		s.Queries = append(s.Queries, queryJSON{q.String(), q.Returned, q.Wanted, q.Walks, millis(q.Duration)})
	}
}

// jsonWriter writes one object, its flows a line each.
type jsonWriter struct {
	w     io.Writer
	wrote bool
}

func (j *jsonWriter) flow(line int, f *conntrack.Flow, v frontend.Verdict) error {
	b, err := json.Marshal(newRow(line, f, v))
	if err != nil {
		return err
	}
	head := ",\n"
	if !j.wrote {
		head, j.wrote = "{\"flows\":[\n", true
	}
	_, err = fmt.Fprintf(j.w, "%s%s", head, b)
	return err
}

func (j *jsonWriter) end(s *summary) error {
	head := "\n]"
	if !j.wrote {
		head = "{\"flows\":[]"
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(j.w, "%s,\"summary\":%s}\n", head, b)
	return err
}

// jsonlWriter writes an object a line, the summary last.
type jsonlWriter struct{ *json.Encoder }

func (j *jsonlWriter) flow(line int, f *conntrack.Flow, v frontend.Verdict) error {
	return j.Encode(newRow(line, f, v))
}

func (j *jsonlWriter) end(s *summary) error {
	return j.Encode(struct {
		Summary *summary `json:"summary"`
	}{s})
}

type yamlWriter struct {
	w     io.Writer
	wrote bool
}

func (y *yamlWriter) flow(line int, f *conntrack.Flow, v frontend.Verdict) error {
	b, err := yaml.Marshal([]row{newRow(line, f, v)})
	if err != nil {
		return err
	}
	if !y.wrote {
		y.wrote = true
		b = append([]byte("flows:\n"), b...)
	}
	_, err = y.w.Write(b)
	return err
}

func (y *yamlWriter) end(s *summary) error {
	b, err := yaml.Marshal(map[string]*summary{"summary": s})
	if err != nil {
		return err
	}
	if !y.wrote {
		b = append([]byte("flows: []\n"), b...)
	}
	_, err = y.w.Write(b)
	return err
}

// tableWriter writes columns for people. It holds back a page to learn their
// widths; later pages only widen them, so that a table of any length streams.
type tableWriter struct {
	w     io.Writer
	wide  bool
	live  bool
	color bool

	page   [][]string
	widths []int
	began  bool
	folded bool // a row takes three lines
}

var tableHead = []string{"VERDICT", "SENT FROM", "SENT TO", "GOES TO"}

const (
	pageLen   = 500
	lineWidth = 80
)

func (t *tableWriter) flow(line int, f *conntrack.Flow, v frontend.Verdict) error {
	to := "(not translated)"
	if f.Translated() {
		to = endpoint(f.Proto, f.Reply.Src, f.Reply.SrcPort)
	}
	cells := []string{
		v.String(), endpoint(f.Proto, f.Orig.Src, f.Orig.SrcPort), destination(f), to,
	}
	if t.wide {
		orDash := func(s string) string {
			if s == "" {
				return "-"
			}
			return s
		}
		kind := ""
		if v.Owner != "" {
			kind = v.Kind.String()
		}
		cells = append(cells, orDash(v.Owner), orDash(kind), orDash(f.StateName()),
			fmt.Sprint(f.Zone), fmt.Sprint(f.Timeout), orDash(count(f.ID)))
		if t.live {
			cells = append(cells, orDash(v.Why))
		} else {
			cells = append(cells, orDash(count(uint32(line))))
		}
	}
	for i := range cells {
		cells[i] = printable(cells[i])
	}
	t.page = append(t.page, cells)
	if len(t.page) < pageLen {
		return nil
	}
	return t.flush()
}

func count(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

func (t *tableWriter) flush() error {
	if len(t.page) == 0 {
		return nil
	}
	head := tableHead
	if t.wide {
		last := "LINE" // of a saved table, which is judged by a state alone
		if t.live {
			last = "WHY"
		}
		head = append(head, "OWNER", "KIND", "STATE", "ZONE", "TIMEOUT", "ID", last)
	}
	first := !t.began
	if first {
		t.began = true
		t.widths = make([]int, len(head))
		t.page = slices.Insert(t.page, 0, head)
	}
	for _, cells := range t.page {
		for i, c := range cells {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(c))
		}
	}
	if first {
		total := -2
		for _, w := range t.widths {
			total += 2 + w
		}
		t.folded = !t.wide && total > lineWidth
	}
	var b bytes.Buffer
	for _, cells := range t.page {
		t.line(&b, cells)
	}
	t.page = t.page[:0]
	_, err := t.w.Write(b.Bytes())
	return err
}

// line writes one row. Where the first page of the narrow table is wider than a
// terminal, as IPv6 addresses make it, a row takes three lines.
func (t *tableWriter) line(b *bytes.Buffer, cells []string) {
	verdict := cells[0] + strings.Repeat(" ", t.widths[0]-utf8.RuneCountInString(cells[0]))
	if t.color {
		verdict = paint(verdict)
	}
	if t.folded {
		indent := strings.Repeat(" ", t.widths[0])
		if cells[0] != tableHead[0] {
			fmt.Fprintf(b, "%s  from %s\n%s  to   %s\n%s  ->   %s\n", verdict, cells[1], indent, cells[2], indent, cells[3])
		}
		return
	}
	b.WriteString(verdict)
	for i, c := range cells[1:] {
		b.WriteString("  " + c)
		if i+2 < len(cells) {
			b.WriteString(strings.Repeat(" ", t.widths[i+1]-utf8.RuneCountInString(c)))
		}
	}
	b.WriteByte('\n')
}

// wrap breaks a line of words before it is wider than a terminal.
func wrap(s string) string {
	var b strings.Builder
	col := 0
	for i, word := range strings.Fields(s) {
		if col+1+len(word) > lineWidth {
			b.WriteString("\n ")
			col = 1
		} else if i > 0 {
			b.WriteByte(' ')
			col++
		}
		b.WriteString(word)
		col += len(word)
	}
	return b.String()
}

// paint colours a verdict by its action.
func paint(s string) string {
	code := map[string]string{"delete": "31", "keep": "32", "ignore": "2"}[strings.Fields(s)[0]]
	if code == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (t *tableWriter) end(s *summary) error {
	if err := t.flush(); err != nil {
		return err
	}
	var b strings.Builder
	if t.began {
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%s judged", plural(s.Judged, "flow"))
	if len(s.Queries) > 0 { // of a saved table nobody wants to know
		fmt.Fprintf(&b, " in %.1f ms", s.DurationMs)
	}
	fmt.Fprintf(&b, ": %d to delete, %d to keep, %d ignored", s.Delete, s.Keep, s.Ignore)
	if len(s.Reasons) > 0 {
		var parts []string
		for i := range frontend.Reasons {
			if n := s.Reasons[i.String()]; n > 0 {
				parts = append(parts, fmt.Sprintf("%s %d", i, n))
			}
		}
		b.WriteString("\n" + wrap("("+strings.Join(parts, ", ")+")"))
	}
	if !s.DryRun {
		fmt.Fprintf(&b, "\ndeleted %d, already gone %d, busy %d, failed %d", s.Deleted, s.Gone, s.Busy, s.Failed)
	}
	if s.by != "" {
		b.WriteString("\njudged by " + s.by)
	}
	for _, n := range s.Notes {
		b.WriteString("\n" + wrap(n.Text))
	}
	_, err := fmt.Fprintln(t.w, b.String())
	return err
}
