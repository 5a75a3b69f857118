//go:build linux

package main

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
)

// apiServer serves Services, EndpointSlices and one Node as an API server does,
// in protobuf, to clients that list and watch everything: as fast as they can
// take it, which a real one with a store behind it is not.
type apiServer struct {
	addr   string
	server *http.Server
	info   runtime.SerializerInfo

	mu      sync.Mutex
	version int
	kinds   map[string]*collection // by path
}

// collection is all objects of one resource, and who watches it.
type collection struct {
	list     func([]runtime.Object, metav1.ListMeta) runtime.Object
	empty    func() runtime.Object
	objects  []runtime.Object
	watchers map[chan metav1.WatchEvent]bool
}

const (
	servicesPath = "/api/v1/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/endpointslices"
	nodesPath    = "/api/v1/nodes"
)

// serveAPI serves a world on loopback.
func serveAPI(w world) (*apiServer, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	s := &apiServer{version: 1, kinds: map[string]*collection{
		servicesPath: {
			list: func(objs []runtime.Object, m metav1.ListMeta) runtime.Object {
				return &corev1.ServiceList{
					TypeMeta: typeMeta("v1", "ServiceList"), ListMeta: m, Items: items[corev1.Service](objs),
				}
			},
			empty: func() runtime.Object { return &corev1.Service{TypeMeta: typeMeta("v1", "Service")} },
		},
		slicesPath: {
			list: func(objs []runtime.Object, m metav1.ListMeta) runtime.Object {
				return &discoveryv1.EndpointSliceList{
					TypeMeta: typeMeta("discovery.k8s.io/v1", "EndpointSliceList"), ListMeta: m,
					Items: items[discoveryv1.EndpointSlice](objs),
				}
			},
			empty: func() runtime.Object {
				return &discoveryv1.EndpointSlice{TypeMeta: typeMeta("discovery.k8s.io/v1", "EndpointSlice")}
			},
		},
		nodesPath: {
			list: func(objs []runtime.Object, m metav1.ListMeta) runtime.Object {
				return &corev1.NodeList{TypeMeta: typeMeta("v1", "NodeList"), ListMeta: m, Items: items[corev1.Node](objs)}
			},
			empty: func() runtime.Object { return &corev1.Node{TypeMeta: typeMeta("v1", "Node")} },
			objects: []runtime.Object{&corev1.Node{
				TypeMeta:   typeMeta("v1", "Node"),
				ObjectMeta: metav1.ObjectMeta{Name: "node-0", ResourceVersion: "1"},
				Status: corev1.NodeStatus{
					Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}},
				},
			}},
		},
	}}
	w.each(func(svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
		svc.ResourceVersion, slice.ResourceVersion = "1", "1"
		s.kinds[servicesPath].objects = append(s.kinds[servicesPath].objects, svc)
		s.kinds[slicesPath].objects = append(s.kinds[slicesPath].objects, slice)
	})
	for _, info := range serializer.NewCodecFactory(scheme).SupportedMediaTypes() {
		if info.MediaType == runtime.ContentTypeProtobuf {
			s.info = info
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s.addr = l.Addr().String()
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.server.Serve(l) }() // until close
	return s, nil
}

func typeMeta(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}

func items[T any, P interface {
	*T
	runtime.Object
}](objs []runtime.Object) []T {
	list := make([]T, len(objs))
	for i, o := range objs {
		list[i] = *o.(P)
	}
	return list
}

func (s *apiServer) close() { _ = s.server.Close() }

// ServeHTTP answers a list or a watch; selectors are passed over.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := s.kinds[r.URL.Path]
	if c == nil {
		http.NotFound(w, r)
		return
	}
	if r.FormValue("watch") == "" {
		s.mu.Lock()
		list := c.list(c.objects, metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)})
		s.mu.Unlock()
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_ = s.info.Serializer.Encode(list, w)
		return
	}
	s.watch(w, r, c)
}

// watch streams events, after those of a list where that is asked for
// (sendInitialEvents, KEP-3157).
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, c *collection) {
	events := make(chan metav1.WatchEvent, 1000)
	var initial []runtime.Object
	s.mu.Lock()
	if c.watchers == nil {
		c.watchers = map[chan metav1.WatchEvent]bool{}
	}
	c.watchers[events] = true
	if r.FormValue("sendInitialEvents") == "true" {
		end := c.empty()
		m := end.(metav1.Object)
		m.SetResourceVersion(strconv.Itoa(s.version))
		m.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		initial = append(append(initial, c.objects...), end)
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(c.watchers, events)
	}()

	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	flush := http.NewResponseController(w)
	enc := streaming.NewEncoder(s.info.StreamSerializer.Framer.NewFrameWriter(w), s.info.StreamSerializer.Serializer)
	for i, o := range initial {
		typ := watch.Added
		if i == len(initial)-1 {
			typ = watch.Bookmark
		}
		if enc.Encode(s.event(typ, o)) != nil {
			return
		}
	}
	for {
		if flush.Flush() != nil {
			return
		}
		select {
		case e, ok := <-events:
			if !ok || enc.Encode(&e) != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

func (s *apiServer) event(typ watch.EventType, o runtime.Object) *metav1.WatchEvent {
	raw, err := runtime.Encode(s.info.Serializer, o)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", o, err)) // the scheme lacks it
	}
	return &metav1.WatchEvent{Type: string(typ), Object: runtime.RawExtension{Raw: raw}}
}

// update puts the i-th EndpointSlice and tells all who watch. It waits for those
// that are a thousand events behind.
func (s *apiServer) update(i int, slice *discoveryv1.EndpointSlice) {
	s.mu.Lock()
	s.version++
	slice.ResourceVersion = strconv.Itoa(s.version)
	c := s.kinds[slicesPath]
	c.objects[i] = slice
	e := s.event(watch.Modified, slice)
	var to []chan metav1.WatchEvent
	for w := range c.watchers {
		to = append(to, w)
	}
	s.mu.Unlock()
	for _, w := range to {
		w <- *e
	}
}

// expire ends all watches as an API server does whose history is too short, so
// that everything is listed again.
func (s *apiServer) expire() {
	status := &metav1.Status{
		TypeMeta: typeMeta("v1", "Status"), Status: metav1.StatusFailure,
		Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old resource version",
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.kinds {
		for w := range c.watchers {
			w <- *s.event(watch.Error, status)
			close(w)
			delete(c.watchers, w)
		}
	}
}
