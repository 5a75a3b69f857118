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

var (
	prefix   = netip.MustParsePrefix
	addr     = netip.MustParseAddr
	addrPort = netip.MustParseAddrPort
)

func TestVeth(t *testing.T) {
	tests := []struct {
		name       string
		near, far  netip.Prefix
		loopbacked netip.Prefix // on the far side's lo, reached by a route
	}{
		{"IPv4", prefix("192.0.2.1/24"), prefix("192.0.2.2/24"), prefix("203.0.113.9/32")},
		{"IPv6", prefix("2001:db8::1/64"), prefix("2001:db8::2/64"), prefix("2001:db8:9::9/128")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			near, far := nstest.New(t), nstest.New(t)
			for _, err := range []error{
				near.Veth("va", far, "vb"),
				near.AddAddr("va", tt.near), far.AddAddr("vb", tt.far),
				far.AddAddr("lo", tt.loopbacked),
				near.AddRoute(tt.loopbacked, tt.far.Addr(), ""),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			for _, a := range []netip.Addr{tt.far.Addr(), tt.loopbacked.Addr()} {
				server := nstest.Echo(t, far, netip.AddrPortFrom(a, 53))
				got, err := testnet.Ask(near, netip.AddrPort{}, server.Addr(), 5*time.Second)
				if err != nil || got != server.Addr() {
					t.Errorf("asked %s: %s, %v", server.Addr(), got, err)
				}
			}
			if err := far.DelAddr("lo", tt.loopbacked); err != nil {
				t.Error(err)
			}
			if _, err := far.ListenUDP(netip.AddrPortFrom(tt.loopbacked.Addr(), 54)); !errors.Is(err, unix.EADDRNOTAVAIL) {
				t.Errorf("listen on a deleted address: %v", err)
			}
		})
	}
}

// The kernel is slowest to give a pair its queues where both ends have the same
// index (linkwatch_urgent_event), as the first ones of two namespaces have. That
// the first datagram then is lost is a matter of chance: it takes many pairs.
func TestVethCarriesAtOnce(t *testing.T) {
	for range 20 {
		near, far := nstest.New(t), nstest.New(t)
		if err := near.Veth("va", far, "vb"); err != nil {
			t.Fatal(err)
		}
		for _, network := range []netip.Prefix{prefix("192.0.2.0/24"), prefix("2001:db8::/64")} {
			first := network.Addr().Next()
			second := first.Next()
			if err := errors.Join(
				near.AddAddr("va", netip.PrefixFrom(first, network.Bits())),
				far.AddAddr("vb", netip.PrefixFrom(second, network.Bits())),
			); err != nil {
				t.Fatal(err)
			}
			server := nstest.Echo(t, far, netip.AddrPortFrom(second, 53))
			// A neighbour is asked for again after a second.
			if _, err := testnet.Ask(near, netip.AddrPort{}, server.Addr(), 900*time.Millisecond); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestOnLinkRoute(t *testing.T) {
	ns := nstest.New(t)
	for _, dst := range []netip.Prefix{prefix("198.51.100.0/24"), prefix("2001:db8:5::/64")} {
		if err := ns.AddRoute(dst, netip.Addr{}, "lo"); err != nil {
			t.Error(err)
		}
		c, err := ns.DialUDP(netip.AddrPort{}, netip.AddrPortFrom(dst.Addr().Next(), 9))
		if err != nil {
			t.Errorf("no route: %v", err)
			continue
		}
		c.Close()
	}
}

func TestRequestErrors(t *testing.T) {
	ns, peer := nstest.New(t), nstest.New(t)
	if err := errors.Join(
		ns.AddAddr("lo", prefix("192.0.2.1/24")),
		ns.AddRoute(prefix("198.51.100.0/24"), netip.Addr{}, "lo"),
		ns.Veth("va", peer, "vb"),
	); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		err  error
		want string
		is   error
	}{
		{
			"address twice", ns.AddAddr("lo", prefix("192.0.2.1/24")),
			"testnet: add address 192.0.2.1/24 to lo: file exists", unix.EEXIST,
		},
		{
			"address without interface", ns.AddAddr("veth0", prefix("192.0.2.1/24")),
			"testnet: add address 192.0.2.1/24 to veth0: no such device", unix.ENODEV,
		},
		{
			"interface name too long", ns.AddAddr("sixteen-bytes-xx", prefix("192.0.2.1/24")),
			`testnet: add address 192.0.2.1/24 to sixteen-bytes-xx: interface name "sixteen-bytes-xx": invalid argument`,
			unix.EINVAL,
		},
		{
			"no such address", ns.DelAddr("lo", prefix("2001:db8::1/64")),
			"testnet: delete address 2001:db8::1/64 from lo: cannot assign requested address", unix.EADDRNOTAVAIL,
		},
		{"interface up", ns.SetUp("veth0"), "testnet: bring up veth0: no such device", unix.ENODEV},
		{
			"route twice", ns.AddRoute(prefix("198.51.100.0/24"), netip.Addr{}, "lo"),
			"testnet: add route to 198.51.100.0/24: file exists", unix.EEXIST,
		},
		{
			"gateway out of reach", ns.AddRoute(prefix("0.0.0.0/0"), addr("203.0.113.1"), "lo"),
			"testnet: add route to 0.0.0.0/0: network is unreachable", unix.ENETUNREACH,
		},
		{
			"route without interface", ns.AddRoute(prefix("0.0.0.0/0"), netip.Addr{}, "veth0"),
			"testnet: add route to 0.0.0.0/0: no such device", unix.ENODEV,
		},
		{
			"pair twice", ns.Veth("va", peer, "vc"),
			"testnet: add veth pair va and vc: file exists", unix.EEXIST,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !errors.Is(tt.err, tt.is) || !strings.HasPrefix(tt.err.Error(), tt.want) {
				t.Errorf("got  %v\nwant %s", tt.err, tt.want)
			}
		})
	}
}
