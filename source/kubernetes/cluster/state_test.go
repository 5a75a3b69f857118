package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

var errNotFound = apierrors.NewNotFound(schema.GroupResource{Group: "networking.k8s.io", Resource: "servicecidrs"}, "")

// history is a state that is being told a story, and what it ought to say.
type history struct {
	cfg  Config
	st   *state
	sink *recorder
	now  *objects // what the API server has

	listed   [kinds]bool
	lagging  map[kind]bool   // not listed since an error
	before   int             // calls of the sink before the first of them
	seenNode *corev1.Node    // the last one there was
	told     []error         // problems, since the last step
	problems map[string]bool // those that hold, by unit and text
}

func newHistory(cfg Config) *history {
	h := &history{sink: &recorder{}, now: newObjects(), lagging: map[kind]bool{}, problems: map[string]bool{}}
	cfg.Node = here
	cfg.OnProblem = func(err error) { h.told = append(h.told, err) }
	h.cfg, h.st = cfg, newState(cfg, h.sink)
	return h
}

func (h *history) store(k kind) *store { return &store{h.st, k} }

// list is a list of a kind that holds what is given, and nothing else.
func (h *history) list(k kind, objs ...runtime.Object) {
	h.now.clear(k)
	for _, o := range objs {
		h.now.put(o)
	}
	var items []any
	for _, o := range h.now.of(k) { // once each
		items = append(items, o)
	}
	h.listed[k] = true
	delete(h.lagging, k)
	if err := h.store(k).Replace(items, "1"); err != nil {
		panic(err)
	}
	h.look()
}

func (h *history) add(k kind, o runtime.Object) {
	h.now.put(o)
	if err := h.store(k).Add(o); err != nil {
		panic(err)
	}
	h.look()
}

func (h *history) remove(k kind, o runtime.Object) {
	h.now.remove(o)
	if err := h.store(k).Delete(o); err != nil {
		panic(err)
	}
	h.look()
}

// asked is an answer of the API server. After an error nobody knows what was
// missed, until the next list.
func (h *history) asked(k kind, err error) {
	switch {
	case absent(k, err):
		h.listed[k] = true
		delete(h.lagging, k)
	case err != nil && h.complete():
		if len(h.lagging) == 0 {
			h.before = len(h.sink.calls)
		}
		h.lagging[k] = true
	}
	h.st.asked(k, err)
}

func (h *history) look() {
	if n := h.now.nodes[name{Name: here}]; n != nil {
		h.seenNode = n
	}
}

// complete tells whether everything that is wanted is known.
func (h *history) complete() bool {
	for _, k := range h.cfg.wanted() {
		if !h.listed[k] {
			return false
		}
	}
	return h.seenNode != nil
}

// leaks tells what is kept though nothing needs it any more.
func (h *history) leaks() error {
	n := 0
	for of, list := range h.st.slices {
		if n += len(list); len(list) == 0 {
			return fmt.Errorf("no slice of %s is kept", of)
		}
	}
	if n != len(h.now.slices) || len(h.st.serves) != n || len(h.st.services) != len(h.now.services) ||
		len(h.st.ranges) != len(h.now.cidrs) {
		return fmt.Errorf("%d slices, %d of them with a Service, %d Services and %d ranges are kept; there are %d, %d and %d",
			n, len(h.st.serves), len(h.st.services), len(h.st.ranges), len(h.now.slices), len(h.now.services), len(h.now.cidrs))
	}
	return nil
}

// check compares what the sink was told with the whole state judged anew.
func (h *history) check() error {
	if err := h.leaks(); err != nil {
		return err
	}
	if !h.complete() {
		for _, call := range h.sink.calls {
			if call != "Fault" {
				return fmt.Errorf("%s before everything is known", call)
			}
		}
		if len(h.told) > 0 {
			return fmt.Errorf("problems told before everything is known: %v", h.told)
		}
		return nil
	}
	if len(h.lagging) > 0 {
		calls := h.sink.calls[h.before:]
		if slices.ContainsFunc(calls, func(call string) bool { return call != "Fault" }) {
			return fmt.Errorf("%q though %v may be older than the rest", calls, h.lagging)
		}
		return nil
	}
	if i := slices.Index(h.sink.calls, "Replace"); i < 0 ||
		!slices.Contains(h.sink.calls[:i], "Host") || !slices.Contains(h.sink.calls[:i], "ServiceRanges") {
		return fmt.Errorf("host and ranges come before the first list: %q", h.sink.calls)
	}
	units := h.now.frontends(here)
	if d := gocmp.Diff(show(units), show(h.sink.units)); d != "" {
		return fmt.Errorf("units (-want +got):\n%s", d)
	}
	if got, want := h.sink.host.Listed, kubernetes.NodeAddresses(h.seenNode); !slices.Equal(got, want) || h.sink.host.Other != nil ||
		!slices.Equal(h.sink.host.Pods, kubernetes.PodRanges(h.seenNode, h.now.podAddrs()...)) || h.sink.host.HostPortsUnknown == h.cfg.HostPorts {
		return fmt.Errorf("host %v, want %v", h.sink.host, want)
	}
	if want := h.now.ranges(); !slices.Equal(h.sink.ranges, want) {
		return fmt.Errorf("ranges %v, want %v", h.sink.ranges, want)
	}
	// A problem of a unit is told when it arises, and not again as long as it lasts.
	var fresh []error
	hold := map[string]bool{}
	for unit, problems := range h.now.problems(here) {
		for _, err := range problems {
			text := unit + ": " + err.Error()
			if hold[text] = true; !h.problems[text] {
				fresh = append(fresh, err)
			}
		}
	}
	if d := gocmp.Diff(texts(fresh), texts(h.told)); d != "" {
		return fmt.Errorf("problems told (-want +got):\n%s", d)
	}
	h.problems, h.told = hold, nil
	return nil
}

// Whatever lists, events and answers come in whatever order: what the sink has
// accumulated is what the pure function makes of the present objects.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHistory(Config{
			HostPorts: rapid.Bool().Draw(t, "hostPorts"), ServiceRanges: rapid.Bool().Draw(t, "serviceRanges"),
		})
		wanted := h.cfg.wanted()
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			k := pick(t, "kind", append(wanted, services, endpointSlices)...)
			present := h.now.of(k)
			switch what := rapid.IntRange(0, 9).Draw(t, "what"); {
			case !h.listed[k] && k == serviceCIDRs && what < 3: // an API server that has none of them
				h.asked(k, errNotFound)
			case !h.listed[k] || what == 0:
				var objs []runtime.Object
				for range rapid.IntRange(0, 3).Draw(t, "objects") {
					objs = append(objs, genObject(t, k))
				}
				h.list(k, objs...)
			case what == 1: // the same list again
				h.list(k, present...)
			case what == 2:
				h.asked(k, pick[error](t, "answer", nil, errNotFound, errors.New("broken")))
			case what <= 5 && len(present) > 0:
				h.remove(k, pick(t, "victim", present...))
			default:
				h.add(k, genObject(t, k))
			}
			if err := h.check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// began returns a history in which everything is known: x/dns with one backend.
func began(cfg Config) *history {
	h := newHistory(cfg)
	h.list(services, service())
	h.list(endpointSlices, slice("198.51.100.1"))
	h.list(nodes, node("192.0.2.1"))
	if cfg.HostPorts {
		h.list(pods)
	}
	if cfg.ServiceRanges {
		h.list(serviceCIDRs, cidr("203.0.113.0/24"))
	}
	h.sink.take()
	return h
}

// One change is the work of one Service, and a list that of everything.
func TestCalls(t *testing.T) {
	all := Config{HostPorts: true, ServiceRanges: true}
	other := service(func(s *corev1.Service) { s.Name = "other" })
	moved := slice("198.51.100.1")
	moved.Labels = map[string]string{"kubernetes.io/service-name": "other"}
	for name, tc := range map[string]struct {
		play func(h *history)
		want []string
	}{
		"a slice changes": {
			func(h *history) { h.add(endpointSlices, slice("198.51.100.2")) }, []string{"Set service x/dns"},
		},
		"a slice goes to another Service": {
			func(h *history) { h.add(endpointSlices, moved) }, []string{"Set service x/dns", "Set service x/other"},
		},
		"a slice goes": {
			func(h *history) { h.remove(endpointSlices, slice()) }, []string{"Set service x/dns"},
		},
		"a slice that nobody knows goes": {
			func(h *history) { h.remove(endpointSlices, named(slice(), "e9")) }, nil,
		},
		"a Service comes": {
			func(h *history) { h.add(services, other) }, []string{"Set service x/other"},
		},
		"a Service goes before its slices": {
			func(h *history) {
				h.remove(services, service())
				h.remove(endpointSlices, slice())
			},
			[]string{"Set service x/dns", "Set service x/dns"},
		},
		"a Pod comes": {
			func(h *history) { h.add(pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "p"}}) },
			[]string{"Set pod x/p"},
		},
		"a Node that changes tells of the host alone": {
			func(h *history) { h.add(nodes, node("192.0.2.1", "192.0.2.2")) }, []string{"Host"},
		},
		"a list of Services": {
			func(h *history) { h.list(services, service(), other) }, []string{"Replace"},
		},
		"service ranges are told of at once, before what is judged by them": {
			func(h *history) {
				h.list(serviceCIDRs, cidr("203.0.113.0/24"), named(cidr("203.0.114.0/24"), "more"))
			},
			[]string{"ServiceRanges", "Replace"},
		},
		"a service range goes": {
			func(h *history) { h.remove(serviceCIDRs, cidr()) }, []string{"ServiceRanges"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := began(all)
			tc.play(h)
			if got := h.sink.take(); !slices.Equal(got, tc.want) {
				t.Errorf("calls %q, want %q", got, tc.want)
			}
		})
	}
}

// named gives an object another name.
func named[T metav1.Object](o T, name string) T {
	o.SetName(name)
	return o
}

// refused is what a request gets where nobody listens; its own port differs each
// time.
func refused(port int) error {
	return &url.Error{Op: "Get", URL: "https://192.0.2.1:6443/api/v1/nodes?limit=500", Err: &net.OpError{
		Op: "dial", Net: "tcp", Source: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: port},
		Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 6443}, Err: syscall.ECONNREFUSED,
	}}
}

func forbidden(k kind) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: k.String()}, "", errors.New("not this one"))
}

// What a request says is told once for all kinds that suffer from it, with a
// remedy where the API server objects.
func TestFaults(t *testing.T) {
	unreachable := `API server: dial 192.0.2.1:6443: connection refused`
	for name, tc := range map[string]struct {
		errs map[kind]error
		want string
	}{
		"all well":            {map[kind]error{services: nil, nodes: nil}, ""},
		"nobody listens":      {map[kind]error{services: refused(40001)}, unreachable},
		"for all kinds alike": {map[kind]error{services: refused(40001), nodes: refused(40002), pods: refused(40003)}, unreachable},
		"a name that nobody knows": {
			map[kind]error{services: &url.Error{
				Op: "Get", URL: "https://api/", Err: &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: "api"}},
			}},
			"API server: dial tcp: lookup api: no such host",
		},
		"another certificate": {
			map[kind]error{services: &url.Error{Op: "Get", URL: "https://api/", Err: errors.New("tls: unknown authority")}},
			"API server: tls: unknown authority",
		},
		"forbidden": {
			map[kind]error{services: forbidden(services)},
			"services: services is forbidden: not this one; grant list and watch on services",
		},
		"forbidden what need not be": {
			map[kind]error{pods: forbidden(pods), serviceCIDRs: forbidden(serviceCIDRs)},
			"pods: pods is forbidden: not this one; grant list and watch on pods, or set sources.kubernetes.hostPorts: false; " +
				"servicecidrs: servicecidrs is forbidden: not this one; grant list and watch on servicecidrs, " +
				"or set sources.kubernetes.serviceRanges: false",
		},
		"unauthorized": {
			map[kind]error{services: apierrors.NewUnauthorized("Unauthorized")},
			"services: Unauthorized; the API server does not accept these credentials: check the token or the kubeconfig file",
		},
		"ServiceCIDRs that the API server does not have": {map[kind]error{serviceCIDRs: errNotFound}, ""},
		"EndpointSlices that the API server does not have": {
			map[kind]error{endpointSlices: apierrors.NewNotFound(schema.GroupResource{Resource: "endpointslices"}, "")},
			`endpointslices: endpointslices "" not found`,
		},
		"an API server in trouble": {
			map[kind]error{services: apierrors.NewInternalError(errors.New("etcdserver: no leader"))},
			"services: Internal error occurred: etcdserver: no leader",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := began(Config{HostPorts: true, ServiceRanges: true})
			for _, k := range h.cfg.wanted() {
				if err, ok := tc.errs[k]; ok {
					h.st.asked(k, err)
				}
			}
			got := ""
			if h.sink.fault != nil {
				got = h.sink.fault.Error()
			}
			if got != tc.want {
				t.Errorf("fault %q\nwant  %q", got, tc.want)
			}
			if tc.want == "" && len(h.sink.calls) > 0 {
				t.Errorf("calls %q, though nothing has changed", h.sink.calls)
			}
			for _, k := range h.cfg.wanted() { // the last one to be listed makes it well
				if tc.errs[k] == nil {
					continue
				}
				if h.sink.fault == nil && tc.want != "" {
					t.Errorf("well before %s is", k)
				}
				h.asked(k, nil)
				if h.sink.fault == nil && tc.want != "" {
					t.Errorf("well before %s is listed", k)
				}
				h.list(k, h.now.of(k)...)
			}
			if h.sink.fault != nil {
				t.Errorf("still %v", h.sink.fault)
			}
		})
	}
}

// Until the Node is found nothing is complete, and the fault says what to do.
// Once it was, what it said stays in force while it is away.
func TestMissingNode(t *testing.T) {
	const missing = `there is no Node named "n1"; give the name of this host's Node with --node or in NODE_NAME`
	fault := func(h *history) string {
		if h.sink.fault == nil {
			return ""
		}
		return h.sink.fault.Error()
	}
	h := newHistory(Config{})
	h.list(services, service())
	h.list(endpointSlices, slice("198.51.100.1"))
	h.st.asked(nodes, nil)
	if got := fault(h); got != "" {
		t.Errorf("fault %q before the list", got)
	}
	h.list(nodes)
	h.st.asked(nodes, nil) // the watch that follows
	if got := fault(h); got != missing {
		t.Errorf("fault %q, want %q", got, missing)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}
	h.st.asked(nodes, refused(1))
	if got := fault(h); !strings.Contains(got, "connection refused") {
		t.Errorf("fault %q while nobody listens", got)
	}
	h.st.asked(nodes, nil)
	if got := fault(h); got != missing {
		t.Errorf("fault %q after the connection is back, want %q", got, missing)
	}
	h.add(nodes, node("192.0.2.1"))
	if got := fault(h); got != "" {
		t.Errorf("fault %q though the Node has come", got)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}

	h.remove(nodes, node())
	if got := fault(h); got != missing {
		t.Errorf("fault %q, want %q", got, missing)
	}
	h.st.asked(nodes, nil) // a watch ends and begins every few minutes
	if got := fault(h); got != missing {
		t.Errorf("fault %q after a new watch, want %q", got, missing)
	}
	h.list(nodes)
	h.add(endpointSlices, slice("198.51.100.2"))
	if err := h.check(); err != nil {
		t.Error(err)
	}
	if want := []netip.Addr{netip.MustParseAddr("192.0.2.1")}; !slices.Equal(h.sink.host.Listed, want) {
		t.Errorf("host %v, want %v", h.sink.host.Listed, want)
	}
	h.add(nodes, node("192.0.2.5"))
	if got := fault(h); got != "" {
		t.Errorf("fault %q though the Node is back", got)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}
}

// A problem is told once, in the log and to whoever wants to know, and again where
// it had gone, however it went.
func TestProblemsToldOnce(t *testing.T) {
	annotated := func(external ...string) *corev1.Service {
		return service(func(s *corev1.Service) {
			s.Annotations = map[string]string{kubernetes.AnnotationSweep: "udp=never"}
			s.Spec.ExternalIPs = external
		})
	}
	bad := annotated("bad")
	badSlice := slice("bad")
	annotation := `Service x/dns: metadata.annotations[flowsweep.dev/sweep]: ` +
		`"udp=never": want all, unreplied or off after udp=; the whole annotation is ignored`
	external := `Service x/dns: spec.externalIPs[0]: "bad" is not an IP address`
	endpoint := `EndpointSlice x/dns-a: endpoints[0].addresses[0]: "bad" is not an IP address`

	h := began(Config{})
	var log bytes.Buffer
	h.st.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	for _, step := range []struct {
		name string
		play func()
		want []string
	}{
		{"they come", func() { h.add(services, bad) }, []string{annotation, external}},
		{"they last", func() { h.add(services, bad) }, nil},
		{"a slice changes", func() { h.add(endpointSlices, slice("198.51.100.7")) }, nil},
		{"everything is listed", func() { h.list(services, bad) }, nil},
		{"one is mended", func() { h.add(services, annotated()) }, nil},
		{"and made again", func() { h.add(services, bad) }, []string{external}},
		{"another one joins them", func() { h.add(endpointSlices, badSlice) }, []string{endpoint}},
		{"the Service goes", func() { h.remove(services, bad) }, nil},
		{"and comes back", func() { h.add(services, bad) }, []string{annotation, endpoint, external}},
		{"the Service is missing in a list", func() { h.list(services) }, nil},
		{"and comes back after it", func() { h.add(services, bad) }, []string{annotation, endpoint, external}},
	} {
		log.Reset()
		step.play()
		slices.Sort(step.want)
		for _, err := range h.told {
			var e *kubernetes.Error
			if !errors.As(err, &e) {
				t.Errorf("%s: %v is no *kubernetes.Error", step.name, err)
			}
		}
		if d := gocmp.Diff(step.want, texts(h.told)); d != "" {
			t.Errorf("%s: told (-want +got):\n%s", step.name, d)
		}
		if got := strings.Count(log.String(), "part of an object does not count"); got != len(step.want) {
			t.Errorf("%s: %d lines in the log, want %d:\n%s", step.name, got, len(step.want), &log)
		}
		h.told = nil
	}
	h.remove(services, bad)
	if n := len(h.st.problems); n > 0 {
		t.Errorf("%d units are remembered though nothing is wrong", n)
	}
}

// The work that a slice's change makes does not grow with the cluster.
func TestUpdateIsFlat(t *testing.T) {
	const endpoints = 10
	cost := map[int]float64{}
	for _, n := range []int{10, 1000, 10_000} {
		st, first := sized(n, endpoints)
		store := &store{st, endpointSlices}
		changed := [2]*discoveryv1.EndpointSlice{first, first.DeepCopy()}
		changed[1].Endpoints = changed[1].Endpoints[1:]
		i := 0
		cost[n] = testing.AllocsPerRun(100, func() {
			i++
			if err := store.Update(changed[i%2]); err != nil {
				t.Fatal(err)
			}
		})
	}
	t.Log(cost)
	if cost[10] != cost[1000] || cost[10] != cost[10_000] || cost[10] > 30 {
		t.Errorf("allocations of a change by the number of Services: %v, want the same, and few", cost)
	}
}

// sized returns a state with as many Services as told, and one of their slices.
func sized(n, endpoints int) (*state, *discoveryv1.EndpointSlice) {
	st := newState(Config{Node: here}, discard{})
	var svcs, eps []any
	for i := range n {
		of := fmt.Sprint("s", i)
		svcs = append(svcs, service(func(s *corev1.Service) {
			s.Name, s.Spec.ClusterIP = of, fmt.Sprintf("10.96.%d.%d", i/250, i%250)
			s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		}))
		var addrs []string
		for j := range endpoints {
			addrs = append(addrs, fmt.Sprintf("10.%d.%d.%d", 128+j, i/250, i%250))
		}
		s := slice(addrs...)
		s.Name, s.Labels[discoveryv1.LabelServiceName] = of, of
		eps = append(eps, s)
	}
	for k, items := range map[kind][]any{services: svcs, endpointSlices: eps, nodes: {node("192.0.2.1")}} {
		if err := (&store{st, k}).Replace(items, "1"); err != nil {
			panic(err)
		}
	}
	return st, eps[0].(*discoveryv1.EndpointSlice)
}

// discard is a sink that forgets.
type discard struct{}

func (discard) Replace(map[string][]frontend.Frontend) {}
func (discard) Set(string, []frontend.Frontend)        {}
func (discard) Host(source.Host)                       {}
func (discard) ServiceRanges([]netip.Prefix)           {}
func (discard) Fault(error)                            {}

func BenchmarkUpdate(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			st, first := sized(n, 10)
			store := &store{st, endpointSlices}
			b.ReportAllocs()
			for b.Loop() {
				if err := store.Update(first); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
