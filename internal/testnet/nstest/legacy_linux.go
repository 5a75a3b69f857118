package nstest

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
)

// LegacyNAT makes the nat table of iptables-legacy in a namespace, empty, as
// looking at it with iptables-legacy does (xt_find_table_lock), and skips the test
// where the kernel has none.
func LegacyNAT(tb testing.TB, ns *testnet.NS) {
	tb.Helper()
	const getInfo = 64 // IPT_SO_GET_INFO
	info := [84]byte{} // struct ipt_getinfo, which begins with the table's name
	copy(info[:], "nat")
	size := uint32(len(info))
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing was written
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, getInfo,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		tb.Skipf("no nat table of iptables-legacy: %v", err)
	}
}
