//go:build linux

package ruleset

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// world is a host with random links, addresses, routes, settings and senders.
// Everything around it is one namespace, which puts packets on its links that may
// come from anywhere, and swallows what it gets.
type world struct {
	*generator // v6 is that of the round
	tb         testing.TB
	host, out  *testnet.NS
	flows      *conntrack.Conn
	agent      *Judge // open for as long as the world lives

	links   []*worldLink
	wires   map[string]*testnet.Raw // by the interface that packets come in by
	raw     []*testnet.Raw          // the host's own, of IPv4 and IPv6; none on most
	marker  int
	bridge  bool
	network bool // the bridge has one
	loop    bool // a0 and a1 are the two ends of a cable
	macvlan bool
	strict  bool   // rp_filter is 1 everywhere
	all     string // its value for all
	proxy   bool   // the host sends with others' addresses

	undo   []func() // what routes, rules and addresses there are for a while
	said   []string
	source uint16 // the last port that was sent from
	sent   map[sentKey]string
	then   map[sentKey]worldThen
}

// sentKey is a packet that was sent: each has a source port of its own, as long as
// they last.
type sentKey struct {
	proto    uint8
	from, to netip.AddrPort
}

// worldThen is what a packet met.
type worldThen struct {
	types [2]Types // of source and destination
	link  *worldLink
	index int    // of the link: how often it was made before
	epoch uint64 // of the host
}

func newWorld(tb testing.TB, seed uint64) *world {
	tb.Helper()
	w := &world{
		generator: &generator{Rand: rand.New(rand.NewPCG(seed, 11))}, tb: tb, host: nstest.New(tb), out: nstest.New(tb),
		wires: map[string]*testnet.Raw{}, source: 1024, marker: -1,
	}
	tb.Cleanup(w.close)
	var err error
	w.flows, err = conntrack.Dial(conntrack.Config{NetNS: w.host.Path()})
	must(tb, err)
	must(tb, w.host.Do(func() (err error) {
		w.marker, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(markerType))
		if err != nil {
			return err
		}
		tv := unix.NsecToTimeval(int64(10 * time.Second))
		return errors.Join(unix.SetsockoptTimeval(w.marker, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
			unix.Bind(w.marker, &unix.SockaddrLinklayer{Protocol: markerType, Ifindex: 1}))
	}))
	w.build()
	w.agent, err = NewJudge(tb.Context(), Config{NetNS: w.host.Path()})
	must(tb, err)
	w.said = append(w.said, "the agent's judge is opened")
	return w
}

func (w *world) close() {
	for _, r := range w.wires {
		r.Close()
	}
	for _, r := range w.raw {
		r.Close()
	}
	if w.marker >= 0 {
		unix.Close(w.marker)
	}
	if w.agent != nil {
		must(w.tb, w.agent.Close())
	}
	if w.flows != nil {
		w.flows.Close()
	}
	// At once: worlds come fast, and the kernel takes its time for each.
	must(w.tb, errors.Join(w.host.Close(), w.out.Close()))
}

// do notes what is done, and fails where that fails. What is said reads as if ip(8)
// had been used.
func (w *world) do(err error, format string, args ...any) {
	w.tb.Helper()
	w.said = append(w.said, fmt.Sprintf(format, args...))
	if err != nil {
		w.tb.Fatalf("%s: %v", w.said[len(w.said)-1], err)
	}
}

// try is do for what the kernel may refuse, since it was done before.
func (w *world) try(err error, format string, args ...any) bool {
	if err == nil {
		w.said = append(w.said, fmt.Sprintf(format, args...))
	}
	return err == nil
}

func (w *world) sysctl(name, value string) {
	w.tb.Helper()
	w.do(w.host.Sysctl(name, value), "sysctl %s=%s", name, value)
}

// families are called for IPv4 and for IPv6.
func families(f func(v6 bool)) {
	f(false)
	f(true)
}

func (w *world) build() {
	w.sysctl("net.ipv4.ip_forward", "1")
	w.sysctl("net.ipv6.conf.all.forwarding", "1")
	w.strict = w.chance(20)
	w.all = w.pick("0", "0", "0", "2", "1")
	if w.strict {
		w.all = "1"
	}
	w.sysctl("net.ipv4.conf.all.rp_filter", w.all)
	if w.proxy = w.chance(45); w.proxy {
		w.sign()
	}
	for i, name := range linkNames {
		l := &worldLink{name: name, network: i + 1, bare: name == "tun0"}
		w.links = append(w.links, l)
		w.plug(l)
	}
	if w.loop = w.chance(40); w.loop {
		w.cable()
	}
	if w.macvlan = w.chance(25); w.macvlan {
		l := &worldLink{name: "mv0", network: 7, there: true}
		w.do(w.host.AddLink(testnet.Link{Name: l.name, Kind: "macvlan", Parent: "wan"}), "link add link wan mv0 type macvlan")
		w.open("mv0", "wan", w.hardwareAddr(w.host, "mv0"))
		l.strict = w.settings("mv0")
		w.dress(l)
		w.links = append(w.links, l)
	}
	if w.bridge = w.chance(40); w.bridge {
		w.bridged()
	}
	families(func(v6 bool) {
		if w.chance(80) {
			r := testnet.Route{Dst: everywhere(v6), Via: hostOf(v6, 1, gateway), Dev: "wan"}
			w.try(w.host.SetRoute(r), "route add %s", r)
		}
		if w.chance(50) {
			r := testnet.Route{Type: unix.RTN_LOCAL, Dst: netOf(v6, anyIP), Dev: "lo"}
			w.try(w.host.SetRoute(r), "route add %s", r)
		}
	})
	for range w.IntN(6) {
		families(func(v6 bool) { w.addRoute(v6) })
	}
	for range w.IntN(3) {
		families(func(v6 bool) { w.addRule(v6) })
	}
}

// sign gives a host that sends with others' addresses one of the things that such a
// host has: without any, nothing would tell.
func (w *world) sign() {
	w.tb.Helper()
	switch w.IntN(3) {
	case 0:
		w.sysctl("net.ipv4.ip_nonlocal_bind", "1")
		w.sysctl("net.ipv6.ip_nonlocal_bind", "1")
	case 1: // what a proxy gets its answers by
		families(func(v6 bool) {
			r := testnet.Route{Type: unix.RTN_LOCAL, Dst: everywhere(v6), Dev: "lo", Table: policy + 1}
			w.do(w.host.SetRoute(r), "route add %s", r)
		})
	case 2:
		families(func(v6 bool) {
			r, err := w.host.OpenRaw(v6, testnet.SocketOptions{})
			must(w.tb, err)
			w.raw = append(w.raw, r)
		})
		w.said = append(w.said, "raw sockets are opened")
	}
}

// settings are of one interface. They tell whether its rp_filter is strict.
func (w *world) settings(ifname string) (strict bool) {
	w.tb.Helper()
	rp := w.pick("0", "0", "1", "2")
	if w.strict {
		rp = "1"
	}
	w.sysctl("net.ipv4.conf."+ifname+".rp_filter", rp)
	if w.chance(30) {
		w.sysctl("net.ipv4.conf."+ifname+".accept_local", "1")
	}
	w.do(w.host.SetQuiet(ifname), "link set %s arp off", ifname)
	return max(rp, w.all) == "1"
}

// plug makes a link.
func (w *world) plug(l *worldLink) {
	w.tb.Helper()
	w.do(w.host.Veth(l.name, w.out, l.name), "link add %s type veth", l.name)
	w.open(l.name, l.name, w.hardwareAddr(w.host, l.name))
	l.strict = w.settings(l.name)
	l.there = true
	l.made++
	if !l.bare {
		w.dress(l)
	}
}

// dress gives a link its addresses.
func (w *world) dress(l *worldLink) {
	w.tb.Helper()
	l.addrs = nil
	families(func(v6 bool) {
		if w.chance(95) {
			w.addAddr(l, v6, 1)
		}
		if w.chance(20) {
			w.addAddr(l, v6, secondaries[w.IntN(len(secondaries))])
		}
	})
}

func (w *world) addAddr(l *worldLink, v6 bool, n int) {
	w.tb.Helper()
	p := netip.PrefixFrom(hostOf(v6, l.network, n), lenOf(v6))
	if !l.there || slices.Contains(l.addrs, p) {
		return
	}
	w.do(w.host.AddAddr(l.name, p), "addr add %s dev %s", p, l.name)
	l.addrs = append(l.addrs, p)
}

// open makes the wire by which packets come in by an interface.
func (w *world) open(ifname, outside string, to net.HardwareAddr) {
	w.tb.Helper()
	if r := w.wires[ifname]; r != nil {
		r.Close()
	}
	r, err := w.out.OpenLink(outside, to)
	must(w.tb, err)
	w.wires[ifname] = r
}

func (w *world) hardwareAddr(ns *testnet.NS, ifname string) net.HardwareAddr {
	w.tb.Helper()
	i, err := ns.Interface(ifname)
	must(w.tb, err)
	return i.HardwareAddr
}

// cable joins the host to itself: what it sends by one end comes in by the other.
func (w *world) cable() {
	w.tb.Helper()
	w.do(w.host.Veth("a0", w.host, "a1"), "link add a0 type veth peer a1")
	w.settings("a0")
	w.settings("a1")
	// A quiet interface sends to its own hardware address.
	mac := w.hardwareAddr(w.host, "a0")
	must(w.tb, w.host.SetHardwareAddr("a1", mac))
	w.sysctl("net.ipv4.conf.a0.accept_local", "1")
	w.sysctl("net.ipv4.conf.a1.accept_local", "1")
	families(func(v6 bool) {
		for range 1 + w.IntN(2) {
			r := testnet.Route{Dst: single(hostOf(v6, []int{vips, backends, distant}[w.IntN(3)], 1+w.IntN(4))), Dev: "a0"}
			w.try(w.host.SetRoute(r), "route add %s", r)
		}
	})
}

// bridged makes a bridge of two ports, with or without addresses.
func (w *world) bridged() {
	w.tb.Helper()
	w.do(w.host.AddLink(testnet.Link{Name: "br0", Kind: "bridge"}), "link add br0 type bridge")
	var ports []net.HardwareAddr
	for _, p := range []string{"p1", "p2"} {
		w.do(w.host.Veth(p, w.out, p), "link add %s type veth", p)
		w.do(w.host.SetMaster(p, "br0"), "link set %s master br0", p)
		ports = append(ports, w.hardwareAddr(w.out, p))
	}
	strict := w.settings("br0")
	if w.chance(70) {
		for _, name := range []string{"net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"} {
			err := w.host.Sysctl(name, "1")
			if !w.try(err, "sysctl %s=1", name) && !errors.Is(err, unix.ENOENT) {
				must(w.tb, err)
			}
		}
	}
	w.open("p1", "p1", ports[1]) // to a host behind the other port
	w.open("br0", "p2", w.hardwareAddr(w.host, "br0"))
	if w.network = w.chance(50); w.network {
		l := &worldLink{name: "br0", network: 8, there: true, strict: strict}
		w.dress(l)
		w.links = append(w.links, l)
	}
}

func (w *world) addRoute(v6 bool) {
	r := w.route(v6)
	if w.try(w.host.SetRoute(r), "route add %s", r) {
		w.undo = append(w.undo, func() { w.try(w.host.DelRoute(r), "route del %s", r) })
	}
}

func (w *world) addRule(v6 bool) {
	r := w.policyRule(v6)
	if w.try(w.host.SetRule(r), "rule add %s", r) {
		w.undo = append(w.undo, func() { w.try(w.host.DelRule(r), "rule del %s", r) })
	}
}

// mutate changes something of the host, or changes it back.
func (w *world) mutate() {
	w.tb.Helper()
	l := w.oneLink()
	switch n := w.IntN(20); {
	case n < 4:
		w.addAddr(l, w.v6, secondaries[w.IntN(len(secondaries))])
	case n < 8 && l.there && len(l.addrs) > 0:
		// As often as not the first, and with it its secondaries.
		p := l.addrs[w.IntN(len(l.addrs))]
		w.do(w.host.DelAddr(l.name, p), "addr del %s dev %s", p, l.name)
		l.addrs = w.present(l)
	case n < 10:
		w.addRoute(w.v6)
	case n < 11:
		w.addRule(w.v6)
	case n < 14 && len(w.undo) > 0:
		i := w.IntN(len(w.undo))
		w.undo[i]()
		w.undo = slices.Delete(w.undo, i, i+1)
	case n < 15:
		r := testnet.Route{Dst: everywhere(w.v6), Via: w.hostAddr(1, gateway), Dev: "wan"}
		if !w.try(w.host.DelRoute(r), "route del %s", r) {
			w.try(w.host.SetRoute(r), "route add %s", r)
		}
	case n < 17 && l.there && l.name != "mv0":
		w.do(w.host.SetDown(l.name), "link set %s down", l.name)
		w.do(w.host.SetUp(l.name), "link set %s up", l.name)
		l.addrs = w.present(l)
	case l.name == "ppp0" || l.name == "lan":
		if l.there {
			w.do(w.host.DelLink(l.name), "link del %s", l.name)
			l.there, l.addrs = false, nil
			return
		}
		w.plug(l)
	}
}

// present are the addresses that an interface still has.
func (w *world) present(l *worldLink) (list []netip.Prefix) {
	w.tb.Helper()
	must(w.tb, w.host.Do(func() error {
		i, err := net.InterfaceByName(l.name)
		if err != nil {
			return err
		}
		addrs, err := i.Addrs()
		for _, a := range addrs {
			if p := netip.MustParsePrefix(a.String()); !p.Addr().IsLinkLocalUnicast() {
				list = append(list, p)
			}
		}
		return err
	}))
	return list
}

// The marker is a frame of a type of its own (ETH_P_802_EX1), that goes by lo.
var markerType = binary.NativeEndian.Uint16([]byte{0x88, 0xb5})

// packet is a packet to be sent.
type packet struct {
	by       *testnet.Raw
	who      string
	link     *worldLink // nil: it is the host's own
	proto    uint8
	from, to netip.AddrPort
}

// burst lets all kinds of senders send packets, and waits until the host has
// received all.
func (w *world) burst(n int) {
	w.tb.Helper()
	var list []packet
	for range n {
		p := packet{proto: conntrack.UDP, to: netip.AddrPortFrom(w.dst(), uint16(w.port()))}
		if w.chance(15) {
			p.proto = conntrack.TCP
		}
		var src netip.Addr
		if len(w.raw) > 0 && w.chance(20) {
			p.by, p.who, src = w.raw[map[bool]int{false: 0, true: 1}[w.v6]], "a raw socket of the host", w.src(w.oneLink())
		} else {
			l := w.oneLink()
			if !l.there {
				continue
			}
			name := l.name
			src = w.src(l)
			switch {
			case name == "br0": // a bridge with a network has that behind it
				src = w.hostAddr(l.network, 2+w.IntN(3))
			case w.bridge && !w.network && w.chance(15):
				name = "p1"
			}
			p.by, p.who, p.link = w.wires[name], "the link "+name, l
		}
		p.from = netip.AddrPortFrom(src, w.nextPort())
		list = append(list, p)
	}
	sockets := w.sockets()
	w.pinned(func() error {
		for _, p := range list {
			// A packet that the host cannot route, or that an ICMP error keeps from
			// being sent, makes no flow.
			_ = p.by.Send(p.proto, p.from, p.to)
		}
		for _, s := range sockets {
			for range 1 + n/20 {
				to := netip.AddrPortFrom(w.dst(), uint16(w.port()))
				w.sent[sentKey{conntrack.UDP, s.from, to}] = s.who
				_, _ = s.conn.WriteToUDPAddrPort([]byte("x"), to)
			}
			s.conn.Close()
		}
		return w.settle()
	})
	for _, p := range list {
		k := sentKey{p.proto, p.from, p.to}
		w.sent[k] = p.who
		w.then[k] = w.now(k, p.link)
	}
	for k := range w.sent {
		if _, known := w.then[k]; !known {
			w.then[k] = w.now(k, nil)
		}
	}
}

// now is what a packet would meet now.
func (w *world) now(k sentKey, l *worldLink) worldThen {
	for !w.agent.host.Current(conntrack.TCP) {
		time.Sleep(time.Millisecond)
	}
	h := w.agent.host.Certain()
	n := worldThen{types: [2]Types{h.Types(k.from.Addr()), h.Types(k.to.Addr())}, link: l, epoch: w.agent.host.Epoch()}
	if l != nil {
		n.index = l.made
	}
	return n
}

// moved tells whether an untranslated flow would be translated by now for what the
// host is now: its addresses are of another type, the interface that it came by is
// gone, or a strict rp_filter lets its source in by another.
func (w *world) moved(k sentKey) bool {
	then := w.then[k]
	now := w.now(k, then.link)
	l := then.link
	return then.types != now.types || l != nil && (!l.there || then.index != l.made || l.strict && then.epoch != now.epoch)
}

func (w *world) nextPort() uint16 {
	if w.source++; w.source < 1024 {
		w.source = 1024
	}
	return w.source
}

type hostSocket struct {
	conn *net.UDPConn
	from netip.AddrPort
	who  string
}

// sockets opens some of the host's own, of all kinds.
func (w *world) sockets() (list []hostSocket) {
	for range 5 {
		var o testnet.SocketOptions
		var src netip.Addr
		who := "an ordinary socket"
		switch n := w.IntN(10); {
		case n < 3:
			src = w.hostAddr(w.oneLink().network, 1)
		case n < 5 || !w.proxy && n < 8:
			src = w.hostAddr(w.oneLink().network, secondaries[w.IntN(len(secondaries))])
		case !w.proxy:
			src = w.hostAddr(anyIP, 1+w.IntN(3))
		case n < 6:
			src, o.Freebind, who = w.hostAddr(anyIP, 1+w.IntN(3)), true, "a socket that binds freely"
		case n < 8:
			src, o.Transparent, who = w.src(w.oneLink()), true, "a transparent socket"
		default:
			src, o.Freebind, who = w.src(w.oneLink()), true, "a socket that binds freely"
		}
		if w.chance(25) {
			o.Device = w.oneLink().name
			who += " bound to " + o.Device
		}
		if w.chance(20) {
			o.Mark = 7
			who += " with a mark"
		}
		from := netip.AddrPortFrom(src, w.nextPort())
		c, err := w.host.ListenUDPAs(from, o)
		if err == nil {
			list = append(list, hostSocket{c, from, who})
		}
	}
	return list
}

// pinned runs f on one processor: the kernel receives in its order what is sent on
// a veth or on lo there (enqueue_to_backlog).
func (w *world) pinned(f func() error) {
	w.tb.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		var set, one unix.CPUSet
		err := unix.SchedGetaffinity(0, &set)
		for i := 0; i < 1024 && one.Count() == 0; i++ {
			if set.IsSet(i) {
				one.Set(i)
			}
		}
		if err == nil {
			err = unix.SchedSetaffinity(0, &one)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	must(w.tb, <-done)
}

// settle waits until all that was sent has been received, also what the host sends
// to itself by its cable: a marker takes the way of the rest.
func (w *world) settle() error {
	frame := make([]byte, 15)
	frame[12], frame[13] = 0x88, 0xb5
	last := -1
	for range 64 {
		if err := unix.Sendto(w.marker, frame, 0, &unix.SockaddrLinklayer{Protocol: markerType, Ifindex: 1}); err != nil {
			return fmt.Errorf("send a marker: %w", err)
		}
		if _, _, err := unix.Recvfrom(w.marker, make([]byte, 64), 0); err != nil {
			return fmt.Errorf("wait for a marker: %w", err)
		}
		n, err := w.flows.Count(context.Background())
		if err != nil || n == last {
			return err
		}
		last = n
	}
	return nil
}

// worldTally counts what was sent and said.
type worldTally struct {
	worlds, rounds, packets, judged int
	since                           int            // untranslated flows whose host has moved since
	verdicts                        map[string]int // of the judge opened afterwards
	wrong                           map[string]int // right flows that were called stale, by what
	wrongFlows                      int
	outside                         int // of what was predicted without a host
	changed, found                  int // flows that a change made stale, and those called so
	replaced, replacedFound         int
	escaped                         map[string]int // why they were not
}

func newWorldTally() *worldTally {
	return &worldTally{verdicts: map[string]int{}, wrong: map[string]int{}, escaped: map[string]int{}}
}

func counted(m map[string]int) string {
	var b strings.Builder
	for _, k := range slices.SortedFunc(maps.Keys(m), func(a, b string) int { return m[b] - m[a] }) {
		fmt.Fprintf(&b, "\n  %6d %s", m[k], k)
	}
	return b.String()
}

func (t *worldTally) report(tb testing.TB, took time.Duration) {
	tb.Logf("%d worlds, %d rulesets, %d packets (%.0f a second), %d judgements", t.worlds, t.rounds, t.packets,
		float64(t.packets)/took.Seconds(), t.judged)
	tb.Logf("verdicts, %d of untranslated flows whose host has moved since aside:%s", t.since, counted(t.verdicts))
	tb.Logf("%d flows became stale for certain, %d were called so; of %d whose backend was replaced, %d; the others:%s",
		t.changed, t.found, t.replaced, t.replacedFound, counted(t.escaped))
	if t.wrongFlows > 0 || t.outside > 0 {
		tb.Logf("right flows called stale: %d, and %d beside the prediction:%s", t.wrongFlows, t.outside, counted(t.wrong))
	}
}

// TestDifferentialWorlds lets hosts of every kind make flows, by rules that ask what
// the host decides, and judges them while the rules are the same: none may be stale,
// by a judge that lived through it all as by one that sees the host as it is now.
// After the rules have changed, what the change has made stale is called so.
func TestDifferentialWorlds(t *testing.T) {
	nstest.Require(t)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("install nftables: ", err)
	}
	span, seed := budget(t, 12*time.Second)
	count := newWorldTally()
	start := time.Now()
	for failed := 0; ; seed++ {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { newWorld(t, seed).live(count) }) {
			t.Logf("%s=%d runs this one again", diffSeedEnv, seed)
			failed++
		}
		if time.Since(start) > span || failed > 3 && os.Getenv(diffForEnv) == "" {
			break
		}
	}
	count.report(t, time.Since(start))
	// So that nothing passes by keeping everything.
	if count.found < count.changed || count.replacedFound < count.replaced {
		t.Errorf("of %d flows that are stale for certain, %d are not called so", count.changed+count.replaced,
			count.changed+count.replaced-count.found-count.replacedFound)
	}
}

// live is what happens in a world.
func (w *world) live(t *worldTally) {
	w.tb.Helper()
	t.worlds++
	for range 4 {
		t.rounds++
		w.v6 = w.chance(45)
		w.sent, w.then = map[sentKey]string{}, map[sentKey]worldThen{}
		if w.chance(25) {
			w.plainRound(t)
		} else {
			w.round(t)
		}
		if w.tb.Failed() {
			break
		}
	}
	if w.tb.Failed() {
		w.tb.Logf("the host:\n  %s", strings.Join(w.said, "\n  "))
	}
}

// base is what every round has beside its rules: connection tracking of everything,
// and connections that are refused stay as they are.
const base = `flush ruleset
table inet track {
	chain c { type filter hook input priority 0; ct state new
	}
	chain rst { type filter hook output priority -300; tcp flags & rst == rst drop
	}
}
`

func (w *world) load(tables ...string) string {
	w.tb.Helper()
	s := scene{router: w.host}
	s.run(w.tb, base, "nft", "-f", "-")
	var wrote []string
	count := tally{refused: map[string]int{}}
	for _, text := range tables {
		wrote = append(wrote, s.nft(w.tb, text, &count))
	}
	return strings.Join(wrote, "")
}

// clear empties the table of flows.
func (w *world) clear() {
	w.tb.Helper()
	if list := w.list(); len(list) > 0 {
		_, err := w.flows.Delete(w.tb.Context(), list...)
		must(w.tb, err)
	}
}

func (w *world) list() (list []conntrack.Flow) {
	w.tb.Helper()
	for f, err := range w.flows.Dump(w.tb.Context(), conntrack.Filter{}) {
		must(w.tb, err)
		list = append(list, *f)
	}
	return list
}

// watch judges what is in the table while all goes on, as an agent does, until stop
// is called. Of flows that are not translated the addresses may be of another type
// by the time they are judged.
func (w *world) watch() (stop func()) {
	w.tb.Helper()
	c, err := conntrack.Dial(conntrack.Config{NetNS: w.host.Path()})
	must(w.tb, err)
	done := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for {
			for f, err := range c.Dump(w.tb.Context(), conntrack.Filter{}) {
				if err != nil {
					w.tb.Error(err)
					return
				}
				if !judged(f) || !f.Translated() {
					continue
				}
				if v := w.agent.Judge(f); v.Verdict.Stale() {
					w.tb.Errorf("while the host changes, the agent's judge calls a right flow %s: %s", v.Verdict, f)
					return
				}
			}
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return func() {
		close(done)
		work.Wait()
		c.Close()
	}
}

// steps are bursts, and changes of the host between them.
func (w *world) steps(t *worldTally, judge func(when string)) {
	w.tb.Helper()
	if w.chance(30) {
		reload(w.tb, w.agent)
		defer w.watch()()
	}
	for i := range 3 + w.IntN(3) {
		n := 60 + w.IntN(100)
		w.burst(n)
		t.packets += n
		if judge("after a burst"); w.tb.Failed() {
			return
		}
		for range w.IntN(3) {
			w.mutate()
		}
		if i > 0 && w.chance(50) {
			if judge("after a change of the host"); w.tb.Failed() {
				return
			}
		}
	}
}

// round lets one random ruleset be met, which does not change.
func (w *world) round(t *worldTally) {
	w.tb.Helper()
	w.clear()
	tables := w.rules()
	text := w.load(tables...)
	w.said = append(w.said, "the rules are those of this round")
	w.steps(t, func(when string) { w.judgeAll(t, when, text) })
	if w.tb.Failed() || !strings.Contains(text, "dnat") {
		return
	}
	// Every backend is another: what went to one is stale, wherever it was met.
	before := w.list()
	old, now := netOf(w.v6, backends), netOf(w.v6, others)
	cut := func(p netip.Prefix) string { // "10.91.0." and "2001:db8:91::"
		s := p.Addr().String()
		if !w.v6 {
			return strings.TrimSuffix(s, "0")
		}
		return s
	}
	next := text
	for _, verb := range []string{"to ", "to [", "-", ": "} {
		next = strings.ReplaceAll(next, verb+cut(old), verb+cut(now))
	}
	w.load(next)
	reload(w.tb, w.agent)
	j := w.command()
	defer j.Close()
	for i := range before {
		f := &before[i]
		if !f.Translated() || !old.Contains(f.Reply.Src) || old.Contains(f.Orig.Dst) {
			continue
		}
		o := j.Rules().Outcome(PacketOf(f), Unknown{})
		if o.Allows(netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort), AllTypes) {
			t.escaped["the rules cannot be told: "+cmp.Or(o.Why, "some redirect")]++
			continue
		}
		t.replaced++
		v := j.Judge(f)
		for start := time.Now(); v.Why == whyMoved && time.Since(start) < 5*time.Second; time.Sleep(time.Millisecond) {
			v = j.Judge(f)
		}
		if v.Verdict.Stale() {
			t.replacedFound++
		} else {
			t.escaped[fmt.Sprintf("%s %s", v.Verdict, v.Why)]++
		}
	}
}

// plainRound lets rules be met that ask nothing of the host, and then others.
func (w *world) plainRound(t *worldTally) {
	w.tb.Helper()
	w.clear()
	p := w.plain()
	text := w.load(p.text(w.v6))
	w.said = append(w.said, "the rules are those of this round")
	w.steps(t, func(when string) { w.judgeAll(t, when, text) })
	if w.tb.Failed() {
		return
	}
	before := w.list()
	next := p.changed(w)
	after := w.load(next.text(w.v6))
	reload(w.tb, w.agent)
	j := w.command()
	defer j.Close()
	for i := range before {
		f := &before[i]
		if !judged(f) {
			continue
		}
		want := next.stale(f)
		for name, by := range map[string]*Judge{"the agent's judge": w.agent, "a judge opened now": j} {
			t.judged++
			v, steps := by.Explain(f)
			for start := time.Now(); v.Why == whyMoved && time.Since(start) < 5*time.Second; time.Sleep(time.Millisecond) {
				v, steps = by.Explain(f) // the host has just changed, too
			}
			if want.Stale() {
				t.changed++
				if v.Verdict.Stale() {
					t.found++
				}
			}
			if v.Verdict != want {
				w.tb.Errorf("the rules have changed, and %s says %s of a flow that is %s: %s\n  %s\nbefore:\n%snow:\n%s", name, v.Verdict, want,
					f, strings.Join(steps, "\n  "), text, after)
				return
			}
		}
	}
}

func judged(f *conntrack.Flow) bool {
	return (f.Proto == conntrack.UDP || f.Proto == conntrack.TCP) && f.Zone == 0
}

// command opens a judge, as a command does.
func (w *world) command() *Judge {
	w.tb.Helper()
	j, err := NewJudge(w.tb.Context(), Config{NetNS: w.host.Path()})
	must(w.tb, err)
	return j
}

// judgeAll judges every flow by the rules that have made it.
func (w *world) judgeAll(t *worldTally, when, text string) {
	w.tb.Helper()
	// At once, before anything has told the judge of what has changed.
	list := w.list()
	reload(w.tb, w.agent)
	wrong := 0
	check := func(name string, j *Judge, f *conntrack.Flow) Verdict {
		v := j.Judge(f)
		t.judged++
		if !v.Verdict.Stale() {
			return v.Verdict
		}
		k := sentKey{f.Proto, netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)}
		who := w.sent[k]
		if v.Verdict == Untranslated && w.moved(k) {
			t.since++
			return v.Verdict
		}
		if who == "" {
			who = "what came back"
		}
		kind, _, _ := strings.Cut(who, " with a mark")
		kind, _, _ = strings.Cut(kind, " bound to")
		t.wrong[fmt.Sprintf("%s: %s, of %s", name, v.Verdict, kind)]++
		t.wrongFlows++
		if wrong++; wrong <= 3 {
			_, steps := j.Explain(f)
			w.tb.Errorf("%s, %s calls a right flow %s (sent by %s): %s\n  %s", when, name, v.Verdict, who, f, strings.Join(steps, "\n  "))
		}
		return v.Verdict
	}
	for i := range list {
		if judged(&list[i]) {
			check("the agent's judge", w.agent, &list[i])
		}
	}
	j := w.command()
	defer j.Close()
	for i := range list {
		f := &list[i]
		if !judged(f) {
			continue
		}
		t.verdicts[check("a judge opened now", j, f).String()]++
		o := j.Rules().Outcome(PacketOf(f), Unknown{})
		got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
		if !o.Allows(got, AllTypes) && (f.Translated() || !o.Untranslated) {
			wrong++
			if t.outside++; t.outside <= 10 {
				w.tb.Errorf("%s: predicted, whatever the host is, %s: %s", when, o, f)
			}
		}
	}
	if wrong > 0 {
		w.tb.Logf("%d wrong of %d flows; the rules:\n%s", wrong, len(list), text)
	}
}
