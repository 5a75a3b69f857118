//go:build linux

package testnet_test

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// Rules that were replaced are as they were.
func TestChurn(t *testing.T) {
	star := nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{prefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backend", Prefixes: []netip.Prefix{prefix("198.51.100.0/24")}})
	server := nstest.Echo(t, star.Leaf("backend"), addrPort("198.51.100.2:5353"))
	dst := []netip.AddrPort{addrPort("203.0.113.10:53"), addrPort("203.0.113.11:54")}
	port := uint16(10_000)
	answered := func() {
		t.Helper()
		for _, d := range dst {
			port++ // a flow of its own
			from := netip.AddrPortFrom(addr("192.0.2.2"), port)
			if got, err := testnet.Ask(star.Leaf("client"), from, d, 5*time.Second); err != nil || got != server.Addr() {
				t.Errorf("asked %s, %s answered: %v", d, got, err)
			}
		}
	}
	c, err := testnet.NewChurn(star.Router, unix.IPPROTO_UDP, server.Addr(), 20_000, dst...)
	if err != nil {
		t.Fatal(err)
	}
	answered()
	c.Start()
	// While they are replaced, kernels before 6.17 let packets pass.
	if _, err := testnet.Ask(star.Leaf("client"), netip.AddrPort{}, server.Addr(), 5*time.Second); err != nil {
		t.Error(err)
	}
	n, err := c.Stop()
	if err != nil || n == 0 {
		t.Errorf("%d commits, %v", n, err)
	}
	if again, err := c.Stop(); again != n || err != nil {
		t.Errorf("stopped twice: %d commits, %v", again, err)
	}
	answered()
}
