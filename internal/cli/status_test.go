package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/agent/config"
	"github.com/flowsweep/flowsweep/internal/admin"
	"github.com/flowsweep/flowsweep/internal/nft"
)

// statuses are what agents say, by the name of the file that shows it to people.
func statuses() map[string]agent.Status {
	now := time.Date(2026, 11, 13, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	backend := netip.MustParseAddrPort("198.51.100.19:53")

	well := agent.Status{
		Time: now, Started: ago(75 * time.Hour), Ready: true, Frontends: 1204, Tombstones: 1, Settling: "generation",
		Sources: []agent.SourceStatus{
			{Name: "static", Complete: true, Updated: ago(26 * time.Hour), Frontends: 1204},
			{Name: "host", Complete: true, Updated: ago(75 * time.Hour)},
		},
		LastFull: ago(3*time.Minute + 12*time.Second),
		LastPass: &agent.PassStatus{
			Start: ago(3*time.Minute + 12*time.Second), Full: true, Returned: 120_000, Judged: 120_000, DurationMs: 271.25,
		},
	}

	busy := well
	busy.Sources = []agent.SourceStatus{
		{
			Name: "static", Complete: true, Updated: ago(26 * time.Hour), Frontends: 1204,
			Fault: "/etc/flowsweep/frontends.d/dns.yaml:7: items[0].backends[1]: \"198.51.100.300\" is not an address and port; " +
				"write 198.51.100.3:53",
		},
		{
			Name: "kubernetes", Complete: true, Updated: ago(4 * time.Second), Frontends: 200,
			Held: "since 2026-11-13T11:59:56Z: had 200 frontends, has 10", Fault: "watch: connection refused",
		},
		well.Sources[1],
	}
	busy.Unsettled = []agent.Unsettled{
		{
			Frontend: "203.0.113.10:53/UDP", Owner: "default/dns:udp", Causes: []string{"backend-lost"},
			Changed: ago(12 * time.Second), Opened: ago(10 * time.Second),
		},
		{
			Frontend: "*:30053/UDP", Owner: "default/dns:udp", Causes: []string{"backend-lost", "first-backend"},
			Changed: ago(12 * time.Second), Opened: ago(10 * time.Second),
		},
		{Frontend: "192.0.2.1", Causes: []string{"host-address"}, Changed: ago(time.Second), Opened: now},
	}
	busy.UnsettledTotal = 3
	busy.Disagrees = []*agent.Disagreement{{
		Frontend: "203.0.113.10:53/UDP", Owner: "default/dns:udp", Backend: backend, Since: ago(12 * time.Minute), Passes: 12,
		Evidence: "udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=40000 dport=53 " +
			"src=198.51.100.19 dst=192.0.2.50 sport=53 dport=40000 mark=0 use=1 id=287454020",
	}}
	busy.LastPass = &agent.PassStatus{
		Start: ago(1500 * time.Millisecond), Returned: 40, Judged: 31, Stale: 6, Deleted: 2, Gone: 1, Busy: 2, Failed: 1,
		DurationMs: 1.234, Error: "dump: operation not permitted (grant CAP_NET_ADMIN)",
	}
	busy.Failures = 3
	busy.DryRun = true
	busy.StateFile = "open /var/lib/flowsweep/state.json.1: read-only file system"

	starting := agent.Status{
		Time: now, Started: ago(2 * time.Second), Settling: "time",
		NotReady: "source static has not delivered its first full list: open /etc/flowsweep/frontends.d: no such file or directory",
		Sources:  []agent.SourceStatus{{Name: "static", Fault: "open /etc/flowsweep/frontends.d: no such file or directory"}},
	}

	wide := well
	long := "a-namespace-with-a-long-name/and-a-service-with-one-too:dns-udp"
	for i := range 25 {
		wide.Unsettled = append(wide.Unsettled, agent.Unsettled{
			Frontend: fmt.Sprintf("[2001:db8:1234:5678:9abc:def0:1234:%d]:50000-50099/UDP", i), Owner: long,
			Causes: []string{"frontend-new"}, Changed: ago(90 * time.Second), Opened: ago(time.Hour),
		})
	}
	wide.UnsettledTotal = 1300
	wide.Disagrees = []*agent.Disagreement{{
		Frontend: "[2001:db8::10]:53/UDP", Owner: long + "\x1b[2J", Backend: netip.MustParseAddrPort("[2001:db8:2::19]:53"),
		Since: now.Add(time.Hour), Passes: 3, Evidence: "udp 17 29 src=2001:db8::1",
	}}
	rules := well
	rules.ByRules, rules.Settling, rules.Frontends, rules.Tombstones, rules.Sources = true, "rules", 0, 0, nil
	blind := rules
	blind.Settling, blind.RulesFault = "time", "iptables-legacy has NAT rules, which are not read"
	unasked := well
	unasked.Settling, unasked.RulesFault = "time", "IPVS forwards here, by a table of its own"
	unasked.Warnings = []string{nft.IPVSHeld}
	router := well
	router.Settling = "rules"
	router.Disagrees = []*agent.Disagreement{{
		Frontend: "203.0.113.10:53/UDP", Owner: "dns", Backend: backend, Since: ago(12 * time.Minute), Passes: 12,
		Evidence: busy.Disagrees[0].Evidence, Rule: "ip nat PREROUTING handle 7",
	}}
	return map[string]agent.Status{
		"unasked": unasked, "router": router,
		"well": well, "busy": busy, "starting": starting, "wide": wide, "rules": rules, "blind": blind,
	}
}

func TestStatusText(t *testing.T) {
	for name, s := range statuses() {
		t.Run(name, func(t *testing.T) {
			got := string(statusText(&s))
			file := filepath.Join("testdata", "status", name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got; -update rewrites it):\n%s", file, diff)
			}
			for line := range strings.Lines(got) {
				line = strings.TrimSuffix(line, "\n")
				if n := utf8.RuneCountInString(line); n > lineWidth || strings.HasSuffix(line, " ") {
					t.Errorf("%d columns: %q", n, line)
				}
			}
		})
	}
}

// saying is an agent that says what it is told.
type saying agent.Status

func (s saying) Status() agent.Status { return agent.Status(s) }
func (saying) Alive() bool            { return true }

// serve answers as an agent does, until the test ends.
func serve(t *testing.T, s agent.Status, metricsOnly bool) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	srv := admin.New(admin.Options{Agent: saying(s)})
	go func() {
		if metricsOnly {
			ended <- srv.Serve(ctx, nil, l)
		} else {
			ended <- srv.Serve(ctx, l, nil)
		}
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func runStatus(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Run(t.Context(), append([]string{"status"}, args...), strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestStatusFormats(t *testing.T) {
	s := statuses()["busy"]
	address := serve(t, s, false)
	code, out, errs := runStatus(t, "--address", address)
	if want := string(statusText(&s)); code != 0 || out != want || errs != "" {
		t.Errorf("exit %d, stderr %q, stdout\n%s", code, errs, out)
	}
	same := cmp.Comparer(func(x, y netip.AddrPort) bool { return x == y })
	for format, decode := range map[string]func([]byte, any) error{
		"json": json.Unmarshal,
		"yaml": func(b []byte, v any) error { return yaml.Unmarshal(b, v) },
	} {
		code, out, errs := runStatus(t, "--address", address, "-o", format)
		var got agent.Status
		if err := decode([]byte(out), &got); err != nil || code != 0 || errs != "" {
			t.Fatalf("%s: exit %d, stderr %q, %v:\n%s", format, code, errs, err, out)
		}
		if diff := cmp.Diff(s, got, same); diff != "" {
			t.Errorf("%s (-want +got):\n%s", format, diff)
		}
	}
}

// Whatever keeps the status away is one sentence that says what to do.
func TestStatusFails(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := closed.Addr().String()
	_ = closed.Close()
	answering := func(code int, body string) string {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(code)
			fmt.Fprint(w, body)
		}))
		t.Cleanup(srv.Close)
		return srv.Listener.Addr().String()
	}
	for _, tt := range []struct {
		name string
		args []string
		code int
		want string // ADDRESS stands for the address, ... for what the system calls it
	}{
		{
			"nobody listens",
			[]string{"--address", refused},
			exitFailed,
			"flowsweep: no agent answers at ADDRESS: dial tcp ADDRESS: ...; " +
				"is \"flowsweep run\" running, and is that the admin.listen of its configuration?\n",
		},
		{
			"not from here",
			[]string{"--address", answering(403, "no")},
			exitFailed,
			"flowsweep: the agent at ADDRESS shows its status on its own host only; ask it there, " +
				"or set admin.statusAnywhere in its configuration\n",
		},
		{
			"metrics only",
			[]string{"--address", serve(t, agent.Status{}, true)},
			exitFailed,
			"flowsweep: what listens at ADDRESS has no status of an agent (404 Not Found); " +
				"give admin.listen of the agent's configuration, not admin.metricsListen\n",
		},
		{
			"a redirect is not followed",
			[]string{"--address", answering(302, "")},
			exitFailed,
			"flowsweep: what listens at ADDRESS has no status of an agent (302 Found); " +
				"give admin.listen of the agent's configuration, not admin.metricsListen\n",
		},
		{
			"another service",
			[]string{"--address", answering(200, "<html>")},
			exitFailed,
			"flowsweep: what listens at ADDRESS is no agent: its answer is no status: " +
				"invalid character '<' looking for beginning of value\n",
		},
		{
			"no port",
			[]string{"--address", "127.0.0.1"},
			exitUsage,
			"flowsweep: --address: \"ADDRESS\" is not HOST:PORT\nRun \"flowsweep status --help\" for usage.\n",
		},
		{
			"not an address",
			[]string{"--address", "a b:1"},
			exitUsage,
			"flowsweep: --address: parse \"http://a%20b:1/statusz\": invalid URL escape \"%20\"\n" +
				"Run \"flowsweep status --help\" for usage.\n",
		},
		{
			"no such format",
			[]string{"-o", "xml"},
			exitUsage,
			"flowsweep: --output: \"xml\" is none of table, json, yaml\nRun \"flowsweep status --help\" for usage.\n",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("http_proxy", "http://"+refused) // must not be asked
			t.Setenv("HTTP_PROXY", "http://"+refused)
			code, out, errs := runStatus(t, tt.args...)
			want := strings.ReplaceAll(tt.want, "ADDRESS", tt.args[1])
			if head, tail, open := strings.Cut(want, "..."); open &&
				strings.HasPrefix(errs, head) && strings.HasSuffix(errs, tail) {
				want = errs
			}
			if code != tt.code || errs != want || out != "" {
				t.Errorf("exit %d, stdout %q, stderr\n%s\nwant exit %d and\n%s", code, out, errs, tt.code, want)
			}
		})
	}
}

// An agent that is told nothing listens where status asks.
func TestStatusAddress(t *testing.T) {
	if got := config.Default().Admin.Listen.String(); got != adminAddress {
		t.Errorf("the agent listens at %s, status asks %s", got, adminAddress)
	}
}
