//go:build linux

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/source"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// recorder is a sink that keeps what it is told, in order: a source.Host's
// addresses or an error.
type recorder struct {
	t    *testing.T
	told chan any
}

func (r *recorder) Host(h source.Host) {
	if len(h.Listed) > 0 {
		r.t.Errorf("listed %v", h.Listed)
	}
	r.told <- h.Other
}

func (r *recorder) Fault(err error) { r.told <- err }

func (r *recorder) Replace(map[string][]frontend.Frontend) {
	r.t.Error("the source knows no frontends")
}

func (r *recorder) ServiceRanges([]netip.Prefix)    { r.t.Error("the source knows no service ranges") }
func (r *recorder) Set(string, []frontend.Frontend) { r.t.Error("the source knows no frontends") }

const patience = 10 * time.Second

func (r *recorder) next() any {
	r.t.Helper()
	select {
	case x := <-r.told:
		return x
	case <-time.After(patience):
		r.t.Fatal("nothing was told")
		return nil
	}
}

// want waits for a list of addresses; those before it are on the way there.
func (r *recorder) want(list ...string) {
	r.t.Helper()
	want := addrs(list...)
	for deadline := time.Now().Add(patience); ; {
		got, ok := r.next().([]netip.Addr)
		switch {
		case !ok:
			r.t.Fatalf("a fault instead of %v", want)
		case slices.Equal(got, want):
			return
		case time.Now().After(deadline):
			r.t.Fatalf("told %v, want %v", got, want)
		}
	}
}

// quiet checks that nothing more is told for a while.
func (r *recorder) quiet() {
	r.t.Helper()
	select {
	case x := <-r.told:
		r.t.Errorf("told %v", x)
	case <-time.After(150 * time.Millisecond):
	}
}

// start runs a source until the test ends, and checks that it ends at once.
func start(t *testing.T, s *Source) (r *recorder, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r = &recorder{t, make(chan any, 10000)}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, r) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run returns %v", err)
			}
		case <-time.After(time.Second):
			t.Error("Run does not end")
		}
	}
	t.Cleanup(stop)
	return r, stop
}

func add(t *testing.T, ns *testnet.NS, ifname, prefix string) {
	t.Helper()
	if err := ns.AddAddr(ifname, netip.MustParsePrefix(prefix)); err != nil {
		t.Fatal(err)
	}
}

func del(t *testing.T, ns *testnet.NS, ifname, prefix string) {
	t.Helper()
	if err := ns.DelAddr(ifname, netip.MustParsePrefix(prefix)); err != nil {
		t.Fatal(err)
	}
}

func TestFollow(t *testing.T) {
	ns, peer := nstest.New(t), nstest.New(t)
	add(t, ns, "lo", "203.0.113.1/32") // as an anycast address is held
	r, _ := start(t, New(Config{NetNS: ns.Path()}))
	r.want("203.0.113.1")

	// fe80::1 comes with it.
	if err := ns.Veth("eth0", peer, "eth0"); err != nil {
		t.Fatal(err)
	}
	add(t, ns, "eth0", "192.0.2.1/24")
	add(t, ns, "eth0", "2001:db8::1/64")
	r.want("192.0.2.1", "203.0.113.1", "2001:db8::1", "fe80::1")

	add(t, ns, "lo", "192.0.2.1/32") // a second time
	r.quiet()
	del(t, ns, "eth0", "192.0.2.1/24")
	r.quiet()
	del(t, ns, "lo", "192.0.2.1/32")
	r.want("203.0.113.1", "2001:db8::1", "fe80::1")

	add(t, peer, "eth0", "192.0.2.2/24") // not in this namespace
	r.quiet()

	deleteLink(t, ns, "eth0")
	r.want("203.0.113.1")
}

// An empty namespace is known to have no address.
func TestNoAddress(t *testing.T) {
	r, _ := start(t, New(Config{NetNS: nstest.New(t).Path()}))
	r.want()
}

func TestRunInOwnNamespace(t *testing.T) {
	nstest.Require(t)
	r, _ := start(t, New(Config{}))
	r.want()
}

func TestUpdate(t *testing.T) {
	ns := nstest.New(t)
	add(t, ns, "lo", "192.0.2.1/32")
	add(t, ns, "lo", "198.51.100.1/32")
	s := New(Config{NetNS: ns.Path(), Exclude: prefixes("198.51.100.0/24")})
	r, _ := start(t, s)
	r.want("192.0.2.1")
	s.Update(nil, nil, nil)
	r.want("192.0.2.1", "198.51.100.1")
	s.Update(prefixes("192.0.2.0/24"), nil, addrs("203.0.113.7"))
	r.want("192.0.2.1", "203.0.113.7")
	s.Update(prefixes("192.0.2.0/28"), nil, addrs("203.0.113.7")) // the same outcome
	r.quiet()
	add(t, ns, "lo", "192.0.2.9/32")
	r.want("192.0.2.1", "192.0.2.9", "203.0.113.7")
}

// An address that moves between interfaces is never told to be gone.
func TestCoalesce(t *testing.T) {
	ns, peer := nstest.New(t), nstest.New(t)
	if err := ns.Veth("eth0", peer, "eth0"); err != nil {
		t.Fatal(err)
	}
	add(t, ns, "eth0", "192.0.2.1/24")
	s := New(Config{NetNS: ns.Path()})
	s.times.settle = time.Second
	r, _ := start(t, s)
	r.want("192.0.2.1", "fe80::1")
	del(t, ns, "eth0", "192.0.2.1/24")
	add(t, ns, "lo", "192.0.2.1/32")
	add(t, ns, "lo", "192.0.2.2/32")
	if got := r.next(); !slices.Equal(got.([]netip.Addr), addrs("192.0.2.1", "192.0.2.2", "fe80::1")) {
		t.Errorf("told %v", got)
	}
}

// Changes that do not end do not keep the source from telling them.
func TestSteadyChanges(t *testing.T) {
	ns := nstest.New(t)
	r, _ := start(t, New(Config{NetNS: ns.Path()}))
	r.want()
	for i, begin := 0, time.Now(); len(r.told) < 3; i++ {
		if time.Since(begin) > patience {
			t.Fatalf("told %d times", len(r.told))
		}
		add(t, ns, "lo", numbered(i).String())
		time.Sleep(5 * time.Millisecond)
	}
}

// numbered is an address for each number, in 10.0.0.0/8.
func numbered(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)}), 32)
}

func TestThousandChanges(t *testing.T) {
	ns := nstest.New(t)
	r, _ := start(t, New(Config{NetNS: ns.Path()}))
	r.want()
	const n = 1000
	var all, odd []string
	for i := range n {
		if err := ns.AddAddr("lo", numbered(i)); err != nil {
			t.Fatal(err)
		}
		all = append(all, numbered(i).Addr().String())
	}
	r.want(all...)
	begin := time.Now()
	for i := range n {
		if i%2 == 1 {
			odd = append(odd, all[i])
		} else if err := ns.DelAddr("lo", numbered(i)); err != nil {
			t.Fatal(err)
		}
	}
	told := len(r.told)
	r.want(odd...)
	if most := int(time.Since(begin)/(50*time.Millisecond)) + 1; told > most {
		t.Errorf("told %d times, want at most %d", told, most)
	}
}

// In a buffer that holds two messages, nearly all are lost. Nothing is amiss all
// the same, and nobody is alarmed.
func TestOverrun(t *testing.T) {
	ns := nstest.New(t)
	s := New(Config{NetNS: ns.Path()})
	s.rcvbuf = 1 // the kernel's least
	r, _ := start(t, s)
	r.want()
	var want []string
	for i := range 300 {
		if err := ns.AddAddr("lo", numbered(i)); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 {
			want = append(want, numbered(i).Addr().String())
		} else if err := ns.DelAddr("lo", numbered(i)); err != nil {
			t.Fatal(err)
		}
	}
	r.want(want...)
	r.quiet()
}

// The kernel does say ENOBUFS to the socket that hears of changes.
func TestOverrunIsHeard(t *testing.T) {
	ns := nstest.New(t)
	l, err := dial(ns.Path(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	if err := l.listening(); err != nil {
		t.Error(err)
	}
	for i := range 300 {
		if err := ns.AddAddr("lo", numbered(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.events.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := l.events.Read(make([]byte, 1)); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("got %v", err)
	}
	if list, err := l.addresses(); err != nil || len(list) != 300 {
		t.Errorf("got %d addresses, %v", len(list), err)
	}
}

// sockets returns the rtnetlink sockets of this process, those with groups
// apart.
func sockets(t *testing.T) (events, asking []int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || p != unix.NETLINK_ROUTE {
			continue
		}
		if d, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || d != unix.AF_NETLINK {
			continue
		}
		if groups, err := unix.GetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LIST_MEMBERSHIPS); err == nil && groups != 0 {
			events = append(events, fd)
		} else {
			asking = append(asking, fd)
		}
	}
	return events, asking
}

// take puts something else in the place of a socket.
func take(t *testing.T, fd int) {
	t.Helper()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	err := errors.Join(unix.Dup3(pipe[0], fd, unix.O_CLOEXEC), unix.Close(pipe[0]), unix.Close(pipe[1]))
	if err != nil {
		t.Fatal(err)
	}
}

func TestSocketTaken(t *testing.T) {
	for _, which := range []string{"that hears of changes", "that asks"} {
		t.Run(which, func(t *testing.T) {
			ns := nstest.New(t)
			add(t, ns, "lo", "192.0.2.1/32")
			_, before := sockets(t)
			s := New(Config{NetNS: ns.Path()})
			s.times.resync = 20 * time.Millisecond
			s.times.retry = 20 * time.Millisecond
			r, _ := start(t, s)
			r.want("192.0.2.1")
			events, asking := sockets(t)
			asking = slices.DeleteFunc(asking, func(fd int) bool { return slices.Contains(before, fd) })
			if len(events) != 1 || len(asking) != 1 {
				t.Fatalf("sockets %v and %v", events, asking)
			}
			if which == "that asks" {
				take(t, asking[0])
			} else {
				take(t, events[0])
			}
			if err, ok := r.next().(error); !ok {
				t.Errorf("told %v, want a fault", err)
			}
			if x := r.next(); x != nil {
				t.Errorf("told %v, want that it is mended", x)
			}
			add(t, ns, "lo", "192.0.2.2/32")
			r.want("192.0.2.1", "192.0.2.2")
		})
	}
}

// A namespace that is not there yet is a fault until it is.
func TestNamespaceComes(t *testing.T) {
	ns := nstest.New(t)
	add(t, ns, "lo", "192.0.2.1/32")
	path := filepath.Join(t.TempDir(), "ns")
	s := New(Config{NetNS: path})
	s.times.retry, s.times.retryMax = 5*time.Millisecond, 20*time.Millisecond
	r, _ := start(t, s)
	for range 3 {
		if err, ok := r.next().(error); !ok || !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
			t.Errorf("told %v", err)
		}
	}
	s.Update(nil, nil, addrs("203.0.113.7")) // not told before the kernel's part is known
	if err := os.Symlink(ns.Path(), path); err != nil {
		t.Fatal(err)
	}
	for {
		switch x := r.next().(type) {
		case error:
			continue
		case []netip.Addr:
			if want := addrs("192.0.2.1", "203.0.113.7"); !slices.Equal(x, want) {
				t.Errorf("told %v, want %v", x, want)
			}
		default:
			t.Errorf("told %v before any address", x)
		}
		break
	}
	if x := r.next(); x != nil {
		t.Errorf("told %v, want that it is mended", x)
	}
}

// What was known stays in force, and Update works on it, while the kernel cannot
// be asked.
func TestUpdateDuringFault(t *testing.T) {
	ns := nstest.New(t)
	add(t, ns, "lo", "192.0.2.1/32")
	_, before := sockets(t)
	s := New(Config{NetNS: ns.Path()})
	s.times.resync = 20 * time.Millisecond
	s.times.retry, s.times.retryMax = time.Hour, time.Hour
	r, _ := start(t, s)
	r.want("192.0.2.1")
	_, asking := sockets(t)
	take(t, slices.DeleteFunc(asking, func(fd int) bool { return slices.Contains(before, fd) })[0])
	if err, ok := r.next().(error); !ok {
		t.Errorf("told %v, want a fault", err)
	}
	s.Update(nil, nil, addrs("203.0.113.7"))
	r.want("192.0.2.1", "203.0.113.7")
}

func TestEndsAtOnce(t *testing.T) {
	ns := nstest.New(t)
	tests := []struct {
		name  string
		netns string
		do    func(*testing.T, *recorder)
	}{
		{"before anything", ns.Path(), func(*testing.T, *recorder) {}},
		{"idle", ns.Path(), func(_ *testing.T, r *recorder) { r.next() }},
		{"between a change and the read", ns.Path(), func(t *testing.T, r *recorder) {
			r.next()
			add(t, ns, "lo", "192.0.2.9/32")
		}},
		{"between two attempts", "/nonexistent", func(_ *testing.T, r *recorder) { r.next() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := New(Config{NetNS: tt.netns})
			s.times.settle, s.times.retry, s.times.retryMax = time.Hour, time.Hour, time.Hour
			r, stop := start(t, s)
			tt.do(t, r)
			begin := time.Now()
			stop()
			if took := time.Since(begin); took > 100*time.Millisecond {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// An address that another host has is not this host's; one about which that is
// still to be found out, or that is not to be used any more, is.
func TestDuplicateAddress(t *testing.T) {
	ns, peer := nstest.New(t), nstest.New(t)
	if err := ns.Veth("eth0", peer, "eth0"); err != nil {
		t.Fatal(err)
	}
	// Asked for once a second: an answer to the first question may come too early
	// for the state before it to be seen.
	if err := ns.Sysctl("net/ipv6/conf/eth0/dad_transmits", "60"); err != nil {
		t.Fatal(err)
	}
	r, _ := start(t, New(Config{NetNS: ns.Path()}))
	r.want("fe80::1")
	addWithDAD(t, ns, "eth0", netip.MustParsePrefix("2001:db8::dead/64"), 0)
	r.want("2001:db8::dead", "fe80::1") // tentative
	add(t, peer, "eth0", "2001:db8::dead/64")
	r.want("fe80::1") // and found to be the peer's
	addWithDAD(t, ns, "eth0", netip.MustParsePrefix("2001:db8::d/64"), unix.IFA_F_NODAD)
	r.want("2001:db8::d", "fe80::1") // preferred for no time: deprecated
}

// rtnetlink sends one request in the namespace, and wants it to be done.
func rtnetlink(t *testing.T, ns *testnet.NS, typ, flags uint16, ifname string, body func(index uint32) []byte) {
	t.Helper()
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		req, err := unix.NewIfreq(ifname)
		if err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req); err != nil {
			return err
		}
		order := binary.NativeEndian
		payload := body(req.Uint32())
		b := order.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(payload)))
		b = order.AppendUint16(b, typ)
		b = order.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
		b = append(append(b, make([]byte, 8)...), payload...)
		if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, err := unix.Read(fd, answer)
		if err != nil {
			return err
		}
		if code := int32(order.Uint32(answer[unix.SizeofNlMsghdr:n])); code != 0 {
			return unix.Errno(-code)
		}
		return nil
	})
	if err != nil {
		t.Fatal(fmt.Errorf("rtnetlink request %d for %s: %w", typ, ifname, err))
	}
}

func deleteLink(t *testing.T, ns *testnet.NS, ifname string) {
	t.Helper()
	rtnetlink(t, ns, unix.RTM_DELLINK, 0, ifname, func(index uint32) []byte {
		b := make([]byte, unix.SizeofIfInfomsg)
		binary.NativeEndian.PutUint32(b[4:], index)
		return b
	})
}

// addWithDAD adds an IPv6 address that is preferred for no time.
func addWithDAD(t *testing.T, ns *testnet.NS, ifname string, p netip.Prefix, flags byte) {
	t.Helper()
	rtnetlink(t, ns, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, ifname, func(index uint32) []byte {
		order := binary.NativeEndian
		b := []byte{unix.AF_INET6, byte(p.Bits()), flags, 0}
		b = order.AppendUint32(b, index)
		b = order.AppendUint16(b, 4+16)
		b = order.AppendUint16(b, unix.IFA_ADDRESS)
		b = append(b, p.Addr().AsSlice()...)
		// struct ifa_cacheinfo: preferred and valid lifetime, two time stamps.
		b = order.AppendUint16(b, 4+16)
		b = order.AppendUint16(b, unix.IFA_CACHEINFO)
		b = order.AppendUint32(b, 0)
		b = order.AppendUint32(b, 3600)
		return append(b, make([]byte, 8)...)
	})
}
