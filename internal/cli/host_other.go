//go:build !linux

package cli

import (
	"net/netip"

	"github.com/flowsweep/flowsweep/conntrack"
)

func hostAddresses(namespace string) ([]netip.Addr, error) {
	if namespace != "" {
		return nil, conntrack.ErrUnsupported
	}
	return interfaceAddresses()
}
