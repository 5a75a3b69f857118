package agent

import (
	"slices"
	"time"

	"github.com/flowsweep/flowsweep/frontend"
)

// Status is what the agent knows of itself, for people and machines.
type Status struct {
	Time       time.Time      `json:"time"` // of this Status
	Started    time.Time      `json:"started"`
	Ready      bool           `json:"ready"`
	NotReady   string         `json:"notReady,omitempty"` // why
	DryRun     bool           `json:"dryRun"`
	ByRules    bool           `json:"byRules,omitempty"` // there are no sources
	Frontends  int            `json:"frontends"`
	Tombstones int            `json:"tombstones"`
	Sources    []SourceStatus `json:"sources"`
	Settling   string         `json:"settling"`  // by "rules", "generation" or "time"
	Unsettled  []Unsettled    `json:"unsettled"` // 1000 at most
	// RulesFault tells why what the NAT rules do cannot be told, or why they are not
	// asked.
	RulesFault string `json:"rulesFault,omitempty"`
	// Warnings tell of what the agent can do nothing about.
	Warnings []string `json:"warnings,omitempty"`
	// UnsettledTotal is how many there are.
	UnsettledTotal int             `json:"unsettledTotal"`
	Disagrees      []*Disagreement `json:"rulesetDisagrees"`
	LastFull       time.Time       `json:"lastFullPass,omitzero"`
	LastPass       *PassStatus     `json:"lastPass,omitempty"`
	Failures       int             `json:"failuresInARow"`
	StateFile      string          `json:"stateFileError,omitempty"`
}

// SourceStatus is the state of one source.
type SourceStatus struct {
	Name      string    `json:"name"`
	Complete  bool      `json:"complete"`
	Updated   time.Time `json:"updated,omitzero"`
	Frontends int       `json:"frontends"`
	Fault     string    `json:"fault,omitempty"`
	Held      string    `json:"held,omitempty"`
}

// Unsettled is a frontend that is being watched.
type Unsettled struct {
	Frontend string    `json:"frontend"`
	Owner    string    `json:"owner,omitempty"`
	Causes   []string  `json:"causes"`
	Changed  time.Time `json:"changed"`
	Opened   time.Time `json:"windowOpened"`
}

// PassStatus is the outcome of a pass.
type PassStatus struct {
	Start      time.Time `json:"start"`
	Full       bool      `json:"full"`
	Returned   int       `json:"kernelReturned"`
	Judged     int       `json:"judged"`
	Stale      int       `json:"stale"`
	Deleted    int       `json:"deleted"`
	Gone       int       `json:"gone"`
	Busy       int       `json:"busy"`
	Failed     int       `json:"failed"`
	DurationMs float64   `json:"durationMs"`
	Error      string    `json:"error,omitempty"`
}

// mostUnsettled bounds the list of unsettled frontends in a Status.
const mostUnsettled = 1000

// Status returns the present state. It waits for nothing that asks the kernel.
func (a *Agent) Status() Status {
	frontends, tombstones := a.table.Len()
	var warnings []string
	if a.warns != nil {
		warnings = a.warns()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s := Status{
		Time: a.now(), Started: a.started, Ready: a.ready, DryRun: a.cfg.DryRun, ByRules: a.byRules, RulesFault: a.untold, Warnings: slices.Concat(a.warnings, warnings),
		Frontends: frontends, Tombstones: tombstones,
		Settling: "time", LastFull: a.lastFull, Failures: a.failures,
		Unsettled: []Unsettled{}, Disagrees: []*Disagreement{},
	}
	if a.trusted {
		s.Settling = "generation"
	}
	if a.trusted && a.told {
		s.Settling = "rules"
	}
	if a.unasked != "" {
		s.RulesFault = a.unasked
	}
	if a.saved.err != nil {
		s.StateFile = a.saved.err.Error()
	}
	for _, f := range a.feeds {
		s.Sources = append(s.Sources, f.status())
		if !f.complete && s.NotReady == "" {
			s.NotReady = "source " + f.name + " has not delivered its first full list"
			if f.fault != nil {
				s.NotReady += ": " + f.fault.Error()
			}
		}
	}
	if !a.ready && s.NotReady == "" {
		s.NotReady = "the first pass is not done"
		if a.lastPass != nil && a.lastPass.Err != nil {
			s.NotReady = "the first pass failed: " + a.lastPass.Err.Error()
		}
	}
	for k, x := range a.watches.keys {
		if x.settled {
			continue
		}
		s.UnsettledTotal++
		if k == everything { // the first window of the agent's life
			s.Unsettled = append(s.Unsettled, Unsettled{Frontend: "*", Causes: []string{"start"}, Changed: x.changed, Opened: x.opened})
			continue
		}
		if len(s.Unsettled) >= mostUnsettled {
			continue
		}
		u := Unsettled{Frontend: k.String(), Changed: x.changed, Opened: x.opened}
		for _, sp := range x.change.Suspects {
			u.Owner = sp.Owner
			u.Causes = append(u.Causes, sp.Cause.String())
		}
		if len(x.change.Hosts) > 0 {
			u.Frontend, u.Causes = x.change.Hosts[0].String(), []string{"host-address"}
		}
		s.Unsettled = append(s.Unsettled, u)
	}
	slices.SortFunc(s.Unsettled, func(x, y Unsettled) int { return x.Changed.Compare(y.Changed) })
	for _, d := range a.disagrees {
		c := *d
		s.Disagrees = append(s.Disagrees, &c)
	}
	slices.SortFunc(s.Disagrees, func(x, y *Disagreement) int { return x.Since.Compare(y.Since) })
	if p := a.lastPass; p != nil {
		s.LastPass = &PassStatus{
			Start: p.Start, Full: p.Full, Returned: p.Report.Returned, Judged: p.Report.Judged,
			Stale: p.Report.Count(frontend.Delete), Deleted: p.Report.Deleted, Gone: p.Report.Gone,
			Busy: p.Report.Busy, Failed: p.Report.Failed,
			DurationMs: float64(p.Report.Duration.Microseconds()) / 1000,
		}
		if p.Err != nil {
			s.LastPass.Error = p.Err.Error()
		}
	}
	return s
}

// Alive tells whether the loop has turned of late.
func (a *Agent) Alive() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now().Sub(a.beat) < 6*idle
}
