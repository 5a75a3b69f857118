package cli

import (
	"net/netip"
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// Only what was stale by both readings of a cluster is deleted.
func TestConfirmed(t *testing.T) {
	flow := func(src string) *conntrack.Flow {
		f, err := conntrack.Parse("udp 17 30 src=192.0.2.50 dst=203.0.113.10 sport=40000 dport=53 src=" + src +
			" dst=192.0.2.50 sport=53 dport=40000 [ASSURED] mark=0 use=1")
		if err != nil {
			t.Fatal(err)
		}
		return &f
	}
	table := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	table.Set("dns", []frontend.Frontend{{
		Owner: "default/dns", Kind: frontend.ClusterIP, Proto: conntrack.UDP,
		Addr: netip.MustParseAddr("203.0.113.10"), Ports: frontend.Port(53),
		Valid: frontend.NewBackends(netip.MustParseAddrPort("198.51.100.11:53")), Usable: 1,
	}})
	judge := confirmed{table, map[translation]bool{
		translationOf(flow("198.51.100.11")): true, translationOf(flow("198.51.100.12")): true,
	}}
	for src, want := range map[string]string{
		"198.51.100.11": "keep serving",        // its backend came between
		"198.51.100.12": "delete backend-gone", // stale by both
		"198.51.100.13": "keep unconfirmed",    // the flow came between
	} {
		if v := judge.Judge(flow(src)); v.String() != want {
			t.Errorf("answered from %s: %s, want %s", src, v, want)
		}
	}
}
