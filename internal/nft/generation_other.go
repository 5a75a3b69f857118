//go:build !linux

package nft

import (
	"errors"
	"fmt"
)

var errUnsupported = fmt.Errorf("nftables needs Linux: %w", errors.ErrUnsupported)

// Generations asks for the generation of an nftables ruleset, which only Linux
// has: Open fails on every other operating system.
type Generations struct{}

// Open returns an error that is errors.ErrUnsupported.
func Open(string) (*Generations, error) { return nil, errUnsupported }

// Close does nothing.
func (*Generations) Close() error { return nil }

// Get returns an error that is errors.ErrUnsupported.
func (*Generations) Get() (uint32, bool, error) { return 0, false, errUnsupported }

// Exist returns an error that is errors.ErrUnsupported.
func Exist(string, ...Object) ([]bool, error) { return nil, errUnsupported }

// LegacyNAT returns an error that is errors.ErrUnsupported.
func LegacyNAT(string) (bool, error) { return false, errUnsupported }

// IPVS returns an error that is errors.ErrUnsupported.
func IPVS(string) (bool, error) { return false, errUnsupported }

// IPVSHolds returns an error that is errors.ErrUnsupported.
func IPVSHolds(string) (used, holds bool, err error) { return false, false, errUnsupported }
