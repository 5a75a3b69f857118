package sdnotify

import "golang.org/x/sys/unix"

// monotonic returns CLOCK_MONOTONIC in microseconds, as the manager reads it.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return ts.Nano() / 1000
}
