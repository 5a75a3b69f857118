package frontend

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Kind says what makes an address and port a frontend. It appears in reports
// and decides nothing but what the comments here say.
type Kind uint8

// The kinds of frontend.
const (
	Static         Kind = iota // a FrontendList
	ClusterIP                  // a Service's cluster address
	ExternalIP                 // a Service's external address
	LoadBalancerIP             // a Service's load-balancer address (ipMode VIP)
	NodePort                   // a Service's port on the host's own addresses
	HostPort                   // a Pod's port on the host's own addresses
	Rule                       // whatever a NAT rule translates (package ruleset)
	Kinds                      // how many there are
)

var kindNames = [...]string{"static", "cluster-ip", "external-ip", "load-balancer-ip", "node-port", "host-port", "rule"}

// String returns the kind's word in reports.
func (k Kind) String() string { return kindNames[k] }

// ParseKind returns the kind that a word of String stands for.
func ParseKind(word string) (Kind, bool) {
	i := slices.Index(kindNames[:], word)
	return Kind(max(i, 0)), i >= 0
}

// Ports is an inclusive range; First equals Last for a single port.
type Ports struct{ First, Last uint16 }

// Port returns the range of one port.
func Port(p uint16) Ports { return Ports{p, p} }

// Single tells whether the range is one port.
func (p Ports) Single() bool { return p.First == p.Last }

// Contains tells whether a port lies in the range.
func (p Ports) Contains(port uint16) bool { return p.First <= port && port <= p.Last }

// Frontend is what one owner contributes to one address, protocol and port
// range: where clients send, and where their flows may go.
type Frontend struct {
	// Owner is shown to people: "default/dns:udp" for a port of a Service,
	// "default/pod" for a host port, the item's name for a static frontend.
	Owner string
	Kind  Kind
	Proto uint8 // conntrack.UDP, TCP or SCTP

	// Addr is the address that clients send to. The zero Addr stands for every
	// address of this host of the Family given, loopback aside.
	Addr   netip.Addr
	Family conntrack.Family
	Ports  Ports

	// Valid are the backends that may keep the flows they have.
	Valid Backends
	// Usable is how many backends the proxy would choose from for a new flow.
	Usable int
	// Inside is that for what this host and its own pods send, where it is another
	// number: a traffic policy of which they are exempt.
	Inside int
	// Balanced marks an address that a load balancer's pod may serve too, by a host
	// port where the address is this host's (k3s's svclb). LoadBalancerIPs all are.
	Balanced bool
	// Sweep, if set, is what may be deleted of its stale flows, instead of what
	// the policy says of its protocol. Where several frontends match a flow, the
	// one that allows least counts.
	Sweep *Sweep

	// Foreign marks a frontend that another proxy serves. It is no frontend of
	// ours: it only keeps its address from being taken for a vanished one, and
	// where one of ours has the same address and port, its backends stay valid.
	Foreign bool
}

// Backends is an immutable set of backends. The zero value is empty. Frontends
// of one Service port share one set.
type Backends struct{ sorted []netip.AddrPort }

// NewBackends returns the set of the given backends. One with port 0 stands for
// the port that the client sent to (a range forwarded one to one). Backends
// without a valid address are left out.
func NewBackends(list ...netip.AddrPort) Backends {
	s := make([]netip.AddrPort, 0, len(list))
	for _, b := range list {
		if b.Addr().IsValid() {
			s = append(s, b)
		}
	}
	slices.SortFunc(s, netip.AddrPort.Compare)
	return Backends{slices.Clip(slices.Compact(s))}
}

// Len returns the number of backends.
func (b Backends) Len() int { return len(b.sorted) }

// All returns the backends in order. The caller must not modify it.
func (b Backends) All() []netip.AddrPort { return b.sorted }

// Contains tells whether a flow sent to port dport may go to the backend to.
// It takes O(log n) for n backends and allocates nothing.
func (b Backends) Contains(to netip.AddrPort, dport uint16) bool {
	return b.has(to) || to.Port() == dport && b.has(netip.AddrPortFrom(to.Addr(), 0))
}

func (b Backends) has(x netip.AddrPort) bool {
	// Looking at each is faster for the few that most frontends have.
	if len(b.sorted) <= 16 {
		return slices.Contains(b.sorted, x)
	}
	_, found := slices.BinarySearchFunc(b.sorted, x, netip.AddrPort.Compare)
	return found
}

// Host is what is known of this host's own addresses.
type Host struct {
	// Listed are the addresses of the Node object, in the order in which a proxy
	// prefers them, or those given by the user where there is none. Without
	// NodePorts the proxy certainly serves node ports on the first of each family:
	// kube-proxy's mode nftables does on no other.
	Listed []netip.Addr
	// Served are those on which the user says that it does.
	Served []netip.Addr
	// Other are further addresses of this host (a bridge's, say), on which a
	// proxy may or may not serve node ports. Loopback addresses count in neither:
	// on those of IPv4 node ports may be served wherever NodePorts allow it.
	Other []netip.Addr
	// Pods are the ranges of the pods on this host.
	Pods []netip.Prefix
	// HostPortsUnknown says that there may be host ports of which no frontend tells.
	HostPortsUnknown bool
	// NodePorts are the proxy's node-port address ranges. Where any is given,
	// node ports are served on the host's addresses inside the ranges of their
	// family, and on all of them for a family that no range is given for. Some of
	// them may be words ([Primary], [Localhost], [Everywhere]).
	NodePorts []netip.Prefix
}

// The words that kube-proxy 1.37 has for node-port address ranges
// (expandNodePortAddressKeywords of cmd/kube-proxy/app). They are no prefixes.
var (
	// Primary is the first listed address of each family; of a family that has
	// none it says nothing.
	Primary netip.Prefix
	// Localhost is loopback, of both families.
	Localhost = netip.PrefixFrom(netip.IPv6Loopback(), -1)
	// Everywhere is all addresses, of both families.
	Everywhere = netip.PrefixFrom(netip.IPv6Unspecified(), -1)
)

var nodePortWords = []struct {
	word string
	is   netip.Prefix
}{{"primary", Primary}, {"localhost", Localhost}, {"all", Everywhere}}

// ParseNodePorts reads a node-port address range as kube-proxy does: a CIDR, whose
// bits beyond its length do not matter, or a word.
func ParseNodePorts(s string) (netip.Prefix, error) {
	for _, w := range nodePortWords {
		if s == w.word {
			return w.is, nil
		}
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return p, fmt.Errorf("%q is neither a CIDR such as 192.0.2.0/24 nor primary, localhost or all", s)
	}
	return p.Masked(), nil
}

// NodePortsWord returns the word that a range is, "" for a CIDR.
func NodePortsWord(p netip.Prefix) string {
	for _, w := range nodePortWords {
		if p == w.is {
			return w.word
		}
	}
	return ""
}

// ranges returns the node-port address ranges of a family. Where known is false
// there may be one more: which address is the primary one nobody has said.
func (h *Host) ranges(f conntrack.Family) (list []netip.Prefix, known bool) {
	known = true
	for _, p := range h.NodePorts {
		var ps []netip.Prefix
		switch p {
		case Primary:
			if len(h.Listed) == 0 {
				known = false
			} else if a := h.primary(f); a.IsValid() {
				ps = []netip.Prefix{netip.PrefixFrom(a, a.BitLen())}
			}
		case Localhost:
			ps = []netip.Prefix{loopback4, loopback6}
		case Everywhere:
			ps = []netip.Prefix{everywhere4, everywhere6}
		default:
			ps = []netip.Prefix{p}
		}
		for _, p := range ps {
			if conntrack.FamilyOf(p.Addr()) == f {
				list = append(list, p)
			}
		}
	}
	return list, known
}

var (
	loopback4   = netip.MustParsePrefix("127.0.0.0/8")
	loopback6   = netip.MustParsePrefix("::1/128")
	everywhere4 = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	everywhere6 = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
)

// serves tells whether a proxy serves node ports on one of the host's addresses.
func (h *Host) serves(a netip.Addr) certainty {
	if len(h.NodePorts) == 0 {
		if a == h.primary(conntrack.FamilyOf(a)) || slices.Contains(h.Served, a) {
			return certain
		}
		return uncertain
	}
	list, known := h.ranges(conntrack.FamilyOf(a))
	switch {
	case slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) }):
		return certain
	case !known:
		return uncertain
	case len(list) == 0:
		return certain // NewNodePortAddresses of pkg/proxy/util: all of the family
	}
	return unserved
}

// loopback returns the ranges of IPv4 in which there may be node ports on loopback.
// kube-proxy serves them there in its mode iptables alone (route_localnet), and none
// of IPv6 in any.
func (h *Host) loopback() (list []netip.Prefix) {
	ranges, _ := h.ranges(conntrack.IPv4)
	if len(ranges) == 0 {
		return []netip.Prefix{loopback4}
	}
	for _, p := range ranges {
		if p.Overlaps(loopback4) {
			list = append(list, p)
		}
	}
	return list
}

// primary returns the first listed address of a family, the zero Addr where
// there is none.
func (h *Host) primary(f conntrack.Family) netip.Addr {
	i := slices.IndexFunc(h.Listed, func(a netip.Addr) bool {
		return conntrack.FamilyOf(a.Unmap()) == f && !a.IsLoopback()
	})
	if i < 0 {
		return netip.Addr{}
	}
	return h.Listed[i].Unmap()
}
