package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

// A fault is logged when it begins and when it is over, and in between once a
// minute where its words change; the status always has the last one.
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
