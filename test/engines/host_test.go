//go:build engines && linux

package engines

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

var (
	clientNet  = netip.MustParsePrefix("192.0.2.0/24")
	hostAddr   = netip.MustParseAddr("192.0.2.1")
	clientAddr = netip.MustParseAddr("192.0.2.2")
	// hostAddr2 is another address of the host.
	hostAddr2 = netip.MustParseAddr("192.0.2.3")
	loopback  = netip.MustParseAddr("127.0.0.1")
)

// host is a machine that forwards, with a client at its side:
//
//	client [eth0]────[client] host [the engine's bridge]────containers
//
// Programs on it have namespaces for mounts and processes as well, so that no engine of the machine
// that the test runs on is found or touched. All of it ends with the first of these processes.
type host struct {
	t          testing.TB // the test that it lives as long as
	dir        string     // for logs and data
	star       *testnet.Star
	ns, client *testnet.NS
	flows      *conntrack.Conn
	// cgroup is for the engine to put containers below.
	cgroup string
	init   *exec.Cmd
	// started are the programs that run until the end.
	started sync.WaitGroup
}

// hosts counts them, so that each has a control group of its own.
var hosts atomic.Int32

// firstProcess makes of the namespaces that it is started in a host without an engine, and ends when
// its input does: with the test, however that ends. It is named after the control group that it then
// removes. As the first process, bash reaps what others leave.
const firstProcess = `
mount --make-rprivate / && mount -t proc proc /proc &&
mount -t tmpfs -o mode=755 tmpfs /run && mount -t tmpfs -o mode=755 tmpfs /var/lib &&
{ [ ! -d /etc/flowsweep ] || mount -t tmpfs tmpfs /etc/flowsweep; } &&
echo ready && read -r _
[ $$ = 1 ] && kill -KILL -1
for _ in {1..100}; do
	find /sys/fs/cgroup -depth -type d -path "*/$0*" -exec rmdir {} + 2>/dev/null
	[ -n "$(find /sys/fs/cgroup -type d -name "$0")" ] || exit 0
	sleep 0.1
done
echo "control groups $0 are left" >&2
exit 1`

// newHost makes a host; leaves are further networks on it.
func newHost(t testing.TB, leaves ...testnet.Leaf) *host {
	t.Helper()
	star := nstest.Star(t, append(leaves, testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{clientNet}})...)
	h := &host{
		t: t, dir: t.TempDir(), star: star, ns: star.Router, client: star.Leaf("client"),
		cgroup: fmt.Sprintf("flowsweep-engines.%d.%d", os.Getpid(), hosts.Add(1)),
	}
	t.Cleanup(h.showLogs)
	must(t, h.ns.AddAddr("client", netip.PrefixFrom(hostAddr2, clientNet.Bits())))
	var err error
	h.flows, err = conntrack.Dial(conntrack.Config{NetNS: h.ns.Path()})
	must(t, err)
	t.Cleanup(func() { must(t, h.flows.Close()) })

	h.init = exec.Command("bash", "-c", firstProcess, h.cgroup)
	h.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	var errs bytes.Buffer
	h.init.Stderr = &errs
	stdin, err := h.init.StdinPipe()
	must(t, err)
	stdout, err := h.init.StdoutPipe()
	must(t, err)
	must(t, h.ns.Do(h.init.Start))
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := h.init.Wait(); err != nil { // until the last process in there has ended
			t.Errorf("end the host's processes: %v\n%s", err, &errs)
		}
		h.started.Wait()
	})
	if _, err := io.ReadFull(stdout, make([]byte, len("ready\n"))); err != nil {
		t.Fatalf("make mount and process namespaces, as root: %v\n%s", err, &errs)
	}
	return h
}

// path returns a name in the host's folder.
func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

// command makes a command that runs on the host.
func (h *host) command(ctx context.Context, argv ...string) *exec.Cmd {
	enter := []string{"--target", fmt.Sprint(h.init.Process.Pid), "--net", "--mount", "--pid", "--"}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, argv...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+h.dir, "DOCKER_HOST=")
	cmd.WaitDelay = time.Second // what it has started may hold its output
	return cmd
}

// run runs a program on the host and returns what it printed.
func (h *host) run(t testing.TB, stdin io.Reader, argv ...string) string {
	t.Helper()
	out, err := h.try(stdin, argv...)
	must(t, err)
	return out
}

func (h *host) try(stdin io.Reader, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := h.command(ctx, argv...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s%s", strings.Join(argv, " "), err, &out, &errs)
	}
	return strings.TrimSpace(out.String()), nil
}

// start runs a program on the host until the test's end, with its output in NAME.log, behind that of
// an earlier one of the name.
func (h *host) start(t testing.TB, name string, argv ...string) {
	t.Helper()
	log, err := os.OpenFile(h.path(name+".log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	must(t, err)
	defer log.Close()
	cmd := h.command(context.Background(), argv...)
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	h.started.Go(func() { _ = cmd.Wait() }) // the first process takes it along
}

// end sends a signal to the process whose ID is in a file, and waits until it has ended.
func (h *host) end(t testing.TB, pidfile, signal string) {
	t.Helper()
	h.run(t, nil, "sh", "-c", `pid=$(cat "$0") && kill -"$1" $pid && while kill -0 $pid 2>/dev/null; do sleep 0.02; done`,
		pidfile, signal)
}

// log returns what a program that was started has printed.
func (h *host) log(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(h.path(name + ".log"))
	must(t, err)
	return string(b)
}

// showLogs prints the end of each log if the test has failed.
func (h *host) showLogs() {
	if !h.t.Failed() {
		return
	}
	logs, _ := filepath.Glob(h.path("*.log"))
	for _, log := range logs {
		b, _ := os.ReadFile(log)
		const tail = 3000
		h.t.Logf("%s ends with:\n%s", filepath.Base(log), b[max(0, len(b)-tail):])
	}
}

// eventually asks until there is no error, and fails the test with the last one.
func eventually(t testing.TB, within time.Duration, what string, ask func() error) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(20 * time.Millisecond) {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %v", what, within, err)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
