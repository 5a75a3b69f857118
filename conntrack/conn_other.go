//go:build !linux

package conntrack

import (
	"context"
	"iter"
)

// Conn reaches the conntrack table, which only Linux has: Dial fails with
// ErrUnsupported on every other operating system.
type Conn struct{}

// Dial returns ErrUnsupported.
func Dial(Config) (*Conn, error) { return nil, &OpError{Op: "open", Err: ErrUnsupported} }

// Close does nothing.
func (*Conn) Close() error { return nil }

// Dump gives ErrUnsupported.
func (*Conn) Dump(context.Context, Filter) iter.Seq2[*Flow, error] {
	return func(yield func(*Flow, error) bool) { yield(nil, &OpError{Op: "dump", Err: ErrUnsupported}) }
}

// Stats returns nothing.
func (*Conn) Stats() DumpStats { return DumpStats{} }

// List returns ErrUnsupported.
func (*Conn) List(context.Context, Filter) ([]Flow, error) {
	return nil, &OpError{Op: "dump", Err: ErrUnsupported}
}

// Delete returns ErrUnsupported.
func (*Conn) Delete(context.Context, ...Flow) (DeleteResult, error) {
	return DeleteResult{}, &OpError{Op: "delete", Err: ErrUnsupported}
}

// Create returns ErrUnsupported.
func (*Conn) Create(context.Context, Flow) error {
	return &OpError{Op: "create", Err: ErrUnsupported}
}

// CreateExpected returns ErrUnsupported.
func (*Conn) CreateExpected(context.Context, Flow, Flow) error {
	return &OpError{Op: "create", Err: ErrUnsupported}
}

// Get returns ErrUnsupported.
func (*Conn) Get(context.Context, Flow) (Flow, bool, error) {
	return Flow{}, false, &OpError{Op: "get", Err: ErrUnsupported}
}

// Count returns ErrUnsupported.
func (*Conn) Count(context.Context) (int, error) {
	return 0, &OpError{Op: "count", Err: ErrUnsupported}
}

// Max returns ErrUnsupported.
func (*Conn) Max(context.Context) (int, error) {
	return 0, &OpError{Op: "count", Err: ErrUnsupported}
}

// Buckets returns ErrUnsupported.
func (*Conn) Buckets() (int, error) { return 0, &OpError{Op: "count", Err: ErrUnsupported} }

// Probe returns ErrUnsupported.
func (*Conn) Probe(context.Context, ...Family) (Features, error) {
	return Features{}, &OpError{Op: "probe", Err: ErrUnsupported}
}
