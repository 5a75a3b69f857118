//go:build engines && linux

package engines

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const image = "localhost/echo"

// engine is Docker or Podman, whose command lines are alike.
type engine struct {
	*host
	cli      []string // the client and what it always needs
	daemon   []string // dockerd; Podman has none
	runFlags []string
	rmFlags  []string // with which it takes no time
	squats   int      // squatters so far
}

// slowly is an iptables for dockerd that takes its time while there is a file of its name with ".slow"
// behind it. As on a busy machine, each of many commits then stays for a while.
const slowly = `#!/bin/sh
[ ! -e "$0.slow" ] || sleep 0.1
exec /usr/sbin/iptables "$@"
`

// newDocker starts a Docker engine, whose folders are below /run and /var/lib, and so the host's own.
func newDocker(t testing.TB, h *host, flags ...string) *engine {
	t.Helper()
	config := h.path("daemon.json")
	must(t, os.WriteFile(config, []byte("{}"), 0o644)) // not /etc/docker's
	must(t, os.WriteFile(h.path("iptables"), []byte(slowly), 0o755))
	e := &engine{
		host: h,
		// Another docker in $PATH may be too new for Debian's engine.
		cli: []string{"/usr/bin/docker", "--config", h.dir, "--host", "unix:///run/docker.sock"},
		daemon: append([]string{
			"env", "PATH=" + h.dir + ":/usr/sbin:/usr/bin:/sbin:/bin",
			"/usr/sbin/dockerd", "--config-file", config, "--storage-driver", "vfs",
			"--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", "/" + h.cgroup,
		}, flags...),
		rmFlags: []string{"--force"},
	}
	e.startDocker(t)
	e.importImage(t, `ENTRYPOINT ["/echo"]`)
	return e
}

// startDocker starts dockerd and waits until it answers, with something to do meanwhile.
func (e *engine) startDocker(t testing.TB, meanwhile ...func()) {
	t.Helper()
	e.start(t, "dockerd", e.daemon...)
	eventually(t, time.Minute, "dockerd (Debian's docker.io) answers", func() error {
		for _, f := range meanwhile {
			f()
		}
		_, err := e.try(nil, slices.Concat([]string{"timeout", "1"}, e.cli, []string{"version"})...)
		return err
	})
}

// restartDocker ends dockerd with a signal and starts it again.
func (e *engine) restartDocker(t testing.TB, signal string, meanwhile ...func()) {
	t.Helper()
	e.end(t, "/run/docker.pid", signal)
	e.startDocker(t, meanwhile...)
}

// podmanConfig is for a machine without systemd, where Podman's own limits may be above what is allowed.
// The runtime is the one that Docker brings along.
const podmanConfig = `
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = %q
network_config_dir = %q
`

// newPodman prepares Podman with a network backend, of which there may be one in a namespace.
func newPodman(t testing.TB, h *host, backend string) *engine {
	t.Helper()
	config := h.path("containers.conf")
	must(t, os.WriteFile(config, fmt.Appendf(nil, podmanConfig, backend, h.path("networks")), 0o644))
	e := &engine{
		host:     h,
		cli:      []string{"env", "CONTAINERS_CONF=" + config, "STORAGE_DRIVER=vfs", "podman"},
		runFlags: []string{"--cgroup-parent", "/" + h.cgroup},
		rmFlags:  []string{"--force", "--time", "0"},
	}
	e.importImage(t, `ENTRYPOINT=["/echo"]`)
	return e
}

// importImage makes the image of echo, without any registry.
func (e *engine) importImage(t testing.TB, change string) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "echo")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", binary, "./echo")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	program, err := os.ReadFile(binary)
	must(t, err)
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	must(t, w.WriteHeader(&tar.Header{Name: "echo", Mode: 0o755, Size: int64(len(program))}))
	_, err = w.Write(program)
	must(t, errors.Join(err, w.Close()))
	e.do(t, &layer, "import", "--change", change, "-", image)
}

// do runs a command of the engine and returns what it printed.
func (e *engine) do(t testing.TB, stdin io.Reader, args ...string) string {
	t.Helper()
	return e.run(t, stdin, append(e.cli, args...)...)
}

// container is a container with its present address.
type container struct {
	*engine
	name string
	addr netip.Addr
	// gateway is the host's address on its network. Docker's proxy answers containers from there.
	gateway netip.Addr
}

// container starts a container. Flags are those of the engine's "run", cmd is what echo shall do.
func (e *engine) container(t testing.TB, name string, flags []string, cmd ...string) *container {
	t.Helper()
	args := slices.Concat([]string{"run", "--detach", "--name", name}, e.runFlags, flags, []string{image}, cmd)
	e.do(t, nil, args...)
	c := &container{engine: e, name: name}
	c.inspect(t)
	return c
}

// publish makes flags of values of --publish.
func publish(values ...string) []string {
	var flags []string
	for _, v := range values {
		flags = append(flags, "--publish", v)
	}
	return flags
}

// inspect finds out the addresses.
func (c *container) inspect(t testing.TB) {
	t.Helper()
	out := c.do(t, nil, "inspect", "--format", "{{.NetworkSettings.IPAddress}} {{.NetworkSettings.Gateway}}", c.name)
	addr, gateway, _ := strings.Cut(out, " ")
	var err error
	c.addr, err = netip.ParseAddr(addr)
	must(t, err)
	c.gateway, err = netip.ParseAddr(gateway)
	must(t, err)
}

// at returns where the container answers.
func (c *container) at(port uint16) netip.AddrPort { return netip.AddrPortFrom(c.addr, port) }

// move stops the container and starts it when another one has taken its address.
func (c *container) move(t testing.TB, meanwhile ...func()) {
	t.Helper()
	c.do(t, nil, "stop", "--time", "0", c.name)
	for _, f := range meanwhile {
		f()
	}
	c.squat(t)
	c.do(t, nil, "start", c.name)
	before := c.addr
	if c.inspect(t); c.addr == before {
		t.Fatalf("%s got its address %s again: this proves nothing", c.name, before)
	}
}

// squat starts a container that takes the next address.
func (e *engine) squat(t testing.TB) {
	t.Helper()
	e.squats++
	e.container(t, fmt.Sprintf("squatter-%d", e.squats), nil, "serve", "9")
}

// remove removes the container.
func (c *container) remove(t testing.TB) {
	t.Helper()
	c.do(t, nil, append(append([]string{"rm"}, c.rmFlags...), c.name)...)
}

// fates returns what a sender has printed of its datagrams.
func (c *container) fates(t testing.TB) []string {
	t.Helper()
	return strings.Split(c.do(t, nil, "logs", c.name), "\n")
}
