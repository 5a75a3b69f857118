//go:build linux

package nstest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak" //nolint:depguard // this package is part of tests, though in no _test.go file

	"github.com/flowsweep/flowsweep/internal/testnet"
)

// RequireEnv is the environment variable that, set to 1, makes tests fail that
// would be skipped because the system forbids namespaces. CI sets it.
const RequireEnv = "FLOWSWEEP_REQUIRE_KERNEL"

// The outcome of Main.
var (
	called  bool
	refused error
)

// Main runs a package's tests in a network namespace of their own
// ([testnet.Reexec]), and ends the process. It fails if goroutines are left
// over; the options are for that. Where the system forbids namespaces, the
// tests run outside, so that only those that need the kernel are missed.
func Main(m goleak.TestingM, opts ...goleak.Option) {
	code, done, err := testnet.Reexec()
	switch {
	case done:
		os.Exit(code)
	case err != nil && !errors.Is(err, testnet.ErrForbidden):
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	called, refused = true, err
	goleak.VerifyTestMain(m, opts...)
}

// Require skips a test, and says why, where the system forbids namespaces. With
// [RequireEnv] set to 1 the test fails instead.
func Require(tb testing.TB) {
	tb.Helper()
	switch {
	case !called:
		tb.Fatal("nstest: the package's TestMain does not call nstest.Main")
	case refused == nil:
	case os.Getenv(RequireEnv) == "1":
		tb.Fatalf("%s=1, but %v", RequireEnv, refused)
	default:
		tb.Skip(refused)
	}
}

// New returns a namespace that is closed when the test ends; see [Require].
func New(tb testing.TB) *testnet.NS {
	tb.Helper()
	Require(tb)
	ns, err := testnet.New()
	return keep(tb, ns, err)
}

// Star returns a star that is closed when the test ends; see [Require].
func Star(tb testing.TB, leaves ...testnet.Leaf) *testnet.Star {
	tb.Helper()
	Require(tb)
	s, err := testnet.NewStar(leaves...)
	return keep(tb, s, err)
}

// Echo returns a server that is closed when the test ends.
func Echo(tb testing.TB, ns *testnet.NS, addr netip.AddrPort) *testnet.Server {
	tb.Helper()
	s, err := testnet.Echo(ns, addr)
	return keep(tb, s, err)
}

// Send returns a sender that is closed when the test ends.
func Send(tb testing.TB, ns *testnet.NS, from, to netip.AddrPort, interval time.Duration) *testnet.Sender {
	tb.Helper()
	s, err := testnet.Send(ns, from, to, interval)
	return keep(tb, s, err)
}

// LockFile returns the environment variable by which iptables-legacy takes a lock
// file of the test's own, since that of the host is root's.
func LockFile(tb testing.TB) string {
	tb.Helper()
	return "XTABLES_LOCKFILE=" + filepath.Join(tb.TempDir(), "lock")
}

// keep fails the test on an error, and otherwise closes c when the test ends,
// which does no harm where the test has closed it.
func keep[C interface{ Close() error }](tb testing.TB, c C, err error) C {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Error(err)
		}
	})
	return c
}
