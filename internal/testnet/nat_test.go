//go:build linux

package testnet_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// families are the addresses of clientNodeBackends, and some to add to it.
var families = []struct {
	name                  string
	service               netip.AddrPort // not an address of any namespace
	client, node, nodeFar netip.Addr
	backends              []netip.Prefix
}{
	{
		"IPv4", addrPort("203.0.113.10:53"), addr("192.0.2.2"), addr("192.0.2.1"), addr("198.51.100.1"),
		[]netip.Prefix{prefix("198.51.100.11/24"), prefix("198.51.100.12/24"), prefix("198.51.100.13/24")},
	},
	{
		"IPv6", addrPort("[2001:db8:f::10]:53"), addr("2001:db8:1::2"), addr("2001:db8:1::1"), addr("2001:db8:2::1"),
		[]netip.Prefix{prefix("2001:db8:2::11/64"), prefix("2001:db8:2::12/64"), prefix("2001:db8:2::13/64")},
	},
}

// serve gives the namespace the addresses and a server on port 5353 of each.
func serve(t *testing.T, ns *testnet.NS, prefixes []netip.Prefix) (servers []*testnet.Server, addrs []netip.AddrPort) {
	t.Helper()
	for _, p := range prefixes {
		if err := ns.AddAddr("eth0", p); err != nil {
			t.Fatal(err)
		}
		s := nstest.Echo(t, ns, netip.AddrPortFrom(p.Addr(), 5353))
		servers, addrs = append(servers, s), append(addrs, s.Addr())
	}
	return servers, addrs
}

// lastPort is below the ports that the kernel chooses from, which may choose the
// port of an earlier flow.
var lastPort atomic.Uint32

func init() { lastPort.Store(20000) }

// ask is Ask in a flow of its own that must be answered.
func ask(t *testing.T, ns *testnet.NS, to netip.AddrPort) netip.AddrPort {
	t.Helper()
	anywhere := netip.IPv4Unspecified()
	if to.Addr().Is6() {
		anywhere = netip.IPv6Unspecified()
	}
	from := netip.AddrPortFrom(anywhere, uint16(lastPort.Add(1)))
	got, err := testnet.Ask(ns, from, to, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func setNAT(t *testing.T, ns *testnet.NS, forwards ...testnet.Forward) {
	t.Helper()
	if err := ns.SetNAT(forwards...); err != nil {
		t.Fatal(err)
	}
}

func TestSetNAT(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			client, node, ns := clientNodeBackends(t)
			servers, backends := serve(t, ns, f.backends)
			forward := testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: f.service, Backends: backends}
			// Other forwards must not matter.
			other := testnet.Forward{
				Proto: unix.IPPROTO_TCP, Dst: f.service,
				Backends: []netip.AddrPort{netip.AddrPortFrom(backends[0].Addr(), 9)},
			}

			// The node looks for a route before it translates.
			only := netip.PrefixFrom(f.service.Addr(), f.service.Addr().BitLen())
			if err := node.AddRoute(only, f.backends[0].Addr(), "backends"); err != nil {
				t.Fatal(err)
			}

			setNAT(t, node, other, forward)
			for _, from := range []struct {
				name string
				ns   *testnet.NS
			}{{"routed", client}, {"node's own", node}} {
				var got []netip.AddrPort
				for range 2 * len(backends) {
					got = append(got, ask(t, from.ns, f.service))
				}
				if want := slices.Repeat(backends, 2); !slices.Equal(got, want) {
					t.Errorf("%s flows went to %s, want %s", from.name, got, want)
				}
			}
			if got := servers[2].Received(); got != 4 {
				t.Errorf("server %s received %d, want 4", servers[2].Addr(), got)
			}

			forward.Backends = backends[1:2]
			setNAT(t, node, forward, other)
			for range 3 {
				if got := ask(t, client, f.service); got != backends[1] {
					t.Errorf("after the change a flow went to %s, want %s", got, backends[1])
				}
			}

			// Untranslated, the datagram is for the node itself.
			if err := node.AddAddr("lo", only); err != nil {
				t.Fatal(err)
			}
			local := nstest.Echo(t, node, f.service)
			forward.Backends = nil
			setNAT(t, node, forward)
			if got := ask(t, client, f.service); got != local.Addr() {
				t.Errorf("without backends a flow went to %s, want %s", got, local.Addr())
			}
		})
	}
}

func TestSetNATNodePort(t *testing.T) {
	client, node, ns := clientNodeBackends(t)
	var all []netip.AddrPort
	for _, f := range families {
		_, backends := serve(t, ns, f.backends[:1])
		all = append(all, backends...)
	}
	const port = 30053
	setNAT(t, node, testnet.Forward{
		Proto: unix.IPPROTO_UDP, Dst: netip.AddrPortFrom(netip.Addr{}, port), Backends: all,
	})
	for i, f := range families {
		t.Run(f.name, func(t *testing.T) {
			for _, a := range []netip.Addr{f.node, f.nodeFar} {
				if got := ask(t, client, netip.AddrPortFrom(a, port)); got != all[i] {
					t.Errorf("port of %s: flow went to %s, want %s", a, got, all[i])
				}
			}
			foreign := nstest.Echo(t, ns, netip.AddrPortFrom(all[i].Addr(), port))
			if got := ask(t, client, foreign.Addr()); got != foreign.Addr() {
				t.Errorf("port of a foreign address: flow went to %s", got)
			}
		})
	}
}

func TestSetNATMasquerade(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			client, node, ns := clientNodeBackends(t)
			at := netip.AddrPortFrom(f.backends[0].Addr(), f.service.Port())
			if err := ns.AddAddr("eth0", f.backends[0]); err != nil {
				t.Fatal(err)
			}
			backend, err := ns.ListenUDP(at)
			if err != nil {
				t.Fatal(err)
			}
			defer backend.Close()
			for masquerade, want := range map[bool]netip.Addr{true: f.nodeFar, false: f.client} {
				setNAT(t, node, testnet.Forward{
					Proto: unix.IPPROTO_UDP, Dst: f.service, Masquerade: masquerade,
					Backends: []netip.AddrPort{netip.AddrPortFrom(at.Addr(), 0)}, // the port stays
				})
				c, err := client.DialUDP(netip.AddrPort{}, f.service)
				if err != nil {
					t.Fatal(err)
				}
				_, err = c.Write([]byte("x"))
				if err := errors.Join(err, c.Close()); err != nil {
					t.Fatal(err)
				}
				if err := backend.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
					t.Fatal(err)
				}
				_, from, err := backend.ReadFromUDPAddrPort(make([]byte, 16))
				if err != nil || from.Addr() != want {
					t.Errorf("masquerade %t: came from %s, want %s (%v)", masquerade, from, want, err)
				}
			}
		})
	}
}

func TestSetNATForTCP(t *testing.T) {
	client, node, ns := clientNodeBackends(t)
	f := families[0]
	var l net.Listener
	err := ns.Do(func() (err error) {
		l, err = net.Listen("tcp4", "198.51.100.2:80")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	setNAT(t, node, testnet.Forward{
		Proto: unix.IPPROTO_TCP, Dst: f.service, Backends: []netip.AddrPort{addrPort("198.51.100.2:80")},
	})
	var c net.Conn
	err = client.Do(func() (err error) {
		c, err = net.DialTimeout("tcp4", f.service.String(), 5*time.Second)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(s, "hello")
	s.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestSetNATErrors(t *testing.T) {
	ns := nstest.New(t)
	for _, b := range []netip.AddrPort{addrPort("[2001:db8::1]:53"), {}} {
		err := ns.SetNAT(testnet.Forward{
			Proto: unix.IPPROTO_UDP, Dst: addrPort("192.0.2.1:53"), Backends: []netip.AddrPort{b},
		})
		want := fmt.Sprintf("testnet: forward of 192.0.2.1:53: backend %s is not of its family", b)
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ns.SetNAT(); !errors.Is(err, unix.EBADF) || !strings.HasPrefix(err.Error(), "testnet: set NAT rules: ") {
		t.Errorf("closed namespace: %v", err)
	}
}

// The number that SetNAT's comment promises.
func TestSetNATTakesManyBackends(t *testing.T) {
	ns := nstest.New(t)
	f := testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: addrPort("[2001:db8::1]:53"), Masquerade: true}
	for i := range 150 {
		f.Backends = append(f.Backends, netip.AddrPortFrom(addr("2001:db8:2::1"), uint16(1+i)))
	}
	setNAT(t, ns, f)
}
