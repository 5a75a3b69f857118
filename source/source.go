// Package source is how the agent learns what a host forwards to: a source
// turns its world (files, Kubernetes, ...) into frontends and hands them to a
// Sink. A new source is a package of its own with one type.
package source

import (
	"context"
	"net/netip"

	"github.com/flowsweep/flowsweep/frontend"
)

// Source feeds a Sink until its context ends.
type Source interface {
	// Name is a short constant word for logs, metrics and status: "static".
	Name() string
	// Run delivers what the source knows, first with Replace, and then each
	// change. It handles its own faults (reporting them with Fault, trying again
	// with back-off) and returns only when ctx ends, or with an error that no
	// retry can mend.
	Run(ctx context.Context, sink Sink) error
}

// Sink takes what one source knows. Its methods return at once, whatever the
// kernel does; they may be called from one goroutine at a time. Slices and maps
// belong to the sink from then on.
type Sink interface {
	// Replace says that units are all that the source knows: its first full
	// list, which makes it complete, and each list after a reconnect or reload.
	Replace(units map[string][]frontend.Frontend)
	// Set replaces what one unit contributes; no frontends remove it.
	Set(unit string, fs []frontend.Frontend)
	// Host replaces what the source knows of this host's addresses. A source
	// that knows only those is complete with it.
	Host(h Host)
	// ServiceRanges replaces the ranges in which only services have addresses, as
	// frontend.Table.SetServiceRanges takes them. They come before the list that
	// is to be judged by them.
	ServiceRanges(ranges []netip.Prefix)
	// Fault tells what keeps the source from being up to date; nil that it is up
	// to date again. What it delivered before stays in force.
	Fault(err error)
}

// Host is a source's part of frontend.Host.
type Host struct {
	// Listed are addresses on which the proxy certainly serves node ports.
	Listed []netip.Addr
	// Other are further addresses of this host.
	Other []netip.Addr
	// Pods are the ranges of the pods on this host.
	Pods []netip.Prefix
	// HostPortsUnknown says that the source does not tell of host ports that there
	// may be.
	HostPortsUnknown bool
}
