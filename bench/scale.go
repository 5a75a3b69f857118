//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/kubernetes"
	"github.com/flowsweep/flowsweep/sweep"
)

// A large cluster: 10 000 Services of 10 endpoints, with one EndpointSlice each.
const largeServices = 10_000

// Slice updates, for so long.
const (
	updateRate = 1000 // a second
	updateTime = time.Minute
)

func large() world { return world{services4: largeServices} }

// scaleWorks do not depend on the size of the conntrack table, which is empty.
func scaleWorks(o *options) []work {
	return []work{
		{name: "scale/table", run: func(context.Context, int) (sample, error) { return scaleTable() }},
		{name: "scale/judge", run: func(context.Context, int) (sample, error) { return scaleJudge(), nil }},
		{name: "scale/agent", run: func(ctx context.Context, _ int) (sample, error) { return scaleAgent(ctx, o) }},
	}
}

// heap is what is alive.
func heap() float64 {
	goruntime.GC()
	var m goruntime.MemStats
	goruntime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func nsPerOp(f func(b *testing.B)) float64 {
	r := testing.Benchmark(f)
	return float64(r.T.Nanoseconds()) / float64(r.N)
}

// scaleTable measures the frontends of a large cluster, in memory and in time.
func scaleTable() (sample, error) {
	var s sample
	empty := heap()
	units := large().units()
	s.count("frontends bytes", heap()-empty)
	t := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	start := time.Now()
	t.Replace(units)
	s.count("first list seconds", time.Since(start).Seconds())
	clear(units) // the table has them
	s.count("table bytes", heap()-empty)

	again := large().units()
	start = time.Now()
	if ch := t.Replace(again); !ch.Empty() {
		return s, errors.New("the same list again changes something")
	}
	s.count("list again seconds", time.Since(start).Seconds())

	svc := service{conntrack.IPv4, 2} // UDP and TCP
	obj, slice := large().service(svc)
	all := slice.Endpoints
	p := sweep.Planner{Table: t, Flows: 1_000_000}
	s.count("slice update ns", nsPerOp(func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			slice.Endpoints = all[:len(all)-i%2]
			fs, _ := kubernetes.ServiceFrontends(obj, []*kubernetes.Slice{kubernetes.ReadSlice(slice, "node-0")})
			p.Narrow(t.Set(svc.name(), fs))
		}
	}))
	goruntime.KeepAlive(t)
	return s, nil
}

// scaleJudge measures the judgement beside ever more frontends. Its flows are
// many and met in no order, so that the processor's caches help no more than
// they do in a walk.
func scaleJudge() sample {
	var s sample
	const flows = 1 << 14
	measure := func(name string, t *frontend.Table, flow func(i int) conntrack.Flow) {
		list := make([]conntrack.Flow, flows)
		for i := range list {
			list[i] = flow(int(mix(i)))
		}
		s.count(name, nsPerOp(func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				t.Judge(&list[i%flows])
			}
		}))
	}
	host := frontend.Host{Listed: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	for _, n := range []int{10, 100, 1000, 10_000, 50_000} {
		t := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
		w := world{services4: n}
		t.Replace(w.units())
		measure(fmt.Sprintf("services %d", n), t, func(i int) conntrack.Flow {
			to := service{conntrack.IPv4, i % n}
			e := entry{service: to, backend: i / n % endpoints, proto: conntrack.UDP, i: i % (1 << 17)}
			return e.flow()
		})
	}
	valid := frontend.NewBackends(netip.MustParseAddrPort("198.51.100.1:0"))
	atHost := func(port int) conntrack.Flow {
		e := entry{service: service{conntrack.IPv4, 1}, proto: conntrack.UDP}
		f := e.flow()
		f.Orig.Dst, f.Orig.DstPort = host.Listed[0], uint16(port)
		f.Reply.Src, f.Reply.SrcPort = netip.MustParseAddr("198.51.100.1"), uint16(port)
		return f
	}
	for _, n := range []int{1, 10, 100, 1000} {
		for _, kind := range []string{"ranges", "nested ranges", "every address"} {
			t := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
			t.SetHost(host)
			for i := range n {
				f := frontend.Frontend{Owner: "x", Proto: conntrack.UDP, Valid: valid, Usable: 1}
				first := uint16(1000 + 60*i)
				switch kind {
				case "ranges":
					f.Addr, f.Ports = host.Listed[0], frontend.Ports{First: first, Last: first + 59}
				case "nested ranges":
					f.Addr, f.Ports = host.Listed[0], frontend.Ports{First: uint16(1000 + i), Last: 65000}
				case "every address":
					f.Family, f.Ports = conntrack.IPv4, frontend.Port(first)
				}
				t.Set(strconv.Itoa(i), []frontend.Frontend{f})
			}
			measure(fmt.Sprintf("%s %d", kind, n), t, func(i int) conntrack.Flow { return atHost(1000 + 60*(i%n)) })
		}
	}
	return s
}

// scaleAgent runs the agent against an API server of a large cluster, whose
// slices then change, and at last has to be listed again.
func scaleAgent(ctx context.Context, o *options) (sample, error) {
	var s sample
	api, err := serveAPI(large())
	if err != nil {
		return s, err
	}
	defer api.close()
	kubeconfig, err := writeKubeconfig(api.addr)
	if err != nil {
		return s, err
	}
	defer remove(kubeconfig)
	start := time.Now()
	a, err := startAgent(ctx, o.program, fmt.Sprintf("sources: {kubernetes: {enabled: true, kubeconfig: %q, "+
		"hostPorts: false, serviceRanges: false, events: false}}\nhost: {node: node-0}\n", kubeconfig))
	if err != nil {
		return s, err
	}
	defer a.stop()
	if err := a.ready(ctx); err != nil {
		return s, err
	}
	s.count("ready seconds", time.Since(start).Seconds())
	if err := a.account(ctx, o, &s, "ready", 0); err != nil {
		return s, err
	}

	before, err := a.cpu()
	if err != nil {
		return s, err
	}
	profiled := make(chan error, 1)
	go func() { profiled <- a.profile(ctx, o, "cpu-updates", "/debug/pprof/profile?seconds=30") }()
	sent, err := update(ctx, api)
	if err := errors.Join(err, <-profiled); err != nil {
		return s, err
	}
	last := time.Now()
	caughtUp, err := a.settled(ctx, last.Add(-updateTime))
	if err != nil {
		return s, err
	}
	s.count("updates", float64(sent))
	s.count("updates behind seconds", max(0, caughtUp.Sub(last).Seconds()))
	if err := a.account(ctx, o, &s, "updates", before); err != nil {
		return s, err
	}

	if before, err = a.cpu(); err != nil {
		return s, err
	}
	last = time.Now()
	api.expire()
	if caughtUp, err = a.settled(ctx, last); err != nil {
		return s, err
	}
	s.count("resync seconds", caughtUp.Sub(last).Seconds())
	return s, a.account(ctx, o, &s, "resync", before)
}

// update changes slices one after the other on schedule: a backend goes, and
// when its turn comes again, is back.
func update(ctx context.Context, api *apiServer) (sent int, err error) {
	start := time.Now()
	for time.Since(start) < updateTime {
		if err := ctx.Err(); err != nil {
			return sent, err
		}
		time.Sleep(time.Until(start.Add(time.Duration(sent) * time.Second / updateRate)))
		n, round := sent%largeServices, sent/largeServices
		w := large().without(func(_ service, b int) bool { return round%2 == 0 && b == 9 })
		_, slice := w.service(service{conntrack.IPv4, n})
		api.update(n, slice)
		sent++
	}
	return sent, nil
}

// settled waits until the Kubernetes source has delivered something after a
// moment, and then nothing for two seconds, and returns when it last did.
func (a *agent) settled(ctx context.Context, after time.Time) (time.Time, error) {
	var at time.Time
	for since := time.Now(); time.Since(since) < 2*time.Second || !at.After(after); {
		if err := ctx.Err(); err != nil {
			return at, err
		}
		v, err := a.metric(ctx, `flowsweep_source_updated_timestamp_seconds{source="kubernetes"}`)
		if err != nil {
			return at, err
		}
		if now := time.UnixMicro(int64(v * 1e6)); !now.Equal(at) {
			at, since = now, time.Now()
		}
		time.Sleep(50 * time.Millisecond)
	}
	return at, nil
}

func (a *agent) metric(ctx context.Context, name string) (float64, error) {
	page, err := a.get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(page)) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, fmt.Errorf("no metric %s", name)
}

// account notes the processor time that the agent has taken since it had taken
// as much as before, and what of it is resident and alive.
func (a *agent) account(ctx context.Context, o *options, s *sample, when string, before time.Duration) error {
	now, err := a.cpu()
	if err != nil {
		return err
	}
	s.count(when+" cpu", (now - before).Seconds())
	for field, name := range map[string]string{"VmHWM": "peak", "VmRSS": "resident"} {
		v, err := a.memory(field)
		if err != nil {
			return err
		}
		s.count(when+" "+name, float64(v))
	}
	if err := a.profile(ctx, o, "heap-"+when, "/debug/pprof/heap?gc=1"); err != nil {
		return err
	}
	if _, err := a.get(ctx, "/debug/pprof/heap?gc=1"); err != nil { // for the collection alone
		return err
	}
	alive, err := a.metric(ctx, "go_memstats_heap_alloc_bytes")
	s.count(when+" heap", alive)
	return err
}

// profile gets a profile, where profiles are wanted.
func (a *agent) profile(ctx context.Context, o *options, name, path string) error {
	if o.profiles == "" {
		return nil
	}
	b, err := a.get(ctx, path)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.profiles, "agent-"+name+".pprof"), b, 0o600)
}

// cpu is the processor time that the agent has taken so far, from
// /proc/PID/stat: fields 14 and 15, in ticks of 10 ms.
func (a *agent) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may hold spaces
	f := strings.Fields(rest)
	if len(f) < 13 {
		return 0, errors.New("/proc/PID/stat is short")
	}
	user, err1 := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}

func writeKubeconfig(addr string) (path string, err error) {
	f, err := os.CreateTemp("", "flowsweep-bench-*.kubeconfig")
	if err != nil {
		return "", err
	}
	_, err = fmt.Fprintf(f, `apiVersion: v1
kind: Config
clusters: [{name: bench, cluster: {server: "http://%s"}}]
contexts: [{name: bench, context: {cluster: bench, user: ""}}]
current-context: bench
`, addr)
	return f.Name(), errors.Join(err, f.Close())
}
