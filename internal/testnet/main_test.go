//go:build linux

package testnet_test

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// helperEnv names the part that a process started by these tests plays.
const helperEnv = "TESTNET_HELPER"

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		helpers[name]()
		os.Exit(98) // never on to the tests, which would start helpers
	}
	nstest.Main(m)
}

// helpers end the process, or change it and start it over as another helper or,
// without the variable, with the tests.
var helpers = map[string]func(){
	// Where the program runs, and what it was given.
	"report": func() {
		reexec()
		own := must(os.Readlink("/proc/self/ns/net"))
		fmt.Println("uid", os.Getuid(), "moved", own != os.Getenv(testnet.OuterEnv), os.Args[1:])
		_ = must(io.Copy(os.Stdout, os.Stdin))
		_ = must(io.Copy(os.Stdout, os.NewFile(3, "extra")))
		os.Exit(42)
	},
	// A signal that is caught, and how many more follow it.
	"signal": func() {
		reexec()
		ch := make(chan os.Signal, 16)
		signal.Notify(ch, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2)
		fmt.Println("ready")
		fmt.Println(<-ch)
		time.Sleep(200 * time.Millisecond)
		os.Exit(len(ch))
	},
	// A signal that is not caught.
	"wait": func() {
		reexec()
		fmt.Println("ready, SIGHUP ignored:", signal.Ignored(unix.SIGHUP))
		time.Sleep(time.Minute)
	},
	// Started by nohup(1).
	"nohup": func() {
		signal.Ignore(unix.SIGHUP)
		startOver(helperEnv + "=wait")
	},
	// The limit of this user namespace's own.
	"no-user-namespaces": func() {
		check(os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
		dropCapabilities()
		startOver()
	},
	// As AppArmor does it: namespaces, but no capabilities in them.
	"no-capabilities": func() {
		check(os.Setenv(testnet.OuterEnv, "net:[1]"))
		dropCapabilities()
		startOver()
	},
	// As a container's seccomp profile does it.
	"seccomp": func() {
		forbidNamespaces()
		startOver()
	},
	// The kernel's own count of namespaces is what its limit works by.
	"namespace-limit": func() {
		check(os.WriteFile("/proc/sys/user/max_net_namespaces", []byte("8"), 0))
		for range 20 {
			ns, err := testnet.New()
			for start := time.Now(); err != nil; ns, err = testnet.New() {
				if time.Since(start) > 20*time.Second {
					check(err)
				}
				time.Sleep(10 * time.Millisecond) // cleanup_net works in the background
			}
			check(ns.Veth("a", ns, "b"))
			check(ns.SetNAT(testnet.Forward{
				Proto:    unix.IPPROTO_UDP,
				Dst:      netip.MustParseAddrPort("192.0.2.1:53"),
				Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.1:53")},
			}))
			check(ns.Close())
		}
		os.Exit(0)
	},
}

func reexec() {
	code, done, err := testnet.Reexec()
	check(err)
	if done {
		os.Exit(code)
	}
}

// startOver runs the program again in this process, as no helper unless env says
// otherwise.
func startOver(env ...string) {
	env = append(env, slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, helperEnv+"=")
	})...)
	check(syscall.Exec("/proc/self/exe", os.Args, env))
}

// dropCapabilities makes the next execve on this thread leave root without any.
func dropCapabilities() {
	runtime.LockOSThread()
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		check(unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0))
	}
}

// forbidNamespaces makes unshare, and clone with the flags for namespaces, fail
// with EPERM from now on.
func forbidNamespaces() {
	runtime.LockOSThread()
	const nr, arg0 = 0, 16 // offsets in struct seccomp_data, little endian
	const flags = unix.CLONE_NEWUSER | unix.CLONE_NEWNET
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_UNSHARE, Jt: 3},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_CLONE, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: arg0},
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: flags, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	check(unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0))
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}
