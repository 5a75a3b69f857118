//go:build linux

package nstest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// tb is a test that keeps the words that it fails with.
type tb struct {
	testing.TB
	fatal string
}

func (*tb) Helper()             {}
func (t *tb) Fatal(args ...any) { t.fatal = fmt.Sprint(args...) }

// This package's TestMain does not call Main, for there is none.
func TestRequireWithoutMain(t *testing.T) {
	var got tb
	nstest.Require(&got)
	if want := "TestMain does not call nstest.Main"; !strings.Contains(got.fatal, want) {
		t.Errorf("got %q, want %q", got.fatal, want)
	}
}
