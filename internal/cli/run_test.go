//go:build linux

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// node is a node whose agent is the program itself, as its user runs it: in the
// node's namespace, with a file of frontends, beside a proxy that the test plays.
type node struct {
	t        *testing.T
	net      *testnet.Star
	dir      string
	backends []netip.AddrPort
	vip      netip.AddrPort

	cmd    *exec.Cmd
	stderr *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{
		t: t, dir: t.TempDir(), vip: netip.MustParseAddrPort("203.0.113.10:53"), stderr: &lockedBuffer{},
		backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.11:53"), netip.MustParseAddrPort("198.51.100.12:53")},
	}
	n.net = nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}})
	for _, b := range n.backends {
		if err := n.net.Leaf("backends").AddAddr("eth0", netip.PrefixFrom(b.Addr(), 24)); err != nil {
			t.Fatal(err)
		}
		nstest.Echo(t, n.net.Leaf("backends"), b)
	}
	n.commit(n.backends[0])
	n.desire(n.backends[0])
	n.write("agent.yaml", fmt.Sprintf(`apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
sources: {static: {files: [%q]}}
settling: {window: 5s, fullPass: 30s}
stateFile: %q
log: {level: debug, auditFile: %q}
admin: {listen: "127.0.0.1:9633"}
`, n.path("frontends.yaml"), n.path("state.json"), n.path("audit.jsonl")))
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// write replaces a file at once.
func (n *node) write(name, content string) {
	n.t.Helper()
	if err := os.WriteFile(n.path(name+".new"), []byte(content), 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Rename(n.path(name+".new"), n.path(name)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) desire(b netip.AddrPort) {
	n.t.Helper()
	n.write("frontends.yaml", fmt.Sprintf(`{"apiVersion":"flowsweep.dev/v1alpha1","kind":"FrontendList","items":[
 {"name":"dns","protocol":"UDP","addresses":["203.0.113.10"],"ports":"53","backends":[%q]}]}`, b))
}

func (n *node) commit(b netip.AddrPort) {
	n.t.Helper()
	if err := n.net.Router.SetNAT(testnet.Forward{Proto: 17, Dst: n.vip, Backends: []netip.AddrPort{b}}); err != nil {
		n.t.Fatal(err)
	}
}

// start runs the agent in the node's namespace.
func (n *node) start() {
	n.t.Helper()
	// Not bound to the test's context: stop and kill end it.
	n.cmd = program(n.t, "run", "--config", n.path("agent.yaml"))
	n.cmd.Stderr = n.stderr
	n.launch(0)
}

// launch starts n.cmd in the node's namespace, and new ones of the kinds given. Its
// thread lives until the test ends, since it is the parent whose death Pdeathsig
// reports: one that is given back may be ended by whoever locks it next, as
// mdlayher/netlink does.
func (n *node) launch(unshare uintptr) {
	n.t.Helper()
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Unshareflags: unshare}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever
		err := unix.Setns(n.net.Router.FD(), unix.CLONE_NEWNET)
		if err == nil {
			err = n.cmd.Start()
		}
		started <- err
		<-n.t.Context().Done()
	}()
	must(n.t, <-started)
}

func (n *node) end(sig syscall.Signal) error {
	n.t.Helper()
	if err := n.cmd.Process.Signal(sig); err != nil {
		n.t.Fatal(err)
	}
	return n.cmd.Wait()
}

// get asks the admin endpoint, which listens on the loopback of the namespace.
func (n *node) get(path string) (int, string) {
	tr := &http.Transport{DialContext: func(context.Context, string, string) (c net.Conn, err error) {
		err = n.net.Router.Do(func() error {
			c, err = net.DialTCP("tcp", nil, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9633})
			return err
		})
		return c, err
	}}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr, Timeout: 5 * time.Second}).Get("http://agent" + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func (n *node) await(what string, cond func() bool) {
	n.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			_, status := n.get("/statusz")
			n.t.Fatalf("%s: not in time\n%s\n%s", what, status, n.stderr)
		}
	}
}

func (n *node) ready() {
	n.t.Helper()
	n.await("ready", func() bool { code, _ := n.get("/readyz"); return code == http.StatusOK })
}

func (n *node) answered(s *testnet.Sender, by netip.AddrPort) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 40*time.Second)
	defer cancel()
	if _, err := s.Await(ctx, by); err != nil {
		n.t.Fatalf("no answer from %s: %v\n%s", by, err, n.stderr)
	}
}

func TestRun(t *testing.T) {
	n := newNode(t)
	s := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, n.vip, 20*time.Millisecond)
	n.answered(s, n.backends[0])
	n.start()
	n.ready()

	// A change of the file, with the proxy behind and ahead of it.
	n.desire(n.backends[1])
	time.Sleep(time.Second)
	n.commit(n.backends[1])
	n.answered(s, n.backends[1])
	n.commit(n.backends[0])
	n.desire(n.backends[0])
	n.answered(s, n.backends[0])
	if code, body := n.get("/metrics"); code != 200 || !strings.Contains(body, `flowsweep_deleted_flows_total{family="ipv4",frontend_kind="static",reason="backend-gone"}`) {
		t.Errorf("%d %s", code, body)
	}
	audit, err := os.ReadFile(n.path("audit.jsonl"))
	if err != nil || !bytes.Contains(audit, []byte(`"verdict":"delete","reason":"backend-gone","frontend":"203.0.113.10:53/UDP"`)) {
		t.Errorf("audit: %s, %v", audit, err)
	}

	// Garbage for a state and for a configuration: what was known stays in force.
	n.write("frontends.yaml", "}{ garbage")
	n.write("agent.yaml", "kind: Nonsense")
	n.await("both faults are told", func() bool {
		return strings.Contains(n.stderr.String(), "source has a fault") &&
			strings.Contains(n.stderr.String(), "the old one stays in force")
	})
	if code, body := n.get("/livez"); code != 200 {
		t.Errorf("%d %s", code, body)
	}
	if tally, err := s.Sample(t.Context(), 50); err != nil || tally.From[n.backends[0]] != tally.Sent {
		t.Errorf("during the faults: %s, %v", tally, err)
	}
	n.desire(n.backends[1])
	n.commit(n.backends[1])
	n.answered(s, n.backends[1])

	if err := n.end(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, n.stderr)
	}
	if b, err := os.ReadFile(n.path("state.json")); err != nil || !bytes.Contains(b, []byte(`"owner":"dns"`)) {
		t.Errorf("state file: %s, %v", b, err)
	}
}

// The agent is killed at random moments while backends change: flows that are
// right are never touched, and at the end all is repaired. A second sender's
// backend never changes: none of its datagrams may be lost.
func TestKilled(t *testing.T) {
	length := 20 * time.Second
	if s := os.Getenv("FLOWSWEEP_KILL_FOR"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	n := newNode(t)
	steady := netip.MustParseAddrPort("203.0.113.20:53")
	rules := func(b netip.AddrPort) {
		t.Helper()
		err := n.net.Router.SetNAT(testnet.Forward{Proto: 17, Dst: n.vip, Backends: []netip.AddrPort{b}},
			testnet.Forward{Proto: 17, Dst: steady, Backends: n.backends[:1]})
		if err != nil {
			t.Fatal(err)
		}
	}
	desire := func(b netip.AddrPort) {
		n.write("frontends.yaml", fmt.Sprintf(`{"apiVersion":"flowsweep.dev/v1alpha1","kind":"FrontendList","items":[
 {"name":"dns","protocol":"UDP","addresses":["203.0.113.10"],"ports":"53","backends":[%q]},
 {"name":"steady","protocol":"UDP","addresses":["203.0.113.20"],"ports":"53","backends":[%q]}]}`, b, n.backends[0]))
	}
	rules(n.backends[0])
	desire(n.backends[0])
	moved := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, n.vip, 20*time.Millisecond)
	kept := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, steady, 20*time.Millisecond)
	n.answered(moved, n.backends[0])
	n.answered(kept, n.backends[0])
	last, kills := n.backends[0], 0
	for end := time.Now().Add(length); time.Now().Before(end); kills++ {
		n.start()
		time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond)
		if last = n.backends[0]; kills%2 == 0 {
			last = n.backends[1]
		}
		desire(last)
		time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond)
		rules(last)
		time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond)
		_ = n.end(syscall.SIGKILL)
	}
	n.start()
	n.ready()
	n.answered(moved, last)
	if tally, err := moved.Sample(t.Context(), 50); err != nil || tally.From[last] != tally.Sent {
		t.Errorf("at the end %s, %v", tally, err)
	}
	if tally, err := kept.Sample(t.Context(), 1); err != nil {
		t.Fatal(tally, err)
	}
	lost := 0
	for _, p := range kept.Timeline(time.Second) {
		lost += p.Lost
	}
	if lost > 0 {
		t.Errorf("the sender whose flow was right all along lost %d datagrams", lost)
	}
	t.Logf("killed %d times", kills)
	_ = n.end(syscall.SIGTERM)
}

// What can change at run time does so when the file changes and on SIGHUP, and
// what cannot is said. A damaged state file is ignored, and told.
func TestConfigTakenOver(t *testing.T) {
	n := newNode(t)
	n.write("state.json", `{"version":1,"frontends":[{"addr":"203`)
	n.start()
	n.ready()
	if log := n.stderr.String(); !strings.Contains(log, "the state file is ignored") || !strings.Contains(log, n.path("state.json")) {
		t.Errorf("the damaged state file is not told:\n%s", log)
	}
	cfg, err := os.ReadFile(n.path("agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	dry := string(cfg) + "dryRun: true\nzones: [0, 5]\n"
	n.write("agent.yaml", dry)
	n.await("taken over by itself", func() bool {
		_, status := n.get("/statusz")
		return strings.Contains(status, `"dryRun": true`) && strings.Contains(n.stderr.String(), "takes effect with the next start only")
	})
	s := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, n.vip, 20*time.Millisecond)
	n.answered(s, n.backends[0])
	n.desire(n.backends[1])
	n.commit(n.backends[1])
	n.await("found", func() bool { return strings.Contains(n.stderr.String(), "found stale") })
	if tally, err := s.Sample(t.Context(), 25); err != nil || tally.From[n.backends[0]] != tally.Sent {
		t.Errorf("in a dry run %s, %v", tally, err)
	}
	n.write("agent.yaml", string(cfg))
	if err := n.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	n.answered(s, n.backends[1]) // by the next pass: a change, or the full one after 30 s
	if err := n.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

// A state file that cannot be written is told, and keeps nothing from running.
func TestStateFileUnwritable(t *testing.T) {
	for name, tc := range map[string]struct{ before, want string }{
		"directory missing":   {"true", "no such file or directory"},
		"directory full":      {"mkdir $DIR && mount -t tmpfs -o size=4k none $DIR && head -c 4096 /dev/zero >$DIR/full", "no space left on device"},
		"directory read-only": {"mkdir $DIR && mount -t tmpfs -o ro none $DIR", "read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			cfg, err := os.ReadFile(n.path("agent.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			n.write("agent.yaml", strings.Replace(string(cfg), n.path("state.json"), n.path("state/state.json"), 1))
			run := program(t, "run", "--config", n.path("agent.yaml"))
			n.cmd = exec.CommandContext(t.Context(), "sh", "-c", tc.before+` && exec "$0" "$@"`)
			n.cmd.Args = append(n.cmd.Args, run.Args...)
			n.cmd.Env = slices.Concat(run.Env, []string{"DIR=" + n.path("state")})
			n.cmd.Stderr = n.stderr
			// Mounts are the process's own and gone with it.
			n.launch(syscall.CLONE_NEWNS)
			n.ready()
			n.await("told", func() bool {
				log := n.stderr.String()
				return strings.Contains(log, "the state file cannot be written") && strings.Contains(log, tc.want)
			})
			s := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, n.vip, 20*time.Millisecond)
			n.answered(s, n.backends[0])
			n.desire(n.backends[1])
			n.commit(n.backends[1])
			n.answered(s, n.backends[1])
			if err := n.end(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		})
	}
}

// While the API server cannot be reached the agent is not ready, says why, and
// deletes nothing, though its other sources tell of a stale flow. It ends when it
// is told to, and goes to work once the API server is there.
func TestRunWithoutAPIServer(t *testing.T) {
	n := newNode(t)
	cfg, err := os.ReadFile(n.path("agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const api = "127.0.0.1:6443" // of the namespace
	n.write("agent.yaml", strings.Replace(string(cfg), "sources: {", fmt.Sprintf(
		"host: {node: n1}\nsources: {kubernetes: {enabled: true, kubeconfig: %q}, ", kubeconfig(t, "http://"+api)), 1))
	// Known before, so that it would be taken for gone if nothing were believed.
	known := `{"version":1,"frontends":[
 {"addr":"203.0.113.10","proto":17,"first":53,"last":53,"owner":"default/dns","kind":"cluster-ip"}]}`
	n.write("state.json", known)
	s := nstest.Send(t, n.net.Leaf("client"), netip.AddrPort{}, n.vip, 20*time.Millisecond)
	n.answered(s, n.backends[0])
	n.desire(n.backends[1])
	n.commit(n.backends[1])

	want := "source kubernetes has not delivered its first full list: API server: dial " + api + ": connect: connection refused"
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		n.start()
		n.await("the fault is told", func() bool {
			code, body := n.get("/readyz")
			return code == http.StatusServiceUnavailable && strings.TrimSpace(body) == "not ready: "+want
		})
		if code, body := n.get("/livez"); code != http.StatusOK {
			t.Errorf("livez: %d %s", code, body)
		}
		if _, body := n.get("/statusz"); !strings.Contains(body, `"fault": "API server: dial `+api) || !strings.Contains(body, want) {
			t.Errorf("statusz: %s", body)
		}
		if _, body := n.get("/metrics"); !strings.Contains(body, `flowsweep_source_complete{source="kubernetes"} 0`) {
			t.Errorf("metrics: %s", body)
		}
		if tally, err := s.Sample(t.Context(), 100); err != nil || tally.From[n.backends[0]] != tally.Sent {
			t.Errorf("while not ready %s, %v", tally, err)
		}
		began := time.Now()
		if err := n.end(sig); err != nil || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %v after %s\n%s", sig, err, time.Since(began), n.stderr)
		}
	}
	if b, err := os.ReadFile(n.path("state.json")); err != nil || string(b) != known {
		t.Errorf("state file %s, %v, want what it was", b, err)
	}
	log := n.stderr.String()
	if faults := strings.Count(log, "source has a fault"); faults != 2 || strings.Contains(log, "canceled") {
		t.Errorf("%d faults in the log, want one for each start:\n%s", faults, log)
	}

	n.start()
	n.await("the fault is told", func() bool { code, _ := n.get("/readyz"); return code == http.StatusServiceUnavailable })
	var l net.Listener
	if err := n.net.Router.Do(func() (err error) {
		l, err = net.Listen("tcp", api)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	cluster := oneCluster()
	cluster.lists["services"], cluster.lists["endpointslices"] = "", "" // what is stale is the file's
	server := &http.Server{Handler: cluster, ReadHeaderTimeout: time.Minute}
	defer server.Close()
	go func() { _ = server.Serve(l) }()
	n.ready()
	n.answered(s, n.backends[1])
	if _, body := n.get("/statusz"); strings.Contains(body, `"fault"`) {
		t.Errorf("statusz: %s", body)
	}
	if err := n.end(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, n.stderr)
	}
}

// A cluster that cannot be reached for want of a file or a Node's name ends the
// agent at once, with the place.
func TestRunWithoutKubeconfig(t *testing.T) {
	n := newNode(t)
	good := kubeconfig(t, "http://127.0.0.1:6443")
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no such file": {
			[]string{"--kubeconfig", n.path("missing")},
			"flowsweep: source kubernetes: kubeconfig file " + n.path("missing") +
				": stat " + n.path("missing") + ": no such file or directory\n",
		},
		"no such context": {
			[]string{"--kubeconfig", good, "--context", "other"},
			"flowsweep: source kubernetes: kubeconfig file " + good + ": context \"other\" does not exist\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var stderr bytes.Buffer
			cmd := program(t, append([]string{"run", "--config", n.path("agent.yaml")}, tc.args...)...)
			cmd.Stderr = &stderr
			if err := n.net.Router.Do(cmd.Start); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != exitFailed || stderr.String() != tc.want {
				t.Errorf("exit %d: %s, want %s", code, &stderr, tc.want)
			}
		})
	}
}

// Without a desired state the rules alone tell: a sender whose rule now leads
// elsewhere is repaired, one that is right is not touched.
func TestRunByRules(t *testing.T) {
	n := newNode(t)
	n.write("agent.yaml", fmt.Sprintf(`apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
sources: {static: {files: []}}
stateFile: %q
log: {level: debug, auditFile: %q}
admin: {listen: "127.0.0.1:9633"}
`, n.path("state.json"), n.path("audit.jsonl")))
	client := n.net.Leaf("client")
	moved := nstest.Send(t, client, netip.AddrPort{}, n.vip, 20*time.Millisecond)
	n.answered(moved, n.backends[0])
	n.start()
	n.ready()
	other := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.11"), 53)
	forward := func(first netip.AddrPort) {
		t.Helper()
		must(t, n.net.Router.SetNAT(
			testnet.Forward{Proto: conntrack.UDP, Dst: n.vip, Backends: []netip.AddrPort{first}},
			testnet.Forward{Proto: conntrack.UDP, Dst: other, Backends: []netip.AddrPort{n.backends[1]}}))
	}
	forward(n.backends[0])
	right := nstest.Send(t, client, netip.AddrPort{}, other, 20*time.Millisecond)
	n.answered(right, n.backends[1])
	before := flowTo(t, n.net.Router, other)
	forward(n.backends[1])
	n.answered(moved, n.backends[1])
	if after := flowTo(t, n.net.Router, other); after.ID != before.ID {
		t.Errorf("the right flow was deleted:\n%s\n%s", &before, &after)
	}
	code, status := n.get("/statusz")
	var s agent.Status
	if err := json.Unmarshal([]byte(status), &s); err != nil || code != http.StatusOK || !s.ByRules || s.Settling != "rules" {
		t.Errorf("%d %v\n%s", code, err, status)
	}
	if err := n.end(syscall.SIGTERM); err != nil {
		t.Errorf("%v\n%s", err, n.stderr)
	}
	state, err := os.ReadFile(n.path("state.json"))
	if err != nil || !strings.Contains(string(state), `"addr":"203.0.113.10:53"`) {
		t.Errorf("%v: the state file does not tell of the destination: %s", err, state)
	}
}

// A desired state that comes while the agent goes by the rules is told of, once,
// and read by the next start.
func TestRunByRulesAndAFileComes(t *testing.T) {
	n := newNode(t)
	must(t, os.MkdirAll(n.path("etc/flowsweep/frontends.d"), 0o755))
	n.write("etc/flowsweep/frontends.d/.hidden.yaml", "}{")
	n.write("agent.yaml", fmt.Sprintf(`apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
stateFile: %q
admin: {listen: "127.0.0.1:9633"}
`, n.path("state.json")))
	start := func() {
		t.Helper()
		run := program(t, "run", "--config", n.path("agent.yaml"))
		n.cmd = exec.CommandContext(t.Context(), "sh", "-c", `mount --bind "$ETC" /etc && exec "$0" "$@"`)
		n.cmd.Args = append(n.cmd.Args, run.Args...)
		n.cmd.Env = slices.Concat(run.Env, []string{"ETC=" + n.path("etc")})
		n.cmd.Stderr = n.stderr
		// The mount is the process's own and gone with it.
		n.launch(syscall.CLONE_NEWNS)
		n.ready()
	}
	status := func() (s agent.Status) {
		t.Helper()
		if code, body := n.get("/statusz"); code != http.StatusOK || json.Unmarshal([]byte(body), &s) != nil {
			t.Fatalf("%d %s", code, body)
		}
		return s
	}
	start()
	if s := status(); !s.ByRules || len(s.Warnings) != 0 {
		t.Errorf("at the start: %+v", s)
	}
	list, err := os.ReadFile(n.path("frontends.yaml"))
	must(t, err)
	n.write("etc/flowsweep/frontends.d/dns.yaml", string(list))
	n.await("the status warns", func() bool {
		w := status().Warnings
		return len(w) == 1 && strings.Contains(w[0], "/etc/flowsweep/frontends.d") && strings.Contains(w[0], "restart it")
	})
	must(t, os.Rename(n.path("etc/flowsweep/frontends.d/dns.yaml"), n.path("dns.yaml")))
	n.await("and does not any more", func() bool { return len(status().Warnings) == 0 })
	must(t, os.Rename(n.path("dns.yaml"), n.path("etc/flowsweep/frontends.d/dns.yaml")))
	n.await("and does again", func() bool { return len(status().Warnings) == 1 })
	time.Sleep(2 * configPoll) // looks that have nothing new to say
	if log := n.stderr.String(); strings.Count(log, "restart it") != 2 {
		t.Errorf("told %d times, want once for each time that it came:\n%s", strings.Count(log, "restart it"), log)
	}
	must(t, n.end(syscall.SIGTERM))
	start()
	if s := status(); s.ByRules || s.Frontends != 1 || len(s.Warnings) != 0 {
		t.Errorf("after a restart: %+v", s)
	}
	must(t, n.end(syscall.SIGTERM))
}
