package admin

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	tableInterval = 10 * time.Second
	tableTimeout  = 2 * time.Second
	// tableAge is how old an answer may be and still be shown.
	tableAge = 3 * tableInterval
)

// TableStats returns how many flows the table holds and may hold; a limit of 0 is
// unknown.
type TableStats func(ctx context.Context) (entries, limit int, err error)

// table asks for the table's size in the background, so that a scrape never waits
// for the kernel.
type table struct {
	stats TableStats // nil: unknown for ever
	log   *slog.Logger

	mu      sync.Mutex
	entries int
	limit   int
	at      time.Time // zero: never told
}

// run asks until ctx ends. Where stats never returns, neither does run.
func (t *table) run(ctx context.Context) {
	if t.stats == nil {
		return
	}
	tick := time.NewTicker(tableInterval)
	defer tick.Stop()
	failed := false
	for {
		err := t.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err != nil && !failed:
			t.log.Warn("the size of the table is unknown", "err", err)
		case err == nil && failed:
			t.log.Info("the size of the table is known again")
		}
		failed = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (t *table) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tableTimeout)
	defer cancel()
	entries, limit, err := t.stats(ctx)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entries, t.limit, t.at = entries, limit, time.Now()
	return nil
}

// last returns the last answer, unless it is too old to be true.
func (t *table) last() (entries, limit int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.entries, t.limit, !t.at.IsZero() && time.Since(t.at) <= tableAge
}
