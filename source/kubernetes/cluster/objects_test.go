package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

func TestMain(m *testing.M) {
	// They hold up a reflector that meets errors in quick succession. That goes by
	// the clock, and in a bubble of synctest it is long before the last error.
	utilruntime.ErrorHandlers = nil
	goleak.VerifyTestMain(m)
}

// here is the node whose point of view the tests take.
const here = "n1"

func ptr[T any](v T) *T { return &v }

// recorder is a sink that keeps what it was told, as the agent would.
type recorder struct {
	units  map[string][]frontend.Frontend // nil before the first Replace
	host   *source.Host
	ranges []netip.Prefix
	fault  error
	calls  []string // the methods, in order
}

func (r *recorder) Replace(units map[string][]frontend.Frontend) {
	r.calls = append(r.calls, "Replace")
	r.units = maps.Clone(units)
}

func (r *recorder) Set(unit string, fs []frontend.Frontend) {
	r.calls = append(r.calls, "Set "+unit)
	if len(fs) == 0 {
		delete(r.units, unit)
	} else {
		r.units[unit] = fs
	}
}

func (r *recorder) Host(h source.Host) {
	r.calls = append(r.calls, "Host")
	r.host = &h
}

func (r *recorder) ServiceRanges(ranges []netip.Prefix) {
	r.calls = append(r.calls, "ServiceRanges")
	r.ranges = ranges
}

func (r *recorder) Fault(err error) {
	r.calls = append(r.calls, "Fault")
	r.fault = err
}

// take returns the calls since it was called last.
func (r *recorder) take() []string {
	calls := r.calls
	r.calls = nil
	return calls
}

// show writes units so that they can be compared.
func show(units map[string][]frontend.Frontend) map[string][]string {
	shown := map[string][]string{}
	for unit, fs := range units {
		for i := range fs {
			f := &fs[i]
			own := "-"
			if f.Sweep != nil {
				own = f.Sweep.String()
			}
			shown[unit] = append(shown[unit], fmt.Sprintf("%s %s %s %s %v usable=%d sweep=%s foreign=%t",
				f.Owner, f.Kind, f.Key(), f.Family, f.Valid.All(), f.Usable, own, f.Foreign))
		}
	}
	return shown
}

// objects is a state of the cluster as the API server has it, unstripped.
type objects struct {
	services map[name]*corev1.Service
	slices   map[name]*discoveryv1.EndpointSlice
	pods     map[name]*corev1.Pod
	nodes    map[name]*corev1.Node
	cidrs    map[name]*networkingv1.ServiceCIDR
}

func newObjects() *objects {
	return &objects{
		services: map[name]*corev1.Service{}, slices: map[name]*discoveryv1.EndpointSlice{},
		pods: map[name]*corev1.Pod{}, nodes: map[name]*corev1.Node{}, cidrs: map[name]*networkingv1.ServiceCIDR{},
	}
}

func values[V metav1.Object](m map[name]V) []V {
	return slices.SortedFunc(maps.Values(m), func(a, b V) int { return cmp.Compare(nameOf(a).String(), nameOf(b).String()) })
}

func (o *objects) put(obj runtime.Object) {
	switch x := obj.(type) {
	case *corev1.Service:
		o.services[nameOf(x)] = x
	case *discoveryv1.EndpointSlice:
		o.slices[nameOf(x)] = x
	case *corev1.Pod:
		o.pods[nameOf(x)] = x
	case *corev1.Node:
		o.nodes[nameOf(x)] = x
	case *networkingv1.ServiceCIDR:
		o.cidrs[nameOf(x)] = x
	}
}

func (o *objects) remove(obj runtime.Object) {
	switch x := obj.(type) {
	case *corev1.Service:
		delete(o.services, nameOf(x))
	case *discoveryv1.EndpointSlice:
		delete(o.slices, nameOf(x))
	case *corev1.Pod:
		delete(o.pods, nameOf(x))
	case *corev1.Node:
		delete(o.nodes, nameOf(x))
	case *networkingv1.ServiceCIDR:
		delete(o.cidrs, nameOf(x))
	}
}

func (o *objects) clear(k kind) {
	switch k {
	case services:
		clear(o.services)
	case endpointSlices:
		clear(o.slices)
	case pods:
		clear(o.pods)
	case nodes:
		clear(o.nodes)
	case serviceCIDRs:
		clear(o.cidrs)
	case kinds:
	}
}

// of returns the objects of a kind, in order.
func (o *objects) of(k kind) (list []runtime.Object) {
	switch k {
	case services:
		for _, x := range values(o.services) {
			list = append(list, x)
		}
	case endpointSlices:
		for _, x := range values(o.slices) {
			list = append(list, x)
		}
	case pods:
		for _, x := range values(o.pods) {
			list = append(list, x)
		}
	case nodes:
		for _, x := range values(o.nodes) {
			list = append(list, x)
		}
	case serviceCIDRs:
		for _, x := range values(o.cidrs) {
			list = append(list, x)
		}
	case kinds:
	}
	return list
}

// frontends is the oracle: the pure function of the whole state.
func (o *objects) frontends(node string) map[string][]frontend.Frontend {
	units, _ := kubernetes.Frontends(kubernetes.Objects{
		Services: values(o.services), EndpointSlices: values(o.slices), Pods: values(o.pods), Nodes: values(o.nodes),
	}, node)
	return units
}

// problems is the oracle of what does not count, by unit.
func (o *objects) problems(node string) map[string][]error {
	units := map[string][]error{}
	var eps []*kubernetes.Slice
	for _, s := range values(o.slices) {
		eps = append(eps, kubernetes.ReadSlice(s, node))
	}
	for n, svc := range o.services {
		_, units["service "+n.String()] = kubernetes.ServiceFrontends(svc, eps)
	}
	for n, pod := range o.pods {
		_, units["pod "+n.String()] = kubernetes.PodFrontends(pod, node)
	}
	return units
}

// ranges is the oracle of the service ranges.
func (o *objects) ranges() (list []netip.Prefix) {
	for _, c := range o.cidrs {
		for _, s := range c.Spec.CIDRs {
			list = append(list, netip.MustParsePrefix(s))
		}
	}
	slices.SortFunc(list, netip.Prefix.Compare)
	return list
}

// Random objects. They have what counts, what does not parse, and what stripping
// takes away; names and addresses are few, so that they meet.

func pick[T any](t *rapid.T, what string, of ...T) T { return rapid.SampledFrom(of).Draw(t, what) }

// some draws a list of at most as many as told.
func some[T any](t *rapid.T, what string, most int, of ...T) (list []T) {
	for range rapid.IntRange(0, most).Draw(t, what+"s") {
		list = append(list, pick(t, what, of...))
	}
	return list
}

func metadata(t *rapid.T, n name) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, UID: types.UID(n.Name + "-uid"),
		ResourceVersion: "7", Generation: 3, Finalizers: []string{"example.com/hold"},
		Labels:        map[string]string{"app": n.Name},
		Annotations:   map[string]string{"example.com/note": "n"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: pick(t, "manager", "kubectl", "controller")}},
	}
}

var protocols = []corev1.Protocol{corev1.ProtocolUDP, corev1.ProtocolUDP, corev1.ProtocolTCP, corev1.ProtocolSCTP, "", "QUIC"}

func genService(t *rapid.T, n name) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metadata(t, n)}
	if pick(t, "foreign", 0, 0, 0, 1) == 1 {
		s.Labels[kubernetes.LabelServiceProxyName] = pick(t, "proxy", "", "other")
	}
	if a := pick(t, "annotation", "", "", "udp=off", "tcp=all,sctp=off", "udp=sometimes"); a != "" {
		s.Annotations[kubernetes.AnnotationSweep] = a
	}
	s.Spec = corev1.ServiceSpec{
		Type: pick(t, "type", corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
			corev1.ServiceTypeExternalName),
		ClusterIPs: pick(t, "clusterIPs", []string{"203.0.113.1"}, []string{"203.0.113.2", "2001:db8::2"}, []string{"2001:db8::3"},
			[]string{corev1.ClusterIPNone}, []string{"203.0.113.300"}, nil),
		IPFamilies: pick(t, "families", []corev1.IPFamily{corev1.IPv4Protocol}, nil,
			[]corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, []corev1.IPFamily{"IPv5"}),
		ExternalIPs:           some(t, "external", 2, "203.0.113.81", "2001:db8::81", "bad"),
		ExternalTrafficPolicy: pick(t, "external policy", "", corev1.ServiceExternalTrafficPolicyLocal),
		InternalTrafficPolicy: pick(t, "internal policy", nil, ptr(corev1.ServiceInternalTrafficPolicyLocal)),
		Selector:              map[string]string{"app": n.Name}, SessionAffinity: corev1.ServiceAffinityClientIP,
		HealthCheckNodePort: 32000,
	}
	if len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	} else {
		s.Spec.ClusterIP = pick(t, "clusterIP", "", "203.0.113.4")
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: pick(t, "port", "", "a", "b"), Protocol: pick(t, "protocol", protocols...),
			Port: pick(t, "number", int32(53), 54, 0), NodePort: pick(t, "nodePort", int32(0), 30053, 70000),
			AppProtocol: ptr("dns"),
		})
	}
	for range rapid.IntRange(0, 2).Draw(t, "ingresses") {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
			IP: pick(t, "ingress", "203.0.113.91", "", "2001:db8::91", "bad"), Hostname: "lb.example.com",
			IPMode: pick(t, "mode", nil, ptr(corev1.LoadBalancerIPModeProxy), ptr(corev1.LoadBalancerIPModeVIP)),
			Ports:  []corev1.PortStatus{{Port: 53}},
		})
	}
	s.Status.Conditions = []metav1.Condition{{Type: "Ready"}}
	return s
}

func genSlice(t *rapid.T, n name, of string) *discoveryv1.EndpointSlice {
	maybe := func(what string) *bool { return pick(t, what, nil, ptr(true), ptr(false)) }
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metadata(t, n),
		AddressType: pick(t, "addressType", discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv4,
			discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN, "IPX"),
	}
	if of != "" {
		s.Labels[discoveryv1.LabelServiceName] = of
	}
	for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: some(t, "address", 2, "198.51.100.1", "198.51.100.2", "198.51.100.3", "2001:db8:1::1", "bad"),
			Conditions: discoveryv1.EndpointConditions{
				Ready: maybe("ready"), Serving: maybe("serving"), Terminating: maybe("terminating"),
			},
			NodeName: pick(t, "nodeName", nil, ptr(here), ptr("n2")),
			Hostname: ptr("h"), Zone: ptr("z"), TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "p"},
			Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}},
		})
	}
	for range rapid.IntRange(0, 2).Draw(t, "ports") {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{
			Name:     pick(t, "port", nil, ptr(""), ptr("a"), ptr("b")),
			Protocol: pick(t, "protocol", nil, ptr(corev1.ProtocolUDP), ptr(corev1.Protocol("QUIC"))),
			Port:     pick(t, "number", nil, ptr(int32(5353)), ptr(int32(0))), AppProtocol: ptr("dns"),
		})
	}
	return s
}

func genPod(t *rapid.T, n name) *corev1.Pod {
	container := func() corev1.Container {
		c := corev1.Container{
			Name: "c", Image: "example.com/image", Env: []corev1.EnvVar{{Name: "A"}},
			RestartPolicy: pick(t, "restart", nil, ptr(corev1.ContainerRestartPolicyAlways)),
		}
		for range rapid.IntRange(0, 2).Draw(t, "ports") {
			c.Ports = append(c.Ports, corev1.ContainerPort{
				Name: "p", HostPort: pick(t, "hostPort", int32(0), 0, 8125, 70000),
				ContainerPort: pick(t, "containerPort", int32(9125), 0), Protocol: pick(t, "protocol", protocols...),
				HostIP: pick(t, "hostIP", "", "192.0.2.1", "::", "bad"),
			})
		}
		return c
	}
	p := &corev1.Pod{
		ObjectMeta: metadata(t, n),
		Spec: corev1.PodSpec{
			NodeName: pick(t, "node", here, here, "n2"), HostNetwork: pick(t, "hostNetwork", false, false, true),
			Volumes: []corev1.Volume{{Name: "v"}},
		},
		Status: corev1.PodStatus{
			Phase:  pick(t, "phase", corev1.PodRunning, corev1.PodRunning, corev1.PodPending, corev1.PodSucceeded),
			PodIP:  pick(t, "podIP", "", "198.51.100.1", "bad"),
			PodIPs: some(t, "podIPs", 2, corev1.PodIP{IP: "198.51.100.1"}, corev1.PodIP{IP: "2001:db8:1::1"}, corev1.PodIP{IP: "bad"}),
			HostIP: "192.0.2.1",
		},
	}
	for range rapid.IntRange(0, 2).Draw(t, "containers") {
		p.Spec.Containers = append(p.Spec.Containers, container())
	}
	for range rapid.IntRange(0, 1).Draw(t, "inits") {
		p.Spec.InitContainers = append(p.Spec.InitContainers, container())
	}
	return p
}

func genNode(t *rapid.T, n name) *corev1.Node {
	o := &corev1.Node{ObjectMeta: metadata(t, n), Spec: corev1.NodeSpec{PodCIDR: "198.51.100.0/24"}}
	o.Status.Addresses = some(t, "address", 3,
		corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
		corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "192.0.2.2"},
		corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "2001:db8::1"},
		corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"})
	o.Status.Images = []corev1.ContainerImage{{Names: []string{"example.com/image"}}}
	return o
}

func genCIDR(t *rapid.T, n name) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metadata(t, n),
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: some(t, "cidr", 2, "203.0.113.0/26", "203.0.113.64/26", "2001:db8::/112")},
	}
}

// genObject draws an object of a kind, new or in the place of another.
func genObject(t *rapid.T, k kind) runtime.Object {
	namespaced := func(names ...string) name {
		return name{Namespace: pick(t, "namespace", "x", "x", "y"), Name: pick(t, "name", names...)}
	}
	switch k {
	case services:
		return genService(t, namespaced("s1", "s2", "s3"))
	case endpointSlices:
		// A slice may belong to no Service, or to one that never is.
		return genSlice(t, namespaced("e1", "e2", "e3", "e4"), pick(t, "of", "s1", "s1", "s2", "s3", "s9", ""))
	case pods:
		return genPod(t, namespaced("p1", "p2"))
	case nodes:
		return genNode(t, name{Name: here})
	case serviceCIDRs:
		return genCIDR(t, name{Name: pick(t, "name", "kubernetes", "more")})
	case kinds:
	}
	panic("no such kind")
}

// texts returns the errors' texts, in order of the alphabet.
func texts(errs []error) (list []string) {
	for _, err := range errs {
		list = append(list, err.Error())
	}
	slices.Sort(list)
	return list
}

// service returns x/dns, which serves 53/UDP at 203.0.113.10.
func service(edits ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "dns", UID: "dns-uid"},
		Spec: corev1.ServiceSpec{
			ClusterIP: "203.0.113.10", ClusterIPs: []string{"203.0.113.10"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 53}},
		},
	}
	for _, edit := range edits {
		edit(s)
	}
	return s
}

// slice returns a slice of x/dns with the endpoints given, at port 5353.
func slice(addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "x", Name: "dns-a", Labels: map[string]string{discoveryv1.LabelServiceName: "dns"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr(""), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(5353))}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: ptr(here)})
	}
	return s
}

func node(addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: here}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func cidr(ranges ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: ranges},
	}
}

// podAddrs returns the addresses of this node's own Pods.
func (o *objects) podAddrs() (list []netip.Addr) {
	for _, pod := range values(o.pods) {
		list = append(list, kubernetes.PodAddresses(pod, here)...)
	}
	return list
}
