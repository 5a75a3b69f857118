//go:build !linux

package ruleset

import (
	"errors"
	"fmt"
)

var errUnsupported = fmt.Errorf("nftables needs Linux: %w", errors.ErrUnsupported)

// Conn reads the rules of a network namespace, which only Linux has: Open fails
// on every other operating system.
type Conn struct {
	limits limits
	large  tooMuch
	effort *effort
}

// Open returns an error that is errors.ErrUnsupported.
func Open(string) (*Conn, error) { return nil, errUnsupported }

// Close does nothing.
func (*Conn) Close() error { return nil }

// Generation returns an error that is errors.ErrUnsupported.
func (*Conn) Generation() (uint32, error) { return 0, errUnsupported }

func (*Conn) barrier(uint32) error { return errUnsupported }

func (*Conn) exchange([]byte, func(uint16, Family, []byte) error) (bool, error) {
	return false, errUnsupported
}
