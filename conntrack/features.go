package conntrack

import "fmt"

// Support is what a probe found. The zero value, Unknown, is what an
// inconclusive probe leaves; it is used like NotHonoured.
type Support uint8

// A filter that is ignored returns too much, one that lies hides flows that
// match. Neither is used, so that a lack costs time and never a flow.
const (
	Unknown Support = iota
	Honoured
	NotHonoured
)

// String returns "yes", "no" or "unknown".
func (s Support) String() string {
	switch s {
	case Honoured:
		return "yes"
	case NotHonoured:
		return "no"
	}
	return "unknown"
}

// MarshalText makes Support readable in JSON.
func (s Support) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// FamilyFeatures are the parts of a filter that the kernel honours for one
// family (CTA_FILTER, since about Linux 5.8).
type FamilyFeatures struct {
	Proto Support `json:"protocol"`
	// Addr is for the original destination and the reply source alike. Most
	// kernels compare IPv6 addresses the wrong way round and return the flows
	// that do not match (ctnetlink_filter_match_tuple).
	Addr Support `json:"address"`
	// Ports is for TCP and UDP.
	Ports Support `json:"ports"`
	// SCTPPorts is apart, since ctnetlink_filter_match_tuple compares ports for
	// TCP and UDP alone.
	SCTPPorts Support `json:"sctpPorts"`
}

// Features are the filters that this kernel really honours. A zero Features
// makes every dump return the whole family and filter it in this process.
type Features struct {
	V4     FamilyFeatures `json:"ipv4"`
	V6     FamilyFeatures `json:"ipv6"`
	Status Support        `json:"status"` // CTA_STATUS with a mask, since about 5.15
	Zone   Support        `json:"zone"`   // CTA_ZONE, since 6.8
}

// trusting is a Features in which every criterion is told to the kernel.
func trusting() (all Features) {
	ff := FamilyFeatures{Honoured, Honoured, Honoured, Honoured}
	return Features{V4: ff, V6: ff, Status: Honoured, Zone: Honoured}
}

func (f *Features) family(fam Family) *FamilyFeatures {
	if fam == IPv6 {
		return &f.V6
	}
	return &f.V4
}

func (f *FamilyFeatures) ports(proto uint8) Support {
	switch proto {
	case TCP, UDP:
		return f.Ports
	case SCTP:
		return f.SCTPPorts
	}
	return NotHonoured
}

// Narrow tells whether the kernel applies every field that a filter sets, so
// that a dump copies little more than what is wanted.
func (f *Features) Narrow(q *Filter) bool {
	ff := f.family(q.Family)
	byProto := q.Family != 0 && ff.Proto == Honoured
	byAddr := q.Family != 0 && ff.Addr == Honoured
	ports := q.OrigDstPort != 0 || q.ReplySrcPort != 0
	switch {
	case q.Proto != 0 && !byProto,
		(q.OrigDst.IsValid() || q.ReplySrc.IsValid()) && !byAddr,
		ports && (!byProto || ff.ports(q.Proto) != Honoured),
		q.Set|q.Clear != 0 && f.Status != Honoured,
		q.Zone != nil && f.Zone != Honoured:
		return false
	}
	return true
}

// String is one line for people.
func (f Features) String() string {
	return fmt.Sprintf("ipv4 protocol=%s address=%s ports=%s; ipv6 protocol=%s address=%s ports=%s; "+
		"sctp ports=%s status=%s zone=%s",
		f.V4.Proto, f.V4.Addr, f.V4.Ports, f.V6.Proto, f.V6.Addr, f.V6.Ports,
		f.V4.SCTPPorts, f.Status, f.Zone)
}
