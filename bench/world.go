//go:build linux

package main

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/kubernetes/pkg/proxy"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

// The world behind the flows: Services of 10 endpoints each. A third of them has
// a UDP port, a third a TCP port, a third both.
const (
	services4 = 1000
	services6 = 100
	endpoints = 10
)

// service is the n-th Service of a family.
type service struct {
	family conntrack.Family
	n      int
}

func (s service) udp() bool { return s.n%3 != 1 }
func (s service) tcp() bool { return s.n%3 != 0 }

func (s service) name() string { return fmt.Sprintf("%s-%d", s.family, s.n) }

func (s service) vip() netip.Addr {
	if s.family == conntrack.IPv6 {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 96, 14: byte(s.n >> 8), 15: byte(s.n)})
	}
	return netip.AddrFrom4([4]byte{10, 96, byte(s.n / 250), byte(1 + s.n%250)})
}

func (s service) backend(b int) netip.Addr {
	if s.family == conntrack.IPv6 {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 1, byte(b), 14: byte(s.n >> 8), 15: byte(s.n)})
	}
	return netip.AddrFrom4([4]byte{10, byte(128 + b), byte(s.n / 250), byte(1 + s.n%250)})
}

// targetPort is one of 20, as a cluster's applications have few ports in common.
func (s service) targetPort() uint16 { return uint16(5000 + s.n%20) }

func port(proto uint8) uint16 {
	if proto == conntrack.UDP {
		return 53
	}
	return 443
}

// world is the desired state of one moment.
type world struct {
	services4, services6 int
	gone                 func(s service, backend int) bool // nil: no backend is
	edited               func(s service) bool              // the target port has changed; nil: of none
}

// whole is the state that every flow of the table agrees with.
func whole() world { return world{services4: services4, services6: services6} }

// without returns a world in which backends are gone.
func (w world) without(gone func(s service, backend int) bool) world {
	w.gone = gone
	return w
}

// each calls f with every Service and its EndpointSlice.
func (w world) each(f func(*corev1.Service, *discoveryv1.EndpointSlice)) {
	for _, part := range []struct {
		family conntrack.Family
		n      int
	}{{conntrack.IPv4, w.services4}, {conntrack.IPv6, w.services6}} {
		for n := range part.n {
			f(w.service(service{part.family, n}))
		}
	}
}

func (w world) service(s service) (*corev1.Service, *discoveryv1.EndpointSlice) {
	ip, family, kind := s.vip().String(), corev1.IPv4Protocol, discoveryv1.AddressTypeIPv4
	if s.family == conntrack.IPv6 {
		family, kind = corev1.IPv6Protocol, discoveryv1.AddressTypeIPv6
	}
	svc := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name()},
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  ip,
			ClusterIPs: []string{ip},
			IPFamilies: []corev1.IPFamily{family},
		},
	}
	slice := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: s.name(),
			Labels: map[string]string{discoveryv1.LabelServiceName: s.name()},
		},
		AddressType: kind,
	}
	target := int32(s.targetPort())
	if w.edited != nil && w.edited(s) {
		target += 1000
	}
	add := func(name string, proto corev1.Protocol, port uint16) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: name, Protocol: proto, Port: int32(port), TargetPort: intstr.FromInt32(target),
		})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &proto, Port: &target})
	}
	if s.udp() {
		add("udp", corev1.ProtocolUDP, port(conntrack.UDP))
	}
	if s.tcp() {
		add("tcp", corev1.ProtocolTCP, port(conntrack.TCP))
	}
	for b := range endpoints {
		if w.gone != nil && w.gone(s, b) {
			continue
		}
		yes, node := true, fmt.Sprintf("node-%d", b)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{s.backend(b).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes},
			NodeName:   &node,
		})
	}
	return svc, slice
}

// unit is what flowsweep makes of one Service.
func (w world) unit(s service) []frontend.Frontend {
	svc, slice := w.service(s)
	fs, _ := kubernetes.ServiceFrontends(svc, []*kubernetes.Slice{kubernetes.ReadSlice(slice, "node-0")})
	return fs
}

func (w world) units() map[string][]frontend.Frontend {
	units := map[string][]frontend.Frontend{}
	w.each(func(svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
		units[svc.Name], _ = kubernetes.ServiceFrontends(svc, []*kubernetes.Slice{kubernetes.ReadSlice(slice, "node-0")})
	})
	return units
}

// kubeProxy is what kube-proxy makes of the same objects, by its own trackers.
func (w world) kubeProxy(family corev1.IPFamily) (proxy.ServicePortMap, proxy.EndpointsMap) {
	changes := proxy.NewServiceChangeTracker(family, nil, nil)
	slices := proxy.NewEndpointsChangeTracker(family, "node-0", nil, nil)
	w.each(func(svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
		changes.Update(nil, svc)
		slices.EndpointSliceUpdate(slice, false)
	})
	svcs, eps := proxy.ServicePortMap{}, proxy.EndpointsMap{}
	svcs.Update(changes)
	eps.Update(slices)
	return svcs, eps
}

// entry is the i-th flow of a table: 16 of 20 go to IPv4 services, 2 to IPv6
// services, 2 are outgoing and nobody's. They are spread evenly, so that a part
// of the table looks like the whole.
type entry struct {
	service
	backend  int // -1: outgoing
	proto    uint8
	answered bool
	i        int
}

func entryAt(i int) entry {
	e := entry{service: service{family: conntrack.IPv4}, backend: -1, i: i, answered: mix(i)%6 != 0}
	turn, place := i/20, i%20
	switch {
	case place < 16:
		m := turn*16 + place
		// 387 has no factor in common with 1000: every service is met once in 1000.
		e.n, e.backend = m*387%services4, m/services4%endpoints
	case place < 18:
		m := turn*2 + place - 16
		e.family, e.n, e.backend = conntrack.IPv6, m*37%services6, m/services6%endpoints
	}
	udp := mix(i)&64 != 0
	if e.backend >= 0 && e.udp() != e.tcp() {
		udp = e.udp()
	}
	e.proto = conntrack.TCP
	if udp {
		e.proto = conntrack.UDP
	}
	return e
}

// count returns how many of the first n flows a test accepts; nil accepts none.
func count(n int, accept func(entry) bool) (sum int) {
	for i := range n {
		if accept != nil && accept(entryAt(i)) {
			sum++
		}
	}
	return sum
}

// mix scatters the bits of a number (the finalizer of MurmurHash3), so that
// properties of a flow are independent of its service.
func mix(i int) uint32 {
	x := uint32(i)
	x = (x ^ x>>16) * 0x85ebca6b
	x = (x ^ x>>13) * 0xc2b2ae35
	return x ^ x>>16
}

// flow returns the entry as the kernel is to have it. Clients are in the
// networks for benchmarks (RFC 2544, RFC 5180).
func (e entry) flow() conntrack.Flow {
	hosts := 1 << 17 // 198.18.0.0/15
	host, sport := e.i%hosts, uint16(1024+e.i/hosts)
	client := netip.AddrFrom4([4]byte{198, byte(18 + host>>16), byte(host >> 8), byte(host)})
	dst, to, toPort := outgoing(e.i), outgoing(e.i), port(e.proto)
	if e.backend >= 0 {
		dst, to, toPort = e.vip(), e.service.backend(e.backend), e.targetPort()
	}
	if e.family == conntrack.IPv6 {
		client = netip.AddrFrom16([16]byte{0x20, 1, 0, 2, 13: byte(host >> 16), 14: byte(host >> 8), 15: byte(host)})
	}
	f := conntrack.Flow{
		Family: e.family, Proto: e.proto,
		Orig:    conntrack.Tuple{Src: client, Dst: dst, SrcPort: sport, DstPort: port(e.proto)},
		Reply:   conntrack.Tuple{Src: to, Dst: client, SrcPort: toPort, DstPort: sport},
		Timeout: 24 * 3600,
	}
	if e.proto == conntrack.TCP {
		f.State = tcpSynSent
	}
	if e.answered {
		f.Status = conntrack.StatusSeenReply | conntrack.StatusAssured
		if e.proto == conntrack.TCP {
			f.State = tcpEstablished
		}
	}
	return f
}

// outgoing is where a flow goes that is no service's.
func outgoing(i int) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}) }

// enum tcp_conntrack.
const (
	tcpSynSent     = 1
	tcpEstablished = 3
)
