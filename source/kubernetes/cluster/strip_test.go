package cluster

import (
	"fmt"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/source/kubernetes"
)

// What stripping takes away never counted, for any node's point of view; what it
// is given is left as it is.
func TestStripKeepsWhatCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from := pick(t, "from", here, "n2", "n3")
		whole, short := newObjects(), newObjects()
		for range rapid.IntRange(1, 6).Draw(t, "objects") {
			k := pick(t, "kind", services, services, endpointSlices, endpointSlices, pods, nodes, serviceCIDRs)
			o := genObject(t, k)
			before := o.DeepCopyObject()
			once := strip(o, from)
			if d := gocmp.Diff(before, o); d != "" {
				t.Fatalf("stripping changed its argument (-was +is):\n%s", d)
			}
			if d := gocmp.Diff(once, strip(once, from)); d != "" {
				t.Fatalf("stripped twice (-once +twice):\n%s", d)
			}
			whole.put(o)
			short.put(once)
		}
		if d := gocmp.Diff(show(whole.frontends(from)), show(short.frontends(from))); d != "" {
			t.Fatalf("frontends (-whole +stripped):\n%s", d)
		}
		want, got := whole.problems(from), short.problems(from)
		for unit := range want {
			if d := gocmp.Diff(texts(want[unit]), texts(got[unit])); d != "" {
				t.Fatalf("problems of %s (-whole +stripped):\n%s", unit, d)
			}
		}
		for n, o := range whole.nodes {
			if d := gocmp.Diff(addrTexts(o), addrTexts(short.nodes[n])); d != "" || len(kubernetes.PodRanges(o)) == 0 ||
				!slices.Equal(kubernetes.PodRanges(o), kubernetes.PodRanges(short.nodes[n])) {
				t.Fatalf("node addresses (-whole +stripped):\n%s", d)
			}
		}
		if d := gocmp.Diff(fmt.Sprint(whole.podAddrs()), fmt.Sprint(short.podAddrs())); d != "" {
			t.Fatalf("addresses of Pods (-whole +stripped):\n%s", d)
		}
		if d := gocmp.Diff(rangeTexts(whole), rangeTexts(short)); d != "" {
			t.Fatalf("service ranges (-whole +stripped):\n%s", d)
		}
	})
}

func addrTexts(n *corev1.Node) (list []string) {
	for _, a := range kubernetes.NodeAddresses(n) {
		list = append(list, a.String())
	}
	return list
}

func rangeTexts(o *objects) (list []string) {
	for _, r := range o.ranges() {
		list = append(list, r.String())
	}
	return list
}

// What is left of each kind, field by field: memory is what this is about.
func TestStrip(t *testing.T) {
	meta := func() metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: "x", Name: "o", UID: "u", ResourceVersion: "7", Labels: map[string]string{"app": "a"},
			Annotations: map[string]string{"example.com/note": "n"}, ManagedFields: []metav1.ManagedFieldsEntry{{}},
		}
	}
	port := corev1.ContainerPort{Name: "p", HostPort: 8125, ContainerPort: 9125}
	pod := func(ports ...corev1.ContainerPort) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: meta(),
			Spec: corev1.PodSpec{
				NodeName: here, Volumes: []corev1.Volume{{}},
				InitContainers: []corev1.Container{{Name: "i", RestartPolicy: ptr(corev1.ContainerRestartPolicyAlways)}},
				Containers:     []corev1.Container{{Name: "a", Image: "i"}, {Name: "b", Ports: ports}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "198.51.100.1", HostIP: "192.0.2.1"},
		}
	}
	for name, tc := range map[string]struct{ obj, want runtime.Object }{
		"Service": {
			&corev1.Service{
				ObjectMeta: func() metav1.ObjectMeta {
					m := meta()
					m.Labels[kubernetes.LabelServiceProxyName] = ""
					m.Annotations[kubernetes.AnnotationSweep] = "udp=off"
					return m
				}(),
				Spec: corev1.ServiceSpec{
					ClusterIP: "203.0.113.10", Selector: map[string]string{"app": "a"},
					Ports: []corev1.ServicePort{{Name: "a", Port: 53, AppProtocol: ptr("dns")}},
				},
				Status: corev1.ServiceStatus{Conditions: []metav1.Condition{{}}},
			},
			&corev1.Service{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "x", Name: "o", UID: "u", Labels: map[string]string{kubernetes.LabelServiceProxyName: ""},
					Annotations: map[string]string{kubernetes.AnnotationSweep: "udp=off"},
				},
				Spec: corev1.ServiceSpec{ClusterIP: "203.0.113.10", Ports: []corev1.ServicePort{{Name: "a", Port: 53}}},
			},
		},
		"EndpointSlice, endpoints here and elsewhere": {
			&discoveryv1.EndpointSlice{
				ObjectMeta: meta(), AddressType: discoveryv1.AddressTypeIPv4,
				Endpoints: []discoveryv1.Endpoint{
					{
						Addresses: []string{"198.51.100.1"}, NodeName: ptr(here), Zone: ptr("z"),
						Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)},
					},
					{Addresses: []string{"198.51.100.2"}, NodeName: ptr("n2"), Hostname: ptr("h")},
				},
				Ports: []discoveryv1.EndpointPort{{Port: ptr(int32(53)), AppProtocol: ptr("dns")}},
			},
			&discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "o"}, AddressType: discoveryv1.AddressTypeIPv4,
				Endpoints: []discoveryv1.Endpoint{
					{
						Addresses: []string{"198.51.100.1"}, NodeName: ptr(here),
						Conditions: discoveryv1.EndpointConditions{Ready: ptr(true)},
					},
					{Addresses: []string{"198.51.100.2"}},
				},
				Ports: []discoveryv1.EndpointPort{{Port: ptr(int32(53))}},
			},
		},
		"Pod with a host port": {
			pod(port),
			&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "o"},
				Spec: corev1.PodSpec{
					NodeName:       here,
					InitContainers: []corev1.Container{{RestartPolicy: ptr(corev1.ContainerRestartPolicyAlways)}},
					Containers:     []corev1.Container{{}, {Ports: []corev1.ContainerPort{port}}},
				},
				Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "198.51.100.1"},
			},
		},
		"Pod without one": {
			pod(corev1.ContainerPort{ContainerPort: 9125}),
			&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "o"}, Spec: corev1.PodSpec{NodeName: here},
				Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "198.51.100.1"},
			},
		},
		"Node": {
			&corev1.Node{
				ObjectMeta: meta(), Spec: corev1.NodeSpec{PodCIDR: "198.51.100.0/24"},
				Status: corev1.NodeStatus{Addresses: node("192.0.2.1").Status.Addresses, Images: []corev1.ContainerImage{{}}},
			},
			&corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: "o"}, Spec: corev1.NodeSpec{PodCIDR: "198.51.100.0/24"},
				Status: node("192.0.2.1").Status,
			},
		},
		"ServiceCIDR": {
			&networkingv1.ServiceCIDR{ObjectMeta: meta(), Spec: cidr("203.0.113.0/24").Spec},
			&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "o"}, Spec: cidr("203.0.113.0/24").Spec},
		},
		"another kind is left as it is": {
			&corev1.Secret{ObjectMeta: meta()}, &corev1.Secret{ObjectMeta: meta()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if d := gocmp.Diff(tc.want, strip(tc.obj, here)); d != "" {
				t.Errorf("stripped (-want +got):\n%s", d)
			}
		})
	}
}

// A Pod without host ports is not kept, whether it never had one or lost it.
func TestPodsWithoutHostPorts(t *testing.T) {
	h := began(Config{HostPorts: true})
	with := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "p"}, Spec: corev1.PodSpec{
		NodeName: here, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{HostPort: 8125, ContainerPort: 9125}}}},
	}, Status: corev1.PodStatus{PodIP: "198.51.100.1"}}
	without := with.DeepCopy()
	without.Spec.Containers[0].Ports = nil
	for i, step := range []struct {
		pod  *corev1.Pod
		kept int
	}{{without, 0}, {with, 1}, {with, 1}, {without, 0}} {
		h.add(pods, step.pod)
		if len(h.st.pods) != step.kept || len(h.sink.units) != 1+step.kept {
			t.Errorf("step %d: %d Pods kept, units %v, want %d", i, len(h.st.pods), show(h.sink.units), step.kept)
		}
	}
}
