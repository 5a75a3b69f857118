//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/uapi"
	"github.com/flowsweep/flowsweep/sweep"
)

// work is something whose cost is measured.
type work struct {
	name  string
	title string
	// run does it once, in a process made for that.
	run func(ctx context.Context, size int) (sample, error)
	// deletes tells which flows are missing afterwards, and no others; nil: none.
	deletes func(entry) bool
	// most is the largest table for which it is tried; 0: any.
	most int
}

// works returns all measurements of a table, in the order of the report.
func works(o *options) []work {
	return slices.Concat(floors(), libraries(), sweeps(), plans(), peers(), processes(o))
}

func floors() []work {
	nobody := conntrack.Filter{Family: conntrack.IPv4, Proto: conntrack.UDP, OrigDst: outgoing(0).Prev()}
	return []work{
		{name: "floor/nothing", title: "raw: a dump whose filter matches nothing", run: rawDumps(nobody)},
		{name: "floor/udp", title: "raw: all IPv4 UDP", run: rawDumps(udp4)},
		{name: "floor/full", title: "raw: the queries of a full pass", run: rawFull},
		{name: "floor/everything", title: "raw: everything", run: rawDumps(conntrack.Filter{})},
		{
			name: "floor/deletes", title: "raw: 25 % of IPv4 UDP deleted, known before", run: rawDeletes,
			deletes: onlyUDP4(staleFlows(25)),
		},
	}
}

// rawDeletes measures the kernel's part in deleting what a pass finds: the
// messages are encoded before, in batches of the size that conntrack uses.
func rawDeletes(ctx context.Context, _ int) (sample, error) {
	s, err := newScene(ctx, onlyUDPPolicy)
	if err != nil {
		return sample{}, err
	}
	defer s.close()
	s.table.Replace(whole().without(stale(25)).units())
	r, err := dialRaw()
	if err != nil {
		return sample{}, err
	}
	defer r.close()
	type batch struct {
		b    []byte
		last uint32
	}
	var batches []batch
	var flows []conntrack.Flow
	deleted := 0
	encode := func() {
		var x batch
		for i := range flows {
			var flags uint16
			if i == len(flows)-1 {
				flags = uapi.FAck
			}
			r.seq++
			x.b, x.last = append(x.b, deletion(&flows[i], flags, r.seq)...), r.seq
		}
		deleted += len(flows)
		batches, flows = append(batches, x), flows[:0]
	}
	for f, err := range s.conn.Dump(ctx, udp4) {
		if err != nil {
			return sample{}, err
		}
		if s.table.Judge(f).Action != frontend.Delete {
			continue
		}
		if flows = append(flows, *f); len(flows) == 256 {
			encode()
		}
	}
	if len(flows) > 0 {
		encode()
	}
	return measured(func(m *sample) error {
		m.count("deleted", float64(deleted))
		for _, x := range batches {
			if err := r.delete(x.b, x.last); err != nil {
				return err
			}
		}
		return nil
	})
}

var udp4 = conntrack.Filter{Family: conntrack.IPv4, Proto: conntrack.UDP}

func rawDumps(filters ...conntrack.Filter) func(context.Context, int) (sample, error) {
	return func(context.Context, int) (sample, error) {
		r, err := dialRaw()
		if err != nil {
			return sample{}, err
		}
		defer r.close()
		return measured(func(s *sample) error {
			sum := 0
			for _, f := range filters {
				n, err := r.dump(f)
				if err != nil {
					return err
				}
				sum += n
			}
			s.count("bytes read", float64(sum))
			return nil
		})
	}
}

// rawFull reads what a full pass asks for.
func rawFull(ctx context.Context, size int) (sample, error) {
	s, err := newScene(ctx, frontend.DefaultPolicy)
	if err != nil {
		return sample{}, err
	}
	defer s.close()
	plan, err := s.full(ctx)
	if err != nil {
		return sample{}, err
	}
	var fs []conntrack.Filter
	for _, q := range plan.Queries {
		fs = append(fs, q.Filter)
	}
	return rawDumps(fs...)(ctx, size)
}

// libraries reads the table by this module's own package, without judging.
func libraries() []work {
	dump := func(f conntrack.Filter) func(context.Context, int) (sample, error) {
		return withConn(func(ctx context.Context, c *conntrack.Conn, s *sample) error {
			n := 0
			for _, err := range c.Dump(ctx, f) {
				if err != nil {
					return err
				}
				n++
			}
			s.count("flows", float64(n))
			return nil
		})
	}
	return []work{
		{name: "conntrack/udp", title: "conntrack.Dump: all IPv4 UDP", run: dump(udp4)},
		{name: "conntrack/everything", title: "conntrack.Dump: everything", run: dump(conntrack.Filter{})},
		{
			name: "conntrack/list", title: "conntrack.List: everything, in memory",
			run: withConn(func(ctx context.Context, c *conntrack.Conn, s *sample) error {
				flows, err := c.List(ctx, conntrack.Filter{})
				s.count("flows", float64(len(flows)))
				return err
			}),
		},
	}
}

// withConn measures f with a Conn that knows the kernel already, as that of an
// agent does.
func withConn(f func(context.Context, *conntrack.Conn, *sample) error) func(context.Context, int) (sample, error) {
	return func(ctx context.Context, _ int) (sample, error) {
		c, err := dialProbed(ctx)
		if err != nil {
			return sample{}, err
		}
		defer c.Close()
		return measured(func(s *sample) error { return f(ctx, c, s) })
	}
}

func dialProbed(ctx context.Context) (*conntrack.Conn, error) {
	c, err := conntrack.Dial(conntrack.Config{})
	if err != nil {
		return nil, err
	}
	_, err = c.Probe(ctx)
	return c, err
}

// scene is a table of desired state that every flow agrees with, and a Conn.
type scene struct {
	table *frontend.Table
	conn  *conntrack.Conn
}

func newScene(ctx context.Context, p frontend.Policy) (*scene, error) {
	s := &scene{table: frontend.NewTable(frontend.Options{Policy: p})}
	s.table.Replace(whole().units())
	var err error
	s.conn, err = dialProbed(ctx)
	return s, err
}

func (s *scene) close() { _ = s.conn.Close() }

func (s *scene) full(ctx context.Context, families ...conntrack.Family) (sweep.Plan, error) {
	p, err := sweep.NewPlanner(ctx, s.conn, s.table, families...)
	if err != nil {
		return sweep.Plan{}, err
	}
	return p.Full(), nil
}

// event is something that happens to the cluster: a new state of some Services.
type event struct {
	name, title string
	services    []service
	world       world
}

// change tells the table of an event, Service by Service, as a source does.
func (e *event) change(t *frontend.Table) frontend.Change {
	var ch frontend.Change
	for _, s := range e.services {
		ch.Add(t.Set(s.name(), e.world.unit(s)))
	}
	return ch
}

// gone tells which flows an event makes stale.
func (e *event) gone(x entry) bool {
	return x.backend >= 0 && slices.Contains(e.services, x.service) &&
		(e.world.gone != nil && e.world.gone(x.service, x.backend) || e.world.edited != nil && e.world.edited(x.service))
}

// oneLeaves is the event of a first backend leaving each of n Services that a
// test accepts.
func oneLeaves(name, title string, n int, family conntrack.Family, accept func(service) bool) event {
	e := event{name: name, title: title, world: whole()}
	for i := 0; len(e.services) < n; i++ {
		if s := (service{family, i}); accept(s) {
			e.services = append(e.services, s)
		}
	}
	leaves := map[service]bool{}
	for _, s := range e.services {
		leaves[s] = true
	}
	e.world = e.world.without(func(s service, b int) bool { return b == 0 && leaves[s] })
	return e
}

func onlyUDP(s service) bool { return s.udp() && !s.tcp() }
func both(s service) bool    { return s.udp() && s.tcp() }

func events() []event {
	edit := event{
		name: "service-edited", title: "a Service's target port changes",
		services: []service{{conntrack.IPv4, 3}}, world: whole(),
	}
	edit.world.edited = func(s service) bool { return s == edit.services[0] }
	return []event{
		oneLeaves("backend-leaves", "a backend leaves", 1, conntrack.IPv4, onlyUDP),
		oneLeaves("both-leave", "a backend of UDP and TCP leaves", 1, conntrack.IPv4, both),
		oneLeaves("10-leave", "10 backends leave", 10, conntrack.IPv4, onlyUDP),
		oneLeaves("100-leave", "100 backends leave", 100, conntrack.IPv4, onlyUDP),
		edit,
		oneLeaves("ipv6-leaves", "an IPv6 backend leaves", 1, conntrack.IPv6, onlyUDP),
	}
}

// stale tells of a share, in percent, of all backends that they are gone.
func stale(percent int) func(service, int) bool {
	return func(s service, _ int) bool { return s.n%100 < percent }
}

func staleFlows(percent int) func(entry) bool {
	gone := stale(percent)
	return func(e entry) bool { return e.backend >= 0 && gone(e.service, e.backend) }
}

// byDefault are those of the stale flows that the default policy deletes.
func byDefault(stale func(entry) bool) func(entry) bool {
	return func(e entry) bool { return stale(e) && (e.proto == conntrack.UDP || !e.answered) }
}

// onlyUDP4 are those that kube-proxy deletes in a pass for IPv4.
func onlyUDP4(stale func(entry) bool) func(entry) bool {
	return func(e entry) bool { return stale(e) && e.proto == conntrack.UDP && e.family == conntrack.IPv4 }
}

var onlyUDPPolicy = frontend.Policy{UDP: frontend.All}

func sweeps() []work {
	var list []work
	for _, e := range events() {
		list = append(list, work{
			name: "sweep/" + e.name, title: "flowsweep: " + e.title, deletes: byDefault(e.gone),
			run: func(ctx context.Context, _ int) (sample, error) {
				s, err := newScene(ctx, frontend.DefaultPolicy)
				if err != nil {
					return sample{}, err
				}
				defer s.close()
				return measured(func(m *sample) error {
					p, err := sweep.NewPlanner(ctx, s.conn, s.table)
					if err != nil {
						return err
					}
					return s.run(ctx, p.Narrow(e.change(s.table)), false, m)
				})
			},
		})
	}
	type run = func(context.Context, int) (sample, error)
	full := func(percent int, policy frontend.Policy, families ...conntrack.Family) run {
		return func(ctx context.Context, _ int) (sample, error) {
			s, err := newScene(ctx, policy)
			if err != nil {
				return sample{}, err
			}
			defer s.close()
			s.table.Replace(whole().without(stale(percent)).units())
			return measured(func(m *sample) error {
				plan, err := s.full(ctx, families...)
				if err != nil {
					return err
				}
				return s.run(ctx, plan, false, m)
			})
		}
	}
	for _, percent := range []int{0, 1, 25} {
		title := fmt.Sprintf("%d %% stale", percent)
		all := work{run: full(percent, frontend.DefaultPolicy), deletes: byDefault(staleFlows(percent))}
		udp := work{run: full(percent, onlyUDPPolicy, conntrack.IPv4), deletes: onlyUDP4(staleFlows(percent))}
		if percent == 0 {
			title, all.deletes, udp.deletes = "nothing stale", nil, nil
		}
		all.name, all.title = fmt.Sprintf("sweep/full-%d", percent), "flowsweep: full pass, "+title
		udp.name, udp.title = fmt.Sprintf("sweep/udp4-%d", percent), "flowsweep: IPv4 UDP alone, "+title
		list = append(list, all, udp)
	}
	return list
}

func (s *scene) run(ctx context.Context, p sweep.Plan, dryRun bool, m *sample) error {
	sw := sweep.Sweeper{Conn: s.conn, Judge: s.table, DryRun: dryRun}
	r, err := sw.Run(ctx, p)
	m.count("walks", float64(len(r.Queries)))
	m.count("returned", float64(r.Returned))
	m.count("stale", float64(r.Count(frontend.Delete)))
	m.count("deleted", float64(r.Deleted))
	for _, q := range r.Queries {
		m.count("deleting", m.Values["deleting"]+q.Deleting.Seconds())
	}
	return err
}

// choice is one way to ask the kernel about a change.
type choice struct {
	name  string
	title string
	each  bool // a walk for each Service at least
	// aims are the destinations and backends that it asks about one by one.
	aims func(ch frontend.Change) []conntrack.Filter
}

// choices are the ways that there are. Planner.Narrow knows all of them but the
// destination of backends that are lost.
var choices = []choice{
	{"backend", "backend by backend", true, func(ch frontend.Change) []conntrack.Filter {
		return lost(ch, func(f *conntrack.Filter) {})
	}},
	{"address", "by the backends' addresses", true, func(ch frontend.Change) []conntrack.Filter {
		return lost(ch, func(f *conntrack.Filter) { f.ReplySrcPort = 0 })
	}},
	{"port", "by the backends' ports", false, func(ch frontend.Change) []conntrack.Filter {
		return lost(ch, func(f *conntrack.Filter) { *f = conntrack.Filter{ReplySrcPort: f.ReplySrcPort} })
	}},
	{"frontend", "frontend by frontend", true, func(ch frontend.Change) (fs []conntrack.Filter) {
		for _, s := range ch.Suspects {
			fs = append(fs, conntrack.Filter{OrigDst: s.Key.Addr, OrigDstPort: s.Key.Ports.First})
		}
		return fs
	}},
	{"full", "the whole protocol", false, func(frontend.Change) []conntrack.Filter { return []conntrack.Filter{{}} }},
}

// lost returns a filter for each backend that a change has lost, widened, and
// none of them twice.
func lost(ch frontend.Change, widen func(*conntrack.Filter)) (fs []conntrack.Filter) {
	for _, s := range ch.Suspects {
		for _, b := range s.Lost {
			f := conntrack.Filter{ReplySrc: b.Addr(), ReplySrcPort: b.Port()}
			if widen(&f); !slices.Contains(fs, f) {
				fs = append(fs, f)
			}
		}
	}
	return fs
}

// mostWalked bounds how many flows the walks of one plan may pass over, so that
// a plan of a hundred walks is not tried on a table of a million.
const mostWalked = 5_000_000

// plans are all choices for the events that touch one protocol. They delete
// nothing, so that each finds the same table.
func plans() []work {
	var list []work
	for _, e := range events() {
		if both(e.services[0]) {
			continue
		}
		for _, c := range choices {
			w := work{
				name: "plan/" + e.name + "/" + c.name, title: e.title + ": " + c.title,
				run: func(ctx context.Context, _ int) (sample, error) { return forced(ctx, e, c) },
			}
			if n := len(e.services); n > 10 && c.each {
				w.most = mostWalked / n
			}
			list = append(list, w)
		}
	}
	return list
}

// forced measures a choice for an event, and tells whether the planner takes it.
func forced(ctx context.Context, e event, c choice) (sample, error) {
	s, err := newScene(ctx, frontend.DefaultPolicy)
	if err != nil {
		return sample{}, err
	}
	defer s.close()
	p, err := sweep.NewPlanner(ctx, s.conn, s.table)
	if err != nil {
		return sample{}, err
	}
	ch := e.change(s.table)
	scope := ch.Suspects[0].Key.Scope()
	var base conntrack.Filter // what every query of this family and protocol asks for
	for _, q := range p.Full().Queries {
		if q.Filter.Family == scope.Family && q.Filter.Proto == scope.Proto {
			base = q.Filter
		}
	}
	var plan sweep.Plan
	for _, aim := range c.aims(ch) {
		f := base
		f.OrigDst, f.OrigDstPort, f.ReplySrc, f.ReplySrcPort = aim.OrigDst, aim.OrigDstPort, aim.ReplySrc, aim.ReplySrcPort
		plan.Queries = append(plan.Queries, sweep.Query{Filter: f})
	}
	took, err := measured(func(m *sample) error { return s.run(ctx, plan, true, m) })
	if sameFilters(plan, p.Narrow(ch)) {
		took.count("chosen", 1)
	}
	return took, err
}

func sameFilters(a, b sweep.Plan) bool {
	texts := func(p sweep.Plan) string {
		var list []string
		for _, q := range p.Queries {
			list = append(list, sweep.Query{Filter: q.Filter}.String())
		}
		slices.Sort(list)
		return strings.Join(list, "\n")
	}
	return texts(a) == texts(b)
}
