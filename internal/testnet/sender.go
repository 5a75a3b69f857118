//go:build linux

package testnet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// patience is how long a datagram may stay unanswered before it counts as lost.
// A round trip takes well under a millisecond, unless the machine is busy.
const patience = 500 * time.Millisecond

// Sender sends datagrams to an [Echo] server at a steady pace, all from one
// source port and so all in one flow, and records what becomes of each.
type Sender struct {
	conn *net.UDPConn
	stop chan struct{}
	work sync.WaitGroup
	once sync.Once

	mu      sync.Mutex
	records []Record
	changed chan struct{} // closed and replaced whenever the fields here change
	ended   bool
	err     error // what ended the sender before Close did
}

// Record is the fate of one datagram.
type Record struct {
	Sent time.Time
	// From is the server that answered, the zero AddrPort where none has.
	From netip.AddrPort
	// RTT is how long the answer took.
	RTT time.Duration
}

// Tally counts datagrams. Sent is the sum of the others.
type Tally struct {
	Sent    int
	Lost    int // no answer within half a second
	Pending int // no answer yet
	From    map[netip.AddrPort]int
}

// Period is what became of the datagrams that were sent in a stretch of time.
type Period struct {
	Start time.Time
	Tally
}

// Send starts a sender in a namespace: a datagram at once and one each interval,
// until Close. It keeps a record of each, about 64 bytes. The zero from lets the
// kernel choose.
func Send(ns *NS, from, to netip.AddrPort, interval time.Duration) (*Sender, error) {
	if interval <= 0 {
		return nil, fmt.Errorf("testnet: send to %s: interval %s is not positive", to, interval)
	}
	conn, err := ns.DialUDP(from, to)
	if err != nil {
		return nil, err
	}
	s := &Sender{conn: conn, stop: make(chan struct{}), changed: make(chan struct{})}
	s.work.Go(func() { s.end(s.send(interval)) })
	s.work.Go(func() { s.end(s.receive()) })
	return s, nil
}

// Local returns the address and port that the sender sends from.
func (s *Sender) Local() netip.AddrPort { return localAddr(s.conn) }

// Records returns what is known of each datagram, in the order of sending.
func (s *Sender) Records() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.records)
}

// Timeline returns the datagrams sent so far, counted by periods of a length
// that is positive. The first period starts with the first datagram; periods
// without any are left out.
func (s *Sender) Timeline(length time.Duration) []Period {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var periods []Period
	for _, r := range s.records {
		start := s.records[0].Sent.Add(r.Sent.Sub(s.records[0].Sent).Truncate(length))
		if n := len(periods); n == 0 || periods[n-1].Start != start {
			periods = append(periods, Period{Start: start})
		}
		periods[len(periods)-1].add(r, now)
	}
	return periods
}

// Sample waits until the fate of the next n datagrams is known and returns it.
func (s *Sender) Sample(ctx context.Context, n int) (Tally, error) {
	s.mu.Lock()
	start := len(s.records)
	s.mu.Unlock()
	var t Tally
	err := s.wait(ctx, func() bool {
		if len(s.records) < start+n {
			return false
		}
		t = Tally{}
		for _, r := range s.records[start : start+n] {
			t.add(r, time.Now())
		}
		return t.Pending == 0
	})
	return t, err
}

// Await waits for a datagram, sent after the call, that a server answers, and
// returns its record. The zero AddrPort stands for any server.
func (s *Sender) Await(ctx context.Context, from netip.AddrPort) (Record, error) {
	s.mu.Lock()
	start := len(s.records)
	s.mu.Unlock()
	var found Record
	err := s.wait(ctx, func() bool {
		i := slices.IndexFunc(s.records[start:], func(r Record) bool {
			return r.From.IsValid() && (r.From == from || !from.IsValid())
		})
		if i < 0 {
			return false
		}
		found = s.records[start+i]
		return true
	})
	return found, err
}

// Close stops sending. Records and Timeline stay readable. It returns what
// stopped the sender before, if anything did; lost datagrams do not. Closing
// twice does no harm.
func (s *Sender) Close() error {
	s.once.Do(func() {
		close(s.stop)
		_ = s.conn.Close()
		s.work.Wait()
	})
	return s.err
}

func (s *Sender) send(interval time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		var seq int
		s.update(func() {
			seq = len(s.records)
			s.records = append(s.records, Record{Sent: time.Now()})
		})
		payload := binary.BigEndian.AppendUint64(nil, uint64(seq))
		_, err := s.conn.Write(payload)
		if err != nil && lost(err) {
			// That may have been an ICMP error for an earlier datagram, which
			// the kernel reports in place of sending this one.
			_, err = s.conn.Write(payload)
		}
		if err != nil && !lost(err) {
			return unlessClosed(err)
		}
		select {
		case <-tick.C:
		case <-s.stop:
			return nil
		}
	}
}

func (s *Sender) receive() error {
	buf := make([]byte, 512)
	for {
		n, err := s.conn.Read(buf)
		if err != nil {
			if lost(err) {
				continue
			}
			return unlessClosed(err)
		}
		now := time.Now()
		if n < 8 {
			return fmt.Errorf("answer of %d bytes is not from an echo server", n)
		}
		from, err := netip.ParseAddrPort(string(buf[8:n]))
		if err != nil {
			return fmt.Errorf("answer is not from an echo server: %w", err)
		}
		s.update(func() {
			if seq := binary.BigEndian.Uint64(buf); seq < uint64(len(s.records)) {
				r := &s.records[seq]
				r.From, r.RTT = from, now.Sub(r.Sent)
			}
		})
	}
}

// end notes that one of the two goroutines has ended.
func (s *Sender) end(err error) {
	s.update(func() {
		s.ended = true
		if err != nil && s.err == nil {
			s.err = fmt.Errorf("testnet: sender: %w", err)
		}
	})
}

// update changes the fields under the lock, and lets those in wait look again.
func (s *Sender) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	close(s.changed)
	s.changed = make(chan struct{})
}

// wait returns once cond, called under the lock, is true. It is asked again
// with each datagram sent or answered: that a datagram is lost shows with the
// next one.
func (s *Sender) wait(ctx context.Context, cond func() bool) error {
	for {
		s.mu.Lock()
		ok, ended, err, changed := cond(), s.ended, s.err, s.changed
		s.mu.Unlock()
		switch {
		case ok:
			return nil
		case err != nil:
			return err
		case ended:
			return errors.New("testnet: sender is closed")
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (t *Tally) add(r Record, now time.Time) {
	t.Sent++
	switch {
	case r.From.IsValid():
		if t.From == nil {
			t.From = make(map[netip.AddrPort]int)
		}
		t.From[r.From]++
	case now.Sub(r.Sent) < patience:
		t.Pending++
	default:
		t.Lost++
	}
}

// String says the tally in words: "10 sent: 8 from 198.51.100.2:53, 2 lost".
func (t Tally) String() string {
	s := fmt.Sprintf("%d sent", t.Sent)
	sep := ": "
	part := func(n int, what string) {
		if n > 0 {
			s += fmt.Sprintf("%s%d %s", sep, n, what)
			sep = ", "
		}
	}
	for _, from := range slices.SortedFunc(maps.Keys(t.From), netip.AddrPort.Compare) {
		part(t.From[from], "from "+from.String())
	}
	part(t.Lost, "lost")
	part(t.Pending, "pending")
	return s
}
