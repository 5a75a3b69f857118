package cli

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/static"
)

// inputs are the flags that say what to judge and by what, the same for every
// command that judges.
type inputs struct {
	state, before []string
	cluster       clusterFlags
	flows         string
	node          string
	nodeAddress   []string
	nodePorts     []string
	sweep         string
	zones         []uint
	netns         string
	family        string
	strict        bool
}

func (in *inputs) register(c *cobra.Command) {
	f := c.Flags()
	f.StringArrayVar(&in.state, "state", nil,
		"`FILE` with the desired state, YAML or JSON: Kubernetes Service, EndpointSlice, Node, Pod\nand FrontendList, mixed at will; \"-\" is standard input (repeatable)")
	f.StringArrayVar(&in.before, "before", nil,
		"`FILE` with the state known earlier: frontends that are gone since are swept (repeatable)")
	f.StringVar(&in.flows, "flows", "",
		"judge a saved table, a `FILE` as conntrack -L or /proc/net/nf_conntrack prints it,\ninstead of the live one; \"-\" is standard input")
	in.cluster.register(c)
	f.StringVar(&in.node, "node", "", "`NAME` of the node whose point of view it is; its addresses come\nfrom the Node object; with --kubernetes by default NODE_NAME of the\nenvironment, or the host name")
	f.StringArrayVar(&in.nodeAddress, "node-address", nil, "a further `IP` of this host; without a Node object, one that the proxy\ncertainly serves node ports on (repeatable)")
	f.StringSliceVar(&in.nodePorts, "node-port-addresses", nil,
		"`CIDR,...` in which the proxy serves node ports, as kube-proxy's nodePortAddresses:\n\"primary\" is the Node's first address of each family, \"localhost\" loopback, \"all\" every address")
	f.StringVar(&in.sweep, "sweep", frontend.DefaultPolicy.String(),
		"what may be deleted of each protocol: all, unreplied or off; a `POLICY`")
	f.UintSliceVar(&in.zones, "zone", []uint{0}, "conntrack `ZONES` to judge")
	f.StringVar(&in.netns, "netns", "", "network `NAMESPACE` of the live table: a path, or a name under /run/netns")
	f.StringVar(&in.family, "family", "", "`FAMILY`: ipv4 or ipv6 alone")
	f.BoolVar(&in.strict, "strict", false, "fail, before anything is deleted, if some input cannot be read whole")
	_ = c.RegisterFlagCompletionFunc("family", cobra.FixedCompletions([]string{"ipv4", "ipv6"}, cobra.ShellCompDirectiveNoFileComp))
}

// world is what the inputs say.
type world struct {
	table    *frontend.Table // nil where rules decide
	rules    *rules          // nil otherwise
	both     *both           // the table and what the rules say beside it, once askRules has looked
	before   *frontend.Table // by --before
	change   frontend.Change // from --before to --state
	families []conntrack.Family
	problems int
	// lost are the parts of the states that could not be read, doubtful those of
	// the present one that may hold backends.
	lost, doubtful int
}

// options reads the flags that need no file.
func (in *inputs) options() (o frontend.Options, host frontend.Host, families []conntrack.Family, err error) {
	if o.Policy, err = frontend.ParsePolicy(in.sweep); err != nil {
		return o, host, nil, usagef("--sweep: %w", err)
	}
	for _, z := range in.zones {
		if z > 65535 {
			return o, host, nil, usagef("--zone: %d is not a zone (0-65535)", z)
		}
		o.Zones = append(o.Zones, uint16(z))
	}
	for _, s := range in.nodeAddress {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			return o, host, nil, usagef("--node-address: %q is not an IP address", s)
		}
		host.Other = append(host.Other, a.Unmap())
	}
	for _, s := range in.nodePorts {
		p, err := frontend.ParseNodePorts(s)
		if err != nil {
			return o, host, nil, usagef("--node-port-addresses: %w", err)
		}
		host.NodePorts = append(host.NodePorts, p)
	}
	switch strings.ToLower(in.family) {
	case "":
	case "ipv4", "4", "inet":
		families = []conntrack.Family{conntrack.IPv4}
	case "ipv6", "6", "inet6":
		families = []conntrack.Family{conntrack.IPv6}
	default:
		return o, host, nil, usagef("--family: %q is neither ipv4 nor ipv6", in.family)
	}
	return o, host, families, nil
}

// check finds what contradicts itself before any file is read.
func (in *inputs) check(cmd *cobra.Command) error {
	stdin := 0
	for _, name := range slices.Concat(in.state, in.before, []string{in.flows}) {
		if name == "-" {
			stdin++
		}
	}
	switch {
	case in.byRules() && in.flows != "":
		return usagef("nothing to judge a saved table by, which does not hold the rules of its host: " +
			"give the desired state with --state FILE (\"-\" for standard input), or a cluster with --kubernetes and --node")
	case len(in.state) > 0 && in.cluster.given():
		return usagef("--state and --kubernetes exclude each other: the state of a cluster is that of its API server")
	case in.flows != "" && in.cluster.given() && in.node == "":
		return usagef("--flows is a table of some host: give the name of that Node with --node")
	case stdin > 1:
		return usagef("only one input can be standard input (\"-\")")
	case cmd.Flags().Changed("flows") && in.flows == "", cmd.Flags().Changed("netns") && in.netns == "":
		return usagef("--flows and --netns must not be empty: an unset variable would mean the live table of this host")
	case in.flows != "" && in.netns != "":
		return usagef("--flows and --netns exclude each other: a saved table is in no namespace")
	case !in.byRules():
		return nil
	}
	for _, name := range []string{"before", "strict", "force", "node", "node-address", "node-port-addresses"} {
		if cmd.Flags().Changed(name) {
			return usagef("--%s belongs to a desired state, without which the NAT rules of the kernel decide: "+
				"give it with --state FILE or --kubernetes", name)
		}
	}
	if !slices.Equal(in.zones, []uint{0}) {
		return usagef("--zone: by the NAT rules of the kernel only zone 0 is judged; " +
			"for others give a desired state with --state FILE")
	}
	return nil
}

// byRules tells whether nothing else is given to judge by than the rules of the
// kernel.
func (in *inputs) byRules() bool { return len(in.state) == 0 && !in.cluster.given() }

// judge returns what judges flows.
func (w *world) judge() judge {
	if w.rules != nil {
		return w.rules
	}
	return w.both
}

func (w *world) close() {
	if w.rules != nil {
		_ = w.rules.Rules.Close() // nothing was written
	}
	if w.both != nil && w.both.rules != nil {
		_ = w.both.rules.Rules.Close()
	}
}

// load reads the state and the rules beside it, or, if no state is given, the
// rules alone, and reports on stderr what in it does not count.
func (in *inputs) load(cmd *cobra.Command) (*world, error) {
	w, err := in.loadState(cmd)
	if err == nil && w.rules == nil {
		in.askRules(cmd.Context(), w)
	}
	return w, err
}

// loadState is that without the rules beside a state.
func (in *inputs) loadState(cmd *cobra.Command) (*world, error) {
	if err := in.check(cmd); err != nil {
		return nil, err
	}
	o, host, families, err := in.options()
	if err != nil {
		return nil, err
	}
	if in.byRules() {
		r, err := in.readRules(cmd.Context(), o.Policy, families)
		if err != nil {
			return nil, err
		}
		return &world{rules: r, families: families}, nil
	}
	w := &world{table: frontend.NewTable(o), families: families}
	live := in.flows == ""
	if live {
		addrs, err := hostAddresses(in.namespace())
		if err != nil {
			return nil, err
		}
		host.Other = append(host.Other, addrs...)
	}
	var now *static.State
	if in.cluster.given() {
		var ranges []netip.Prefix
		if now, ranges, err = in.cluster.read(cmd, in.node); err == nil {
			w.table.SetServiceRanges(ranges...)
		}
	} else {
		now, err = in.read(cmd, in.state)
	}
	if err != nil {
		return nil, err
	}
	w.report(cmd, now.Problems)
	if len(in.before) > 0 {
		before, err := in.read(cmd, in.before)
		if err != nil {
			return nil, err
		}
		w.report(cmd, before.Problems)
		w.lost, _ = unreadable(before.Problems)
		w.before = frontend.NewTable(o)
		for _, t := range []*frontend.Table{w.table, w.before} {
			t.SetHost(withNode(host, in, before))
			t.Replace(before.Units)
		}
		now.HostPortsUnknown = now.HostPortsUnknown && before.HostPortsUnknown
		if before.NodeFound && !now.NodeFound {
			// A Node object that is left out is no node without addresses.
			now.NodeFound, now.NodeAddresses, now.PodRanges = true, before.NodeAddresses, before.PodRanges
		}
	}
	w.change = w.table.SetHost(withNode(host, in, now))
	w.change.Add(w.table.Replace(now.Units))
	lost, doubtful := unreadable(now.Problems)
	w.lost, w.doubtful = w.lost+lost, doubtful
	if lost > 0 && len(in.before) > 0 {
		// What could not be read may hold frontends that only seem to be gone.
		for _, tomb := range w.table.Tombstones() {
			w.table.Forget(tomb.Key)
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: flows of vanished frontends are left alone, "+
			"since what could not be read may hold them\n")
	}
	if w.table.HostPortsMatter() {
		why := "no Pods in the state"
		if in.node == "" {
			why = "no node is named with --node, whose Pods they are of"
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: %s: host ports are not known; flows to load-balancer addresses "+
			"of this host that go to no known backend are left (uncertain-address)\n", why)
	}
	if w.problems > 0 && in.strict {
		return nil, &exitError{exitFailed, fmt.Errorf("--strict: %s in the state", plural(w.problems, "problem"))}
	}
	return w, nil
}

// unreadable counts the objects that were not read, and those among them that
// may hold backends of a service: slices, and what nobody knows.
func unreadable(ps []static.Problem) (lost, doubtful int) {
	for _, p := range ps {
		if !p.Lost {
			continue
		}
		lost++
		if p.Object == "" && p.Path == "" || strings.HasPrefix(p.Object, "Endpoint") {
			doubtful++
		}
	}
	return lost, doubtful
}

func (w *world) report(cmd *cobra.Command, ps []static.Problem) {
	const most = 20
	w.problems += len(ps)
	for i, p := range ps {
		if i == most {
			fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: and %s more\n", plural(len(ps)-most, "problem"))
			return
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: %s (skipped)\n", printable(p.Error()))
	}
}

func (in *inputs) read(cmd *cobra.Command, names []string) (*static.State, error) {
	var list []static.Input
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, name := range names {
		if name == "-" {
			list = append(list, static.Input{Name: "standard input", R: cmd.InOrStdin()})
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			return nil, &exitError{exitFailed, err}
		}
		files = append(files, f)
		list = append(list, static.Input{Name: name, R: f})
	}
	return static.Read(in.node, list...)
}

// withNode adds what the state says of this host. Without a Node object the
// addresses that the user gave are those that the proxy serves node ports on.
func withNode(h frontend.Host, in *inputs, s *static.State) frontend.Host {
	h.Listed, h.Pods, h.HostPortsUnknown = slices.Clone(s.NodeAddresses), s.PodRanges, s.HostPortsUnknown
	if !s.NodeFound {
		h.Listed = slices.Clone(h.Other[:len(in.nodeAddress)])
		h.Served = h.Listed
	}
	return h
}

// namespace returns the path of the namespace to work in, "" for the present
// one.
func (in *inputs) namespace() string {
	if in.netns == "" || strings.Contains(in.netns, "/") {
		return in.netns
	}
	return "/run/netns/" + in.netns
}

// interfaceAddresses returns the addresses of the calling thread's namespace.
func interfaceAddresses() ([]netip.Addr, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading this host's addresses: %w", err)
	}
	var list []netip.Addr
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if x, ok := netip.AddrFromSlice(n.IP); ok && !x.Unmap().IsLoopback() {
				list = append(list, x.Unmap())
			}
		}
	}
	return list, nil
}

// eachLine calls f for the flows of the saved table, in order. Lines that are
// no flows are reported on stderr and counted.
func (in *inputs) eachLine(cmd *cobra.Command, f func(line int, fl *conntrack.Flow) error) (bad int, err error) {
	r, name := cmd.InOrStdin(), "standard input"
	if in.flows != "-" {
		file, err := os.Open(in.flows)
		if err != nil {
			return 0, &exitError{exitFailed, err}
		}
		defer file.Close()
		r, name = file, in.flows
	}
	const most = 20
	good := 0
	for fl, err := range conntrack.ReadText(r) {
		var le *conntrack.LineError
		switch {
		case errors.As(err, &le):
			if bad++; bad <= most {
				fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: %s:%d: %v: %q (skipped)\n", name, le.Line, le.Err, le.Text)
			}
			continue
		case err != nil:
			return bad, fmt.Errorf("reading %s: %w", name, err)
		}
		if err := cmd.Context().Err(); err != nil {
			return bad, err
		}
		good++
		if err := f(fl.Line, &fl.Flow); err != nil {
			return bad, err
		}
	}
	if bad > most {
		fmt.Fprintf(cmd.ErrOrStderr(), "flowsweep: warning: and %s more\n", plural(bad-most, "line"))
	}
	switch {
	case bad > 0 && good == 0:
		return bad, fmt.Errorf("%s: no line is a flow as \"conntrack -L\" or /proc/net/nf_conntrack prints it", name)
	case bad > 0 && in.strict:
		return bad, fmt.Errorf("--strict: %s of %s cannot be read", plural(bad, "line"), name)
	}
	return bad, nil
}

// printable replaces what could upset a terminal: names in a state are whatever
// somebody wrote.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
