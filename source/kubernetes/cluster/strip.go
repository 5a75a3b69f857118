package cluster

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/flowsweep/flowsweep/source/kubernetes"
)

// strip returns a copy of an object with what counts from the point of view of a
// node, and what it is found by. Stripping twice changes nothing. An object of
// another kind is returned as it is.
func strip(obj runtime.Object, node string) runtime.Object {
	switch o := obj.(type) {
	case *corev1.Service:
		return stripService(o)
	case *discoveryv1.EndpointSlice:
		return stripSlice(o, node)
	case *corev1.Pod:
		return stripPod(o)
	case *corev1.Node:
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: o.Name},
			Spec:       corev1.NodeSpec{PodCIDR: o.Spec.PodCIDR, PodCIDRs: o.Spec.PodCIDRs},
			Status:     corev1.NodeStatus{Addresses: o.Status.Addresses},
		}
	case *networkingv1.ServiceCIDR:
		return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: o.Name}, Spec: o.Spec}
	}
	return obj
}

// only returns the one entry of a map that counts.
func only(m map[string]string, key string) map[string]string {
	if v, ok := m[key]; ok {
		return map[string]string{key: v}
	}
	return nil
}

func stripService(o *corev1.Service) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.Namespace, Name: o.Name, UID: o.UID,
			Labels:      only(o.Labels, kubernetes.LabelServiceProxyName),
			Annotations: only(o.Annotations, kubernetes.AnnotationSweep),
		},
		Spec: corev1.ServiceSpec{
			Type: o.Spec.Type, ClusterIP: o.Spec.ClusterIP, ClusterIPs: o.Spec.ClusterIPs,
			IPFamilies: o.Spec.IPFamilies, ExternalIPs: o.Spec.ExternalIPs,
			InternalTrafficPolicy: o.Spec.InternalTrafficPolicy, ExternalTrafficPolicy: o.Spec.ExternalTrafficPolicy,
		},
	}
	for _, p := range o.Spec.Ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: p.Name, Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort,
		})
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: in.IP, IPMode: in.IPMode})
	}
	return s
}

var yes, no = true, false

// shared returns a pointer of everybody's, so that a hundred thousand endpoints
// do not have three of their own each.
func shared(b *bool) *bool {
	switch {
	case b == nil:
		return nil
	case *b:
		return &yes
	}
	return &no
}

func stripSlice(o *discoveryv1.EndpointSlice, node string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.Namespace, Name: o.Name, Labels: only(o.Labels, discoveryv1.LabelServiceName),
		},
		AddressType: o.AddressType,
		Endpoints:   make([]discoveryv1.Endpoint, len(o.Endpoints)),
	}
	for i := range o.Endpoints {
		e := &o.Endpoints[i]
		s.Endpoints[i] = discoveryv1.Endpoint{
			Addresses: e.Addresses,
			Conditions: discoveryv1.EndpointConditions{
				Ready: shared(e.Conditions.Ready), Serving: shared(e.Conditions.Serving),
				Terminating: shared(e.Conditions.Terminating),
			},
		}
		if e.NodeName != nil && *e.NodeName == node { // another one's does not count
			s.Endpoints[i].NodeName = &node
		}
	}
	for _, p := range o.Ports {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	return s
}

// stripPod leaves a Pod without host ports no container.
func stripPod(o *corev1.Pod) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name},
		Spec:       corev1.PodSpec{NodeName: o.Spec.NodeName, HostNetwork: o.Spec.HostNetwork},
		Status:     corev1.PodStatus{Phase: o.Status.Phase, PodIP: o.Status.PodIP, PodIPs: o.Status.PodIPs},
	}
	hostPorts := false
	containers := func(list []corev1.Container) []corev1.Container {
		var short []corev1.Container
		for i := range list {
			for _, port := range list[i].Ports {
				hostPorts = hostPorts || port.HostPort != 0
			}
			short = append(short, corev1.Container{RestartPolicy: list[i].RestartPolicy, Ports: list[i].Ports})
		}
		return short
	}
	p.Spec.InitContainers, p.Spec.Containers = containers(o.Spec.InitContainers), containers(o.Spec.Containers)
	if !hostPorts {
		p.Spec.InitContainers, p.Spec.Containers = nil, nil
	}
	return p
}

// prefixes returns the ranges of a ServiceCIDR. The API server admits none that
// does not parse.
func prefixes(o *networkingv1.ServiceCIDR) []netip.Prefix {
	var list []netip.Prefix
	for _, s := range o.Spec.CIDRs {
		if p, err := netip.ParsePrefix(s); err == nil {
			list = append(list, p)
		}
	}
	return list
}
