//go:build !linux

package ruleset

// NetHost is the [Host] that a network namespace's own addresses and routes make,
// which only Linux has: OpenHost fails on every other operating system.
type NetHost struct{ Unknown }

// OpenHost returns an error that is errors.ErrUnsupported.
func OpenHost(string) (*NetHost, error) { return nil, errUnsupported }

// Close does nothing.
func (*NetHost) Close() error { return nil }
