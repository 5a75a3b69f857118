//go:build linux

package main

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/kubernetes/cluster"
)

// sink keeps what a source delivers.
type sink struct {
	replaced chan map[string][]frontend.Frontend
	set      chan []frontend.Frontend
}

func (s sink) Replace(units map[string][]frontend.Frontend) { s.replaced <- units }
func (s sink) Set(_ string, fs []frontend.Frontend)         { s.set <- fs }
func (sink) Host(source.Host)                               {}
func (sink) ServiceRanges([]netip.Prefix)                   {}
func (sink) Fault(error)                                    {}

// The source takes the API server for one: its list, its events, and a list
// again when watches expire.
func TestAPIServer(t *testing.T) {
	nstest.Require(t)
	w := world{services4: 30, services6: 20}
	api, err := serveAPI(w)
	if err != nil {
		t.Fatal(err)
	}
	defer api.close()
	src, err := cluster.New(cluster.Config{API: &rest.Config{Host: "http://" + api.addr}, Node: "node-0"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	got := sink{make(chan map[string][]frontend.Frontend, 10), make(chan []frontend.Frontend, 10)}
	ended := make(chan error)
	go func() { ended <- src.Run(ctx, got) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	units := func() map[string][]frontend.Frontend {
		t.Helper()
		select {
		case u := <-got.replaced:
			return u
		case <-ctx.Done():
			t.Fatal("no list")
			return nil
		}
	}
	if u := units(); len(u) != 50 {
		t.Errorf("%d units, want 50", len(u))
	}
	_, slice := w.without(func(_ service, b int) bool { return b == 9 }).service(service{conntrack.IPv4, 3})
	api.update(3, slice)
	select {
	case fs := <-got.set:
		if len(fs) != 1 || fs[0].Owner != "default/ipv4-3:udp" || fs[0].Valid.Len() != 9 {
			t.Errorf("after an update: %+v", fs)
		}
	case <-ctx.Done():
		t.Fatal("no update")
	}
	api.expire()
	if u := units(); len(u) != 50 {
		t.Errorf("%d units in the second list", len(u))
	}
}
