//go:build linux

package testnet_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// pair returns two namespaces with a link, an address of either family at each end.
func pair(t *testing.T) (near, far *testnet.NS) {
	t.Helper()
	near, far = nstest.New(t), nstest.New(t)
	for _, err := range []error{
		near.Veth("va", far, "vb"),
		near.AddAddr("va", prefix("192.0.2.1/24")), near.AddAddr("va", prefix("2001:db8::1/64")),
		far.AddAddr("vb", prefix("192.0.2.2/24")), far.AddAddr("vb", prefix("2001:db8::2/64")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return near, far
}

// Datagrams of senders that do not exist arrive as they were written.
func TestForeignSources(t *testing.T) {
	near, far := pair(t)
	vb, err := far.Interface("vb")
	if err != nil {
		t.Fatal(err)
	}
	link, err := near.OpenLink("va", vb.HardwareAddr)
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	for _, tt := range []struct{ name, from, to string }{
		{"IPv4", "203.0.113.77:7", "192.0.2.2:9999"},
		{"IPv6", "[2001:db8:9::77]:7", "[2001:db8::2]:9999"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			from, to := addrPort(tt.from), addrPort(tt.to)
			// What comes from nowhere is not dropped.
			for _, err := range []error{
				far.Sysctl("net.ipv4.conf.all.rp_filter", "0"), far.Sysctl("net.ipv4.conf.vb.rp_filter", "0"),
				far.AddRoute(netip.PrefixFrom(from.Addr(), from.Addr().BitLen()), netip.Addr{}, "vb"),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			sink, err := far.ListenUDP(to)
			if err != nil {
				t.Fatal(err)
			}
			defer sink.Close()
			arrives := func(what string, send func() error) {
				t.Helper()
				if err := send(); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if err := sink.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 10)
				n, by, err := sink.ReadFromUDPAddrPort(b)
				if err != nil || by != from || string(b[:n]) != "x" {
					t.Errorf("%s: %q from %s, %v", what, b[:n], by, err)
				}
			}
			raw, err := near.OpenRaw(to.Addr().Is6(), testnet.SocketOptions{Device: "va", Mark: 7})
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			arrives("raw socket", func() error { return raw.Send(unix.IPPROTO_UDP, from, to) })
			arrives("link", func() error { return link.Send(unix.IPPROTO_UDP, from, to) })
			socket, err := near.ListenUDPAs(from, testnet.SocketOptions{Transparent: true})
			if err != nil {
				t.Fatal(err)
			}
			defer socket.Close()
			arrives("transparent socket", func() error {
				_, err := socket.WriteToUDPAddrPort([]byte("x"), to)
				return err
			})
			if _, err := near.ListenUDP(from); !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("an ordinary socket: %v", err)
			}
		})
	}
}

// A segment that begins a connection is answered.
func TestSYN(t *testing.T) {
	near, far := pair(t)
	l, err := net.FileListener(listenTCP(t, far, "192.0.2.2:80"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := near.OpenRaw(false, testnet.SocketOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	var answer int
	if err := near.Do(func() (err error) {
		answer, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(answer)
	tv := unix.NsecToTimeval(int64(5 * time.Second))
	if err := unix.SetsockoptTimeval(answer, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	if err := raw.Send(unix.IPPROTO_TCP, addrPort("192.0.2.1:4444"), addrPort("192.0.2.2:80")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, _, err := unix.Recvfrom(answer, b, 0)
	const flags, synAck = 20 + 13, 0x12
	if err != nil || n < flags || b[flags] != synAck {
		t.Errorf("answered %x, %v", b[:max(n, 0)], err)
	}
}

func listenTCP(t *testing.T, ns *testnet.NS, at string) *os.File {
	t.Helper()
	var f *os.File
	if err := ns.Do(func() error {
		l, err := net.Listen("tcp4", at)
		if err != nil {
			return err
		}
		defer l.Close()
		f, err = l.(*net.TCPListener).File()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
