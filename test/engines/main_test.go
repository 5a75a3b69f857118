//go:build engines && linux

// Package engines proves the judgement by the kernel's NAT rules beside those who write them: Docker,
// Podman and a router's administrator; README.md tells how.
package engines

import (
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func TestEngines(t *testing.T) {
	r := &report{}
	t.Run("docker", func(t *testing.T) { docker(t, r, true) })
	t.Run("docker-without-proxy", func(t *testing.T) { docker(t, r, false) })
	for _, backend := range []string{"netavark", "cni"} {
		t.Run("podman-"+backend, func(t *testing.T) { podman(t, r, backend) })
	}
	for _, fw := range firewalls {
		t.Run("router-"+fw.name, func(t *testing.T) { router(t, r, fw) })
	}
	r.write(t)
}
