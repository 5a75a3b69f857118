package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/sweep"
)

// The demo's addresses, all reserved for documentation.
var (
	demoVIP      = netip.MustParseAddrPort("203.0.113.10:53")   // the service
	demoNodePort = netip.MustParseAddrPort("192.0.2.1:30125")   // the node's port
	demoB1       = netip.MustParseAddrPort("198.51.100.11:53")  // dies
	demoB2       = netip.MustParseAddrPort("198.51.100.12:53")  // stays
	demoB3       = netip.MustParseAddrPort("198.51.100.13:125") // the node port's only one
	demoB4       = netip.MustParseAddrPort("198.51.100.14:125") // comes instead
)

const (
	demoPace = 20 * time.Millisecond
	// demoProof is how many datagrams must be lost, or answered, to call it so:
	// half a second.
	demoProof = 25
)

func runDemo(ctx context.Context, out io.Writer) error {
	code, done, err := testnet.Reexec()
	switch {
	case err != nil:
		return err
	case done && code != 0:
		return &exitError{code, nil} // the process inside has said why
	case done:
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	d := demo{ctx: ctx, out: out, start: time.Now(), servers: map[netip.AddrPort]*testnet.Server{}}
	defer d.close()
	if err := d.run(); err != nil {
		return &exitError{exitFailed, fmt.Errorf("demo: %w", err)}
	}
	return nil
}

// demo tells the story. Every claim that it prints has been measured; the first
// that does not hold ends it.
type demo struct {
	ctx     context.Context
	out     io.Writer
	start   time.Time
	net     *testnet.Star
	conn    *conntrack.Conn
	table   *frontend.Table
	servers map[netip.AddrPort]*testnet.Server
	closers []io.Closer
}

func (d *demo) close() {
	for i := len(d.closers) - 1; i >= 0; i-- {
		_ = d.closers[i].Close()
	}
}

func (d *demo) keep(c io.Closer) { d.closers = append(d.closers, c) }

func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.out, "%6.2f s  %s\n", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) run() error {
	if err := d.build(); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "A client, a node with nftables NAT and backends, each in its own namespace:\n\n"+
		"  client 192.0.2.2 ---- node 192.0.2.1 ---- backends 198.51.100.11 to .14\n\n"+
		"  service dns    %s/UDP -> %s, %s\n"+
		"  node port ntp  %s/UDP -> %s\n\n", demoVIP, demoB1, demoB2, demoNodePort, demoB3)
	if err := d.rules(map[netip.AddrPort][]netip.AddrPort{demoVIP: {demoB1, demoB2}, demoNodePort: {demoB3}}); err != nil {
		return err
	}

	// The rules take the backends in turn, so the first sender gets the first.
	a, err := d.send(demoVIP, demoB1)
	if err != nil {
		return err
	}
	b, err := d.send(demoVIP, demoB2)
	if err != nil {
		return err
	}
	c, err := d.send(demoNodePort, demoB3)
	if err != nil {
		return err
	}
	d.say("three senders, a datagram every %s each, all answered:", demoPace)
	d.say("  A %s -> dns, answered by %s", a.Local(), demoB1)
	d.say("  B %s -> dns, answered by %s", b.Local(), demoB2)
	d.say("  C %s -> ntp, answered by %s", c.Local(), demoB3)
	healthy, err := d.flow(b, demoVIP)
	if err != nil {
		return err
	}

	if err := d.die(demoB1); err != nil {
		return err
	}
	if err := d.rules(map[netip.AddrPort][]netip.AddrPort{demoVIP: {demoB2}, demoNodePort: {demoB3}}); err != nil {
		return err
	}
	d.say("backend %s dies, and the NAT rules no longer name it", demoB1.Addr())
	if err := d.expectLoss(a, "A"); err != nil {
		return err
	}
	if err := d.sweep("delete backend-gone", demoVIP, demoB1); err != nil {
		return err
	}
	if err := d.expectAnswers(a, "A", demoB2); err != nil {
		return err
	}
	now, err := d.flow(b, demoVIP)
	if err != nil {
		return err
	}
	if now.ID != healthy.ID || now.Reply != healthy.Reply {
		return fmt.Errorf("the healthy flow of B was touched: %s became %s", healthy, now)
	}
	if t, err := b.Sample(d.ctx, 1); err != nil || t.Lost > 0 || lostOf(b) > 0 {
		return fmt.Errorf("sender B lost %d datagrams (%w)", lostOf(b), err)
	}
	d.say("B's flow was not touched: the same conntrack entry, no datagram lost")

	if err := d.die(demoB3); err != nil {
		return err
	}
	if err := d.rules(map[netip.AddrPort][]netip.AddrPort{demoVIP: {demoB2}, demoNodePort: nil}); err != nil {
		return err
	}
	d.say("the last backend of the node port, %s, goes", demoB3.Addr())
	if err := d.expectLoss(c, "C"); err != nil {
		return err
	}
	if err := d.sweep("delete no-backends", demoNodePort, demoB3); err != nil {
		return err
	}
	if err := d.untranslated(c); err != nil {
		return err
	}
	if err := d.serve(demoB4); err != nil {
		return err
	}
	if err := d.rules(map[netip.AddrPort][]netip.AddrPort{demoVIP: {demoB2}, demoNodePort: {demoB4}}); err != nil {
		return err
	}
	d.say("a new backend comes: %s", demoB4.Addr())
	if err := d.expectLoss(c, "C"); err != nil {
		return err
	}
	if err := d.sweep("delete untranslated", demoNodePort, demoNodePort); err != nil {
		return err
	}
	if err := d.expectAnswers(c, "C", demoB4); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nWhat each sender got, a tenth of a second a character: the backend's last digit,\n"+
		"or \".\" where datagrams were lost.\n\n  A %s\n  B %s\n  C %s\n\n"+
		"Without flowsweep the dots would go on for as long as A and C send.\n", strip(a), strip(b), strip(c))
	return nil
}

func (d *demo) build() error {
	var err error
	d.net, err = testnet.NewStar(
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backends", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}},
	)
	if err != nil {
		return err
	}
	d.keep(d.net)
	for _, b := range []netip.AddrPort{demoB1, demoB2, demoB3} {
		if err := d.serve(b); err != nil {
			return err
		}
	}
	d.conn, err = conntrack.Dial(conntrack.Config{NetNS: d.net.Router.Path()})
	if err != nil {
		return err
	}
	d.keep(d.conn)
	d.table = frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	d.table.SetHost(frontend.Host{Listed: []netip.Addr{demoNodePort.Addr()}})
	return nil
}

func (d *demo) serve(b netip.AddrPort) error {
	ns := d.net.Leaf("backends")
	if err := ns.AddAddr("eth0", netip.PrefixFrom(b.Addr(), 24)); err != nil {
		return err
	}
	s, err := testnet.Echo(ns, b)
	if err != nil {
		return err
	}
	d.keep(s)
	d.servers[b] = s
	return nil
}

// die takes a backend away as a dead machine goes: nothing answers any more.
func (d *demo) die(b netip.AddrPort) error {
	return errors.Join(d.servers[b].Close(),
		d.net.Leaf("backends").DelAddr("eth0", netip.PrefixFrom(b.Addr(), 24)))
}

// rules is the service proxy: it writes the NAT rules, and tells the table.
func (d *demo) rules(services map[netip.AddrPort][]netip.AddrPort) error {
	var forwards []testnet.Forward
	for dst, backends := range services {
		forwards = append(forwards, testnet.Forward{Proto: conntrack.UDP, Dst: dst, Backends: backends})
		f := frontend.Frontend{
			Owner: "dns", Proto: conntrack.UDP, Addr: dst.Addr(), Ports: frontend.Port(dst.Port()),
			Valid: frontend.NewBackends(backends...), Usable: len(backends),
		}
		if dst == demoNodePort {
			f.Owner, f.Kind, f.Addr, f.Family = "ntp", frontend.NodePort, netip.Addr{}, conntrack.IPv4
		}
		d.table.Set(f.Owner, []frontend.Frontend{f})
	}
	return d.net.Router.SetNAT(forwards...)
}

func (d *demo) send(to, backend netip.AddrPort) (*testnet.Sender, error) {
	s, err := testnet.Send(d.net.Leaf("client"), netip.AddrPort{}, to, demoPace)
	if err != nil {
		return nil, err
	}
	d.keep(s)
	if _, err := s.Await(d.ctx, backend); err != nil {
		return nil, fmt.Errorf("no answer from %s: %w", backend, err)
	}
	return s, nil
}

// flow returns the sender's entry in the node's conntrack table.
func (d *demo) flow(s *testnet.Sender, to netip.AddrPort) (*conntrack.Flow, error) {
	f := conntrack.Flow{Family: conntrack.IPv4, Proto: conntrack.UDP}
	f.Orig = conntrack.Tuple{Src: s.Local().Addr(), SrcPort: s.Local().Port(), Dst: to.Addr(), DstPort: to.Port()}
	f.Reply = conntrack.Tuple{Src: to.Addr(), SrcPort: to.Port(), Dst: f.Orig.Src, DstPort: f.Orig.SrcPort}
	now, ok, err := d.conn.Get(d.ctx, f)
	if err == nil && !ok {
		err = fmt.Errorf("sender %s has no flow", s.Local())
	}
	return &now, err
}

func (d *demo) expectLoss(s *testnet.Sender, name string) error {
	t, err := s.Sample(d.ctx, demoProof)
	if err != nil {
		return err
	}
	if t.Lost != t.Sent {
		return fmt.Errorf("sender %s should lose every datagram, but %d of %d were answered", name, t.Sent-t.Lost, t.Sent)
	}
	d.say("  %s loses every datagram: %d sent, none answered", name, t.Sent)
	return nil
}

func (d *demo) expectAnswers(s *testnet.Sender, name string, backend netip.AddrPort) error {
	t, err := s.Sample(d.ctx, demoProof)
	if err != nil {
		return err
	}
	if t.From[backend] != t.Sent {
		return fmt.Errorf("sender %s is not repaired: %s", name, t)
	}
	d.say("  %s is answered again, by %s: %d of %d", name, backend, t.From[backend], t.Sent)
	return nil
}

// sweep runs flowsweep once and checks that it found one flow and no other.
func (d *demo) sweep(verdict string, to, from netip.AddrPort) error {
	p, err := sweep.NewPlanner(d.ctx, d.conn, d.table)
	if err != nil {
		return err
	}
	var found []string
	s := sweep.Sweeper{Conn: d.conn, Judge: d.table}
	s.OnFlow = func(f *conntrack.Flow, v frontend.Verdict) {
		if v.Action != frontend.Delete {
			return
		}
		goes := "untranslated"
		if f.Translated() {
			goes = "goes to " + netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort).String()
		}
		d.say("flowsweep: %s", v)
		d.say("  %s -> %s, %s", netip.AddrPortFrom(f.Orig.Src, f.Orig.SrcPort), destination(f), goes)
		found = append(found, v.String()+netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort).String()+
			netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort).String())
	}
	r, err := s.Run(d.ctx, p.Full())
	if err != nil {
		return err
	}
	if want := verdict + to.String() + from.String(); len(found) != 1 || found[0] != want || r.Deleted != 1 {
		return fmt.Errorf("flowsweep should have deleted one flow (%s to %s) and deleted %d: %v", verdict, to, r.Deleted, found)
	}
	d.say("flowsweep: judged %s, deleted 1, in %.1f ms", plural(r.Judged, "flow"), millis(r.Duration))
	return nil
}

// untranslated waits until the sender's next datagram has made a new flow.
func (d *demo) untranslated(s *testnet.Sender) error {
	for {
		f, err := d.flow(s, demoNodePort)
		if err == nil && !f.Translated() {
			break
		}
		if err == nil {
			return fmt.Errorf("sender C is translated again: %s", f)
		}
		select {
		case <-d.ctx.Done():
			return err
		case <-time.After(demoPace):
		}
	}
	d.say("  nothing to translate C to: its new flow is left alone")
	return nil
}

func lostOf(s *testnet.Sender) (n int) {
	for _, p := range s.Timeline(time.Second) {
		n += p.Lost
	}
	return n
}

// strip draws what a sender got over time.
func strip(s *testnet.Sender) string {
	var b strings.Builder
	for _, p := range s.Timeline(100 * time.Millisecond) {
		c := "."
		for from := range p.From {
			a := from.Addr().String()
			c = a[len(a)-1:]
		}
		if p.Sent == p.Pending {
			break
		}
		b.WriteString(c)
	}
	return b.String()
}
