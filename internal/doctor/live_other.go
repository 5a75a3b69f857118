//go:build !linux

package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

// Host returns an error that is errors.ErrUnsupported.
func Host(context.Context, string) (*Report, error) {
	return nil, fmt.Errorf("doctor examines a Linux host: %w", errors.ErrUnsupported)
}

// Silent knows of nobody.
func Silent(context.Context, string, []netip.Addr) (map[netip.Addr]string, error) { return nil, nil }
