// Package sdnotify tells the service manager how the process fares: the
// protocol of sd_notify(3), in which a datagram of VARIABLE=value lines goes to
// the socket that NOTIFY_SOCKET names.
package sdnotify

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// sendTimeout bounds the wait for a manager that does not empty its queue: it
// must not stop a loop that the manager watches.
const sendTimeout = time.Second

// Notifier sends notifications. The zero Notifier, and one of a process that no
// manager listens to, sends nothing and returns nil. Its methods may be called
// from several goroutines at once.
type Notifier struct {
	socket   string
	watchdog time.Duration
}

// FromEnvironment returns the Notifier that the service manager asks for in
// NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID. An error means that one of them
// is malformed; the Notifier then does what the others ask for.
func FromEnvironment() (*Notifier, error) {
	n := &Notifier{}
	var errs []error
	switch s := os.Getenv("NOTIFY_SOCKET"); {
	case s == "":
	case len(s) > 1 && (s[0] == '/' || s[0] == '@'): // "@" stands for the NUL of an abstract name
		n.socket = s
	default:
		errs = append(errs, fmt.Errorf("NOTIFY_SOCKET: %q is neither an absolute path nor an abstract name (@...)", s))
	}
	interval, err := watchdog(os.Getenv("WATCHDOG_USEC"), os.Getenv("WATCHDOG_PID"))
	if err != nil {
		errs = append(errs, err)
	}
	n.watchdog = interval
	return n, errors.Join(errs...)
}

// watchdog is sd_watchdog_enabled(3).
func watchdog(usec, pid string) (time.Duration, error) {
	if usec == "" {
		return 0, nil
	}
	if pid != "" {
		p, err := strconv.ParseUint(pid, 10, 31)
		if err != nil || p == 0 {
			return 0, fmt.Errorf("WATCHDOG_PID: %q is no process id", pid)
		}
		if int(p) != os.Getpid() {
			return 0, nil // inherited: it is another process that is watched
		}
	}
	// sd_watchdog_enabled refuses USEC_INFINITY, all ones; a Duration ends before that.
	us, err := strconv.ParseInt(usec, 10, 64)
	if err != nil || us <= 0 || us > int64(1<<63-1)/int64(time.Microsecond) {
		return 0, fmt.Errorf("WATCHDOG_USEC: %q is no number of microseconds", usec)
	}
	return time.Duration(us) * time.Microsecond, nil
}

// Watchdog returns the time within which the manager wants to hear Alive, and
// kills the process if it does not; 0 where it does not watch. To call Alive
// after half of it leaves room for a slow machine.
func (n *Notifier) Watchdog() time.Duration { return n.watchdog }

// Ready says that the process has started, or has loaded its configuration anew
// after Reloading; status is one line for people, as in Status.
func (n *Notifier) Ready(status string) error {
	return n.send("READY=1", statusLine(status))
}

// Reloading says that the configuration is being loaded anew. It must be followed
// by Ready, also where the configuration was refused.
func (n *Notifier) Reloading() error {
	// Type=notify-reload wants the time, to tell this reload from one before.
	if us := monotonic(); us > 0 {
		return n.send("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(us, 10))
	}
	return n.send("RELOADING=1")
}

// Stopping says that the process is about to end.
func (n *Notifier) Stopping() error { return n.send("STOPPING=1") }

// Alive resets the manager's watchdog.
func (n *Notifier) Alive() error { return n.send("WATCHDOG=1") }

// Status replaces the line that "systemctl status" shows.
func (n *Notifier) Status(status string) error { return n.send(statusLine(status)) }

// statusLine keeps a line break from starting another assignment.
func statusLine(s string) string {
	return "STATUS=" + strings.NewReplacer("\n", " ", "\r", " ").Replace(s)
}

// send dials each time: a manager that was executed anew may listen on a new
// socket of the same name.
func (n *Notifier) send(assignments ...string) error {
	if n.socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	if _, err := conn.Write([]byte(strings.Join(assignments, "\n"))); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	return nil
}
