//go:build linux

package main

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

func TestEntriesAreSpread(t *testing.T) {
	const n = 200_000
	tuples := map[conntrack.Tuple]bool{}
	perService := map[service]int{}
	var udp, v6, outgoing, answered int
	for i := range n {
		e := entryAt(i)
		f := e.flow()
		for _, tuple := range []conntrack.Tuple{f.Orig, f.Reply} {
			if e.proto == conntrack.TCP {
				tuple.ICMPID = 1 // so that both protocols fit one map
			}
			if tuples[tuple] && f.Translated() {
				t.Fatalf("flow %d: tuple %v is taken", i, tuple)
			}
			tuples[tuple] = true
		}
		if e.backend >= 0 {
			perService[e.service]++
		} else {
			outgoing++
		}
		for sum, is := range map[*int]bool{
			&udp: e.proto == conntrack.UDP, &v6: e.family == conntrack.IPv6, &answered: e.answered,
		} {
			if is {
				*sum++
			}
		}
	}
	if len(perService) != services4+services6 {
		t.Errorf("flows of %d services", len(perService))
	}
	for s, got := range perService {
		want := n * 16 / 20 / services4
		if s.family == conntrack.IPv6 {
			want = n * 2 / 20 / services6
		}
		if got != want {
			t.Errorf("%s has %d flows, want %d", s.name(), got, want)
		}
	}
	for what, x := range map[string]struct{ got, percent int }{
		"UDP": {udp, 50}, "IPv6": {v6, 10}, "outgoing": {outgoing, 10}, "answered": {answered, 83},
	} {
		if diff := x.got*100/n - x.percent; diff < -1 || diff > 1 {
			t.Errorf("%s: %d of %d, want %d %%", what, x.got, n, x.percent)
		}
	}
}

// What is deleted can be measured on the smallest table too.
func TestSmallTablesHaveVictims(t *testing.T) {
	for _, w := range works(&options{}) {
		if w.deletes != nil && count(10_000, w.deletes) == 0 {
			t.Errorf("%s deletes none of 10000 flows", w.name)
		}
	}
}

// What a work is said to delete is what the judgement says, and what kube-proxy
// would.
func TestWorldsAgree(t *testing.T) {
	all := whole()
	gone, edit := stale(25), events()[slices.IndexFunc(events(), func(e event) bool { return e.name == "service-edited" })]
	for name, tt := range map[string]struct {
		world world
		stale func(entry) bool
	}{
		"whole":      {all, func(entry) bool { return false }},
		"25 % stale": {all.without(gone), staleFlows(25)},
		"edited":     {edit.world, edit.gone},
	} {
		t.Run(name, func(t *testing.T) {
			table := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
			table.Replace(tt.world.units())
			svcs, eps := tt.world.kubeProxy(corev1.IPv4Protocol)
			kept := map[netip.AddrPort]map[string]bool{}
			for name, svc := range svcs {
				if svc.Protocol() != corev1.ProtocolUDP {
					continue
				}
				to := map[string]bool{}
				for _, ep := range eps[name] {
					to[ep.String()] = true
				}
				vip, _ := netip.AddrFromSlice(svc.ClusterIP().To4())
				kept[netip.AddrPortFrom(vip, uint16(svc.Port()))] = to
			}
			for i := range 20_000 {
				e := entryAt(i)
				f := e.flow()
				if got, want := table.Judge(&f).Action == frontend.Delete, byDefault(tt.stale)(e); got != want {
					t.Fatalf("flow %d, %s: flowsweep deletes it: %v, want %v", i, &f, got, want)
				}
				to, ours := kept[netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)]
				backend := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort).String()
				got := f.Proto == conntrack.UDP && f.Family == conntrack.IPv4 && ours && !to[backend]
				if want := onlyUDP4(tt.stale)(e); got != want {
					t.Fatalf("flow %d, %s: kube-proxy deletes it: %v, want %v", i, &f, got, want)
				}
			}
		})
	}
}
