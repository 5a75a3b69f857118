//go:build linux

package ruleset

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
)

// kubeIPTables writes services as kube-proxy does in its iptables mode: for each,
// one rule that leads to its chain, one there, and two in its endpoint's chain.
func kubeIPTables(rules int) string {
	var chains, b strings.Builder
	chains.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n")
	b.WriteString("-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n")
	for i := range rules / 4 {
		fmt.Fprintf(&chains, ":KUBE-SVC-%05d - [0:0]\n:KUBE-SEP-%05d - [0:0]\n", i, i)
		fmt.Fprintf(&b, "-A KUBE-SERVICES -d %s -p udp -m comment --comment \"default/s%d cluster IP\" -m udp --dport 53 -j KUBE-SVC-%05d\n",
			benchService(i), i, i)
		fmt.Fprintf(&b, "-A KUBE-SVC-%05d -m comment --comment \"default/s%d -> 198.51.100.1:53\" -j KUBE-SEP-%05d\n", i, i, i)
		fmt.Fprintf(&b, "-A KUBE-SEP-%05d -s 198.51.100.1 -j KUBE-MARK-MASQ\n", i)
		fmt.Fprintf(&b, "-A KUBE-SEP-%05d -p udp -m udp -j DNAT --to-destination 198.51.100.1:53\n", i)
	}
	return chains.String() + b.String() + "COMMIT\n"
}

func benchService(i int) string { return fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250) }

// kubeNFT writes services as kube-proxy does in its nftables mode: a map of
// services, for each a chain with an anonymous map, and a chain with two rules for
// its endpoint.
func kubeNFT(rules int) string {
	var b, elems strings.Builder
	b.WriteString("table ip kube-proxy {\n")
	for i := range rules / 3 {
		fmt.Fprintf(&b, "chain e%d {\nip saddr 198.51.100.1 meta mark set 0x4000\nmeta l4proto udp dnat to 198.51.100.1:53\n}\n", i)
		fmt.Fprintf(&b, "chain s%d {\nnumgen random mod 1 vmap { 0 : goto e%d }\n}\n", i, i)
		fmt.Fprintf(&elems, "%s . udp . 53 : goto s%d,\n", benchService(i), i)
	}
	fmt.Fprintf(&b, "map services {\ntype ipv4_addr . inet_proto . inet_service : verdict\nelements = { %s }\n}\n", elems.String())
	for _, hook := range []string{"prerouting", "output"} {
		fmt.Fprintf(&b, "chain %s {\ntype nat hook %s priority -100\nip daddr . meta l4proto . th dport vmap @services\n}\n", hook, hook)
	}
	b.WriteString("}\n")
	return b.String()
}

// BenchmarkRuleset reads rulesets of several sizes and judges by them. MB is what
// the process holds more when the rules are read, and when all services have been
// judged.
func BenchmarkRuleset(b *testing.B) {
	for _, kind := range []struct {
		name  string
		write func(int) string
		per   int
		tool  []string
		sizes []int
	}{
		{"iptables", kubeIPTables, 4, []string{"iptables-nft-restore"}, []int{1000, 10_000, 50_000}},
		// Loading more anonymous maps takes nft and the kernel minutes.
		{"nft", kubeNFT, 3, []string{"nft", "-f", "-"}, []int{1000, 10_000}},
	} {
		for _, rules := range kind.sizes {
			name := fmt.Sprintf("%s/%d", kind.name, rules)
			var s *scene
			prepare := func(b *testing.B) {
				b.Helper()
				if s == nil {
					s = newScene(b)
				}
				s.run(b, kind.write(rules), kind.tool[0], kind.tool[1:]...)
			}
			b.Run("load/"+name, func(b *testing.B) {
				s = nil
				prepare(b)
				before := heap()
				var rs *Ruleset
				for b.Loop() {
					var err error
					rs, err = s.rules.Load(b.Context())
					must(b, err)
				}
				b.ReportMetric(float64(heap()-before)/(1<<20), "MB")
				if got := rs.Size().Rules; got < rules*9/10 {
					b.Fatalf("%d rules", got)
				}
			})
			b.Run("judge/"+name, func(b *testing.B) {
				s = nil
				prepare(b)
				before := heap()
				j, err := NewJudge(b.Context(), Config{NetNS: s.router.Path(), Host: s.host})
				must(b, err)
				defer j.Close()
				flows := make([]conntrack.Flow, rules/kind.per)
				for i := range flows {
					f := flowOf("198.51.100.1:53")
					f.Orig.Dst = netip.MustParseAddr(benchService(i))
					flows[i] = *f
					if v := j.Judge(f); v.Verdict != Right {
						b.Fatalf("%+v", v)
					}
				}
				held := heap() - before
				i := 0
				for b.Loop() {
					if v := j.Judge(&flows[i%len(flows)]); v.Verdict != Right {
						b.Fatalf("%+v", v)
					}
					i++
				}
				b.ReportMetric(float64(held)/(1<<20), "MB")
			})
		}
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
