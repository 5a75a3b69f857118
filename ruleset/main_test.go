//go:build linux

package ruleset

import (
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }
