package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/ruleset"
)

// files are what proc holds, by name. "-> x" is a link to x, and a name that
// begins with "ro:" is of a file that nobody may write.
type files map[string]string

// with returns a copy that differs in some files; "absent" takes one away.
func (f files) with(changes files) files {
	all := maps.Clone(f)
	for name, content := range changes {
		if content == "absent" {
			delete(all, name)
		} else {
			all[name] = content
		}
	}
	return all
}

func (f files) write(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, content := range f {
		mode := os.FileMode(0o644)
		if strings.HasPrefix(name, "ro:") {
			name, mode = name[3:], 0o444
		}
		path := filepath.Join(root, "proc", filepath.FromSlash(name))
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if link, ok := strings.CutPrefix(content, "-> "); ok {
			err = errors.Join(err, os.Symlink(link, path))
		} else {
			err = errors.Join(err, os.WriteFile(path, []byte(content), mode))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	sysctl      = "sys/net/netfilter/nf_conntrack_"
	netlinkHead = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n" +
		"00000000174a8e8e 12  0          00000000 0        0        0     2        0        1565474\n" +
		"00000000c37d72dc 0   812        00000550 0        0        0     2        0        478\n"
	listener  = "000000009abe4320 12  812        00000007 0        0        0     2        0        1565468\n"
	allCaps   = "CapInh:\t0000000000000000\nCapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n"
	noCaps    = "CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"
	ipvsTable = "IP Virtual Server version 1.2.1 (size=4096)\n" +
		"Prot LocalAddress:Port Scheduler Flags\n" +
		"  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n" +
		"UDP  CB00710A:0035 rr  \n"
)

// process is one in a host's network namespace.
func process(f files, pid int, comm, ns string) {
	f[strconv.Itoa(pid)+"/comm"] = comm + "\n"
	f[strconv.Itoa(pid)+"/ns/net"] = "-> " + ns
}

func healthyFiles() files {
	f := files{
		"sys/kernel/osrelease":            "6.18.44\n",
		"thread-self/status":              "Name:\tflowsweep\n" + allCaps,
		"thread-self/ns/net":              "-> net:[4026531840]",
		"thread-self/net/netlink":         netlinkHead,
		"thread-self/net/ip_tables_names": "filter\n",
		sysctl + "count":                  "4100\n",
		sysctl + "max":                    "262144\n",
		sysctl + "buckets":                "262144\n",
		sysctl + "udp_timeout":            "30\n",
		sysctl + "udp_timeout_stream":     "120\n",
		sysctl + "tcp_loose":              "1\n",
		sysctl + "events":                 "2\n",
	}
	process(f, 1, "systemd", "net:[4026531840]")
	process(f, 811, "sshd", "net:[4026531840]")
	return f
}

// fake is a kernel that answers what it is told to.
type fake struct {
	countErr  error
	features  conntrack.Features
	probeErr  error
	flows     []conntrack.Flow
	sampleErr error
	gen       uint32
	committed bool
	genErr    error
	objects   []string // as nft.Object prints them
	existErr  error
	rules     *Ruleset
	rulesErr  error
	nat       []Elsewhere
	natSome   bool // these are not all
	natErr    error
	hooks     []string
	hooksErr  error
}

func (k *fake) Count(context.Context) (int, error) { return len(k.flows), k.countErr }

func (k *fake) Probe(context.Context) (conntrack.Features, error) { return k.features, k.probeErr }

func (k *fake) Sample(_ context.Context, limit int, f func(*conntrack.Flow)) error {
	for i := range k.flows[:min(limit, len(k.flows))] {
		f(&k.flows[i])
	}
	return k.sampleErr
}

func (k *fake) Rules(context.Context, int) (*Ruleset, error) {
	if k.rulesErr != nil {
		return nil, k.rulesErr
	}
	r := healthyRules()
	if k.rules != nil {
		r = k.rules
	}
	return r, nil
}

func (k *fake) NAT(context.Context, map[string]int) ([]Elsewhere, bool, error) {
	return slices.Clone(k.nat), !k.natSome, k.natErr
}

func (k *fake) SocketPrograms() ([]string, string, error) {
	return k.hooks, "/sys/fs/cgroup", k.hooksErr
}

func (k *fake) Generation() (uint32, bool, error) { return k.gen, k.committed, k.genErr }

func (k *fake) Exist(objects ...nft.Object) ([]bool, error) {
	if k.existErr != nil {
		return nil, k.existErr
	}
	there := make([]bool, len(objects))
	for i, o := range objects {
		there[i] = slices.Contains(k.objects, o.String())
	}
	return there, nil
}

// flows are n flows in a zone with status bits.
func flows(n int, zone uint16, status conntrack.Status) []conntrack.Flow {
	return slices.Repeat([]conntrack.Flow{{Zone: zone, Status: status}}, n)
}

func honouring(s conntrack.Support) conntrack.Features {
	ff := conntrack.FamilyFeatures{Proto: s, Addr: s, Ports: s, SCTPPorts: s}
	return conntrack.Features{V4: ff, V6: ff, Status: s, Zone: s}
}

func healthyKernel() *fake {
	return &fake{
		features: honouring(conntrack.Honoured), flows: flows(4100, 0, 0),
		gen: 42, committed: true,
	}
}

func healthyRules() *Ruleset {
	return &Ruleset{
		Size: ruleset.Size{Tables: 1, Chains: 4, Rules: 12, Bases: 2}, Took: 1230 * time.Microsecond, Flows: 4100,
	}
}

// errDenied is what the kernel says to those without CAP_NET_ADMIN.
var errDenied = fmt.Errorf("conntrack dump: %w: CAP_NET_ADMIN is missing", fs.ErrPermission)

func examine(t *testing.T, f files, k Kernel, netns string) *Report {
	t.Helper()
	root := f.write(t)
	r, err := Examine(t.Context(), System{Root: root, NetNS: netns, Kernel: k})
	if err != nil {
		t.Fatal(err)
	}
	for i := range r.Findings { // paths of a test are nobody's business
		r.Findings[i].What = strings.ReplaceAll(r.Findings[i].What, root, "")
	}
	return r
}

// Whole hosts: what people see, and what programs do.
func TestReports(t *testing.T) {
	odd := healthyRules()
	odd.Doubted = 70
	odd.Others.Modules = []string{"act_ct"}
	for i := range 7 {
		odd.NotUnderstood = append(odd.NotUnderstood, ruleset.Step{
			Rule: ruleset.Rule{Family: ruleset.IPv4, Table: "nat", Chain: "PREROUTING", Handle: uint64(5 + i)}, Effect: "the expression osf",
		})
	}
	odd.Shadowed = []ruleset.Shadow{{
		Step: ruleset.Step{Rule: ruleset.Rule{Family: ruleset.IPv4, Table: "nat", Chain: "DOCKER", Handle: 14}, Text: "th dport 53 -j DNAT --to-destination 172.17.0.3:53"},
		By:   ruleset.Step{Rule: ruleset.Rule{Family: ruleset.IPv4, Table: "nat", Chain: "DOCKER", Handle: 13}, Text: "th dport 53 -j DNAT --to-destination 172.17.0.2:53"},
	}}
	odd.Nobody = []Nobody{{odd.Shadowed[0].By.Rule, netip.MustParseAddr("172.17.0.2"), "on docker0 (FAILED)", 1}}
	sickKernel := &fake{
		features: honouring(conntrack.NotHonoured),
		flows: slices.Concat(flows(90000, 0, 0), flows(700, 65520, 0), flows(9300, 0, conntrack.StatusOffload),
			flows(20, 1, 0)),
		gen: 7, committed: true,
		objects: []string{"chain ip nat KUBE-SERVICES", "chain ip nat DOCKER"},
		rules:   odd,
		nat: []Elsewhere{
			{Path: "/run/netns/router", Rules: true},
			{Path: "/proc/815/ns/net", Rules: true},
			{Path: "/run/docker/netns/ingress_sbox", Rules: true, Legacy: true, IPVS: true},
		},
		hooks: []string{"connect4", "sendmsg4"},
	}
	sick := healthyFiles().with(files{
		"thread-self/ns/net":                 "-> net:[4026532999]",
		"thread-self/status":                 noCaps,
		"thread-self/net/netlink":            netlinkHead + listener,
		"thread-self/net/ip_tables_names":    "filter\nnat\n",
		"thread-self/net/ip_vs":              ipvsTable,
		"sys/net/ipv4/vs/expire_nodest_conn": "0\n",
		sysctl + "count":                     "255000\n",
		sysctl + "buckets":                   "absent",
		"ro:" + sysctl + "buckets":           "16384\n",
		sysctl + "udp_timeout_stream":        "3600\n",
		sysctl + "tcp_loose":                 "0\n",
	})
	process(sick, 812, "conntrackd", "net:[4026532999]")
	process(sick, 813, "dockerd", "net:[4026532999]")
	process(sick, 814, "kube-proxy", "net:[4026532999]")
	process(sick, 815, "pause", "net:[4026533000]")
	process(sick, 816, "pause", "net:[4026533001]")

	bareKernel := &fake{countErr: errDenied, probeErr: errDenied, sampleErr: errDenied, genErr: errDenied, existErr: errDenied, rulesErr: errDenied, natErr: errDenied, hooksErr: errDenied}
	bare := healthyFiles().with(files{"thread-self/status": noCaps})

	for _, tt := range []struct {
		name   string
		files  files
		kernel Kernel
	}{
		{"healthy", healthyFiles(), healthyKernel()},
		{"sick", sick, sickKernel},
		{"unprivileged", bare, bareKernel},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := examine(t, tt.files, tt.kernel, "")
			var text, object bytes.Buffer
			if err := errors.Join(r.WriteText(&text, false), r.WriteJSON(&object)); err != nil {
				t.Fatal(err)
			}
			golden(t, tt.name+".txt", text.Bytes())
			golden(t, tt.name+".json", object.Bytes())
			for line := range strings.Lines(text.String()) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
					t.Errorf("%d columns: %s", n, line)
				}
			}
		})
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") == "1" {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s: -want +got:\n%s", path, diff)
	}
}

// Each check by itself, from a healthy host on.
func TestChecks(t *testing.T) {
	kernel := func(change func(*fake)) *fake {
		k := healthyKernel()
		change(k)
		return k
	}
	with := func(change func(*Ruleset)) *fake {
		r := healthyRules()
		change(r)
		return kernel(func(k *fake) { k.rules = r })
	}
	support := func(change func(*conntrack.Features)) *fake {
		return kernel(func(k *fake) { change(&k.features) })
	}
	const (
		not   = conntrack.NotHonoured
		never = conntrack.Unknown
	)
	tests := []struct {
		name   string
		files  files
		kernel *fake
		netns  string
		id     string
		level  Level
		what   string // in the finding's What
		un     bool   // it is unchecked
	}{
		{"the host's first namespace", nil, nil, "", "namespace", OK, "the host's first network namespace (net:[4026531840])", false},
		{
			"a namespace of its own",
			files{sysctl + "buckets": "absent", "ro:" + sysctl + "buckets": "262144\n"},
			nil, "", "namespace", Warn, "a namespace of its own", false,
		},
		{"a namespace asked for", nil, nil, "/run/netns/blue", "namespace", OK, "/run/netns/blue (net:[4026531840])", false},
		{"no telling which namespace", files{sysctl + "buckets": "absent"}, nil, "", "namespace", Info, "not checked", true},
		{"no namespaces", files{"thread-self/ns/net": "absent"}, nil, "", "namespace", Info, "not checked", true},

		{"capable", nil, nil, "", "capability", OK, "effective", false},
		{"that capability alone", files{"thread-self/status": "CapEff:\t0000000000001000\n"}, nil, "", "capability", OK, "effective", false},
		{
			"permitted",
			files{"thread-self/status": "CapPrm:\t0000000000001000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000001000\n"},
			nil, "", "capability", Mend, "permitted but not effective", false,
		},
		{"incapable", files{"thread-self/status": noCaps}, nil, "", "capability", Mend, "CAP_NET_ADMIN is missing", false},
		{
			"all others",
			files{"thread-self/status": "CapPrm:\t000001ffffffefff\nCapEff:\t000001ffffffefff\nCapBnd:\t000001ffffffefff\n"},
			nil, "", "capability", Mend, "bounding set", false,
		},
		{"no status", files{"thread-self/status": "absent"}, nil, "", "capability", Info, "not checked", true},
		{"status without sets", files{"thread-self/status": "Name:\tx\n"}, nil, "", "capability", Info, "tells no capabilities", true},
		{"status that is not hexadecimal", files{"thread-self/status": "CapEff:\tmany\n"}, nil, "", "capability", Info, "CapEff is not a set", true},

		{"ctnetlink answers", nil, nil, "", "ctnetlink", OK, "answers", false},
		{"no ctnetlink", nil, kernel(func(k *fake) { k.countErr = conntrack.ErrNoCtnetlink }), "", "ctnetlink", Mend, "no ctnetlink", false},
		{"refused, though capable", nil, kernel(func(k *fake) { k.countErr = errDenied }), "", "ctnetlink", Mend, "another user namespace", false},
		{
			"refused, and incapable",
			files{"thread-self/status": noCaps},
			kernel(func(k *fake) { k.countErr = errDenied }), "", "ctnetlink", Info, "not checked: it takes CAP_NET_ADMIN", true,
		},
		{"ctnetlink fails", nil, kernel(func(k *fake) { k.countErr = conntrack.ErrNoAnswer }), "", "ctnetlink", Mend, "did not answer", false},

		{"probe fails", nil, kernel(func(k *fake) { k.probeErr = conntrack.ErrNoAnswer }), "", "filters", Info, "not checked", true},
		{"protocol", nil, nil, "", "filter-protocol", OK, "IPv4 yes, IPv6 yes", false},
		{"no IPv4 protocol", nil, support(func(f *conntrack.Features) { f.V4.Proto = not }), "", "filter-protocol", Warn, "IPv4 no, IPv6 yes", false},
		{"no IPv6 protocol", nil, support(func(f *conntrack.Features) { f.V6.Proto = not }), "", "filter-protocol", Warn, "IPv4 yes, IPv6 no", false},
		{"no IPv4 address", nil, support(func(f *conntrack.Features) { f.V4.Addr = not }), "", "filter-address", Warn, "IPv4 no, IPv6 yes", false},
		{"no IPv6 address", nil, support(func(f *conntrack.Features) { f.V6.Addr = not }), "", "filter-address", Info, "IPv4 yes, IPv6 no", false},
		{"no ports", nil, support(func(f *conntrack.Features) { f.V6.Ports = not }), "", "filter-ports", Info, "IPv4 yes, IPv6 no", false},
		{"no SCTP ports", nil, support(func(f *conntrack.Features) { f.V4.SCTPPorts = not }), "", "filter-sctp-ports", Info, "IPv4 no, IPv6 yes", false},
		{"no status", nil, support(func(f *conntrack.Features) { f.Status = not }), "", "filter-status", Info, "no", false},
		{"no zone", nil, support(func(f *conntrack.Features) { f.Zone = not }), "", "filter-zone", Info, "no", false},
		{"zone unknown", nil, support(func(f *conntrack.Features) { f.Zone = never }), "", "filter-zone", Info, "unknown: it takes a flow", true},
		{
			"one lacking, one unknown", nil, support(func(f *conntrack.Features) { f.V4.Addr, f.V6.Addr = not, never }),
			"", "filter-address", Warn, "IPv4 no, IPv6 unknown", false,
		},

		{"room", nil, nil, "", "table-fill", OK, "4100 of 262144 flows, 1 %", false},
		{"79 %", files{sysctl + "count": "79999", sysctl + "max": "100000"}, nil, "", "table-fill", OK, "79 %", false},
		{"80 %", files{sysctl + "count": "80000", sysctl + "max": "100000"}, nil, "", "table-fill", Warn, "80 %", false},
		{"94 %", files{sysctl + "count": "94999", sysctl + "max": "100000"}, nil, "", "table-fill", Warn, "94 %", false},
		{"95 %", files{sysctl + "count": "95000", sysctl + "max": "100000"}, nil, "", "table-fill", Mend, "95 %", false},
		{"no limit", files{sysctl + "max": "0\n"}, nil, "", "table-fill", OK, "without a limit", false},
		{"no conntrack", files{sysctl + "count": "absent"}, nil, "", "table-fill", Info, "does not track connections", true},
		{"no number", files{sysctl + "max": "lots\n"}, nil, "", "table-fill", Info, `"lots" is not a number`, true},

		{"short chains", nil, nil, "", "buckets", OK, "262144 for at most 262144 flows", false},
		{"8 a bucket", files{sysctl + "buckets": "32768"}, nil, "", "buckets", OK, "32768", false},
		{"9 a bucket", files{sysctl + "buckets": "29127"}, nil, "", "buckets", Warn, "9 a bucket", false},
		{"buckets unknown", files{sysctl + "buckets": "absent"}, nil, "", "buckets", Info, "not checked", true},

		{"usual timeouts", nil, nil, "", "udp-timeout", OK, "30 s, and 120 s", false},
		{"long", files{sysctl + "udp_timeout": "121"}, nil, "", "udp-timeout", Warn, "121 s", false},
		{"long stream", files{sysctl + "udp_timeout_stream": "601"}, nil, "", "udp-timeout", Warn, "601 s", false},
		{"timeout unknown", files{sysctl + "udp_timeout_stream": "absent"}, nil, "", "udp-timeout", Info, "not checked", true},

		{"loose", nil, nil, "", "tcp-loose", OK, "on", false},
		{"not loose", files{sysctl + "tcp_loose": "0\n"}, nil, "", "tcp-loose", Info, "off", false},
		{"loose unknown", files{sysctl + "tcp_loose": "absent"}, nil, "", "tcp-loose", Info, "not checked", true},

		{"nobody listens", nil, nil, "", "events", OK, "nobody listens", false},
		{
			"a listener",
			files{"thread-self/net/netlink": netlinkHead + listener, "812/comm": "conntrackd\n"},
			nil, "", "events", Info, "listened to by conntrackd (812)", false,
		},
		{"an unknown listener", files{"thread-self/net/netlink": netlinkHead + listener}, nil, "", "events", Info, "listened to by port 812", false},
		{
			"of other events",
			files{"thread-self/net/netlink": netlinkHead + strings.Replace(listener, "00000007", "00000040", 1)},
			nil, "", "events", OK, "nobody listens", false,
		},
		{"always on", files{sysctl + "events": "1\n"}, nil, "", "events", Info, "always on", false},
		{"off", files{sysctl + "events": "0\n", "thread-self/net/netlink": netlinkHead + listener}, nil, "", "events", OK, "off", false},
		{"events unknown", files{sysctl + "events": "absent"}, nil, "", "events", Info, "not checked", true},
		{"listeners unknown", files{"thread-self/net/netlink": "absent"}, nil, "", "events", Info, "not checked", true},

		{"one zone", nil, nil, "", "zones", OK, "all of 4100 flows in zone 0", false},
		{"no flow", nil, kernel(func(k *fake) { k.flows = nil }), "", "zones", OK, "no flow in the table", false},
		{
			"two zones", nil, kernel(func(k *fake) { k.flows = append(flows(1, 0, 0), flows(2, 9, 0)...) }),
			"", "zones", Info, "of 3 flows: 2 in zone 9, 1 in zone 0", false,
		},
		{"another zone alone", nil, kernel(func(k *fake) { k.flows = flows(1, 9, 0) }), "", "zones", Info, "of 1 flow: 1 in zone 9", false},
		{
			"many zones", nil, kernel(func(k *fake) {
				k.flows = nil
				for z := range uint16(8) {
					k.flows = append(k.flows, flows(1, z, 0)...)
				}
			}), "", "zones", Info, "1 in zone 4, the others in 3 zones more", false,
		},
		{
			"more flows than are looked at", nil,
			kernel(func(k *fake) { k.flows = append(flows(100_000, 0, 0), flows(1, 9, 0)...) }),
			"", "zones", OK, "all of the first 100000 flows in zone 0", false,
		},
		{"no flow may be seen", nil, kernel(func(k *fake) { k.sampleErr = errDenied }), "", "zones", Info, "it takes CAP_NET_ADMIN", true},

		{"no offload", nil, nil, "", "offload", OK, "none of 4100 flows in a flowtable", false},
		{
			"offload", nil, kernel(func(k *fake) {
				k.flows = slices.Concat(flows(5, 0, 0), flows(2, 0, conntrack.StatusOffload), flows(1, 0, conntrack.StatusHWOffload))
			}), "", "offload", Info, "3 of 8 flows in a flowtable", false,
		},
		{"offload unknown", nil, kernel(func(k *fake) { k.sampleErr = errDenied }), "", "offload", Info, "not checked", true},

		{"by generation", nil, nil, "", "settling", OK, "which is 42", false},
		{"legacy nat", files{"thread-self/net/ip_tables_names": "nat\n"}, nil, "", "settling", Info, "iptables-legacy has a nat table", false},
		{"legacy nat of IPv6", files{"thread-self/net/ip6_tables_names": "nat\n"}, nil, "", "settling", Info, "iptables-legacy", false},
		{"legacy unknown", files{"thread-self/net/ip_tables_names": "-> ip_tables_names"}, nil, "", "settling", Info, "not checked", true},
		{"IPVS", files{"thread-self/net/ip_vs": ipvsTable}, nil, "", "settling", Info, "IPVS forwards here", false},
		{"IPVS unknown", files{"thread-self/net/ip_vs": "-> ip_vs"}, nil, "", "settling", Info, "not checked", true},
		{"no nf_tables", nil, kernel(func(k *fake) { k.genErr = nft.ErrNoNFT }), "", "settling", Info, "no nf_tables", false},
		{"nothing committed", nil, kernel(func(k *fake) { k.gen, k.committed = 1, false }), "", "settling", Info, "nothing was ever committed", false},
		{"generation may not be asked", nil, kernel(func(k *fake) { k.genErr = errDenied }), "", "settling", Info, "it takes CAP_NET_ADMIN", true},

		{"rules", nil, nil, "", "rules", OK, "12 rules in 1 table, from 2 NAT base chains on, read in 1.2 ms; each of 4100 flows can be judged", false},
		{"rules, and no flow", nil, with(func(r *Ruleset) { r.Flows = 0 }), "", "rules", OK, "read in 1.2 ms", false},
		{"doubts", nil, with(func(r *Ruleset) { r.Doubted = 3 }), "", "rules", Info, "3 of 4100 flows cannot be judged", false},
		{
			"rules beside iptables-legacy", nil, with(func(r *Ruleset) { r.Others.Legacy = true }),
			"", "rules", Info, "nothing is judged by them: iptables-legacy has a nat table", false,
		},
		{"rules beside IPVS", nil, with(func(r *Ruleset) { r.Others.IPVS = true }), "", "rules", Info, "IPVS has services", false},
		{
			"others unknown", nil, with(func(r *Ruleset) { r.Others.Err = errDenied }),
			"", "rules", Info, "nothing is judged by them: whether iptables-legacy or IPVS translates is not known", false,
		},
		{"no rules without nf_tables", nil, kernel(func(k *fake) { k.rulesErr = ruleset.ErrNoNFT }), "", "rules", Info, "no nf_tables", false},
		{"rules may not be read", nil, kernel(func(k *fake) { k.rulesErr = errDenied }), "", "rules", Info, "it takes CAP_NET_ADMIN", true},
		{
			"not understood", nil, with(func(r *Ruleset) {
				r.NotUnderstood = []ruleset.Step{{Rule: ruleset.Rule{Family: ruleset.INet, Table: "t", Chain: "c", Handle: 9}, Effect: "the expression osf"}}
			}), "", "rules-understood", Warn, "1 of 12 rules are not understood: inet t c handle 9 (the expression osf)", false,
		},
		{
			"shadowed", nil, with(func(r *Ruleset) { r.Shadowed = make([]ruleset.Shadow, 7) }),
			"", "rules-shadowed", Warn, "7 rules are never met: no rule: , since no rule comes before it: ; ", false,
		},
		{
			"nobody there", nil, with(func(r *Ruleset) {
				r.Nobody = []Nobody{{ruleset.Rule{Family: ruleset.INet, Table: "t", Chain: "c", Handle: 9}, netip.MustParseAddr("198.51.100.9"), "on eth1 (INCOMPLETE)", 3}}
			}), "", "rules-to-nobody", Warn, "inet t c handle 9 leads to 198.51.100.9, which does not answer on eth1 (INCOMPLETE): 3 flows unanswered", false,
		},
		{
			"tc", nil, with(func(r *Ruleset) { r.Others.Modules = []string{"act_ct"} }),
			"", "other-translators", Info, "tc or a switch may translate: act_ct loaded", false,
		},
		{"no rules elsewhere", nil, nil, "", "rules-elsewhere", OK, "no NAT rules, iptables-legacy or IPVS in other namespaces", false},
		{
			"rules elsewhere", nil, kernel(func(k *fake) {
				k.nat = []Elsewhere{{Path: "/run/netns/b", Rules: true}, {Path: "/run/netns/a", Rules: true}}
			}),
			"", "rules-elsewhere", Info, "NAT rules in /run/netns/a, /run/netns/b", false,
		},
		{
			"other translators elsewhere", nil, kernel(func(k *fake) {
				k.nat = []Elsewhere{{Path: "/run/docker/netns/ingress_sbox", IPVS: true}, {Path: "/proc/7/ns/net", Legacy: true}}
			}),
			"", "rules-elsewhere", Info, "a nat table of iptables-legacy in /proc/7/ns/net; IPVS in /run/docker/netns/ingress_sbox", false,
		},
		{
			"not all elsewhere", nil, kernel(func(k *fake) { k.natSome = true }),
			"", "rules-elsewhere", Info, "which are not all", true,
		},
		{
			"rules elsewhere, and not all", nil, kernel(func(k *fake) {
				k.natSome, k.nat = true, []Elsewhere{{Path: "/run/netns/b", Rules: true}}
			}),
			"", "rules-elsewhere", Info, "NAT rules in /run/netns/b; not all were looked into", false,
		},

		{"no program", nil, nil, "", "socket-balancer", OK, "no BPF program at connect or sendmsg of the cgroup root", false},
		{
			"programs", nil, kernel(func(k *fake) { k.hooks = []string{"connect4", "sendmsg6"} }),
			"", "socket-balancer", Info, "BPF programs at connect4, sendmsg6 of the cgroup root /sys/fs/cgroup", false,
		},
		{"programs may not be asked for", nil, kernel(func(k *fake) { k.hooksErr = errDenied }), "", "socket-balancer", Info, "it takes CAP_NET_ADMIN", true},
		{"elsewhere may not be looked", nil, kernel(func(k *fake) { k.natErr = errDenied }), "", "rules-elsewhere", Info, "not checked", true},

		{"no IPVS", nil, nil, "", "ipvs", OK, "not in use", false},
		{
			"IPVS that expires",
			files{"thread-self/net/ip_vs": ipvsTable, "sys/net/ipv4/vs/expire_nodest_conn": "1\n"},
			nil, "", "ipvs", OK, "in use", false,
		},
		{
			"IPVS that does not",
			files{"thread-self/net/ip_vs": ipvsTable, "sys/net/ipv4/vs/expire_nodest_conn": "0\n"},
			nil, "", "ipvs", Mend, "expire_nodest_conn is 0", false,
		},
		{"IPVS without the setting", files{"thread-self/net/ip_vs": ipvsTable}, nil, "", "ipvs", Info, "not checked", true},
		{"IPVS unreadable", files{"thread-self/net/ip_vs": "-> ip_vs"}, nil, "", "ipvs", Info, "not checked", true},

		{"one namespace", nil, nil, "", "namespaces", OK, "no other among 2 processes", false},
		{
			"one other",
			files{"900/comm": "pause\n", "900/ns/net": "-> net:[2]"},
			nil, "", "namespaces", Info,
			"1 other among 3 processes", false,
		},
		{
			"two others, one with two processes",
			files{
				"900/comm": "pause\n", "900/ns/net": "-> net:[2]", "901/comm": "app\n", "901/ns/net": "-> net:[2]",
				"902/comm": "pause\n", "902/ns/net": "-> net:[3]",
			},
			nil, "", "namespaces", Info, "2 others among 5 processes", false,
		},
		{"a process that has just ended", files{"900/ns/net": "-> net:[2]"}, nil, "", "namespaces", OK, "no other among 2 processes", false},

		{"nobody seen", nil, nil, "", "proxies", OK, "no kube-proxy, Docker, Podman, Cilium or Antrea among 2 processes or in nftables", false},
		{
			"nobody seen, and nftables closed", nil, kernel(func(k *fake) { k.existErr = errDenied }),
			"", "proxies", Info, "nftables was not looked into", true,
		},
		{"nobody seen, and no nftables", nil, kernel(func(k *fake) { k.existErr = nft.ErrNoNFT }), "", "proxies", OK, "among 2 processes", false},
		{"kube-proxy's process", files{"900/comm": "kube-proxy\n"}, nil, "", "kube-proxy", Info, "process kube-proxy (900)", false},
		{
			"kube-proxy's table", nil, kernel(func(k *fake) { k.objects = []string{"table ip6 kube-proxy"} }),
			"", "kube-proxy", Info, "seen: table ip6 kube-proxy", false,
		},
		{
			"kube-proxy's chains", nil, kernel(func(k *fake) { k.objects = []string{"chain ip nat KUBE-SERVICES"} }),
			"", "kube-proxy", Info, "chain ip nat KUBE-SERVICES", false,
		},
		{"Docker", files{"900/comm": "dockerd\n"}, kernel(func(k *fake) { k.existErr = errDenied }), "", "docker", Info, "dockerd (900)", false},
		{"Podman", nil, kernel(func(k *fake) { k.objects = []string{"table inet netavark"} }), "", "podman", Info, "netavark", false},
		{"Cilium", files{"900/comm": "cilium-agent\n"}, nil, "", "cilium", Info, "cilium-agent (900)", false},
		{"Antrea", files{"900/comm": "antrea-agent\n"}, nil, "", "antrea", Info, "antrea-agent (900)", false},
		{
			"the first of several processes",
			files{"901/comm": "dockerd\n", "900/comm": "dockerd\n"},
			nil, "", "docker", Info, "process dockerd (900)", false,
		},
	}
	seen := map[string]bool{}
	for _, tt := range tests {
		seen[tt.id] = true
		t.Run(tt.id+"/"+tt.name, func(t *testing.T) {
			k := tt.kernel
			if k == nil {
				k = healthyKernel()
			}
			r := examine(t, healthyFiles().with(tt.files), k, tt.netns)
			i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.ID == tt.id })
			if i < 0 {
				t.Fatalf("no finding %s in %+v", tt.id, r.Findings)
			}
			f := r.Findings[i]
			if f.Level != tt.level || f.Unchecked != tt.un || !strings.Contains(f.What, tt.what) {
				t.Errorf("got %+v, want %v, unchecked %v, %q", f, tt.level, tt.un, tt.what)
			}
			if f.Why == "" || (f.Level >= Warn && f.Do == "") {
				t.Errorf("%+v does not tell why, or what to do", f)
			}
		})
	}
	for _, p := range knownProxies {
		if !seen[p.id] {
			t.Errorf("%s is not tried", p.id)
		}
	}
}

// A healthy host has nothing to be told, and a file that is missing never keeps
// other checks from being made.
func TestMissingFiles(t *testing.T) {
	all := healthyFiles()
	for _, f := range examine(t, all, healthyKernel(), "").Findings {
		if f.Level != OK {
			t.Errorf("healthy: %+v", f)
		}
	}
	ids := func(r *Report) (list []string) {
		for _, f := range r.Findings {
			list = append(list, f.ID)
		}
		return list
	}
	want := ids(examine(t, all, healthyKernel(), ""))
	for name := range all {
		if got := ids(examine(t, all.with(files{name: "absent"}), healthyKernel(), "")); !slices.Equal(got, want) {
			t.Errorf("without %s: %v, want %v", name, got, want)
		}
	}
	if r := examine(t, files{"empty": ""}, healthyKernel(), ""); r.Summary.Mend != 0 || r.Summary.Unchecked < 8 {
		t.Errorf("with an empty proc: %+v", r.Summary)
	}
}

// mountinfo as the kernel writes it, with optional fields and without, and blanks.
func TestMounts(t *testing.T) {
	const text = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n" +
		"401 27 0:4 net:[4026532281] /run/netns/blue rw shared:210 - nsfs nsfs rw\n" +
		"402 27 0:4 net:[4026532282] /run/a\\040b\\134c rw - nsfs nsfs rw\n" +
		"403 27 0:4 mnt:[4026532283] /run/m rw - nsfs nsfs rw\n" +
		"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n" +
		"cut short - nsfs\nno separator\n"
	want := []mount{
		{"net:[4026532281]", "/run/netns/blue"}, {"net:[4026532282]", `/run/a b\c`}, {"mnt:[4026532283]", "/run/m"},
	}
	if got := mountsOf("nsfs", []byte(text)); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := mountsOf("cgroup2", []byte(text)); !slices.Equal(got, []mount{{"/", "/sys/fs/cgroup/unified"}}) {
		t.Errorf("%v", got)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Examine(ctx, System{Root: healthyFiles().write(t), Kernel: healthyKernel()})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestText(t *testing.T) {
	r := &Report{}
	r.add(Finding{ID: "long", Level: Warn, What: "äöü " + strings.Repeat("ä", 90) + " end", Why: "w", Do: "d"})
	r.add(Finding{ID: "evil", Level: OK, What: "a\x1b[31m\nb"})
	var b bytes.Buffer
	if err := r.WriteText(&b, true); err != nil {
		t.Fatal(err)
	}
	want := "\x1b[33mwarn\x1b[0m  long  äöü\n" +
		"            " + strings.Repeat("ä", 90) + "\n" +
		"            end\n" +
		"      why: w\n" +
		"      do:  d\n" +
		"\x1b[32mok  \x1b[0m  evil  a�[31m�b\n" +
		"\n0 to mend, 1 warning, 0 to know, 1 in order\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
