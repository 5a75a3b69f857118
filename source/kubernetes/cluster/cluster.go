// Package cluster learns frontends from a Kubernetes API server: live, as a
// source of the agent ([Source]), or once ([Read]).
//
// It lists and watches Services, EndpointSlices, one Node and, where asked to,
// that Node's Pods and the ServiceCIDRs, and nothing else. Each object is stripped
// to what counts before it is kept, and one change is the work of one Service.
//
//	reflector (Services) ───────┐
//	reflector (EndpointSlices) ─┤            units of the object that changed
//	reflector (this Node) ──────┼──▶ state ─────────────────────────────────▶ Sink
//	reflector (its Pods) ───────┤            all units, after each list
//	reflector (ServiceCIDRs) ───┘
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

// Config says what to learn, and from where.
type Config struct {
	// API is how the API server is reached; see Connect.
	API *rest.Config
	// Node is the name of the Node whose point of view it is. It must exist.
	Node string
	// HostPorts: watch the Node's Pods, whose host ports are frontends too. Without,
	// nobody knows whether a host port serves a load balancer's address.
	HostPorts bool
	// ServiceRanges: watch ServiceCIDRs (Kubernetes 1.33; where the API server
	// does not know them there are none), in which what is no frontend is gone.
	ServiceRanges bool

	Log *slog.Logger // nil: none
	// OnProblem, if set, is told once of each part of an object that does not
	// count, a *kubernetes.Error. It must return at once.
	OnProblem func(problem error)
}

// kind is a kind of object that is watched.
type kind uint8

const (
	services kind = iota
	endpointSlices
	nodes
	pods
	serviceCIDRs
	kinds // how many there are
)

// resources are how the kinds are asked for.
var resources = [kinds]struct {
	name string
	of   runtime.Object
	list func() runtime.Object
	// disable tells how to do without, "" where that cannot be.
	disable string
}{
	services:       {"services", &corev1.Service{}, func() runtime.Object { return &corev1.ServiceList{} }, ""},
	endpointSlices: {"endpointslices", &discoveryv1.EndpointSlice{}, func() runtime.Object { return &discoveryv1.EndpointSliceList{} }, ""},
	nodes:          {"nodes", &corev1.Node{}, func() runtime.Object { return &corev1.NodeList{} }, ""},
	pods: {
		"pods", &corev1.Pod{}, func() runtime.Object { return &corev1.PodList{} },
		"sources.kubernetes.hostPorts: false",
	},
	serviceCIDRs: {
		"servicecidrs", &networkingv1.ServiceCIDR{}, func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		"sources.kubernetes.serviceRanges: false",
	},
}

// String returns the resource's name as in an RBAC rule.
func (k kind) String() string { return resources[k].name }

// wanted returns the kinds that are to be watched.
func (c *Config) wanted() []kind {
	list := []kind{services, endpointSlices, nodes}
	if c.HostPorts {
		list = append(list, pods)
	}
	if c.ServiceRanges {
		list = append(list, serviceCIDRs)
	}
	return list
}

// narrow limits a request to the objects that count.
func (c *Config) narrow(k kind, o *metav1.ListOptions) {
	switch k {
	case services:
		// As kube-proxy. Services of a foreign proxy, which it leaves out likewise,
		// are wanted: their addresses are not ours.
		o.LabelSelector = "!" + corev1.IsHeadlessService
	case nodes:
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, c.Node).String()
	case pods:
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", c.Node).String()
	case endpointSlices, serviceCIDRs, kinds:
	}
}

// Source is the live source. It implements source.Source.
type Source struct {
	cfg    Config
	client *client
	state  atomic.Pointer[state] // once Run was called
}

// New returns a source; Run starts it. It fails where the API server's address
// or credentials make no sense, and does not connect yet.
func New(cfg Config) (*Source, error) {
	c, err := newClient(cfg.API)
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, client: c}, nil
}

// Name returns "kubernetes".
func (s *Source) Name() string { return "kubernetes" }

// Run implements source.Source. It is complete when each list was read whole and
// the Node was found. A connection that breaks is made again with back-off; a
// watch that has expired is followed by a list.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	// What its reflectors have to say is said by Fault.
	ctx = klog.NewContext(ctx, klog.Logger{})
	st := newState(s.cfg, sink)
	s.state.Store(st)
	if !s.cfg.HostPorts {
		st.cfg.Log.Info("host ports are not known, since Pods are not watched (sources.kubernetes.hostPorts: false); " +
			"flows to load-balancer addresses of this host that go to no known backend are left")
	}
	var work sync.WaitGroup
	for _, k := range s.cfg.wanted() {
		r := cache.NewReflectorWithOptions(
			cache.ToListWatcherWithWatchListSemantics(s.listWatch(k, st), s.client),
			resources[k].of, &store{st, k},
			cache.ReflectorOptions{Name: k.String(), Logger: &klog.Logger{}, Backoff: new(retries)})
		work.Go(func() { r.RunWithContext(ctx) })
	}
	work.Wait()
	return nil
}

// retries are the pauses before an API server is asked again that did not answer.
// client-go's own grow to a minute: as long as that after its return a proxy on
// this host may have written rules of which nothing is known here. These grow to
// 10 s, 15 s with jitter, so that the nodes of a large cluster do not come at once.
var retries = wait.Backoff{Duration: 800 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 20, Cap: 10 * time.Second}

// listWatch asks the API server for a kind, and tells the state how that went.
func (s *Source) listWatch(k kind, st *state) *cache.ListWatch {
	broken := false // since a request failed, nobody knows what was missed, nor whose storage answers
	asked := func(ctx context.Context, err error) {
		if ctx.Err() == nil { // else Run ends, which is no fault
			st.asked(k, err)
		}
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			st.lags(k)
			list, err := s.client.list(ctx, &s.cfg, k, o)
			broken = err != nil
			asked(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			streaming := o.SendInitialEvents != nil
			switch {
			case streaming:
				st.lags(k)
			case broken:
				// A list follows. A watch could resume, but not tell when it has caught up;
				// and one from a version that the storage has not reached, since it was
				// restored or begun anew, would be accepted and wait in silence.
				broken = false
				return nil, apierrors.NewResourceExpired("the connection was lost; what was missed is listed")
			}
			w, err := s.client.watch(ctx, &s.cfg, k, o)
			if streaming && apierrors.IsInvalid(err) {
				return nil, err // a server that does not stream lists; a list follows
			}
			broken = err != nil
			asked(ctx, err)
			if err != nil {
				return nil, err
			}
			// Mostly that it has expired: a list follows, after a pause.
			return hear(w, func(e *watch.Event) { asked(ctx, apierrors.FromObject(e.Object)) }), nil
		},
	}
}

// heard is a watch whose errors somebody hears. watch.Filter would do, but for a
// goroutine that it leaves where the watch is stopped while an event waits.
type heard struct {
	watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	stop    sync.Once
}

func hear(w watch.Interface, errors func(e *watch.Event)) watch.Interface {
	h := &heard{Interface: w, events: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(h.events)
		for e := range w.ResultChan() {
			if e.Type == watch.Error {
				errors(&e)
			}
			select {
			case h.events <- e:
			case <-h.stopped:
				return
			}
		}
	}()
	return h
}

// ResultChan implements watch.Interface.
func (h *heard) ResultChan() <-chan watch.Event { return h.events }

// Stop implements watch.Interface.
func (h *heard) Stop() {
	h.stop.Do(func() { close(h.stopped) })
	h.Interface.Stop()
}

// World is what Read has read.
type World struct {
	Units         map[string][]frontend.Frontend
	NodeAddresses []netip.Addr
	PodRanges     []netip.Prefix
	ServiceRanges []netip.Prefix
	// Problems are the parts of objects that do not count, each a
	// *kubernetes.Error.
	Problems []error
}

// Read lists everything once. It fails unless every list was read whole and the
// Node exists.
func Read(ctx context.Context, cfg Config) (*World, error) {
	c, err := newClient(cfg.API)
	if err != nil {
		return nil, err
	}
	w := &World{}
	cfg.OnProblem = func(err error) { w.Problems = append(w.Problems, err) }
	st := newState(cfg, reading{w})
	for _, k := range cfg.wanted() {
		var items []any
		err := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return c.list(ctx, &cfg, k, o)
		}).EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
			items = append(items, strip(obj, cfg.Node))
			return nil
		})
		if err != nil && !absent(k, err) {
			return nil, told(k, err)
		}
		if err := (&store{st, k}).Replace(items, ""); err != nil {
			return nil, err
		}
	}
	if !st.complete {
		return nil, st.missingNode()
	}
	return w, nil
}

// reading is the sink of Read.
type reading struct{ w *World }

// Replace implements source.Sink.
func (r reading) Replace(units map[string][]frontend.Frontend) { r.w.Units = units }

// Host implements source.Sink.
func (r reading) Host(h source.Host) { r.w.NodeAddresses, r.w.PodRanges = h.Listed, h.Pods }

// ServiceRanges implements source.Sink.
func (r reading) ServiceRanges(ranges []netip.Prefix) { r.w.ServiceRanges = ranges }

// Set implements source.Sink: there is no change after the lists.
func (r reading) Set(string, []frontend.Frontend) {}

// Fault implements source.Sink: a fault is an error of Read.
func (r reading) Fault(error) {}

// absent tells whether an error says that the API server does not know a kind
// that need not be there.
func absent(k kind, err error) bool { return k == serviceCIDRs && apierrors.IsNotFound(err) }

// told makes an error of a request one for people: with the remedy where the API
// server has an objection, and the same for all kinds where it cannot be reached.
func told(k kind, err error) error {
	var request *url.Error
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Addr != nil:
		return fmt.Errorf("API server: %s %s: %w", op.Op, op.Addr, op.Err)
	case errors.As(err, &request):
		return fmt.Errorf("API server: %w", request.Err)
	case apierrors.IsForbidden(err):
		remedy := "grant list and watch on " + k.String()
		if d := resources[k].disable; d != "" {
			remedy += ", or set " + d
		}
		return fmt.Errorf("%s: %w; %s", k, err, remedy)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%s: %w; the API server does not accept these credentials: check the token or the kubeconfig file", k, err)
	}
	return fmt.Errorf("%s: %w", k, err)
}
