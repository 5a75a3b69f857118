package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/agent/config"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/admin"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/internal/sdnotify"
	"github.com/flowsweep/flowsweep/source"
	"github.com/flowsweep/flowsweep/source/host"
	"github.com/flowsweep/flowsweep/source/kubernetes/cluster"
	"github.com/flowsweep/flowsweep/source/static"
)

// defaultConfig is read where --config is not given, if it is there.
const defaultConfig = "/etc/flowsweep/agent.yaml"

// agentFlags are the flags of run and of config print: a file, and what
// overrides it.
type agentFlags struct {
	config      string
	state       []string
	cluster     clusterFlags
	node        string
	nodeAddress []string
	dryRun      bool
	logLevel    string
	listen      string
	stateFile   string
	window      time.Duration
	netns       string
}

func (r *agentFlags) register(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&r.config, "config", "", "`FILE` of kind AgentConfiguration (default "+defaultConfig+", if it is there)")
	f.StringArrayVar(&r.state, "state", nil, "`FILE` or directory of the desired state, instead of sources.static.files (repeatable)")
	r.cluster.register(c)
	f.StringVar(&r.node, "node", "", "`NAME` that overrides host.node")
	f.StringArrayVar(&r.nodeAddress, "node-address", nil, "`IP` that overrides host.addresses (repeatable)")
	f.BoolVar(&r.dryRun, "dry-run", false, "overrides dryRun: judge, and delete nothing")
	f.StringVar(&r.logLevel, "log-level", "", "overrides log.level, a `LEVEL`: debug, info, warn or error")
	f.StringVar(&r.listen, "listen", "", "`ADDRESS:PORT` that overrides admin.listen; \"none\" for no admin endpoint")
	f.StringVar(&r.stateFile, "state-file", "", "`FILE` that overrides stateFile; \"none\" for none")
	f.DurationVar(&r.window, "window", 0, "`DURATION` that overrides settling.window")
}

// load reads the file and applies the flags.
func (r *agentFlags) load(cmd *cobra.Command) (*config.Config, error) {
	c := config.Default()
	path := r.config
	if path == "" {
		path = defaultConfig
	}
	read, err := config.Load(path)
	switch {
	case err == nil:
		c = read
	case r.config == "" && errors.Is(err, fs.ErrNotExist):
	default:
		return nil, err
	}
	set := cmd.Flags().Changed
	if r.cluster.given() {
		k := &c.Sources.Kubernetes
		k.Enabled = true
		if set("kubeconfig") {
			k.Kubeconfig = r.cluster.kubeconfig
		}
		if set("context") {
			k.Context = r.cluster.context
		}
		if read == nil {
			c.Sources.Static.Files = nil // only the default
		}
	}
	if set("state") {
		c.Sources.Static.Files = r.state
	}
	if set("node") {
		c.Host.Node = r.node
	}
	if set("node-address") {
		c.Host.Addresses = nil
		for _, s := range r.nodeAddress {
			a, err := netip.ParseAddr(s)
			if err != nil {
				return nil, usagef("--node-address: %q is not an IP address", s)
			}
			c.Host.Addresses = append(c.Host.Addresses, a)
		}
	}
	if set("dry-run") {
		c.DryRun = r.dryRun
	}
	if set("log-level") {
		if err := c.Log.Level.UnmarshalText([]byte(r.logLevel)); err != nil {
			return nil, usagef("--log-level: %q is none of debug, info, warn, error", r.logLevel)
		}
	}
	if set("listen") {
		c.Admin.Listen = netip.AddrPort{}
		if r.listen != "none" {
			if c.Admin.Listen, err = netip.ParseAddrPort(r.listen); err != nil {
				return nil, usagef("--listen: %q is no address and port such as 127.0.0.1:9633", r.listen)
			}
		}
	}
	if set("state-file") {
		if c.StateFile = r.stateFile; c.StateFile == "none" {
			c.StateFile = ""
		}
	}
	if set("window") {
		c.Settling.Window = r.window
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return c, nil
}

func newRun() *cobra.Command {
	r := &agentFlags{}
	c := &cobra.Command{
		Use:   "run",
		Short: "The agent: keep this host clean continuously",
		Long: `run takes frontends from its sources, watches what changes until it is settled,
and sweeps. What can change while it runs does so when its configuration file
changes, or on SIGHUP, which also reopens the audit file; it says what needs a
restart. SIGTERM ends it.`,
		Example: `  flowsweep run --config agent.yaml
  flowsweep run --state /etc/flowsweep/frontends.d --dry-run
  flowsweep run --kubeconfig /etc/kubernetes/kubelet.conf --node n1 --dry-run`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := r.load(cmd)
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			d := &daemon{flags: r, cmd: cmd, cfg: cfg}
			return d.run(ctx)
		},
	}
	r.register(c)
	c.Flags().StringVar(&r.netns, "netns", "", "network `NAMESPACE` to keep clean: a path, or a name under /run/netns")
	return c
}

func newConfig() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Print or check the agent's configuration"}
	r := &agentFlags{}
	show := &cobra.Command{
		Use:   "print",
		Short: "Print the effective configuration, with defaults and comments",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := r.load(cmd)
			if err != nil {
				return err
			}
			return config.Print(cmd.OutOrStdout(), cfg)
		},
	}
	r.register(show)
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Tell whether a configuration file is valid, and all that is not",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := config.Load(args[0]); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s is valid\n", args[0])
			return err
		},
	}
	c.AddCommand(show, check)
	return c
}

// agentConfig is what of the configuration the agent itself goes by.
func agentConfig(c *config.Config) agent.Config {
	return agent.Config{
		Policy: c.Sweep, Zones: c.Zones, Families: c.Families, NodePorts: c.Host.NodePortAddresses,
		DryRun: c.DryRun, Window: c.Settling.Window, FullPass: c.Settling.FullPass, WalkBudget: c.Settling.WalkBudget,
		DeletesPerSecond: c.Guards.DeletesPerSecond, ShrinkHold: c.Guards.ShrinkHold,
		ShrinkMinimum: c.Guards.ShrinkMinimum, StateFile: c.StateFile,
	}
}

// excluded returns the ranges whose interface addresses do not count: all where
// interfaces are not to be looked at.
func excluded(h config.Host) []netip.Prefix {
	if h.Interfaces {
		return h.Exclude
	}
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// daemon is the agent as a process: what surrounds it, and what of it changes
// while it runs.
type daemon struct {
	flags *agentFlags
	cmd   *cobra.Command
	cfg   *config.Config

	log    *slog.Logger
	level  *slog.LevelVar
	audit  audit
	static *static.Watcher // nil: there were no files at the start
	// byRules: there was nothing else at the start either.
	byRules bool
	host    *host.Source
	agent   *agent.Agent
	notify  *sdnotify.Notifier

	waiting atomic.Pointer[string] // what files wait for that nobody reads; nil: there are none
}

func (d *daemon) run(ctx context.Context) error {
	if err := d.checkFiles(); err != nil {
		return err
	}
	// What lives is small and grows with the cluster; what is garbage comes in
	// bursts, with lists. Collecting earlier costs less than keeping it resident.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
	d.level = &slog.LevelVar{}
	d.level.Set(d.cfg.Log.Level)
	opts := &slog.HandlerOptions{Level: d.level}
	var handler slog.Handler = slog.NewTextHandler(d.cmd.ErrOrStderr(), opts)
	if d.cfg.Log.Format == config.FormatJSON {
		handler = slog.NewJSONHandler(d.cmd.ErrOrStderr(), opts)
	}
	d.log = slog.New(handler)
	if err := d.audit.open(d.cfg.Log.AuditFile); err != nil {
		return err
	}
	defer d.audit.close()
	var err error
	if d.notify, err = sdnotify.FromEnvironment(); err != nil {
		d.log.Warn("the service manager is not told all", "err", err)
	}

	ns := inputs{netns: d.flags.netns}
	conn, err := conntrack.Dial(conntrack.Config{NetNS: ns.namespace()})
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Count(ctx); err != nil { // better now than in the first pass
		return err
	}
	gens, err := nft.Open(ns.namespace())
	if err != nil {
		d.log.Info("the ruleset's generation cannot be asked for; settling goes by time", "err", err)
		gens = nil
	} else {
		defer gens.Close()
	}
	var sources []source.Source
	metrics := admin.NewMetrics()
	observers := []agent.Observer{metrics}
	var events *cluster.Events
	node := d.cfg.Host.Node
	if d.cfg.Sources.Kubernetes.Enabled {
		c, err := clusterConfig(d.cfg)
		if err != nil {
			return err
		}
		k, e, err := d.kubernetes(c)
		if err != nil {
			return err
		}
		sources = append(sources, k)
		if e != nil {
			events, observers = e.events, append(observers, e)
		}
		node = c.Node
	}
	h := d.cfg.Host
	d.host = host.New(host.Config{
		NetNS: ns.namespace(), Include: h.Include, Exclude: excluded(h), Addresses: h.Addresses,
	})
	options := agent.Options{
		Config: agentConfig(d.cfg), Conn: conn, Ruleset: agent.NewRuleset(gens, ns.namespace()),
		Log: d.log, Observers: observers, OnFlow: d.flow, Warnings: d.warnings,
	}
	files := d.cfg.Sources.Static.Files
	byRules := len(sources) == 0 && nothingIn(files)
	d.byRules = byRules
	if !byRules {
		if len(files) > 0 {
			d.static = static.Watch(files, node)
			sources = append(sources, d.static)
		}
		sources = append(sources, d.host)
		options.Sources = sources
	}
	options.NoRules = "settling.rules is off"
	if byRules || d.cfg.Settling.Rules {
		judge, err := d.rules(ctx, &ns, byRules)
		switch {
		case err == nil:
			defer judge.Rules.Close()
			options.Rules = judge
		case byRules:
			return err
		default:
			options.NoRules = err.Error()
		}
	}
	d.agent = agent.New(options)
	server := admin.New(admin.Options{
		Agent: d.agent, Metrics: metrics, Log: d.log, Version: versionString(),
		Table: func(ctx context.Context) (int, int, error) {
			n, err := conn.Count(ctx)
			if err != nil {
				return 0, 0, err
			}
			limit, err := conn.Max(ctx)
			return n, limit, err
		},
		PProf: d.cfg.Admin.Pprof, StatusAnywhere: d.cfg.Admin.StatusAnywhere,
	})
	all, err := listen(d.cfg.Admin.Listen)
	if err != nil {
		return err
	}
	metricsOnly, err := listen(d.cfg.Admin.MetricsListen)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() {
		if err := server.Serve(ctx, all, metricsOnly); err != nil {
			d.log.Error("the admin endpoint ended", "err", err)
		}
	})
	if events != nil {
		work.Go(func() { events.Run(ctx) })
	}
	work.Go(func() { d.watchConfig(ctx) })
	work.Go(func() { d.watchdog(ctx) })
	d.log.Info("flowsweep runs", "version", versionString(), "dryRun", d.cfg.DryRun, "sources", names(sources))
	d.told(d.notify.Ready("waiting for the sources"))
	err = d.agent.Run(ctx)
	d.told(d.notify.Stopping())
	d.log.Info("flowsweep ends")
	return err
}

// checkFiles tells what is wrong with the files that the agent writes, before
// anything is done.
func (d *daemon) checkFiles() error {
	file := d.cfg.StateFile
	if file == "" {
		return nil
	}
	err := agent.CheckStateFile(file)
	if e, ok := errors.AsType[*agent.StateFileError](err); ok && !e.InUse {
		if d.cmd.Flags().Changed("state-file") {
			return fmt.Errorf("%w; did you mean --state %s? (--state-file none is for none)", err, file)
		}
		return fmt.Errorf("%w; it is named by stateFile in the configuration, did you mean sources.static.files? "+
			"(stateFile: \"\" is for none)", err)
	}
	if err != nil {
		return err
	}
	file = filepath.Clean(file)
	if audit := d.cfg.Log.AuditFile; audit != "" && filepath.Clean(audit) == file {
		return fmt.Errorf("log.auditFile and stateFile are both %s", file)
	}
	for _, f := range d.cfg.Sources.Static.Files {
		switch f = filepath.Clean(f); {
		case f == file:
			return fmt.Errorf("state file %s is one of sources.static.files", file)
		case f == filepath.Dir(file) && static.Reads(filepath.Base(file)):
			return fmt.Errorf("state file %s is in a directory of sources.static.files, where it would be read as one of them", file)
		}
	}
	return nil
}

// kubernetes returns the source of a cluster, and what writes Events there, nil
// where that is off.
func (d *daemon) kubernetes(c cluster.Config) (*cluster.Source, *serviceEvents, error) {
	c.Log = d.log
	var e *serviceEvents
	if d.cfg.Sources.Kubernetes.Events {
		e = &serviceEvents{threshold: d.cfg.Sources.Kubernetes.EventThreshold}
		c.OnProblem = e.problem
	}
	s, err := cluster.New(c)
	if err != nil {
		return nil, nil, err
	}
	if e != nil {
		e.events = cluster.NewEvents(s, d.log)
	}
	return s, e, nil
}

func names(sources []source.Source) []string {
	var list []string
	for _, s := range sources {
		list = append(list, s.Name())
	}
	return list
}

// listen opens a listener for the admin endpoint; the zero address is none.
func listen(at netip.AddrPort) (net.Listener, error) {
	if !at.IsValid() {
		return nil, nil
	}
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return nil, fmt.Errorf("admin endpoint: %w; give another address with --listen, or none", err)
	}
	return l, nil
}

func (d *daemon) told(err error) {
	if err != nil {
		d.log.Debug("service manager", "err", err)
	}
}

// flow notes each stale flow, in the log at debug and in the audit file.
func (d *daemon) flow(f *conntrack.Flow, v frontend.Verdict, dryRun bool) {
	if d.log.Enabled(context.Background(), slog.LevelDebug) {
		d.log.Debug("stale", "flow", f.String(), "verdict", v.String(), "owner", v.Owner)
	}
	if err := d.audit.write(f, v, dryRun); err != nil {
		d.log.Error("the audit file cannot be written; the agent goes on without", "err", err)
		d.audit.close()
	}
}

// watchdog tells the service manager that the agent's loop moves, and how it
// fares.
func (d *daemon) watchdog(ctx context.Context) {
	every := time.Second
	if w := d.notify.Watchdog(); w > 0 {
		every = min(every, w/2)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if d.agent.Alive() {
			d.told(d.notify.Alive())
		}
		s := d.agent.Status()
		now := fmt.Sprintf("%d frontends, %d unsettled, %d disagreements", s.Frontends, s.UnsettledTotal, len(s.Disagrees))
		if !s.Ready {
			now = "not ready: " + s.NotReady
		}
		if now != said {
			d.told(d.notify.Status(now))
			said = now
		}
	}
}

// configPoll is how often the configuration file is looked at.
const configPoll = 2 * time.Second

// watchConfig takes over what can change, on SIGHUP and when the file changes.
func (d *daemon) watchConfig(ctx context.Context) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	tick := time.NewTicker(configPoll)
	defer tick.Stop()
	path := d.flags.config
	if path == "" {
		path = defaultConfig
	}
	last, _ := os.ReadFile(path)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			d.told(d.notify.Reloading())
			last, _ = os.ReadFile(path)
			d.reload()
			if err := d.audit.open(d.cfg.Log.AuditFile); err != nil {
				d.log.Error("the audit file cannot be reopened", "err", err)
			}
			if d.static != nil {
				d.static.Reload()
			}
			d.told(d.notify.Ready("configuration read"))
		case <-tick.C:
			d.lookForFiles()
			now, err := os.ReadFile(path)
			if err != nil || string(now) == string(last) {
				continue // a file that is away for a moment changes nothing
			}
			last = now
			d.reload()
		}
	}
}

func (d *daemon) reload() {
	next, err := d.flags.load(d.cmd)
	if err != nil {
		d.log.Error("the new configuration is not valid; the old one stays in force", "err", err)
		return
	}
	live, restart := config.Changes(d.cfg, next)
	if len(restart) > 0 {
		d.log.Warn("part of the new configuration takes effect with the next start only", "fields", restart)
	}
	if len(live) == 0 {
		return
	}
	auditFile := d.cfg.Log.AuditFile
	d.cfg = config.Merge(d.cfg, next)
	d.level.Set(d.cfg.Log.Level)
	if d.cfg.Log.AuditFile != auditFile {
		if err := d.audit.open(d.cfg.Log.AuditFile); err != nil {
			d.log.Error("the audit file cannot be opened", "err", err)
		}
	}
	if d.static != nil {
		d.static.SetFiles(d.cfg.Sources.Static.Files)
	}
	d.lookForFiles()
	d.host.Update(d.cfg.Host.Include, excluded(d.cfg.Host), d.cfg.Host.Addresses)
	d.agent.Reconfigure(agentConfig(d.cfg))
	d.log.Info("configuration changed", "fields", live)
}

// lookForFiles tells, once, of files of a desired state that came after the start of
// an agent without any. They are not taken over: what is right would then change
// with the first file that somebody copies there, whole or half, and with it all
// that the agent remembers.
func (d *daemon) lookForFiles() {
	files := d.cfg.Sources.Static.Files
	said := d.waiting.Load()
	if d.static != nil || nothingIn(files) {
		if said != nil {
			d.waiting.Store(nil)
			d.log.Info("there are no files of a desired state any more that wait for a restart")
		}
		return
	}
	what := "there is a desired state in " + strings.Join(files, ", ") +
		" now, which this agent does not read, since there was none when it started"
	if d.byRules {
		what += ": it goes by the NAT rules"
	}
	what += "; restart it to have that read"
	if said == nil || *said != what {
		d.waiting.Store(&what)
		d.log.Warn(what)
	}
}

// warnings is what the status warns of besides.
func (d *daemon) warnings() []string {
	if w := d.waiting.Load(); w != nil {
		return []string{*w}
	}
	return nil
}

// audit is a file of JSON lines, one for each stale flow.
type audit struct {
	mu sync.Mutex
	w  io.WriteCloser // nil: none
}

// auditLine is what -o jsonl prints of a flow, and when.
type auditLine struct {
	Time   time.Time `json:"time"`
	DryRun bool      `json:"dryRun,omitempty"`
	row
}

// open begins to write to a file, "" for none. Where that fails it goes on with the
// one before.
func (a *audit) open(path string) error {
	var w io.WriteCloser
	if path != "" {
		path = filepath.Clean(path)
		if err := auditable(path); err != nil {
			return fmt.Errorf("audit file: %w", err)
		}
		// O_NONBLOCK: a FIFO that nobody reads is an error, and not a wait.
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY|syscall.O_NONBLOCK, 0o640)
		if err != nil {
			return fmt.Errorf("audit file: %w", err)
		}
		w = f
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.w != nil {
		_ = a.w.Close()
	}
	a.w = w
	return nil
}

// auditable tells why a file is not to be appended to: it is somebody else's.
func auditable(path string) error {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return nil // opening it tells the rest
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return nil // one that may be written alone, as a log often is
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var first struct {
		Time    time.Time
		Flow    json.RawMessage
		Verdict string
	}
	if err := json.NewDecoder(io.LimitReader(f, 1<<16)).Decode(&first); err != nil ||
		first.Time.IsZero() || first.Flow == nil || first.Verdict == "" {
		return fmt.Errorf("%s begins with something else than a flow that an agent has swept: "+
			"it is no audit file, and is not written", path)
	}
	return nil
}

func (a *audit) write(f *conntrack.Flow, v frontend.Verdict, dryRun bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.w == nil {
		return nil
	}
	b, err := json.Marshal(auditLine{time.Now().UTC(), dryRun, newRow(0, f, v)})
	if err != nil {
		return err
	}
	_, err = a.w.Write(append(b, '\n'))
	return err
}

func (a *audit) close() { _ = a.open("") }
