package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

// A fault is logged when it begins and when it is over, and in between where it is
// another one, or once a minute where only numbers in it change; the status always
// has the last one.
func TestFaultLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		a := New(Options{
			Conn: newWorld(true), Ruleset: newWorld(true), Config: holding(), Sources: []source.Source{&simSource{}},
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		const fault, well = "source has a fault", "source is well again"
		for i, step := range []struct {
			after time.Duration
			fault string
			want  string // in the log, "" for nothing
		}{
			{0, "", ""},
			{0, "refused", fault},
			{time.Second, "refused", ""},
			{time.Hour, "refused", ""},
			{time.Second, "refused by port 1", fault},
			{time.Second, "refused by port 2", ""},
			{58 * time.Second, "refused by port 3", ""},
			{time.Second, "refused by port 4", fault},
			{time.Second, "forbidden", fault},
			{time.Second, "refused by port 5", ""},
			{time.Second, "forbidden", ""},
			{time.Second, "", well},
			{time.Second, "", ""},
			{time.Second, "refused", fault},
		} {
			time.Sleep(step.after)
			log.Reset()
			var err error
			if step.fault != "" {
				err = errors.New(step.fault)
			}
			a.feeds[0].Fault(err)
			lines := 0
			if step.want != "" {
				lines = 1
			}
			got := log.String()
			if strings.Count(got, "\n") != lines || !strings.Contains(got, step.want) || lines > 0 && !strings.Contains(got, step.fault) {
				t.Errorf("step %d: log %q, want %q", i, got, step.want)
			}
			if got := a.Status().Sources[0].Fault; got != step.fault {
				t.Errorf("step %d: fault %q, want %q", i, got, step.fault)
			}
		}
	})
}

// A fault that stands is told of, if not at once: a file whose next line is wrong
// does not say so again.
func TestFaultIsToldLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := newWorld(true)
		src := &simSource{w: w, sinks: make(chan source.Sink, 1)}
		a := New(Options{
			Conn: w, Ruleset: w, Config: holding(), Sources: []source.Source{src}, Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { _ = a.Run(ctx) })
		sink := <-src.sinks
		sink.Fault(errors.New("dns.yaml:7: wrong"))
		sink.Fault(errors.New("dns.yaml:9: wrong"))
		time.Sleep(faultPause + time.Second)
		for i := range 2 * mostFaults { // and what changes without end is not
			sink.Fault(errors.New("wrong: " + strings.Repeat("x", i)))
		}
		time.Sleep(10 * time.Minute)
		cancel()
		work.Wait()
		for line, want := range map[string]int{"dns.yaml:7: wrong": 1, "dns.yaml:9: wrong": 1, "source has a fault": mostFaults + 2} {
			if n := strings.Count(log.String(), line); n != want {
				t.Errorf("%q is logged %d times, want %d", line, n, want)
			}
		}
		if last := strings.Repeat("x", 2*mostFaults-1); !strings.Contains(log.String(), last) {
			t.Error("the fault that stands is not told of")
		}
	})
}
