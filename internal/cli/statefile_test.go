//go:build linux

package cli

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// refused runs the program in the node's namespace, which must end by itself and
// tell why.
func (n *node) refused(t *testing.T, want string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	run := program(t, args...)
	cmd := exec.CommandContext(ctx, run.Path, run.Args[1:]...)
	cmd.Env = run.Env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := n.net.Router.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if ctx.Err() != nil {
		t.Fatalf("it runs:\n%s", &stderr)
	}
	if cmd.ProcessState.ExitCode() != exitFailed || !strings.HasPrefix(stderr.String(), "flowsweep: ") ||
		!strings.Contains(stderr.String(), want) || strings.Count(stderr.String(), "\n") != 1 {
		t.Errorf("%v: %s, want %q", err, &stderr, want)
	}
}

// A file that is not the agent's is never written: neither the desired state that
// one word too many makes a state file, nor anything else that is there.
func TestRunReplacesNoFile(t *testing.T) {
	n := newNode(t)
	desired, err := os.ReadFile(n.path("frontends.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	must(t, os.Mkdir(n.path("frontends.d"), 0o755))
	must(t, os.Symlink("frontends.yaml", n.path("link")))
	must(t, syscall.Mkfifo(n.path("fifo"), 0o600))
	socket, err := net.Listen("unix", n.path("socket"))
	must(t, err)
	defer socket.Close()
	null := n.path("null") // as /dev/null
	deviceErr := unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
	for name, content := range map[string]string{
		"list.yaml":      "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems: []\n",
		"terraform.json": `{"version": 4, "terraform_version": "1.9.0", "resources": []}`,
		"text":           "nothing that anybody knows\n",
		"cut.json":       `{"version":1,`, // it may be ours, and nobody can tell
		"blank":          "\n",
	} {
		n.write(name, content)
	}
	for name, why := range map[string]string{
		"frontends.yaml": "no state file", "list.yaml": "no state file", "terraform.json": "no state file",
		"text": "no state file", "cut.json": "no state file", "blank": "no state file", "link": "no state file",
		"frontends.d": "is a directory", "fifo": "is no regular file", "socket": "is no regular file", "null": "is no regular file",
	} {
		t.Run(name, func(t *testing.T) {
			if name == "null" && errors.Is(deviceErr, fs.ErrPermission) {
				t.Skip("only root may make devices: ", deviceErr)
			}
			before, err := os.Lstat(n.path(name))
			must(t, err)
			n.refused(t, why, "run", "--config", n.path("agent.yaml"), "--state-file", n.path(name))
			n.refused(t, "did you mean --state "+n.path(name)+"?",
				"run", "--config", n.path("agent.yaml"), "--dry-run", "--state-file", n.path(name))
			cfg, err := os.ReadFile(n.path("agent.yaml"))
			must(t, err)
			n.write("other.yaml", strings.Replace(string(cfg), n.path("state.json"), n.path(name), 1))
			n.refused(t, "did you mean sources.static.files?", "run", "--config", n.path("other.yaml"))
			after, err := os.Lstat(n.path(name))
			must(t, err)
			if !os.SameFile(before, after) || before.Mode() != after.Mode() || !before.ModTime().Equal(after.ModTime()) {
				t.Errorf("it was %v and is %v", before, after)
			}
		})
	}
	if after, err := os.ReadFile(n.path("frontends.yaml")); err != nil || !bytes.Equal(desired, after) {
		t.Errorf("the desired state is %s, %v", after, err)
	}
	entries, err := os.ReadDir(n.dir)
	must(t, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "state.json") || strings.Contains(e.Name(), "yaml.") {
			t.Errorf("%s was made", e.Name())
		}
	}
}

// The name "none" is none, and one that ends so is a name.
func TestStateFileNone(t *testing.T) {
	for in, want := range map[string]string{"none": `""`, "/tmp/none": `"/tmp/none"`} {
		var out, errs bytes.Buffer
		code := Run(t.Context(), []string{"config", "print", "--state-file", in}, strings.NewReader(""), &out, &errs)
		if code != 0 || !strings.Contains(out.String(), "\nstateFile: "+want+"\n") {
			t.Errorf("exit %d, %s, want %s in\n%s", code, &errs, want, &out)
		}
	}
}

// A state file among the files of the desired state would be read as one of them,
// and an audit file must be nobody else's.
func TestRunFilesApart(t *testing.T) {
	n := newNode(t)
	must(t, os.Mkdir(n.path("d"), 0o755))
	n.write("notes", "nothing that anybody knows\n")
	cfg, err := os.ReadFile(n.path("agent.yaml"))
	must(t, err)
	for name, tc := range map[string]struct{ from, to, want string }{
		"audit into the desired state": {n.path("audit.jsonl"), n.path("frontends.yaml"), "no audit file"},
		"audit into notes":             {n.path("audit.jsonl"), n.path("notes"), "no audit file"},
		"audit into a directory":       {n.path("audit.jsonl"), n.path("d"), "is a directory"},
		"audit into the state file":    {n.path("audit.jsonl"), n.path("state.json"), "log.auditFile and stateFile are both"},
		"the state among the desired":  {n.path("frontends.yaml"), n.path("state.json"), "is one of sources.static.files"},
		"the state in their directory": {n.path("frontends.yaml"), n.dir, "is in a directory of sources.static.files"},
	} {
		t.Run(name, func(t *testing.T) {
			n.write("other.yml.txt", strings.Replace(string(cfg), tc.from, tc.to, 1))
			n.refused(t, tc.want, "run", "--config", n.path("other.yml.txt"))
		})
	}
	if b, err := os.ReadFile(n.path("notes")); err != nil || string(b) != "nothing that anybody knows\n" {
		t.Errorf("the notes are %s, %v", b, err)
	}
}

// Two agents with one state file would take each other's frontends for gone.
func TestTwoAgentsOneStateFile(t *testing.T) {
	n := newNode(t)
	n.start()
	n.ready()
	n.await("state file", func() bool { _, err := os.Stat(n.path("state.json")); return err == nil })
	n.refused(t, "is in use by another agent", "run", "--config", n.path("agent.yaml"), "--listen", "none")
	if err := n.end(syscall.SIGKILL); err == nil {
		t.Error("killed, and well")
	}
	n.start() // the lock went with the process
	n.ready()

	// While it runs, the file becomes somebody else's.
	n.write("state.json", "kind: Something\n")
	n.desire(n.backends[1])
	n.commit(n.backends[1])
	n.await("told", func() bool {
		code, body := n.get("/statusz")
		return code == http.StatusOK && strings.Contains(body, `"stateFileError"`) && strings.Contains(body, "no state file")
	})
	if err := n.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(n.path("state.json")); err != nil || string(b) != "kind: Something\n" {
		t.Errorf("the file is %s, %v", b, err)
	}
}
