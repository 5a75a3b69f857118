// Package config reads and prints the agent's configuration, a YAML or JSON file
// of kind AgentConfiguration.
//
// It is read strictly: whatever is unknown, of another type or out of range is an
// error with its line, its path and what is allowed, and all of them are told at
// once. What is absent has its default. One table of fields (fields.go) is what
// reading, printing and comparing go by.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// What an AgentConfiguration says of itself.
const (
	APIVersion = "flowsweep.dev/v1alpha1"
	Kind       = "AgentConfiguration"
)

// Config is an AgentConfiguration. Its ranges are those that Print tells.
type Config struct {
	Sources  Sources
	Host     Host
	Sweep    frontend.Policy
	Zones    []uint16 // at least one
	Families []conntrack.Family
	// DryRun: judge, and delete nothing.
	DryRun    bool
	Settling  Settling
	Guards    Guards
	StateFile string // "": none
	Log       Log
	Admin     Admin
}

// Sources are where the desired state comes from; at least one must be given.
type Sources struct {
	Kubernetes Kubernetes
	Static     Static
}

// Kubernetes is the source that watches an API server.
type Kubernetes struct {
	Enabled       bool
	Kubeconfig    string // "": as cluster.Connect finds it
	Context       string // "": the current one
	HostPorts     bool
	ServiceRanges bool
	Events        bool
	// EventThreshold is how many cleanings of one Service in an hour are worth an
	// Event.
	EventThreshold int
}

// Static is the source of files.
type Static struct {
	// Files are files and directories, as static.Watch takes them.
	Files []string
}

// Host says whose point of view it is, and what counts among this host's
// addresses.
type Host struct {
	Node              string // "": none
	Interfaces        bool   // learn the addresses of the interfaces, live
	Include           []netip.Prefix
	Exclude           []netip.Prefix
	Addresses         []netip.Addr
	NodePortAddresses []netip.Prefix // frontend.Primary among them
}

// Settling is how a change is followed until no flow is stale for it.
type Settling struct {
	Window     time.Duration
	FullPass   time.Duration // 0: never
	WalkBudget float64       // share of one core
	Rules      bool          // read the NAT rules
}

// Guards bound what a mistake of a source can do.
type Guards struct {
	DeletesPerSecond int           // 0: no limit
	ShrinkHold       time.Duration // 0: no hold
	ShrinkMinimum    int
}

// Log is what is written where.
type Log struct {
	Level     slog.Level
	Format    LogFormat
	AuditFile string // "": none
}

// LogFormat is how a line of the log looks.
type LogFormat string

// The formats of package log/slog.
const (
	FormatText LogFormat = "text"
	FormatJSON LogFormat = "json"
)

// Admin is where the agent answers over HTTP. The zero AddrPort is none.
type Admin struct {
	Listen         netip.AddrPort
	MetricsListen  netip.AddrPort
	StatusAnywhere bool
	Pprof          bool
}

// Default returns the configuration of an agent that is told nothing.
func Default() *Config {
	return &Config{
		Sources: Sources{
			Kubernetes: Kubernetes{HostPorts: true, ServiceRanges: true, Events: true, EventThreshold: 60},
			Static:     Static{Files: []string{"/etc/flowsweep/frontends.d"}},
		},
		Host:     Host{Interfaces: true},
		Sweep:    frontend.DefaultPolicy,
		Zones:    []uint16{0},
		Families: []conntrack.Family{conntrack.IPv4, conntrack.IPv6},
		Settling: Settling{Window: time.Minute, FullPass: 5 * time.Minute, WalkBudget: 0.1, Rules: true},
		Guards: Guards{
			DeletesPerSecond: 20000,
			ShrinkHold:       time.Minute,
			ShrinkMinimum:    10,
		},
		StateFile: "/var/lib/flowsweep/state.json",
		Log:       Log{Level: slog.LevelInfo, Format: FormatText},
		Admin:     Admin{Listen: netip.MustParseAddrPort("127.0.0.1:9633")},
	}
}

// Error is something in a configuration that is not valid.
type Error struct {
	File string // as given to Decode; "" where it was not read from one
	Line int    // from 1; 0 where it is about what is absent
	Path string // the field: "settling.window"; "" where it is about the whole
	Err  error  // what is wrong, and what is allowed
}

// Error returns all that is known, as "agent.yaml:7: settling.window: what is wrong".
func (e *Error) Error() string {
	var s string
	if e.File != "" {
		s = e.File
		if e.Line > 0 {
			s = fmt.Sprintf("%s:%d", s, e.Line)
		}
		s += ": "
	}
	if e.Path != "" {
		s += e.Path + ": "
	}
	return s + e.Err.Error()
}

// Unwrap returns what is wrong.
func (e *Error) Unwrap() error { return e.Err }

// check finds what single fields do not show.
func (c *Config) check(fail func(path string, err error)) {
	s, a := &c.Settling, &c.Admin
	if s.FullPass > 0 && s.Window >= s.FullPass {
		fail("settling.window", fmt.Errorf("must be shorter than settling.fullPass (%s), "+
			"or full passes follow each other while anything is unsettled", formatDuration(s.FullPass)))
	}
	if a.Listen.IsValid() && !a.Listen.Addr().Unmap().IsLoopback() && !a.StatusAnywhere {
		fail("admin.listen", fmt.Errorf("%s is not a loopback address, and status leaves the host there; "+
			"set admin.statusAnywhere if that is meant, or give metrics alone an address with admin.metricsListen",
			a.Listen.Addr()))
	}
	if a.MetricsListen.IsValid() && a.MetricsListen == a.Listen {
		fail("admin.metricsListen", errors.New("is admin.listen, which serves metrics anyway; give another address or none"))
	}
	if a.Pprof && !a.Listen.IsValid() {
		fail("admin.pprof", errors.New("is served on admin.listen, which is none; give it an address"))
	}
}

// Validate tells whether the configuration is one that Decode could have read,
// for one that was changed since. The errors are of type *[Error], joined.
func (c *Config) Validate() error {
	var errs []error
	for _, f := range fields {
		if err := f.check(c); err != nil {
			errs = append(errs, &Error{Path: f.path, Err: err})
		}
	}
	c.check(func(path string, err error) { errs = append(errs, &Error{Path: path, Err: err}) })
	return errors.Join(errs...)
}

// Changes returns the paths of the fields that differ, in the order of Print:
// those that a running agent can take over, and those that need a restart.
//
// A restart is needed for what the judgement is built on (sweep, zones, families,
// host.node: with each of them flows that were right may be wrong all at once, for
// which no change of a frontend is the cause), for what is open (listeners, the
// state file, the interfaces' netlink socket), and for log.format, so that one
// stream has one format.
func Changes(before, after *Config) (live, restart []string) {
	for _, f := range fields {
		switch {
		case f.equal(before, after):
		case f.live:
			live = append(live, f.path)
		default:
			restart = append(restart, f.path)
		}
	}
	return live, restart
}

// Merge returns what a running agent goes by once it is told of a new
// configuration: next, but with running's values where those need a restart.
func Merge(running, next *Config) *Config {
	c := *next
	for _, f := range fields {
		if !f.live {
			f.take(&c, running)
		}
	}
	return &c
}
