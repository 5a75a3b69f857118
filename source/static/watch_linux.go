package static

import (
	"io/fs"
	"syscall"
	"time"
)

// changeTime returns when the inode changed last, which no program can set.
func changeTime(info fs.FileInfo) time.Time {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(st.Ctim.Unix())
	}
	return time.Time{}
}
