package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/ruleset"
)

// stateVersion is the version of the state file. Another one is ignored.
const stateVersion = 1

// stateKind is what a state file begins with.
const stateKind = "flowsweep-state"

// stateFile is what survives a restart: which frontends were ours. Those that
// are gone by the time that all sources are complete become tombstones, as they
// would have without the restart.
type stateFile struct {
	Kind       string       `json:"kind"`
	Version    int          `json:"version"`
	Saved      time.Time    `json:"saved"`
	Frontends  []savedEntry `json:"frontends"`
	Tombstones []savedEntry `json:"tombstones"`
	// Seen are destinations that rules have translated.
	Seen []savedDestination `json:"seen,omitempty"`
}

type savedDestination struct {
	Proto uint8          `json:"proto"`
	Addr  netip.AddrPort `json:"addr"`
}

type savedEntry struct {
	Addr  netip.Addr `json:"addr"` // unspecified: every address of this host
	Proto uint8      `json:"proto"`
	First uint16     `json:"first"`
	Last  uint16     `json:"last"`
	Owner string     `json:"owner"`
	Kind  string     `json:"kind"`
	Sweep string     `json:"sweep,omitempty"` // the frontend's own policy
}

func (e savedEntry) tombstone() (frontend.Tombstone, bool) {
	kind, ok := frontend.ParseKind(e.Kind)
	ok = ok && e.Addr.IsValid() && e.First > 0 && e.First <= e.Last && conntrack.HasPorts(e.Proto)
	t := frontend.Tombstone{
		Key:   frontend.Key{Addr: e.Addr, Proto: e.Proto, Ports: frontend.Ports{First: e.First, Last: e.Last}},
		Owner: e.Owner, Kind: kind,
	}
	if e.Sweep != "" {
		own, known := frontend.ParseSweep(e.Sweep)
		t.Sweep, ok = &own, ok && known
	}
	return t, ok
}

func saveEntry(t frontend.Tombstone) savedEntry {
	e := savedEntry{
		Addr: t.Key.Addr, Proto: t.Key.Proto, First: t.Key.Ports.First, Last: t.Key.Ports.Last,
		Owner: t.Owner, Kind: t.Kind.String(),
	}
	if t.Sweep != nil {
		e.Sweep = t.Sweep.String()
	}
	return e
}

// saver writes the state file now and then. Fields are under Agent.mu.
type saver struct {
	file   statePath
	dirty  bool
	last   time.Time
	err    error // of the last attempt
	known  []savedEntry
	graves []savedEntry
}

// savePause is the shortest time between two writes.
const savePause = 5 * time.Second

// restore reads the state file. A file that is none, or another agent's, is an
// error. Whatever else is wrong with it is a warning: the agent then knows of no
// frontends that went while it was away.
func (a *Agent) restore() error {
	if a.cfg.StateFile == "" {
		return nil
	}
	a.saved.file.path = a.cfg.StateFile
	if err := a.saved.file.claim(); isStateFileError(err) {
		return err
	}
	b, err := os.ReadFile(a.cfg.StateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var s stateFile
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err == nil && s.Version != stateVersion {
		err = fmt.Errorf("version %d, want %d", s.Version, stateVersion)
	}
	if err != nil {
		a.log.Warn("the state file is ignored: frontends that vanished while the agent was away stay unknown",
			"file", a.cfg.StateFile, "err", err)
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.saved.known, a.saved.graves = s.Frontends, s.Tombstones
	if a.byRules {
		for _, d := range s.Seen {
			if d.Addr.IsValid() && conntrack.HasPorts(d.Proto) {
				a.exact.See(ruleset.Destination(d))
			}
		}
	}
	a.log.Info("state file read", "file", a.cfg.StateFile, "frontends", len(s.Frontends), "tombstones", len(s.Tombstones))
	return nil
}

// bury makes tombstones of the frontends known from an earlier run that are not
// there any more. Where more than half are missing that may be a mistake, as
// with a source that comes back short, and none is buried.
func (a *Agent) bury() {
	var tombs []frontend.Tombstone
	for _, e := range a.saved.graves {
		if t, ok := e.tombstone(); ok {
			tombs = append(tombs, t)
		}
	}
	var missing, shared []frontend.Tombstone
	for _, e := range a.saved.known {
		switch t, ok := e.tombstone(); {
		case !ok:
		case a.table.Has(t.Key):
			shared = append(shared, t) // by another one, perhaps, that is left
		default:
			missing = append(missing, t)
		}
	}
	if 2*len(missing) > len(a.saved.known) && len(missing) >= a.cfg.ShrinkMinimum && a.cfg.ShrinkHold > 0 {
		a.log.Warn("more than half of the frontends known before the restart are gone; "+
			"what is translated for them is left alone", "known", len(a.saved.known), "missing", len(missing))
		a.doubtUntil = a.now().Add(a.cfg.ShrinkHold)
		a.setServiceRanges()
	} else {
		tombs = append(append(tombs, missing...), shared...)
	}
	a.saved.known, a.saved.graves = nil, nil
	if len(tombs) > 0 {
		ch := a.table.Bury(tombs...)
		if n := len(ch.Suspects); n > 0 {
			a.log.Info("frontends that vanished before this start are swept", "count", n)
		}
		a.changed(ch)
	}
}

func (a *Agent) saveSometimes() {
	a.mu.Lock()
	due := a.ready && a.saved.dirty && a.now().Sub(a.saved.last) >= savePause
	a.mu.Unlock()
	if due {
		a.save()
	}
}

// save writes the state file. Until the first pass is done the old one is worth
// more.
func (a *Agent) save() {
	a.mu.Lock()
	file := a.cfg.StateFile
	if file == "" || !a.ready || !a.saved.dirty {
		a.mu.Unlock()
		return
	}
	a.saved.dirty, a.saved.last = false, a.now()
	s := stateFile{Kind: stateKind, Version: stateVersion, Saved: a.now(), Frontends: []savedEntry{}, Tombstones: []savedEntry{}}
	for _, t := range a.table.Frontends() {
		s.Frontends = append(s.Frontends, saveEntry(t))
	}
	for _, t := range a.table.Tombstones() {
		s.Tombstones = append(s.Tombstones, saveEntry(t))
	}
	a.mu.Unlock()
	if a.byRules {
		for _, d := range a.exact.Seen() {
			s.Seen = append(s.Seen, savedDestination(d))
		}
	}
	err := a.saved.file.write(&s)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil:
		if a.saved.err == nil {
			a.log.Error("the state file cannot be written: after a restart, frontends that vanished are not known",
				"file", file, "err", err)
		}
		a.saved.dirty = true // again after a pause
	case a.saved.err != nil:
		a.log.Info("the state file is written again", "file", file)
	}
	a.saved.err = err
}
