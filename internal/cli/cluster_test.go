package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/kubernetes"
	"github.com/flowsweep/flowsweep/source/kubernetes/cluster"
	"github.com/flowsweep/flowsweep/sweep"
)

// apiServer answers for a cluster that does not change: lists by resource, a watch
// without events, and Events that are posted. The real one is met in test/e2e.
type apiServer struct {
	lists map[string]string // items, as JSON

	mu     sync.Mutex
	posted [][]byte
}

// nodeN1 and dnsService are items of lists: what the README's example needs.
const (
	nodeN1 = `{"metadata":{"name":"n1"},"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`

	dnsService = `{"metadata":{"namespace":"default","name":"dns","uid":"u","annotations":{"flowsweep.dev/sweep":"udp=never"}},
 "spec":{"clusterIP":"203.0.113.10","ports":[{"name":"udp","protocol":"UDP","port":53}]}}`
	dnsSlice = `{"metadata":{"namespace":"default","name":"dns-a","labels":{"kubernetes.io/service-name":"dns"}},
 "addressType":"IPv4","endpoints":[{"addresses":["198.51.100.11"]}],"ports":[{"name":"udp","protocol":"UDP","port":53}]}`
	serviceRange = `{"metadata":{"name":"kubernetes"},"spec":{"cidrs":["203.0.113.0/24"]}}`
)

func oneCluster() *apiServer {
	return &apiServer{lists: map[string]string{
		"services": dnsService, "endpointslices": dnsSlice, "nodes": nodeN1, "servicecidrs": serviceRange, "pods": "",
	}}
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	switch items, ok := a.lists[resource]; {
	case r.Method == http.MethodPost && resource == "events":
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(err)
		}
		a.mu.Lock()
		a.posted = append(a.posted, body)
		a.mu.Unlock()
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"v1"}`)
	case !ok:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","code":404,"reason":"NotFound"}`)
	case r.URL.Query().Get("sendInitialEvents") == "true":
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","code":422,"reason":"Invalid"}`)
	case r.URL.Query().Get("watch") == "true":
		<-r.Context().Done()
	default:
		if want := r.URL.Query().Get("fieldSelector"); resource == "nodes" && want != "metadata.name=n1" {
			items = ""
		}
		kinds := map[string]string{
			"services": "v1/Service", "nodes": "v1/Node", "pods": "v1/Pod",
			"endpointslices": "discovery.k8s.io/v1/EndpointSlice", "servicecidrs": "networking.k8s.io/v1/ServiceCIDR",
		}
		version, kind := path.Split(kinds[resource])
		fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"1"},"items":[%s]}`,
			strings.TrimSuffix(version, "/"), kind+"List", items)
	}
}

// RoundTrip asks without a network, for tests whose time is synctest's.
func (a *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	return w.Result(), nil
}

// kubeconfig writes a file that leads to an API server at an address.
func kubeconfig(t *testing.T, address string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	err := os.WriteFile(file, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
 "contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
 "clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u","user":{}}]}`, address), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// A table that was saved on a node is judged against a live cluster: by its
// Services, by its service ranges, and with its problems told.
func TestPlanAgainstACluster(t *testing.T) {
	server := httptest.NewServer(oneCluster())
	defer server.Close()
	flows := filepath.Join(t.TempDir(), "flows.txt")
	text := ""
	for i, addrs := range []struct{ to, from string }{
		{"203.0.113.10", "198.51.100.11"}, // right
		{"203.0.113.10", "198.51.100.12"}, // to a backend that is gone
		{"203.0.113.99", "198.51.100.11"}, // to a Service that nobody knows any more
		{"203.0.114.99", "198.51.100.11"}, // and outside the service ranges
	} {
		text += fmt.Sprintf("udp 17 29 src=192.0.2.50 dst=%s sport=%d dport=53 src=%s dst=192.0.2.50 sport=53 dport=%[2]d\n",
			addrs.to, 1000+i, addrs.from)
	}
	if err := os.WriteFile(flows, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	config := kubeconfig(t, server.URL)
	out, code, stderr := runJSON(t, "plan", "--kubeconfig", config, "--node", "n1", "--flows", flows)
	want := []string{"keep serving", "delete backend-gone", "delete frontend-gone", "ignore no-frontend"}
	if code != 0 || len(out.Flows) != len(want) {
		t.Fatalf("exit %d, %d flows: %s", code, len(out.Flows), stderr)
	}
	for i, r := range out.Flows {
		if got := r.Verdict + " " + r.Reason; got != want[i] {
			t.Errorf("line %d: %s, want %s", r.Line, got, want[i])
		}
	}
	problem := `flowsweep: warning: Service default/dns: metadata.annotations[flowsweep.dev/sweep]: "udp=never": ` +
		"want all, unreplied or off after udp=; the whole annotation is ignored (skipped)\n"
	if stderr != problem {
		t.Errorf("stderr %q\nwant   %q", stderr, problem)
	}
	_, code, stderr = tryRun(t, "plan", "--kubeconfig", config, "--node", "n1", "--flows", flows, "--strict")
	if code != exitFailed || !strings.HasSuffix(stderr, "flowsweep: --strict: 1 problem in the state\n") {
		t.Errorf("exit %d: %s", code, stderr)
	}

	stdout, code, stderr := tryRun(t, "explain", "--kubeconfig", config, "--node", "n1", "--flows", flows,
		"192.0.2.50:1002>203.0.113.99:53/udp")
	for _, part := range []string{
		"service range 203.0.113.0/24", "no service has that address and port", "verdict: delete frontend-gone",
	} {
		if code != 0 || !strings.Contains(stdout, part) {
			t.Errorf("exit %d, %q is missing in\n%s%s", code, part, stdout, stderr)
		}
	}
}

func tryRun(t *testing.T, args ...string) (stdout string, code int, stderr string) {
	t.Helper()
	var o, e bytes.Buffer
	code = Run(t.Context(), args, strings.NewReader(""), &o, &e)
	return o.String(), code, e.String()
}

// The Node is the one that is named, else that of the environment, else the
// host's.
func TestNodeName(t *testing.T) {
	server := httptest.NewServer(oneCluster())
	defer server.Close()
	config := kubeconfig(t, server.URL)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, env string
		flags     []string
		want      string
	}{
		{"flag", "n3", []string{"--node", "n2"}, "n2"},
		{"environment", "n3", nil, "n3"},
		{"host name", "", nil, host},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv(nodeNameEnv, tc.env)
			_, code, stderr := tryRun(t, append([]string{"plan", "--kubeconfig", config}, tc.flags...)...)
			want := fmt.Sprintf("flowsweep: reading the cluster: there is no Node named %q; "+
				"give the name of this host's Node with --node or in NODE_NAME\n", tc.want)
			if code != exitFailed || stderr != want {
				t.Errorf("exit %d: %s, want %s", code, stderr, want)
			}
		})
	}
}

// An API server that does not answer holds up plan until somebody has had enough.
func TestPlanInterrupted(t *testing.T) {
	asked := make(chan struct{}, 10)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer server.Close()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		var stderr bytes.Buffer
		cmd := program(t, "plan", "--kubeconfig", kubeconfig(t, server.URL), "--node", "n1")
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		<-asked
		began := time.Now()
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != exitFailed || time.Since(began) > 10*time.Second ||
			!strings.HasPrefix(stderr.String(), "flowsweep: reading the cluster: ") {
			t.Errorf("%s: exit %d after %s: %s", sig, code, time.Since(began), &stderr)
		}
	}
}

func TestServiceOf(t *testing.T) {
	for _, tc := range []struct {
		owner string
		kind  frontend.Kind
		want  string
	}{
		{"default/dns:udp", frontend.ClusterIP, "default dns"},
		{"default/dns", frontend.ClusterIP, "default dns"},
		{"default/dns:udp", frontend.NodePort, "default dns"},
		{"kube-system/dns:a", frontend.LoadBalancerIP, "kube-system dns"},
		{"default/dns", frontend.ExternalIP, "default dns"},
		{"default/agent", frontend.HostPort, ""}, // a Pod's
		{"default/dns", frontend.Static, ""},     // an item of a file may have any name
		{"wireguard", frontend.Static, ""},
		{"service range 203.0.113.0/24", frontend.ClusterIP, ""}, // an orphan's
		{"service range 2001:db8::/108", frontend.ClusterIP, ""},
		{"(others)", frontend.ClusterIP, ""},
		{"", frontend.ClusterIP, ""},
	} {
		ns, name, ok := serviceOf(tc.owner, tc.kind)
		if got := ns + " " + name; ok != (tc.want != "") || ok && got != tc.want {
			t.Errorf("%q %s: %q, %t, want %q", tc.owner, tc.kind, got, ok, tc.want)
		}
	}
}

// announcing plays with serviceEvents of a source that knows default/dns and
// default/web; sent returns what was written so far.
func announcing(t *testing.T, threshold int, play func(t *testing.T, e *serviceEvents, sent func() []*corev1.Event)) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme).UniversalDeserializer()
	synctest.Test(t, func(t *testing.T) {
		api := oneCluster()
		api.lists["services"] += "," + strings.ReplaceAll(dnsService, `"dns"`, `"web"`)
		src, err := cluster.New(cluster.Config{API: &rest.Config{Host: "http://api.invalid", Transport: api}, Node: "n1"})
		if err != nil {
			t.Fatal(err)
		}
		e := &serviceEvents{events: cluster.NewEvents(src, slog.New(slog.DiscardHandler)), threshold: threshold}
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { _ = src.Run(ctx, nowhere{}) })
		work.Go(func() { e.events.Run(ctx) })
		time.Sleep(time.Second)
		play(t, e, func() (list []*corev1.Event) {
			time.Sleep(time.Minute) // ten are written meanwhile
			api.mu.Lock()
			defer api.mu.Unlock()
			for _, b := range api.posted {
				obj, _, err := decoder.Decode(b, nil, nil)
				if err != nil {
					t.Fatal(err)
				}
				list = append(list, obj.(*corev1.Event))
			}
			return list
		})
		cancel()
		work.Wait()
	})
}

// nowhere is a sink of nothing.
type nowhere struct{}

func (nowhere) Replace(map[string][]frontend.Frontend) {}
func (nowhere) Set(string, []frontend.Frontend)        {}
func (nowhere) Host(source.Host)                       {}
func (nowhere) ServiceRanges([]netip.Prefix)           {}
func (nowhere) Fault(error)                            {}

// cleaning is a pass that deleted stale flows of the owners given.
func cleaning(deleted int, owners ...string) agent.Pass {
	p := agent.Pass{Report: sweep.Report{DeleteResult: conntrack.DeleteResult{Deleted: deleted}}}
	for _, o := range owners {
		p.Stale = append(p.Stale, agent.StaleCount{Owner: o, Kind: frontend.ClusterIP, Flows: 1})
	}
	return p
}

// A Service whose flows had to be cleaned more often than the threshold within an
// hour has an Event, once. What was found and not deleted does not count.
func TestFrequentlyCleaned(t *testing.T) {
	announcing(t, 3, func(t *testing.T, e *serviceEvents, sent func() []*corev1.Event) {
		want := func(n int, when string) []*corev1.Event {
			t.Helper()
			events := sent()
			if len(events) != n {
				t.Errorf("%s: %d events, want %d: %v", when, len(events), n, events)
			}
			return events
		}
		for range 10 {
			e.Pass(cleaning(0, "default/dns:udp")) // a dry run
			e.Pass(cleaning(5))                    // somebody else's
			e.Pass(cleaning(1, "service range 203.0.113.0/24"))
		}
		for range 3 {
			e.Pass(cleaning(7, "default/dns:udp", "default/dns:tcp", "default/dns:udp")) // one Service
		}
		e.Pass(cleaning(1, "default/web"))
		want(0, "at the threshold")
		e.Pass(cleaning(1, "default/dns:tcp"))
		events := want(1, "above it")
		const message = "its stale flows had to be cleaned more than 3 times within an hour; do its backends come and go?"
		if ev := events[0]; ev.InvolvedObject.Name != "dns" || ev.InvolvedObject.Namespace != "default" ||
			ev.Reason != "FrequentlyCleaned" || ev.Message != message {
			t.Errorf("%+v", ev)
		}
		for range 20 {
			e.Pass(cleaning(1, "default/dns"))
		}
		want(1, "far above it")
		time.Sleep(time.Hour)
		for range 3 {
			e.Pass(cleaning(1, "default/dns", "default/web"))
		}
		want(1, "at the threshold of the next hour")
		e.Pass(cleaning(1, "default/dns", "default/web"))
		want(3, "above that of the next hour, both")
	})
}

// What the rules do wrongly and what an annotation says wrongly is told on the
// Service, and what is no Service's is not.
func TestServiceEvents(t *testing.T) {
	announcing(t, 3, func(t *testing.T, e *serviceEvents, sent func() []*corev1.Event) {
		since := time.Date(2026, 11, 13, 12, 0, 0, 0, time.UTC)
		d := agent.Disagreement{
			Frontend: "203.0.113.10:53/UDP", Owner: "default/dns:udp", Kind: frontend.ClusterIP,
			Backend: netip.MustParseAddrPort("198.51.100.19:53"), Since: since,
		}
		e.Disagrees(d)
		d.Owner, d.Kind = "default/agent", frontend.HostPort
		e.Disagrees(d)
		e.Settled(agent.Settled{})

		bad := errors.New(`"udp=never": want all, unreplied or off after udp=`)
		annotation := "metadata.annotations[" + kubernetes.AnnotationSweep + "]"
		e.problem(&kubernetes.Error{Object: "Service default/web", Path: annotation, Err: bad})
		e.problem(fmt.Errorf("wrapped: %w", &kubernetes.Error{Object: "Service default/dns", Path: annotation, Err: bad}))
		e.problem(&kubernetes.Error{Object: "Service default/dns", Path: "spec.externalIPs[0]", Err: bad})
		e.problem(&kubernetes.Error{Object: "EndpointSlice default/dns-a", Path: "endpoints[0].addresses", Err: bad})
		e.problem(bad)

		var got []string
		for _, ev := range sent() {
			got = append(got, ev.InvolvedObject.Namespace+"/"+ev.InvolvedObject.Name+" "+ev.Reason+": "+ev.Message)
		}
		want := []string{
			"default/dns RulesetDisagrees: the rules of this node send flows to 203.0.113.10:53/UDP to 198.51.100.19:53, " +
				"which is no backend of it, since 2026-11-13T12:00:00Z; is its service proxy running and up to date?",
			"default/web InvalidSweepAnnotation: " + annotation + ": " + bad.Error(),
			"default/dns InvalidSweepAnnotation: " + annotation + ": " + bad.Error(),
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("events (-want +got):\n%s", d)
		}
	})
}
