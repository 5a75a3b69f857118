//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/sweep"
)

// The stream: datagrams through a router's NAT to an echo and back.
const (
	streamRate  = 10_000 // a second
	streamPhase = 6 * time.Second
)

// load is what goes on beside the stream.
type load struct {
	name, title string
	work        string // run again and again by a child in the router's namespace; "": nothing
}

var loads = []load{
	{"latency/none", "nothing beside it", ""},
	{"latency/passes", "full passes without a pause", "load/passes"},
	{"latency/raw", "raw dumps of everything without a pause", "load/raw"},
	{"latency/spin", "a program that computes without a pause", "load/spin"},
}

// loadWorks are run until they are stopped.
func loadWorks() []work {
	return []work{
		{name: "load/passes", run: func(ctx context.Context, _ int) (sample, error) {
			s, err := newScene(ctx, frontend.DefaultPolicy)
			if err != nil {
				return sample{}, err
			}
			defer s.close()
			started()
			for ctx.Err() == nil {
				plan, err := s.full(ctx)
				if err != nil {
					break
				}
				if _, err = (&sweep.Sweeper{Conn: s.conn, Judge: s.table}).Run(ctx, plan); err != nil && ctx.Err() == nil {
					return sample{}, err
				}
			}
			return sample{}, nil
		}},
		{name: "load/raw", run: func(ctx context.Context, _ int) (sample, error) {
			r, err := dialRaw()
			if err != nil {
				return sample{}, err
			}
			defer r.close()
			started()
			for ctx.Err() == nil {
				if _, err := r.dump(conntrack.Filter{}); err != nil {
					return sample{}, err
				}
			}
			return sample{}, nil
		}},
		{name: "load/spin", run: func(ctx context.Context, _ int) (sample, error) {
			started()
			for x := 0; ctx.Err() == nil; x++ {
				_ = mix(x)
			}
			return sample{}, nil
		}},
	}
}

// started tells the parent that the load is on.
func started() { _, _ = os.Stdout.WriteString("\n") }

// measureLatency sends the stream through a router whose table holds size flows,
// runs times for each load, in turn.
func measureLatency(ctx context.Context, o *options, size int) ([]figures, error) {
	star, err := testnet.NewStar(
		testnet.Leaf{Name: "client", Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		testnet.Leaf{Name: "backend", Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}},
	)
	if err != nil {
		return nil, err
	}
	defer star.Close()
	vip, to := netip.MustParseAddrPort("203.0.113.10:53"), netip.MustParseAddrPort("198.51.100.2:5353")
	err = star.Router.SetNAT(testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: vip, Backends: []netip.AddrPort{to}})
	if err != nil {
		return nil, err
	}
	conn, err := conntrack.Dial(conntrack.Config{NetNS: star.Router.Path()})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	o.progress("latency: filling a router's table with %d flows", size)
	if err := fill(ctx, conn, size, nil); err != nil {
		return nil, err
	}
	list := make([]figures, len(loads))
	for run := range o.runs {
		for i, l := range loads {
			o.progress("latency: run %d of %d: %s", run+1, o.runs, l.title)
			s, err := phase(ctx, o, star, vip, to, l)
			if err != nil {
				return nil, err
			}
			list[i].Work, list[i].Size = l.name, size
			list[i].Samples = append(list[i].Samples, s)
		}
	}
	return list, nil
}

// phase is one stretch of the stream beside one load.
func phase(ctx context.Context, o *options, star *testnet.Star, vip, to netip.AddrPort, l load) (sample, error) {
	if l.work != "" {
		stop, err := startLoad(ctx, o, star.Router, l.work)
		if err != nil {
			return sample{}, err
		}
		defer stop()
	}
	st, err := newStream(star, vip, to)
	if err != nil {
		return sample{}, err
	}
	defer st.close()
	if err := st.run(ctx); err != nil {
		return sample{}, err
	}
	return st.sample()
}

// startLoad runs a work in a child until stop is called.
func startLoad(ctx context.Context, o *options, ns *testnet.NS, name string) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	cmd := childCommand(ctx, o, name, 0)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = ns.Do(cmd.Start)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	stop = func() {
		cancel()
		_ = cmd.Wait() // ended by a signal
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		stop()
		return nil, fmt.Errorf("%s ended at its start", name)
	}
	return stop, nil
}

// stream is a sender, an echo behind the router's NAT, and what they clock.
//
//	send(2) ──▶ router, NAT ──▶ echo's socket ──▶ router ──▶ sender's socket
//	  t0                         t1, by the kernel             t2, by the kernel
//
// The kernel stamps a packet as it comes in from the device (SO_TIMESTAMPNS), so
// that t1-t0 is the forwarding itself: veth runs it on the sender's core, within
// send. The answer waits for the echo to be scheduled as well.
type stream struct {
	client, echo int // sockets
	sent         []time.Time
	forward      []time.Duration // t1-t0 by datagram
	round        []time.Duration // t2-t0 by datagram; 0: lost
	late         []time.Duration // that the sender was behind its schedule
	done         atomic.Bool
}

func newStream(star *testnet.Star, vip, to netip.AddrPort) (st *stream, err error) {
	n := int(streamRate * streamPhase.Seconds())
	st = &stream{
		client: -1, echo: -1,
		sent: make([]time.Time, n), forward: make([]time.Duration, n), round: make([]time.Duration, n),
		late: make([]time.Duration, n),
	}
	socket := func(fd *int, bind, connect netip.AddrPort) func() error {
		return func() (err error) {
			if *fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			tv := unix.NsecToTimeval(int64(200 * time.Millisecond))
			err = errors.Join(
				unix.SetsockoptInt(*fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
				unix.SetsockoptTimeval(*fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv),
			)
			// Room for all that comes while the receiver waits for a core. Without root it
			// stays as it is.
			_ = unix.SetsockoptInt(*fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
			if bind.IsValid() {
				err = errors.Join(err, unix.Bind(*fd, sockaddr(bind)))
			}
			if connect.IsValid() {
				err = errors.Join(err, unix.Connect(*fd, sockaddr(connect)))
			}
			return err
		}
	}
	err = errors.Join(
		star.Leaf("client").Do(socket(&st.client, netip.AddrPort{}, vip)),
		star.Leaf("backend").Do(socket(&st.echo, to, netip.AddrPort{})),
	)
	if err != nil {
		st.close()
	}
	return st, err
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func (st *stream) close() {
	for _, fd := range []int{st.client, st.echo} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// run sends all datagrams on schedule, and waits for the last answers.
func (st *stream) run(ctx context.Context) error {
	ended := make(chan error, 2)
	go func() { ended <- st.receive(st.echo, st.forward, true) }()
	go func() { ended <- st.receive(st.client, st.round, false) }()
	err := st.send(ctx)
	st.done.Store(true) // the receivers look at it whenever nothing comes
	return errors.Join(err, <-ended, <-ended)
}

func (st *stream) send(ctx context.Context) error {
	// Timers of this thread fire on time, not up to 50 µs late.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return err
	}
	payload := make([]byte, 8)
	start := time.Now()
	for i := range st.sent {
		if i%1000 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		due := start.Add(time.Duration(i) * time.Second / streamRate)
		if wait := time.Until(due); wait > 0 {
			ts := unix.NsecToTimespec(int64(wait))
			_ = unix.Nanosleep(&ts, nil) // woken early, it sends early
		}
		binary.BigEndian.PutUint64(payload, uint64(i))
		now := time.Now()
		st.sent[i], st.late[i] = now, now.Sub(due)
		if _, err := unix.Write(st.client, payload); err != nil && err != unix.EINTR {
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// receive notes when each datagram came in, until the stream is over and nothing
// comes any more.
func (st *stream) receive(fd int, took []time.Duration, answer bool) error {
	buf, oob := make([]byte, 64), make([]byte, 128)
	for {
		n, oobn, _, from, err := unix.Recvmsg(fd, buf, oob, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if st.done.Load() {
				return nil
			}
			continue
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		}
		at, err := stamp(oob[:oobn])
		if err != nil {
			return err
		}
		if answer {
			if err := unix.Sendto(fd, buf[:n], 0, from); err != nil {
				return fmt.Errorf("answer: %w", err)
			}
		}
		if i := binary.BigEndian.Uint64(buf); n == 8 && i < uint64(len(took)) {
			took[i] = at.Sub(st.sent[i].Round(0)) // both by the wall clock
		}
	}
}

// stamp reads SCM_TIMESTAMPNS.
func stamp(oob []byte) (time.Time, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return time.Time{}, err
	}
	for _, m := range msgs {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= 16 {
			sec, nsec := binary.NativeEndian.Uint64(m.Data), binary.NativeEndian.Uint64(m.Data[8:])
			return time.Unix(int64(sec), int64(nsec)), nil
		}
	}
	return time.Time{}, errors.New("the kernel did not stamp a datagram")
}

// sample sums a phase up: percentiles in seconds.
func (st *stream) sample() (sample, error) {
	s := sample{Seconds: streamPhase.Seconds()}
	lost := 0
	round := slices.DeleteFunc(st.round, func(d time.Duration) bool {
		if d == 0 {
			lost++
		}
		return d == 0
	})
	forward := slices.DeleteFunc(st.forward, func(d time.Duration) bool { return d == 0 })
	if len(round) == 0 || len(forward) == 0 {
		return s, errors.New("no datagram of the stream arrived")
	}
	for _, x := range []struct {
		name string
		of   []time.Duration
	}{{"forward", forward}, {"round trip", round}, {"late", st.late}} {
		slices.Sort(x.of)
		for _, p := range []struct {
			name  string
			share float64
		}{{"50", 0.5}, {"99", 0.99}, {"99.9", 0.999}, {"max", 1}} {
			s.count(x.name+" "+p.name, x.of[int(math.Ceil(p.share*float64(len(x.of))))-1].Seconds())
		}
	}
	s.count("lost", float64(lost))
	return s, nil
}
