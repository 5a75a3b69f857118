//go:build linux

package cli

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// kernelTable returns a namespace and a Conn to its table.
func kernelTable(t testing.TB) (*testnet.NS, *conntrack.Conn) {
	t.Helper()
	ns := nstest.New(t)
	c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return ns, c
}

// flowKey is what a table holds only once.
type flowKey struct {
	conntrack.Tuple
	proto uint8
	zone  uint16
}

// tables spreads flows over as many tables as it takes for each to be created:
// a scenario may judge two flows that no table holds at once.
func tables(flows []conntrack.Flow) (rounds [][]int) {
	var taken []map[flowKey]bool
next:
	for i, f := range flows {
		orig, reply := flowKey{f.Orig, f.Proto, f.Zone}, flowKey{f.Reply, f.Proto, f.Zone}
		for r := range taken {
			if !taken[r][orig] && !taken[r][reply] {
				taken[r][orig], taken[r][reply] = true, true
				rounds[r] = append(rounds[r], i)
				continue next
			}
		}
		taken = append(taken, map[flowKey]bool{orig: true, reply: true})
		rounds = append(rounds, []int{i})
	}
	return rounds
}

// Every scenario in a real table: exactly the flows to delete are gone after a
// sweep, whether it asks the kernel for what may be stale or for everything.
func TestScenariosSweep(t *testing.T) {
	defer func(d time.Duration) { comesBackIn = d }(comesBackIn)
	comesBackIn = time.Millisecond // nobody sends
	for _, mode := range []struct {
		name  string
		rules bool
		args  []string
	}{{"narrow", false, nil}, {"everything", true, []string{"--all"}}} {
		t.Run(mode.name, func(t *testing.T) {
			eachScenario(t, func(t *testing.T, s *scenario) {
				for _, round := range tables(s.parsed) {
					s.sweep(t, round, mode.rules, mode.args)
				}
			})
		})
	}
}

// sweep has a real table swept, beside rules or where there are none.
func (s *scenario) sweep(t *testing.T, round []int, rules bool, extra []string) {
	ns, c := kernelTable(t)
	if rules {
		must(t, ns.SetNAT(s.translating(round)...))
	}
	left := map[flowKey]string{}
	deletes := 0
	for _, i := range round {
		f := s.parsed[i]
		if f.Status&(conntrack.StatusOffload|conntrack.StatusHWOffload) != 0 {
			t.Logf("cannot be created, left out: %s", &f)
			continue
		}
		if err := c.Create(t.Context(), f); err != nil {
			t.Fatalf("%v: %s", err, &f)
		}
		if s.want[i][:6] == "delete" || rules && s.decided(i, round) {
			deletes++
		} else {
			left[flowKey{f.Orig, f.Proto, f.Zone}] = s.want[i]
		}
	}
	args := append([]string{"sweep", "--netns", ns.Path()}, s.args...)
	out, code, stderr := runJSON(t, append(args, extra...)...)
	if code != 0 || out.Summary.Deleted != deletes || out.Summary.Delete != deletes || len(out.Flows) < deletes {
		t.Errorf("exit %d, %d listed, %+v, want %d deleted: %s", code, len(out.Flows), out.Summary, deletes, stderr)
	}
	flows, err := c.List(t.Context(), conntrack.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range flows {
		k := flowKey{f.Orig, f.Proto, f.Zone}
		if left[k] == "" {
			t.Errorf("should be gone: %s", &f)
		}
		delete(left, k)
	}
	for k, want := range left {
		t.Errorf("gone, want %s: %+v", want, k)
	}
}

// decided tells whether rules take away the doubt that keeps a flow: they
// translate what is sent there, and not so.
func (s *scenario) decided(i int, round []int) bool {
	f := &s.parsed[i]
	return s.want[i] == "keep uncertain-address" && slices.ContainsFunc(s.translating(round), func(x testnet.Forward) bool {
		return x.Proto == f.Proto && x.Dst == netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
	})
}

// translating are rules by which what should be translated would be, elsewhere
// than any flow goes to: otherwise it would only come back.
func (s *scenario) translating(round []int) (list []testnet.Forward) {
	for _, i := range round {
		if s.want[i] != "delete untranslated" {
			continue
		}
		f := &s.parsed[i]
		to := netip.MustParseAddrPort("198.51.100.254:9")
		if f.Family == conntrack.IPv6 {
			to = netip.MustParseAddrPort("[2001:db8:ffff::fe]:9")
		}
		list = append(list, testnet.Forward{
			Proto: f.Proto, Dst: netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort), Backends: []netip.AddrPort{to},
		})
	}
	return list
}

const oneService = `{"apiVersion":"flowsweep.dev/v1alpha1","kind":"FrontendList","items":[
 {"name":"dns","protocol":"UDP","addresses":["203.0.113.10"],"ports":"53","backends":["198.51.100.11:53"]}]}`

func writeFile(t testing.TB, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// numbered is number n of the flows to the service, on the backend given.
func numbered(t testing.TB, n int, backend string) conntrack.Flow {
	t.Helper()
	f, err := conntrack.Parse("udp 17 600 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 [UNREPLIED] " +
		"src=" + backend + " dst=192.0.2.50 sport=53 dport=1")
	if err != nil {
		t.Fatal(err)
	}
	f.Orig.SrcPort, f.Reply.DstPort = uint16(n), uint16(n)
	for range n >> 16 { // another client
		f.Orig.Src = f.Orig.Src.Next()
	}
	f.Reply.Dst = f.Orig.Src
	return f
}

// Without CAP_NET_ADMIN the reason and the remedy are told; a saved table needs
// no privilege.
func TestWithoutPrivilege(t *testing.T) {
	nstest.Require(t)
	for name, args := range map[string][]string{"by state": {"plan", "--state", writeFile(t, oneService)}, "by rules": {"plan"}} {
		t.Run(name, func(t *testing.T) {
			var stderr bytes.Buffer
			var code int
			done := make(chan struct{})
			go func() {
				defer close(done)
				// The thread is given up: what it starts must not get the capability
				// back, which as root it would from the bounding set.
				runtime.LockOSThread()
				if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_NET_ADMIN, 0, 0, 0); err != nil {
					t.Error(err)
					return
				}
				cmd := program(t, args...)
				cmd.Stderr = &stderr
				_ = cmd.Run()
				code = cmd.ProcessState.ExitCode()
			}()
			<-done
			want := "CAP_NET_ADMIN is missing; run as root, or grant it"
			if code != 1 || !strings.Contains(stderr.String(), want) || strings.Count(stderr.String(), "\n") != 1 {
				t.Errorf("exit %d: %s", code, stderr.String())
			}
		})
	}
}

// The memory of a sweep does not depend on the table.
func TestMemory(t *testing.T) {
	ns, c := kernelTable(t)
	limit, err := c.Max(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n := min(100_000, limit/4) / 10 * 10
	for i := range n {
		backend := "198.51.100.11"
		if i%10 == 0 {
			backend = "198.51.100.19"
		}
		if err := c.Create(t.Context(), numbered(t, i, backend)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := program(t, "sweep", "--netns", ns.Path(), "--state", writeFile(t, oneService))
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if lines := bytes.Count(out, []byte("delete backend-gone")); lines != n/10 {
		t.Errorf("%d flows listed, want %d", lines, n/10)
	}
	if left, err := c.Count(t.Context()); err != nil || left != n-n/10 {
		t.Errorf("%d flows left, %v", left, err)
	}
	rss := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss
	t.Logf("%d flows, %d deleted, %d KiB resident", n, n/10, rss)
	if !raceEnabled && rss > 40<<10 {
		t.Errorf("%d KiB resident, want at most 40 MiB", rss)
	}
}

// Only what differs between two states is asked of the kernel, and only that is
// deleted.
func TestChangedOnly(t *testing.T) {
	ns, c := kernelTable(t)
	for i := range 20 {
		for _, b := range []string{"198.51.100.11", "198.51.100.12", "198.51.100.13"} {
			f := numbered(t, 100+i, b)
			f.Orig.Src = f.Orig.Src.Next()
			f.Orig.SrcPort += uint16(b[len(b)-1]) << 8
			f.Reply.Dst, f.Reply.DstPort = f.Orig.Src, f.Orig.SrcPort
			if err := c.Create(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
	}
	list := func(backends string) string {
		return writeFile(t, strings.ReplaceAll(oneService, `["198.51.100.11:53"]`, backends))
	}
	before := list(`["198.51.100.11:53","198.51.100.12:53"]`)
	out, code, stderr := runJSON(t, "sweep", "--netns", ns.Path(), "--before", before, "--state", list(`["198.51.100.11:53"]`), "--changed-only", "-v")
	if code != 0 || out.Summary.Deleted != 20 || out.Summary.KernelReturned != 20 {
		t.Errorf("exit %d, %+v", code, out.Summary)
	}
	if want := "ipv4 udp answered from 198.51.100.12:53 zone 0: 1 lost backend: returned 20, wanted 20"; !strings.Contains(stderr, want) {
		t.Errorf("%q is missing in\n%s", want, stderr)
	}
	// The flows that were wrong before are another matter, that of a full sweep.
	if n, err := c.Count(t.Context()); err != nil || n != 40 {
		t.Errorf("%d flows left, %v", n, err)
	}
}
