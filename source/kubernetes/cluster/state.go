package cluster

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

type name = types.NamespacedName

func nameOf(o metav1.Object) name { return name{Namespace: o.GetNamespace(), Name: o.GetName()} }

// state is what is known of the cluster, stripped, and how far.
type state struct {
	cfg  Config
	sink source.Sink

	mu       sync.Mutex
	services map[name]*corev1.Service
	slices   map[name][]*kubernetes.Slice // by Service
	serves   map[name]name                // the Service of each slice
	pods     map[name]*corev1.Pod         // with host ports
	addrs    map[name][]netip.Addr        // of the node's own Pods
	node     *corev1.Node                 // as it was last
	ranges   map[string][]netip.Prefix    // by ServiceCIDR
	inside   []netip.Prefix               // of the node's own Pods, as the sink was told

	listed   [kinds]bool
	lagging  [kinds]bool // it may be older than the other kinds, until the next list
	late     bool        // something changed that the sink was not told, since a kind lags
	nodeGone bool        // the API server has no Node of that name
	complete bool
	faults   [kinds]error
	problems map[unit][]string // those that were told of
}

func newState(cfg Config, sink source.Sink) *state {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &state{
		cfg: cfg, sink: sink,
		services: map[name]*corev1.Service{},
		slices:   map[name][]*kubernetes.Slice{},
		serves:   map[name]name{},
		pods:     map[name]*corev1.Pod{},
		addrs:    map[name][]netip.Addr{},
		ranges:   map[string][]netip.Prefix{},
		problems: map[unit][]string{},
	}
}

// asked notes how a request for a kind went, and tells the sink where that
// changes something.
func (s *state) asked(k kind, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if absent(k, err) {
		err = nil
		if !s.listed[k] || s.lagging[k] { // an API server that has none of them
			s.listed[k], s.lagging[k] = true, false
			s.deliver()
		}
	}
	switch {
	case err != nil:
		s.lagging[k] = s.complete
		err = told(k, err)
	case s.lagging[k]:
		return // it is well when the list is there
	case k == nodes && s.nodeGone:
		err = s.missingNode() // though the request went well
	}
	s.fault(k, err)
}

// lags notes that a kind is about to be listed again. The proxy on this host has
// its own connection: what is known of one kind and not yet of another (a Service
// without its slices) would make flows look wrong that are right.
func (s *state) lags(k kind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lagging[k] = s.complete
}

// whole tells whether the sink may be told of a change; if not, it is told
// everything once that is so.
func (s *state) whole() bool {
	s.late = s.late || slices.Contains(s.lagging[:], true)
	return !s.late
}

func (s *state) fault(k kind, err error) {
	if err == nil && s.faults[k] == nil {
		return
	}
	s.faults[k] = err
	var texts []string // one for what all kinds suffer from
	for _, err := range s.faults {
		if err != nil && !slices.Contains(texts, err.Error()) {
			texts = append(texts, err.Error())
		}
	}
	if len(texts) == 0 {
		s.sink.Fault(nil)
	} else {
		s.sink.Fault(errors.New(strings.Join(texts, "; ")))
	}
}

// store is what a reflector keeps one kind in; see cache.ReflectorStore.
type store struct {
	*state
	kind kind
}

// Transformer strips objects while a list streams in.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if o, ok := obj.(runtime.Object); ok {
			return strip(o, s.cfg.Node), nil
		}
		return obj, nil
	}
}

// Add puts an object that a watch tells of.
func (s *store) Add(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(strip(obj.(runtime.Object), s.cfg.Node), s.update)
	switch s.kind {
	case serviceCIDRs:
		s.sendRanges()
	case pods:
		s.podsMoved()
	case services, endpointSlices, nodes, kinds:
	}
	return nil
}

// Update is Add.
func (s *store) Update(obj any) error { return s.Add(obj) }

// Delete takes an object away that a watch tells the end of.
func (s *store) Delete(obj any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch o := obj.(type) {
	case *corev1.Service:
		delete(s.services, nameOf(o))
		s.update(serviceUnit, nameOf(o))
	case *discoveryv1.EndpointSlice:
		s.dropSlice(nameOf(o), s.update)
	case *corev1.Pod:
		delete(s.pods, nameOf(o))
		delete(s.addrs, nameOf(o))
		s.podsMoved()
		s.update(podUnit, nameOf(o))
	case *corev1.Node:
		s.setNode(nil)
	case *networkingv1.ServiceCIDR:
		delete(s.ranges, o.Name)
		s.sendRanges()
	}
	return nil
}

// Replace takes a whole list. The sink then gets everything, so that its guard
// sees how much there was and is.
func (s *store) Replace(items []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.kind {
	case services:
		clear(s.services)
	case endpointSlices:
		clear(s.slices)
		clear(s.serves)
	case pods:
		clear(s.pods)
		clear(s.addrs)
	case serviceCIDRs:
		clear(s.ranges)
	case nodes:
		if len(items) == 0 {
			s.setNode(nil)
		}
	case kinds:
	}
	for _, obj := range items {
		s.put(strip(obj.(runtime.Object), s.cfg.Node), func(string, name) {})
	}
	if s.kind == serviceCIDRs {
		s.sendRanges()
	}
	s.listed[s.kind], s.lagging[s.kind] = true, false
	if s.kind == pods {
		s.podsMoved()
	}
	if s.kind == nodes && s.nodeGone {
		s.fault(nodes, s.missingNode())
	} else {
		s.fault(s.kind, nil)
	}
	s.deliver()
	return nil
}

// Resync has nothing to do: no object waits for being looked at.
func (s *store) Resync() error { return nil }

// The kinds of units, as kubernetes.Frontends calls them.
const (
	serviceUnit = "service "
	podUnit     = "pod "
)

type unit struct {
	kind string
	name name
}

// put keeps a stripped object and calls touched for the units that it is part of.
func (s *state) put(obj runtime.Object, touched func(kind string, n name)) {
	switch o := obj.(type) {
	case *corev1.Service:
		s.services[nameOf(o)] = o
		touched(serviceUnit, nameOf(o))
	case *discoveryv1.EndpointSlice:
		read := kubernetes.ReadSlice(o, s.cfg.Node)
		of := name{Namespace: read.Namespace, Name: read.Service}
		if was, ok := s.serves[nameOf(o)]; ok && was != of {
			s.dropSlice(nameOf(o), touched)
		}
		s.serves[nameOf(o)] = of
		list := s.slices[of]
		if i := slices.IndexFunc(list, func(x *kubernetes.Slice) bool { return x.Name == o.Name }); i >= 0 {
			list[i] = read
		} else {
			s.slices[of] = append(list, read)
		}
		touched(serviceUnit, of)
	case *corev1.Pod:
		if len(o.Spec.Containers)+len(o.Spec.InitContainers) > 0 {
			s.pods[nameOf(o)] = o
		} else {
			delete(s.pods, nameOf(o))
		}
		if addrs := kubernetes.PodAddresses(o, s.cfg.Node); len(addrs) > 0 {
			s.addrs[nameOf(o)] = addrs
		} else {
			delete(s.addrs, nameOf(o))
		}
		touched(podUnit, nameOf(o))
	case *corev1.Node:
		s.setNode(o)
	case *networkingv1.ServiceCIDR:
		s.ranges[o.Name] = prefixes(o)
	}
}

func (s *state) dropSlice(slice name, touched func(kind string, n name)) {
	of, ok := s.serves[slice]
	if !ok {
		return
	}
	delete(s.serves, slice)
	s.slices[of] = slices.DeleteFunc(s.slices[of], func(x *kubernetes.Slice) bool { return x.Name == slice.Name })
	if len(s.slices[of]) == 0 {
		delete(s.slices, of)
	}
	touched(serviceUnit, of)
}

// setNode takes note of this host's Node. What it said last counts while it is
// away: a Node that is registered anew is the same host.
func (s *state) setNode(n *corev1.Node) {
	if s.nodeGone = n == nil; s.nodeGone {
		s.fault(nodes, s.missingNode())
		return
	}
	s.node = n
	s.fault(nodes, nil)
	switch {
	case !s.complete:
		s.deliver()
	case s.whole():
		s.sendHost()
	}
}

func (s *state) missingNode() error {
	return fmt.Errorf("there is no Node named %q; give the name of this host's Node with --node or in NODE_NAME", s.cfg.Node)
}

func (s *state) sendHost() {
	s.inside = s.podRanges()
	s.sink.Host(source.Host{
		Listed: kubernetes.NodeAddresses(s.node), Pods: slices.Clone(s.inside), HostPortsUnknown: !s.cfg.HostPorts,
	})
}

func (s *state) podRanges() []netip.Prefix {
	var pods []netip.Addr
	for _, addrs := range s.addrs {
		pods = append(pods, addrs...)
	}
	return kubernetes.PodRanges(s.node, pods...)
}

// podsMoved tells the sink of Pods outside the Node's ranges that came or went.
func (s *state) podsMoved() {
	if s.complete && s.whole() && !slices.Equal(s.inside, s.podRanges()) {
		s.sendHost()
	}
}

func (s *state) sendRanges() {
	if !s.complete || !s.whole() {
		return
	}
	var list []netip.Prefix
	for _, ranges := range s.ranges {
		list = append(list, ranges...)
	}
	slices.SortFunc(list, netip.Prefix.Compare)
	s.sink.ServiceRanges(list)
}

// deliver gives the sink everything, once everything is known.
func (s *state) deliver() {
	first := !s.complete
	for _, k := range s.cfg.wanted() {
		if !s.listed[k] {
			return
		}
	}
	if s.node == nil {
		return
	}
	if slices.Contains(s.lagging[:], true) {
		s.late = true
		return
	}
	late := s.late
	s.complete, s.late = true, false
	if first || late {
		s.sendHost()
		s.sendRanges()
	}
	for u := range s.problems {
		if u.kind == serviceUnit && s.services[u.name] == nil || u.kind == podUnit && s.pods[u.name] == nil {
			delete(s.problems, u) // gone with the list
		}
	}
	units := make(map[string][]frontend.Frontend, len(s.services)+len(s.pods))
	for n := range s.services {
		if fs := s.frontends(serviceUnit, n); len(fs) > 0 {
			units[serviceUnit+n.String()] = fs
		}
	}
	for n := range s.pods {
		if fs := s.frontends(podUnit, n); len(fs) > 0 {
			units[podUnit+n.String()] = fs
		}
	}
	s.sink.Replace(units)
}

// update gives the sink what one unit is now.
func (s *state) update(kind string, n name) {
	if s.complete && s.whole() {
		s.sink.Set(kind+n.String(), s.frontends(kind, n))
	}
}

// frontends builds a unit, and tells of what in it does not count.
func (s *state) frontends(kind string, n name) []frontend.Frontend {
	var fs []frontend.Frontend
	var problems []error
	if kind == serviceUnit {
		if svc := s.services[n]; svc != nil {
			fs, problems = kubernetes.ServiceFrontends(svc, s.slices[n])
		}
	} else if pod := s.pods[n]; pod != nil {
		fs, problems = kubernetes.PodFrontends(pod, s.cfg.Node)
	}
	s.tell(unit{kind, n}, problems)
	return fs
}

// tell logs what does not count, each once as long as it lasts.
func (s *state) tell(u unit, problems []error) {
	before := s.problems[u]
	if len(problems) == 0 {
		delete(s.problems, u)
		return
	}
	var now []string
	for _, err := range problems {
		text := err.Error()
		if now = append(now, text); slices.Contains(before, text) {
			continue
		}
		s.cfg.Log.Warn("part of an object does not count", "err", err)
		if s.cfg.OnProblem != nil {
			s.cfg.OnProblem(err)
		}
	}
	s.problems[u] = now
}
