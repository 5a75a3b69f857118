//go:build linux

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// table returns a Conn to an empty table of a namespace of its own.
func table(t testing.TB) *Conn {
	t.Helper()
	ns := nstest.New(t)
	c, err := Dial(Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// numbered returns distinct flows of a family.
func numbered(fam Family, proto uint8, n int) Flow {
	f := Flow{
		Family: fam, Proto: proto, Timeout: 600, Status: StatusConfirmed,
		Orig: Tuple{
			Src: netip.AddrFrom4([4]byte{192, 0, 2, byte(n >> 16)}), Dst: addr("203.0.113.10"),
			SrcPort: uint16(n), DstPort: 53,
		},
		Reply: Tuple{Src: addr("198.51.100.11"), DstPort: uint16(n), SrcPort: 5353},
	}
	if fam == IPv6 {
		f.Orig.Src = netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(n >> 16)})
		f.Orig.Dst, f.Reply.Src = addr("2001:db8:1::10"), addr("2001:db8:2::11")
	}
	f.Reply.Dst = f.Orig.Src
	if proto == TCP || proto == SCTP {
		f.State = 1
	}
	if !HasPorts(proto) {
		f.Orig.SrcPort, f.Orig.DstPort, f.Reply.SrcPort, f.Reply.DstPort = 0, 0, 0, 0
	}
	return f
}

func fill(t testing.TB, c *Conn, flows ...Flow) {
	t.Helper()
	for _, f := range flows {
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatalf("%v: %s", err, &f)
		}
	}
}

// list returns the table by original tuple, without what the kernel adds.
func list(t testing.TB, c *Conn, f Filter) map[Tuple]Flow {
	t.Helper()
	flows, err := c.List(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	m := map[Tuple]Flow{}
	for _, fl := range flows {
		m[fl.Orig] = fl
	}
	return m
}

// Every protocol and attribute that Create can set comes back as it was set.
func TestCreateAndDump(t *testing.T) {
	c := table(t)
	var want []Flow
	for i, proto := range []uint8{UDP, TCP, SCTP, UDPLite, GRE, 89} {
		for _, fam := range []Family{IPv4, IPv6} {
			want = append(want, numbered(fam, proto, 100+i))
		}
	}
	ping := numbered(IPv4, ICMP, 0)
	ping.Orig.ICMPType, ping.Orig.ICMPID, ping.Reply.ICMPID = 8, 77, 77
	ping6 := numbered(IPv6, ICMPv6, 0)
	ping6.Orig.ICMPType, ping6.Reply.ICMPType, ping6.Orig.ICMPID, ping6.Reply.ICMPID = 128, 129, 78, 78
	zoned := numbered(IPv4, UDP, 300)
	zoned.Zone, zoned.Mark = 7, 0xabcdef01
	zonedOrig, zonedReply := numbered(IPv4, UDP, 301), numbered(IPv4, UDP, 302)
	zonedOrig.Zone, zonedOrig.ZoneDir = 8, ZoneOrig
	zonedReply.Zone, zonedReply.ZoneDir = 9, ZoneReply
	answered := numbered(IPv4, UDP, 303)
	answered.Status |= StatusSeenReply | StatusAssured
	established := numbered(IPv4, TCP, 304)
	established.State = 3
	established.Status |= StatusSeenReply | StatusAssured
	want = append(want, ping, ping6, zoned, zonedOrig, zonedReply, answered, established)
	fill(t, c, want...)
	n, err := c.Count(t.Context())
	if err != nil || n != len(want) {
		t.Fatalf("Count = %d, %v; want %d", n, err, len(want))
	}
	flows, err := c.List(t.Context(), Filter{})
	if err != nil {
		t.Fatal(err)
	}
	type key struct {
		Tuple
		proto uint8
	}
	byTuple := map[key]Flow{}
	for _, f := range flows {
		if f.ID == 0 {
			t.Errorf("no id: %s", &f)
		}
		byTuple[key{f.Orig, f.Proto}] = f
	}
	for _, w := range want {
		got, ok := byTuple[key{w.Orig, w.Proto}]
		if !ok {
			t.Errorf("missing: %s", &w)
			continue
		}
		got.ID = 0
		if got.Timeout > w.Timeout || got.Timeout < w.Timeout-5 {
			t.Errorf("timeout %d of %s", got.Timeout, &w)
		}
		got.Timeout = w.Timeout
		if d := diff(w, got); d != "" {
			t.Errorf("%s", d)
		}
	}
}

// Whatever the kernel makes of a filter, what arrives satisfies it, and nothing
// that satisfies it is missing: with the kernel's filters as probed, and with
// none of them.
func TestDumpSatisfiesFilter(t *testing.T) {
	c := table(t)
	var flows []Flow
	for _, fam := range []Family{IPv4, IPv6} {
		for i, proto := range []uint8{UDP, TCP, SCTP} {
			for j := range 8 {
				f := numbered(fam, proto, 100*i+j)
				if j&1 != 0 {
					f.Orig.Dst = f.Orig.Dst.Next()
				}
				if j&2 != 0 {
					f.Orig.DstPort++
					f.Reply.Src, f.Reply.SrcPort = f.Reply.Src.Next(), f.Reply.SrcPort+1
				}
				if j&4 != 0 {
					f.Status |= StatusSeenReply
					f.Zone = uint16(j & 1)
				}
				flows = append(flows, f)
			}
		}
	}
	fill(t, c, flows...)
	zone0, zone1 := uint16(0), uint16(1)
	var filters []Filter
	for _, fam := range []Family{IPv4, IPv6, 0} {
		dst, src := addr("203.0.113.10"), addr("198.51.100.11")
		if fam == IPv6 {
			dst, src = addr("2001:db8:1::10"), addr("2001:db8:2::11")
		}
		for bits := range 256 {
			if fam == 0 && bits%11 != 0 || fam == IPv6 && bits%3 != 0 {
				continue // each takes a walk of the host's whole hash table
			}
			f := Filter{Family: fam}
			on := func(bit int) bool { return bits&(1<<bit) != 0 }
			if on(0) {
				f.Proto = []uint8{UDP, TCP, SCTP}[bits%3]
			}
			if on(1) {
				f.OrigDst = dst
			}
			if on(2) {
				f.OrigDstPort = 53
			}
			if on(3) {
				f.ReplySrc = src
			}
			if on(4) {
				f.ReplySrcPort = 5353
			}
			if on(5) {
				f.Set = StatusSeenReply
			}
			if on(6) {
				f.Clear = StatusSeenReply | StatusAssured
			}
			if on(7) {
				f.Zone = []*uint16{&zone0, &zone1}[bits&1]
			}
			filters = append(filters, f)
		}
	}
	probed, err := c.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(probed)
	for name, use := range map[string]Features{"as probed": probed, "none": {}} {
		c.features = &use
		for i, f := range filters {
			if use == (Features{}) && i%7 != 0 {
				continue
			}
			want := map[Tuple]bool{}
			for i := range flows {
				if f.Match(&flows[i]) {
					want[flows[i].Orig] = true
				}
			}
			got := list(t, c, f)
			for o, fl := range got {
				if !f.Match(&fl) || !want[o] {
					t.Errorf("%s: filter %+v gave %s", name, f, &fl)
				}
			}
			if len(got) != len(want) {
				t.Errorf("%s: filter %+v gave %d flows, want %d", name, f, len(got), len(want))
			}
			if s := c.Stats(); s.Wanted != len(want) || s.Returned < s.Wanted || s.Malformed != 0 {
				t.Errorf("%s: filter %+v: stats %+v, want %d", name, f, s, len(want))
			}
		}
	}
}

// The probe's answers are compared with queries made here by hand.
func TestProbe(t *testing.T) {
	c := table(t)
	got, err := c.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !got.conclusive(IPv4) || !got.conclusive(IPv6) || got.V4.SCTPPorts == Unknown {
		t.Errorf("inconclusive with namespaces permitted: %s", got)
	}
	fill(t, c, numbered(IPv4, UDP, 1), numbered(IPv6, UDP, 1), numbered(IPv4, TCP, 1), numbered(IPv6, TCP, 1))
	t.Run("live agrees with scratch", func(t *testing.T) {
		var live Features
		for _, fam := range []Family{IPv4, IPv6} {
			if err := c.probeLive(t.Context(), fam, &live); err != nil {
				t.Fatal(err)
			}
		}
		want := got
		want.V4.SCTPPorts, want.V6.SCTPPorts = Unknown, Unknown // not worth a walk there
		if live != want {
			t.Errorf("live  %s\nscratch %s", live, got)
		}
	})
	t.Run("live on an empty table knows nothing", func(t *testing.T) {
		empty := table(t)
		var live Features
		err := empty.probeLive(t.Context(), IPv4, &live)
		if err != nil || live.conclusive(IPv4) || live.V4.Addr != Unknown || live.Status != Unknown {
			t.Errorf("%s, %v", live, err)
		}
	})
	t.Run("IPv6 addresses", func(t *testing.T) {
		f := numbered(IPv6, UDP, 1)
		seen, err := c.answer(t.Context(), Filter{Family: IPv6, OrigDst: f.Orig.Dst}, f)
		if err != nil {
			t.Fatal(err)
		}
		if seen[0] != (got.V6.Addr == Honoured) {
			t.Errorf("the kernel returned the flow: %v; the probe says %s", seen[0], got.V6.Addr)
		}
	})
	t.Run("changes nothing", func(t *testing.T) {
		if n := len(list(t, c, Filter{})); n != 2 { // two tuples, of two families, in two protocols each
			t.Errorf("%d tuples", n)
		}
	})
}

func TestDumpAllocatesNothingPerFlow(t *testing.T) {
	c := table(t)
	for i := range 5000 {
		fill(t, c, numbered(IPv4, UDP, i))
	}
	ctx := t.Context()
	dump := func(f Filter) func() {
		return func() {
			n := 0
			for _, err := range c.Dump(ctx, f) {
				if err != nil {
					t.Fatal(err)
				}
				n++
			}
			if n != 5000 {
				t.Fatalf("%d flows", n)
			}
		}
	}
	for name, f := range map[string]Filter{"all": {}, "filtered": {Family: IPv4, Proto: UDP, OrigDstPort: 53}} {
		// A dozen for the request, the iterator and reading the bucket count.
		if got := testing.AllocsPerRun(5, dump(f)); got > 20 {
			t.Errorf("%s: %.0f allocations for a dump of 5000 flows", name, got)
		}
	}
}

// A flow that was deleted and has come back with a right translation since the
// dump survives the delete, though the kernel often gives it the same id.
func TestDeleteSparesSuccessor(t *testing.T) {
	c := table(t)
	for _, dir := range []ZoneDir{ZoneBoth, ZoneOrig, ZoneReply} {
		for _, zone := range []uint16{0, 9} {
			if zone == 0 && dir != ZoneBoth {
				continue
			}
			t.Run(fmt.Sprintf("zone %d direction %d", zone, dir), func(t *testing.T) {
				sameID := 0
				const rounds = 200
				for i := range rounds {
					stale := numbered(IPv4, UDP, i)
					stale.Zone, stale.ZoneDir = zone, dir
					right := stale
					right.Reply.Src = addr("198.51.100.12")
					fill(t, c, stale)
					was, ok, err := c.Get(t.Context(), stale)
					if err != nil || !ok {
						t.Fatal(ok, err)
					}
					if res, err := c.Delete(t.Context(), was); err != nil || res.Deleted != 1 {
						t.Fatalf("%+v, %v", res, err)
					}
					fill(t, c, right)
					now, _, err := c.Get(t.Context(), right)
					if err != nil {
						t.Fatal(err)
					}
					if now.ID == was.ID {
						sameID++
					}
					if res, err := c.Delete(t.Context(), was); err != nil || res.Gone != 1 || res.Deleted != 0 {
						t.Fatalf("the successor was hit: %+v, %v", res, err)
					}
					if _, err := c.Delete(t.Context(), now); err != nil {
						t.Fatal(err)
					}
				}
				t.Logf("the kernel gave the successor the same id in %d of %d rounds", sameID, rounds)
			})
		}
	}
}

// A flow may be translated without the DST_NAT bit: one that was created over
// netlink with the reply tuple that a translation gives. So the bit narrows no
// pass.
func TestTranslatedWithoutDstNAT(t *testing.T) {
	c := table(t)
	fill(t, c, numbered(IPv4, UDP, 1))
	n := 0
	for f, err := range c.Dump(t.Context(), Filter{Family: IPv4, Proto: UDP}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if !f.Translated() || f.Status&StatusDstNAT != 0 {
			t.Errorf("%s: translated %t, status %#x", f, f.Translated(), f.Status)
		}
	}
	if n != 1 {
		t.Errorf("%d flows, want 1", n)
	}
}

func TestDelete(t *testing.T) {
	c := table(t)
	ctx := t.Context()
	const n = 1000 // several batches
	for i := range n {
		fill(t, c, numbered(IPv4, UDP, i), numbered(IPv6, TCP, i))
	}
	keep := numbered(IPv4, UDP, 5000)
	fill(t, c, keep)
	var victims []Flow
	for _, f := range list(t, c, Filter{}) {
		if f.Orig != keep.Orig {
			victims = append(victims, f)
		}
	}
	wrong := victims[0]
	wrong.ID++
	res, err := c.Delete(ctx, append(victims, wrong, victims[1])...)
	if err != nil {
		t.Fatal(err)
	}
	if d := diff(DeleteResult{Deleted: 2 * n, Gone: 2}, res); d != "" {
		t.Error(d)
	}
	left := list(t, c, Filter{})
	if _, ok := left[keep.Orig]; !ok || len(left) != 1 {
		t.Errorf("left: %v", left)
	}
	t.Run("none", func(t *testing.T) {
		if res, err := c.Delete(ctx); err != nil || res.Deleted != 0 {
			t.Errorf("%+v, %v", res, err)
		}
		if len(list(t, c, Filter{})) != 1 {
			t.Error("a delete of nothing emptied the table")
		}
	})
	t.Run("incomplete", func(t *testing.T) {
		res, err := c.Delete(ctx, left[keep.Orig], Flow{Family: IPv4, Proto: UDP, ID: 1})
		if !errors.Is(err, ErrIncomplete) || res.Deleted != 0 {
			t.Errorf("%+v, %v", res, err)
		}
		if len(list(t, c, Filter{})) != 1 {
			t.Error("something was deleted all the same")
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := c.Delete(ctx, left[keep.Orig]); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// More answers than fit the receive buffer are never asked for at once, even
// where the kernel grants no more than its default.
func TestDeleteAnswersFit(t *testing.T) {
	c := table(t)
	if err := unix.SetsockoptInt(c.ask.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4096); err != nil {
		t.Fatal(err)
	}
	var absent []Flow
	for i := range 2000 {
		f := numbered(IPv4, UDP, i)
		f.ID = 1
		absent = append(absent, f)
	}
	res, err := c.Delete(t.Context(), absent...)
	if err != nil || res.Gone != len(absent) {
		t.Errorf("%+v, %v", res, err)
	}
}

// Dump and Delete at once, and a Delete inside the loop, as a sweep does.
func TestDeleteWhileDumping(t *testing.T) {
	c := table(t)
	const n = 3000
	for i := range n {
		fill(t, c, numbered(IPv4, UDP, i))
	}
	deleted := 0
	for f, err := range c.Dump(t.Context(), Filter{Family: IPv4, Proto: UDP}) {
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Delete(t.Context(), *f)
		if err != nil {
			t.Fatal(err)
		}
		deleted += res.Deleted
	}
	if left := len(list(t, c, Filter{})); left != 0 || deleted != n {
		t.Errorf("deleted %d of %d, %d left", deleted, n, left)
	}
}

func TestDumpAbandoned(t *testing.T) {
	c := table(t)
	for i := range 3000 {
		fill(t, c, numbered(IPv4, UDP, i))
	}
	for range 3 {
		for _, err := range c.Dump(t.Context(), Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	if n := len(list(t, c, Filter{})); n != 3000 {
		t.Errorf("%d flows after an abandoned dump", n)
	}
	for _, err := range c.Dump(t.Context(), Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		for _, inner := range c.Dump(t.Context(), Filter{}) {
			if !errors.Is(inner, ErrDumpRunning) {
				t.Errorf("a dump within a dump: %v", inner)
			}
		}
		break
	}
}

// Sockets that are closed under the Conn fail one request and are replaced.
func TestSocketClosedUnderIt(t *testing.T) {
	c := table(t)
	fill(t, c, numbered(IPv4, UDP, 1))
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	for _, s := range []*socket{c.dump, c.ask} { // another file in their place, so that no number is used twice
		if err := unix.Dup3(null, s.fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	flows, err := c.List(t.Context(), Filter{})
	if err == nil || len(flows) != 0 {
		t.Errorf("%d flows, %v from /dev/null", len(flows), err)
	}
	flows, err = c.List(t.Context(), Filter{})
	if err != nil || len(flows) != 1 {
		t.Fatalf("%d flows, %v", len(flows), err)
	}
	if res, err := c.Delete(t.Context(), flows...); err == nil {
		t.Errorf("deleted %+v by /dev/null", res)
	}
	if res, err := c.Delete(t.Context(), flows...); err != nil || res.Deleted != 1 {
		t.Errorf("%+v, %v", res, err)
	}
}

// The size of the hash table is the host's, so the test plays the resize.
func TestDumpResized(t *testing.T) {
	c := table(t)
	fill(t, c, numbered(IPv4, UDP, 1), numbered(IPv4, UDP, 2))
	size := 1024
	c.buckets = func() int { size *= 2; return size }
	flows, err := c.List(t.Context(), Filter{})
	if !errors.Is(err, ErrResized) || len(flows) != 2 {
		t.Errorf("%d flows, %v", len(flows), err)
	}
	c.buckets = buckets
	if _, err := c.List(t.Context(), Filter{}); err != nil {
		t.Error(err)
	}
}

func TestDumpCancelled(t *testing.T) {
	c := table(t)
	for i := range 3000 {
		fill(t, c, numbered(IPv4, UDP, i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := 0
	var last error
	for _, err := range c.Dump(ctx, Filter{}) {
		if last = err; err == nil {
			seen++
		}
		cancel()
	}
	if !errors.Is(last, context.Canceled) || seen == 0 || seen == 3000 {
		t.Errorf("%d flows, then %v", seen, last)
	}
	if n := len(list(t, c, Filter{})); n != 3000 {
		t.Errorf("%d flows afterwards", n)
	}
}

// The table changes under the dump: what was there all along is seen.
func TestDumpOfAChangingTable(t *testing.T) {
	c := table(t)
	const n = 4000
	for i := range n {
		fill(t, c, numbered(IPv4, UDP, i))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			f := numbered(IPv4, UDP, n+i%1000)
			if c.Create(ctx, f) != nil {
				continue
			}
			if now, ok, err := c.Get(ctx, f); err == nil && ok {
				_, _ = c.Delete(ctx, now)
			}
		}
	})
	for range 10 {
		got := list(t, c, Filter{Family: IPv4, Proto: UDP})
		for i := range n {
			if _, ok := got[numbered(IPv4, UDP, i).Orig]; !ok {
				t.Errorf("flow %d was missed", i)
			}
		}
	}
	cancel()
	wg.Wait()
}

func TestPermission(t *testing.T) {
	ns := nstest.New(t)
	err := ns.Do(func() error {
		// On this thread only: a socket asks for the capabilities of its opener
		// and of its user.
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var old, none [2]unix.CapUserData
		if err := unix.Capget(&hdr, &old[0]); err != nil {
			return err
		}
		none = old
		none[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			return err
		}
		defer func() { _ = unix.Capset(&hdr, &old[0]) }()
		c, err := Dial(Config{})
		if err != nil {
			return err
		}
		defer c.Close()
		_, dumpErr := c.List(context.Background(), Filter{})
		f := sampleFlow()
		_, delErr := c.Delete(context.Background(), f, f)
		_, countErr := c.Count(context.Background())
		for op, err := range map[string]error{"dump": dumpErr, "delete": delErr, "count": countErr} {
			if !errors.Is(err, unix.EPERM) || !errors.Is(err, fs.ErrPermission) {
				return fmt.Errorf("%s: %w", op, err)
			}
			want := "conntrack " + op + ": operation not permitted: CAP_NET_ADMIN is missing; run as root, or grant it " +
				"(setcap cap_net_admin+ep, systemd AmbientCapabilities=, a container's capabilities)"
			if err.Error() != want {
				return fmt.Errorf("%s does not say what to do: %w", op, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDialNamespace(t *testing.T) {
	t.Run("missing", func(t *testing.T) {
		_, err := Dial(Config{NetNS: "/nonexistent/ns"})
		if !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	t.Run("not a namespace", func(t *testing.T) {
		nstest.Require(t)
		_, err := Dial(Config{NetNS: "/dev/null"})
		if !errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})
	t.Run("the thread comes back", func(t *testing.T) {
		before, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		c := table(t)
		fill(t, c, numbered(IPv4, UDP, 1))
		after, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil || before != after {
			t.Errorf("%s became %s (%v)", before, after, err)
		}
	})
}

// A stranger's datagram never reaches a connected socket.
func TestWrongSender(t *testing.T) {
	nstest.Require(t)
	c, err := Dial(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sa, err := unix.Getsockname(c.ask.fd)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, make([]byte, 64), 0, sa); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("sending to the Conn's socket: %v, want ECONNREFUSED", err)
	}
}

// Answers to something else, unknown messages and trouble in the middle of a
// stream, played by a peer that is not the kernel.
func TestStream(t *testing.T) {
	flow := sampleFlow()
	msg := func(seq uint32) []byte {
		var m message
		if err := m.create(&flow, nil, seq); err != nil {
			t.Fatal(err)
		}
		return m.b
	}
	head := func(typ, flags uint16, seq uint32, payload ...byte) []byte {
		var m message
		m.begin(typ, flags, seq, 0)
		m.b = append(m.b[:16], payload...)
		m.end()
		return m.b
	}
	join := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	done := head(3, 0, 1, 0, 0, 0, 0)
	for _, tc := range []struct {
		name  string
		b     [][]byte
		flows int
		want  error
	}{
		{"flows and end", [][]byte{join(msg(1), msg(1)), done}, 2, nil},
		{"another request's answers", [][]byte{join(msg(9), msg(1), head(2, 0, 9, 0xff, 0xff, 0xff, 0xff)), done}, 1, nil},
		{"a message that is no flow", [][]byte{join(head(1<<8, 0, 1, 2, 0, 0, 0), msg(1)), done}, 1, nil},
		{"an unknown message", [][]byte{join(head(77, 0, 1), msg(1)), done}, 1, nil},
		{"interrupted", [][]byte{join(msg(1)), head(3, 0x10, 1, 0, 0, 0, 0)}, 1, ErrInterrupted},
		{"an error at the end", [][]byte{msg(1), head(3, 0, 1, 0x97, 0xff, 0xff, 0xff)}, 1, unix.ENOBUFS},
		{"overrun", [][]byte{msg(1), head(4, 0, 1)}, 1, unix.ENOBUFS},
		{"cut message", [][]byte{msg(1), msg(1)[:40]}, 1, ErrTruncated},
		{"length beyond the datagram", [][]byte{msg(1), {0xff, 0xff, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}}, 1, ErrTruncated},
		{"length below the header", [][]byte{msg(1), {3, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}}, 1, ErrTruncated},
		{"datagram that fills the buffer", [][]byte{msg(1), make([]byte, recvBuf)}, 1, ErrTruncated},
		{"silence", [][]byte{msg(1)}, 1, ErrNoAnswer},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			tv := unix.NsecToTimeval(int64(50 * time.Millisecond))
			if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
				t.Fatal(err)
			}
			_ = unix.SetsockoptInt(pair[1], unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
			c := &Conn{dump: &socket{fd: pair[0], buf: make([]byte, recvBuf)}, ask: &socket{fd: -1}, features: &Features{}, buckets: func() int { return 1 }}
			defer c.Close()
			defer unix.Close(pair[1])
			for _, b := range tc.b {
				if _, err := unix.Write(pair[1], b); err != nil {
					t.Fatal(err)
				}
			}
			n := 0
			var last error
			for f, err := range c.Dump(t.Context(), Filter{}) {
				if err != nil {
					last = err
					break
				}
				if f.Orig != flow.Orig {
					t.Errorf("flow %s", f)
				}
				n++
			}
			if n != tc.flows || !errors.Is(last, tc.want) {
				t.Errorf("%d flows, error %v; want %d, %v", n, last, tc.flows, tc.want)
			}
		})
	}
}

// A kernel without ctnetlink answers EINVAL to everything (nfnetlink_rcv_msg
// knows no subsystem of that number); one that dislikes a filter does not.
func TestNoCtnetlink(t *testing.T) {
	for name, tc := range map[string]struct {
		stats uint32 // errno of the answer to a request for statistics
		want  bool
	}{"no ctnetlink": {uint32(unix.EINVAL), true}, "a filter that is disliked": {0, false}} {
		t.Run(name, func(t *testing.T) {
			peer := func(errno uint32) *socket {
				pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = unix.Close(pair[1]) })
				var m message
				m.begin(uapi.MsgError, 0, 1, 0)
				m.b = binary.NativeEndian.AppendUint32(m.b[:uapi.SizeofNlMsghdr], -errno)
				m.end()
				if _, err := unix.Write(pair[1], m.b); err != nil {
					t.Fatal(err)
				}
				return &socket{fd: pair[0], buf: make([]byte, recvBuf)}
			}
			c := &Conn{dump: peer(uint32(unix.EINVAL)), ask: peer(tc.stats), features: &Features{}, buckets: func() int { return 1 }}
			defer c.Close()
			_, err := c.List(t.Context(), Filter{})
			if !errors.Is(err, unix.EINVAL) || errors.Is(err, ErrNoCtnetlink) != tc.want {
				t.Errorf("%v, want ErrNoCtnetlink: %v", err, tc.want)
			}
		})
	}
}

// Real traffic through the kernel: a flow made by packets reads as one made by
// Create.
func TestRealTraffic(t *testing.T) {
	ns := nstest.New(t)
	if err := ns.SetNAT(); err != nil { // a NAT chain switches connection tracking on
		t.Fatal(err)
	}
	srv := nstest.Echo(t, ns, netip.MustParseAddrPort("127.0.0.1:0"))
	conn, err := ns.DialUDP(netip.AddrPort{}, srv.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	buf := make([]byte, 100)
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Read(buf); err != nil {
		t.Fatal(err)
	}
	c, err := Dial(Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	local := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	flows, err := c.List(t.Context(), Filter{Family: IPv4, Proto: UDP, OrigDstPort: srv.Addr().Port()})
	if err != nil || len(flows) != 1 {
		t.Fatalf("%v, %v", flows, err)
	}
	f := flows[0]
	if f.Orig.SrcPort != local.Port() || !f.Replied() || f.Translated() || f.Zone != 0 {
		t.Errorf("%s", &f)
	}
}

func TestLimits(t *testing.T) {
	c := table(t)
	limit, err := c.Max(t.Context())
	if err != nil || limit <= 0 {
		t.Errorf("Max = %d, %v", limit, err)
	}
	b, err := c.Buckets()
	if err != nil || b <= 0 {
		t.Errorf("Buckets = %d, %v", b, err)
	}
}

func BenchmarkDump(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		c := table(b)
		for i := range n {
			fill(b, c, numbered(IPv4, UDP, i))
		}
		for name, f := range map[string]Filter{
			"everything": {},
			"nothing":    {Family: IPv4, Proto: UDP, OrigDst: addr("203.0.113.99")},
		} {
			b.Run(fmt.Sprintf("%s/flows=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					for _, err := range c.Dump(b.Context(), f) {
						if err != nil {
							b.Fatal(err)
						}
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/flow")
			})
		}
	}
}
