//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// NS is a network namespace, held by a file descriptor: it lives until it is
// closed and the last socket in it is. Its methods may be called concurrently.
//
// The kernel does not track connections in a fresh namespace: it registers
// conntrack's hooks, one family at a time, with the first rule that needs them
// (nf_ct_netns_get: NAT chains, "ct" expressions). Before [NS.SetNAT] no packet
// makes a flow, though flows can be created over ctnetlink.
type NS struct {
	file  *os.File
	route *netlink
}

// New creates a network namespace and brings up its loopback device. The caller
// needs CAP_SYS_ADMIN and CAP_NET_ADMIN, which [Reexec] gives it; the error is
// an [ErrForbidden] where they are missing or a limit is reached.
func New() (*NS, error) {
	ns := &NS{}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return forbidden(fmt.Errorf("testnet: create network namespace: %w", err))
		}
		var err error
		if ns.file, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return fmt.Errorf("testnet: hold network namespace: %w", err)
		}
		if ns.route, err = dialNetlink(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		return forbidden(ns.route.setUp("lo"))
	})
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

// Close gives the namespace up. The kernel removes it, asynchronously
// (cleanup_net), once no socket and no thread is left in it. Closing twice does
// no harm.
func (n *NS) Close() error {
	if n.route != nil {
		n.route.close()
	}
	if n.file == nil {
		return nil
	}
	if err := n.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("testnet: close network namespace: %w", err)
	}
	return nil
}

// FD returns the descriptor of the namespace, for setns(2) and for libraries
// that take one. It is valid until Close.
func (n *NS) FD() int { return int(n.file.Fd()) }

// Path returns a file name for the namespace that other processes of the same
// user can open as well, as for --netns. It is valid until Close.
func (n *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.FD()) }

// Do runs f in the namespace and returns its error. f runs in a goroutine of
// its own on a locked thread; goroutines that it starts do not run in the
// namespace. Sockets that f opens stay in the namespace. f may call Do of
// another namespace, but not FailNow of a test, which then is an error.
func (n *NS) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(n.FD(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("testnet: enter network namespace: %w", err)
		}
		return f()
	})
}

// onThread runs f on a locked thread and afterwards takes the thread back to
// the network namespace that it was in. A thread that cannot be taken back is
// left locked, for then it ends with its goroutine.
func onThread(f func() error) error {
	err := errors.New("testnet: function in network namespace called runtime.Goexit")
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		home, openErr := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if openErr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("testnet: find the thread's network namespace: %w", openErr)
			return
		}
		defer func() {
			if unix.Setns(home, unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
			_ = unix.Close(home)
		}()
		err = f()
	}()
	<-done
	return err
}

// Sysctl writes a value to a sysctl of the namespace, named as in sysctl(8):
// "net.ipv4.ip_forward", or with slashes where an interface's name has a dot.
func (n *NS) Sysctl(name, value string) error {
	// /proc/sys/net shows every thread its own namespace. Outside of that
	// directory the setting would be the host's.
	path := sysctlPath(name)
	if !strings.HasPrefix(path, "/proc/sys/net/") || strings.Contains(path, "..") {
		return fmt.Errorf("testnet: set %s: not a sysctl of a network namespace", name)
	}
	err := n.Do(func() error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	})
	if err != nil {
		return fmt.Errorf("testnet: set %s to %s: %w", name, value, err)
	}
	return nil
}

// ListenUDP opens a UDP socket in the namespace, bound to an address.
func (n *NS) ListenUDP(addr netip.AddrPort) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := n.Do(func() (err error) {
		// Package net makes the socket in the calling goroutine: an address
		// that needs no resolving is what keeps it there.
		c, err = net.ListenUDP(udpNetwork(addr), net.UDPAddrFromAddrPort(addr))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("testnet: %w", err)
	}
	return c, nil
}

// DialUDP opens a UDP socket in the namespace that is connected to remote. The
// zero local address lets the kernel choose address and port, the port 0 the
// port.
func (n *NS) DialUDP(local, remote netip.AddrPort) (*net.UDPConn, error) {
	var c *net.UDPConn
	err := n.Do(func() (err error) {
		var from *net.UDPAddr
		if local.IsValid() {
			from = net.UDPAddrFromAddrPort(local)
		}
		c, err = net.DialUDP(udpNetwork(remote), from, net.UDPAddrFromAddrPort(remote))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("testnet: %w", err)
	}
	return c, nil
}

// udpNetwork names the family, so that an IPv6 socket on the unspecified
// address leaves IPv4 alone.
func udpNetwork(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return "udp4"
	}
	return "udp6"
}
