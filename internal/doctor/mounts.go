package doctor

import (
	"bytes"
	"strconv"
	"strings"
)

// mount is a line of mountinfo.
type mount struct{ root, path string }

// mountsOf returns the mounts of one file system in mountinfo, in order.
func mountsOf(fstype string, mountinfo []byte) (list []mount) {
	for line := range bytes.Lines(mountinfo) {
		// ID, parent, device, root, path, options, optional fields, "-", type, ...
		// (show_mountinfo)
		place, about, ok := strings.Cut(string(line), " - ")
		f := strings.Fields(place)
		if typ, _, _ := strings.Cut(about, " "); ok && typ == fstype && len(f) >= 6 {
			list = append(list, mount{unescape(f[3]), unescape(f[4])})
		}
	}
	return list
}

// unescape undoes mangle_path, which writes blanks and the like as \ooo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
