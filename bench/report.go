//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// report prints all tables as Markdown, and puts them into the documentation
// where that is wanted.
func (r *results) report(o *options) error {
	blocks := []struct{ name, text string }{
		{"machine", r.machineText()},
		{"goals", r.goals()},
		{"times", r.times(o)},
		{"plans", r.plans()},
		{"scale", r.scale()},
		{"judge", r.judge()},
		{"latency", r.latency()},
	}
	for _, b := range blocks {
		if b.text != "" {
			fmt.Printf("%s\n", b.text)
		}
	}
	if o.docs == "" {
		return nil
	}
	file := filepath.Join(o.docs, "performance.md")
	doc, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text := string(doc)
	for _, b := range blocks {
		if b.text == "" {
			continue
		}
		if text, err = replaceBlock(text, b.name, b.text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // a document
		return err
	}
	return r.chart(o, filepath.Join(o.docs, "performance.svg"))
}

// replaceBlock replaces what stands between the marks of a generated part.
func replaceBlock(doc, name, text string) (string, error) {
	begin, end := "<!-- begin: "+name+", made by bench -->\n", "<!-- end -->\n"
	head, rest, ok := strings.Cut(doc, begin)
	_, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return "", fmt.Errorf("no part between %q and %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return head + begin + text + end + tail, nil
}

// row writes a line of a table.
func row(b *strings.Builder, cells ...string) {
	b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}

func (r *results) machineText() string {
	var b strings.Builder
	m := r.Machine
	row(&b, "", "")
	row(&b, "---", "---")
	row(&b, "processor", fmt.Sprintf("%s, %d cores", m.CPU, m.Cores))
	row(&b, "kernel", fmt.Sprintf("%s, %s, %s buckets in the hash table", m.Kernel, m.Arch, thousands(m.Buckets)))
	row(&b, "peers", strings.Join(m.Libraries, ", "))
	row(&b, "Go", m.Go)
	row(&b, "measured", fmt.Sprintf("%s, medians of %d runs", r.Started.Format(time.DateOnly), r.Runs))
	var others []float64
	for _, f := range r.Figures {
		for _, s := range f.Samples {
			others = append(others, s.Others)
		}
	}
	mid, _, most := median(others)
	row(&b, "beside it", fmt.Sprintf("other programs took %.2f cores in the median measurement, %.2f in the worst", mid, most))
	for _, s := range r.Skipped {
		row(&b, "skipped", s)
	}
	return b.String()
}

// goal is one line of the comparison with what is to be reached.
type goal struct {
	what string
	// of is divided by what it is measured against.
	of, against string
	most        float64 // 0: none
	least       float64
	// floor is the kernel's part in against: of ÷ floor is what could be reached.
	floor string
}

var ratioGoals = []goal{
	{"a backend leaves ÷ the kernel's floor", "sweep/backend-leaves", "floor/nothing", 1.15, 0, ""},
	{"kube-proxy ÷ flowsweep, a backend leaves", "kube-proxy/backend-leaves", "sweep/backend-leaves", 0, 40, "floor/nothing"},
	{"conntrack -D ÷ flowsweep, a backend leaves", "conntrack-tools/delete", "sweep/backend-leaves", 0, 10, "floor/nothing"},
	{"full pass, 1 % stale ÷ a raw read of its queries", "sweep/full-1", "floor/full", 1.2, 0, ""},
	{"the same of IPv4 UDP alone ÷ a raw read of it", "sweep/udp4-1", "floor/udp", 1.2, 0, ""},
	{"kube-proxy ÷ flowsweep, IPv4 UDP, 1 % stale", "kube-proxy/1", "sweep/udp4-1", 0, 8, "floor/udp"},
	{"kube-proxy, IPv4 UDP, ÷ flowsweep's full pass, TCP and IPv6 too, 1 % stale", "kube-proxy/1", "sweep/full-1", 0, 8, "floor/full"},
}

// goals compares with what is to be reached, at the largest size.
func (r *results) goals() string {
	var b strings.Builder
	line := func(what, goal, got string, met bool) {
		word := "met"
		if !met {
			word = "**not met**"
		}
		row(&b, what, goal, got, word)
	}
	if sizes := r.sizes(); len(sizes) > 0 {
		r.tableGoals(line, sizes[len(sizes)-1])
	}
	if v, ok := r.value("scale/table", 0, "slice update ns"); ok {
		line("a changed slice of a cluster of 100 000 endpoints, judged anew", "< 1 ms of CPU", duration(v/1e9), v < 1e6)
	}
	if v, ok := r.updateCPU(); ok {
		line("the same in the agent, from the API server's event on", "< 1 ms of CPU", duration(v), v < 1e-3)
	}
	if v, ok := r.value("scale/agent", 0, "updates peak"); ok {
		line("the agent in that cluster, at its peak", "≤ 120 MiB resident", amount(v), v <= 120<<20)
	}
	if b.Len() == 0 {
		return ""
	}
	return "| | goal | measured | |\n|---|---|---|---|\n" + b.String()
}

func (r *results) tableGoals(line func(what, goal, got string, met bool), n int) {
	for _, g := range ratioGoals {
		of, ok1 := r.seconds(g.of, n)
		against, ok2 := r.seconds(g.against, n)
		if !ok1 || !ok2 {
			continue
		}
		ratio := of / against
		text, met := fmt.Sprintf("≤ %.3g ×", g.most), ratio <= g.most
		if g.most == 0 {
			text, met = fmt.Sprintf("≥ %.3g ×", g.least), ratio >= g.least
		}
		got := fmt.Sprintf("%.2f × (%s ÷ %s)", ratio, duration(of), duration(against))
		if floor, ok := r.seconds(g.floor, n); ok {
			got += fmt.Sprintf("; the kernel's floor (%s) allows %.1f ×", duration(floor), of/floor)
		}
		line(g.what, text, got, met)
	}
	const all = "sweep/udp4-25"
	deleting, ok1 := r.value(all, n, "deleting")
	deleted, ok2 := r.value(all, n, "deleted")
	if ok1 && ok2 && deleted > 0 {
		each := deleting / deleted
		got := duration(each) + " each"
		if alone, ok := r.seconds("floor/deletes", n); ok {
			got += fmt.Sprintf("; the kernel alone %s: %.2f ×", duration(alone/deleted), deleting/alone)
		}
		line(fmt.Sprintf("%s stale flows deleted, second judgement and all", thousands(int(deleted))), "≤ 2.5 µs each",
			got, each <= 2.5e-6)
	}
	if f := r.find("agent/25", n); f != nil {
		peak, _, _ := f.median(func(s sample) float64 { return float64(s.Peak) })
		line("the agent's memory at its peak", "≤ 32 MiB resident", amount(peak), peak <= 32<<20)
	}
	if f := r.find("sweep/full-1", n); f != nil {
		allocs, _, _ := f.median(func(s sample) float64 { return float64(s.Allocs) })
		each := allocs / float64(n)
		line("allocations of a full pass, 1 % stale", "0 a flow",
			fmt.Sprintf("%.0f in all, %.4f a flow", allocs, each), each < 0.01)
	}
}

// times lists all works but the plans: time with its spread by size, processor
// time and memory at the largest.
func (r *results) times(o *options) string {
	sizes := r.sizes()
	if len(sizes) == 0 {
		return ""
	}
	largest := sizes[len(sizes)-1]
	var b strings.Builder
	head, rule := []string{""}, []string{"---"}
	for _, n := range sizes {
		head, rule = append(head, thousands(n)+" flows"), append(rule, "---")
	}
	row(&b, append(head, "processor", "allocations", "allocated", "peak resident")...)
	row(&b, append(rule, "---", "---", "---", "---")...)
	for _, w := range works(o) {
		if strings.HasPrefix(w.name, "plan/") {
			continue
		}
		cells := []string{w.title}
		found := false
		for _, n := range sizes {
			f := r.find(w.name, n)
			if f == nil {
				cells = append(cells, "")
				continue
			}
			found = true
			mid, least, most := f.median(seconds)
			cells = append(cells, fmt.Sprintf("%s (%s–%s)", duration(mid), duration(least), duration(most)))
		}
		if !found {
			continue
		}
		cpu, allocs, bytes, peak := "", "", "", ""
		if f := r.find(w.name, largest); f != nil {
			if v, _, _ := f.median(func(s sample) float64 { return s.CPU }); v > 0 {
				cpu = duration(v)
			}
			if v, _, _ := f.median(func(s sample) float64 { return float64(s.Allocs) }); v > 0 {
				allocs = thousands(int(v))
				v, _, _ = f.median(func(s sample) float64 { return float64(s.Bytes) })
				bytes = amount(v)
			}
			if v, _, _ := f.median(func(s sample) float64 { return float64(s.Peak) }); v > 0 {
				peak = amount(v)
			}
		}
		row(&b, append(cells, cpu, allocs, bytes, peak)...)
	}
	return b.String()
}

// plans lists what each way of asking takes, by event and size: the cheapest is
// bold, the planner's own is marked.
func (r *results) plans() string {
	var b strings.Builder
	for _, e := range events() {
		for _, n := range r.sizes() {
			if line := r.planRow(e, n); line != nil {
				row(&b, append([]string{e.title, thousands(n)}, line...)...)
			}
		}
	}
	if b.Len() == 0 {
		return ""
	}
	head := []string{"event", "flows"}
	for _, c := range choices {
		head = append(head, c.title)
	}
	var h strings.Builder
	row(&h, head...)
	row(&h, strings.Split(strings.Repeat("---,", len(head)-1)+"---", ",")...)
	return h.String() + b.String()
}

func (r *results) planRow(e event, n int) []string {
	cheapest, best := -1, 0.0
	for i, c := range choices {
		if s, ok := r.seconds("plan/"+e.name+"/"+c.name, n); ok && (cheapest < 0 || s < best) {
			cheapest, best = i, s
		}
	}
	if cheapest < 0 {
		return nil
	}
	var cells []string
	for i, c := range choices {
		name := "plan/" + e.name + "/" + c.name
		s, ok := r.seconds(name, n)
		if !ok {
			cells = append(cells, "")
			continue
		}
		text := duration(s)
		if i == cheapest {
			text = "**" + text + "**"
		}
		if chosen, _ := r.value(name, n, "chosen"); chosen == 1 {
			text += " ←"
		}
		cells = append(cells, text)
	}
	return cells
}

func (r *results) scale() string {
	var b strings.Builder
	add := func(work, name, what string, format func(float64) string) {
		if v, ok := r.value(work, 0, name); ok {
			row(&b, what, format(v))
		}
	}
	secs := duration
	ns := func(v float64) string { return duration(v / 1e9) }
	add("scale/table", "frontends bytes", "frontends, made of the objects", amount)
	add("scale/table", "table bytes", "the same, in a table", amount)
	add("scale/table", "first list seconds", "a first full list into the table", secs)
	add("scale/table", "list again seconds", "the same list again", secs)
	add("scale/table", "slice update ns", "one slice: its frontends, into the table, and the plan", ns)
	add("scale/agent", "ready seconds", "the agent: from its start to the first pass done", secs)
	add("scale/agent", "ready cpu", "processor time until then", secs)
	add("scale/agent", "ready heap", "heap then, after a collection", amount)
	add("scale/agent", "ready resident", "resident then", amount)
	add("scale/agent", "ready peak", "resident at most until then", amount)
	add("scale/agent", "updates", "slice updates, 1000 a second", func(v float64) string { return thousands(int(v)) })
	add("scale/agent", "updates behind seconds", "after the last of them, until the agent has it", secs)
	if v, ok := r.updateCPU(); ok {
		row(&b, "processor time of one, narrow passes included", secs(v))
	}
	add("scale/agent", "updates peak", "resident at most until then", amount)
	add("scale/agent", "resync seconds", "everything listed again, until the agent has it", secs)
	add("scale/agent", "resync cpu", "processor time of that", secs)
	add("scale/agent", "resync peak", "resident at most until then", amount)
	if b.Len() == 0 {
		return ""
	}
	return "| | |\n|---|---|\n" + b.String()
}

// updateCPU is the processor time that the agent takes for one slice update.
func (r *results) updateCPU() (seconds float64, ok bool) {
	sum, ok := r.value("scale/agent", 0, "updates cpu")
	n, _ := r.value("scale/agent", 0, "updates")
	return sum / n, ok
}

// judge lists what one judgement takes beside more and more frontends.
func (r *results) judge() string {
	f := r.find("scale/judge", 0)
	if f == nil {
		return ""
	}
	var b strings.Builder
	counts := []int{1, 10, 100, 1000, 10_000, 50_000}
	head, rule := []string{"a judgement beside"}, []string{"---"}
	for _, n := range counts {
		head, rule = append(head, thousands(n)), append(rule, "---")
	}
	row(&b, head...)
	row(&b, rule...)
	for _, kind := range []struct{ name, title string }{
		{"services", "Services of 10 endpoints"},
		{"every address", "ports of every address of the host"},
		{"ranges", "port ranges of one address, side by side"},
		{"nested ranges", "port ranges of one address, one in the other"},
	} {
		cells := []string{kind.title}
		for _, n := range counts {
			v, ok := r.value("scale/judge", 0, fmt.Sprintf("%s %d", kind.name, n))
			if !ok {
				cells = append(cells, "")
				continue
			}
			cells = append(cells, duration(v/1e9))
		}
		row(&b, cells...)
	}
	return b.String()
}

func (r *results) latency() string {
	var b strings.Builder
	for _, l := range loads {
		f := r.latencyOf(l.name)
		if f == nil {
			continue
		}
		cells := []string{l.title}
		for _, name := range []string{
			"forward 50", "forward 99.9", "forward max", "round trip 50", "round trip 99.9", "round trip max",
		} {
			v, _, _ := f.median(func(s sample) float64 { return s.Values[name] })
			cells = append(cells, duration(v))
		}
		lost, _, _ := f.median(func(s sample) float64 { return s.Values["lost"] })
		row(&b, append(cells, fmt.Sprintf("%.0f", lost))...)
	}
	if b.Len() == 0 {
		return ""
	}
	return "| beside the stream | forwarded: median | 99.9 % | longest | answered: median | 99.9 % | longest | lost |\n" +
		"|---|---|---|---|---|---|---|---|\n" + b.String()
}

func (r *results) latencyOf(name string) *figures {
	for i := range r.Figures {
		if r.Figures[i].Work == name {
			return &r.Figures[i]
		}
	}
	return nil
}

// duration prints seconds with three digits: "1.23 s", "45.6 ms", "789 µs".
func duration(s float64) string {
	for _, u := range []struct {
		size float64
		name string
	}{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}} {
		if s >= u.size {
			return digits(s/u.size) + " " + u.name
		}
	}
	return digits(s/1e-9) + " ns"
}

func digits(v float64) string {
	switch {
	case v >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// amount prints bytes.
func amount(v float64) string {
	if v < 1<<20 {
		return digits(v/(1<<10)) + " KiB"
	}
	return digits(v/(1<<20)) + " MiB"
}

// thousands prints a number in groups of three digits.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
