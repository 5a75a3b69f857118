//go:build e2e && linux

package e2e

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

const (
	servicePort = 53
	podPort     = 5353
	portName    = "dns"

	// pace is the time between a sender's datagrams.
	pace = 20 * time.Millisecond

	// soon is in time for a repair, on a machine that is busy with other things too. The report
	// tells how long it really took.
	soon = 20 * time.Second
	// reconnect is how long clients, kube-proxy among them, may take to find an apiserver again that
	// was away: client-go's reflectors wait up to a minute before they try again.
	reconnect = 90 * time.Second
	// observed is how long a stale flow is watched before it counts as left.
	observed = 3 * time.Second
	// proxyRest is how long a kube-proxy that has written rules waits before it does so again
	// (minSyncPeriod), and a little more.
	proxyRest = 1100 * time.Millisecond
)

// scene is one case in one mode, once without and once with flowsweep. What it makes is gone with
// its test.
type scene struct {
	*testing.T
	*cluster
	agent  *agent // nil: kube-proxy alone
	report *report
	key    caseKey
	pace   time.Duration // of its senders
	next   *int          // number of the next backend

	begun   time.Time
	changed time.Time

	// What the judges are to say of flows.
	differences map[translation]difference
	stale       map[conntrack.Tuple]bool // flows that kube-proxy has left
}

// scene returns a case that is yet to be played, with the number of the backend before its first.
func (c *cluster) scene(t *testing.T, r *report, name string, backends *int) *scene {
	return &scene{
		T: t, cluster: c, report: r, key: caseKey{name, c.proxyMode}, pace: pace, next: backends,
		differences: map[translation]difference{}, stale: map[conntrack.Tuple]bool{},
	}
}

// backend is a pod, with an address of each family.
type backend struct {
	node    string
	addrs   []netip.Addr
	servers []*testnet.Server
}

// backend starts a pod on this node that answers at a port, 5353 unless others are given.
func (s *scene) backend(ports ...uint16) *backend {
	s.Helper()
	if len(ports) == 0 {
		ports = []uint16{podPort}
	}
	*s.next++
	b := &backend{node: nodeName}
	for _, net := range podNet {
		raw := net.Addr().AsSlice()
		binary.BigEndian.PutUint16(raw[len(raw)-2:], uint16(0x100+*s.next))
		addr, _ := netip.AddrFromSlice(raw)
		prefix := netip.PrefixFrom(addr, net.Bits())
		must(s, s.pods.AddAddr("eth0", prefix))
		s.Cleanup(func() { must(s, s.pods.DelAddr("eth0", prefix)) })
		b.addrs = append(b.addrs, addr)
		for _, port := range ports {
			b.servers = append(b.servers, nstest.Echo(s, s.pods, netip.AddrPortFrom(addr, port)))
		}
	}
	return b
}

// elsewhere makes it a pod of another node.
func (b *backend) elsewhere() *backend {
	b.node = "n2"
	return b
}

// stop ends what answers, all or at some addresses only; datagrams to it are lost from now on.
func (b *backend) stop(t testing.TB, only ...func(netip.AddrPort) bool) {
	t.Helper()
	for _, server := range b.servers {
		if !slices.ContainsFunc(only, func(is func(netip.AddrPort) bool) bool { return !is(server.Addr()) }) {
			must(t, server.Close())
		}
	}
}

func at(port uint16) func(netip.AddrPort) bool {
	return func(a netip.AddrPort) bool { return a.Port() == port }
}

func of(fam int) func(netip.AddrPort) bool {
	return func(a netip.AddrPort) bool { return family(a.Addr()) == fam }
}

// addr returns the address of a's family.
func (b *backend) addr(a netip.Addr) netip.Addr { return b.addrs[family(a)] }

// family is the place of an address's family in a dual list.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// endpoint is a backend with what its EndpointSlice says of it.
type endpoint struct {
	*backend
	conditions discoveryv1.EndpointConditions
}

func (b *backend) ready() endpoint { return endpoint{b, conditions(true, true, false)} }

// draining serves and is asked to end.
func (b *backend) draining() endpoint { return endpoint{b, conditions(false, true, true)} }

func conditions(ready, serving, terminating bool) discoveryv1.EndpointConditions {
	return discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
}

// service is a Service with an address of each family, and its EndpointSlices.
type service struct {
	s *scene
	*corev1.Service
	target int32 // the slices' port
}

// service makes a Service with a node port.
func (s *scene) service(edits ...func(*corev1.Service)) *service {
	s.Helper()
	both := corev1.IPFamilyPolicyRequireDualStack
	spec := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "s-", Namespace: metav1.NamespaceDefault},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, IPFamilyPolicy: &both,
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			Ports: []corev1.ServicePort{{
				Name: portName, Protocol: corev1.ProtocolUDP, Port: servicePort, TargetPort: intstr.FromInt32(podPort),
			}},
		},
	}
	for _, edit := range edits {
		edit(spec)
	}
	svc := &service{s: s, Service: spec, target: podPort}
	svc.create()
	s.Cleanup(func() {
		ctx := context.Background()
		err := s.kube.CoreV1().Services(svc.Namespace).Delete(ctx, svc.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}
		must(s, s.kube.DiscoveryV1().EndpointSlices(svc.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{},
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + svc.Name}))
	})
	return svc
}

func (svc *service) create() {
	svc.s.Helper()
	made, err := svc.s.kube.CoreV1().Services(svc.Namespace).Create(svc.s.Context(), svc.Service, metav1.CreateOptions{})
	must(svc.s, err)
	svc.Service = made
}

// recreate deletes the Service and makes it again with the same addresses and ports.
func (svc *service) recreate() {
	svc.s.Helper()
	svc.delete()
	svc.ObjectMeta = metav1.ObjectMeta{Name: svc.Name, Namespace: svc.Namespace}
	svc.create()
}

func (svc *service) delete() {
	svc.s.Helper()
	must(svc.s, svc.s.kube.CoreV1().Services(svc.Namespace).Delete(svc.s.Context(), svc.Name, metav1.DeleteOptions{}))
}

// edit changes the Service, without its status.
func (svc *service) edit(change func(*corev1.ServiceSpec)) {
	svc.s.Helper()
	change(&svc.Spec)
	svc.ResourceVersion = "" // nobody else writes it
	now, err := svc.s.kube.CoreV1().Services(svc.Namespace).Update(svc.s.Context(), svc.Service, metav1.UpdateOptions{})
	must(svc.s, err)
	svc.Service = now
}

// ingress gives the Service the addresses of a load balancer.
func (svc *service) ingress(addrs ...netip.Addr) {
	svc.s.Helper()
	svc.Status.LoadBalancer.Ingress = nil
	for _, a := range addrs {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: a.String()})
	}
	services := svc.s.kube.CoreV1().Services(svc.Namespace)
	now, err := services.UpdateStatus(svc.s.Context(), svc.Service, metav1.UpdateOptions{})
	must(svc.s, err)
	svc.Service = now
}

// endpoints writes the Service's slices, one a family.
func (svc *service) endpoints(list ...endpoint) {
	svc.s.Helper()
	svc.slice(0, list...)
	svc.slice(1, list...)
}

// slice writes the slice of one family.
func (svc *service) slice(family int, list ...endpoint) {
	svc.s.Helper()
	name, proto := portName, corev1.ProtocolUDP
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: svc.Name + dual("-v4", "-v6")[family], Namespace: svc.Namespace,
			Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name},
		},
		AddressType: dual(discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)[family],
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &proto, Port: &svc.target}},
	}
	for _, e := range list {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{e.addrs[family].String()}, Conditions: e.conditions, NodeName: &e.node,
		})
	}
	slices := svc.s.kube.DiscoveryV1().EndpointSlices(svc.Namespace)
	_, err := slices.Update(svc.s.Context(), slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = slices.Create(svc.s.Context(), slice, metav1.CreateOptions{})
	}
	must(svc.s, err)
}

// clusterIP returns the Service's own addresses, with its port.
func (svc *service) clusterIP() []netip.AddrPort {
	return frontends(parseAddrs(svc.Spec.ClusterIPs), svc.Spec.Ports[0].Port)
}

// nodePort returns the node's listed addresses with the Service's node port.
func (svc *service) nodePort() []netip.AddrPort {
	return frontends(nodeAddr, svc.Spec.Ports[0].NodePort)
}

func parseAddrs(list []string) (addrs []netip.Addr) {
	for _, s := range list {
		addrs = append(addrs, netip.MustParseAddr(s))
	}
	return addrs
}

func frontends(addrs []netip.Addr, port int32) (list []netip.AddrPort) {
	for _, a := range addrs {
		list = append(list, netip.AddrPortFrom(a, uint16(port)))
	}
	return list
}

// stream is a sender for each family, to a frontend.
type stream struct {
	what    string // the frontend's kind
	senders []*testnet.Sender
	to      []netip.AddrPort

	// From when all was well on, for each sender:
	flows []conntrack.Flow
	since []int // its first datagram
	ended []int // how often its flow had ended until then
}

// send starts a stream whose flows go to a backend, nil for any, and waits until they are answered.
func (s *scene) send(from *testnet.NS, what string, to []netip.AddrPort, b *backend) *stream {
	s.Helper()
	st := &stream{what: what, to: to}
	for _, to := range to {
		st.senders = append(st.senders, s.sender(from, to, b, 20*time.Second))
	}
	for i, sender := range st.senders {
		flow, ok := s.flow(st, i)
		if !ok {
			s.Fatalf("%s: no flow for %s", what, to[i])
		}
		st.flows = append(st.flows, flow)
		st.since = append(st.since, len(sender.Records()))
		st.ended = append(st.ended, s.destroyed(s, sender.Local(), to[i]))
	}
	return st
}

// early starts a stream to a frontend that is not served yet.
func (s *scene) early(from *testnet.NS, what string, to []netip.AddrPort) *stream {
	s.Helper()
	st := &stream{what: what, to: to, since: make([]int, len(to)), ended: make([]int, len(to))}
	for i, to := range to {
		st.senders = append(st.senders, nstest.Send(s, from, netip.AddrPort{}, to, s.pace))
		eventually(s, soon, "a flow to "+to.String(), func() error {
			flow, ok := s.flow(st, i)
			if !ok {
				return fmt.Errorf("there is none")
			}
			st.flows = append(st.flows, flow)
			return nil
		})
	}
	return st
}

// sender starts senders until the proxy has sent one to the backend that is wanted.
func (s *scene) sender(from *testnet.NS, to netip.AddrPort, want *backend, within time.Duration) *testnet.Sender {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), within)
	defer cancel()
	// A flow that is older than the rules would be deleted by kube-proxy, at a time that nobody knows.
	for ctx.Err() == nil {
		if _, err := testnet.Ask(from, netip.AddrPort{}, to, 500*time.Millisecond); err == nil {
			break
		}
		time.Sleep(s.pace)
	}
	for {
		sender := nstest.Send(s, from, netip.AddrPort{}, to, s.pace)
		try, stop := context.WithTimeout(ctx, 500*time.Millisecond) // the rules may come later
		r, err := sender.Await(try, netip.AddrPort{})
		stop()
		if err == nil && (want == nil || r.From.Addr() == want.addr(to.Addr())) {
			return sender
		}
		must(s, sender.Close())
		if ctx.Err() != nil {
			s.Fatalf("no sender to %s is answered as it should be: last by %s, %v", to, r.From, err)
		}
	}
}

// everywhere starts a stream to each of a Service's frontends, all to one backend.
func (s *scene) everywhere(svc *service, b *backend) []*stream {
	s.Helper()
	return []*stream{
		s.send(s.client, "ClusterIP", svc.clusterIP(), b),
		s.send(s.node, "ClusterIP, sent on the node", svc.clusterIP(), b),
		s.send(s.client, "node port", svc.nodePort(), b),
	}
}

// flow returns a sender's entry in the node's table.
func (s *scene) flow(st *stream, i int) (conntrack.Flow, bool) {
	s.Helper()
	src, dst := st.senders[i].Local(), st.to[i]
	f, ok, err := s.flows.Get(context.Background(), conntrack.Flow{
		Family: conntrack.FamilyOf(src.Addr()), Proto: conntrack.UDP,
		Orig:  conntrack.Tuple{Src: src.Addr(), SrcPort: src.Port(), Dst: dst.Addr(), DstPort: dst.Port()},
		Reply: conntrack.Tuple{Src: dst.Addr(), SrcPort: dst.Port(), Dst: src.Addr(), DstPort: src.Port()},
	})
	must(s, err)
	return f, ok
}

// change makes a change, when kube-proxy has rested and the judges are compared, and notes the time at
// which it was done.
func (s *scene) change(do func()) {
	s.Helper()
	s.commits.quiet(proxyRest)
	s.compare()
	s.begun = time.Now()
	do()
	s.changed = time.Now()
}

// alone is what kube-proxy does about stale flows without flowsweep.
type alone bool

const (
	cleans alone = true
	leaves alone = false
)

// want says how a stream ends up after a change.
type want struct {
	backend   *backend // that answers it; nil: it is not translated any more
	kubeProxy alone
	stream    *stream
}

func wants(b *backend, kubeProxy alone, streams []*stream) (list []want) {
	for _, st := range streams {
		list = append(list, want{b, kubeProxy, st})
	}
	return list
}

// expect waits until streams end up as said. Without flowsweep it holds kube-proxy to what it is said
// to do.
func (s *scene) expect(b *backend, kubeProxy alone, streams ...*stream) {
	s.Helper()
	s.expectAll(soon, wants(b, kubeProxy, streams)...)
}

func (s *scene) expectAll(within time.Duration, list ...want) {
	s.Helper()
	outcomes := make([][]outcome, len(list))
	var work sync.WaitGroup
	for i, w := range list {
		patience := within
		if s.left(w) {
			patience = observed
		}
		outcomes[i] = make([]outcome, len(w.stream.senders))
		for j := range w.stream.senders {
			work.Go(func() { outcomes[i][j] = s.await(patience, w.stream, j, w.backend) })
		}
	}
	work.Wait()
	rules := s.commits.first(s.begun)
	if rules.IsZero() {
		s.Error("nobody has written rules since the change")
	}
	for i, w := range list {
		for j, o := range outcomes[i] {
			what := fmt.Sprintf("%s %s", w.stream.what, w.stream.to[j])
			switch {
			case s.left(w) && o.right:
				s.Errorf("%s: kube-proxy alone has repaired it, after %s", what, o.took)
			case s.left(w):
				s.stale[w.stream.flows[j].Orig] = true
			case !s.left(w) && !o.right:
				flow, ok := s.flow(w.stream, j)
				s.Errorf("%s: not repaired within %s; flow (%t): %s", what, within, ok, flow.String())
			}
		}
		s.report.add(s.key, w.stream.what, measure{
			by: s.agent.settling(), outcomes: outcomes[i], rules: rules.Sub(s.changed),
		})
	}
}

// left tells whether a stream is to stay stale.
func (s *scene) left(w want) bool { return s.agent == nil && w.kubeProxy == leaves }

// outcome is what became of one sender after a change.
type outcome struct {
	right   bool
	took    time.Duration // from the change to the first right answer, or until nothing was translated
	lost    int           // datagrams until then without the right answer; -1 where none is expected
	deleted int           // times that flowsweep deleted the flow
}

// await waits until a sender is as it should be, or for a time.
func (s *scene) await(within time.Duration, st *stream, i int, want *backend) (o outcome) {
	ctx, cancel := context.WithTimeout(s.Context(), within)
	defer cancel()
	sender := st.senders[i]
	if want == nil {
		o.lost = -1
		o.took, o.right = s.untranslated(ctx, st, i)
	} else {
		at, ok := answered(ctx, sender, want.addr(st.to[i].Addr()), s.changed)
		o.took, o.right = at.Sub(s.changed), ok
		o.lost = lost(sender, want.addr(st.to[i].Addr()), s.changed, at)
	}
	o.deleted = s.agent.deletes(st, i, s.begun)
	return o
}

// untranslated waits until a sender's flow has not been translated for a while, and returns how long
// after the change that began.
func (s *scene) untranslated(ctx context.Context, st *stream, i int) (time.Duration, bool) {
	const while = time.Second
	since := time.Now()
	for ctx.Err() == nil {
		switch f, ok := s.flow(st, i); {
		case ok && f.Translated():
			since = time.Now()
		case time.Since(since) >= while:
			return since.Sub(s.changed), true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0, false
}

// answered waits for the first answer of a backend to a datagram that was sent after a time, and then
// for more of them. It returns when the first came, or when it gave up.
func answered(ctx context.Context, sender *testnet.Sender, want netip.Addr, after time.Time) (time.Time, bool) {
	const more = 10
	for ctx.Err() == nil {
		right := 0
		var first time.Time
		for _, r := range sender.Records() {
			switch {
			case r.Sent.Before(after) || r.From.Addr() != want:
			case right == 0:
				first = r.Sent.Add(r.RTT)
				fallthrough
			default:
				right++
			}
		}
		if right > more {
			return first, true
		}
		time.Sleep(100 * time.Millisecond)
	}
	return time.Now(), false
}

// lost counts the datagrams sent between two times that a backend did not answer.
func lost(sender *testnet.Sender, want netip.Addr, after, before time.Time) (n int) {
	for _, r := range sender.Records() {
		if r.Sent.After(after) && r.Sent.Before(before) && r.From.Addr() != want {
			n++
		}
	}
	return n
}

// serves waits until a backend answers streams.
func (s *scene) serves(b *backend, streams ...*stream) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), soon)
	defer cancel()
	for _, st := range streams {
		for i, sender := range st.senders {
			if _, ok := answered(ctx, sender, b.addr(st.to[i].Addr()), s.changed); !ok {
				s.Fatalf("%s %s: not answered by %s within %s", st.what, st.to[i], b.addr(st.to[i].Addr()), soon)
			}
		}
	}
}

// untouched checks that the flows of streams are those that they were, and that no datagram was lost.
func (s *scene) untouched(streams ...*stream) {
	s.Helper()
	for _, st := range streams {
		for i := range st.senders {
			if damage := s.damage(st, i); damage != "" {
				s.Errorf("%s %s from %s: %s", st.what, st.to[i], st.senders[i].Local(), damage)
			}
		}
	}
}

// damage says what has happened to a sender that should not have, "" where nothing has.
func (s *scene) damage(st *stream, i int) string {
	s.Helper()
	now, ok := s.flow(st, i)
	was, from, to := st.flows[i], st.senders[i].Local(), st.to[i]
	// The id alone does not tell a flow from the one that took its place.
	if n := s.destroyed(s, from, to) - st.ended[i]; n > 0 || !ok || now.ID != was.ID || now.Reply != was.Reply {
		return fmt.Sprintf("destroyed %d times, by flowsweep %d: %s; now (%t): %s",
			n, s.agent.deletes(st, i, time.Time{}), was.String(), ok, now.String())
	}
	old := time.Now().Add(-500 * time.Millisecond) // younger ones may yet be answered
	n := slices.IndexFunc(st.senders[i].Records()[st.since[i]:], func(r testnet.Record) bool {
		return r.Sent.Before(old) && !r.From.IsValid()
	})
	if n >= 0 {
		return fmt.Sprintf("datagram %d was lost", st.since[i]+n)
	}
	return ""
}

// manners is what kube-proxy does to flows that are none of its business.
type manners bool

const (
	spares  manners = true
	touches manners = false
)

// stays watches streams for a while, and checks that they are untouched. Without flowsweep it holds
// kube-proxy to what it is said to do.
func (s *scene) stays(kubeProxy manners, streams ...*stream) {
	s.Helper()
	time.Sleep(observed)
	for _, st := range streams {
		var did []string
		for i := range st.senders {
			damage := s.damage(st, i)
			switch {
			case s.agent == nil && kubeProxy == touches:
				if damage == "" {
					s.Errorf("%s %s: kube-proxy alone did not touch it", st.what, st.to[i])
				}
			case damage != "":
				s.Errorf("%s %s from %s: %s", st.what, st.to[i], st.senders[i].Local(), damage)
			}
			if damage == "" {
				did = append(did, "untouched")
			} else {
				did = append(did, "touched")
			}
		}
		s.report.add(s.key, st.what, measure{by: s.agent.settling(), did: strings.Join(did, " / ")})
	}
}
