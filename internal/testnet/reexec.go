//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrForbidden is what [Reexec] and [New] return, wrapped in a sentence that
// says what to do, where the system does not let this process have network
// namespaces.
var ErrForbidden = errors.New("this system forbids network namespaces")

// outerEnv names, in a re-executed process and in all that it starts, the
// network namespace that [Reexec] was first called in.
const outerEnv = "FLOWSWEEP_OUTER_NETNS"

// Reexec gives the running program a network namespace of its own, by running
// it again with the same arguments, environment and open files. Root (with
// CAP_SYS_ADMIN and CAP_NET_ADMIN) needs nothing else; any other user becomes
// root of a new user namespace.
//
// In the process that was started by the user, Reexec waits for the second one,
// to which it passes signals on, and returns done and the exit code to leave
// with: 128 plus the signal's number where a signal ended it. The second
// process dies with the first. In the second, and in processes started by it,
// Reexec returns done == false at once, with the loopback device up, and the
// program goes on. Where namespaces are refused to either of the two, the error
// is an [ErrForbidden].
//
// Call it before anything that opens a socket or reads standard input.
func Reexec() (code int, done bool, err error) {
	if inside() {
		return 0, false, settle()
	}
	code, err = rerun()
	return code, err == nil, err
}

// inside tells whether this process was started by Reexec. The variable alone
// would be believed by a process that left the namespace, so it is compared:
// once, because a later call could meet the main thread inside [NS.Do].
var inside = sync.OnceValue(func() bool {
	outer := os.Getenv(outerEnv)
	own, err := os.Readlink("/proc/self/ns/net")
	return outer != "" && err == nil && own != outer
})

// settle brings up loopback and tries what the package lives on. Not every
// refusal shows when the process starts: under AppArmor's restriction of user
// namespaces it may come up as a root without any capability.
//
// Loopback matters to package net as well, which finds out by binding ::1, once
// in a process's life, whether there is IPv6.
func settle() error {
	c, err := dialNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.setUp("lo"); err != nil {
		return forbidden(err)
	}
	ns, err := New()
	if err != nil {
		return err
	}
	return ns.Close()
}

func rerun() (int, error) {
	outer, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return 0, fmt.Errorf("testnet: find the network namespace (is /proc mounted?): %w", err)
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, outerEnv+"=")
	})
	attr := &os.ProcAttr{
		Env:   append(env, outerEnv+"="+outer),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys:   &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL},
	}
	if !privileged() {
		attr.Sys.Cloneflags |= unix.CLONE_NEWUSER
		attr.Sys.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		attr.Sys.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
		attr.Sys.GidMappingsEnableSetgroups = false
	}

	// The parent whose death Pdeathsig reports is this thread, not the process:
	// it must not be ended by the scheduler while the child lives.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	signals := make(chan os.Signal, 16)
	for _, s := range passedOn {
		// Notify would make nohup's SIGHUP deadly again, for the child too.
		if !signal.Ignored(s) {
			signal.Notify(signals, s)
		}
	}
	defer signal.Stop(signals)

	// The link finds the program under a path that its user cannot read, and
	// after the file was replaced.
	child, err := os.StartProcess("/proc/self/exe", os.Args, attr)
	if err != nil {
		return 0, forbidden(fmt.Errorf("testnet: start in new namespaces: %w", err))
	}
	ended := make(chan struct{})
	var passing sync.WaitGroup
	passing.Go(func() { passOn(signals, child, ended) })
	state, err := child.Wait()
	close(ended)
	passing.Wait()
	if err != nil {
		return 0, fmt.Errorf("testnet: wait for the process in new namespaces: %w", err)
	}
	if ws := state.Sys().(syscall.WaitStatus); ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return state.ExitCode(), nil
}

// passedOn are the signals that are meant for the program rather than for one
// process. SIGTSTP is not among them: typed at a terminal it stops both.
var passedOn = []os.Signal{
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2,
}

// passOn sends signals to the child until ended is closed. Those that a
// terminal makes reach the child without help, and a second SIGINT has a
// meaning of its own to many programs.
func passOn(signals <-chan os.Signal, child *os.Process, ended <-chan struct{}) {
	for {
		select {
		case s := <-signals:
			if (s == unix.SIGINT || s == unix.SIGQUIT) && inForeground() {
				continue
			}
			// An error means that the child is gone, which Wait reports.
			_ = child.Signal(s)
		case <-ended:
			return
		}
	}
}

// inForeground tells whether this process, and so its child, is in the group
// that the controlling terminal sends SIGINT and SIGQUIT to.
func inForeground() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	defer func() { _ = tty.Close() }()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// privileged tells whether the process can have network namespaces without a
// user namespace. Capabilities of another user than root do not count: they
// would be lost at execve.
func privileged() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	const need = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_ADMIN
	return os.Geteuid() == 0 && data[0].Effective&need == need
}

// forbidden turns the errors by which a system refuses namespaces into an
// ErrForbidden that says what to do, and leaves all others alone.
func forbidden(err error) error {
	for _, errno := range []error{unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS, unix.EINVAL} {
		if errors.Is(err, errno) {
			return fmt.Errorf("%w: %s (%w)", ErrForbidden, remedy(err, privileged(), sysctlValue), err)
		}
	}
	return err
}

// remedy says why namespaces are refused and what to do about it. The settings
// are asked first, because several of them answer with the same EPERM.
func remedy(err error, privileged bool, value func(name string) string) string {
	if !privileged {
		switch {
		case value("kernel.unprivileged_userns_clone") == "0":
			return "run as root, or allow user namespaces with 'sysctl kernel.unprivileged_userns_clone=1'"
		case value("user.max_user_namespaces") == "0":
			return "run as root, or allow user namespaces with 'sysctl user.max_user_namespaces=10000'"
		case value("kernel.apparmor_restrict_unprivileged_userns") == "1":
			return "run as root, or allow user namespaces with " +
				"'sysctl kernel.apparmor_restrict_unprivileged_userns=0'"
		}
	}
	switch {
	case value("user.max_net_namespaces") == "0":
		return "allow them with 'sysctl user.max_net_namespaces=10000'"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return "too many exist; end the processes that hold them, or raise the sysctls " +
			"user.max_user_namespaces and user.max_net_namespaces"
	case errors.Is(err, unix.EINVAL):
		return "use a kernel with CONFIG_NET_NS and, without root, CONFIG_USER_NS"
	}
	return "run as root, in a container with the capabilities SYS_ADMIN and NET_ADMIN " +
		"and a seccomp profile that allows unshare"
}

// sysctlValue reads a sysctl, "" where the kernel has none of that name.
func sysctlValue(name string) string {
	b, err := os.ReadFile(sysctlPath(name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// sysctlPath accepts both separators of sysctl(8): a name with slashes is taken
// as it is, so that an interface's name may hold a dot.
func sysctlPath(name string) string {
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	return "/proc/sys/" + name
}
