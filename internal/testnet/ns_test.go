//go:build linux

package testnet_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// current returns the calling thread's network namespace.
func current() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

// of returns a namespace's name as /proc shows it.
func of(t *testing.T, ns *testnet.NS) string {
	t.Helper()
	name, err := os.Readlink(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestDo(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	home, err := current()
	if err != nil {
		t.Fatal(err)
	}
	var inA, inB, backInA string
	err = a.Do(func() (err error) {
		if inA, err = current(); err != nil {
			return err
		}
		err = b.Do(func() (err error) {
			inB, err = current()
			return err
		})
		if err != nil {
			return err
		}
		backInA, err = current()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if inA != of(t, a) || inB != of(t, b) || backInA != inA {
		t.Errorf("in a %s, b in it %s, back in a %s; want %s, %s", inA, inB, backInA, of(t, a), of(t, b))
	}
	if inA == inB || inA == home || inB == home {
		t.Errorf("not three namespaces: %s, %s, %s", home, inA, inB)
	}
	for name := range namespacesOfThreads(t) {
		if name != home {
			t.Errorf("a thread was left in %s", name)
		}
	}
}

func TestDoError(t *testing.T) {
	ns := nstest.New(t)
	want := errors.New("of f")
	if err := ns.Do(func() error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
	err := ns.Do(func() error { runtime.Goexit(); return nil })
	if err == nil || !strings.Contains(err.Error(), "Goexit") {
		t.Errorf("f called Goexit: %v", err)
	}
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ns.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
	err = ns.Do(func() error { t.Error("f ran though the namespace is closed"); return nil })
	if !errors.Is(err, unix.EBADF) {
		t.Errorf("closed: %v", err)
	}
	if err := ns.SetUp("lo"); !errors.Is(err, unix.EBADF) {
		t.Errorf("closed: %v", err)
	}
}

func TestDoConcurrently(t *testing.T) {
	spaces := []*testnet.NS{nstest.New(t), nstest.New(t), nstest.New(t)}
	var work sync.WaitGroup
	for i := range 24 {
		ns := spaces[i%len(spaces)]
		want := of(t, ns)
		work.Go(func() {
			for range 20 {
				err := ns.Do(func() error {
					runtime.Gosched()
					got, err := current()
					if err == nil && got != want {
						err = fmt.Errorf("in %s, want %s", got, want)
					}
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
}

func TestSocketsStayInTheNamespace(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	for _, local := range []string{"127.0.0.1:5353", "[::1]:5353", "0.0.0.0:5354", "[::]:5354"} {
		for _, ns := range []*testnet.NS{a, b} {
			c, err := ns.ListenUDP(addrPort(local))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close() //nolint:gocritic // all of them are to be open at once
			if got := ofSocket(t, c); got != of(t, ns) {
				t.Errorf("socket on %s is in %s, want %s", local, got, of(t, ns))
			}
		}
	}
	c, err := a.DialUDP(netip.AddrPort{}, addrPort("[::1]:5353"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := ofSocket(t, c); got != of(t, a) {
		t.Errorf("connected socket is in %s, want %s", got, of(t, a))
	}

	if _, err := a.ListenUDP(addrPort("127.0.0.1:5353")); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("listen twice: %v", err)
	}
	_, err = a.DialUDP(addrPort("192.0.2.1:1"), addrPort("127.0.0.1:1"))
	if !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("dial from a foreign address: %v", err)
	}
}

// ofSocket returns the name of a socket's namespace.
func ofSocket(t *testing.T, c *net.UDPConn) (name string) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var ioctlErr error
	err = raw.Control(func(socket uintptr) {
		var fd int
		if fd, ioctlErr = unix.IoctlRetInt(int(socket), unix.SIOCGSKNS); ioctlErr != nil {
			return
		}
		name, ioctlErr = os.Readlink(fmt.Sprint("/proc/self/fd/", fd))
		_ = unix.Close(fd)
	})
	if err := errors.Join(err, ioctlErr); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestSysctl(t *testing.T) {
	ns := nstest.New(t)
	for _, name := range []string{"net.ipv4.conf.all.route_localnet", "net/ipv4/conf/lo/route_localnet"} {
		if err := ns.Sysctl(name, "1"); err != nil {
			t.Error(err)
		}
		path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
		err := ns.Do(func() error {
			b, err := os.ReadFile(path)
			if err == nil && string(b) != "1\n" {
				err = fmt.Errorf("%s is %q", path, b)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "0\n" {
			t.Errorf("%s changed outside of the namespace: %q, %v", path, b, err)
		}
	}

	tests := []struct {
		name, sysctl, value, want string
		is                        error
	}{
		{"unknown", "net.ipv4.none", "1", "testnet: set net.ipv4.none to 1: ", fs.ErrNotExist},
		{"bad value", "net.ipv4.ip_forward", "x", "testnet: set net.ipv4.ip_forward to x: ", unix.EINVAL},
		{"of the host", "kernel.hostname", "x", "not a sysctl of a network namespace", nil},
		{"out of the directory", "net/../kernel/hostname", "x", "not a sysctl of a network namespace", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := ns.Sysctl(tt.sysctl, tt.value)
			if err == nil || !strings.Contains(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got %v, want %q (%v)", err, tt.want, tt.is)
			}
		})
	}
}

// namespacesOfThreads returns the network namespaces that this process's
// threads are in.
func namespacesOfThreads(t *testing.T) map[string]bool {
	t.Helper()
	return links(t, "/proc/self/task/*/ns/net")
}

// links returns where those of the links lead that still exist.
func links(t *testing.T, pattern string) map[string]bool {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	to := make(map[string]bool)
	for _, p := range paths {
		if l, err := os.Readlink(p); err == nil {
			to[l] = true
		}
	}
	return to
}

func count(t *testing.T, dir string) int {
	t.Helper()
	e, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestCyclesLeakNothing(t *testing.T) {
	nstest.Require(t)
	server := addrPort("127.0.0.1:53")
	cycle := func() {
		ns, err := testnet.New()
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		s, err := testnet.Echo(ns, server)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if got, err := testnet.Ask(ns, netip.AddrPort{}, server, 5*time.Second); err != nil || got != server {
			t.Fatal(got, err)
		}
	}
	for range 10 {
		cycle() // Go starts threads as it needs them, and keeps them
	}
	descriptors, threads := count(t, "/proc/self/fd"), count(t, "/proc/self/task")
	for range 200 {
		cycle()
	}
	if got := count(t, "/proc/self/fd"); got > descriptors {
		t.Errorf("%d descriptors more", got-descriptors)
	}
	if got := count(t, "/proc/self/task"); got > threads+5 {
		t.Errorf("%d threads more", got-threads)
	}
	home, err := current()
	if err != nil {
		t.Fatal(err)
	}
	for name := range namespacesOfThreads(t) {
		if name != home {
			t.Errorf("a thread was left in %s", name)
		}
	}
	for to := range links(t, "/proc/self/fd/*") {
		if strings.HasPrefix(to, "net:") && to != home {
			t.Errorf("a descriptor holds %s", to)
		}
	}
}

func TestNamespacesEnd(t *testing.T) {
	nstest.Require(t)
	cmd := helper(t, "namespace-limit")
	inUserNamespace(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// Package net decides once whether there is IPv6, by a socket on ::1: in a
// namespace whose loopback is down it would decide wrongly for all others.
func TestPackageNetKnowsIPv6(t *testing.T) {
	nstest.Require(t)
	c, err := net.ListenPacket("udp", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
