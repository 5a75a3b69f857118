package host

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

// Run delivers this host's addresses to the sink until ctx ends, and then
// returns nil. Everything else that goes wrong is told with Fault and tried
// again.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	d := &delivery{s: s, sink: sink}
	for failures := 0; ; {
		good, err := s.follow(ctx, d)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end of ctx is how Run ends when nothing is amiss
		}
		if good {
			failures = 0
		}
		failures++
		d.fault(err)
		s.rest(ctx, d, s.times.backoff(failures, rand.Float64()))
	}
}

// rest waits between two attempts, as always with an ear for Update.
func (s *Source) rest(ctx context.Context, d *delivery, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.updated:
			d.deliver()
		case <-timer.C:
			return
		}
	}
}

// follow reads the addresses, and again after each change, until something
// fails. good tells that it could at least once.
func (s *Source) follow(ctx context.Context, d *delivery) (good bool, err error) {
	// Changes are listened for before the first read, so that none falls in
	// between.
	l, err := dial(s.netns, s.rcvbuf)
	if err != nil {
		return false, err
	}
	changed, lost := make(chan struct{}, 1), make(chan error, 1)
	var watching sync.WaitGroup
	watching.Go(func() { lost <- l.watch(changed) })
	defer watching.Wait()
	defer l.close()
	for ctx.Err() == nil {
		start := time.Now()
		own, err := l.addresses()
		if err != nil {
			return good, err
		}
		good = true
		d.hold(own)
		if err := s.await(ctx, d, changed, lost, s.times.pause(time.Since(start))); err != nil {
			return good, err
		}
	}
	return good, ctx.Err()
}

// await returns when the addresses are to be read again.
func (s *Source) await(ctx context.Context, d *delivery, changed <-chan struct{}, lost <-chan error,
	pause time.Duration,
) error {
	resync := time.NewTimer(s.times.resync)
	defer resync.Stop()
	var due <-chan time.Time // never, until something has changed
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-lost:
			return err
		case <-s.updated:
			d.deliver()
		case <-changed:
			if due == nil {
				due = time.After(pause)
			}
		case <-due:
			return nil
		case <-resync.C:
			return nil
		}
	}
}
