package cli

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/flowsweep/flowsweep/internal/netns"
)

// hostAddresses returns the addresses of a network namespace's interfaces,
// without loopback.
func hostAddresses(namespace string) (list []netip.Addr, err error) {
	if namespace == "" {
		return interfaceAddresses()
	}
	f, err := os.Open(namespace)
	if err != nil {
		return nil, &exitError{exitFailed, fmt.Errorf("--netns: %w", err)}
	}
	defer f.Close()
	err = netns.Do(f, func() (err error) {
		list, err = interfaceAddresses()
		return err
	})
	if err != nil {
		return nil, &exitError{exitFailed, fmt.Errorf("--netns: %w", err)}
	}
	return list, nil
}
