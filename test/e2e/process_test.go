//go:build e2e && linux

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/internal/testnet"
)

// process is a program in a network namespace. It does not outlive the test, however that ends.
type process struct {
	name  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
	// mayEnd is set before the test, or what the test does, ends it.
	mayEnd atomic.Bool
}

// start runs a program on the node until it is killed, at the latest with the cluster; that it ends
// by itself fails the test. Its output goes to NAME.log, behind that of an earlier process of the
// name.
func (c *cluster) start(t testing.TB, name string, argv ...string) *process {
	t.Helper()
	log, err := os.OpenFile(c.path(name+".log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	must(t, err)
	p := &process{name: name, cmd: command(argv...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	must(t, c.node.Do(p.cmd.Start))
	go func() {
		defer close(p.ended)
		defer log.Close()
		if err := p.cmd.Wait(); !p.mayEnd.Load() {
			c.t.Errorf("%s ended: %v", name, err)
		}
	}()
	c.processes = append(c.processes, p)
	return p
}

// command is exec.Command for a child that the kernel kills with its parent, so that a test that
// panics or is killed leaves nothing behind.
func command(argv ...string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd
}

// run runs a program to its end and returns what it printed.
func run(ns *testnet.NS, stdin string, argv ...string) (string, error) {
	cmd := command(argv...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := ns.Do(cmd.Run)
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s%s", strings.Join(argv, " "), err, &out, &errs)
	}
	return out.String(), err
}

// kill ends the process as a crash would, with what it has started, and waits for it.
func (p *process) kill() {
	p.mayEnd.Store(true)
	select {
	case <-p.ended:
	default:
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // an error means that it has ended
		<-p.ended
	}
}

// stop ends the process as an operator would, and waits for it.
func (p *process) stop(t testing.TB) {
	t.Helper()
	kill := time.AfterFunc(10*time.Second, func() {
		t.Errorf("%s does not end on SIGTERM", p.name)
		_ = p.cmd.Process.Kill()
	})
	defer kill.Stop()
	p.mayEnd.Store(true)
	p.signal(t, syscall.SIGTERM)
	<-p.ended
}

// pause makes the process stand still until resume.
func (p *process) pause(t testing.TB)  { p.signal(t, syscall.SIGSTOP) }
func (p *process) resume(t testing.TB) { p.signal(t, syscall.SIGCONT) }

func (p *process) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
}

// memory returns a value of /proc/PID/status in bytes: VmRSS is what is resident, VmHWM the most
// that was.
func (p *process) memory(t testing.TB, field string) int64 {
	t.Helper()
	for _, line := range strings.Split(p.proc(t, "status"), "\n") {
		var kib int64
		if _, err := fmt.Sscanf(line, field+": %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	t.Fatalf("%s: no %s in its status", p.name, field)
	return 0
}

// cpu returns how long the process has run, on all threads that it has now.
func (p *process) cpu(t testing.TB) time.Duration {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.cmd.Process.Pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("%s: no threads: %v", p.name, err)
	}
	var sum time.Duration
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			t.Fatal(err)
		}
		var ns int64
		if _, err := fmt.Sscan(string(b), &ns); err != nil {
			t.Fatalf("%s: %v", task, err)
		}
		sum += time.Duration(ns)
	}
	return sum
}

// user returns how much of that was outside the kernel, to 10 ms.
func (p *process) user(t testing.TB) time.Duration {
	t.Helper()
	stat := p.proc(t, "stat")
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:]) // from state, the third field
	const utime, ticksPerSecond = 14 - 3, 100
	ticks, err := strconv.Atoi(fields[utime])
	must(t, err)
	return time.Duration(ticks) * time.Second / ticksPerSecond
}

func (p *process) proc(t testing.TB, file string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.cmd.Process.Pid, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// eventually asks until there is no error, and fails the test with the last one.
func eventually(t testing.TB, within time.Duration, what string, ask func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %v", what, within, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// scratch returns a directory for logs and data. If the test fails it is kept, and the end of each log
// is printed.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "flowsweep-e2e.") //nolint:usetesting // it is kept if the test fails
	must(t, err)
	t.Cleanup(func() {
		if !t.Failed() {
			_ = os.RemoveAll(dir)
			return
		}
		logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
		for _, log := range logs {
			b, _ := os.ReadFile(log)
			const tail = 3000
			t.Logf("%s ends with:\n%s", log, b[max(0, len(b)-tail):])
		}
	})
	return dir
}
