//go:build linux

package main

import (
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// filled returns a namespace whose table holds n flows, and a Conn that reaches
// it.
func filled(tb testing.TB, n int) (*testnet.NS, *conntrack.Conn) {
	tb.Helper()
	ns := nstest.New(tb)
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	if _, err := c.Probe(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	if err := fill(tb.Context(), c, n, nil); err != nil {
		tb.Fatal(err)
	}
	return ns, c
}
