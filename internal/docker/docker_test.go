//go:build unix

package docker

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
)

// engine serves an engine's API at a socket of its own. It speaks the version that
// Docker 20.10 does.
func engine(t *testing.T, list http.HandlerFunc) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Api-Version", "1.41")
	})
	mux.HandleFunc("GET /v1.41/containers/json", list)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	t.Setenv(HostEnv, "unix://"+socket)
}

func TestPublished(t *testing.T) {
	engine(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`[
 {"Id":"a","Names":["/dns","/other/alias"],"State":"running","Ports":[
  {"IP":"192.0.2.1","PrivatePort":53,"PublicPort":5353,"Type":"udp"},
  {"IP":"0.0.0.0","PrivatePort":53,"PublicPort":53,"Type":"udp"},
  {"IP":"::","PrivatePort":53,"PublicPort":53,"Type":"udp"},
  {"PrivatePort":9153,"Type":"tcp"}]},
 {"Id":"b","Names":["/web"],"State":"running","Ports":[{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":53,"Type":"tcp"}]},
 {"Id":"c","Names":[],"Ports":[{"IP":"0.0.0.0","PrivatePort":1,"PublicPort":1,"Type":"udp"}]}]`))
	})
	c, err := List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		proto uint8
		addr  string
		port  uint16
		want  string
	}{
		{conntrack.UDP, "192.0.2.1", 5353, "dns"},
		{conntrack.UDP, "192.0.2.2", 5353, ""},
		{conntrack.UDP, "192.0.2.2", 53, "dns"},
		{conntrack.UDP, "2001:db8::1", 53, "dns"},
		{conntrack.TCP, "192.0.2.2", 53, "web"},
		{conntrack.TCP, "2001:db8::1", 53, ""},
		{conntrack.TCP, "192.0.2.2", 9153, ""},
		{conntrack.UDP, "192.0.2.2", 1, ""},
	} {
		if got := c.Published(tt.proto, netip.MustParseAddr(tt.addr), tt.port); got != tt.want {
			t.Errorf("%s %s:%d: %q, want %q", conntrack.ProtoName(tt.proto), tt.addr, tt.port, got, tt.want)
		}
	}
}

// Names are not worth a wait, and those of another host are wrong.
func TestNoEngine(t *testing.T) {
	t.Setenv(HostEnv, "unix://"+filepath.Join(t.TempDir(), "none.sock"))
	if _, err := List(t.Context()); err == nil {
		t.Error("an engine answered at no socket")
	}
	t.Setenv(HostEnv, "tcp://127.0.0.1:1")
	if _, err := List(t.Context()); err == nil || !strings.Contains(err.Error(), "another host's engine") {
		t.Errorf("got %v", err)
	}
	engine(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	start := time.Now()
	if _, err := List(t.Context()); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > answerTime+time.Second {
		t.Errorf("got %v after %v", err, time.Since(start))
	}
}
