//go:build linux

package sdnotify

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// manager is the service manager's end of the socket.
func manager(t *testing.T, name string) *net.UnixConn {
	t.Helper()
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func read(t *testing.T, c *net.UnixConn) string {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func notifier(t *testing.T) *Notifier {
	t.Helper()
	n, err := FromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestMessages(t *testing.T) {
	tests := []struct {
		name string
		send func(*Notifier) error
		want string
	}{
		{"ready", func(n *Notifier) error { return n.Ready("12 frontends") }, "READY=1\nSTATUS=12 frontends"},
		{"status", func(n *Notifier) error { return n.Status("held: shrunk") }, "STATUS=held: shrunk"},
		{"status of two lines", func(n *Notifier) error { return n.Status("a\r\nMAINPID=1") }, "STATUS=a  MAINPID=1"},
		{"no status", func(n *Notifier) error { return n.Status("") }, "STATUS="},
		{"alive", (*Notifier).Alive, "WATCHDOG=1"},
		{"stopping", (*Notifier).Stopping, "STOPPING=1"},
	}
	sockets := map[string]string{
		"path":     filepath.Join(t.TempDir(), "notify"),
		"abstract": "@flowsweep-test-" + strconv.Itoa(os.Getpid()),
	}
	for kind, socket := range sockets {
		m := manager(t, socket)
		t.Setenv("NOTIFY_SOCKET", socket)
		n := notifier(t)
		for _, tt := range tests {
			t.Run(kind+"/"+tt.name, func(t *testing.T) {
				if err := tt.send(n); err != nil {
					t.Fatal(err)
				}
				if got := read(t, m); got != tt.want {
					t.Errorf("got %q, want %q", got, tt.want)
				}
			})
		}
	}
}

// The time is the manager's own clock, taken between the two readings around it.
func TestReloading(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	m := manager(t, socket)
	t.Setenv("NOTIFY_SOCKET", socket)
	before := monotonic()
	if err := notifier(t).Reloading(); err != nil {
		t.Fatal(err)
	}
	after := monotonic()
	got, ok := strings.CutPrefix(read(t, m), "RELOADING=1\nMONOTONIC_USEC=")
	us, err := strconv.ParseInt(got, 10, 64)
	if !ok || err != nil || us < before || us > after || before <= 0 {
		t.Errorf("got %q, want RELOADING=1 and a time from %d to %d", got, before, after)
	}
}

// A manager that was started anew is found by the same name.
func TestManagerRestarts(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	t.Setenv("NOTIFY_SOCKET", socket)
	n := notifier(t)
	for range 2 {
		m := manager(t, socket)
		if err := n.Alive(); err != nil {
			t.Fatal(err)
		}
		if got := read(t, m); got != "WATCHDOG=1" {
			t.Errorf("got %q", got)
		}
		if err := errors.Join(m.Close(), os.RemoveAll(socket)); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Alive(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no manager: %v", err)
	}
}

// A manager that reads nothing costs a second at most, and is an error.
func TestManagerStalls(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	manager(t, socket)
	t.Setenv("NOTIFY_SOCKET", socket)
	n := notifier(t)
	start := time.Now()
	for range 10_000 { // more than net.unix.max_dgram_qlen
		err := n.Alive()
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v, want a deadline exceeded", err)
		}
		if d := time.Since(start); d > 10*sendTimeout {
			t.Errorf("took %s", d)
		}
		return
	}
	t.Error("the queue took everything")
}

func TestEnvironment(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	tests := []struct {
		name, socket, usec, pid string
		watchdog                time.Duration
		err                     string // "": none
	}{
		{name: "nothing is asked for"},
		{name: "watched", usec: "30000000", pid: self, watchdog: 30 * time.Second},
		{name: "watched, for any process", usec: "1500", watchdog: 1500 * time.Microsecond},
		{name: "another process is watched", usec: "30000000", pid: "1"},
		{name: "process without a limit", pid: self},
		{name: "zero", usec: "0", err: "WATCHDOG_USEC"},
		{name: "negative", usec: "-1", err: "WATCHDOG_USEC"},
		{name: "with a unit", usec: "30s", err: "WATCHDOG_USEC"},
		{name: "more than a duration holds", usec: "9223372036854776", err: "WATCHDOG_USEC"},
		{name: "no limit", usec: "18446744073709551615", err: "WATCHDOG_USEC"},
		{name: "no process id", usec: "1", pid: "self", err: "WATCHDOG_PID"},
		{name: "process 0", usec: "1", pid: "0", err: "WATCHDOG_PID"},
		{name: "relative path", socket: "notify", err: "NOTIFY_SOCKET"},
		{name: "virtual socket", socket: "vsock:2:1234", err: "NOTIFY_SOCKET"},
		{name: "empty name", socket: "@", err: "NOTIFY_SOCKET"},
		{name: "a bad socket leaves the watchdog", socket: "x", usec: "2", watchdog: 2 * time.Microsecond, err: "NOTIFY_SOCKET"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("NOTIFY_SOCKET", tt.socket)
			t.Setenv("WATCHDOG_USEC", tt.usec)
			t.Setenv("WATCHDOG_PID", tt.pid)
			n, err := FromEnvironment()
			if (err != nil) != (tt.err != "") || err != nil && !strings.HasPrefix(err.Error(), tt.err+":") {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if n.Watchdog() != tt.watchdog {
				t.Errorf("watchdog %s, want %s", n.Watchdog(), tt.watchdog)
			}
			// Nobody listens, so nothing is sent, and nothing fails.
			if err := n.Ready("x"); err != nil {
				t.Error(err)
			}
		})
	}
}
