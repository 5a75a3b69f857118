//go:build e2e && linux

package e2e

import (
	"net/netip"
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestE2E(t *testing.T) {
	r := &report{}
	t.Run("cases", func(t *testing.T) {
		for _, mode := range []string{"nftables", "iptables"} {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				t.Run("alone", func(t *testing.T) {
					newStage(t, r, mode).play(t, nil, func(testCase) bool { return true })
				})
				t.Run("flowsweep", func(t *testing.T) {
					st := newStage(t, r, mode)
					a := st.startAgent(t, st.takeToken(t), byRules)
					st.play(t, a, func(tc testCase) bool { return !tc.outage })
				})
			})
			t.Run(mode+"-outages", func(t *testing.T) {
				t.Parallel()
				st := newStage(t, r, mode)
				t.Run("timed", func(t *testing.T) {
					a := st.startAgent(t, lastingToken, byTime)
					st.play(t, a, func(tc testCase) bool { return tc.timed })
					a.stop(t)
				})
				t.Run("flowsweep", func(t *testing.T) {
					a := st.startAgent(t, lastingToken, byRules)
					st.play(t, a, func(tc testCase) bool { return tc.outage })
				})
			})
		}
		t.Run("deployment", func(t *testing.T) {
			t.Parallel()
			deployment(t, r)
		})
	})
	t.Run("scale", func(t *testing.T) { scale(t, r) })
	r.write(t)
}

// stage is a cluster to play cases on.
type stage struct {
	*cluster
	report     *report
	backends   int       // number of the last
	bystanders []*stream // flows that are right, or none of a service, through all that happens
}

func newStage(t *testing.T, r *report, mode string) *stage {
	t.Helper()
	const port = 7
	st := &stage{cluster: newCluster(t), report: r}
	st.startProxy(t, mode)
	s := st.scene(t, r, "bystanders", &st.backends)
	s.pace = 5 * pace
	svc, b := s.service(), s.backend()
	svc.endpoints(b.ready())
	for i := range clientAddr {
		nstest.Echo(s, s.client, netip.AddrPortFrom(clientAddr[i], port))
		nstest.Echo(s, s.node, netip.AddrPortFrom(nodeAddr[i], port))
	}
	st.bystanders = append(s.everywhere(svc, b),
		s.send(s.node, "outgoing flow", frontends(clientAddr, port), nil),
		s.send(s.client, "flow to the node itself", frontends(nodeAddr, port), nil))
	return st
}

// play plays cases, with an agent or, where it is nil, with kube-proxy alone.
func (st *stage) play(t *testing.T, a *agent, wanted func(testCase) bool) {
	if a != nil {
		a.rests(t)
	}
	for i, tc := range cases {
		if !wanted(tc) {
			continue
		}
		t.Run(tc.name, func(t *testing.T) {
			s := st.scene(t, st.report, tc.name, &st.backends)
			s.agent = a
			tc.play(s)
			s.compare()
			if i < len(cases)-1 {
				s.untouched(st.bystanders...)
			}
		})
	}
}
