package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/flowsweep/flowsweep/agent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeAgent is what it is told to be.
type fakeAgent struct {
	status agent.Status
	dead   bool
}

func (a *fakeAgent) Status() agent.Status { return a.status }
func (a *fakeAgent) Alive() bool          { return !a.dead }

func well() *fakeAgent { return &fakeAgent{status: agent.Status{Ready: true}} }

// pipe is a listener without a network, whose connections have the addresses
// that a test gives them.
type pipe struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
	local  net.Addr
	remote net.Addr
}

func newPipe(local, remote string) *pipe {
	return &pipe{
		conns: make(chan net.Conn), closed: make(chan struct{}),
		local:  net.TCPAddrFromAddrPort(netip.MustParseAddrPort(local)),
		remote: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(remote)),
	}
}

type pipeConn struct {
	net.Conn
	l *pipe
}

func (c *pipeConn) LocalAddr() net.Addr  { return c.l.local }
func (c *pipeConn) RemoteAddr() net.Addr { return c.l.remote }

func (l *pipe) Addr() net.Addr { return l.local }

func (l *pipe) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return &pipeConn{c, l}, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipe) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipe) dial(ctx context.Context) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.conns <- far:
		return near, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// client sends each request over a connection of its own.
func (l *pipe) client() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return l.dial(ctx) },
	}}
}

// start serves in the background. stop, which the test's end calls too, ends that.
func start(t *testing.T, s *Server, all, metrics net.Listener) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, all, metrics) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

type answer struct {
	code   int
	header http.Header
	body   string
}

func ask(t *testing.T, l *pipe, method, path string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://agent"+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := l.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(body)}
}

const loopback4 = "127.0.0.1:9633"

func TestEndpoints(t *testing.T) {
	index := `flowsweep v1.2.3

/metrics       for Prometheus; docs/metrics.md
/livez         200 while the agent's loop moves, else 503
/readyz        200 when all sources are complete and a first pass is done, else 503
`
	for _, tt := range []struct {
		name    string
		agent   *fakeAgent
		pprof   bool
		metrics bool // ask the listener for metrics
		method  string
		path    string
		code    int
		body    string // all of it, or with ... its beginning
	}{
		{"alive", well(), false, false, "GET", "/livez", 200, "ok\n"},
		{"alive though not ready", &fakeAgent{}, false, false, "GET", "/livez", 200, "ok\n"},
		{
			"the loop stands", &fakeAgent{dead: true}, false, false, "GET", "/livez", 503,
			"not alive: the agent's loop does not move\n",
		},
		{"ready", well(), false, false, "GET", "/readyz", 200, "ok\n"},
		{
			"a source is incomplete",
			&fakeAgent{status: agent.Status{NotReady: "source static has not delivered its first full list"}},
			false, false, "GET", "/readyz", 503, "not ready: source static has not delivered its first full list\n",
		},
		{
			// A source that is added to a running agent.
			"a source is incomplete after the first pass", &fakeAgent{status: agent.Status{Ready: true, NotReady: "why"}},
			false, false, "GET", "/readyz", 503, "not ready: why\n",
		},
		{"not ready without a reason", &fakeAgent{}, false, false, "GET", "/readyz", 503, "not ready: not ready\n"},
		{"status", well(), false, false, "GET", "/statusz", 200, "{\n  \"time\": ..."},
		{"metrics", well(), false, false, "GET", "/metrics", 200, "# HELP flowsweep_build_info ..."},
		{"head", well(), false, false, "HEAD", "/readyz", 200, ""},
		{
			"index", well(), false, false, "GET", "/", 200,
			index + "/statusz       what \"flowsweep status\" shows, in JSON\n",
		},
		{
			"index with profiles", well(), true, false, "GET", "/", 200,
			index + "/statusz       what \"flowsweep status\" shows, in JSON\n/debug/pprof/  profiles\n",
		},
		{"unknown", well(), false, false, "GET", "/nothing", 404, "..."},
		{"unknown below a known one", well(), false, false, "GET", "/metrics/x", 404, "..."},
		{"post metrics", well(), false, false, "POST", "/metrics", 405, "..."},
		{"put status", well(), false, false, "PUT", "/statusz", 405, "..."},
		{"delete health", well(), false, false, "DELETE", "/livez", 405, "..."},
		{"options", well(), false, false, "OPTIONS", "/readyz", 405, "..."},
		{"profiles are off", well(), false, false, "GET", "/debug/pprof/", 404, "..."},
		{"profiles", well(), true, false, "GET", "/debug/pprof/", 200, "<html>..."},
		{"one profile", well(), true, false, "GET", "/debug/pprof/goroutine?debug=1", 200, "goroutine profile: ..."},
		{"symbols", well(), true, false, "POST", "/debug/pprof/symbol", 200, "num_symbols: 1\n"},
		{"post a profile", well(), true, false, "POST", "/debug/pprof/heap", 405, "..."},

		{"metrics apart", well(), true, true, "GET", "/metrics", 200, "# HELP flowsweep_build_info ..."},
		{"alive, apart", well(), true, true, "GET", "/livez", 200, "ok\n"},
		{"ready, apart", well(), true, true, "GET", "/readyz", 200, "ok\n"},
		{"no status there", well(), true, true, "GET", "/statusz", 404, "..."},
		{"no profiles there", well(), true, true, "GET", "/debug/pprof/", 404, "..."},
		{"index there", well(), true, true, "GET", "/", 200, index},
		{"post there", well(), true, true, "POST", "/readyz", 405, "..."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all, metrics := newPipe(loopback4, loopback4), newPipe(loopback4, loopback4)
			start(t, New(Options{Agent: tt.agent, PProf: tt.pprof, Version: "v1.2.3"}), all, metrics)
			l := all
			if tt.metrics {
				l = metrics
			}
			got := ask(t, l, tt.method, tt.path)
			want, open := strings.CutSuffix(tt.body, "...")
			if got.code != tt.code || !strings.HasPrefix(got.body, want) || !open && got.body != want {
				t.Errorf("%d\n%s\nwant %d\n%s", got.code, got.body, tt.code, tt.body)
			}
			if tt.code == 405 && got.header.Get("Allow") == "" {
				t.Error("405 does not say what is allowed")
			}
			if c := got.header.Get("Cache-Control"); c != "no-store" {
				t.Errorf("Cache-Control %q", c)
			}
		})
	}
}

// Status and profiles leave the host only when told.
func TestPrivate(t *testing.T) {
	for _, tt := range []struct {
		name          string
		local, remote string
		anywhere      bool
		code          int
	}{
		{"loopback", "127.0.0.1:9633", "127.0.0.1:40000", false, 200},
		{"another loopback address", "127.0.0.1:9633", "127.9.9.9:40000", false, 200},
		{"IPv6 loopback", "[::1]:9633", "[::1]:40000", false, 200},
		{"IPv4 loopback on an IPv6 socket", "[::ffff:127.0.0.1]:9633", "[::ffff:127.0.0.1]:40000", false, 200},
		{"another host", "192.0.2.1:9633", "192.0.2.9:40000", false, 403},
		{"another host, IPv6", "[2001:db8::1]:9633", "[2001:db8::9]:40000", false, 403},
		{"another host, IPv4 on an IPv6 socket", "[::ffff:192.0.2.1]:9633", "[::ffff:192.0.2.9]:40000", false, 403},
		// A route can bring packets from 127.0.0.0/8 (route_localnet), or to it.
		{"a loopback source alone", "192.0.2.1:9633", "127.0.0.1:40000", false, 403},
		{"a loopback destination alone", "127.0.0.1:9633", "192.0.2.9:40000", false, 403},
		{"another host, allowed", "192.0.2.1:9633", "192.0.2.9:40000", true, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newPipe(tt.local, tt.remote)
			start(t, New(Options{Agent: well(), PProf: true, StatusAnywhere: tt.anywhere}), l, nil)
			for _, path := range []string{
				"/statusz", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/symbol", "/debug/pprof/heap",
				"/debug/pprof/profile?seconds=1", "/debug/pprof/trace?seconds=0.01",
			} {
				if tt.code == 200 && strings.Contains(path, "profile?") {
					continue // a second each
				}
				if got := ask(t, l, "GET", path); got.code != tt.code {
					t.Errorf("%s: %d, want %d: %s", path, got.code, tt.code, got.body)
				}
			}
			for _, path := range []string{"/metrics", "/livez", "/readyz", "/"} {
				if got := ask(t, l, "GET", path); got.code != 200 {
					t.Errorf("%s: %d", path, got.code)
				}
			}
		})
	}
}

func TestStatusIsTheAgents(t *testing.T) {
	a := &fakeAgent{status: scriptedStatus()}
	l := newPipe(loopback4, loopback4)
	start(t, New(Options{Agent: a}), l, nil)
	got := ask(t, l, "GET", "/statusz")
	if c := got.header.Get("Content-Type"); c != "application/json" {
		t.Errorf("Content-Type %q", c)
	}
	var s agent.Status
	d := json.NewDecoder(strings.NewReader(got.body))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(a.status, s, cmp.Comparer(func(x, y netip.AddrPort) bool { return x == y })); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
}

// A profile takes as long as it is told, beyond the time that a request may take
// to be read, and ends with the agent.
func TestProfileLasts(t *testing.T) {
	s := New(Options{Agent: well(), PProf: true})
	s.readTimeout = 50 * time.Millisecond
	l := newPipe(loopback4, loopback4)
	stop := start(t, s, l, nil)
	begin := time.Now()
	got := ask(t, l, "GET", "/debug/pprof/trace?seconds=0.3")
	if took := time.Since(begin); got.code != 200 || took < 300*time.Millisecond {
		t.Errorf("%d after %s, want 200 after 300 ms", got.code, took)
	}
	done := make(chan answer)
	go func() { done <- ask(t, l, "GET", "/debug/pprof/trace?seconds=600") }()
	time.Sleep(100 * time.Millisecond)
	begin = time.Now()
	stop()
	<-done
	if took := time.Since(begin); took > stopTimeout {
		t.Errorf("the profile held up the end for %s", took)
	}
}

// The kernel that does not answer holds up no request, no number that is old is
// shown, and the end waits for it no longer than told.
func TestKernelHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		hang := make(chan struct{})
		calls := 0
		s := New(Options{
			Agent: well(), Log: slog.New(slog.NewTextHandler(&log, nil)),
			Table: func(context.Context) (int, int, error) { // it does not heed its context
				if calls++; calls > 2 {
					<-hang
				}
				return 70 + calls, 100, nil
			},
		})
		l := newPipe(loopback4, loopback4)
		stop := start(t, s, l, nil)
		shown := func() string {
			got := ask(t, l, "GET", "/metrics")
			var list []string
			for line := range strings.Lines(got.body) {
				if strings.HasPrefix(line, "flowsweep_table_") {
					list = append(list, strings.TrimSpace(line))
				}
			}
			return strings.Join(list, ", ")
		}
		begin := time.Now()
		for _, step := range []struct {
			at   time.Duration
			want string
		}{
			{time.Second, "flowsweep_table_entries 71, flowsweep_table_max_entries 100"},
			{11 * time.Second, "flowsweep_table_entries 72, flowsweep_table_max_entries 100"},
			{39 * time.Second, "flowsweep_table_entries 72, flowsweep_table_max_entries 100"},
			{41 * time.Second, ""},
		} {
			time.Sleep(time.Until(begin.Add(step.at)))
			asked := time.Now()
			if got := shown(); got != step.want {
				t.Errorf("after %s: %q, want %q", step.at, got, step.want)
			}
			if got := ask(t, l, "GET", "/readyz"); got.code != 200 {
				t.Errorf("after %s: %d", step.at, got.code)
			}
			if waited := time.Since(asked); waited > 0 {
				t.Errorf("after %s: waited %s", step.at, waited)
			}
		}
		begin = time.Now()
		stop()
		if took := time.Since(begin); took < stopTimeout || took > stopTimeout+time.Second {
			t.Errorf("Serve took %s to end, want %s", took, stopTimeout)
		}
		if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "not waiting any longer") {
			t.Errorf("log:\n%s", log.String())
		}
		close(hang)
		synctest.Wait()
	})
}

// An error of the kernel is logged when it comes and when it goes, not with each
// attempt.
func TestTableFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		begin := time.Now()
		s := New(Options{
			Agent: well(), Log: slog.New(slog.NewTextHandler(&log, nil)),
			Table: func(context.Context) (int, int, error) {
				if at := time.Since(begin); at > 15*time.Second && at < 105*time.Second {
					return 0, 0, errors.New("operation not permitted")
				}
				return 7, 0, nil
			},
		})
		l := newPipe(loopback4, loopback4)
		stop := start(t, s, l, nil)
		for range 20 {
			time.Sleep(10 * time.Second)
			at := time.Since(begin)
			known := strings.Contains(ask(t, l, "GET", "/metrics").body, "\nflowsweep_table_entries 7\n")
			if want := at <= 40*time.Second || at >= 110*time.Second; known != want {
				t.Errorf("after %s: known %t", at, known)
			}
		}
		if body := ask(t, l, "GET", "/metrics").body; strings.Contains(body, "flowsweep_table_max_entries") {
			t.Error("an unknown maximum is shown")
		}
		stop()
		if n := strings.Count(log.String(), "\n"); n != 2 {
			t.Errorf("%d lines:\n%s", n, log.String())
		}
	})
}

func TestServe(t *testing.T) {
	listen := func(t *testing.T) net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	get := func(addr net.Addr, path string) error {
		tr := &http.Transport{}
		defer tr.CloseIdleConnections()
		res, err := (&http.Client{Transport: tr}).Get("http://" + addr.String() + path) //nolint:noctx // a test
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if res.StatusCode != 200 {
			return errors.New(res.Status)
		}
		return nil
	}
	t.Run("two listeners", func(t *testing.T) {
		all, metrics := listen(t), listen(t)
		stop := start(t, New(Options{Agent: well(), Metrics: NewMetrics()}), all, metrics)
		for _, err := range []error{
			get(all.Addr(), "/statusz"), get(all.Addr(), "/metrics"), get(metrics.Addr(), "/metrics"),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		idle, err := net.Dial("tcp", all.Addr().String()) // must not hold up the end for long
		if err != nil {
			t.Fatal(err)
		}
		defer idle.Close()
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > stopTimeout+time.Second {
			t.Errorf("Serve took %s to end", took)
		}
		if get(all.Addr(), "/livez") == nil || get(metrics.Addr(), "/livez") == nil {
			t.Error("still answers")
		}
	})
	t.Run("a listener fails", func(t *testing.T) {
		all, metrics := listen(t), listen(t)
		s := New(Options{Agent: well()})
		ended := make(chan error)
		go func() { ended <- s.Serve(context.Background(), all, metrics) }()
		if err := get(metrics.Addr(), "/livez"); err != nil {
			t.Error(err)
		}
		_ = metrics.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) || !strings.Contains(err.Error(), metrics.Addr().String()) {
			t.Errorf("%v, want net.ErrClosed with the address", err)
		}
		if get(all.Addr(), "/livez") == nil {
			t.Error("the other one still answers")
		}
	})
	t.Run("a slow agent", func(t *testing.T) {
		// A request that runs when the end comes is answered.
		a := &slowAgent{called: make(chan struct{}), release: make(chan struct{})}
		all := listen(t)
		stop := start(t, New(Options{Agent: a}), all, nil)
		answered := make(chan error)
		go func() { answered <- get(all.Addr(), "/livez") }()
		<-a.called
		time.AfterFunc(100*time.Millisecond, func() { close(a.release) })
		stop()
		if err := <-answered; err != nil {
			t.Error(err)
		}
	})
}

// slowAgent answers when it is let.
type slowAgent struct {
	fakeAgent
	called, release chan struct{}
}

func (a *slowAgent) Alive() bool {
	close(a.called)
	<-a.release
	return true
}
