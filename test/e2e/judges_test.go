//go:build e2e && linux

package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
	source "github.com/flowsweep/flowsweep/source/kubernetes/cluster"
)

// judges are both judges of the node's flows: a table made of the API's objects, which remembers what
// is gone as the agent's does, and the NAT rules of the moment. Neither depends on an agent.
type judges struct {
	api   source.Config
	table *frontend.Table
	rules *ruleset.Verdicts
}

func newJudges(t testing.TB, c *cluster) *judges {
	t.Helper()
	rules, err := ruleset.NewJudge(t.Context(), ruleset.Config{NetNS: c.node.Path()})
	must(t, err)
	t.Cleanup(func() { must(t, rules.Close()) })
	everything := frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All}
	return &judges{
		api: source.Config{
			API:  &rest.Config{Host: apiserverURL, BearerToken: adminToken, Transport: c.http.Transport},
			Node: nodeName, HostPorts: true, ServiceRanges: true,
		},
		table: frontend.NewTable(frontend.Options{Policy: everything}),
		rules: &ruleset.Verdicts{Rules: rules, Policy: everything},
	}
}

// nodePorts is where kube-proxy serves node ports in a mode: by its default on the Node's first address
// of each family in nftables mode, and on all of the node's in iptables mode.
func nodePorts(mode string) []netip.Prefix {
	if mode == "nftables" {
		return []netip.Prefix{frontend.Primary}
	}
	return nil
}

// learn brings both up to date.
func (j *judges) learn(s *scene) error {
	w, err := source.Read(s.Context(), j.api)
	if err != nil {
		return err
	}
	host := frontend.Host{Listed: w.NodeAddresses, NodePorts: nodePorts(s.proxyMode)}
	err = s.node.Do(func() error {
		addrs, err := net.InterfaceAddrs()
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				if addr, ok := netip.AddrFromSlice(n.IP); ok && !addr.Unmap().IsLoopback() {
					host.Other = append(host.Other, addr.Unmap())
				}
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	j.table.SetHost(host)
	j.table.SetServiceRanges(w.ServiceRanges...)
	j.table.Replace(w.Units)
	_, err = j.rules.Reload(s.Context())
	return err
}

// opinions is what both judges say of a flow.
type opinions struct{ table, rules frontend.Reason }

func (o opinions) String() string { return fmt.Sprintf("%s, %s", verdict(o.table), verdict(o.rules)) }

func verdict(r frontend.Reason) string { return r.Action().String() + " " + r.String() }

// condemns tells whether a reason is one to delete, or would be, did the Service's own policy allow it:
// rules know no such policy.
func condemns(r frontend.Reason) bool { return r.Action() == frontend.Delete || r == frontend.ByPolicy }

func (o opinions) agree() bool { return condemns(o.table) == condemns(o.rules) }

// translation is where flows are sent and who answers them.
type translation struct{ to, from netip.AddrPort }

func translationOf(f *conntrack.Flow) translation {
	return translation{
		netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort),
	}
}

// difference is what the judges are to say of flows that they disagree about.
type difference struct {
	opinions
	what, why string
}

// differ says how the judges disagree about the flows of streams and those that are translated alike,
// and why, the next time they are compared.
func (s *scene) differ(table, rules frontend.Reason, why string, streams ...*stream) {
	for _, st := range streams {
		for i := range st.flows {
			k := translationOf(&st.flows[i])
			if _, known := s.differences[k]; !known { // several streams may share it
				s.differences[k] = difference{opinions{table, rules}, st.what, why}
			}
		}
	}
}

// compare has both judges judge every flow of the node's table: what one calls stale, the other has to,
// except where the case says that they differ, which they then must. Both have to agree, too, that what
// kube-proxy has left is stale. The rules may follow the objects a moment later.
func (s *scene) compare() {
	s.Helper()
	var list []opinions
	eventually(s, soon, "both judges agree", func() (err error) {
		list, err = s.judge()
		return err
	})
	s.report.compared(s.key, list, s.differences)
	clear(s.differences)
}

// judge judges every flow once, and fails where the judges do not agree as they should.
func (s *scene) judge() ([]opinions, error) {
	s.Helper()
	if err := s.judges.learn(s); err != nil {
		return nil, err
	}
	flows, err := s.flows.List(s.Context(), conntrack.Filter{})
	if err != nil {
		return nil, err
	}
	var list []opinions
	var wrong []error
	seen := map[translation]bool{}
	for i := range flows {
		f := &flows[i]
		o := opinions{s.judges.table.Judge(f).Reason, s.judges.rules.Judge(f).Reason}
		d, differs := s.differences[translationOf(f)]
		ok := o.agree()
		if differs {
			ok = o == d.opinions
		}
		if s.stale[f.Orig] {
			ok = ok && condemns(o.table) && condemns(o.rules)
		}
		if !ok {
			wrong = append(wrong, s.explain(f, o))
		}
		seen[translationOf(f)] = true
		list = append(list, o)
	}
	for k, d := range s.differences {
		if !seen[k] {
			wrong = append(wrong, fmt.Errorf("no flow to %s from %s, of which they were to say %s", k.to, k.from, d.opinions))
		}
	}
	// Rules that were written meanwhile make every flow unpredictable.
	return list, errors.Join(append(wrong, s.judges.rules.Err())...)
}

// explain tells how the judges came to their opinions of a flow.
func (s *scene) explain(f *conntrack.Flow, o opinions) error {
	_, byTable := s.judges.table.Explain(f)
	_, byRules := s.judges.rules.Explain(f)
	return fmt.Errorf("%s: %s\nby the objects:\n\t%s\nby the rules:\n\t%s", f, o,
		strings.Join(byTable, "\n\t"), strings.Join(byRules, "\n\t"))
}
