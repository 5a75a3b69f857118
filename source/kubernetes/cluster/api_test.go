package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// api is an API server without a network: it lists, page by page, and streams
// what changes. Time is testing/synctest's. The real one is met in test/e2e.
type api struct {
	streams bool // lists, too
	silent  bool // it takes requests (to stream, if it streams) and answers none

	mu       sync.Mutex
	has      *objects
	version  int
	log      []watchFrame // every change, from version 101 on
	watches  map[kind][]chan watchFrame
	fail     map[kind]error // of every request for the kind
	requests []*http.Request
	events   [][]byte // bodies that were posted
}

type watchFrame struct {
	Type   string         `json:"type"`
	Object runtime.Object `json:"object"`
}

func newAPI(objs ...runtime.Object) *api {
	a := &api{streams: true, has: newObjects(), version: 100, watches: map[kind][]chan watchFrame{}, fail: map[kind]error{}}
	for _, o := range objs {
		a.has.put(typed(o))
	}
	return a
}

func (a *api) config() Config {
	return Config{API: &rest.Config{Host: "http://api.invalid", Transport: a}, Node: here, HostPorts: true, ServiceRanges: true}
}

var apiVersions = [kinds]struct{ version, kind string }{
	services: {"v1", "Service"}, endpointSlices: {"discovery.k8s.io/v1", "EndpointSlice"}, nodes: {"v1", "Node"}, pods: {"v1", "Pod"},
	serviceCIDRs: {"networking.k8s.io/v1", "ServiceCIDR"},
}

func kindOf(o runtime.Object) kind {
	for k := range kinds {
		if fmt.Sprintf("%T", o) == fmt.Sprintf("%T", resources[k].of) {
			return k
		}
	}
	panic("no kind that is watched")
}

// typed says what an object is, as on the wire.
func typed(o runtime.Object) runtime.Object {
	v := apiVersions[kindOf(o)]
	o.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(v.version, v.kind))
	return o
}

// put changes an object, and tells those who watch.
func (a *api) put(o runtime.Object) { a.change("MODIFIED", o) }

func (a *api) remove(o runtime.Object) { a.change("DELETED", o) }

func (a *api) change(what string, o runtime.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	o.(metav1.Object).SetResourceVersion(strconv.Itoa(a.version))
	if typed(o); what == "DELETED" {
		a.has.remove(o)
	} else {
		a.has.put(o)
	}
	a.log = append(a.log, watchFrame{what, o.DeepCopyObject()})
	for _, w := range a.watches[kindOf(o)] {
		w <- a.log[len(a.log)-1]
	}
}

// broken has every request for the kinds fail, and all watches end.
func (a *api) broken(err error, of ...kind) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range of {
		if a.fail[k] = err; err == nil {
			continue
		}
		for _, w := range a.watches[k] {
			close(w)
		}
		a.watches[k] = nil
	}
}

var allKinds = []kind{services, endpointSlices, nodes, pods, serviceCIDRs}

func (a *api) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	if a.silent && (a.streams || req.URL.Query().Get("watch") != "true") {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, req)
	resource := path.Base(req.URL.Path)
	if resource == "events" {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		a.events = append(a.events, body)
		return answer(a.fail[kinds], &corev1.Event{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Event"}})
	}
	k := slices.IndexFunc(allKinds, func(k kind) bool { return k.String() == resource })
	if k < 0 {
		return answer(apierrors.NewGenericServerResponse(404, req.Method, schema.GroupResource{}, "", "no such path", 0, true), nil)
	}
	if err := a.fail[allKinds[k]]; err != nil {
		return answer(err, nil)
	}
	if req.URL.Query().Get("watch") != "true" {
		return answer(nil, a.list(allKinds[k], req))
	}
	return a.watch(allKinds[k], req)
}

// list returns a page.
func (a *api) list(k kind, req *http.Request) any {
	objs := a.has.of(k)
	from, _ := strconv.Atoi(req.URL.Query().Get("continue"))
	limit, _ := strconv.Atoi(req.URL.Query().Get("limit"))
	meta := map[string]string{"resourceVersion": strconv.Itoa(a.version)}
	if objs = objs[from:]; limit > 0 && len(objs) > limit {
		objs = objs[:limit]
		meta["continue"] = strconv.Itoa(from + limit)
	}
	v := apiVersions[k]
	return map[string]any{"apiVersion": v.version, "kind": v.kind + "List", "metadata": meta, "items": objs}
}

func (a *api) watch(k kind, req *http.Request) (*http.Response, error) {
	frames := make(chan watchFrame, len(a.has.of(k))+len(a.log)+100) // of which nobody waits for room
	if req.URL.Query().Get("sendInitialEvents") == "true" {
		if !a.streams {
			return answer(apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil), nil)
		}
		for _, o := range a.has.of(k) {
			frames <- watchFrame{"ADDED", o}
		}
		end := typed(resources[k].of.DeepCopyObject())
		end.(metav1.Object).SetResourceVersion(strconv.Itoa(a.version))
		end.(metav1.Object).SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		frames <- watchFrame{"BOOKMARK", end}
	}
	// One that was there before gets what it missed; one that knows a later version
	// than there is waits for it, as on the real one.
	from, err := strconv.Atoi(req.URL.Query().Get("resourceVersion"))
	for i := range a.log {
		if err == nil && 101+i > from && kindOf(a.log[i].Object) == k {
			frames <- a.log[i]
		}
	}
	a.watches[k] = append(a.watches[k], frames)
	out, in := io.Pipe()
	go func() {
		defer in.Close()
		for {
			select {
			case <-req.Context().Done():
				return
			case f, ok := <-frames:
				if !ok || json.NewEncoder(in).Encode(f) != nil {
					return
				}
			}
		}
	}()
	return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: out}, nil
}

// answer is a response as the API server makes one: its errors are Status
// objects, others are the network's.
func answer(err error, body any) (*http.Response, error) {
	code := http.StatusOK
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &status):
		s := status.Status()
		s.APIVersion, s.Kind = "v1", "Status"
		code, body = int(s.Code), s
	case err != nil:
		return nil, err
	}
	b, err := json.Marshal(body)
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(b)),
	}, err
}

// asked returns the requests so far, as "list services" or "watch pods".
func (a *api) asked() (list []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.requests {
		verb := "list "
		switch {
		case r.Method != http.MethodGet:
			verb = strings.ToLower(r.Method) + " "
		case r.URL.Query().Get("sendInitialEvents") == "true":
			verb = "stream "
		case r.URL.Query().Get("watch") == "true":
			verb = "watch "
		}
		list = append(list, verb+path.Base(r.URL.Path))
	}
	a.requests = nil
	return list
}

// pass lets time pass, until all is quiet.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// running plays with a source that runs. The sink must not be looked at but
// between changes, when all is quiet.
func running(t *testing.T, a *api, play func(t *testing.T, src *Source, sink *recorder)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		src, err := New(a.config())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		sink := &recorder{}
		var done sync.WaitGroup
		done.Go(func() {
			if err := src.Run(ctx, sink); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
		pass(time.Second)
		play(t, src, sink)
		sink.take()
		cancel()
		done.Wait()
		synctest.Wait()
		if calls := sink.take(); len(calls) > 0 {
			t.Errorf("told at its end: %q, %v", calls, sink.fault)
		}
	})
}

func population() []runtime.Object {
	return []runtime.Object{
		service(), slice("198.51.100.1"), node("192.0.2.1"), cidr("203.0.113.0/24"),
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "p"}, Spec: corev1.PodSpec{
			NodeName:   here,
			Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{HostPort: 8125, ContainerPort: 9125}}}},
		}, Status: corev1.PodStatus{PodIP: "198.51.100.7"}},
	}
}

// agrees tells what the sink has and ought not to have, or the other way round.
func (a *api) agrees(sink *recorder) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return gocmp.Diff(show(a.has.frontends(here)), show(sink.units))
}

// The lists stream in where the API server can, and are read else; either way
// each change is told once, and when the context ends nothing goes on.
func TestRun(t *testing.T) {
	for name, tc := range map[string]struct {
		streams bool
		asked   []string
	}{
		"streaming": {true, []string{
			"stream endpointslices", "stream nodes", "stream pods", "stream servicecidrs", "stream services",
		}},
		"listing": {false, []string{
			"list endpointslices", "list nodes", "list pods", "list servicecidrs", "list services",
			"stream endpointslices", "stream nodes", "stream pods", "stream servicecidrs", "stream services",
			"watch endpointslices", "watch nodes", "watch pods", "watch servicecidrs", "watch services",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(population()...)
			a.streams = tc.streams
			running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
				if got := sink.take(); !slices.Equal(got, []string{"Host", "ServiceRanges", "Replace"}) {
					t.Errorf("calls %q; an API server that cannot stream lists is no fault", got)
				}
				if d := a.agrees(sink); d != "" || len(sink.units) != 2 {
					t.Errorf("units (-want +got):\n%s", d)
				}
				asked := a.asked()
				if slices.Sort(asked); !slices.Equal(asked, tc.asked) {
					t.Errorf("asked %q, want %q", asked, tc.asked)
				}
				a.put(slice("198.51.100.2"))
				a.remove(service())
				pass(time.Second)
				if got, want := sink.take(), "Set service x/dns"; len(got) != 2 || got[0] != want || got[1] != want {
					t.Errorf("calls %q", got)
				}
				if d := a.agrees(sink); d != "" {
					t.Errorf("units (-want +got):\n%s", d)
				}
			})
		})
	}
}

// Only what counts is asked for, of the kinds that are wanted.
func TestRequests(t *testing.T) {
	a := newAPI(population()...)
	a.streams = false
	running(t, a, func(t *testing.T, _ *Source, _ *recorder) {
		a.mu.Lock()
		defer a.mu.Unlock()
		paths := map[string]string{
			"services": "/api/v1/services", "nodes": "/api/v1/nodes", "pods": "/api/v1/pods",
			"endpointslices": "/apis/discovery.k8s.io/v1/endpointslices", "servicecidrs": "/apis/networking.k8s.io/v1/servicecidrs",
		}
		for _, r := range a.requests {
			q, resource := r.URL.Query(), path.Base(r.URL.Path)
			labels := map[string]string{"services": "!service.kubernetes.io/headless"}[resource]
			fields := map[string]string{"nodes": "metadata.name=n1", "pods": "spec.nodeName=n1"}[resource]
			if r.Method != http.MethodGet || r.URL.Path != paths[resource] ||
				q.Get("labelSelector") != labels || q.Get("fieldSelector") != fields {
				t.Errorf("%s %s", r.Method, r.URL)
			}
			if agent := r.Header.Get("User-Agent"); agent != "flowsweep" {
				t.Errorf("User-Agent %q", agent)
			}
		}
	})
}

// What an API server refuses is told with the remedy, and is over when it grants
// it; so is one that does not know ServiceCIDRs, which is no fault.
func TestRunFaults(t *testing.T) {
	t.Run("forbidden at first", func(t *testing.T) {
		a := newAPI(population()...)
		a.fail[pods] = forbidden(pods)
		running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
			want := "pods: pods is forbidden: not this one; grant list and watch on pods, or set sources.kubernetes.hostPorts: false"
			if sink.fault == nil || sink.fault.Error() != want || sink.units != nil {
				t.Errorf("fault %v, units %v", sink.fault, sink.units)
			}
			a.broken(nil, pods)
			pass(2 * time.Minute)
			if d := a.agrees(sink); sink.fault != nil || d != "" {
				t.Errorf("fault %v, units (-want +got):\n%s", sink.fault, d)
			}
		})
	})
	t.Run("no ServiceCIDRs", func(t *testing.T) {
		a := newAPI(population()...)
		a.fail[serviceCIDRs] = errNotFound
		running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
			if d := a.agrees(sink); sink.fault != nil || d != "" || len(sink.ranges) > 0 {
				t.Errorf("fault %v, ranges %v, units (-want +got):\n%s", sink.fault, sink.ranges, d)
			}
			a.broken(nil, serviceCIDRs) // the API server is upgraded
			pass(2 * time.Minute)
			if got := fmt.Sprint(sink.ranges); sink.fault != nil || got != "[203.0.113.0/24]" {
				t.Errorf("fault %v, ranges %s", sink.fault, got)
			}
		})
	})
	t.Run("nobody listens for a while", func(t *testing.T) {
		a := newAPI(population()...)
		running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
			sink.take()
			a.broken(refused(40000), allKinds...)
			pass(time.Minute)
			if sink.fault == nil || sink.fault.Error() != "API server: dial 192.0.2.1:6443: connection refused" {
				t.Errorf("fault %v", sink.fault)
			}
			a.put(slice("198.51.100.2"))
			if n := len(a.asked()); n > 200 {
				t.Errorf("%d requests in a minute", n)
			}
			a.broken(nil, allKinds...)
			pass(2 * time.Minute)
			if d := a.agrees(sink); sink.fault != nil || d != "" {
				t.Errorf("fault %v, units (-want +got):\n%s", sink.fault, d)
			}
		})
	})
	t.Run("it comes back with an older storage", func(t *testing.T) {
		a := newAPI(population()...)
		running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
			for range 10 {
				a.put(slice("198.51.100.2"))
			}
			pass(time.Second)
			a.broken(refused(40000), allKinds...)
			pass(10 * time.Second)
			a.mu.Lock()
			a.has, a.version = newObjects(), 3
			for _, o := range []runtime.Object{node("192.0.2.1"), service()} {
				a.has.put(typed(o))
			}
			a.mu.Unlock()
			a.broken(nil, allKinds...)
			pass(2 * time.Minute)
			if d := a.agrees(sink); sink.fault != nil || d != "" || len(sink.units) != 1 {
				t.Errorf("fault %v, units (-want +got):\n%s", sink.fault, d)
			}
		})
	})
	t.Run("ended while nobody listens", func(t *testing.T) {
		a := newAPI(population()...)
		a.broken(refused(40000), allKinds...)
		running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
			if sink.fault == nil || sink.units != nil {
				t.Errorf("fault %v, units %v", sink.fault, sink.units)
			}
		})
	})
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("ended while nobody answers, streams %t", streams), func(t *testing.T) {
			a := newAPI()
			a.streams, a.silent = streams, true
			running(t, a, func(t *testing.T, _ *Source, sink *recorder) {
				if sink.fault != nil || sink.units != nil {
					t.Errorf("fault %v, units %v", sink.fault, sink.units)
				}
			})
		})
	}
}

// Read is one list of everything, page by page, or an error that says what to do.
func TestRead(t *testing.T) {
	t.Run("whole", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPI(population()...)
			for i := range 6234 {
				a.has.put(typed(service(func(s *corev1.Service) { s.Name = fmt.Sprint("s", i) })))
			}
			a.has.put(typed(service(func(s *corev1.Service) { s.Name, s.Spec.ExternalIPs = "odd", []string{"bad"} })))
			began := time.Now()
			w, err := Read(t.Context(), a.config())
			if err != nil {
				t.Fatal(err)
			}
			if d := gocmp.Diff(show(a.has.frontends(here)), show(w.Units)); d != "" || len(w.Units) != 6237 {
				t.Errorf("%d units (-want +got):\n%s", len(w.Units), d)
			}
			want := []string{`Service x/odd: spec.externalIPs[0]: "bad" is not an IP address`}
			if got := fmt.Sprint(w.NodeAddresses, w.ServiceRanges); got != "[192.0.2.1] [203.0.113.0/24]" ||
				!slices.Equal(texts(w.Problems), want) {
				t.Errorf("%s, problems %v", got, w.Problems)
			}
			notAList := func(request string) bool { return !strings.HasPrefix(request, "list ") }
			if got := a.asked(); len(got) != 17 || slices.ContainsFunc(got, notAList) {
				t.Errorf("asked %q, want thirteen pages of services and one of everything else", got)
			}
			if took := time.Since(began); took > 0 {
				t.Errorf("it waited for %s", took)
			}
		})
	})
	for name, tc := range map[string]struct {
		arrange func(a *api)
		want    string
	}{
		"no such Node": {
			func(a *api) { a.has.clear(nodes) },
			`there is no Node named "n1"; give the name of this host's Node with --node or in NODE_NAME`,
		},
		"forbidden": {
			func(a *api) { a.fail[pods] = forbidden(pods) },
			"pods: pods is forbidden: not this one; grant list and watch on pods, or set sources.kubernetes.hostPorts: false",
		},
		"nobody listens":  {func(a *api) { a.fail[services] = errors.New("no route") }, "API server: no route"},
		"no ServiceCIDRs": {func(a *api) { a.fail[serviceCIDRs] = errNotFound }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(population()...)
			tc.arrange(a)
			w, err := Read(t.Context(), a.config())
			if tc.want == "" {
				if err != nil || len(w.ServiceRanges) > 0 || len(w.Units) != 2 {
					t.Errorf("%+v, %v", w, err)
				}
			} else if err == nil || err.Error() != tc.want {
				t.Errorf("error %v\nwant  %s", err, tc.want)
			}
		})
	}
}

// An API server that takes the connection and does not answer holds up nobody for
// ever.
func TestReadEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.silent, a.streams = true, false
		began := time.Now()
		_, err := Read(t.Context(), a.config())
		if took := time.Since(began); took != listTimeout || fmt.Sprint(err) != "API server: context deadline exceeded" {
			t.Errorf("%v after %s", err, took)
		}
	})
}
