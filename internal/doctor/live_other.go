//go:build !linux

package doctor

import (
	"context"
	"errors"
	"fmt"
)

// Host returns an error that is errors.ErrUnsupported.
func Host(context.Context, string) (*Report, error) {
	return nil, fmt.Errorf("doctor examines a Linux host: %w", errors.ErrUnsupported)
}
