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
					play(t, r, mode, "", func(testCase) bool { return true })
				})
				t.Run("flowsweep", func(t *testing.T) {
					play(t, r, mode, serviceAccount, func(tc testCase) bool { return !tc.outage })
				})
			})
			t.Run(mode+"-outages", func(t *testing.T) {
				t.Parallel()
				play(t, r, mode, lastingToken, func(tc testCase) bool { return tc.outage })
			})
		}
		t.Run("deployment", func(t *testing.T) {
			t.Parallel()
			deployment(t)
		})
	})
	t.Run("scale", func(t *testing.T) { scale(t, r) })
	r.write(t)
}

// serviceAccount stands for a token that is yet to be taken.
const serviceAccount = "serviceaccount"

// play plays cases on a cluster of their own, with the agent if it has a token.
func play(t *testing.T, r *report, mode, token string, wanted func(testCase) bool) {
	c := newCluster(t)
	c.startProxy(t, mode)
	var backends int
	bystanders := bystanders(&scene{T: t, cluster: c, pace: 5 * pace, next: &backends})
	var a *agent
	switch token {
	case "":
	case serviceAccount:
		a = c.startAgent(t, c.takeToken(t))
	default:
		a = c.startAgent(t, token)
	}
	for i, tc := range cases {
		if !wanted(tc) {
			continue
		}
		t.Run(tc.name, func(t *testing.T) {
			s := &scene{T: t, cluster: c, agent: a, report: r, key: caseKey{tc.name, mode}, pace: pace, next: &backends}
			tc.play(s)
			if i < len(cases)-1 {
				s.untouched(bystanders...)
			}
		})
	}
}

// bystanders are flows that are right, or none of a service, through all that happens.
func bystanders(s *scene) []*stream {
	const port = 7
	svc, b := s.service(), s.backend()
	svc.endpoints(b.ready())
	for i := range clientAddr {
		nstest.Echo(s, s.client, netip.AddrPortFrom(clientAddr[i], port))
		nstest.Echo(s, s.node, netip.AddrPortFrom(nodeAddr[i], port))
	}
	return append(s.everywhere(svc, b),
		s.send(s.node, "outgoing flow", frontends(clientAddr, port), nil),
		s.send(s.client, "flow to the node itself", frontends(nodeAddr, port), nil))
}
