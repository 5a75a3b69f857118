// Package admin is how an agent is looked at from outside, over HTTP: metrics,
// health, status and profiles. No request waits for the kernel.
//
//	agent ──Observer──▶ Metrics ──┐
//	  ▲                           ├──▶ Server ──▶ /metrics /livez /readyz /statusz
//	  └────────Status, Alive──────┘
package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/flowsweep/flowsweep/agent"
)

// Agent is what a Server shows; *agent.Agent is one. Its methods must not wait
// for the kernel.
type Agent interface {
	Status() agent.Status
	Alive() bool
}

// Options are what a Server works with.
type Options struct {
	Agent   Agent
	Metrics *Metrics     // the agent's Observer; nil: nothing is counted
	Table   TableStats   // nil: the table's size is not shown
	Log     *slog.Logger // nil: none
	Version string       // for flowsweep_build_info

	// PProf serves profiles under /debug/pprof/.
	PProf bool
	// StatusAnywhere serves status and profiles to other hosts too. Without it
	// they are refused on every connection that is not a loopback one.
	StatusAnywhere bool
}

// Server answers over HTTP. It is made by New and runs once.
type Server struct {
	o        Options
	log      *slog.Logger
	table    *table
	registry *prometheus.Registry

	readTimeout time.Duration
}

var _ Agent = (*agent.Agent)(nil)

// New returns a server that Serve starts.
func New(o Options) *Server {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		o: o, log: o.Log, registry: prometheus.NewRegistry(), readTimeout: readTimeout,
		table: &table{stats: o.Table, log: o.Log},
	}
	s.registry.MustRegister(
		&state{agent: o.Agent, table: s.table, version: o.Version},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	if o.Metrics != nil {
		s.registry.MustRegister(o.Metrics)
	}
	return s
}

const (
	headerTimeout = 5 * time.Second
	readTimeout   = 10 * time.Second // of the whole request: a body is read even where nobody wants it
	writeTimeout  = 30 * time.Second // pprof extends it by the time that it measures
	idleTimeout   = 2 * time.Minute
	headerBytes   = 16 << 10

	// stopTimeout is how long Serve waits at its end, for requests and for the
	// kernel, each.
	stopTimeout = 3 * time.Second
)

// Serve answers until ctx ends, then lets running requests end and returns nil.
// It returns early if a listener fails. On the listener all every path is served,
// on metrics only /metrics, /livez and /readyz; either may be nil. Serve closes
// both.
func (s *Server) Serve(ctx context.Context, all, metrics net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	asking := make(chan struct{})
	go func() {
		defer close(asking)
		s.table.run(ctx)
	}()

	var servers []*http.Server
	var work sync.WaitGroup
	failed := make(chan error, 2)
	serve := func(l net.Listener, h http.Handler) {
		if l == nil {
			return
		}
		srv := s.server(ctx, h)
		servers = append(servers, srv)
		work.Go(func() {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("serve on %s: %w", l.Addr(), err)
			}
		})
	}
	serve(all, s.handler(true))
	serve(metrics, s.handler(false))

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		cancel()
	}
	stop, done := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer done()
	for _, srv := range servers {
		work.Go(func() {
			if srv.Shutdown(stop) != nil {
				_ = srv.Close()
			}
		})
	}
	work.Wait()
	select {
	case <-asking:
	case <-time.After(stopTimeout):
		s.log.Warn("the kernel does not tell the size of its table; not waiting any longer")
	}
	return err
}

func (s *Server) server(ctx context.Context, h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       s.readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    headerBytes,
		// A profile that runs ends with the agent.
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, loopback{}, isLoopback(c))
		},
		DisableGeneralOptionsHandler: true,
		// What a client does wrong it can do without end.
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// handler serves all paths, or those that show nothing that is private to the
// host.
func (s *Server) handler(all bool) http.Handler {
	mux := http.NewServeMux()
	index := "flowsweep " + cmp.Or(s.o.Version, "devel") + "\n"
	handle := func(path, what string, h http.HandlerFunc) {
		mux.Handle("GET "+path, h)
		index += fmt.Sprintf("\n%-14s %s", path, what)
	}
	handle("/metrics", "for Prometheus; docs/metrics.md", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		// What cannot be collected must not hide the rest.
		ErrorHandling: promhttp.ContinueOnError,
	}).ServeHTTP)
	handle("/livez", "200 while the agent's loop moves, else 503", s.livez)
	handle("/readyz", "200 when all sources are complete and a first pass is done, else 503", s.readyz)
	if all {
		handle("/statusz", `what "flowsweep status" shows, in JSON`, s.private(s.statusz))
		if s.o.PProf {
			handle("/debug/pprof/", "profiles", s.private(lasting(pprof.Index)))
			mux.Handle("GET /debug/pprof/cmdline", s.private(pprof.Cmdline))
			mux.Handle("GET /debug/pprof/profile", s.private(lasting(pprof.Profile)))
			mux.Handle("GET /debug/pprof/symbol", s.private(pprof.Symbol))
			mux.Handle("POST /debug/pprof/symbol", s.private(pprof.Symbol)) // "go tool pprof" posts
			mux.Handle("GET /debug/pprof/trace", s.private(lasting(pprof.Trace)))
		}
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, index) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

func text(w http.ResponseWriter, code int, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	fmt.Fprintln(w, s)
}

func (s *Server) livez(w http.ResponseWriter, _ *http.Request) {
	if !s.o.Agent.Alive() {
		text(w, http.StatusServiceUnavailable, "not alive: the agent's loop does not move")
		return
	}
	text(w, http.StatusOK, "ok")
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	st := s.o.Agent.Status()
	if why := unready(&st); why != "" {
		text(w, http.StatusServiceUnavailable, "not ready: "+why)
		return
	}
	text(w, http.StatusOK, "ok")
}

func (s *Server) statusz(w http.ResponseWriter, _ *http.Request) {
	b, err := json.MarshalIndent(s.o.Agent.Status(), "", "  ")
	if err != nil {
		text(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n')) // the client may have gone
}

// private refuses other hosts.
func (s *Server) private(h http.HandlerFunc) http.HandlerFunc {
	if s.o.StatusAnywhere {
		return h
	}
	return func(w http.ResponseWriter, r *http.Request) {
		if near, _ := r.Context().Value(loopback{}).(bool); !near {
			text(w, http.StatusForbidden,
				"status and profiles are for loopback connections only, unless admin.statusAnywhere is set")
			return
		}
		h(w, r)
	}
}

// lasting lets a request last: the end of the time to read it, which is kept
// watch over to the answer's end, would cancel the request's context.
func lasting(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // else it is cut short
		h(w, r)
	}
}

// loopback is the context key of isLoopback's answer.
type loopback struct{}

// isLoopback tells whether both ends of a connection are loopback addresses. The
// connection is asked and no header, which a client could write.
func isLoopback(c net.Conn) bool {
	for _, a := range []net.Addr{c.LocalAddr(), c.RemoteAddr()} {
		if tcp, ok := a.(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
			return false
		}
	}
	return true
}
