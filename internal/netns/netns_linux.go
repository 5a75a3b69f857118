// Package netns runs code in another network namespace.
package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Do runs f on a thread that is in the namespace ns, an open namespace file.
// Sockets that f opens stay in that namespace; goroutines that it starts do not
// run there. Entering needs CAP_SYS_ADMIN over the namespace.
func Do(ns *os.File, f func() error) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s (needs CAP_SYS_ADMIN): %w", ns.Name(), err)
	}
	ferr := f()
	if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err == nil {
		runtime.UnlockOSThread()
	} // else the thread stays locked, and ends with its goroutine
	return ferr
}
