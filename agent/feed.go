package agent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

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
	said      string               // of the fault, last
	saidWords map[string]time.Time // when what was said of it, by its words
	units     map[string]size      // in force
	host      source.Host
	ranges    []netip.Prefix
	held      *hold
}

// size is how much there is to lose. Backends count by themselves: an apiserver
// that comes back empty may still have told of services when its slices are gone.
type size struct{ frontends, backends int }

// String returns "12 frontends and 30 backends".
func (s size) String() string {
	return fmt.Sprintf("%d frontends and %d backends", s.frontends, s.backends)
}

func (s *size) add(o size) { s.frontends, s.backends = s.frontends+o.frontends, s.backends+o.backends }

func sizeOf(fs []frontend.Frontend) size {
	s := size{frontends: len(fs)}
	for i := range fs {
		s.backends += fs[i].Valid.Len()
	}
	return s
}

// short tells whether so much less is there than before that it may be a mistake.
func (s size) short(had size, minimum int) bool {
	lost := func(has, had int) bool { return 2*has < had && had-has >= minimum }
	return lost(s.frontends, had.frontends) || lost(s.backends, had.backends)
}

// hold keeps back a list that lacks so much that it may be a mistake: an
// apiserver that came back empty, a file cut short.
//
// What it has counts all the same, besides what is in force: a backend that is new
// in it is right, and the proxy sends flows there.
type hold struct {
	since   time.Time
	units   map[string][]frontend.Frontend // in force once the hold ends
	besides map[string]bool                // units that count now
	had     size
	has     size
}

func (f *feed) unit(name string) string { return f.name + "/" + name }

func (f *feed) heldUnit(name string) string { return f.name + " held/" + name }

func (f *feed) size() (sum size) {
	for _, s := range f.units {
		sum.add(s)
	}
	return sum
}

// Replace implements source.Sink.
func (f *feed) Replace(units map[string][]frontend.Frontend) {
	a := f.a
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.stir()
	f.updated = a.now()
	var has size
	for _, fs := range units {
		has.add(sizeOf(fs))
	}
	had := f.size()
	short := f.complete && a.cfg.ShrinkHold > 0 && has.short(had, a.cfg.ShrinkMinimum)
	switch {
	case short && f.held == nil:
		f.held = &hold{since: a.now(), units: units, besides: map[string]bool{}, had: had, has: has}
		a.log.Warn("a source has lost more than half of its frontends or backends; held for confirmation",
			"source", f.name, "had", had, "has", has, "hold", a.cfg.ShrinkHold)
		f.countHeld()
	case short:
		f.held.units, f.held.has = units, has
		f.countHeld()
	case f.held != nil:
		a.log.Info("a source has its frontends back", "source", f.name, "frontends", has.frontends, "backends", has.backends)
		f.release(units)
	default:
		f.replace(units)
	}
}

// countHeld lets all that a held list has count.
func (f *feed) countHeld() {
	for _, unit := range slices.Sorted(maps.Keys(f.held.units)) {
		f.besides(unit, f.held.units[unit])
	}
}

func (f *feed) besides(unit string, fs []frontend.Frontend) {
	f.held.besides[unit] = true
	f.a.changed(f.a.table.Set(f.heldUnit(unit), slices.Clone(fs)))
}

// release ends a hold with what is in force from now on.
func (f *feed) release(units map[string][]frontend.Frontend) {
	besides := slices.Sorted(maps.Keys(f.held.besides))
	f.held = nil
	f.replace(units)
	for _, unit := range besides {
		f.a.changed(f.a.table.Set(f.heldUnit(unit), nil))
	}
}

// replace puts a whole list in force.
func (f *feed) replace(units map[string][]frontend.Frontend) {
	for _, unit := range slices.Sorted(maps.Keys(units)) {
		f.set(unit, units[unit])
	}
	for _, unit := range slices.Sorted(maps.Keys(f.units)) {
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
	f.release(f.held.units)
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
		f.besides(unit, fs)
		return // what comes back piece by piece is looked at when the hold ends
	}
	f.set(unit, fs)
}

func (f *feed) set(unit string, fs []frontend.Frontend) {
	if len(fs) == 0 {
		delete(f.units, unit)
		fs = nil
	} else {
		f.units[unit] = sizeOf(fs)
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

// ServiceRanges implements source.Sink.
func (f *feed) ServiceRanges(ranges []netip.Prefix) {
	f.a.mu.Lock()
	defer f.a.mu.Unlock()
	defer f.a.stir()
	f.ranges = ranges
	f.a.setServiceRanges()
}

// hostSource is the name of the source that knows nothing but addresses.
const hostSource = "host"

func (f *feed) done() {
	if !f.complete {
		f.complete = true
		f.a.log.Info("source complete", "source", f.name, "frontends", f.size().frontends)
	}
}

// faultPause is the shortest time between two log lines on a fault of a source that
// differ in numbers alone: ports, say, which change with every attempt. mostFaults
// is how many others there are in that time.
const (
	faultPause = time.Minute
	mostFaults = 8
)

// Fault implements source.Sink.
func (f *feed) Fault(err error) {
	f.a.mu.Lock()
	defer f.a.mu.Unlock()
	if err == nil && f.fault != nil {
		f.a.log.Info("source is well again", "source", f.name)
		f.a.doubts.unsee() // what looked wrong meanwhile is looked at anew
		f.said, f.saidWords = "", nil
	}
	f.fault = err
	if next := f.sayFault(f.a.now()); !next.IsZero() {
		f.a.stir() // the loop says it then
	}
}

// sayFault logs the fault, unless that was done, and returns when to try again
// where it is too early.
func (f *feed) sayFault(now time.Time) time.Time {
	if f.fault == nil || f.fault.Error() == f.said {
		return time.Time{}
	}
	for words, at := range f.saidWords {
		if now.Sub(at) >= faultPause {
			delete(f.saidWords, words)
		}
	}
	text := f.fault.Error()
	words := strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, text)
	if at, ok := f.saidWords[words]; ok {
		return at.Add(faultPause)
	}
	if len(f.saidWords) >= mostFaults {
		return slices.MinFunc(slices.Collect(maps.Values(f.saidWords)), time.Time.Compare).Add(faultPause)
	}
	if f.saidWords == nil {
		f.saidWords = map[string]time.Time{}
	}
	f.said, f.saidWords[words] = text, now
	f.a.log.Warn("source has a fault; what it delivered before stays in force", "source", f.name, "err", f.fault)
	return time.Time{}
}

func (f *feed) status() SourceStatus {
	s := SourceStatus{Name: f.name, Complete: f.complete, Updated: f.updated, Frontends: f.size().frontends}
	if f.fault != nil {
		s.Fault = f.fault.Error()
	}
	if f.held != nil {
		s.Held = fmt.Sprintf("since %s: had %s, has %s", f.held.since.Format(time.RFC3339), f.held.had, f.held.has)
	}
	return s
}
