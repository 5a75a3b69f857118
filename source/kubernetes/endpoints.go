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
	valid    condition = 1 << iota // may keep its flows: serving or ready
	ready                          // is chosen for new flows
	draining                       // serves while terminating: chosen where none is ready
	local                          // runs on this node

	usable = ready | draining | local // what a proxy goes by for new flows
)

// record says how kube-proxy takes what a slice says of an endpoint.
type record uint8

const (
	passedOver  record = iota // not at all
	terminating               // where no other says that it does not terminate
	lasting
)

// endpoint is one address of an endpoint of a slice.
type endpoint struct {
	addr netip.Addr
	is   condition
	as   record
}

// Slice is what counts of an EndpointSlice from the point of view of a node. It
// is read once, takes about a quarter of the object's memory, and refers to none
// of it but names.
type Slice struct {
	Namespace, Name string
	Service         string // of the same namespace; "": none

	family    conntrack.Family // 0: nothing counts
	endpoints []endpoint
	ports     []slicePort
	problems  []error
}

type slicePort struct {
	name  string
	proto uint8
	port  uint16
}

// ReadSlice reads an EndpointSlice as the proxy on the named node sees it; without
// a name no endpoint is local. What in it does not count is reported by
// [ServiceFrontends] of its Service.
func ReadSlice(o *discoveryv1.EndpointSlice, node string) *Slice {
	s := &Slice{Namespace: o.Namespace, Name: o.Name, Service: o.Labels[discoveryv1.LabelServiceName]}
	switch o.AddressType {
	case discoveryv1.AddressTypeIPv4:
		s.family = conntrack.IPv4
	case discoveryv1.AddressTypeIPv6:
		s.family = conntrack.IPv6
	case discoveryv1.AddressTypeFQDN:
		return s
	default:
		s.report("addressType", fmt.Errorf("%q is not an address type (IPv4, IPv6 or FQDN)", string(o.AddressType)))
		return s
	}
	s.endpoints = make([]endpoint, 0, len(o.Endpoints))
	for i := range o.Endpoints {
		s.readEndpoint(o, i, node)
	}
	for i := range o.Ports {
		s.readPort(o, i)
	}
	return s
}

func (s *Slice) report(path string, err error) {
	s.problems = append(s.problems, problem("EndpointSlice", s.Namespace, s.Name, path, err))
}

// readEndpoint appends the addresses of a slice's i-th endpoint.
//
// kube-proxy looks at the first address alone, so that one counts as usable. No
// meaning is defined for further ones, which only slices written by hand have;
// another proxy may well send flows there, and a flow that is right must not be
// deleted, so that each of them is valid.
func (s *Slice) readEndpoint(o *discoveryv1.EndpointSlice, i int, node string) {
	e := &o.Endpoints[i]
	report := func(path string, err error) { s.report(index("endpoints", i)+path, err) }
	if len(e.Addresses) == 0 {
		report(".addresses", errors.New("is empty"))
		return
	}
	var is condition
	as := lasting
	serves := e.Conditions.Serving == nil || *e.Conditions.Serving
	if serves {
		is |= valid
	}
	if e.Conditions.Ready == nil || *e.Conditions.Ready {
		// A Service that publishes its unready addresses has them ready and not
		// serving, and new flows go there.
		is |= valid | ready
	}
	if e.Conditions.Terminating != nil && *e.Conditions.Terminating {
		as = terminating
		if serves {
			is |= draining
		}
	}
	if node != "" && e.NodeName != nil && *e.NodeName == node {
		is |= local
	}
	for j, text := range e.Addresses {
		a, err := parseAddr(text)
		if err == nil && conntrack.FamilyOf(a) != s.family {
			err = fmt.Errorf("%q is not of the slice's address type %s", text, o.AddressType)
		}
		if err != nil {
			report(".addresses["+strconv.Itoa(j)+"]", err)
			continue
		}
		if j > 0 {
			is, as = is&valid, passedOver
		}
		s.endpoints = append(s.endpoints, endpoint{a, is, as})
	}
}

// readPort appends a slice's i-th port, if it counts. One without number means, by
// the API, whatever its reader likes: kube-proxy leaves it out.
func (s *Slice) readPort(o *discoveryv1.EndpointSlice, i int) {
	p := &o.Ports[i]
	if p.Port == nil {
		return
	}
	report := func(field string, err error) { s.report(index("ports", i)+"."+field, err) }
	x := slicePort{proto: conntrack.TCP}
	var err error
	if x.port, err = port(*p.Port); err != nil {
		report("port", err)
		return
	}
	if p.Protocol != nil {
		if x.proto, err = protocol(*p.Protocol); err != nil {
			report("protocol", err)
			return
		}
	}
	if p.Name != nil {
		x.name = *p.Name
	}
	s.ports = append(s.ports, x)
}

// backends are those of one Service port in one family.
type backends struct {
	valid frontend.Backends
	// How many a proxy would choose from for a new flow: wherever they run, and
	// of those on this node.
	cluster, local int
}

// usable returns how many there are for new flows to a kind of frontend, and how
// many for what this node and its pods send, where those are exempt from a policy.
func (s *backends) usable(svc *corev1.Service, kind frontend.Kind) (usable, inside int) {
	switch {
	case !localOnly(svc, kind):
		return s.cluster, 0
	case kind == frontend.ClusterIP:
		return s.local, 0
	}
	return s.local, s.cluster
}

// target is an endpoint at the port that a Service port leads to.
type target struct {
	netip.AddrPort
	endpoint
}

// backends collects the endpoints behind a Service port. One that several slices
// name is one backend. It may be moving between slices, or its address may be in
// use again while the last Pod that had it is still terminating: it is valid if
// any of them says so.
func (b *builder) backends(eps []*Slice, name string, proto uint8, family conntrack.Family) backends {
	b.targets = b.targets[:0]
	for _, s := range eps {
		if s.family != family {
			continue
		}
		for _, p := range s.ports {
			if p.proto != proto || p.name != name {
				continue
			}
			b.targets = slices.Grow(b.targets, len(s.endpoints))
			for _, e := range s.endpoints {
				b.targets = append(b.targets, target{netip.AddrPortFrom(e.addr, p.port), e})
			}
		}
	}
	slices.SortFunc(b.targets, func(x, y target) int { return x.Compare(y.AddrPort) })

	b.valid = slices.Grow(b.valid[:0], len(b.targets))
	var readyAll, readyHere, drainingAll, drainingHere int
	for i := 0; i < len(b.targets); {
		t := b.targets[i].endpoint
		at := b.targets[i].AddrPort
		for i++; i < len(b.targets) && b.targets[i].AddrPort == at; i++ {
			t.merge(b.targets[i].endpoint)
		}
		if t.is&valid != 0 {
			b.valid = append(b.valid, at)
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

// merge adds what another slice says of the same endpoint. Of two records
// kube-proxy takes the one that does not terminate (addEndpoints of
// pkg/proxy/endpointslicecache.go); of two that do not, or of two that do,
// whichever its map of slices gives last or first: only what both say is certain.
func (e *endpoint) merge(o endpoint) {
	is := (e.is | o.is) & valid
	switch {
	case e.as == o.as:
		is |= e.is & o.is & usable
	case e.as > o.as:
		is |= e.is & usable
	default:
		is |= o.is & usable
		e.as = o.as
	}
	e.is = is
}
