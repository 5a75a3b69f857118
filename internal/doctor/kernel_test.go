//go:build linux

package doctor

import (
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

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
					cmd.Env = append(cmd.Environ(), "XTABLES_LOCKFILE="+t.TempDir()+"/lock")
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
	paths, _, err := (&live{}).NAT(t.Context(), pids)
	if err != nil {
		t.Fatal(err)
	}
	own := slices.DeleteFunc(paths, func(p string) bool { return !strings.HasPrefix(p, "/proc/") }) // the host's are what they are
	if !slices.Equal(own, []string{want}) {
		t.Errorf("%v, want %s", own, want)
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
