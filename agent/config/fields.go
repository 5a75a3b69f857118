package config

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/strictyaml"
)

// field is what is known of one field.
type field struct {
	path    string
	doc     string
	allowed string
	live    bool // it can change while the agent runs
	list    bool

	decode func(r strictyaml.Report, n *yaml.Node, c *Config)
	print  func(c *Config) []string // a scalar, or the elements of a list
	equal  func(a, b *Config) bool
	take   func(into, from *Config)
	check  func(c *Config) error
}

// sections are the comments on what has fields of its own.
var sections = map[string]string{
	"sources":            "Where the desired state comes from. A source that is not named here is off. Without any, it is the NAT rules of the network namespace.",
	"sources.kubernetes": "An API server's Services, EndpointSlices, this host's Node and, where wanted, Pods and ServiceCIDRs.",
	"sources.static":     "Files: FrontendList and Kubernetes objects, mixed at will.",
	"host":               "This host's own addresses, which node ports, host ports and \"*\" stand for.",
	"sweep":              "What may be deleted of a protocol's stale flows: all, those that were never answered, or none.",
	"settling":           "How a change is followed until no flow is stale for it.",
	"guards":             "What bounds the damage that a wrong desired state can do.",
	"log":                "The log goes to standard error.",
	"admin":              "HTTP: /metrics, /livez, /readyz, /statusz.",
}

const (
	live    = true
	restart = false
)

// fields are all fields, in the order in which they are printed.
var fields = []field{
	one("sources.kubernetes.enabled", restart, boolean,
		"Watch the API server.",
		func(c *Config) *bool { return &c.Sources.Kubernetes.Enabled }),
	one("sources.kubernetes.kubeconfig", restart, optional(text("a path")),
		"How to reach it. Without a file, a Pod uses the token of its ServiceAccount, and what is no "+
			"Pod does as kubectl does.",
		func(c *Config) *string { return &c.Sources.Kubernetes.Kubeconfig }),
	one("sources.kubernetes.context", restart, optional(text("a name")),
		"The file's context, if it is not the current one.",
		func(c *Config) *string { return &c.Sources.Kubernetes.Context }),
	one("sources.kubernetes.hostPorts", restart, boolean,
		"Watch this node's Pods, whose host ports are frontends.",
		func(c *Config) *bool { return &c.Sources.Kubernetes.HostPorts }),
	one("sources.kubernetes.serviceRanges", restart, boolean,
		"Watch ServiceCIDRs: what is translated for an address in them that is no Service's is stale.",
		func(c *Config) *bool { return &c.Sources.Kubernetes.ServiceRanges }),
	one("sources.kubernetes.events", restart, boolean,
		"Write Events about Services whose rules disagree with them, which are cleaned too often, or "+
			"whose annotation is not valid.",
		func(c *Config) *bool { return &c.Sources.Kubernetes.Events }),
	one("sources.kubernetes.eventThreshold", restart, integer(1, 1000000),
		"Cleanings of one Service in an hour, more of which are worth an Event.",
		func(c *Config) *int { return &c.Sources.Kubernetes.EventThreshold }),
	many("sources.static.files", live, 0, text("a path"),
		"Files, and directories that stand for every *.yaml, *.yml and *.json file in them. They are "+
			"read again when they change.",
		func(c *Config) *[]string { return &c.Sources.Static.Files }),

	one("host.node", restart, optional(text("a name")),
		"The Node whose point of view it is: its object tells the addresses, and local endpoints and "+
			"host ports are those on it. With an API server and without a name here, it is NODE_NAME of "+
			"the environment, or the host name.",
		func(c *Config) *string { return &c.Host.Node }),
	one("host.interfaces", restart, boolean,
		"Learn the addresses of this host's interfaces, and their changes, from the kernel.",
		func(c *Config) *bool { return &c.Host.Interfaces }),
	many("host.include", live, 0, cidr,
		"Of the interfaces' addresses, only those in these ranges count; all where there is no range.",
		func(c *Config) *[]netip.Prefix { return &c.Host.Include }),
	many("host.exclude", live, 0, cidr,
		"Of the interfaces' addresses, those in these ranges do not count.",
		func(c *Config) *[]netip.Prefix { return &c.Host.Exclude }),
	many("host.addresses", live, 0, address,
		"Further addresses of this host.",
		func(c *Config) *[]netip.Addr { return &c.Host.Addresses }),
	many("host.nodePortAddresses", live, 0, nodePortRange,
		"Ranges in which the proxy serves node ports, as kube-proxy's nodePortAddresses: primary is the "+
			"Node's first address of each family, localhost loopback, all every address. "+
			"Without any, the proxy is taken to serve them on the first address of each family that the Node object lists, and perhaps on others.",
		func(c *Config) *[]netip.Prefix { return &c.Host.NodePortAddresses }),

	one("sweep.udp", restart, sweepWord,
		"UDP, whose senders do not notice that a backend is dead.",
		func(c *Config) *frontend.Sweep { return &c.Sweep.UDP }),
	one("sweep.tcp", restart, sweepWord,
		"TCP. \"all\" cuts established connections.",
		func(c *Config) *frontend.Sweep { return &c.Sweep.TCP }),
	one("sweep.sctp", restart, sweepWord,
		"SCTP, likewise.",
		func(c *Config) *frontend.Sweep { return &c.Sweep.SCTP }),

	many("zones", restart, 1, integer[uint16](0, 65535),
		"Conntrack zones that are judged; flows of others are left alone.",
		func(c *Config) *[]uint16 { return &c.Zones }),
	many("families", restart, 1, words([]string{"ipv4", "ipv6"}, conntrack.IPv4, conntrack.IPv6),
		"Address families that are judged.",
		func(c *Config) *[]conntrack.Family { return &c.Families }),
	one("dryRun", live, boolean,
		"Judge and report, and delete nothing.",
		func(c *Config) *bool { return &c.DryRun }),

	one("settling.window", live, duration(5*time.Second, time.Hour),
		"A changed frontend is settled when no flow was stale for it for so long.",
		func(c *Config) *time.Duration { return &c.Settling.Window }),
	one("settling.fullPass", live, orZero(duration(30*time.Second, 24*time.Hour), "never"),
		"Time between full passes, which repair what no change told of.",
		func(c *Config) *time.Duration { return &c.Settling.FullPass }),
	one("settling.walkBudget", live, number(0.01, 1),
		"Share of one core, over a minute, that walks of the table may take. The first one after a "+
			"change does not wait for it.",
		func(c *Config) *float64 { return &c.Settling.WalkBudget }),
	one("settling.rules", restart, boolean,
		"Read the NAT rules, so that it is known whether the proxy has caught up: nothing is deleted that "+
			"it would make again. Without, that goes by its commits and by time.",
		func(c *Config) *bool { return &c.Settling.Rules }),

	one("guards.deletesPerSecond", live, orZero(integer(1, 1000000), "no limit"),
		"Flows that are deleted in a second, at most.",
		func(c *Config) *int { return &c.Guards.DeletesPerSecond }),
	one("guards.shrinkHold", live, orZero(duration(time.Second, time.Hour), "no hold"),
		"A source that loses more than half of its frontends at once is not believed until it has "+
			"stayed so for this time.",
		func(c *Config) *time.Duration { return &c.Guards.ShrinkHold }),
	one("guards.shrinkMinimum", live, integer(1, 1000000),
		"One that loses fewer frontends than these is believed at once.",
		func(c *Config) *int { return &c.Guards.ShrinkMinimum }),

	one("stateFile", restart, optional(text("a path")),
		"Keeps which frontends there were and which are gone over a restart. Without it, what goes "+
			"while the agent does not run is not cleaned.",
		func(c *Config) *string { return &c.StateFile }),

	one("log.level", live, words([]string{"debug", "info", "warn", "error"},
		slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError),
		"The least that is logged.",
		func(c *Config) *slog.Level { return &c.Log.Level }),
	one("log.format", restart, words([]string{"text", "json"}, FormatText, FormatJSON),
		"key=value, or a JSON object a line.",
		func(c *Config) *LogFormat { return &c.Log.Format }),
	one("log.auditFile", live, optional(text("a path")),
		"Each deleted flow is appended to it as a line of JSON.",
		func(c *Config) *string { return &c.Log.AuditFile }),

	one("admin.listen", restart, optional(addrPort),
		"Serves all of it.",
		func(c *Config) *netip.AddrPort { return &c.Admin.Listen }),
	one("admin.metricsListen", restart, optional(addrPort),
		"Serves /metrics, /livez and /readyz alone, and may be reached from elsewhere.",
		func(c *Config) *netip.AddrPort { return &c.Admin.MetricsListen }),
	one("admin.statusAnywhere", restart, boolean,
		"Allow admin.listen to be other than a loopback address. Status, and pprof if it is on, leave "+
			"the host then.",
		func(c *Config) *bool { return &c.Admin.StatusAnywhere }),
	one("admin.pprof", restart, boolean,
		"Serve /debug/pprof/ too.",
		func(c *Config) *bool { return &c.Admin.Pprof }),
}

// one describes a field with one value.
func one[T comparable](path string, live bool, k kind[T], doc string, at func(*Config) *T) field {
	return field{
		path: path, doc: doc, allowed: k.allowed, live: live,
		decode: func(r strictyaml.Report, n *yaml.Node, c *Config) {
			*at(c) = strictyaml.Value(r, n, path, k.read)
		},
		print: func(c *Config) []string { return []string{k.print(*at(c))} },
		equal: func(a, b *Config) bool { return *at(a) == *at(b) },
		take:  func(into, from *Config) { *at(into) = *at(from) },
		check: func(c *Config) error { return k.verify(*at(c)) },
	}
}

// many describes a field with a list of different values, at least so many.
func many[T comparable](path string, live bool, least int, k kind[T], doc string, at func(*Config) *[]T) field {
	check := func(vs []T) error {
		if len(vs) < least {
			return fmt.Errorf("is empty; give at least one of %s", k.allowed)
		}
		for i, v := range vs {
			if !k.repeats && slices.Contains(vs[:i], v) {
				return fmt.Errorf("%s is given twice", k.print(v))
			}
		}
		return nil
	}
	return field{
		path: path, doc: doc, allowed: k.allowed, live: live, list: true,
		decode: func(r strictyaml.Report, n *yaml.Node, c *Config) {
			whole := true
			vs := strictyaml.Values(func(n *yaml.Node, path string, err error) {
				whole = false
				r(n, path, err)
			}, n, path, k.read)
			if err := check(vs); whole && err != nil {
				r(n, path, err)
			}
			*at(c) = vs
		},
		print: func(c *Config) []string {
			var list []string
			for _, v := range *at(c) {
				list = append(list, k.print(v))
			}
			return list
		},
		equal: func(a, b *Config) bool { return slices.Equal(*at(a), *at(b)) },
		take:  func(into, from *Config) { *at(into) = slices.Clone(*at(from)) },
		check: func(c *Config) error {
			for _, v := range *at(c) {
				if err := k.verify(v); err != nil {
					return err
				}
			}
			return check(*at(c))
		},
	}
}
