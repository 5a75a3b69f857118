//go:build linux

package doctor

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// by returns the findings by their IDs.
func by(r *Report) map[string]Finding {
	m := map[string]Finding{}
	for _, f := range r.Findings {
		m[f.ID] = f
	}
	return m
}

func TestHost(t *testing.T) {
	ns := nstest.New(t)
	before := by(host(t, ns))
	for id, want := range map[string]string{
		"namespace":       "looking into " + ns.Path() + " (net:[",
		"capability":      "effective",
		"ctnetlink":       "the kernel answers",
		"filter-protocol": "IPv4 ",
		"table-fill":      "0 of ",
		"zones":           "no flow in the table",
		"offload":         "no flow in the table",
		"settling":        "nothing was ever committed",
		"rules":           "0 rules in 0 tables, from 0 NAT base chains on, read in ",
		"ipvs":            "not in use",
		"namespaces":      " among ",
	} {
		if f := before[id]; !strings.Contains(f.What, want) || f.Level == Mend {
			t.Errorf("%s: %+v, want %q", id, f, want)
		}
	}

	err := ns.SetNAT(testnet.Forward{
		Proto: unix.IPPROTO_UDP, Dst: netip.MustParseAddrPort("203.0.113.10:53"),
		Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.11:53")},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f, err := conntrack.Parse("udp 17 600 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 [UNREPLIED] " +
		"src=198.51.100.11 dst=192.0.2.50 sport=53 dport=1")
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint16(10) {
		f.Orig.SrcPort, f.Reply.DstPort, f.Zone = 1000+i, 1000+i, 7*(i%2)
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	closeListener := listen(t, ns)
	for name, value := range map[string]string{
		"events": "1", "tcp_loose": "0", "udp_timeout": "31", "udp_timeout_stream": "3600",
	} {
		if err := ns.Sysctl("net.netfilter.nf_conntrack_"+name, value); err != nil {
			t.Fatal(err)
		}
	}
	after := by(host(t, ns))
	for id, want := range map[string]string{
		"table-fill":  "10 of ",
		"zones":       "of 10 flows: 5 in zone 0, 5 in zone 7",
		"offload":     "none of 10 flows",
		"settling":    "by the generation of the nftables ruleset, which is ",
		"rules":       "4 rules in 1 table, from 2 NAT base chains on, read in ",
		"events":      "listened to by ",
		"tcp-loose":   "off",
		"udp-timeout": "31 s, and 3600 s",
	} {
		if f := after[id]; !strings.HasPrefix(f.What, want) {
			t.Errorf("%s: %+v, want %q", id, f, want)
		}
	}
	closeListener()
	if f := by(host(t, ns))["events"]; !strings.HasPrefix(f.What, "always on, and nobody listens") {
		t.Errorf("without a listener: %+v", f)
	}
}

func host(t *testing.T, ns *testnet.NS) *Report {
	t.Helper()
	r, err := Host(t.Context(), ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// listen opens a socket that hears of new flows, and returns what closes it.
func listen(t *testing.T, ns *testnet.NS) func() {
	t.Helper()
	var fd int
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrNetlink{
			Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_CONNTRACK_NEW - 1),
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
	}
}

// Looking makes no table, and the thread is back where it was.
func TestHostChangesNothing(t *testing.T) {
	ns := nstest.New(t)
	home, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	host(t, ns)
	if now, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || now != home {
		t.Errorf("the thread is in %s, and was in %s (%v)", now, home, err)
	}
	err = ns.Do(func() error {
		for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
			if b, err := os.ReadFile("/proc/thread-self/net/" + name); err == nil && len(b) > 0 {
				t.Errorf("%s: %s", name, b)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// The rules that iptables and its variants write are known as theirs.
func TestHostRules(t *testing.T) {
	for _, tt := range []struct {
		name     string
		commands []string
		id, what string
	}{
		{"kube-proxy by iptables", []string{"iptables-nft -w -t nat -N KUBE-SERVICES"}, "kube-proxy", "chain ip nat KUBE-SERVICES"},
		{"kube-proxy by nftables", []string{"nft add table ip6 kube-proxy"}, "kube-proxy", "table ip6 kube-proxy"},
		{"Docker", []string{"ip6tables-nft -w -t nat -N DOCKER"}, "docker", "chain ip6 nat DOCKER"},
		{"nft", []string{"nft add table ip x"}, "settling", "by the generation of the nftables ruleset"},
		{
			"iptables-legacy beside nft",
			[]string{"nft add table ip x", "iptables-legacy -w -t nat -N X"},
			"settling", "iptables-legacy has a nat table",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns := nstest.New(t)
			for _, command := range tt.commands {
				args := strings.Fields(command)
				if _, err := exec.LookPath(args[0]); err != nil {
					t.Skip(err)
				}
				err := ns.Do(func() error {
					cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
					cmd.Env = append(cmd.Environ(), nstest.LockFile(t))
					out, err := cmd.CombinedOutput()
					if err != nil {
						t.Logf("%s: %s", command, out)
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if f := by(host(t, ns))[tt.id]; !strings.Contains(f.What, tt.what) || f.Level > Info { // a process of the host may be seen first
				t.Errorf("got %+v, want %q", f, tt.what)
			}
		})
	}
}

// Other namespaces with NAT rules are found by the processes in them.
func TestHostNAT(t *testing.T) {
	with, without := nstest.New(t), nstest.New(t)
	for _, ns := range []*testnet.NS{with, without} {
		if err := ns.SetNAT(); err != nil { // chains alone
			t.Fatal(err)
		}
	}
	pids := map[string]int{}
	var want string
	for _, ns := range []*testnet.NS{with, without} {
		cmd := exec.CommandContext(t.Context(), "sleep", "60")
		if err := ns.Do(cmd.Start); err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		path := "/proc/" + strconv.Itoa(cmd.Process.Pid) + "/ns/net"
		link, err := os.Readlink(path)
		if err != nil {
			t.Fatal(err)
		}
		pids[link] = cmd.Process.Pid
		if ns == with {
			want = path
		}
	}
	flush := exec.CommandContext(t.Context(), "nft", "flush", "ruleset")
	if err := without.Do(flush.Run); err != nil {
		t.Skip(err)
	}
	list, _, err := (&live{}).NAT(t.Context(), pids)
	if err != nil {
		t.Fatal(err)
	}
	// The host's are what they are.
	own := slices.DeleteFunc(list, func(x Elsewhere) bool { return !strings.HasPrefix(x.Path, "/proc/") })
	if !slices.Equal(own, []Elsewhere{{Path: want, Rules: true}}) {
		t.Errorf("%v, want %s", own, want)
	}
}

// A rule that is left over leads to nobody, and stands before the right one. That
// is seen also while somebody sends, when no entry is ever FAILED.
func TestHostLeftOver(t *testing.T) {
	star := nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
	dst, alive := netip.MustParseAddrPort("203.0.113.10:53"), netip.MustParseAddrPort("198.51.100.2:53")
	forward := func(dst netip.AddrPort, to string) testnet.Forward {
		return testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: dst, Backends: []netip.AddrPort{netip.MustParseAddrPort(to)}}
	}
	other := netip.MustParseAddrPort("203.0.113.11:53")
	err := star.Router.SetNAT(forward(dst, "198.51.100.99:53"), forward(dst, alive.String()), forward(other, alive.String()))
	if err != nil {
		t.Fatal(err)
	}
	nstest.Echo(t, star.Leaf("backends"), alive)
	s := nstest.Send(t, star.Leaf("client"), netip.AddrPort{}, other, 20*time.Millisecond)
	if _, err := s.Await(t.Context(), alive); err != nil {
		t.Fatal(err)
	}
	sending := nstest.Send(t, star.Leaf("client"), netip.AddrPort{}, dst, 20*time.Millisecond)
	ns := star.Router
	found := func() map[string]Finding { return by(host(t, ns)) }
	for range 100 { // until the first datagram is there
		if strings.Contains(found()["rules"].What, "each of 2 flows") {
			break
		}
	}
	f := found()
	if x := f["rules-to-nobody"]; !strings.Contains(x.What, " leads to 198.51.100.99, which does not answer on backends (INCOMPLETE): 1 flow unanswered") || x.Level != Warn {
		t.Errorf("%+v", x)
	}
	if err := sending.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ns.Sysctl("net.ipv4.neigh.backends.retrans_time_ms", "10"); err != nil {
		t.Fatal(err)
	}
	failed := func() bool {
		return strings.Contains(found()["rules-to-nobody"].What, "does not answer on backends (FAILED): 1 flow unanswered")
	}
	for range 10 { // of which each takes a second
		if failed() {
			break
		}
	}
	if !failed() {
		t.Errorf("%+v", found()["rules-to-nobody"])
	}
	if x := f["rules-shadowed"]; !strings.HasPrefix(x.What, "1 rule is never met: inet flowsweep-test forwards handle ") || strings.Count(x.What, "203.0.113.10") != 2 || x.Level != Warn {
		t.Errorf("%+v", x)
	}
}

// Those without a process are found where they are mounted, as Docker mounts
// Swarm's ingress_sbox; what translates there may be no rule.
func TestHostNATMounted(t *testing.T) {
	legacy := nstest.New(t)
	nstest.LegacyNAT(t, legacy)
	path := filepath.Join(t.TempDir(), "ingress sbox")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var list []Elsewhere
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and given up, with its mounts
		if err = unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return
		}
		if err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return
		}
		if err = unix.Mount(legacy.Path(), path, "", unix.MS_BIND, ""); err != nil {
			return
		}
		list, _, err = (&live{}).NAT(t.Context(), nil)
	}()
	<-done
	if errors.Is(err, fs.ErrPermission) {
		t.Skip(err)
	}
	if i := slices.IndexFunc(list, func(x Elsewhere) bool { return x.Path == path }); err != nil || i < 0 || list[i] != (Elsewhere{Path: path, Legacy: true}) {
		t.Errorf("%+v, %v", list, err)
	}
}

// A program at connect4 of a cgroup is seen there, and in the cgroups below.
func TestSocketPrograms(t *testing.T) {
	nstest.Require(t)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	roots := mountsOf("cgroup2", mounts)
	if len(roots) == 0 {
		t.Skip("cgroup v2 is not mounted")
	}
	if _, _, err := (&live{}).SocketPrograms(); err != nil {
		t.Skip(err)
	}
	cgroup := filepath.Join(roots[0].path, "flowsweep-test-"+strconv.Itoa(os.Getpid()))
	below := filepath.Join(cgroup, "below")
	for _, dir := range []string{cgroup, below} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
	}
	want := func(dir string, want ...string) {
		t.Helper()
		if hooks, err := socketPrograms(dir); err != nil || !slices.Equal(hooks, want) {
			t.Errorf("%s: %v, %v, want %v", dir, hooks, err, want)
		}
	}
	want(cgroup)
	detach := attachAllow(t, cgroup, unix.BPF_CGROUP_INET4_CONNECT)
	want(cgroup, "connect4")
	want(below, "connect4")
	detach()
	want(cgroup)
	if _, err := socketPrograms(t.TempDir()); !errors.Is(err, unix.EBADF) {
		t.Errorf("no cgroup: %v", err)
	}
}

// attachAllow attaches a program that allows everything, and returns what takes
// it away.
func attachAllow(t *testing.T, cgroup string, typ uint32) func() {
	t.Helper()
	dir, err := os.Open(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	bpf := func(cmd int, attr unsafe.Pointer, size uintptr) int {
		t.Helper()
		n, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(attr), size)
		if errno != 0 {
			t.Fatalf("bpf command %d: %v", cmd, errno)
		}
		return int(n)
	}
	program := [2]uint64{0x00000001_0000_00b7, 0x95} // r0 = 1; exit (struct bpf_insn)
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the program is a little-endian machine's")
	}
	license := [...]byte{'G', 'P', 'L', 0}
	load := struct {
		typ, count     uint32
		insns, license uint64
		logLevel       uint32
		logSize        uint32
		log            uint64
		version, flags uint32
		name           [16]byte
		ifindex        uint32
		attachType     uint32
	}{
		typ: unix.BPF_PROG_TYPE_CGROUP_SOCK_ADDR, count: 2, insns: uint64(uintptr(unsafe.Pointer(&program))),
		license: uint64(uintptr(unsafe.Pointer(&license))), attachType: typ,
	}
	prog := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&load), unsafe.Sizeof(load))
	runtime.KeepAlive(&program)
	runtime.KeepAlive(&license)
	attach := struct{ target, prog, typ, flags, replace uint32 }{target: uint32(dir.Fd()), prog: uint32(prog), typ: typ}
	bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attach), unsafe.Sizeof(attach))
	return func() {
		bpf(unix.BPF_PROG_DETACH, unsafe.Pointer(&attach), unsafe.Sizeof(attach))
		_ = unix.Close(prog)
	}
}

func TestHostWithoutNamespace(t *testing.T) {
	if _, err := Host(t.Context(), "/nonexistent"); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("got %v", err)
	}
}

// The whole table is not read: a dump can be left after the first flows.
func TestSampleIsBounded(t *testing.T) {
	ns := nstest.New(t)
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f, err := conntrack.Parse("udp 17 600 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 [UNREPLIED] " +
		"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1")
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint16(100) {
		f.Orig.SrcPort, f.Reply.DstPort = 1000+i, 1000+i
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	var ports []uint16
	err = (&live{ns.Path()}).Sample(t.Context(), 30, func(f *conntrack.Flow) { ports = append(ports, f.Orig.SrcPort) })
	slices.Sort(ports)
	if n := len(slices.Compact(ports)); n != 30 || err != nil {
		t.Errorf("%d flows, %v", n, err)
	}
}
