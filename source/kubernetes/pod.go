package kubernetes

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// PodFrontends returns the host ports of a Pod that runs on the named node, as
// CNI's portmap plugin serves them: the Pod's own addresses are their only
// backends, ready or not. A Pod of another node, on the host's network,
// finished, or without an address yet has none. Every error is an [*Error].
func PodFrontends(pod *corev1.Pod, node string) ([]frontend.Frontend, []error) {
	b := builder{node: node}
	return b.pod(pod), b.problems
}

func (b *builder) pod(pod *corev1.Pod) []frontend.Frontend {
	if !here(pod, b.node) {
		return nil
	}
	ports := hostPorts(pod)
	if len(ports) == 0 {
		return nil
	}
	addrs := b.podAddrs(pod)
	var fs []frontend.Frontend
	for _, p := range ports {
		fs = b.hostPort(fs, pod, p, addrs)
	}
	return fs
}

// here tells whether a Pod runs on the named node, in a network of its own.
func here(pod *corev1.Pod, node string) bool {
	return node != "" && pod.Spec.NodeName == node && !pod.Spec.HostNetwork &&
		pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
}

type hostPort struct {
	spec *corev1.ContainerPort
	path string
}

// hostPorts returns the host ports of the containers that run side by side:
// restarted init containers (sidecars) do, other init containers do not.
func hostPorts(pod *corev1.Pod) []hostPort {
	var found []hostPort
	add := func(c *corev1.Container, list string, i int) {
		for j := range c.Ports {
			if c.Ports[j].HostPort != 0 {
				found = append(found, hostPort{&c.Ports[j], index(index(list, i)+".ports", j)})
			}
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c, "spec.initContainers", i)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], "spec.containers", i)
	}
	return found
}

func (b *builder) podAddrs(pod *corev1.Pod) []netip.Addr {
	var addrs []netip.Addr
	add := func(s, path string) {
		a, err := parseAddr(s)
		if err != nil {
			b.report("Pod", pod.Namespace, pod.Name, path, err)
		} else if !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	for i, ip := range pod.Status.PodIPs {
		add(ip.IP, index("status.podIPs", i)+".ip")
	}
	if len(pod.Status.PodIPs) == 0 && pod.Status.PodIP != "" {
		add(pod.Status.PodIP, "status.podIP")
	}
	return addrs
}

// hostPort appends a host port in each family that the Pod has an address of.
func (b *builder) hostPort(fs []frontend.Frontend, pod *corev1.Pod, p hostPort, addrs []netip.Addr) []frontend.Frontend {
	report := func(field string, err error) []frontend.Frontend {
		b.report("Pod", pod.Namespace, pod.Name, p.path+"."+field, err)
		return fs
	}
	from, err := port(p.spec.HostPort)
	if err != nil {
		return report("hostPort", err)
	}
	to, err := port(p.spec.ContainerPort)
	if err != nil {
		return report("containerPort", err)
	}
	proto, err := protocol(p.spec.Protocol)
	if err != nil {
		return report("protocol", err)
	}
	var addr netip.Addr // zero: every address of the host
	if p.spec.HostIP != "" {
		a, err := parseAddr(p.spec.HostIP)
		if err != nil {
			return report("hostIP", err)
		}
		if !a.IsUnspecified() {
			addr = a
		}
	}
	for _, family := range families {
		if addr.IsValid() && conntrack.FamilyOf(addr) != family {
			continue
		}
		b.valid = b.valid[:0]
		for _, a := range addrs {
			if conntrack.FamilyOf(a) == family {
				b.valid = append(b.valid, netip.AddrPortFrom(a, to))
			}
		}
		if len(b.valid) == 0 {
			continue
		}
		fs = append(fs, frontend.Frontend{
			Owner:  pod.Namespace + "/" + pod.Name,
			Kind:   frontend.HostPort,
			Proto:  proto,
			Addr:   addr,
			Family: family,
			Ports:  frontend.Port(from),
			Valid:  frontend.NewBackends(b.valid...),
			Usable: len(b.valid),
		})
	}
	return fs
}
