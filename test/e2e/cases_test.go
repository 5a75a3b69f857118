//go:build e2e && linux

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// testCase is played in both modes, without flowsweep and with it, with IPv4 and IPv6 at once.
type testCase struct {
	name string
	play func(*scene)
	// outage: something is down for long.
	outage bool
	// timed: it is played with settling by time, too, to measure both.
	timed bool
}

// Why the judges differ about a flow.
const (
	draining  = "an endpoint that serves while it terminates keeps its flows, and gets no new ones"
	elsewhere = "under externalTrafficPolicy Local, an endpoint of another node keeps its flows, and gets no new ones"
	behind    = "kube-proxy is stuck: its rules would make the flow again"
)

// The last one takes everything with it.
var cases = []testCase{
	{name: "1 two backends to one", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready(), b.ready())
		stale, right := s.everywhere(svc, a), s.everywhere(svc, b)
		s.change(func() {
			svc.endpoints(b.ready())
			a.stop(s)
		})
		s.expect(b, cleans, stale...)
		s.untouched(right...)
	}},

	{timed: true, name: "2 backend replaced", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.everywhere(svc, a)
		s.change(func() {
			svc.endpoints(b.ready())
			a.stop(s)
		})
		s.expect(b, cleans, stale...)
	}},

	{timed: true, name: "3a to zero, the sender goes on", play: func(s *scene) {
		a := s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		clusterIP := s.send(s.client, "ClusterIP", svc.clusterIP(), a)
		nodePort := s.send(s.client, "node port", svc.nodePort(), a)
		s.change(func() {
			svc.endpoints()
			a.stop(s)
		})
		s.expectAll(soon, want{nil, cleans, clusterIP}, want{nil, leaves, nodePort})
	}},

	{name: "3b and back", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		streams := s.everywhere(svc, a)
		svc.endpoints()
		a.stop(s)
		time.Sleep(2 * time.Second)
		s.change(func() { svc.endpoints(b.ready()) })
		s.expect(b, cleans, streams...)
	}},

	{timed: true, name: "4a service deleted", play: func(s *scene) {
		a := s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.everywhere(svc, a)
		s.change(svc.delete)
		s.expect(nil, leaves, stale...)
	}},

	{timed: true, name: "4b deleted and re-created, same addresses", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.everywhere(svc, a)
		s.change(func() {
			svc.recreate()
			svc.endpoints(b.ready())
			a.stop(s)
		})
		s.expect(b, cleans, stale...)
	}},

	{name: "5a targetPort edited", play: func(s *scene) {
		a := s.backend(podPort, podPort+1)
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.everywhere(svc, a)
		s.change(func() {
			svc.target++
			svc.endpoints(a.ready())
			a.stop(s, at(podPort))
		})
		s.expect(a, cleans, stale...)
	}},

	{name: "5b port edited", play: func(s *scene) {
		a := s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.send(s.client, "ClusterIP", svc.clusterIP(), a)
		right := s.send(s.client, "node port", svc.nodePort(), a)
		s.change(func() { svc.edit(func(spec *corev1.ServiceSpec) { spec.Ports[0].Port++ }) })
		s.expect(nil, leaves, stale)
		s.send(s.client, "ClusterIP", svc.clusterIP(), a)
		s.untouched(right)
	}},

	{name: "5c nodePort edited", play: func(s *scene) {
		const port = 30053
		a := s.backend()
		svc := s.service(func(svc *corev1.Service) { svc.Spec.Ports[0].NodePort = port })
		svc.endpoints(a.ready())
		stale := s.send(s.client, "node port", svc.nodePort(), a)
		right := s.send(s.client, "ClusterIP", svc.clusterIP(), a)
		s.change(func() { svc.edit(func(spec *corev1.ServiceSpec) { spec.Ports[0].NodePort++ }) })
		s.expect(nil, leaves, stale)
		s.send(s.client, "node port", svc.nodePort(), a)
		s.untouched(right)
	}},

	{name: "5d load-balancer address edited", play: func(s *scene) {
		before := dual(netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:3::10"))
		after := dual(netip.MustParseAddr("203.0.113.11"), netip.MustParseAddr("2001:db8:3::11"))
		a := s.backend()
		svc := s.service(func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeLoadBalancer })
		svc.ingress(before...)
		svc.endpoints(a.ready())
		stale := s.send(s.client, "load balancer", frontends(before, servicePort), a)
		right := s.send(s.client, "ClusterIP", svc.clusterIP(), a)
		s.change(func() { svc.ingress(after...) })
		s.expect(nil, leaves, stale)
		s.send(s.client, "load balancer", frontends(after, servicePort), a)
		s.untouched(right)
	}},

	{name: "6a changes while the agent is down", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		gone, empty, moved := s.service(), s.service(), s.service()
		for _, svc := range []*service{gone, empty, moved} {
			svc.endpoints(a.ready())
		}
		deleted := s.send(s.client, "service deleted, ClusterIP", gone.clusterIP(), a)
		deletedPort := s.send(s.client, "service deleted, node port", gone.nodePort(), a)
		zero := s.send(s.client, "to zero, node port", empty.nodePort(), a)
		replaced := s.send(s.client, "backend replaced, ClusterIP", moved.clusterIP(), a)
		if s.agent != nil {
			s.agent.stop(s)
		}
		s.change(func() {
			gone.delete()
			empty.endpoints()
			moved.endpoints(b.ready())
			a.stop(s)
		})
		if s.agent != nil {
			s.serves(b, replaced) // so that the rules are written
			s.changed = time.Now()
			s.agent.start(s)
		}
		s.expectAll(soon, want{nil, leaves, deleted}, want{nil, leaves, deletedPort}, want{nil, leaves, zero},
			want{b, cleans, replaced})
	}},

	{outage: true, timed: true, name: "6b changes while kube-proxy is stuck", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		empty, moved := s.service(), s.service()
		empty.endpoints(a.ready())
		moved.endpoints(a.ready())
		zero := s.send(s.client, "to zero, node port", empty.nodePort(), a)
		replaced := s.send(s.client, "backend replaced, ClusterIP", moved.clusterIP(), a)
		s.commits.quiet(proxyRest)
		s.proxy.pause(s)
		stuck := time.Now()
		empty.endpoints()
		moved.endpoints(b.ready())
		a.stop(s)
		fresh := s.service()
		fresh.endpoints(b.ready())
		early := s.early(s.client, "service new, node port", fresh.nodePort())
		s.disagreement(stuck, []*service{empty, moved}, zero, replaced, early)
		s.differ(frontend.NoBackends, frontend.Serving, behind, zero)
		s.differ(frontend.BackendGone, frontend.Serving, behind, replaced)
		s.differ(frontend.Untranslated, frontend.NoFrontend, behind, early)
		s.change(func() { s.proxy.resume(s) })
		patience := soon
		if s.agent.settling() == byTime {
			patience += time.Minute // which is how often it looks at what disagrees
		}
		s.expectAll(patience, want{nil, leaves, zero}, want{b, cleans, replaced}, want{b, cleans, early})
	}},

	{outage: true, name: "7a apiserver down, then a change", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		stale := s.everywhere(svc, a)
		down := time.Now()
		s.apiserver.kill()
		if s.agent != nil {
			eventually(s, 30*time.Second, "the agent reports that the apiserver is away", func() error {
				if s.agent.source(s).Fault == "" {
					return fmt.Errorf("no fault")
				}
				return nil
			})
			time.Sleep(time.Until(down.Add(30 * time.Second)))
			s.untouched(stale...)
		}
		s.startAPIServer(s)
		fresh := s.service()
		s.change(func() {
			svc.endpoints(b.ready())
			fresh.endpoints(b.ready())
			a.stop(s)
		})
		s.expectAll(reconnect, wants(b, cleans, stale)...)
		// What is watched comes back kind by kind: a Service whose endpoints are not known yet is no
		// Service without endpoints.
		right := s.everywhere(fresh, b)
		if s.agent != nil {
			s.agent.knows(s, 3)
			time.Sleep(window)
		}
		s.untouched(right...)
	}},

	{name: "8a local endpoint replaced, externalTrafficPolicy Local", play: func(s *scene) {
		a, b, remote := s.backend(), s.backend(), s.backend().elsewhere()
		svc := s.service(local)
		svc.endpoints(a.ready(), remote.ready())
		stale := s.send(s.client, "node port", svc.nodePort(), a)
		right := s.send(s.client, "ClusterIP", svc.clusterIP(), remote)
		s.change(func() {
			svc.endpoints(b.ready(), remote.ready())
			a.stop(s)
		})
		s.expect(b, cleans, stale)
		s.untouched(right)
	}},

	{name: "8b last local endpoint gone, externalTrafficPolicy Local", play: func(s *scene) {
		a, remote := s.backend(), s.backend().elsewhere()
		svc := s.service(local)
		svc.endpoints(a.ready(), remote.ready())
		stale := s.send(s.client, "node port", svc.nodePort(), a)
		s.change(func() {
			svc.endpoints(remote.ready())
			a.stop(s)
		})
		s.expect(nil, cleans, stale)
	}},

	{name: "8c externalTrafficPolicy becomes Local: remote flows stay", play: func(s *scene) {
		a, remote := s.backend(), s.backend().elsewhere()
		svc := s.service()
		svc.endpoints(a.ready(), remote.ready())
		right := s.send(s.client, "node port", svc.nodePort(), remote)
		s.change(func() {
			svc.edit(func(spec *corev1.ServiceSpec) { spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		})
		s.stays(spares, right)
		s.differ(frontend.Serving, frontend.Unpredictable, elsewhere, right)
	}},

	{name: "9 dual-stack: one family changes at a time", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		v4 := s.send(s.client, "IPv4 ClusterIP", svc.clusterIP()[:1], a)
		v6 := s.send(s.client, "IPv6 ClusterIP", svc.clusterIP()[1:], a)
		s.change(func() {
			svc.slice(0, b.ready())
			a.stop(s, of(0))
		})
		s.expect(b, cleans, v4)
		s.untouched(v6)
		s.change(func() {
			svc.slice(1, b.ready())
			a.stop(s, of(1))
		})
		s.expect(b, cleans, v6)
	}},

	{name: "10 terminating endpoint serves until it is gone", play: func(s *scene) {
		a, b := s.backend(), s.backend()
		svc := s.service()
		svc.endpoints(a.ready(), b.ready())
		streams := s.everywhere(svc, a)
		s.change(func() { svc.endpoints(a.draining(), b.ready()) })
		s.stays(spares, streams...)
		s.differ(frontend.Serving, frontend.BackendGone, draining, streams...)
		s.change(func() {
			svc.endpoints(b.ready())
			a.stop(s)
		})
		s.expect(b, cleans, streams...)
	}},

	{name: "10b the last endpoint serves while it terminates", play: func(s *scene) {
		a := s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		streams := s.everywhere(svc, a)
		s.change(func() { svc.endpoints(a.draining()) })
		s.stays(spares, streams...)
	}},

	{name: "11 host port", play: func(s *scene) {
		const hostPort = 8053
		to := frontends(nodeAddr, hostPort)
		a, b := s.backend(), s.backend()
		stop := s.pod(a, hostPort)
		s.forward(hostPort, a)
		st := s.send(s.client, "host port", to, a)
		s.change(func() {
			stop()
			stop = s.pod(b, hostPort)
			s.forward(hostPort, b)
			a.stop(s)
		})
		s.expect(b, leaves, st)
		st = s.send(s.client, "host port, pod gone", to, b)
		s.change(func() {
			stop()
			s.forward(hostPort, nil)
			b.stop(s)
		})
		s.expect(nil, leaves, st)
	}},

	{name: "13 the node port's number elsewhere", play: func(s *scene) {
		const port = 30813
		a, b := s.backend(), s.backend()
		for i := range unlisted {
			nstest.Echo(s, s.client, netip.AddrPortFrom(clientAddr[i], port))
			nstest.Echo(s, s.node, netip.AddrPortFrom(unlisted[i], port))
		}
		outgoing := s.send(s.node, "outgoing flow", frontends(clientAddr, port), nil)
		overlay := s.send(s.client, "overlay flow to an unlisted address", frontends(unlisted, port), nil)
		if s.agent != nil {
			s.proxy.pause(s) // it deletes both, as is seen without flowsweep
			defer s.proxy.resume(s)
		}
		svc := s.service(func(svc *corev1.Service) { svc.Spec.Ports[0].NodePort = port })
		svc.endpoints(a.ready())
		s.change(func() { svc.endpoints(b.ready()) })
		s.stays(touches, outgoing, overlay)
	}},

	{name: "a Service's own policy", play: func(s *scene) {
		a := s.backend()
		off := s.service(policy("udp=off"))
		bad := s.service(policy("udp=sometimes"))
		off.endpoints(a.ready())
		bad.endpoints(a.ready())
		kept := s.send(s.client, "udp=off, node port", off.nodePort(), a)
		stale := s.send(s.client, "a value that makes no sense, node port", bad.nodePort(), a)
		s.change(func() {
			off.endpoints()
			bad.endpoints()
		})
		s.expect(nil, leaves, stale)
		s.stays(spares, kept)
		if s.agent != nil {
			eventually(s, soon, "an Event tells of the bad annotation", func() error {
				if told := s.events(bad); len(told) == 0 {
					return fmt.Errorf("there is none")
				}
				return nil
			})
		}
	}},

	{outage: true, name: "7b apiserver restarted with a wiped etcd", play: func(s *scene) {
		a := s.backend()
		svc := s.service()
		svc.endpoints(a.ready())
		for range 3 { // so that what is lost is many
			s.service().endpoints(a.ready())
		}
		stale := s.everywhere(svc, a)
		if s.agent != nil {
			s.agent.knows(s, 5)
			s.untouched(stale...)
		}
		s.proxy.kill() // it ends when its Node is gone, and the kubelet starts it again
		s.change(func() {
			s.wipe(s)
			s.provision(s)
			s.startProxy(s, s.proxyMode)
		})
		if s.agent != nil {
			eventually(s, reconnect, "the agent holds the loss", func() error {
				if src := s.agent.source(s); src.Held == "" {
					return fmt.Errorf("not held: %+v", src)
				}
				return nil
			})
			s.report.note("- 7b, %s: held %s after everything was gone, for %s.", s.proxyMode,
				time.Since(s.changed).Round(100*time.Millisecond), shrinkHold)
			time.Sleep(shrinkHold / 2)
			s.untouched(stale...)
		}
		s.expectAll(shrinkHold+soon, wants(nil, leaves, stale)...)
	}},
}

func local(svc *corev1.Service) {
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// policy annotates a Service.
func policy(sweep string) func(*corev1.Service) {
	return func(svc *corev1.Service) { svc.Annotations = map[string]string{"flowsweep.dev/sweep": sweep} }
}

// pod makes the object of a pod on this node that has a host port, and returns what deletes it.
func (s *scene) pod(b *backend, hostPort int32) (remove func()) {
	s.Helper()
	pods := s.kube.CoreV1().Pods(metav1.NamespaceDefault)
	pod, err := pods.Create(s.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "p-"},
		Spec: corev1.PodSpec{
			NodeName: nodeName,
			Containers: []corev1.Container{{
				Name: "dns", Image: "dns",
				Ports: []corev1.ContainerPort{{ContainerPort: podPort, HostPort: hostPort, Protocol: corev1.ProtocolUDP}},
			}},
		},
	}, metav1.CreateOptions{})
	must(s, err)
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: b.addrs[0].String()}
	for _, a := range b.addrs {
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	_, err = pods.UpdateStatus(s.Context(), pod, metav1.UpdateOptions{})
	must(s, err)
	return func() {
		s.Helper()
		// Without a kubelet there is nobody to confirm the end.
		now := int64(0)
		must(s, pods.Delete(s.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
}

// forward writes the rules of a host port as a CNI plugin would: to a backend, to none with nil.
func (s *scene) forward(hostPort uint16, b *backend) {
	s.Helper()
	if b == nil {
		must(s, s.node.SetNAT())
		return
	}
	f := testnet.Forward{Proto: conntrack.UDP, Dst: netip.AddrPortFrom(netip.Addr{}, hostPort)}
	for _, a := range b.addrs {
		f.Backends = append(f.Backends, netip.AddrPortFrom(a, podPort))
	}
	must(s, s.node.SetNAT(f))
}

// disagreement waits until the agent reports that the rules translate streams wrongly, which began at
// a time, and checks that it does not delete what is made again, and tells of it on the Services.
func (s *scene) disagreement(since time.Time, services []*service, streams ...*stream) {
	s.Helper()
	if s.agent == nil {
		time.Sleep(observed)
		return
	}
	exact := s.agent.settling() == byRules
	eventually(s, time.Minute, "the agent reports ruleset-disagrees", func() error {
		reported := map[string]string{}
		for _, d := range s.agent.status(s).Disagrees {
			reported[d.Frontend] = d.Rule
		}
		for _, st := range streams {
			if exact && !st.flows[0].Translated() {
				continue // what is not translated may be so by something else than rules
			}
			for _, to := range st.to {
				rule, ok := reported[to.String()+"/UDP"]
				if !ok { // by the rules it is of the node port on all addresses
					rule, ok = reported[dual("*", "[*]")[family(to.Addr())]+fmt.Sprintf(":%d/UDP", to.Port())]
				}
				if !ok || exact && !strings.Contains(rule, translating[s.proxyMode]) {
					return fmt.Errorf("not of %s %s, with its rule (%t); of %v", st.what, to, exact, reported)
				}
			}
		}
		return nil
	})
	after := time.Since(since)
	deletes := func() (most int) {
		for _, st := range streams {
			for i := range st.senders {
				most = max(most, s.agent.deletes(st, i, since))
			}
		}
		return most
	}
	before, passes := deletes(), s.agent.passes(s)
	time.Sleep(2 * window)
	later := deletes() - before
	switch {
	case exact && before+later > 0:
		s.Errorf("a flow that the rules would make again was deleted %d times", before+later)
	case later > 1:
		s.Errorf("a flow that the rules make was deleted %d times within %s after it was reported, want 1 at most",
			later, 2*window)
	}
	s.report.note("- 6b, %s, settling by %s: ruleset-disagrees reported after %s, until when a flow was deleted %d times; "+
		"in the %s after, %d times in %d passes.", s.proxyMode, s.agent.settling(), after.Round(100*time.Millisecond),
		before, 2*window, later, s.agent.passes(s)-passes)
	for _, svc := range services {
		if told := s.events(svc); len(told) == 0 {
			s.Errorf("no Event on Service %s", svc.Name)
		}
	}
}

// translating is what names of rules hold, by mode, that translate for a Service.
var translating = map[string]string{"nftables": " kube-proxy ", "iptables": " nat KUBE-"}

// events returns what Events say of a Service.
func (s *scene) events(svc *service) (told []string) {
	s.Helper()
	list, err := s.kube.CoreV1().Events(svc.Namespace).List(s.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.kind=Service,involvedObject.name=" + svc.Name,
	})
	must(s, err)
	for _, e := range list.Items {
		told = append(told, e.Reason+": "+e.Message)
	}
	return told
}
