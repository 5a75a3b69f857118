//go:build linux

package testnet_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// The star that most tests use: a client, a node that forwards, backends.
func clientNodeBackends(t *testing.T) (client, node, backends *testnet.NS) {
	t.Helper()
	s := nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{prefix("192.0.2.0/24"), prefix("2001:db8:1::/64")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{prefix("198.51.100.0/24"), prefix("2001:db8:2::/64")}},
	)
	return s.Leaf("client"), s.Router, s.Leaf("backends")
}

func TestStar(t *testing.T) {
	client, node, backends := clientNodeBackends(t)
	for _, tt := range []struct {
		name string
		ns   *testnet.NS
		addr string
	}{
		{"leaf over IPv4", backends, "198.51.100.2:53"},
		{"leaf over IPv6", backends, "[2001:db8:2::2]:53"},
		{"router over IPv4", node, "192.0.2.1:53"},
		{"router over IPv6", node, "[2001:db8:1::1]:53"},
		{"router's far side", node, "198.51.100.1:53"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := nstest.Echo(t, tt.ns, addrPort(tt.addr))
			start := time.Now()
			got, err := testnet.Ask(client, netip.AddrPort{}, server.Addr(), 5*time.Second)
			if err != nil || got != server.Addr() {
				t.Errorf("%s, %v", got, err)
			}
			// Duplicate address detection would take a second.
			if took := time.Since(start); took > 900*time.Millisecond {
				t.Errorf("the first datagram took %s", took)
			}
		})
	}
}

func TestStarErrors(t *testing.T) {
	nstest.Require(t)
	descriptors := count(t, "/proc/self/fd")
	tests := []struct {
		name   string
		leaves []testnet.Leaf
		want   string
		is     error
	}{
		{"name twice", []testnet.Leaf{{Name: "a"}, {Name: "a"}}, "testnet: leaf a: there is one of this name", nil},
		{"name too long", []testnet.Leaf{{Name: "sixteen-bytes-xx"}}, "testnet: leaf sixteen-bytes-xx: ", unix.ERANGE},
		{
			"network twice",
			[]testnet.Leaf{{Name: "a", Prefixes: []netip.Prefix{prefix("192.0.2.0/24"), prefix("192.0.2.0/24")}}},
			"testnet: leaf a: testnet: add address 192.0.2.1/24 to a: ", unix.EEXIST,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := testnet.NewStar(tt.leaves...)
			if err == nil || !strings.HasPrefix(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got %v, want %q (%v)", err, tt.want, tt.is)
			}
		})
	}
	if got := count(t, "/proc/self/fd"); got != descriptors {
		t.Errorf("%d descriptors left over", got-descriptors)
	}
}

func TestStarWithoutLeaf(t *testing.T) {
	if ns := nstest.Star(t).Leaf("client"); ns != nil {
		t.Errorf("got %v for a leaf that is not there", ns)
	}
}
