//go:build !linux

package sdnotify

// monotonic is for systemd, which is on Linux only.
func monotonic() int64 { return 0 }
