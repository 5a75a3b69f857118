package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Packet is the first packet of a flow: what rules may read of it.
type Packet struct {
	Proto uint8 // TCP, UDP, UDP-Lite, DCCP or SCTP: one that has ports
	// With the zero Src the packet may come from anywhere, and from any port.
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16
}

// PacketOf returns the packet that a flow began with.
func PacketOf(f *conntrack.Flow) Packet {
	return Packet{f.Proto, f.Orig.Src, f.Orig.Dst, f.Orig.SrcPort, f.Orig.DstPort}
}

// Outcome is what the rules may do with a packet's destination. The zero Outcome
// is impossible.
type Outcome struct {
	// Any means that nothing can be said, for the reason Why; the rest is not set.
	Any bool
	Why string

	// Untranslated means that no rule may translate the packet.
	Untranslated bool
	// Dropped means that a rule may drop it: then there is no flow.
	Dropped bool
	// To are the translations to one address and port, in order, without doubles.
	To []netip.AddrPort
	// Ranges are the translations to any of several.
	Ranges []Range

	// By is a rule that translates; the zero Rule where none does.
	By Rule
}

// Range is a range of translations, both ends included.
type Range struct {
	// Min and Max are addresses of one family. They are not valid where the
	// translation is to any address of this host (redirect).
	Min, Max         netip.Addr
	MinPort, MaxPort uint16
}

// Rule names a rule, or with the Handle 0 a whole chain. The zero Rule is none.
type Rule struct {
	Family       Family
	Table, Chain string
	Handle       uint64 // as nft -a prints it
}

// String writes "ip nat DOCKER handle 12".
func (r Rule) String() string {
	if r.Chain == "" {
		return "no rule"
	}
	if r.Handle == 0 {
		return fmt.Sprintf("%s %s %s", r.Family, r.Table, r.Chain)
	}
	return fmt.Sprintf("%s %s %s handle %d", r.Family, r.Table, r.Chain, r.Handle)
}

// Translated tells whether a rule may translate the packet.
func (o *Outcome) Translated() bool { return len(o.To) > 0 || len(o.Ranges) > 0 }

// Allows tells whether a rule may have translated a packet to an address and
// port; local is what is known of that address.
func (o *Outcome) Allows(to netip.AddrPort, local Types) bool {
	if o.Any {
		return true
	}
	if _, ok := slices.BinarySearchFunc(o.To, to, netip.AddrPort.Compare); ok {
		return true
	}
	for _, r := range o.Ranges {
		if to.Port() < r.MinPort || to.Port() > r.MaxPort {
			continue
		}
		if !r.Min.IsValid() {
			if local&TypeLocal != 0 {
				return true
			}
		} else if r.Min.Compare(to.Addr()) <= 0 && to.Addr().Compare(r.Max) <= 0 {
			return true
		}
	}
	return false
}

// Single tells whether only one thing can happen.
func (o *Outcome) Single() bool {
	if o.Any || len(o.Ranges) > 0 {
		return false
	}
	n := len(o.To)
	if o.Untranslated {
		n++
	}
	if o.Dropped {
		n++
	}
	return n == 1
}

// String lists what is possible: "198.51.100.11:53, or untranslated".
func (o *Outcome) String() string {
	if o.Any {
		return "anything: " + o.Why
	}
	const most = 8
	var list []string
	for _, a := range o.To {
		list = append(list, a.String())
	}
	for _, r := range o.Ranges {
		list = append(list, r.String())
	}
	if n := len(list) - most; n > 0 {
		list = append(list[:most], fmt.Sprintf("%d more", n))
	}
	if o.Untranslated {
		list = append(list, "untranslated")
	}
	if o.Dropped {
		list = append(list, "dropped")
	}
	if n := len(list); n > 1 {
		list[n-1] = "or " + list[n-1]
	}
	return strings.Join(list, ", ")
}

// String writes a range as nft does, "192.0.2.1-192.0.2.9:1-100".
func (r Range) String() string {
	ports := fmt.Sprint(r.MinPort)
	if r.MinPort != r.MaxPort {
		ports = fmt.Sprint(r.MinPort, "-", r.MaxPort)
	}
	switch {
	case !r.Min.IsValid():
		return "this host:" + ports
	case r.Min == r.Max && r.Min.Is6():
		return "[" + r.Min.String() + "]:" + ports
	case r.Min == r.Max:
		return r.Min.String() + ":" + ports
	case r.Min.Is6():
		return "[" + r.Min.String() + "]-[" + r.Max.String() + "]:" + ports
	}
	return r.Min.String() + "-" + r.Max.String() + ":" + ports
}

// equal tells whether two outcomes are the same for a flow; By does not count.
func (o *Outcome) equal(p *Outcome) bool {
	return o.Any == p.Any && o.Untranslated == p.Untranslated && o.Dropped == p.Dropped &&
		slices.Equal(o.To, p.To) && slices.Equal(o.Ranges, p.Ranges)
}
