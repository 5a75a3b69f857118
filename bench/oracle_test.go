//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/proxy"
	proxyutil "k8s.io/kubernetes/pkg/proxy/util"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

// Every flow that kube-proxy would make is kept: its own code (the trackers,
// CategorizeEndpoints, NewNodePortAddresses) says over random clusters what its
// rules would do, and the judgement must not call that stale, after whatever the
// cluster was before. What no endpoint of a Service is any more must be stale, so
// that the judgement is not kept right by keeping everything.
func TestKubeProxyIsRight(t *testing.T) {
	const clusters = 400
	var sum tally
	for seed := range uint64(clusters) {
		if w := newOracle(seed); !w.check(t, &sum) {
			t.Fatalf("in the cluster of seed %d: %s", seed, w)
		}
	}
	t.Logf("%d clusters: %+v", clusters, sum)
	if sum.made < 10_000 || sum.unready < 500 || sum.dead < 5000 || sum.untranslated < 2000 || sum.awaiting < 1000 || sum.inside < 200 {
		t.Errorf("hardly anything was looked at: %+v", sum)
	}
}

// tally counts what was looked at.
type tally struct {
	made         int // translated as kube-proxy would do it
	unready      int // of them, to endpoints that are not serving
	dead         int // translated to what is no endpoint any more
	untranslated int // stale since kube-proxy would translate them
	awaiting     int // right since it would not
	inside       int // stale since it would for senders inside alone
}

// oracle is one random cluster from the point of view of the Node n1.
type oracle struct {
	*rand.Rand
	mode   proxyMode
	gate   bool // AllowServiceExternalIPs
	ranges []string
	node   *corev1.Node
	own    []netip.Addr // of the host, listed by the Node or not
	now    kubernetes.Objects
	table  *frontend.Table
}

type proxyMode string

// String describes the cluster for whoever looks into a failure.
func (w *oracle) String() string {
	s := fmt.Sprintf("mode %s, external IPs %t, ranges %q, own %v, node %v %v", w.mode, w.gate, w.ranges, w.own,
		w.node.Status.Addresses, w.node.Spec.PodCIDRs)
	for _, svc := range w.now.Services {
		s += fmt.Sprintf("\n%s %v: %+v %+v", svc.Name, svc.Labels, svc.Spec, svc.Status.LoadBalancer)
	}
	for _, e := range w.now.EndpointSlices {
		s += fmt.Sprintf("\n%s %v", e.Name, e.Ports)
		for _, x := range e.Endpoints {
			s += fmt.Sprintf("\n  %v %s on %s", x.Addresses, x.Conditions.String(), orNone(x.NodeName))
		}
	}
	return s
}

func orNone(s *string) string {
	if s == nil {
		return "none"
	}
	return *s
}

// some returns a random part of a list, in random order.
func some[T any](r *rand.Rand, list ...T) []T {
	list = slices.Clone(list)
	r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list[:r.IntN(len(list)+1)]
}

func one[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

func newOracle(seed uint64) *oracle {
	r := rand.New(rand.NewPCG(seed, 37))
	w := &oracle{Rand: r, mode: one[proxyMode](r, "iptables", "nftables"), gate: r.IntN(3) > 0}
	w.ranges = some(r, "primary", "localhost", "all", "192.0.2.2/31", "192.0.2.9/24", "2001:db8::2/128", "127.0.0.0/8")
	if r.IntN(2) == 0 {
		w.ranges = some(r, "primary", "192.0.2.2/31")
	}
	for _, a := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1", "2001:db8::2"} {
		w.own = append(w.own, netip.MustParseAddr(a))
	}
	ranges := w.ranges // as the operator tells them, or not
	if len(w.ranges) == 0 && w.mode == "nftables" {
		w.ranges = []string{"primary"} // platformApplyDefaults of cmd/kube-proxy/app
	}

	w.table = frontend.NewTable(frontend.Options{Policy: frontend.Policy{UDP: frontend.All, TCP: frontend.All, SCTP: frontend.All}})
	for range 2 { // what was before leaves tombstones
		w.node = w.newNode()
		w.now = kubernetes.Objects{Nodes: []*corev1.Node{w.node}}
		for i := range 1 + r.IntN(5) {
			w.addService(i)
		}
		w.now.Pods = []*corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "pod"}}}
		host := frontend.Host{Listed: kubernetes.NodeAddresses(w.node), Pods: kubernetes.PodRanges(w.node)}
		for _, a := range w.own {
			if !slices.Contains(host.Listed, a) {
				host.Other = append(host.Other, a)
			}
		}
		for _, s := range ranges {
			p, err := frontend.ParseNodePorts(s)
			if err != nil {
				panic(err)
			}
			host.NodePorts = append(host.NodePorts, p)
		}
		units, _ := kubernetes.Frontends(w.now, "n1")
		w.table.SetHost(host)
		w.table.Replace(units)
	}
	return w
}

func (w *oracle) newNode() *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	n.Spec.PodCIDRs = []string{"198.51.100.128/25", "2001:db8:2::1:0/112"}
	for _, a := range some(w.Rand, w.own...) {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{
			Type: one(w.Rand, corev1.NodeInternalIP, corev1.NodeInternalIP, corev1.NodeExternalIP), Address: a.String(),
		})
	}
	return n
}

func (w *oracle) addService(i int) {
	name := fmt.Sprint("s", i)
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name}}
	spec := &svc.Spec
	spec.Type = one(w.Rand, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	spec.IPFamilies = one(w.Rand, []corev1.IPFamily{corev1.IPv4Protocol}, []corev1.IPFamily{corev1.IPv6Protocol},
		[]corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol})
	for _, f := range spec.IPFamilies {
		ip := fmt.Sprintf("203.0.113.%d", 10+i)
		if f == corev1.IPv6Protocol {
			ip = fmt.Sprintf("2001:db8:1::%d", 10+i)
		}
		spec.ClusterIPs = append(spec.ClusterIPs, ip)
	}
	spec.ClusterIP = spec.ClusterIPs[0]
	if w.IntN(2) == 0 {
		spec.ExternalIPs = some(w.Rand, "203.0.113.80", "203.0.113.81", "192.0.2.1", "2001:db8:5::80")
	}
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		for _, ip := range some(w.Rand, "203.0.113.81", "203.0.113.90", "192.0.2.2", "2001:db8:5::90", "2001:db8::1") {
			svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{
				IP: ip, IPMode: one(w.Rand, nil, new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeProxy)),
			})
		}
	}
	spec.InternalTrafficPolicy = one(w.Rand, nil, new(corev1.ServiceInternalTrafficPolicyCluster), new(corev1.ServiceInternalTrafficPolicyLocal))
	if spec.Type != corev1.ServiceTypeClusterIP || len(spec.ExternalIPs) > 0 {
		spec.ExternalTrafficPolicy = one(w.Rand, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	spec.HealthCheckNodePort = int32(32000 + i)
	if w.IntN(8) == 0 {
		svc.Labels = map[string]string{kubernetes.LabelServiceProxyName: "x"}
	}
	for j := range 1 + w.IntN(2) {
		p := corev1.ServicePort{
			Name: fmt.Sprint("p", j), Port: int32(53 + j),
			Protocol: one(w.Rand, corev1.ProtocolUDP, corev1.ProtocolTCP, corev1.ProtocolSCTP),
		}
		if spec.Type != corev1.ServiceTypeClusterIP {
			p.NodePort = int32(30000 + 10*i + j)
		}
		spec.Ports = append(spec.Ports, p)
	}
	w.now.Services = append(w.now.Services, svc)
	for k := range w.IntN(4) {
		w.addSlice(svc, fmt.Sprint(name, "-", k))
	}
}

func (w *oracle) addSlice(svc *corev1.Service, name string) {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "x", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
		},
		AddressType: one(w.Rand, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6),
	}
	for j := range svc.Spec.Ports {
		p := &svc.Spec.Ports[j]
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{
			Name: &p.Name, Protocol: &p.Protocol, Port: new(int32(one(w.Rand, 5300+j, 5300+j, 5400))),
		})
	}
	maybe := func() *bool { return one(w.Rand, nil, new(true), new(false)) }
	for range w.IntN(5) {
		ip := fmt.Sprintf("198.51.100.%d", 1+w.IntN(6))
		if s.AddressType == discoveryv1.AddressTypeIPv6 {
			ip = fmt.Sprintf("2001:db8:2::%d", 1+w.IntN(6))
		}
		e := discoveryv1.Endpoint{
			Addresses:  []string{ip},
			Conditions: discoveryv1.EndpointConditions{Ready: maybe(), Serving: maybe(), Terminating: maybe()},
			NodeName:   one(w.Rand, nil, new("n1"), new("n2")),
		}
		if w.IntN(2) == 0 {
			e.Hints = &discoveryv1.EndpointHints{
				ForZones: []discoveryv1.ForZone{{Name: one(w.Rand, "here", "elsewhere")}},
				ForNodes: []discoveryv1.ForNode{{Name: one(w.Rand, "n1", "n2")}},
			}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	w.now.EndpointSlices = append(w.now.EndpointSlices, s)
}

// serves tells where kube-proxy serves node ports of a family.
func (w *oracle) serves(family corev1.IPFamily) func(netip.Addr) bool {
	var expanded []string
	for _, s := range w.ranges { // expandNodePortAddressKeywords of cmd/kube-proxy/app
		switch s {
		case "primary":
			for _, a := range w.primary() {
				expanded = append(expanded, netip.PrefixFrom(a, a.BitLen()).String())
			}
		case "localhost":
			expanded = append(expanded, "127.0.0.0/8", "::1/128")
		case "all":
			expanded = append(expanded, proxyutil.IPv4ZeroCIDR, proxyutil.IPv6ZeroCIDR)
		default:
			expanded = append(expanded, s)
		}
	}
	npa := proxyutil.NewNodePortAddresses(family, expanded)
	ips, err := npa.GetNodeIPs(w)
	if err != nil {
		panic(err)
	}
	return func(a netip.Addr) bool {
		if a.IsLoopback() && (a.Is6() || w.mode != "iptables" || !npa.ContainsIPv4Loopback()) {
			return false
		}
		return npa.MatchAll() || slices.ContainsFunc(ips, func(ip net.IP) bool { return ip.Equal(a.AsSlice()) })
	}
}

// InterfaceAddrs implements proxyutil.NetworkInterfacer.
func (w *oracle) InterfaceAddrs() (list []net.Addr, err error) {
	for _, a := range append(w.loopback(), w.own...) {
		list = append(list, &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())})
	}
	return list, nil
}

func (w *oracle) loopback() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
}

// primary returns the Node's addresses that kube-proxy goes by: of each family the
// first, internal ones before external (GetNodeHostIPs of k8s.io/component-helpers).
func (w *oracle) primary() (list []netip.Addr) {
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, x := range w.node.Status.Addresses {
			a := netip.MustParseAddr(x.Address)
			if x.Type == kind && !slices.ContainsFunc(list, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
				list = append(list, a)
			}
		}
	}
	return list
}

// place is where clients send.
type place struct {
	addr  netip.Addr
	proto uint8
	port  uint16
}

func (s place) String() string {
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(s.addr, s.port), frontend.ProtoName(s.proto))
}

// Who sends: it matters under externalTrafficPolicy Local.
const (
	fromOutside = iota
	fromHost
	fromPod
	senders
)

func (s place) sender(who int) netip.Addr {
	four := [senders]string{"192.0.2.250", "192.0.2.3", "198.51.100.200"}
	six := [senders]string{"2001:db8:9::5", "2001:db8::2", "2001:db8:2::1:5"}
	if s.addr.Is4() {
		return netip.MustParseAddr(four[who])
	}
	return netip.MustParseAddr(six[who])
}

// truth is what kube-proxy's rules do at a place, and what was known there.
type truth struct {
	sends  [senders]map[netip.AddrPort]bool
	served bool
	// known are the endpoints of the Services there, by whether any record of one
	// says that it is serving or ready.
	known map[netip.AddrPort]bool
}

// kubeProxy tells what kube-proxy's rules do, by place.
func (w *oracle) kubeProxy() map[place]*truth {
	all := map[place]*truth{}
	for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		services := proxy.NewServiceChangeTracker(family, nil, nil)
		endpoints := proxy.NewEndpointsChangeTracker(family, "n1", nil, nil)
		for _, svc := range w.now.Services {
			if _, other := svc.Labels[kubernetes.LabelServiceProxyName]; !other { // which its informer leaves out
				services.Update(nil, svc)
			}
		}
		for _, s := range w.now.EndpointSlices {
			endpoints.EndpointSliceUpdate(s, false)
		}
		ports, eps := proxy.ServicePortMap{}, proxy.EndpointsMap{}
		ports.Update(services)
		eps.Update(endpoints)
		serves := w.serves(family)
		for name, info := range ports {
			w.place(all, name, info, eps[name], serves, family)
		}
	}
	return all
}

func (w *oracle) place(all map[place]*truth, name proxy.ServicePortName, info proxy.ServicePort, eps []proxy.Endpoint,
	serves func(netip.Addr) bool, family corev1.IPFamily,
) {
	proto := map[corev1.Protocol]uint8{
		corev1.ProtocolUDP: conntrack.UDP, corev1.ProtocolTCP: conntrack.TCP, corev1.ProtocolSCTP: conntrack.SCTP,
	}[info.Protocol()]
	cluster, local, _, _ := proxy.CategorizeEndpoints(eps, info, "n1", map[string]string{corev1.LabelTopologyZone: "here"})
	known := w.endpoints(name, family)
	add := func(a netip.Addr, port int, served bool, chosen func(who int) []proxy.Endpoint) {
		at := place{a, proto, uint16(port)}
		x := all[at]
		if x == nil {
			x = &truth{known: map[netip.AddrPort]bool{}}
			for who := range x.sends {
				x.sends[who] = map[netip.AddrPort]bool{}
			}
			all[at] = x
		}
		x.served = x.served || served
		for e, valid := range known {
			x.known[e] = x.known[e] || valid
		}
		for who := range x.sends {
			for _, e := range chosen(who) {
				if served {
					x.sends[who][netip.MustParseAddrPort(e.String())] = true
				}
			}
		}
	}
	internal := func(int) []proxy.Endpoint {
		if info.InternalPolicyLocal() {
			return local
		}
		return cluster
	}
	external := func(who int) []proxy.Endpoint {
		if info.ExternalPolicyLocal() && who == fromOutside {
			return local
		}
		return cluster
	}
	addr := func(ip net.IP) netip.Addr { a, _ := netip.AddrFromSlice(ip); return a.Unmap() }
	add(addr(info.ClusterIP()), info.Port(), true, internal)
	for _, ip := range info.ExternalIPs() {
		add(addr(ip), info.Port(), w.gate, external)
	}
	for _, ip := range info.LoadBalancerVIPs() {
		add(addr(ip), info.Port(), true, external)
	}
	if info.NodePort() != 0 {
		for _, a := range append(w.loopback(), w.own...) {
			if a.Is4() == (family == corev1.IPv4Protocol) {
				add(a, info.NodePort(), serves(a), external)
			}
		}
	}
}

// endpoints returns those that slices name for a Service port, and whether any
// record of one says that it is serving or ready.
func (w *oracle) endpoints(name proxy.ServicePortName, family corev1.IPFamily) map[netip.AddrPort]bool {
	list := map[netip.AddrPort]bool{}
	for _, s := range w.now.EndpointSlices {
		if s.Labels[discoveryv1.LabelServiceName] != name.Name || string(s.AddressType) != string(family) {
			continue
		}
		for _, p := range s.Ports {
			if *p.Name != name.Port || *p.Protocol != name.Protocol {
				continue
			}
			for _, e := range s.Endpoints {
				at := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port))
				is := func(b *bool) bool { return b == nil || *b }
				list[at] = list[at] || is(e.Conditions.Ready) || is(e.Conditions.Serving)
			}
		}
	}
	return list
}

// check holds the judgement against what kube-proxy does.
func (w *oracle) check(t *testing.T, sum *tally) bool {
	serving := func(e netip.AddrPort) bool {
		return slices.ContainsFunc(w.now.EndpointSlices, func(s *discoveryv1.EndpointSlice) bool {
			return slices.ContainsFunc(s.Endpoints, func(x discoveryv1.Endpoint) bool {
				return x.Addresses[0] == e.Addr().String() && (x.Conditions.Serving == nil || *x.Conditions.Serving)
			})
		})
	}
	good := true
	for at, x := range w.kubeProxy() {
		for who := range senders {
			judge := func(to netip.AddrPort) frontend.Verdict {
				f := conntrack.Flow{
					Family: conntrack.FamilyOf(at.addr), Proto: at.proto,
					Orig:  conntrack.Tuple{Src: at.sender(who), Dst: at.addr, SrcPort: 40000, DstPort: at.port},
					Reply: conntrack.Tuple{Src: to.Addr(), Dst: at.sender(who), SrcPort: to.Port(), DstPort: 40000},
				}
				return w.table.Judge(&f)
			}
			wrong := func(what string, to netip.AddrPort, v frontend.Verdict) {
				good = false
				t.Errorf("%s: %s from %s to %v: %v (%s)", what, at.sender(who), to, at, v, v.Owner)
			}
			for to := range x.sends[who] {
				sum.made++
				if !serving(to) {
					sum.unready++
				}
				if v := judge(to); v.Reason != frontend.Serving {
					wrong("kube-proxy would send it there", to, v)
				}
			}
			self := netip.AddrPortFrom(at.addr, at.port)
			switch v := judge(self); {
			case len(x.sends[who]) > 0:
				if v.Action == frontend.Delete {
					sum.untranslated++
					if len(x.sends[fromOutside]) == 0 {
						sum.inside++
					}
				}
			case v.Action == frontend.Delete:
				wrong("kube-proxy would not translate it", self, v)
			default:
				sum.awaiting++
			}
			if !x.served {
				continue
			}
			dead := []netip.AddrPort{netip.AddrPortFrom(at.sender(fromOutside).Next(), 5300)} // never was one
			for to, valid := range x.known {
				if !valid {
					dead = append(dead, to)
				}
			}
			for _, to := range dead {
				sum.dead++
				if v := judge(to); v.Action != frontend.Delete && !w.shared(at) {
					wrong("it is no endpoint any more", to, v)
				}
			}
		}
	}
	return good
}

// shared tells whether another proxy's Service is at a place too, whose endpoints
// are valid there.
func (w *oracle) shared(at place) bool {
	return slices.ContainsFunc(w.now.Services, func(svc *corev1.Service) bool {
		_, other := svc.Labels[kubernetes.LabelServiceProxyName]
		return other && (slices.Contains(svc.Spec.ExternalIPs, at.addr.String()) ||
			slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, func(in corev1.LoadBalancerIngress) bool { return in.IP == at.addr.String() }))
	})
}
