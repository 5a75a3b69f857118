//go:build linux

package cli

import (
	"errors"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/ruleset"
	"github.com/flowsweep/flowsweep/sweep"
)

// antreaState is a node port whose packets the host sends to a virtual address,
// where Open vSwitch takes them on to the endpoint, and a service that nothing
// translates.
const antreaState = `apiVersion: v1
kind: Node
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: dns, namespace: default}
spec:
  type: NodePort
  clusterIP: 203.0.113.10
  clusterIPs: [203.0.113.10]
  externalIPs: [203.0.113.20, 203.0.113.21]
  ipFamilies: [IPv4]
  ports: [{name: udp, protocol: UDP, port: 53, nodePort: 31000}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns-a, namespace: default, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
endpoints: [{addresses: [198.51.100.12]}]
ports: [{name: udp, protocol: UDP, port: 53}]
`

// antreaFlows are flows of that world: the sent port, what the state alone says,
// and what both say.
var antreaFlows = []struct {
	port        uint16
	text        string
	alone, both string
}{
	{
		40000, "src=192.0.2.50 dst=192.0.2.1 sport=40000 dport=31000 src=203.0.113.250 dst=192.0.2.50 sport=31000 dport=40000 [ASSURED]",
		"delete backend-gone", "keep ruleset-disagrees",
	}, // in two steps
	{
		40001, "src=192.0.2.50 dst=192.0.2.1 sport=40001 dport=31000 src=198.51.100.12 dst=192.0.2.50 sport=53 dport=40001 [ASSURED]",
		"keep serving", "keep serving",
	},
	{
		40002, "src=192.0.2.50 dst=192.0.2.1 sport=40002 dport=31000 src=198.51.100.13 dst=192.0.2.50 sport=53 dport=40002 [ASSURED]",
		"delete backend-gone", "delete backend-gone",
	}, // by neither
	{
		40003, "src=192.0.2.50 dst=203.0.113.10 sport=40003 dport=53 [UNREPLIED] src=203.0.113.10 dst=192.0.2.50 sport=53 dport=40003",
		"delete untranslated", "keep ruleset-disagrees",
	}, // nothing would translate it
	{
		40004, "src=192.0.2.50 dst=192.0.2.1 sport=40004 dport=31000 [UNREPLIED] src=192.0.2.1 dst=192.0.2.50 sport=31000 dport=40004",
		"delete untranslated", "delete untranslated",
	}, // a rule would
	{
		40005, "src=192.0.2.50 dst=192.0.2.1 sport=40005 dport=31000 [UNREPLIED] src=203.0.113.250 dst=192.0.2.50 sport=31000 dport=40005 zone=7",
		"delete backend-gone", "delete backend-gone",
	}, // where the rules tell nothing
	{
		40006, "src=192.0.2.50 dst=203.0.113.20 sport=40006 dport=53 [UNREPLIED] src=203.0.113.20 dst=192.0.2.50 sport=53 dport=40006",
		"keep uncertain-address", "delete untranslated",
	}, // a proxy may pass over external addresses, and its rules do not
	{
		40007, "src=192.0.2.50 dst=203.0.113.21 sport=40007 dport=53 [UNREPLIED] src=203.0.113.21 dst=192.0.2.50 sport=53 dport=40007",
		"keep uncertain-address", "keep uncertain-address",
	}, // they do
}

// antrea returns a namespace with the rule and the flows.
func antrea(t *testing.T) (*testnet.NS, *conntrack.Conn) {
	t.Helper()
	ns, c := kernelTable(t)
	must(t, ns.AddAddr("lo", netip.MustParsePrefix("192.0.2.1/32")))
	must(t, ns.SetNAT(testnet.Forward{
		Proto: conntrack.UDP, Dst: netip.MustParseAddrPort("192.0.2.1:31000"),
		Backends: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.250:31000")},
	}, testnet.Forward{
		Proto: conntrack.UDP, Dst: netip.MustParseAddrPort("203.0.113.20:53"),
		Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.12:53")},
	}))
	for _, f := range antreaFlows {
		flow, err := conntrack.Parse("udp 17 600 " + f.text)
		must(t, err)
		must(t, c.Create(t.Context(), flow))
	}
	return ns, c
}

// verdicts are those of the listed flows, by the port that they came from.
func verdicts(out output) map[uint16]string {
	m := map[uint16]string{}
	for _, r := range out.Flows {
		m[*r.Flow.Original.SrcPort] = r.Verdict + " " + r.Reason
	}
	return m
}

// noteOf is the text of a note of the summary, "" where there is none.
func noteOf(out output, id string) string {
	if i := slices.IndexFunc(out.Summary.Notes, func(n note) bool { return n.ID == id }); i >= 0 {
		return out.Summary.Notes[i].Text
	}
	return ""
}

// What is stale by the desired state and what the rules would make again stays,
// and the rule is named.
func TestStateAndRules(t *testing.T) {
	ns, c := antrea(t)
	args := []string{"--netns", ns.Path(), "--state", writeFile(t, antreaState), "--node", "n1", "--zone", "0,7"}
	rule := regexp.MustCompile(`^inet flowsweep-test forwards handle \d+$`)
	told := regexp.MustCompile(`^2 flows are stale by the desired state and are kept, ` +
		`since by the NAT rules they would only come back: inet flowsweep-test forwards handle \d+ \(1\), no rule translates it \(1\)$`)
	check := func(command string, extra ...string) output {
		t.Helper()
		out, code, stderr := runJSON(t, slices.Concat([]string{command, "--all"}, args, extra)...)
		got := verdicts(out)
		for _, f := range antreaFlows {
			if got[f.port] != f.both {
				t.Errorf("%s: from port %d: %s, want %s", command, f.port, got[f.port], f.both)
			}
		}
		for _, r := range out.Flows {
			switch port := *r.Flow.Original.SrcPort; {
			case port == 40000 && (!rule.MatchString(r.Why) || r.Owner != "default/dns:udp" || r.Kind != "node-port"),
				port == 40003 && r.Why != "no rule translates it":
				t.Errorf("%s: from port %d: %s %s, since %q", command, port, r.Kind, r.Owner, r.Why)
			}
		}
		if text := noteOf(out, "ruleset-disagrees"); !told.MatchString(text) || noteOf(out, "rules-not-asked") != "" {
			t.Errorf("%s: %+v", command, out.Summary.Notes)
		}
		if code != 0 || stderr != "" {
			t.Errorf("%s: exit %d, %s", command, code, stderr)
		}
		return out
	}
	check("plan")
	for _, tt := range []struct{ flow, step, verdict string }{
		{"192.0.2.50:40000>192.0.2.1:31000/udp", "the present NAT rules would make it again: inet flowsweep-test forwards handle ", "keep ruleset-disagrees (default/dns:udp)"},
		{"192.0.2.50:40003>203.0.113.10:53/udp", "by the present NAT rules a new flow would be the same: no rule translates it", "keep ruleset-disagrees (default/dns:udp)"},
		{"192.0.2.50:40002>192.0.2.1:31000/udp", "the present NAT rules would not make it again", "delete backend-gone (default/dns:udp)"},
		{"192.0.2.50:40005>192.0.2.1:31000/udp", "whether the NAT rules would make it again cannot be told: the flow is in another conntrack zone than 0", "delete backend-gone (default/dns:udp)"},
	} {
		stdout, code, stderr := tryRun(t, append([]string{"explain", tt.flow}, args...)...)
		if code != 0 || !strings.Contains(stdout, ". "+tt.step) || !strings.HasSuffix(stdout, "\nverdict: "+tt.verdict+"\n") {
			t.Errorf("exit %d, want %q, %q\n%s%s", code, tt.step, tt.verdict, stdout, stderr)
		}
	}
	stdout, code, stderr := tryRun(t, append([]string{"explain", "192.0.2.1:31000/udp"}, args...)...)
	for _, part := range []string{
		"192.0.2.1:31000/UDP by the desired state\n  1. it is on an address of this host\n  2. it matches the node-port *:31000/UDP of default/dns:udp",
		"192.0.2.1:31000/UDP by the NAT rules of network namespace ",
		"what they may do with a packet from anywhere: 203.0.113.250:31000\n",
		"the conntrack table: 1 keep serving, 1 keep ruleset-disagrees, 2 delete backend-gone, 1 delete untranslated\n",
		"  from 192.0.2.50:40000 -> 203.0.113.250:31000: keep ruleset-disagrees\n",
	} {
		if code != 0 || !strings.Contains(stdout, part) {
			t.Errorf("exit %d, want %q in\n%s%s", code, part, stdout, stderr)
		}
	}
	if out := check("sweep"); out.Summary.Deleted != 4 {
		t.Errorf("%+v", out.Summary)
	}
	left, err := c.List(t.Context(), conntrack.Filter{})
	must(t, err)
	if len(left) != 4 {
		t.Errorf("left: %v", left)
	}
}

// So it is with a cluster, which is looked at twice.
func TestClusterAndRules(t *testing.T) {
	ns, c := antrea(t)
	server := httptest.NewServer(&apiServer{lists: map[string]string{
		"services": `{"metadata":{"namespace":"default","name":"dns","uid":"u"},
 "spec":{"type":"NodePort","clusterIP":"203.0.113.10","externalIPs":["203.0.113.20","203.0.113.21"],"ports":[{"name":"udp","protocol":"UDP","port":53,"nodePort":31000}]}}`,
		"endpointslices": strings.ReplaceAll(dnsSlice, "198.51.100.11", "198.51.100.12"),
		"nodes":          nodeN1, "servicecidrs": serviceRange, "pods": "",
	}})
	defer server.Close()
	out, code, stderr := runJSON(t, "sweep", "--kubeconfig", kubeconfig(t, server.URL), "--node", "n1", "--netns", ns.Path(), "--zone", "0,7")
	want := map[uint16]string{}
	for _, f := range antreaFlows {
		if strings.HasPrefix(f.both, "delete") {
			want[f.port] = f.both
		}
	}
	if got := verdicts(out); code != 0 || len(got) != len(want) || out.Summary.Deleted != len(want) || out.Summary.Reasons["ruleset-disagrees"] != 2 {
		t.Errorf("exit %d, %v, %+v\n%s", code, got, out.Summary, stderr)
	}
	for port, w := range want {
		if got := verdicts(out)[port]; got != w {
			t.Errorf("from port %d: %s, want %s", port, got, w)
		}
	}
	if n, err := c.Count(t.Context()); err != nil || n != len(antreaFlows)-len(want) {
		t.Errorf("%d flows are left, %v", n, err)
	}
}

// Rules that change while the table is walked are never judged by as they were:
// what they made right, and make no more, goes; and where they cannot be read
// again, it stays.
func TestStateAndRulesMove(t *testing.T) {
	const flows = 300
	for _, tt := range []struct {
		name   string
		moves  int // passes in which the rules change
		passes int
		left   int
		reload error
	}{
		{"not", 0, 1, flows, nil},
		{"once", 1, 2, 0, nil},
		{"and cannot be read", 1, maxPasses, flows, ruleset.ErrChanging},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, c := kernelTable(t)
			setNAT(t, ns, forwarding{vips[0]: backends[0]})
			for i := range flows {
				f := numbered(t, 1+i, backends[0].Addr().String())
				f.Reply.SrcPort = backends[0].Port()
				must(t, c.Create(t.Context(), f))
			}
			in := &inputs{netns: ns.Path(), state: []string{writeFile(t, oneService)}, sweep: "udp=all"}
			cmd := newPlan()
			cmd.SetContext(t.Context())
			w, err := in.load(cmd)
			must(t, err)
			defer w.close()
			if tt.reload != nil {
				w.both.rules.reload = func() (ruleset.Change, error) { return ruleset.Change{}, tt.reload }
			}
			conn := &moving{Conn: c, move: func(pass int) {
				if pass <= tt.moves {
					setNAT(t, ns, forwarding{vips[0]: backends[1]})
				}
			}}
			p, err := sweep.NewPlanner(t.Context(), conn, w.both, conntrack.IPv4)
			must(t, err)
			sw := sweep.Sweeper{Conn: conn, Judge: w.both, OnFlow: func(*conntrack.Flow, frontend.Verdict) {}}
			report, err := w.both.rules.passes(t.Context(), &sw, p.Full())
			if !errors.Is(err, tt.reload) {
				t.Errorf("%v, want %v", err, tt.reload)
			}
			if n, err := c.Count(t.Context()); err != nil || n != tt.left || report.Deleted != flows-tt.left || conn.pass != tt.passes {
				t.Errorf("%d flows are left (%v), want %d; %d passes, want %d; %+v", n, err, tt.left, conn.pass, tt.passes, report)
			}
		})
	}
}

// Where the rules cannot be asked, the state decides and the summary says so; an
// answered flow to what was never known to be a backend is deleted after all
// others.
func TestStateAlone(t *testing.T) {
	const each = 15
	state := writeFile(t, oneService)
	before := writeFile(t, strings.ReplaceAll(oneService, `["198.51.100.11:53"]`, `["198.51.100.11:53","198.51.100.12:53"]`))
	flows := func(t *testing.T) (*testnet.NS, *conntrack.Conn) {
		ns, c := kernelTable(t)
		for i := range 4 * each {
			kind := i / each
			f := numbered(t, 1000*(1+kind)+i, []string{"198.51.100.13", "198.51.100.12", "198.51.100.13", "198.51.100.11"}[kind])
			if kind != 2 {
				f.Status |= conntrack.StatusSeenReply
			}
			must(t, c.Create(t.Context(), f))
		}
		return ns, c
	}
	const last = "198.51.100.13 answered"
	order := func(out output) (list []string) {
		for _, r := range out.Flows {
			s := r.Flow.Reply.Src.String()
			if r.Flow.Replied {
				s += " answered"
			}
			if r.Verdict == "delete" {
				list = append(list, s)
			}
		}
		return list
	}
	for _, tt := range []struct {
		name   string
		legacy bool
		args   []string
		late   int // flows that are deleted after all others
		note   string
	}{
		{"iptables-legacy", true, []string{"--before", before}, each, "the NAT rules were not asked: iptables-legacy has a nat table"},
		{"iptables-legacy, and all are listed", true, []string{"--before", before, "--all"}, each, "the NAT rules were not asked: iptables-legacy has a nat table"},
		{"nothing known before", true, nil, 2 * each, "the NAT rules were not asked: iptables-legacy has a nat table"},
		{"rules", false, []string{"--before", before}, 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, c := flows(t)
			if tt.legacy {
				nstest.LegacyNAT(t, ns)
			} else {
				must(t, ns.SetNAT(testnet.Forward{
					Proto: conntrack.UDP, Dst: netip.MustParseAddrPort("203.0.113.10:53"),
					Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.11:53")},
				}))
			}
			args := append([]string{"--netns", ns.Path(), "--state", state}, tt.args...)
			planned, code, stderr := runJSON(t, append([]string{"plan"}, args...)...)
			if n := planned.Summary.Delete; code != 0 || n != 3*each || noteOf(planned, "rules-not-asked") != tt.note {
				t.Errorf("exit %d, %d to delete, %+v, %s", code, n, planned.Summary.Notes, stderr)
			}
			out, code, stderr := runJSON(t, append([]string{"sweep"}, args...)...)
			if s := out.Summary; code != 0 || s.Deleted != 3*each || s.Delete != 3*each || noteOf(out, "rules-not-asked") != tt.note {
				t.Errorf("exit %d, %+v, %s", code, s, stderr)
			}
			if n, err := c.Count(t.Context()); err != nil || n != each {
				t.Errorf("%d flows are left, %v", n, err)
			}
			got := order(out)
			if len(got) != 3*each {
				t.Fatalf("%d flows are listed", len(got))
			}
			answered := func(s string) bool { return strings.HasSuffix(s, "answered") }
			late := got[len(got)-tt.late:]
			if tt.late > 0 && (slices.Contains(got[:len(got)-tt.late], last) || slices.ContainsFunc(late, func(s string) bool { return !answered(s) })) {
				t.Errorf("the order is %q", got)
			}
		})
	}
}

// Where IPVS holds connections, deleting flows is not all.
func TestTellsOfIPVS(t *testing.T) {
	for _, held := range []bool{false, true} {
		s := summary{Reasons: map[string]int{}}
		(&both{notAsked: "IPVS has services", held: held}).tell(&s)
		out := output{Summary: s}
		if got := noteOf(out, "ipvs-holds"); (got == nft.IPVSHeld) != held || noteOf(out, "rules-not-asked") != "the NAT rules were not asked: IPVS has services" {
			t.Errorf("held %t: %+v", held, s.Notes)
		}
	}
}
