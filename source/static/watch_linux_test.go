package static

import (
	"context"
	"os"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestWatchUnreadable runs the Watcher on a thread that has no capability to read
// what the mode forbids, so that root sees what others see.
func TestWatchUnreadable(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := &watched{T: t, dir: dir, sink: &sink{t: t, dir: dir}}
		w.src = Watch([]string{w.path("d")}, "")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			runtime.LockOSThread() // for good: the thread ends with the goroutine
			if err := dropOverride(); err != nil {
				ended <- err
				return
			}
			time.Sleep(250 * time.Millisecond)
			ended <- w.src.Run(ctx, w.sink)
		}()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}()
		chmod := func(name string, mode os.FileMode) {
			t.Helper()
			w.must(os.Chmod(w.path(name), mode))
		}

		w.mkdir("d")
		w.write("d/a.yaml", list("a"))
		w.write("d/b.yaml", list("b"))
		w.polls(2, "replace a b")

		chmod("d/a.yaml", 0)
		w.polls(2, "fault d/a.yaml: permission denied")
		w.remove("d/b.yaml")
		w.polls(5)
		chmod("d/a.yaml", 0o600)
		w.polls(2, "replace a", "well")

		chmod("d", 0o300) // it cannot be listed
		w.polls(2, "fault d: permission denied")
		chmod("d", 0o600) // its files cannot be reached
		w.polls(2, "fault d/a.yaml: permission denied")
		chmod("d", 0o700)
		w.polls(2, "well")
	})
}

// dropOverride takes from the thread what lets root read everything.
func dropOverride() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return err
	}
	caps[0].Effective &^= 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	return unix.Capset(&hdr, &caps[0])
}

func TestWatchFIFO(t *testing.T) {
	watch(t, []string{"a.yaml"}, "", func(w *watched) {
		w.polls(2, "fault a.yaml"+notThere)
		w.must(unix.Mkfifo(w.path("a.yaml"), 0o600))
		w.polls(2, "fault a.yaml: is not a regular file")
	})
}

// TestWatchTimeSetBack: a file of the same size whose time of modification is
// what it was differs by the inode's change.
func TestWatchTimeSetBack(t *testing.T) {
	watch(t, []string{"a.yaml"}, "", func(w *watched) {
		at := time.Unix(1000, 0)
		w.write("a.yaml", list("a"))
		w.must(os.Chtimes(w.path("a.yaml"), at, at))
		w.polls(2, "replace a")
		before, err := os.Stat(w.path("a.yaml"))
		w.must(err)
		for { // the file system's clock may be as coarse as the kernel's tick
			w.must(os.WriteFile(w.path("a.yaml"), []byte(list("b")), 0o600))
			w.must(os.Chtimes(w.path("a.yaml"), at, at))
			now, err := os.Stat(w.path("a.yaml"))
			w.must(err)
			if !changeTime(now).Equal(changeTime(before)) {
				break
			}
		}
		w.polls(2, "replace b")
	})
}
