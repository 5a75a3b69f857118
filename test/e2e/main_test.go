//go:build e2e && linux

// Package e2e proves flowsweep against etcd, kube-apiserver and kube-proxy; README.md tells how.
package e2e

import (
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }
