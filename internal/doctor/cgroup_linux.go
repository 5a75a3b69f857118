package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socketHooks are the places where a BPF program can write another destination
// into what a socket connects or sends to (enum bpf_attach_type).
var socketHooks = []struct {
	name string
	typ  uint32
}{
	{"connect4", unix.BPF_CGROUP_INET4_CONNECT},
	{"connect6", unix.BPF_CGROUP_INET6_CONNECT},
	{"sendmsg4", unix.BPF_CGROUP_UDP4_SENDMSG},
	{"sendmsg6", unix.BPF_CGROUP_UDP6_SENDMSG},
}

// socketPrograms returns the hooks of a cgroup that have programs, those that it
// inherits included.
func socketPrograms(cgroup string) (hooks []string, err error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for _, h := range socketHooks {
		n, err := countPrograms(dir, h.typ)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS): // without CONFIG_CGROUP_BPF
			return nil, fmt.Errorf("this kernel does not tell of BPF programs of cgroups (%w)", err)
		case errors.Is(err, fs.ErrPermission):
			return nil, fmt.Errorf("asking for BPF programs of cgroups: %w", err)
		case err != nil:
			return nil, err
		case n > 0:
			hooks = append(hooks, h.name)
		}
	}
	return hooks, nil
}

// countPrograms asks for the number of programs alone (__cgroup_bpf_query). It
// takes CAP_NET_ADMIN, in the first user namespace.
func countPrograms(cgroup *os.File, typ uint32) (n uint32, err error) {
	var attr struct { // the part of union bpf_attr that is named query
		fd, typ, flags, attachFlags uint32
		ids                         uint64
		count, pad                  uint32
	}
	attr.fd, attr.typ, attr.flags = uint32(cgroup.Fd()), typ, unix.BPF_F_QUERY_EFFECTIVE
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(cgroup)
	if errno != 0 {
		return 0, errno
	}
	return attr.count, nil
}
