//go:build linux

package testnet_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// What is sent through a bridge arrives; a bridge port that is none any more, an
// interface that is down or gone, carries nothing.
func TestLinks(t *testing.T) {
	near, far := nstest.New(t), nstest.New(t)
	do := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	do(near.Veth("port", far, "vb"), near.AddLink(testnet.Link{Name: "br0", Kind: "bridge"}),
		near.SetMaster("port", "br0"),
		near.AddAddr("br0", prefix("192.0.2.1/24")), far.AddAddr("vb", prefix("192.0.2.2/24")))
	server := nstest.Echo(t, far, addrPort("192.0.2.2:53"))
	asked := func() error {
		_, err := testnet.Ask(near, netip.AddrPort{}, server.Addr(), 5*time.Second)
		return err
	}
	do(asked())
	do(near.SetMaster("port", ""), near.DelAddr("br0", prefix("192.0.2.1/24")),
		near.AddAddr("port", prefix("192.0.2.1/24")))
	do(asked())
	do(near.SetDown("port"))
	if err := asked(); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("the interface is down: %v", err)
	}
	mac, err := net.ParseMAC("02:00:00:00:00:09")
	do(err)
	do(near.Rename("port", "wan"), near.SetHardwareAddr("wan", mac), near.SetUp("wan"))
	do(asked())
	if i, err := near.Interface("wan"); err != nil || i.HardwareAddr.String() != mac.String() {
		t.Errorf("%+v, %v", i, err)
	}
	do(near.SetQuiet("wan"))
	if i, err := near.Interface("wan"); err != nil || i.Flags&net.FlagUp == 0 {
		t.Errorf("%+v, %v", i, err)
	}
	do(near.DelLink("br0"), near.DelLink("wan"))
	if _, err := far.Interface("vb"); err == nil {
		t.Error("the peer of a veth outlives it")
	}
	if err := near.AddLink(testnet.Link{Name: "x", Kind: "teleport"}); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("an unknown kind: %v", err)
	}
}

// Routes of every type and table, and rules that lead to them.
func TestRoutes(t *testing.T) {
	near, far := pair(t)
	const table = 100
	for _, tt := range []struct {
		name, to, gateway string
		v6                bool
		nowhere           unix.Errno
	}{
		{"IPv4", "203.0.113.9:53", "192.0.2.2", false, unix.EINVAL},
		{"IPv6", "[2001:db8:9::9]:53", "2001:db8::2", true, unix.EINVAL},
	} {
		t.Run(tt.name, func(t *testing.T) {
			to, via := addrPort(tt.to), addr(tt.gateway)
			all := netip.PrefixFrom(to.Addr(), 0).Masked()
			host := netip.PrefixFrom(to.Addr(), to.Addr().BitLen())
			if err := far.SetRoute(testnet.Route{Type: unix.RTN_LOCAL, Dst: host, Dev: "lo"}); err != nil {
				t.Fatal(err)
			}
			server, err := far.ListenUDPAs(to, testnet.SocketOptions{Freebind: true}) // IPv6 asks for an address
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			marked := func(mark uint32) error {
				any4 := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
				if tt.v6 {
					any4 = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
				}
				c, err := near.ListenUDPAs(any4, testnet.SocketOptions{Mark: mark})
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				_, err = c.WriteToUDPAddrPort([]byte("x"), to)
				return err
			}
			if err := marked(5); !errors.Is(err, unix.ENETUNREACH) {
				t.Errorf("no route yet: %v", err)
			}
			route := testnet.Route{Table: table, Dst: all, Via: via, Dev: "va"}
			rule := testnet.Rule{V6: tt.v6, Priority: 10, Mark: 5, Table: table}
			if err := errors.Join(near.SetRoute(route), near.SetRule(rule)); err != nil {
				t.Fatal(err)
			}
			if err := marked(5); err != nil {
				t.Errorf("%s, %s: %v", rule, route, err)
			}
			if err := server.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := server.ReadFromUDPAddrPort(make([]byte, 1)); err != nil {
				t.Errorf("nothing came by %s: %v", route, err)
			}
			if err := marked(0); !errors.Is(err, unix.ENETUNREACH) {
				t.Errorf("without the mark: %v", err)
			}
			if err := errors.Join(near.DelRule(rule), near.DelRoute(route),
				near.SetRoute(testnet.Route{Type: unix.RTN_BLACKHOLE, Dst: all})); err != nil {
				t.Fatal(err)
			}
			if err := marked(5); !errors.Is(err, tt.nowhere) {
				t.Errorf("a blackhole: %v", err)
			}
		})
	}
	if got := (testnet.Route{Type: unix.RTN_LOCAL, Dst: prefix("192.0.2.0/24"), Via: addr("192.0.2.1"), Dev: "lo", Table: 7}).String(); got !=
		"local 192.0.2.0/24 via 192.0.2.1 dev lo table 7" {
		t.Error(got)
	}
	if got := (testnet.Rule{Priority: 3, From: prefix("192.0.2.0/24"), In: "x", Mark: 1, Table: 9}).String(); got !=
		"pref 3 from 192.0.2.0/24 iif x fwmark 1 lookup 9" {
		t.Error(got)
	}
}
