package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// condition is what holds for an endpoint.
type condition uint8

const (
	serving  condition = 1 << iota // may keep its flows
	ready                          // is chosen for new flows
	draining                       // serves while terminating: chosen where none is ready
	local                          // runs on this node
)

// endpoint is one address of an endpoint of a slice.
type endpoint struct {
	addr netip.Addr
	is   condition
}

// offer is one port of a slice. Its endpoints are those from first up to, not
// including, last in builder.endpoints.
type offer struct {
	name        string
	proto       uint8
	port        uint16
	family      conntrack.Family
	first, last int
}

// readSlices reads a Service's slices into b.endpoints and b.offers, so that an
// address is parsed, and a bad one reported, once for all the Service's ports.
func (b *builder) readSlices(svc *corev1.Service, eps []*discoveryv1.EndpointSlice) {
	b.endpoints, b.offers = b.endpoints[:0], b.offers[:0]
	for _, s := range eps {
		if s.Namespace != svc.Namespace || s.Labels[discoveryv1.LabelServiceName] != svc.Name {
			continue
		}
		var family conntrack.Family
		switch s.AddressType {
		case discoveryv1.AddressTypeIPv4:
			family = conntrack.IPv4
		case discoveryv1.AddressTypeIPv6:
			family = conntrack.IPv6
		case discoveryv1.AddressTypeFQDN:
			continue
		default:
			b.report("EndpointSlice", s.Namespace, s.Name, "addressType",
				fmt.Errorf("%q is not an address type (IPv4, IPv6 or FQDN)", string(s.AddressType)))
			continue
		}
		first := len(b.endpoints)
		b.endpoints = slices.Grow(b.endpoints, len(s.Endpoints))
		for i := range s.Endpoints {
			b.readEndpoint(s, i, family)
		}
		for i := range s.Ports {
			o := offer{family: family, first: first, last: len(b.endpoints)}
			if b.readPort(s, i, &o) {
				b.offers = append(b.offers, o)
			}
		}
	}
}

// readEndpoint appends the addresses of a slice's i-th endpoint.
//
// kube-proxy looks at the first address alone, so that one counts as usable. No
// meaning is defined for further ones, which only slices written by hand have;
// another proxy may well send flows there, and a flow that is right must not be
// deleted, so that each of them is valid.
func (b *builder) readEndpoint(s *discoveryv1.EndpointSlice, i int, family conntrack.Family) {
	e := &s.Endpoints[i]
	report := func(path string, err error) {
		b.report("EndpointSlice", s.Namespace, s.Name, index("endpoints", i)+path, err)
	}
	if len(e.Addresses) == 0 {
		report(".addresses", errors.New("is empty"))
		return
	}
	var is condition
	serves := e.Conditions.Serving == nil || *e.Conditions.Serving
	if serves {
		is |= serving
	}
	if e.Conditions.Ready == nil || *e.Conditions.Ready {
		is |= ready
	}
	if serves && e.Conditions.Terminating != nil && *e.Conditions.Terminating {
		is |= draining
	}
	if b.node != "" && e.NodeName != nil && *e.NodeName == b.node {
		is |= local
	}
	for j, text := range e.Addresses {
		a, err := parseAddr(text)
		if err == nil && conntrack.FamilyOf(a) != family {
			err = fmt.Errorf("%q is not of the slice's address type %s", text, s.AddressType)
		}
		if err != nil {
			report(".addresses["+strconv.Itoa(j)+"]", err)
			continue
		}
		if j > 0 {
			is &= serving
		}
		b.endpoints = append(b.endpoints, endpoint{a, is})
	}
}

// readPort fills in what a slice's i-th port says and tells whether it counts.
// A port without number means, by the API, whatever its reader likes:
// kube-proxy leaves it out.
func (b *builder) readPort(s *discoveryv1.EndpointSlice, i int, o *offer) bool {
	p := &s.Ports[i]
	if p.Port == nil {
		return false
	}
	report := func(field string, err error) bool {
		b.report("EndpointSlice", s.Namespace, s.Name, index("ports", i)+"."+field, err)
		return false
	}
	var err error
	if o.port, err = port(*p.Port); err != nil {
		return report("port", err)
	}
	o.proto = conntrack.TCP
	if p.Protocol != nil {
		if o.proto, err = protocol(*p.Protocol); err != nil {
			return report("protocol", err)
		}
	}
	if p.Name != nil {
		o.name = *p.Name
	}
	return true
}

// backends are those of one Service port in one family.
type backends struct {
	valid frontend.Backends
	// How many a proxy would choose from for a new flow: wherever they run, and
	// of those on this node.
	cluster, local int
}

func (s *backends) usable(localOnly bool) int {
	if localOnly {
		return s.local
	}
	return s.cluster
}

// target is an endpoint at the port that a Service port leads to.
type target struct {
	netip.AddrPort
	is condition
}

// backends collects the endpoints behind a Service port. One that several
// slices name is one backend, for which holds what holds for any of them: it
// may be moving between slices, or its address may be in use again while the
// last Pod that had it is still terminating.
func (b *builder) backends(name string, proto uint8, family conntrack.Family) backends {
	b.targets = b.targets[:0]
	for i := range b.offers {
		o := &b.offers[i]
		if o.proto != proto || o.family != family || o.name != name {
			continue
		}
		b.targets = slices.Grow(b.targets, o.last-o.first)
		for _, e := range b.endpoints[o.first:o.last] {
			b.targets = append(b.targets, target{netip.AddrPortFrom(e.addr, o.port), e.is})
		}
	}
	slices.SortFunc(b.targets, func(x, y target) int { return x.Compare(y.AddrPort) })

	b.valid = slices.Grow(b.valid[:0], len(b.targets))
	var readyAll, readyHere, drainingAll, drainingHere int
	for i := 0; i < len(b.targets); {
		t := b.targets[i]
		for i++; i < len(b.targets) && b.targets[i].AddrPort == t.AddrPort; i++ {
			t.is |= b.targets[i].is
		}
		if t.is&serving != 0 {
			b.valid = append(b.valid, t.AddrPort)
		}
		here := 0
		if t.is&local != 0 {
			here = 1
		}
		if t.is&ready != 0 {
			readyAll++
			readyHere += here
		}
		if t.is&draining != 0 {
			drainingAll++
			drainingHere += here
		}
	}
	return backends{
		valid:   frontend.NewBackends(b.valid...),
		cluster: cmp.Or(readyAll, drainingAll),
		local:   cmp.Or(readyHere, drainingHere),
	}
}
