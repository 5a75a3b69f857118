package conntrack

import "net/netip"

// Filter selects flows. A zero field selects every value, so the zero Filter
// selects the whole table.
type Filter struct {
	// Family lets the kernel skip the other one. It must be set for the
	// kernel to apply the fields from Proto to ReplySrcPort; without it they
	// are applied here, after a dump of the whole table.
	Family Family
	Proto  uint8

	OrigDst      netip.Addr
	OrigDstPort  uint16
	ReplySrc     netip.Addr
	ReplySrcPort uint16

	// Set and Clear are status bits that must be 1 and 0. A bit in both
	// selects nothing.
	Set, Clear Status

	// Zone selects the flows of one zone, whichever direction it holds for;
	// nil selects all zones.
	Zone *uint16
}

// Match tells whether a flow satisfies the filter.
func (f *Filter) Match(fl *Flow) bool {
	switch {
	case f.Family != 0 && fl.Family != f.Family,
		f.Proto != 0 && fl.Proto != f.Proto,
		f.OrigDst.IsValid() && fl.Orig.Dst != f.OrigDst,
		f.OrigDstPort != 0 && fl.Orig.DstPort != f.OrigDstPort,
		f.ReplySrc.IsValid() && fl.Reply.Src != f.ReplySrc,
		f.ReplySrcPort != 0 && fl.Reply.SrcPort != f.ReplySrcPort,
		fl.Status&f.Set != f.Set,
		fl.Status&f.Clear != 0,
		f.Zone != nil && fl.Zone != *f.Zone:
		return false
	}
	return true
}
