//go:build !linux

package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/flowsweep/flowsweep/source"
)

// Run returns an error that is errors.ErrUnsupported.
func (*Source) Run(context.Context, source.Sink) error {
	return fmt.Errorf("following this host's addresses needs Linux: %w", errors.ErrUnsupported)
}
