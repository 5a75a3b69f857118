//go:build linux

package testnet_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// helper prepares another process of this program, as a user would start it:
// neither re-executed nor with a terminal. It is killed if it takes too long.
func helper(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, testnet.OuterEnv+"=") && !strings.HasPrefix(v, nstest.RequireEnv+"=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	// The race detector would wait for a second at the end of each process.
	cmd.Env = append(cmd.Env, helperEnv+"="+name, "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGKILL}
	return cmd
}

// inUserNamespace starts the process as root of a user namespace of its own, in
// which it can do no harm.
func inUserNamespace(cmd *exec.Cmd) {
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNET
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
}

func TestReexec(t *testing.T) {
	nstest.Require(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fmt.Fprintln(w, "from descriptor 3")
	w.Close()

	cmd := helper(t, "report", "-test.v", "two words")
	cmd.Stdin = strings.NewReader("from standard input\n")
	cmd.ExtraFiles = []*os.File{r}
	out, err := cmd.Output()
	if got := cmd.ProcessState.ExitCode(); got != 42 {
		t.Errorf("exit code %d (%v), want the program's own, 42", got, err)
	}
	want := "uid 0 moved true [-test.v two words]\nfrom standard input\nfrom descriptor 3\n"
	if string(out) != want {
		t.Errorf("got  %q\nwant %q", out, want)
	}
}

// start starts a helper and waits for its first line.
func start(t *testing.T, cmd *exec.Cmd) (line string, rest *bufio.Reader) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	rest = bufio.NewReader(out)
	line, err = rest.ReadString('\n')
	if err != nil {
		t.Fatalf("helper: %v, %v", err, cmd.Wait())
	}
	return strings.TrimSpace(line), rest
}

func TestReexecPassesSignalsOn(t *testing.T) {
	nstest.Require(t)
	for _, s := range []syscall.Signal{
		unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2,
	} {
		t.Run(unix.SignalName(s), func(t *testing.T) {
			cmd := helper(t, "signal")
			_, rest := start(t, cmd)
			if err := cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(rest)
			if err := cmd.Wait(); err != nil {
				t.Errorf("the signal came more than once: %v", err)
			}
			if string(got) != s.String()+"\n" {
				t.Errorf("got %q, want %q", got, s)
			}
		})
	}
}

// Typed at a terminal, SIGINT goes to both processes: it must come once.
func TestReexecInterruptFromTerminal(t *testing.T) {
	nstest.Require(t)
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals: ", err)
	}
	defer ptmx.Close()
	if err := unix.IoctlSetPointerInt(int(ptmx.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(ptmx.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	pts, err := os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals: ", err)
	}
	defer pts.Close()

	cmd := helper(t, "signal")
	cmd.Stdin = pts
	cmd.SysProcAttr.Setctty = true
	_, rest := start(t, cmd)
	if _, err := ptmx.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	got, _ := io.ReadAll(rest)
	if err := cmd.Wait(); err != nil {
		t.Errorf("the signal came more than once: %v", err)
	}
	if want := unix.SIGINT.String() + "\n"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestReexecDeathBySignal(t *testing.T) {
	nstest.Require(t)
	cmd := helper(t, "wait")
	start(t, cmd)
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got, want := cmd.ProcessState.ExitCode(), 128+int(unix.SIGTERM); got != want {
		t.Errorf("exit code %d, want %d", got, want)
	}
}

// A program under nohup(1) must stay deaf to SIGHUP.
func TestReexecKeepsIgnoredSignals(t *testing.T) {
	nstest.Require(t)
	cmd := helper(t, "nohup")
	line, _ := start(t, cmd)
	if want := "ready, SIGHUP ignored: true"; line != want {
		t.Errorf("got %q, want %q", line, want)
	}
	_ = cmd.Process.Signal(unix.SIGTERM)
	_ = cmd.Wait()
}

func TestReexecLeavesNothingBehind(t *testing.T) {
	nstest.Require(t)
	cmd := helper(t, "wait")
	_, rest := start(t, cmd)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The second process has the pipe, too: it ends only with both of them.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, rest)
	}()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the second process outlives the first")
	}
	_ = cmd.Wait()
}

// TestNeedsKernel is what TestForbidden runs where it cannot work.
func TestNeedsKernel(t *testing.T) {
	if err := nstest.New(t).Do(func() error { return nil }); err != nil {
		t.Fatal(err)
	}
}

func TestForbidden(t *testing.T) {
	nstest.Require(t)
	tests := []struct {
		helper string
		user   bool   // in a user namespace
		want   string // besides the name of ErrForbidden
	}{
		{"no-user-namespaces", true, "'sysctl user.max_user_namespaces=10000'"},
		{"no-capabilities", true, "operation not permitted"},
		{"seccomp", false, "a seccomp profile that allows unshare"},
	}
	for _, tt := range tests {
		t.Run(tt.helper, func(t *testing.T) {
			for _, require := range []string{"", "1"} {
				cmd := helper(t, tt.helper, "-test.v", "-test.run=^TestNeedsKernel$")
				cmd.Env = append(cmd.Env, nstest.RequireEnv+"="+require)
				if tt.user {
					inUserNamespace(cmd)
				}
				out, err := cmd.CombinedOutput()
				outcome := "--- SKIP: TestNeedsKernel"
				if require == "1" {
					outcome = "--- FAIL: TestNeedsKernel"
				}
				if failed := err != nil; failed != (require == "1") {
					t.Errorf("%s=%s: exit: %v", nstest.RequireEnv, require, err)
				}
				for _, want := range []string{outcome, testnet.ErrForbidden.Error(), "run as root", tt.want} {
					if !bytes.Contains(out, []byte(want)) {
						t.Errorf("%s=%s: no %q in:\n%s", nstest.RequireEnv, require, want, out)
					}
				}
			}
		})
	}
}

// TestUnprivileged runs the package's tests as a user without any privilege.
func TestUnprivileged(t *testing.T) {
	nstest.Require(t)
	if !initialUserNamespace(t) {
		t.Skip("only the system's root can become another user")
	}
	const ids = 65534
	cmd := helper(t, "")
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: ids, Gid: ids}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as user %d: %v\n%s", ids, err, out)
	}
}

func initialUserNamespace(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(b)), " ") == "0 0 4294967295" && os.Geteuid() == 0
}

// FuzzInside is what TestFuzzing fuzzes.
func FuzzInside(f *testing.F) {
	nstest.Require(f)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, _ []byte) { nstest.New(t) })
}

// The fuzzing engine starts workers, which talk to it through descriptors.
func TestFuzzing(t *testing.T) {
	nstest.Require(t)
	out, err := helper(t, "", "-test.run=^$", "-test.fuzz=^FuzzInside$", "-test.fuzztime=20x",
		"-test.parallel=1", "-test.fuzzcachedir="+t.TempDir()).CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("execs: ")) {
		t.Errorf("%v\n%s", err, out)
	}
}
