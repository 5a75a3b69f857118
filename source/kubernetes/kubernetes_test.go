package kubernetes_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

// show writes a frontend as
// "KIND ADDRESS:PORT/PROTOCOL OWNER [VALID BACKENDS] USABLE [sweep=WHAT] [foreign]".
func show(f frontend.Frontend) string {
	addr := f.Addr.String()
	if !f.Addr.IsValid() {
		addr = "*" + f.Family.String()
	} else if conntrack.FamilyOf(f.Addr) != f.Family {
		addr += " of family " + f.Family.String()
	}
	s := fmt.Sprintf("%s %s:%d/%s %s %s %d", f.Kind, addr, f.Ports.First,
		conntrack.ProtoName(f.Proto), f.Owner, f.Valid.All(), f.Usable)
	if !f.Ports.Single() {
		s += " range"
	}
	if f.Sweep != nil {
		s += " sweep=" + f.Sweep.String()
	}
	if f.Foreign {
		s += " foreign"
	}
	return s
}

func showAll(fs []frontend.Frontend, errs []error) []string {
	var got []string
	for _, f := range fs {
		got = append(got, show(f))
	}
	for _, err := range errs {
		got = append(got, "! "+err.Error())
	}
	return got
}

func ptr[T any](v T) *T { return &v }

// service returns default/dns with the port udp of 53/UDP on 203.0.113.10.
func service(edits ...func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "dns"},
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			ClusterIP:  "203.0.113.10",
			ClusterIPs: []string{"203.0.113.10"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 53}},
		},
	}
	for _, edit := range edits {
		edit(svc)
	}
	return svc
}

func ingress(ips ...corev1.LoadBalancerIngress) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Status.LoadBalancer.Ingress = ips }
}

func dualStack(svc *corev1.Service) {
	svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, "2001:db8:1::10")
	svc.Spec.IPFamilies = append(svc.Spec.IPFamilies, corev1.IPv6Protocol)
}

// slice returns a slice of default/dns with the port udp of 5353/UDP.
func slice(addressType discoveryv1.AddressType, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default",
			Name:      "dns-a",
			Labels:    map[string]string{discoveryv1.LabelServiceName: "dns"},
		},
		AddressType: addressType,
		Endpoints:   endpoints,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr("udp"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(5353))}},
	}
}

// endpoint returns an endpoint with the conditions that the words name: ready,
// unready, serving, unserving, terminating; "on NODE" is its node.
func endpoint(addr, words string) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}}
	if s, node, ok := strings.Cut(words, "on "); ok {
		words, e.NodeName = s, &node
	}
	for word := range strings.FieldsSeq(words) {
		switch value := !strings.HasPrefix(word, "un"); strings.TrimPrefix(word, "un") {
		case "ready":
			e.Conditions.Ready = &value
		case "serving":
			e.Conditions.Serving = &value
		case "terminating":
			e.Conditions.Terminating = &value
		default:
			panic("no such condition: " + word)
		}
	}
	return e
}

// read reads slices from a node's point of view.
func read(node string, slices ...*discoveryv1.EndpointSlice) (list []*kubernetes.Slice) {
	for _, s := range slices {
		list = append(list, kubernetes.ReadSlice(s, node))
	}
	return list
}

func v4(endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return slice(discoveryv1.AddressTypeIPv4, endpoints...)
}

func TestServiceFrontends(t *testing.T) {
	one := v4(endpoint("198.51.100.11", ""))
	tests := []struct {
		name   string
		svc    *corev1.Service
		slices []*discoveryv1.EndpointSlice
		node   string
		want   []string
	}{
		{
			name:   "cluster address",
			svc:    service(),
			slices: []*discoveryv1.EndpointSlice{one},
			want:   []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1"},
		},
		{
			name: "no slice, no backends",
			svc:  service(),
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0"},
		},
		{
			name: "clusterIP where clusterIPs is missing, its family where ipFamilies is",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.ClusterIPs, svc.Spec.IPFamilies = nil, nil
				svc.Spec.ExternalIPs = []string{"203.0.113.81", "2001:db8::81"}
				svc.Spec.Ports[0].NodePort = 30053
			}),
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0",
				"external-ip 203.0.113.81:53/udp default/dns:udp [] 0",
				"node-port *ipv4:30053/udp default/dns:udp [] 0",
			},
		},
		{
			name: "every kind in both families, the backends by family",
			svc: service(dualStack, func(svc *corev1.Service) {
				svc.Spec.Type = corev1.ServiceTypeLoadBalancer
				svc.Spec.Ports[0].NodePort = 30053
				svc.Spec.ExternalIPs = []string{"203.0.113.81", "2001:db8::81"}
			}, ingress(corev1.LoadBalancerIngress{IP: "203.0.113.80"}, corev1.LoadBalancerIngress{IP: "2001:db8::80"})),
			slices: []*discoveryv1.EndpointSlice{
				one,
				slice(discoveryv1.AddressTypeIPv6, endpoint("2001:db8:2::12", "")),
			},
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1",
				"cluster-ip 2001:db8:1::10:53/udp default/dns:udp [[2001:db8:2::12]:5353] 1",
				"external-ip 203.0.113.81:53/udp default/dns:udp [198.51.100.11:5353] 1",
				"external-ip 2001:db8::81:53/udp default/dns:udp [[2001:db8:2::12]:5353] 1",
				"load-balancer-ip 203.0.113.80:53/udp default/dns:udp [198.51.100.11:5353] 1",
				"load-balancer-ip 2001:db8::80:53/udp default/dns:udp [[2001:db8:2::12]:5353] 1",
				"node-port *ipv4:30053/udp default/dns:udp [198.51.100.11:5353] 1",
				"node-port *ipv6:30053/udp default/dns:udp [[2001:db8:2::12]:5353] 1",
			},
		},
		{
			name: "external and ingress address of a family without cluster address",
			svc: service(func(svc *corev1.Service) { svc.Spec.ExternalIPs = []string{"2001:db8::81"} },
				ingress(corev1.LoadBalancerIngress{IP: "2001:db8::80"})),
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0"},
		},
		{
			name: "an address listed twice",
			svc: service(func(svc *corev1.Service) { svc.Spec.ExternalIPs = []string{"203.0.113.80", "203.0.113.80"} },
				ingress(corev1.LoadBalancerIngress{IP: "203.0.113.80"})),
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0",
				"load-balancer-ip 203.0.113.80:53/udp default/dns:udp [] 0",
			},
		},
		{
			name: "ingress by name, in proxy mode, in VIP mode",
			svc: service(ingress(
				corev1.LoadBalancerIngress{Hostname: "lb.example.com"},
				corev1.LoadBalancerIngress{IP: "203.0.113.80", IPMode: ptr(corev1.LoadBalancerIPModeProxy)},
				corev1.LoadBalancerIngress{IP: "203.0.113.81", IPMode: ptr(corev1.LoadBalancerIPModeVIP)},
			)),
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0",
				"load-balancer-ip 203.0.113.81:53/udp default/dns:udp [] 0",
			},
		},
		{
			name: "node port whatever the type",
			svc:  service(func(svc *corev1.Service) { svc.Spec.Ports[0].NodePort = 30053 }),
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0",
				"node-port *ipv4:30053/udp default/dns:udp [] 0",
			},
		},
		{
			name: "headless",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.ClusterIP, svc.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
			}),
			slices: []*discoveryv1.EndpointSlice{v4(endpoint("bad", ""))},
		},
		{
			name: "ExternalName",
			svc:  service(func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeExternalName }),
		},
		{
			name: "no cluster address yet",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "", nil
				svc.Spec.ExternalIPs = []string{"203.0.113.81"}
			}),
			want: []string{"! Service default/dns: spec.clusterIP: is empty"},
		},
		{
			name: "served by another proxy",
			svc: service(func(svc *corev1.Service) {
				svc.Labels = map[string]string{kubernetes.LabelServiceProxyName: ""}
			}),
			slices: []*discoveryv1.EndpointSlice{one},
			want:   []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1 foreign"},
		},
		{
			name: "ports by name and protocol, unset name and protocol",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.Ports = []corev1.ServicePort{
					{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53},
					{Name: "dns", Protocol: corev1.ProtocolTCP, Port: 53},
					{Port: 80},
					{Name: "s", Protocol: corev1.ProtocolSCTP, Port: 38412},
				}
			}),
			slices: []*discoveryv1.EndpointSlice{func() *discoveryv1.EndpointSlice {
				s := v4(endpoint("198.51.100.11", ""))
				s.Ports = []discoveryv1.EndpointPort{
					{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr(int32(5301))},
					{Name: ptr("dns"), Port: ptr(int32(5302))},
					{Protocol: ptr(corev1.Protocol("")), Port: ptr(int32(8080))},
					{Name: ptr("s"), Protocol: ptr(corev1.ProtocolSCTP), Port: ptr(int32(38412))},
					{Name: ptr("other"), Port: ptr(int32(1))},
				}
				return s
			}()},
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:dns [198.51.100.11:5301] 1",
				"cluster-ip 203.0.113.10:53/tcp default/dns:dns [198.51.100.11:5302] 1",
				"cluster-ip 203.0.113.10:80/tcp default/dns [198.51.100.11:8080] 1",
				"cluster-ip 203.0.113.10:38412/sctp default/dns:s [198.51.100.11:38412] 1",
			},
		},
		{
			name: "slices of another Service, namespace, family and FQDN",
			svc:  service(),
			slices: []*discoveryv1.EndpointSlice{
				one,
				func() *discoveryv1.EndpointSlice {
					s := v4(endpoint("198.51.100.21", ""))
					s.Labels[discoveryv1.LabelServiceName] = "other"
					return s
				}(),
				func() *discoveryv1.EndpointSlice {
					s := v4(endpoint("198.51.100.22", ""))
					s.Namespace = "other"
					return s
				}(),
				slice(discoveryv1.AddressTypeIPv6, endpoint("2001:db8:2::12", "")),
				slice(discoveryv1.AddressTypeFQDN, endpoint("a.example.com", "")),
			},
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1"},
		},
		{
			name: "slice ports without number",
			svc:  service(),
			slices: []*discoveryv1.EndpointSlice{func() *discoveryv1.EndpointSlice {
				s := v4(endpoint("198.51.100.11", ""))
				s.Ports[0].Port = nil
				return s
			}()},
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [] 0"},
		},
		{
			name: "further addresses of an endpoint are valid and not usable",
			svc:  service(),
			slices: []*discoveryv1.EndpointSlice{v4(discoveryv1.Endpoint{
				Addresses: []string{"198.51.100.11", "198.51.100.12"},
			})},
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353 198.51.100.12:5353] 1"},
		},
		{
			name: "one endpoint in two slices",
			svc:  service(),
			node: "n1",
			slices: []*discoveryv1.EndpointSlice{
				v4(endpoint("198.51.100.11", "unready unserving terminating on n1")),
				v4(endpoint("198.51.100.11", "ready on n1")),
			},
			want: []string{"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1"},
		},
		{
			name: "forms of addresses that kube-proxy reads too",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.ClusterIPs = []string{"203.000.113.010"}
				svc.Spec.ExternalIPs = []string{"::ffff:203.0.113.81"}
			}),
			slices: []*discoveryv1.EndpointSlice{v4(endpoint("::ffff:198.51.100.011", ""))},
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1",
				"external-ip 203.0.113.81:53/udp default/dns:udp [198.51.100.11:5353] 1",
			},
		},
		{
			name: "what is wrong in a Service does not stop the rest",
			svc: service(func(svc *corev1.Service) {
				svc.Spec.ClusterIPs = []string{"203.0.113.999", ""}
				svc.Spec.IPFamilies = []corev1.IPFamily{"IPv4", "ipv6"}
				svc.Spec.ExternalIPs = []string{"", "fe80::1%eth0", "203.0.113.81"}
				svc.Spec.Ports = []corev1.ServicePort{
					{Name: "a", Protocol: "udp", Port: 53},
					{Name: "b", Protocol: corev1.ProtocolUDP, Port: 0, NodePort: 30053},
					{Name: "c", Protocol: corev1.ProtocolUDP, Port: 70000, NodePort: 70000},
					{Name: "d", Protocol: corev1.ProtocolUDP, Port: 54},
				}
			}, ingress(corev1.LoadBalancerIngress{IP: "lb"}, corev1.LoadBalancerIngress{IP: "203.0.113.80"})),
			want: []string{
				"node-port *ipv4:30053/udp default/dns:b [] 0",
				"external-ip 203.0.113.81:54/udp default/dns:d [] 0",
				"load-balancer-ip 203.0.113.80:54/udp default/dns:d [] 0",
				`! Service default/dns: spec.clusterIPs[0]: "203.0.113.999" is not an IP address`,
				`! Service default/dns: spec.clusterIPs[1]: is empty`,
				`! Service default/dns: spec.ipFamilies[1]: "ipv6" is not a family (IPv4 or IPv6)`,
				`! Service default/dns: spec.externalIPs[0]: is empty`,
				`! Service default/dns: spec.externalIPs[1]: "fe80::1%eth0" is not an IP address`,
				`! Service default/dns: status.loadBalancer.ingress[0].ip: "lb" is not an IP address`,
				`! Service default/dns: spec.ports[0].protocol: "udp" is not a protocol (UDP, TCP or SCTP)`,
				`! Service default/dns: spec.ports[1].port: 0 is not a port (1-65535)`,
				`! Service default/dns: spec.ports[2].port: 70000 is not a port (1-65535)`,
				`! Service default/dns: spec.ports[2].nodePort: 70000 is not a port (1-65535)`,
			},
		},
		{
			name: "what is wrong in slices is told once for all ports and does not stop the rest",
			svc: service(dualStack, func(svc *corev1.Service) {
				svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "tcp", Port: 54})
			}),
			slices: []*discoveryv1.EndpointSlice{
				func() *discoveryv1.EndpointSlice {
					s := v4(
						endpoint("bad", ""),
						discoveryv1.Endpoint{},
						discoveryv1.Endpoint{Addresses: []string{"", "2001:db8:2::12", "198.51.100.11"}},
					)
					s.Ports = append(s.Ports,
						discoveryv1.EndpointPort{Name: ptr("zero"), Port: ptr(int32(0))},
						discoveryv1.EndpointPort{Name: ptr("big"), Port: ptr(int32(65536))},
						discoveryv1.EndpointPort{Name: ptr("what"), Protocol: ptr(corev1.Protocol("ICMP")), Port: ptr(int32(1))},
						discoveryv1.EndpointPort{Name: ptr("tcp"), Port: ptr(int32(65535))},
					)
					return s
				}(),
				slice("IPv5", endpoint("198.51.100.12", "")),
			},
			want: []string{
				"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 0",
				"cluster-ip 2001:db8:1::10:53/udp default/dns:udp [] 0",
				"cluster-ip 203.0.113.10:54/tcp default/dns:tcp [198.51.100.11:65535] 0",
				"cluster-ip 2001:db8:1::10:54/tcp default/dns:tcp [] 0",
				`! EndpointSlice default/dns-a: endpoints[0].addresses[0]: "bad" is not an IP address`,
				`! EndpointSlice default/dns-a: endpoints[1].addresses: is empty`,
				`! EndpointSlice default/dns-a: endpoints[2].addresses[0]: is empty`,
				`! EndpointSlice default/dns-a: endpoints[2].addresses[1]: "2001:db8:2::12" is not of the slice's address type IPv4`,
				`! EndpointSlice default/dns-a: ports[1].port: 0 is not a port (1-65535)`,
				`! EndpointSlice default/dns-a: ports[2].port: 65536 is not a port (1-65535)`,
				`! EndpointSlice default/dns-a: ports[3].protocol: "ICMP" is not a protocol (UDP, TCP or SCTP)`,
				`! EndpointSlice default/dns-a: addressType: "IPv5" is not an address type (IPv4, IPv6 or FQDN)`,
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := showAll(kubernetes.ServiceFrontends(tt.svc, read(tt.node, tt.slices...)))
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("frontends and problems (-want +got):\n%s", d)
			}
		})
	}
}

// TestConditions has one Service whose every kind of frontend follows one of
// the two traffic policies; topology hints are set throughout and never matter.
// What an annotation says counts for the ports of the protocols that it names,
// whatever kind of frontend they are; one that makes no sense says nothing.
func TestSweepAnnotation(t *testing.T) {
	const problem = "! Service default/dns: metadata.annotations[flowsweep.dev/sweep]: "
	tests := []struct {
		name, value string
		// What the frontends of UDP, TCP and SCTP say, "-" for nothing.
		udp, tcp, sctp string
		problem        string
	}{
		{"all protocols", "udp=off,tcp=all,sctp=unreplied", "off", "all", "unreplied", ""},
		{"one protocol", "tcp=all", "-", "all", "-", ""},
		{"what is configured anyway is said all the same", "udp=all", "all", "-", "-", ""},
		{"spaces around the parts", "  udp=unreplied , tcp=off ", "unreplied", "off", "-", ""},
		{"empty", "", "-", "-", "-", `"": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"nothing but spaces", "  ", "-", "-", "-", `"  ": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"a comma too many", "udp=off,", "-", "-", "-", `"": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"no equals sign", "off", "-", "-", "-", `"off": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"protocol alone", "udp", "-", "-", "-", `"udp": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"nothing after the equals sign", "udp=", "-", "-", "-", `"udp=": want all, unreplied or off after udp=`},
		{"unknown protocol", "udp=off,icmp=all", "-", "-", "-", `"icmp=all": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"unknown word", "udp=off,tcp=always", "-", "-", "-", `"tcp=always": want all, unreplied or off after tcp=`},
		{"upper case", "UDP=off", "-", "-", "-", `"UDP=off": want PROTOCOL=WHAT with protocol udp, tcp or sctp`},
		{"spaces inside a part", "udp= off", "-", "-", "-", `"udp= off": want all, unreplied or off after udp=`},
		{"twice", "udp=off,tcp=all,udp=off", "-", "-", "-", `"udp=off": udp is given twice`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			svc := service(func(svc *corev1.Service) {
				svc.Annotations = map[string]string{"flowsweep.dev/sweep": tt.value, "example.com/sweep": "udp=all"}
				svc.Spec.ExternalIPs = []string{"203.0.113.81"}
				svc.Spec.Ports = []corev1.ServicePort{
					{Name: "u", Protocol: corev1.ProtocolUDP, Port: 53, NodePort: 30053},
					{Name: "t", Port: 53},
					{Name: "s", Protocol: corev1.ProtocolSCTP, Port: 53},
				}
			})
			var want []string
			for _, line := range []struct{ text, sweep string }{
				{"cluster-ip 203.0.113.10:53/udp default/dns:u [] 0", tt.udp},
				{"external-ip 203.0.113.81:53/udp default/dns:u [] 0", tt.udp},
				{"node-port *ipv4:30053/udp default/dns:u [] 0", tt.udp},
				{"cluster-ip 203.0.113.10:53/tcp default/dns:t [] 0", tt.tcp},
				{"external-ip 203.0.113.81:53/tcp default/dns:t [] 0", tt.tcp},
				{"cluster-ip 203.0.113.10:53/sctp default/dns:s [] 0", tt.sctp},
				{"external-ip 203.0.113.81:53/sctp default/dns:s [] 0", tt.sctp},
			} {
				if line.sweep != "-" {
					line.text += " sweep=" + line.sweep
				}
				want = append(want, line.text)
			}
			if tt.problem != "" {
				want = append(want, problem+tt.problem+"; the whole annotation is ignored")
			}
			if d := cmp.Diff(want, showAll(kubernetes.ServiceFrontends(svc, nil))); d != "" {
				t.Errorf("frontends and problems (-want +got):\n%s", d)
			}
		})
	}
}

func TestConditions(t *testing.T) {
	tests := []struct {
		name      string
		endpoints []string // the i-th is 198.51.100.(i+1)
		node      string
		valid     []int
		// usable under each policy
		cluster, local int
	}{
		{"nothing set", []string{""}, "n1", []int{1}, 1, 0},
		{"nothing set, here", []string{"on n1"}, "n1", []int{1}, 1, 1},
		{"ready and serving are true where unset", []string{"ready", "serving"}, "n1", []int{1, 2}, 2, 0},
		{"serving is true though ready is false", []string{"unready"}, "n1", []int{1}, 0, 0},
		{"ready is true though serving is false", []string{"unserving"}, "n1", []int{1}, 1, 0},
		{
			"published though not ready, terminating or not",
			[]string{"ready unserving on n1", "ready unserving terminating on n1"},
			"n1",
			[]int{1, 2},
			2, 2,
		},
		{"not ready, not serving", []string{"unready unserving on n1"}, "n1", nil, 0, 0},
		{
			"terminating counts where none is ready",
			[]string{"unready serving terminating on n1", "unready serving terminating", "unready unserving terminating on n1"},
			"n1",
			[]int{1, 2},
			2, 1,
		},
		{
			"terminating is valid and not usable where another is ready",
			[]string{"unready serving terminating on n1", "ready on n1"},
			"n1",
			[]int{1, 2},
			1, 1,
		},
		{
			"the fallback is chosen among those that the policy admits",
			[]string{"unready serving terminating on n1", "ready on n2"},
			"n1",
			[]int{1, 2},
			1, 1,
		},
		{"serving but unready is no fallback", []string{"unready serving on n1"}, "n1", []int{1}, 0, 0},
		{"on another node", []string{"on n2", "on n3"}, "n1", []int{1, 2}, 2, 0},
		{"no node known: none is local", []string{"on n1", ""}, "", []int{1, 2}, 2, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := v4()
			for i, words := range tt.endpoints {
				e := endpoint(fmt.Sprintf("198.51.100.%d", i+1), words)
				e.Hints = &discoveryv1.EndpointHints{
					ForZones: []discoveryv1.ForZone{{Name: "elsewhere"}},
					ForNodes: []discoveryv1.ForNode{{Name: "elsewhere"}},
				}
				s.Endpoints = append(s.Endpoints, e)
			}
			if tt.node == "" { // an endpoint of node "" is not local either
				s.Endpoints[len(s.Endpoints)-1].NodeName = ptr("")
			}
			var valid []netip.AddrPort
			for _, i := range tt.valid {
				valid = append(valid, netip.MustParseAddrPort(fmt.Sprintf("198.51.100.%d:5353", i)))
			}
			for _, policy := range []string{"", "Cluster", "Local"} {
				for _, internal := range []bool{true, false} {
					svc := service(func(svc *corev1.Service) {
						svc.Spec.ExternalIPs = []string{"203.0.113.81"}
						svc.Spec.Ports[0].NodePort = 30053
						if internal {
							svc.Spec.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicy(policy))
						} else {
							svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(policy)
						}
					}, ingress(corev1.LoadBalancerIngress{IP: "203.0.113.80"}))
					fs, errs := kubernetes.ServiceFrontends(svc, read(tt.node, s))
					if len(fs) != 4 || errs != nil {
						t.Fatalf("%d frontends, problems %v", len(fs), errs)
					}
					for _, f := range fs {
						want := tt.cluster
						if policy == "Local" && internal == (f.Kind == frontend.ClusterIP) {
							want = tt.local
						}
						inside := 0
						if policy == "Local" && !internal && f.Kind != frontend.ClusterIP {
							inside = tt.cluster
						}
						if f.Inside != inside {
							t.Errorf("%s, policy %q, internal %t: %d for inside, want %d", f.Kind, policy, internal, f.Inside, inside)
						}
						if f.Usable != want {
							t.Errorf("%s, policy %q, internal %t: %d usable, want %d", f.Kind, policy, internal, f.Usable, want)
						}
						if !slices.Equal(f.Valid.All(), valid) {
							t.Errorf("%s, policy %q: valid %v, want %v", f.Kind, policy, f.Valid.All(), valid)
						}
					}
				}
			}
		})
	}
}

// An endpoint that several records name is what kube-proxy takes it for, in
// whatever order they come, and valid by any of them.
func TestEndpointTwice(t *testing.T) {
	tests := []struct {
		name           string
		records        []string
		valid          bool
		cluster, local int
	}{
		{"the same twice", []string{"on n1", "on n1"}, true, 1, 1},
		{"in use again, and ready", []string{"unready serving terminating on n2", "ready on n1"}, true, 1, 1},
		{"in use again, elsewhere", []string{"unready serving terminating on n1", "ready on n2"}, true, 1, 0},
		{"in use again, and not ready", []string{"unready serving terminating on n1", "unready unserving on n1"}, true, 0, 0},
		{"a dead one that terminates", []string{"unready unserving terminating on n1", "unready unserving on n1"}, false, 0, 0},
		{"both terminate", []string{"unready serving terminating on n1", "unready serving terminating on n1"}, true, 1, 1},
		{"both terminate, one serves", []string{"unready serving terminating on n1", "unready unserving terminating on n1"}, true, 0, 0},
		{"published while it terminates", []string{"ready unserving terminating on n1", "unready unserving on n1"}, true, 0, 0},
		{"one is ready", []string{"ready on n1", "unready unserving on n1"}, true, 0, 0},
		{"both ready, one here", []string{"on n1", "on n2"}, true, 1, 0},
		{
			"three",
			[]string{"unready serving terminating on n1", "ready on n1", "unready unserving terminating on n2"},
			true, 1, 1,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for range len(tt.records) {
				tt.records = append(tt.records[1:], tt.records[0])
				for _, apart := range []bool{true, false} {
					all := v4()
					var list []*discoveryv1.EndpointSlice
					for _, words := range tt.records {
						e := endpoint("198.51.100.1", words)
						all.Endpoints = append(all.Endpoints, e)
						list = append(list, v4(e))
					}
					if !apart {
						list = []*discoveryv1.EndpointSlice{all}
					}
					svc := service(func(svc *corev1.Service) {
						svc.Spec.ExternalIPs = []string{"203.0.113.81"}
						svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
					})
					fs, _ := kubernetes.ServiceFrontends(svc, read("n1", list...))
					if fs[0].Usable != tt.cluster || fs[1].Usable != tt.local || (fs[0].Valid.Len() == 1) != tt.valid {
						t.Errorf("%q: %d usable, %d here, valid %v; want %d, %d, %t", tt.records,
							fs[0].Usable, fs[1].Usable, fs[0].Valid, tt.cluster, tt.local, tt.valid)
					}
				}
			}
		})
	}
	t.Run("as a further address", func(t *testing.T) {
		fs, _ := kubernetes.ServiceFrontends(service(), read("",
			v4(discoveryv1.Endpoint{Addresses: []string{"198.51.100.2", "198.51.100.1"}}), v4(endpoint("198.51.100.1", ""))))
		if fs[0].Usable != 2 || fs[0].Valid.Len() != 2 {
			t.Errorf("%d usable of %v, want 2", fs[0].Usable, fs[0].Valid)
		}
	})
}

// TestShared holds the backends of a port's frontends to one array a family.
func TestShared(t *testing.T) {
	svc := service(dualStack, func(svc *corev1.Service) {
		svc.Spec.ExternalIPs = []string{"203.0.113.81", "2001:db8::81"}
	})
	fs, _ := kubernetes.ServiceFrontends(svc, read("",
		v4(endpoint("198.51.100.11", "")),
		slice(discoveryv1.AddressTypeIPv6, endpoint("2001:db8:2::12", "")),
	))
	sets := map[*netip.AddrPort]bool{}
	for _, f := range fs {
		sets[&f.Valid.All()[0]] = true
	}
	if len(fs) != 4 || len(sets) != 2 {
		t.Errorf("%d frontends have %d sets of backends, want 4 and 2", len(fs), len(sets))
	}
}

// pod returns default/agent on n1 with the host port 8125/UDP.
func pod(edits ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "agent"},
		Spec: corev1.PodSpec{
			NodeName: "n1",
			Containers: []corev1.Container{{
				Ports: []corev1.ContainerPort{{ContainerPort: 9125, HostPort: 8125, Protocol: corev1.ProtocolUDP}},
			}},
		},
		Status: corev1.PodStatus{
			Phase:  corev1.PodRunning,
			PodIP:  "198.51.100.11",
			PodIPs: []corev1.PodIP{{IP: "198.51.100.11"}},
		},
	}
	for _, edit := range edits {
		edit(p)
	}
	return p
}

func TestPodFrontends(t *testing.T) {
	const v4Port = "host-port *ipv4:8125/udp default/agent [198.51.100.11:9125] 1"
	port := func(p *corev1.Pod) *corev1.ContainerPort { return &p.Spec.Containers[0].Ports[0] }
	dual := func(p *corev1.Pod) {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "2001:db8:2::11"})
	}
	hostIP := func(ip string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { port(p).HostIP = ip }
	}
	both := []string{v4Port, "host-port *ipv6:8125/udp default/agent [[2001:db8:2::11]:9125] 1"}
	tests := []struct {
		name string
		pod  *corev1.Pod
		node string
		want []string
	}{
		{"here", pod(), "n1", []string{v4Port}},
		{"elsewhere", pod(), "n2", nil},
		{"no node known", pod(), "", nil},
		{"unscheduled, no node known", pod(func(p *corev1.Pod) { p.Spec.NodeName = "" }), "", nil},
		{"on the host's network", pod(func(p *corev1.Pod) { p.Spec.HostNetwork = true }), "n1", nil},
		{"succeeded", pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), "n1", nil},
		{"failed", pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), "n1", nil},
		{"pending with an address", pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }), "n1", []string{v4Port}},
		{"no address yet", pod(func(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil }), "n1", nil},
		{"podIP where podIPs is missing", pod(func(p *corev1.Pod) { p.Status.PodIPs = nil }), "n1", []string{v4Port}},
		{"no host port", pod(func(p *corev1.Pod) { port(p).HostPort = 0 }), "n1", nil},
		{"both families", pod(dual), "n1", both},
		{"host IP 0.0.0.0", pod(dual, hostIP("0.0.0.0")), "n1", both},
		{"host IP ::", pod(dual, hostIP("::")), "n1", both},
		{"host IP :: of a pod with IPv4 alone", pod(hostIP("::")), "n1", []string{v4Port}},
		{
			"one host IP", pod(dual, hostIP("192.0.2.1")), "n1",
			[]string{"host-port 192.0.2.1:8125/udp default/agent [198.51.100.11:9125] 1"},
		},
		{"host IP of a family that the pod has not", pod(hostIP("2001:db8::1")), "n1", nil},
		{
			"unset protocol",
			pod(func(p *corev1.Pod) { port(p).Protocol = "" }), "n1",
			[]string{"host-port *ipv4:8125/tcp default/agent [198.51.100.11:9125] 1"},
		},
		{
			"sidecar and plain init container",
			pod(func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{
					{Ports: []corev1.ContainerPort{{ContainerPort: 1, HostPort: 1}}},
					{
						RestartPolicy: ptr(corev1.ContainerRestartPolicyAlways),
						Ports:         []corev1.ContainerPort{{ContainerPort: 2, HostPort: 2, Protocol: corev1.ProtocolSCTP}},
					},
				}
			}), "n1",
			[]string{"host-port *ipv4:2/sctp default/agent [198.51.100.11:2] 1", v4Port},
		},
		{
			"what is wrong does not stop the rest",
			pod(func(p *corev1.Pod) {
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Ports: []corev1.ContainerPort{
					{ContainerPort: 1, HostPort: 70000},
					{ContainerPort: 0, HostPort: 1},
					{ContainerPort: 1, HostPort: 1, Protocol: "QUIC"},
					{ContainerPort: 1, HostPort: 1, HostIP: "eth0"},
				}})
				p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "bad"})
			}), "n1",
			[]string{
				v4Port,
				`! Pod default/agent: status.podIPs[1].ip: "bad" is not an IP address`,
				`! Pod default/agent: spec.containers[1].ports[0].hostPort: 70000 is not a port (1-65535)`,
				`! Pod default/agent: spec.containers[1].ports[1].containerPort: 0 is not a port (1-65535)`,
				`! Pod default/agent: spec.containers[1].ports[2].protocol: "QUIC" is not a protocol (UDP, TCP or SCTP)`,
				`! Pod default/agent: spec.containers[1].ports[3].hostIP: "eth0" is not an IP address`,
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := showAll(kubernetes.PodFrontends(tt.pod, tt.node))
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("frontends and problems (-want +got):\n%s", d)
			}
		})
	}
}

func TestPodRanges(t *testing.T) {
	for _, tt := range []struct {
		one  string
		all  []string
		want string
	}{
		{"", nil, "[]"},
		{"198.51.100.0/28", nil, "[198.51.100.0/28]"},
		{"198.51.100.0/28", []string{"198.51.100.0/28", "2001:db8:2::/80"}, "[198.51.100.0/28 2001:db8:2::/80]"},
		{"", []string{"198.51.100.9/28", "198.51.100.0", "x/8", "::ffff:192.0.2.0/120"}, "[198.51.100.0/28]"},
	} {
		n := corev1.Node{Spec: corev1.NodeSpec{PodCIDR: tt.one, PodCIDRs: tt.all}}
		if got := fmt.Sprint(kubernetes.PodRanges(&n)); got != tt.want {
			t.Errorf("%q and %q: %s, want %s", tt.one, tt.all, got, tt.want)
		}
	}
}

func TestPodAddresses(t *testing.T) {
	two := func(p *corev1.Pod) {
		p.Status.PodIPs = []corev1.PodIP{{IP: "198.51.100.11"}, {IP: "2001:db8:2::11"}, {IP: "x"}}
		p.Spec.Containers = nil
	}
	for _, tt := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{pod(), "[198.51.100.11]"},
		{pod(two), "[198.51.100.11 2001:db8:2::11]"},
		{pod(two, func(p *corev1.Pod) { p.Spec.NodeName = "n2" }), "[]"},
		{pod(two, func(p *corev1.Pod) { p.Spec.HostNetwork = true }), "[]"},
		{pod(two, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), "[]"},
	} {
		addrs := kubernetes.PodAddresses(tt.pod, "n1")
		if got := fmt.Sprint(addrs); got != tt.want {
			t.Errorf("%s, want %s", got, tt.want)
		}
		n := corev1.Node{Spec: corev1.NodeSpec{PodCIDR: "198.51.100.0/28"}}
		want := "[198.51.100.0/28]"
		if len(addrs) > 1 {
			want = "[198.51.100.0/28 2001:db8:2::11/128]"
		}
		if got := fmt.Sprint(kubernetes.PodRanges(&n, addrs...)); got != want {
			t.Errorf("ranges %s, want %s", got, want)
		}
	}
	if got := kubernetes.PodAddresses(pod(), ""); got != nil {
		t.Errorf("without a name of the node: %v", got)
	}
}

func TestNodeAddresses(t *testing.T) {
	var node corev1.Node
	for _, a := range []struct {
		kind    corev1.NodeAddressType
		address string
	}{
		{corev1.NodeInternalIP, "192.0.2.1"},
		{corev1.NodeHostName, "192.0.2.2"},
		{corev1.NodeExternalIP, "2001:db8::1"},
		{corev1.NodeInternalDNS, "n1.example.com"},
		{corev1.NodeInternalIP, "127.0.0.1"},
		{corev1.NodeInternalIP, "::1"},
		{corev1.NodeInternalIP, "::ffff:192.0.2.1"},
		{corev1.NodeExternalIP, "192.0.2.03"},
		{corev1.NodeExternalIP, "pending"},
		{corev1.NodeInternalIP, "2001:db8::5"},
		{corev1.NodeInternalIP, "192.0.2.3"},
		{corev1.NodeExternalIP, "192.0.2.4"},
	} {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: a.kind, Address: a.address})
	}
	// The internal ones before the external ones, each in the order listed; one that
	// is listed as both is internal.
	want := "[192.0.2.1 2001:db8::5 192.0.2.3 2001:db8::1 192.0.2.4]"
	if got := fmt.Sprint(kubernetes.NodeAddresses(&node)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestFrontends(t *testing.T) {
	headless := service(func(svc *corev1.Service) { svc.Name, svc.Spec.ClusterIP = "headless", corev1.ClusterIPNone })
	other := service(func(svc *corev1.Service) { svc.Namespace, svc.Spec.ClusterIPs = "other", []string{"203.0.113.11"} })
	units, problems := kubernetes.Frontends(kubernetes.Objects{
		Services:       []*corev1.Service{service(), headless, other},
		EndpointSlices: []*discoveryv1.EndpointSlice{v4(endpoint("198.51.100.11", "")), v4(endpoint("bad", ""))},
		Pods:           []*corev1.Pod{pod(), pod(func(p *corev1.Pod) { p.Name, p.Spec.NodeName = "away", "n2" })},
	}, "n1")
	got := map[string][]string{}
	for name, fs := range units {
		got[name] = showAll(fs, nil)
	}
	got["problems"] = showAll(nil, problems)
	want := map[string][]string{
		"service default/dns": {"cluster-ip 203.0.113.10:53/udp default/dns:udp [198.51.100.11:5353] 1"},
		"service other/dns":   {"cluster-ip 203.0.113.11:53/udp other/dns:udp [] 0"},
		"pod default/agent":   {"host-port *ipv4:8125/udp default/agent [198.51.100.11:9125] 1"},
		"problems":            {`! EndpointSlice default/dns-a: endpoints[0].addresses[0]: "bad" is not an IP address`},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("units (-want +got):\n%s", d)
	}
}

// cluster returns Services of one port and as many endpoints each as told.
func cluster(services, endpoints int) kubernetes.Objects {
	var objs kubernetes.Objects
	for i := range services {
		name := fmt.Sprintf("svc-%d", i)
		objs.Services = append(objs.Services, service(func(svc *corev1.Service) {
			svc.Name = name
			svc.Spec.ClusterIPs = []string{fmt.Sprintf("10.96.%d.%d", i/250, i%250)}
		}))
		s := v4()
		s.Name, s.Labels[discoveryv1.LabelServiceName] = name, name
		for j := range endpoints {
			e := endpoint(fmt.Sprintf("10.%d.%d.%d", 128+j, i/250, i%250), "ready serving")
			e.NodeName = ptr("n1")
			s.Endpoints = append(s.Endpoints, e)
		}
		objs.EndpointSlices = append(objs.EndpointSlices, s)
	}
	return objs
}

func BenchmarkFrontends(b *testing.B) {
	objs := cluster(10_000, 10)
	b.ReportAllocs()
	for b.Loop() {
		if units, _ := kubernetes.Frontends(objs, "n1"); len(units) != 10_000 {
			b.Fatal(len(units))
		}
	}
}

func BenchmarkServiceFrontends(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			svc, s := service(), v4()
			for i := range n {
				s.Endpoints = append(s.Endpoints, endpoint(fmt.Sprintf("10.128.%d.%d", i/250, i%250), "ready"))
			}
			b.ReportAllocs()
			for b.Loop() {
				kubernetes.ServiceFrontends(svc, read("n1", s))
			}
		})
	}
}
