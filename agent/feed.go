package agent

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

// feed is the sink of one source.
type feed struct {
	a    *Agent
	name string

	// Below: under a.mu.
	complete  bool
	updated   time.Time
	fault     error
	frontends map[string]int // by unit, in force
	host      source.Host
	held      *hold
}

// hold keeps back a list that lacks so much that it may be a mistake: an
// apiserver that came back empty, a file cut short.
type hold struct {
	since time.Time
	units map[string][]frontend.Frontend
	had   int
	has   int
}

func (f *feed) unit(name string) string { return f.name + "/" + name }

func total(m map[string]int) (n int) {
	for _, c := range m {
		n += c
	}
	return n
}

// Replace implements source.Sink.
func (f *feed) Replace(units map[string][]frontend.Frontend) {
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.stir()
	f.updated = a.now()
	has := 0
	for _, fs := range units {
		has += len(fs)
	}
	had := total(f.frontends)
	short := f.complete && 2*has < had && had-has >= a.cfg.ShrinkMinimum && a.cfg.ShrinkHold > 0
	switch {
	case short && f.held == nil:
		f.held = &hold{since: a.now(), units: units, had: had, has: has}
		a.log.Warn("a source has lost more than half of its frontends; held for confirmation",
			"source", f.name, "had", had, "has", has, "hold", a.cfg.ShrinkHold)
		return
	case short:
		f.held.units, f.held.has = units, has
		return
	case f.held != nil:
		a.log.Info("a source has its frontends back", "source", f.name, "frontends", has)
		f.held = nil
	}
	f.replace(units)
}

// replace puts a whole list in force.
func (f *feed) replace(units map[string][]frontend.Frontend) {
	for _, unit := range slices.Sorted(maps.Keys(units)) {
		f.set(unit, units[unit])
	}
	for _, unit := range slices.Sorted(maps.Keys(f.frontends)) {
		if _, ok := units[unit]; !ok {
			f.set(unit, nil)
		}
	}
	f.done()
}

// confirm puts a held list in force once its time is over. It returns when that
// is, the zero time where nothing is held.
func (f *feed) confirm(now time.Time) time.Time {
	if f.held == nil {
		return time.Time{}
	}
	at := f.held.since.Add(f.a.cfg.ShrinkHold)
	if at.After(now) {
		return at
	}
	f.a.log.Warn("the loss of frontends is confirmed by time", "source", f.name, "had", f.held.had, "has", f.held.has)
	units := f.held.units
	f.held = nil
	f.replace(units)
	return time.Time{}
}

// Set implements source.Sink.
func (f *feed) Set(unit string, fs []frontend.Frontend) {
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.stir()
	f.updated = a.now()
	if f.held != nil {
		if fs == nil {
			delete(f.held.units, unit)
		} else {
			f.held.units[unit] = fs
		}
		return
	}
	f.set(unit, fs)
}

func (f *feed) set(unit string, fs []frontend.Frontend) {
	if len(fs) == 0 {
		delete(f.frontends, unit)
		fs = nil
	} else {
		f.frontends[unit] = len(fs)
	}
	f.a.changed(f.a.table.Set(f.unit(unit), fs))
}

// Host implements source.Sink.
func (f *feed) Host(h source.Host) {
	f.a.mu.Lock()
	defer f.a.mu.Unlock()
	defer f.a.stir()
	f.updated = f.a.now()
	f.host = h
	f.a.setHost()
	if f.name == hostSource {
		f.done()
	}
}

// hostSource is the name of the source that knows nothing but addresses.
const hostSource = "host"

func (f *feed) done() {
	if !f.complete {
		f.complete = true
		f.a.log.Info("source complete", "source", f.name, "frontends", total(f.frontends))
	}
}

// Fault implements source.Sink. The same fault is logged once.
func (f *feed) Fault(err error) {
	f.a.mu.Lock()
	defer f.a.mu.Unlock()
	switch {
	case err != nil && (f.fault == nil || f.fault.Error() != err.Error()):
		f.a.log.Warn("source has a fault; what it delivered before stays in force", "source", f.name, "err", err)
	case err == nil && f.fault != nil:
		f.a.log.Info("source is well again", "source", f.name)
	}
	f.fault = err
}

func (f *feed) status() SourceStatus {
	s := SourceStatus{Name: f.name, Complete: f.complete, Updated: f.updated, Frontends: total(f.frontends)}
	if f.fault != nil {
		s.Fault = f.fault.Error()
	}
	if f.held != nil {
		s.Held = fmt.Sprintf("since %s: had %d frontends, has %d", f.held.since.Format(time.RFC3339), f.held.had, f.held.has)
	}
	return s
}
