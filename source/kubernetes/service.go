package kubernetes

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// LabelServiceProxyName on a Service, whatever its value, says that another
// proxy than the node's own serves it.
const LabelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// AnnotationSweep on a Service says what may be deleted of its stale flows, by
// protocol, as in "udp=all,tcp=off"; protocols that it does not name are as
// configured.
const AnnotationSweep = "flowsweep.dev/sweep"

var families = [...]conntrack.Family{conntrack.IPv4, conntrack.IPv6}

// ServiceFrontends returns the frontends of a Service as the proxy on a node sees
// them, with the backends that the Service's EndpointSlices give, as they were
// read from that node's point of view; slices of other Services are passed over.
// Every error is an [*Error].
//
// A Service that is headless, has no cluster address or is of type ExternalName
// has no frontends. Those of a Service that another proxy serves
// ([LabelServiceProxyName]) are marked Foreign.
func ServiceFrontends(svc *corev1.Service, eps []*Slice) ([]frontend.Frontend, []error) {
	var b builder
	return b.service(svc, eps), b.problems
}

func (b *builder) service(svc *corev1.Service, eps []*Slice) []frontend.Frontend {
	dests, ok := b.destinations(svc)
	if !ok {
		return nil
	}
	others := func(s *Slice) bool { return s.Namespace != svc.Namespace || s.Service != svc.Name }
	if slices.ContainsFunc(eps, others) {
		eps = slices.DeleteFunc(slices.Clone(eps), others)
	}
	for _, s := range eps {
		b.problems = append(b.problems, s.problems...)
	}
	_, foreign := svc.Labels[LabelServiceProxyName]
	own := b.ownPolicy(svc)
	fs := make([]frontend.Frontend, 0, len(dests)*len(svc.Spec.Ports))
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		proto, servicePort, nodePort := b.servicePort(svc, i)
		owner := svc.Namespace + "/" + svc.Name
		if p.Name != "" {
			owner += ":" + p.Name
		}
		// Built once a family, shared by all the port's frontends of it.
		var sets [len(families)]backends
		var built [len(families)]bool
		for _, d := range dests {
			number := servicePort
			if d.kind == frontend.NodePort {
				number = nodePort
			}
			if number == 0 {
				continue
			}
			k := slices.Index(families[:], d.family)
			if !built[k] {
				sets[k], built[k] = b.backends(eps, p.Name, proto, d.family), true
			}
			usable, inside := sets[k].usable(svc, d.kind)
			fs = append(fs, frontend.Frontend{
				Owner:   owner,
				Kind:    d.kind,
				Proto:   proto,
				Addr:    d.addr,
				Family:  d.family,
				Ports:   frontend.Port(number),
				Valid:   sets[k].valid,
				Usable:  usable,
				Inside:  inside,
				Sweep:   own[proto],
				Foreign: foreign,

				Balanced: d.kind == frontend.ExternalIP && svc.Spec.Type == corev1.ServiceTypeLoadBalancer,
			})
		}
	}
	return fs
}

// ownPolicy returns what AnnotationSweep says, by protocol. A value that makes
// no sense says nothing.
func (b *builder) ownPolicy(svc *corev1.Service) map[uint8]*frontend.Sweep {
	text, ok := svc.Annotations[AnnotationSweep]
	if !ok {
		return nil
	}
	named, err := frontend.ParsePolicies(text)
	if err != nil {
		b.report("Service", svc.Namespace, svc.Name, "metadata.annotations["+AnnotationSweep+"]",
			fmt.Errorf("%w; the whole annotation is ignored", err))
		return nil
	}
	own := make(map[uint8]*frontend.Sweep, len(named))
	for proto, sweep := range named {
		own[proto] = &sweep
	}
	return own
}

// servicePort returns the numbers of a Service's i-th port. A port that does
// not exist or is out of range is 0, both are where the protocol is unknown.
//
// Whether there is a node port is told by its number and not by the Service's
// type: kube-proxy does the same, and the API server clears numbers that a type
// does not have.
func (b *builder) servicePort(svc *corev1.Service, i int) (proto uint8, servicePort, nodePort uint16) {
	p := &svc.Spec.Ports[i]
	report := func(field string, err error) {
		b.report("Service", svc.Namespace, svc.Name, index("spec.ports", i)+"."+field, err)
	}
	proto, err := protocol(p.Protocol)
	if err != nil {
		report("protocol", err)
		return 0, 0, 0
	}
	if servicePort, err = port(p.Port); err != nil {
		report("port", err)
	}
	if p.NodePort != 0 {
		if nodePort, err = port(p.NodePort); err != nil {
			report("nodePort", err)
		}
	}
	return proto, servicePort, nodePort
}

// localOnly tells whether new flows to a kind of frontend stay on this node. From
// the policy for flows from outside, what the node and its pods send is exempt.
func localOnly(svc *corev1.Service, kind frontend.Kind) bool {
	if kind == frontend.ClusterIP {
		p := svc.Spec.InternalTrafficPolicy
		return p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal
	}
	return svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// destination is where clients of a Service send to, whatever the port.
type destination struct {
	kind   frontend.Kind
	addr   netip.Addr // zero for node ports
	family conntrack.Family
}

// destinations returns where a Service is served, each address once, and node
// ports once a family; ok is false for a Service that no proxy serves. The result
// is good until the next call.
//
// A family counts where the Service has a cluster address of it: kube-proxy
// serves no external or load-balancer address and no node port of another.
func (b *builder) destinations(svc *corev1.Service) (dests []destination, ok bool) {
	spec := &svc.Spec
	if spec.Type == corev1.ServiceTypeExternalName || spec.ClusterIP == corev1.ClusterIPNone ||
		slices.Contains(spec.ClusterIPs, corev1.ClusterIPNone) {
		return nil, false
	}
	b.dests = b.dests[:0]
	report := func(path string, err error) { b.report("Service", svc.Namespace, svc.Name, path, err) }

	if len(spec.ClusterIPs) > 0 {
		for i, s := range spec.ClusterIPs {
			if err := b.destination(frontend.ClusterIP, s, families[:]); err != nil {
				report(index("spec.clusterIPs", i), err)
			}
		}
	} else if err := b.destination(frontend.ClusterIP, spec.ClusterIP, families[:]); err != nil {
		report("spec.clusterIP", err)
		if spec.ClusterIP == "" { // kube-proxy's ShouldSkipService
			return nil, false
		}
	}
	// An address of a Service that another proxy serves is never taken for a
	// vanished one, whoever handles it.
	_, foreign := svc.Labels[LabelServiceProxyName]
	served := make([]conntrack.Family, 0, len(families))
	for i, f := range spec.IPFamilies {
		switch f {
		case corev1.IPv4Protocol:
			served = append(served, conntrack.IPv4)
		case corev1.IPv6Protocol:
			served = append(served, conntrack.IPv6)
		default:
			report(index("spec.ipFamilies", i), fmt.Errorf("%q is not a family (IPv4 or IPv6)", string(f)))
		}
	}
	if len(spec.IPFamilies) == 0 {
		for _, d := range b.dests {
			served = append(served, d.family)
		}
	}
	for i, s := range spec.ExternalIPs {
		if err := b.destination(frontend.ExternalIP, s, served); err != nil {
			report(index("spec.externalIPs", i), err)
		}
	}
	for i := range svc.Status.LoadBalancer.Ingress {
		in := &svc.Status.LoadBalancer.Ingress[i]
		if in.IP == "" || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP && !foreign {
			continue // a name, or a balancer that sends to the node or the Pod itself
		}
		if err := b.destination(frontend.LoadBalancerIP, in.IP, served); err != nil {
			report(index("status.loadBalancer.ingress", i)+".ip", err)
		}
	}
	nodePorts := slices.ContainsFunc(spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort != 0 })
	for _, f := range families {
		if nodePorts && slices.Contains(served, f) {
			b.dests = append(b.dests, destination{kind: frontend.NodePort, family: f})
		}
	}
	return b.dests, true
}

// destination appends an address that is of one of the families and new.
func (b *builder) destination(kind frontend.Kind, s string, served []conntrack.Family) error {
	a, err := parseAddr(s)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(b.dests, func(d destination) bool { return d.addr == a })
	switch f := conntrack.FamilyOf(a); {
	case i >= 0:
		// An external address that a load balancer has too is certainly served.
		if kind == frontend.LoadBalancerIP && b.dests[i].kind == frontend.ExternalIP {
			b.dests[i].kind = kind
		}
	case slices.Contains(served, f):
		b.dests = append(b.dests, destination{kind, a, f})
	}
	return nil
}
