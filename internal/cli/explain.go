package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/doctor"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/sweep"
)

type explaining struct{ inputs }

func newExplain() *cobra.Command {
	e := &explaining{}
	c := &cobra.Command{
		Use:   "explain FLOW|SERVICE|DESTINATION",
		Short: "Tell why a flow is kept or deleted, step by step",
		Long: `explain judges one flow and tells every step, or shows what is known of a service,
or of a destination: which frontends of the desired state are met there, and what
the NAT rules of this host may do with packets to it.

FLOW is a line as conntrack -L prints it, or SRC:PORT>DST:PORT/PROTOCOL, which is
looked up in the live table or in --flows. SERVICE is NAMESPACE/NAME, the name of
an item of a FrontendList, or a frontend as reports name it: "*:30053/UDP".
DESTINATION is an address, a port and a protocol: 203.0.113.10:53/udp.`,
		Example: `  flowsweep explain '192.0.2.50:40000>203.0.113.10:53/udp'
  flowsweep explain 203.0.113.10:53/udp
  flowsweep explain --state svc.yaml '192.0.2.50:40000>203.0.113.10:53/udp'
  flowsweep explain --state svc.yaml --node n1 default/dns`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return e.run(cmd, strings.Join(args, " ")) },
	}
	e.register(c)
	return c
}

func (e *explaining) run(cmd *cobra.Command, what string) error {
	short, isShort, err := parseShort(what)
	if err != nil {
		return err
	}
	line := !isShort && strings.Contains(what, "src=")
	var flow conntrack.Flow
	if line {
		if flow, err = conntrack.Parse(what); err != nil {
			return usagef("%q is no flow as conntrack -L prints it: %w", what, err)
		}
	}
	to, err := parseDestination(what)
	place := err == nil
	if err != nil && e.byRules() && !line && !isShort {
		return err
	}
	w, err := e.load(cmd)
	if err != nil {
		return err
	}
	defer w.close()
	out := cmd.OutOrStdout()
	switch {
	case line:
		return explainFlow(out, w.judge(), &flow, nil)
	case isShort:
		found := 0
		err := e.search(cmd, w.families, short.filter, func(f *conntrack.Flow) error {
			if !short.match(f) {
				return nil
			}
			if found++; found > 1 {
				fmt.Fprintln(out)
			}
			var silent []netip.Addr
			if f.Translated() && !f.Replied() {
				silent = append(silent, f.Reply.Src)
			}
			return explainFlow(out, w.judge(), f, e.leftOver(cmd.Context(), w, ruleset.Destination{Proto: f.Proto, Addr: short.dst}, silent))
		})
		if err == nil && found == 0 {
			err = e.sameSocket(cmd, w, &short, what)
		}
		return err
	case place:
		return e.destination(cmd, w, to)
	}
	return e.service(cmd, w, what)
}

func (e *explaining) where() string {
	if e.flows != "" {
		return e.flows
	}
	return "the conntrack table"
}

// judge is a sweep.Judge that explains itself.
type judge interface {
	sweep.Judge
	sweep.Scoper
	Explain(f *conntrack.Flow) (frontend.Verdict, []string)
}

// explainFlow also tells further steps, before the verdict.
func explainFlow(out io.Writer, j judge, f *conntrack.Flow, more []string) error {
	v, steps := j.Explain(f)
	steps = append(steps, more...)
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", f)
	for i, s := range steps {
		fmt.Fprintf(&b, "%3d. %s\n", i+1, s)
	}
	fmt.Fprintf(&b, "verdict: %s", v)
	if v.Owner != "" {
		fmt.Fprintf(&b, " (%s)", v.Owner)
	}
	_, err := fmt.Fprintln(out, printable(b.String()))
	return err
}

// leftOver tells of rules for a destination that no packet meets, and which of the
// addresses that flows to it are not answered from do not answer at all: a rule
// that is left over stands before another one, or leads to nobody.
func (e *explaining) leftOver(ctx context.Context, w *world, d ruleset.Destination, unanswered []netip.Addr) (lines []string) {
	rules := w.rules
	if w.both != nil {
		rules = w.both.rules
	}
	if rules != nil {
		const most = 5
		_, steps := rules.Rules.To(d)
		var by []ruleset.Rule
		for _, s := range steps {
			by = append(by, s.Rule)
		}
		if len(by) > 0 {
			for i, s := range rules.Rules.Rules().Shadowed(by...) {
				if i == most {
					lines = append(lines, "and there are more, see \"flowsweep doctor\"")
					break
				}
				lines = append(lines, "no packet meets "+s.String())
			}
		}
	}
	if e.flows != "" {
		return lines
	}
	silent, _ := doctor.Silent(ctx, e.namespace(), unanswered) // where it is not known, nothing is told
	for _, a := range slices.SortedFunc(maps.Keys(silent), netip.Addr.Compare) {
		lines = append(lines, fmt.Sprintf("%s does not answer %s, and flows to it are unanswered: nobody is there", a, silent[a]))
	}
	return lines
}

// shortFlow is SRC:PORT>DST:PORT/PROTOCOL.
type shortFlow struct {
	src, dst netip.AddrPort
	filter   conntrack.Filter
}

func (s *shortFlow) match(f *conntrack.Flow) bool {
	return s.filter.Match(f) && f.Orig.Src == s.src.Addr() && f.Orig.SrcPort == s.src.Port()
}

func parseShort(what string) (s shortFlow, ok bool, err error) {
	src, rest, ok := strings.Cut(strings.ReplaceAll(what, " ", ""), ">")
	if !ok || strings.Contains(what, "src=") {
		return s, false, nil
	}
	dst, proto, _ := strings.Cut(rest, "/")
	const want = "want SRC:PORT>DST:PORT/PROTOCOL such as 192.0.2.50:40000>203.0.113.10:53/udp"
	if s.src, err = netip.ParseAddrPort(src); err != nil {
		return s, true, usagef("%q: %w; %s", what, err, want)
	}
	if s.dst, err = netip.ParseAddrPort(dst); err != nil {
		return s, true, usagef("%q: %w; %s", what, err, want)
	}
	number := protoNumber(proto)
	if number == 0 {
		return s, true, usagef("%q: the protocol is not udp, tcp or sctp; %s", what, want)
	}
	s.filter = to(number, s.dst)
	return s, true, nil
}

// sameSocket looks, where there is no flow from a client to a service, for flows
// from the same address and port to elsewhere: a balancer at the socket (BPF at
// connect or sendmsg) has the client send to a backend itself.
func (e *explaining) sameSocket(cmd *cobra.Command, w *world, s *shortFlow, what string) error {
	out := cmd.OutOrStdout()
	found := 0
	filter := conntrack.Filter{Family: s.filter.Family, Proto: s.filter.Proto}
	err := e.search(cmd, w.families, filter, func(f *conntrack.Flow) error {
		if f.Orig.Src != s.src.Addr() || f.Orig.SrcPort != s.src.Port() || f.Translated() {
			return nil
		}
		if found++; found > mostFlows {
			return nil
		}
		// As it would be if a rule had sent it there.
		asked := *f
		asked.Orig.Dst, asked.Orig.DstPort = s.dst.Addr(), s.dst.Port()
		note := ""
		if w.table != nil {
			switch v := w.table.Judge(&asked); {
			case v.Reason == frontend.Serving:
				note = fmt.Sprintf(": goes to a valid backend of %s", v.Owner)
			case v.Action == frontend.Delete:
				note = fmt.Sprintf(": goes to no valid backend of %s", v.Owner)
			}
		}
		_, err := fmt.Fprintln(out, printable(f.String()+note))
		return err
	})
	if err != nil {
		return err
	}
	none := fmt.Sprintf("no flow %s in %s", what, e.where())
	if found > 0 {
		none += fmt.Sprintf(", but %s from the same socket to elsewhere: a balancer at the socket may have chosen where "+
			"(see socket-balancer of \"flowsweep doctor\")", plural(found, "flow"))
	}
	return &exitError{exitFailed, errors.New(none)}
}

// to matches the flows to a destination.
func to(proto uint8, dst netip.AddrPort) conntrack.Filter {
	return conntrack.Filter{
		Family: conntrack.FamilyOf(dst.Addr()), Proto: proto, OrigDst: dst.Addr(), OrigDstPort: dst.Port(),
	}
}

// protoNumber returns the number of a protocol, 0 for what is none that is swept.
func protoNumber(word string) uint8 {
	return map[string]uint8{"udp": conntrack.UDP, "tcp": conntrack.TCP, "sctp": conntrack.SCTP}[strings.ToLower(word)]
}

// parseDestination reads ADDR:PORT/PROTOCOL.
func parseDestination(what string) (d ruleset.Destination, err error) {
	addr, proto, _ := strings.Cut(what, "/")
	d.Proto = protoNumber(proto)
	if d.Addr, err = netip.ParseAddrPort(addr); err != nil || d.Proto == 0 {
		return d, usagef("%q is neither a flow nor a destination such as 203.0.113.10:53/udp; "+
			"for a SERVICE give the desired state with --state FILE or --kubernetes", what)
	}
	return d, nil
}

// search calls f for the flows that satisfy a filter, of the saved table or of
// the live one.
func (e *explaining) search(cmd *cobra.Command, families []conntrack.Family, filter conntrack.Filter,
	f func(*conntrack.Flow) error,
) error {
	if e.flows != "" {
		_, err := e.eachLine(cmd, func(_ int, fl *conntrack.Flow) error {
			if filter.Match(fl) && wanted(families, fl) {
				return f(fl)
			}
			return nil
		})
		return err
	}
	conn, err := conntrack.Dial(conntrack.Config{NetNS: e.namespace()})
	if err != nil {
		return err
	}
	defer conn.Close()
	for fl, err := range conn.Dump(cmd.Context(), filter) {
		if err != nil {
			return err
		}
		if !wanted(families, fl) {
			continue
		}
		if err := f(fl); err != nil {
			return err
		}
	}
	return nil
}

// mostFlows is how many flows to a destination are shown.
const mostFlows = 10

// destination shows what of the desired state is met at a destination, what rules
// may do with packets to it, and how the flows to it are judged.
func (e *explaining) destination(cmd *cobra.Command, w *world, d ruleset.Destination) error {
	out := cmd.OutOrStdout()
	name := fmt.Sprintf("%s/%s", d.Addr, strings.ToUpper(conntrack.ProtoName(d.Proto)))
	show := func(steps []string) {
		for i, s := range steps {
			fmt.Fprintln(out, printable(fmt.Sprintf("%3d. %s", i+1, s)))
		}
	}
	rules := w.rules
	if w.both != nil {
		steps, known := w.table.ExplainDestination(d.Proto, d.Addr)
		if !known {
			return &exitError{exitFailed, fmt.Errorf("%s: no frontend of the state is or was there", name)}
		}
		fmt.Fprintf(out, "%s by the desired state\n", name)
		show(steps)
		if rules = w.both.rules; rules == nil {
			fmt.Fprintln(out, notAskedText(w.both.notAsked))
		}
	}
	if rules != nil {
		o, steps := rules.Rules.To(d)
		fmt.Fprintf(out, "%s by %s\n", name, rules)
		var texts []string
		for _, s := range steps {
			texts = append(texts, s.String())
		}
		show(texts)
		fmt.Fprintf(out, "what they may do with a packet from anywhere: %s\n", o)
	}
	var unanswered []netip.Addr
	err := e.flowsTo(cmd, w, to(d.Proto, d.Addr), mostFlows, func(f *conntrack.Flow) bool {
		if f.Translated() && !f.Replied() && !slices.Contains(unanswered, f.Reply.Src) && len(unanswered) < mostFlows {
			unanswered = append(unanswered, f.Reply.Src)
		}
		return true
	})
	if err != nil {
		return err
	}
	for _, l := range e.leftOver(cmd.Context(), w, d, unanswered) {
		fmt.Fprintln(out, printable(l))
	}
	return nil
}

// flowsTo tells how the flows are judged that a filter lets through and that are
// meant, and shows the first of them.
func (e *explaining) flowsTo(cmd *cobra.Command, w *world, filter conntrack.Filter, show int, meant func(*conntrack.Flow) bool) error {
	var verdicts [frontend.Reasons]int
	var lines []string
	total := 0
	judge := w.judge()
	err := e.search(cmd, w.families, filter, func(f *conntrack.Flow) error {
		if !meant(f) {
			return nil
		}
		v := judge.Judge(f)
		verdicts[v.Reason]++
		if total++; total <= show {
			to := "(not translated)"
			if f.Translated() {
				to = "-> " + endpoint(f.Proto, f.Reply.Src, f.Reply.SrcPort)
			}
			lines = append(lines, fmt.Sprintf("  from %s %s: %s", endpoint(f.Proto, f.Orig.Src, f.Orig.SrcPort), to, v))
		}
		return nil
	})
	out := cmd.OutOrStdout()
	if err != nil {
		if errors.Is(err, context.Canceled) || e.flows != "" || w.rules != nil {
			return err
		}
		// What is known of the service was shown; the flows need a privilege.
		fmt.Fprintf(out, "flows to it are not shown: %v\n", err)
		return nil
	}
	if err := e.counts(out, &verdicts); err != nil {
		return err
	}
	if n := total - show; n > 0 && show > 0 {
		lines = append(lines, fmt.Sprintf("  and %s more", plural(n, "flow")))
	}
	for _, l := range lines {
		fmt.Fprintln(out, l)
	}
	return nil
}

// service shows the frontends of an owner and how the flows to them are judged.
func (e *explaining) service(cmd *cobra.Command, w *world, name string) error {
	out := cmd.OutOrStdout()
	frontends := w.table.FrontendsOf(name)
	var tombs []frontend.Tombstone
	for _, t := range w.table.Tombstones() {
		if t.Of(name) {
			tombs = append(tombs, t)
		}
	}
	if len(frontends)+len(tombs) == 0 {
		return &exitError{exitFailed, fmt.Errorf("%q is no service, item or frontend of the state "+
			"(a service is named NAMESPACE/NAME; headless and ExternalName services have no frontends)", name)}
	}
	for i := range frontends {
		f := &frontends[i]
		fmt.Fprintf(out, "%s %s (%s)\n", f.Kind, f.Key(), f.Owner)
		if f.Foreign {
			fmt.Fprintln(out, "  served by another proxy: flows to it are ignored")
			continue
		}
		fmt.Fprintf(out, "  valid backends, which keep the flows they have: %s\n", f.Valid)
		fmt.Fprintf(out, "  usable for new flows on this node: %d\n", f.Usable)
		if f.Inside > 0 {
			fmt.Fprintf(out, "  usable for what this node and its pods send: %d\n", f.Inside)
		}
	}
	for _, t := range tombs {
		fmt.Fprintf(out, "%s %s (%s)\n  gone: flows that are still translated for it are stale\n", t.Kind, t.Key, t.Owner)
	}
	return e.flowsTo(cmd, w, conntrack.Filter{}, 0, func(f *conntrack.Flow) bool {
		return slices.ContainsFunc(frontends, func(x frontend.Frontend) bool { return w.table.Reaches(x.Key(), f) }) ||
			slices.ContainsFunc(tombs, func(x frontend.Tombstone) bool { return w.table.Reaches(x.Key, f) })
	})
}

// counts tells how many flows there are of each verdict.
func (e *explaining) counts(out io.Writer, verdicts *[frontend.Reasons]int) error {
	var counts []string
	for r, n := range verdicts {
		if n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s %s", n, frontend.Reason(r).Action(), frontend.Reason(r)))
		}
	}
	if counts == nil {
		counts = []string{"none"}
	}
	_, err := fmt.Fprintf(out, "flows to it in %s: %s\n", e.where(), strings.Join(counts, ", "))
	return err
}
