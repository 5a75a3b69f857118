//go:build e2e && linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	manyServices  = 5000
	endpointsEach = 10
	manyUpdates   = 200
)

// scale measures the agent beside kube-proxy in a large cluster.
func scale(t *testing.T, r *report) {
	c := newCluster(t)
	var backends int
	s := c.scene(t, r, "12", &backends)
	limit := c.daemon.Spec.Template.Spec.Containers[0].Resources.Limits.Memory().Value()

	began := time.Now()
	slices := c.fill(t)
	filled := time.Since(began)

	// One service is real, and the last that kube-proxy learns of.
	b := s.backend()
	svc := s.service()
	svc.endpoints(b.ready())
	began = time.Now()
	c.startProxy(t, "nftables")
	must(t, s.sender(c.client, svc.clusterIP()[0], b, 2*time.Minute).Close())
	proxySynced := time.Since(began)
	c.commits.quiet(3 * time.Second)

	began = time.Now()
	a := c.startAgent(t, c.takeToken(t), byRules)
	ready := time.Since(began)
	time.Sleep(window + 2*time.Second) // its start is settled
	idleFrom, idle := a.cpu(t), 5*time.Second
	time.Sleep(idle)
	idleCPU := a.cpu(t) - idleFrom
	rss := a.memory(t, "VmRSS")
	if s := a.status(t); s.Frontends < manyServices {
		t.Errorf("the agent knows %d frontends, want %d", s.Frontends, manyServices)
	}

	agentFrom, userFrom, passesFrom, proxyFrom := a.cpu(t), a.user(t), a.passes(t), c.proxy.cpu(t)
	for i := range manyUpdates {
		c.move(t, slices[i*len(slices)/manyUpdates])
		time.Sleep(25 * time.Millisecond)
	}
	time.Sleep(2 * time.Second)
	agentCPU, userCPU, proxyCPU := a.cpu(t)-agentFrom, a.user(t)-userFrom, c.proxy.cpu(t)-proxyFrom
	passes := a.passes(t) - passesFrom
	time.Sleep(window)
	rssAfter, most := a.memory(t, "VmRSS"), a.memory(t, "VmHWM")
	proxyRSS, proxyMost := c.proxy.memory(t, "VmRSS"), c.proxy.memory(t, "VmHWM")

	mib := func(bytes int64) string { return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20)) }
	r.note("\n12: %d services, %d endpoints, made in %s", manyServices, manyServices*endpointsEach,
		filled.Round(time.Second))
	r.note("\n| | flowsweep | kube-proxy, nftables |\n|---|---|---|")
	r.note("| ready; first rules in force, s | %.2f | %.2f |", ready.Seconds(), proxySynced.Seconds())
	r.note("| resident when ready | %s | |", mib(rss))
	r.note("| resident after %d slice updates | %s | %s |", manyUpdates, mib(rssAfter), mib(proxyRSS))
	r.note("| most resident | %s (limit %s) | %s |", mib(most), mib(limit), mib(proxyMost))
	each := func(d time.Duration) string { return (d / manyUpdates).Round(10 * time.Microsecond).String() }
	r.note("| CPU of one slice update | %s | %s |", each(agentCPU), each(proxyCPU))
	r.note("| of that outside the kernel, which walks the conntrack table (%d passes) | %s | |",
		passes, each(userCPU))
	r.note("| CPU of a second in which nothing changes | %s | |",
		(idleCPU / (idle / time.Second)).Round(10*time.Microsecond))

	if most > limit {
		t.Errorf("the agent had %s resident, more than its DaemonSet's limit %s", mib(most), mib(limit))
	}
	if ready > 30*time.Second {
		t.Errorf("the agent was ready after %s, want less than half a minute", ready)
	}
}

// fill makes services with endpoints that nobody has, and returns their slices. They are written into
// etcd as kube-apiserver would: through it, each takes longer than the one before, since it counts
// all ClusterIPs each time (ipallocator.Allocator.Used).
func (c *cluster) fill(t testing.TB) []*discoveryv1.EndpointSlice {
	t.Helper()
	slices := make([]*discoveryv1.EndpointSlice, manyServices)
	next := make(chan int)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for i := range next {
				svc, addr, slice := large(i)
				slices[i] = slice
				err := errors.Join(
					c.put("ipaddresses/"+addr.Name, networkingv1.SchemeGroupVersion, addr, &addr.ObjectMeta),
					c.put("endpointslices/default/"+slice.Name, discoveryv1.SchemeGroupVersion, slice, &slice.ObjectMeta),
					c.put("services/specs/default/"+svc.Name, corev1.SchemeGroupVersion, svc, &svc.ObjectMeta))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range slices {
		next <- i
	}
	close(next)
	workers.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return slices
}

// put writes an object through etcd's JSON gateway.
func (c *cluster) put(key string, version schema.GroupVersion, o runtime.Object, meta *metav1.ObjectMeta) error {
	meta.UID = uuid.NewUUID()
	meta.CreationTimestamp = metav1.Now()
	value, err := runtime.Encode(scheme.Codecs.LegacyCodec(version), o)
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string][]byte{"key": []byte("/registry/" + key), "value": value})
	if err != nil {
		return err
	}
	resp, err := c.http.Post(etcdURL+"/v3/kv/put", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("etcd: put %s: %s: %s", key, resp.Status, said)
	}
	return err
}

// large returns a Service, what reserves its ClusterIP, and its slice.
func large(i int) (*corev1.Service, *networkingv1.IPAddress, *discoveryv1.EndpointSlice) {
	name, proto, port := fmt.Sprintf("many-%d", i), corev1.ProtocolUDP, int32(podPort)
	single, node, unnamed := corev1.IPFamilyPolicySingleStack, "n2", ""
	clusterIP := netip.AddrFrom4([4]byte{10, 96, byte(0x80 + i>>8), byte(i)}).String()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault},
		Spec: corev1.ServiceSpec{
			Ports:     []corev1.ServicePort{{Protocol: proto, Port: servicePort}},
			ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single,
		},
	}
	addr := &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Name: clusterIP,
			Labels: map[string]string{
				networkingv1.LabelIPAddressFamily: string(corev1.IPv4Protocol),
				networkingv1.LabelManagedBy:       "ipallocator.k8s.io",
			},
		},
		Spec: networkingv1.IPAddressSpec{
			ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: svc.Namespace, Name: svc.Name},
		},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: metav1.NamespaceDefault,
			Labels: map[string]string{discoveryv1.LabelServiceName: name},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Protocol: &proto, Port: &port}},
	}
	for j := range endpointsEach {
		n := i*endpointsEach + j
		addr := netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)})
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{addr.String()}, Conditions: conditions(true, true, false), NodeName: &node,
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("%s-%d", name, j), UID: uuid.NewUUID(),
			},
		})
	}
	return svc, addr, slice
}

// move gives one endpoint of a slice another address.
func (c *cluster) move(t testing.TB, slice *discoveryv1.EndpointSlice) {
	t.Helper()
	old := netip.MustParseAddr(slice.Endpoints[0].Addresses[0]).As4()
	old[1] += 32
	slice.Endpoints[0].Addresses = []string{netip.AddrFrom4(old).String()}
	_, err := c.kube.DiscoveryV1().EndpointSlices(slice.Namespace).Update(t.Context(), slice, metav1.UpdateOptions{})
	must(t, err)
}
