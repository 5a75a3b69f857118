package config

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

const head = "apiVersion: flowsweep.dev/v1alpha1\nkind: AgentConfiguration\n"

// compare compares addresses by value, and takes no list for an empty one.
var compare = cmp.Options{
	cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}, netip.AddrPort{}),
	cmpopts.EquateEmpty(),
}

func prefixes(list ...string) (ps []netip.Prefix) {
	for _, s := range list {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func TestDecode(t *testing.T) {
	tests := []struct {
		name string
		in   string // below the head
		want func(c *Config)
	}{
		{"nothing", "", func(*Config) {}},
		{"null is absent", "zones: ~\nsettling:\nsweep: {udp: null}\n", func(*Config) {}},
		{"comments, markers and an empty second document", "---\n# a\n---\n", func(*Config) {}},
		{"files", "sources: {static: {files: [/a, b.d, 'c d']}}\n", func(c *Config) {
			c.Sources.Static.Files = []string{"/a", "b.d", "c d"}
		}},
		{"host", `
host:
  node: n1
  interfaces: false
  include: [192.0.2.0/24, "2001:db8::/32"]
  exclude: [192.0.2.128/25]
  addresses: [198.51.100.1, "2001:db8::1"]
  nodePortAddresses: [0.0.0.0/0]
`, func(c *Config) {
			c.Host = Host{
				Node:              "n1",
				Include:           prefixes("192.0.2.0/24", "2001:db8::/32"),
				Exclude:           prefixes("192.0.2.128/25"),
				Addresses:         []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")},
				NodePortAddresses: prefixes("0.0.0.0/0"),
			}
		}},
		{
			"node ports as kube-proxy takes them", `host: {nodePortAddresses: [all, "localhost", primary, 192.0.2.9/24, "2001:db8::9/32", 192.0.2.9/24]}
`, func(c *Config) {
				c.Host.NodePortAddresses = append([]netip.Prefix{frontend.Everywhere, frontend.Localhost, frontend.Primary},
					prefixes("192.0.2.0/24", "2001:db8::/32", "192.0.2.0/24")...)
			},
		},
		{"sweep", "sweep: {udp: unreplied, tcp: off, sctp: all}\n", func(c *Config) {
			c.Sweep = frontend.Policy{UDP: frontend.Unreplied, TCP: frontend.Off, SCTP: frontend.All}
		}},
		{"sweep, in part", "sweep: {tcp: all}\n", func(c *Config) { c.Sweep.TCP = frontend.All }},
		{"no source: by the NAT rules", "sources: {}\n", func(c *Config) { c.Sources.Static.Files = nil }},
		{"no files", "sources: {static: {files: []}}\n", func(c *Config) { c.Sources.Static.Files = nil }},
		{"zones", "zones: [0, 65535]\n", func(c *Config) { c.Zones = []uint16{0, 65535} }},
		{"families", "families: [ipv6]\n", func(c *Config) { c.Families = []conntrack.Family{conntrack.IPv6} }},
		{"dry run", "dryRun: true\n", func(c *Config) { c.DryRun = true }},
		{"settling at its least", "settling: {window: 5s, fullPass: 30s, walkBudget: 0.01, rules: false}\n", func(c *Config) {
			c.Settling = Settling{5 * time.Second, 30 * time.Second, 0.01, false}
		}},
		{"settling at its most", "settling: {window: 60m, fullPass: 24h, walkBudget: 1}\n", func(c *Config) {
			c.Settling = Settling{time.Hour, 24 * time.Hour, 1, true}
		}},
		{"window alone", "settling: {window: 1m30.5s}\n", func(c *Config) { c.Settling.Window = 90500 * time.Millisecond }},
		{"no full pass", "settling: {window: 1h, fullPass: 0}\n", func(c *Config) {
			c.Settling.Window, c.Settling.FullPass = time.Hour, 0
		}},
		{"no full pass, with a unit", "settling: {fullPass: 0s}\n", func(c *Config) { c.Settling.FullPass = 0 }},
		{"guards off", "guards: {deletesPerSecond: 0, shrinkHold: 0, shrinkMinimum: 1}\n", func(c *Config) {
			c.Guards = Guards{0, 0, 1}
		}},
		{"guards", "guards: {deletesPerSecond: 1, shrinkHold: 1s, shrinkMinimum: 1000000}\n", func(c *Config) {
			c.Guards = Guards{1, time.Second, 1000000}
		}},
		{"no state file", `stateFile: ""` + "\n", func(c *Config) { c.StateFile = "" }},
		{"log", "log: {level: debug, format: json, auditFile: /var/log/a}\n", func(c *Config) {
			c.Log = Log{slog.LevelDebug, FormatJSON, "/var/log/a"}
		}},
		{"no admin endpoint", `admin: {listen: ""}` + "\n", func(c *Config) { c.Admin.Listen = netip.AddrPort{} }},
		{"admin on IPv6, metrics anywhere", `admin: {listen: "[::1]:1", metricsListen: "[::]:65535", pprof: true}` + "\n", func(c *Config) {
			c.Admin = Admin{Listen: netip.MustParseAddrPort("[::1]:1"), MetricsListen: netip.MustParseAddrPort("[::]:65535"), Pprof: true}
		}},
		{"all of loopback is loopback", `admin: {listen: "127.9.9.9:1"}` + "\n", func(c *Config) {
			c.Admin.Listen = netip.MustParseAddrPort("127.9.9.9:1")
		}},
		{"status anywhere", `admin: {listen: "0.0.0.0:9633", statusAnywhere: true}` + "\n", func(c *Config) {
			c.Admin.Listen, c.Admin.StatusAnywhere = netip.MustParseAddrPort("0.0.0.0:9633"), true
		}},
		{"aliases", "host: {include: &a [192.0.2.0/24], exclude: *a}\n", func(c *Config) {
			c.Host.Include, c.Host.Exclude = prefixes("192.0.2.0/24"), prefixes("192.0.2.0/24")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := Default()
			tt.want(want)
			got, err := Decode("in", strings.NewReader(head+tt.in))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got, compare); d != "" {
				t.Errorf("configuration (-want +got):\n%s", d)
			}
		})
	}
}

func TestDecodeJSON(t *testing.T) {
	got, err := Decode("in", strings.NewReader(`{"apiVersion": "flowsweep.dev/v1alpha1", "kind": "AgentConfiguration",
		"dryRun": true, "settling": {"walkBudget": 1e-1}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.DryRun = true
	if d := cmp.Diff(want, got, compare); d != "" {
		t.Errorf("configuration (-want +got):\n%s", d)
	}
}

func TestDecodeErrors(t *testing.T) {
	const deep = "in: nested more than 1000 deep"
	tests := []struct {
		name string
		in   string // below the head
		want []string
	}{
		{"unknown fields", "dryrun: true\nlog:\n  colour: x\n", []string{
			"in:3: dryrun: is not a field; there are apiVersion, kind, sources, host, sweep, zones, families, dryRun, " +
				"settling, guards, stateFile, log, admin",
			"in:5: log.colour: is not a field; there are level, format, auditFile",
		}},
		{"given twice", "dryRun: true\ndryRun: true\n", []string{"in:4: dryRun: is given twice"}},
		{"kind twice", "kind: AgentConfiguration\n", []string{"in:3: kind: is given twice"}},
		{"sections of a wrong type", "log: info\nadmin: []\nsources: {static: x}\n", []string{
			`in:3: log: must be a mapping, not "info"`,
			"in:4: admin: must be a mapping, not a list",
			`in:5: sources.static: must be a mapping, not "x"`,
		}},
		{"all at once, in order", "zones: [x]\ndryRun: 7\nsettling:\n  walkBudget: 2\n  window: 1s\n", []string{
			`in:3: zones[0]: must be 0 to 65535, not "x"`,
			"in:4: dryRun: must be true or false, not 7",
			"in:6: settling.walkBudget: must be 0.01 to 1, not 2",
			`in:7: settling.window: must be 5s to 1h, not "1s"`,
		}},
		{"booleans", "dryRun: yes\nhost: {interfaces: 'true'}\nadmin: {pprof: []}\n", []string{
			`in:3: dryRun: must be true or false, not "yes"`,
			`in:4: host.interfaces: must be true or false, not "true"`,
			"in:5: admin.pprof: must be true or false, not a list",
		}},
		{"numbers", "guards:\n  deletesPerSecond: 1e3\n  shrinkMinimum: 0\nzones: [-1, 65536, 010, 0x1, 1_0, '1', 1.0]\n", []string{
			"in:4: guards.deletesPerSecond: must be 1 to 1000000, or 0: no limit, not 1e3",
			"in:5: guards.shrinkMinimum: must be 1 to 1000000, not 0",
			"in:6: zones[0]: must be 0 to 65535, not -1",
			"in:6: zones[1]: must be 0 to 65535, not 65536",
			"in:6: zones[2]: must be 0 to 65535, not 010",
			"in:6: zones[3]: must be 0 to 65535, not 0x1",
			"in:6: zones[4]: must be 0 to 65535, not 1_0",
			`in:6: zones[5]: must be 0 to 65535, not "1"`,
			"in:6: zones[6]: must be 0 to 65535, not 1.0",
		}},
		{"limits", "guards: {deletesPerSecond: 1000001, shrinkHold: 61m, shrinkMinimum: 1000001}\n", []string{
			"in:3: guards.deletesPerSecond: must be 1 to 1000000, or 0: no limit, not 1000001",
			`in:3: guards.shrinkHold: must be 1s to 1h, or 0: no hold, not "61m"`,
			"in:3: guards.shrinkMinimum: must be 1 to 1000000, not 1000001",
		}},
		{"shares", "settling: {walkBudget: .nan}\n", []string{"in:3: settling.walkBudget: must be 0.01 to 1, not .nan"}},
		{"share of no number", "settling: {walkBudget: 10%}\n", []string{`in:3: settling.walkBudget: must be 0.01 to 1, not "10%"`}},
		{"durations", "settling: {window: 60, fullPass: 1 day}\nguards: {shrinkHold: -1s}\n", []string{
			"in:3: settling.window: must be 5s to 1h, not 60",
			`in:3: settling.fullPass: must be 30s to 24h, or 0: never, not "1 day"`,
			`in:4: guards.shrinkHold: must be 1s to 1h, or 0: no hold, not "-1s"`,
		}},
		{"windows without their end", "settling: {window: 0}\n", []string{"in:3: settling.window: must be 5s to 1h, not 0"}},
		{"words", "sweep: {udp: ALL, tcp: true, sctp: ''}\nlog: {level: trace, format: logfmt}\nfamilies: [4]\n", []string{
			`in:3: sweep.udp: must be all, unreplied or off, not "ALL"`,
			"in:3: sweep.tcp: must be all, unreplied or off, not true",
			`in:3: sweep.sctp: must be all, unreplied or off, not ""`,
			`in:4: log.level: must be debug, info, warn or error, not "trace"`,
			`in:4: log.format: must be text or json, not "logfmt"`,
			"in:5: families[0]: must be ipv4 or ipv6, not 4",
		}},
		{"lists", "zones: []\nfamilies: [ipv4, ipv4]\nhost: {include: 192.0.2.0/24}\n", []string{
			"in:3: zones: is empty; give at least one of 0 to 65535",
			"in:4: families: ipv4 is given twice",
			`in:5: host.include: must be a list, not "192.0.2.0/24"`,
		}},
		{"paths", "sources: {static: {files: ['', 7]}}\nstateFile: \"a\\n\"\nlog: {auditFile: 1}\n", []string{
			`in:3: sources.static.files[0]: must be a path, not ""`,
			"in:3: sources.static.files[1]: must be a string, not 7 without quotes",
			`in:4: stateFile: "a\n" has control characters or is not UTF-8`,
			"in:5: log.auditFile: must be a string, not 1 without quotes",
		}},
		{"ranges", `host: {include: [192.0.2.1/24, 192.0.2.1, "::ffff:192.0.2.0/120", x/24, 7]}` + "\n", []string{
			`in:3: host.include[0]: "192.0.2.1/24" has bits beyond its length; write 192.0.2.0/24 for the range or 192.0.2.1/32 for the address`,
			`in:3: host.include[1]: "192.0.2.1" is an address; write 192.0.2.1/32`,
			`in:3: host.include[2]: "::ffff:192.0.2.0/120" is of IPv4-mapped addresses, which no interface has; write it as IPv4`,
			`in:3: host.include[3]: "x/24" is not a CIDR such as 192.0.2.0/24`,
			"in:3: host.include[4]: must be a string, not 7 without quotes",
		}},
		{"addresses", `host: {addresses: [192.0.2.0/24, "fe80::1%eth0", "::ffff:192.0.2.1", 0.0.0.0, 127.0.0.1, 224.0.0.1]}` + "\n", []string{
			`in:3: host.addresses[0]: "192.0.2.0/24" is not an IP address`,
			`in:3: host.addresses[1]: "fe80::1%eth0" has a zone, which flows do not have; write fe80::1`,
			`in:3: host.addresses[2]: "::ffff:192.0.2.1" is an IPv4 address; write 192.0.2.1`,
			`in:3: host.addresses[3]: "0.0.0.0" is not an address at which this host has services for others`,
			`in:3: host.addresses[4]: "127.0.0.1" is not an address at which this host has services for others`,
			`in:3: host.addresses[5]: "224.0.0.1" is not an address at which this host has services for others`,
		}},
		{"listen", "admin: {listen: ':9633', metricsListen: localhost:1}\n", []string{
			`in:3: admin.listen: ":9633" is not IP:port, such as 127.0.0.1:9633, [::1]:9633 or, for every address, [::]:9633`,
			`in:3: admin.metricsListen: "localhost:1" is not IP:port, such as 127.0.0.1:9633, [::1]:9633 or, for every address, [::]:9633`,
		}},

		{"files that are none: said once", "sources: {static: {files: /a}}\n", []string{
			`in:3: sources.static.files: must be a list, not "/a"`,
		}},
		{"a window not shorter than a full pass", "settling:\n  fullPass: 30s\n  window: 30s\n", []string{
			"in:5: settling.window: must be shorter than settling.fullPass (30s), or full passes follow each other while anything is unsettled",
		}},
		{"the default window against a short full pass", "settling: {fullPass: 1m}\n", []string{
			"in: settling.window: must be shorter than settling.fullPass (1m), or full passes follow each other while anything is unsettled",
		}},
		{"status on every address", "admin: {listen: '[::]:9633'}\n", []string{
			"in:3: admin.listen: :: is not a loopback address, and status leaves the host there; set admin.statusAnywhere " +
				"if that is meant, or give metrics alone an address with admin.metricsListen",
		}},
		{"metrics twice", "admin: {metricsListen: '127.0.0.1:9633'}\n", []string{
			"in:3: admin.metricsListen: is admin.listen, which serves metrics anyway; give another address or none",
		}},
		{"pprof nowhere", "admin: {listen: '', pprof: true}\n", []string{
			"in:3: admin.pprof: is served on admin.listen, which is none; give it an address",
		}},

		{"not YAML", "log: [\n", []string{"in:3: not YAML: did not find expected node content"}},
		{"a second document", "---\n" + head, []string{"in:4: a second document; a configuration is one"}},
		{"too deep", "log: " + strings.Repeat("[", 1001) + strings.Repeat("]", 1001), []string{deep}},
		{"itself", "log: &a [*a]\n", []string{"in: the anchor &a contains itself"}},
		{"merge keys", "a: &a {level: info}\nlog: {<<: *a}\n", []string{
			"in:3: a: is not a field; there are apiVersion, kind, sources, host, sweep, zones, families, dryRun, " +
				"settling, guards, stateFile, log, admin",
			"in:4: log.<<: is not a field; there are level, format, auditFile",
		}},
		{"too large", strings.Repeat("#", maxSize), []string{"in: more than 1 MiB"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { checkErrors(t, head+tt.in, tt.want) })
	}
}

func TestDecodeHead(t *testing.T) {
	tests := []struct {
		name string
		in   string
		want []string
	}{
		{"empty", "", []string{"in: is empty; it begins with apiVersion: flowsweep.dev/v1alpha1 and kind: AgentConfiguration"}},
		{"comments", "# a\n---\n", []string{"in: is empty; it begins with apiVersion: flowsweep.dev/v1alpha1 and kind: AgentConfiguration"}},
		{"no head", "dryRun: x\n", []string{
			"in: apiVersion: is missing; write apiVersion: flowsweep.dev/v1alpha1",
			"in: kind: is missing; write kind: AgentConfiguration",
		}},
		{"another kind", "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems: []\n", []string{
			`in:2: kind: must be AgentConfiguration, not "FrontendList"`,
		}},
		{"another version", "apiVersion: flowsweep.dev/v1\nkind: AgentConfiguration\n", []string{
			`in:1: apiVersion: must be flowsweep.dev/v1alpha1, not "flowsweep.dev/v1"`,
		}},
		{"a list", "- a\n", []string{"in:1: must be a mapping, not a list"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { checkErrors(t, tt.in, tt.want) })
	}
}

func checkErrors(t *testing.T, in string, want []string) {
	t.Helper()
	c, err := Decode("in", strings.NewReader(in))
	if err == nil || c != nil {
		t.Fatalf("Decode returned %+v, %v", c, err)
	}
	if d := cmp.Diff(want, strings.Split(err.Error(), "\n")); d != "" {
		t.Errorf("errors (-want +got):\n%s", d)
	}
}

func TestErrorPlace(t *testing.T) {
	_, err := Decode("in", strings.NewReader(head+"log: {level: x}\nzones: []\n"))
	var e *Error
	if !errors.As(err, &e) || e.File != "in" || e.Line != 3 || e.Path != "log.level" || e.Err == nil {
		t.Errorf("%+v", e)
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("a file that is missing: %v", err)
	}
	if err := os.WriteFile(path, []byte(head+"dryRun: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(path); err != nil || !c.DryRun {
		t.Errorf("%+v, %v", c, err)
	}
	failing := iotest.ErrReader(fs.ErrPermission)
	if _, err := Decode("in", failing); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a file that cannot be read: %v", err)
	}
}

func TestPrintDefault(t *testing.T) {
	var b bytes.Buffer
	if err := Print(&b, Default()); err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/default.yaml"
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), b.String()); d != "" {
		t.Errorf("%s (-want +got):\n%s", golden, d)
	}
	if err := Print(failingWriter{}, Default()); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a writer that fails: %v", err)
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, fs.ErrPermission }

// TestPrint shows what Default does not have: long lists, words that YAML may take
// for something else.
func TestPrint(t *testing.T) {
	c := Default()
	c.Host.Include = prefixes("192.0.2.0/24", "198.51.100.0/24", "2001:db8:1::/48", "2001:db8:2::/48")
	c.Sweep.TCP = frontend.Off
	c.Settling.FullPass = 0
	c.StateFile = `C:\a "b".json`
	var b bytes.Buffer
	if err := Print(&b, c); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"  include:\n  - \"192.0.2.0/24\"\n  - \"198.51.100.0/24\"\n  - \"2001:db8:1::/48\"\n  - \"2001:db8:2::/48\"\n",
		"  tcp: \"off\"\n",
		"  fullPass: 0\n",
		`stateFile: "C:\\a \"b\".json"` + "\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	for line := range strings.Lines(b.String()) {
		if len(line) > lineWidth+1 {
			t.Errorf("%d columns: %s", len(line)-1, line)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := genConfig(t)
		if err := c.Validate(); err != nil {
			t.Fatalf("Validate: %v", err)
		}
		var b bytes.Buffer
		if err := Print(&b, c); err != nil {
			t.Fatal(err)
		}
		got, err := Decode("printed", &b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(c, got, compare); d != "" {
			t.Fatalf("read back (-printed +read):\n%s", d)
		}
		if live, restart := Changes(c, got); len(live)+len(restart) > 0 {
			t.Fatalf("Changes: %v %v", live, restart)
		}
	})
}

// genConfig makes valid configurations.
func genConfig(t *rapid.T) *Config {
	path := rapid.OneOf(
		rapid.StringMatching(`[a-z/. "'\\#:&*~%-]{1,9}`),
		rapid.StringOfN(rapid.RuneFrom([]rune("a\u00e9\u4e16\U0001f600\ufeff\u2028\u00ad")), 1, 5, -1),
		rapid.SampledFrom([]string{"null", "~", "true", "no", "1", "0x1", "1e3", "2001-01-01", "<<", "---", "- a", "a: b"}),
	)
	maybe := rapid.OneOf(rapid.Just(""), path)
	flag := rapid.Bool()
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		if flag.Draw(t, "ipv4") {
			return netip.AddrFrom4([4]byte{192, 0, 2, rapid.Byte().Draw(t, "byte")})
		}
		a := [16]byte{0x20, 0x01, 0x0d, 0xb8}
		a[15] = rapid.Byte().Draw(t, "byte")
		return netip.AddrFrom16(a)
	})
	prefix := rapid.Custom(func(t *rapid.T) netip.Prefix {
		a := addr.Draw(t, "addr")
		return netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "bits")).Masked()
	})
	ranges := rapid.SliceOfNDistinct(prefix, 0, 5, rapid.ID)
	duration := func(least, most time.Duration) *rapid.Generator[time.Duration] {
		return rapid.OneOf(
			rapid.Map(rapid.Int64Range(int64(least), int64(most)), func(n int64) time.Duration { return time.Duration(n) }),
			rapid.Map(rapid.Int64Range(int64(least/time.Second), int64(most/time.Second)),
				func(n int64) time.Duration { return time.Duration(n) * time.Second }),
		)
	}
	sweep := rapid.SampledFrom([]frontend.Sweep{frontend.Off, frontend.Unreplied, frontend.All})

	c := &Config{
		Sources: Sources{
			Kubernetes: Kubernetes{
				Enabled:    flag.Draw(t, "kubernetes"),
				Kubeconfig: maybe.Draw(t, "kubeconfig"),
				Context:    maybe.Draw(t, "context"),
				HostPorts:  flag.Draw(t, "hostPorts"), ServiceRanges: flag.Draw(t, "serviceRanges"),
				Events: flag.Draw(t, "events"), EventThreshold: rapid.IntRange(1, 1000000).Draw(t, "eventThreshold"),
			},
			Static: Static{rapid.SliceOfNDistinct(path, 1, 4, rapid.ID).Draw(t, "files")},
		},
		Host: Host{
			Node:              maybe.Draw(t, "node"),
			Interfaces:        flag.Draw(t, "interfaces"),
			Include:           ranges.Draw(t, "include"),
			Exclude:           ranges.Draw(t, "exclude"),
			Addresses:         rapid.SliceOfNDistinct(addr, 0, 5, rapid.ID).Draw(t, "addresses"),
			NodePortAddresses: ranges.Draw(t, "nodePortAddresses"),
		},
		Sweep: frontend.Policy{UDP: sweep.Draw(t, "udp"), TCP: sweep.Draw(t, "tcp"), SCTP: sweep.Draw(t, "sctp")},
		Zones: rapid.SliceOfNDistinct(rapid.Uint16(), 1, 20, rapid.ID).Draw(t, "zones"),
		Families: rapid.SampledFrom([][]conntrack.Family{
			{conntrack.IPv4}, {conntrack.IPv6}, {conntrack.IPv6, conntrack.IPv4},
		}).Draw(t, "families"),
		DryRun: flag.Draw(t, "dryRun"),
		Settling: Settling{
			Window:     duration(5*time.Second, time.Hour).Draw(t, "window"),
			WalkBudget: rapid.Float64Range(0.01, 1).Draw(t, "walkBudget"),
			Rules:      rapid.Bool().Draw(t, "rules"),
		},
		Guards: Guards{
			DeletesPerSecond: rapid.IntRange(0, 1000000).Draw(t, "deletesPerSecond"),
			ShrinkMinimum:    rapid.IntRange(1, 1000000).Draw(t, "shrinkMinimum"),
		},
		StateFile: maybe.Draw(t, "stateFile"),
		Log: Log{
			Level:     rapid.SampledFrom([]slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError}).Draw(t, "level"),
			Format:    rapid.SampledFrom([]LogFormat{FormatText, FormatJSON}).Draw(t, "format"),
			AuditFile: maybe.Draw(t, "auditFile"),
		},
	}
	for _, word := range []netip.Prefix{frontend.Primary, frontend.Localhost, frontend.Everywhere} {
		if flag.Draw(t, "word") {
			c.Host.NodePortAddresses = append(c.Host.NodePortAddresses, word)
		}
	}
	if flag.Draw(t, "full passes") {
		c.Settling.FullPass = duration(max(30*time.Second, c.Settling.Window+2*time.Second), 24*time.Hour).Draw(t, "fullPass")
	}
	if flag.Draw(t, "hold") {
		c.Guards.ShrinkHold = duration(time.Second, time.Hour).Draw(t, "shrinkHold")
	}
	if flag.Draw(t, "admin") {
		c.Admin.StatusAnywhere = flag.Draw(t, "statusAnywhere")
		a := netip.MustParseAddr("::1")
		if c.Admin.StatusAnywhere {
			a = rapid.SampledFrom([]netip.Addr{netip.MustParseAddr("fe80::1%eth0"), netip.IPv4Unspecified(), a}).Draw(t, "listen")
		}
		c.Admin.Listen = netip.AddrPortFrom(a, rapid.Uint16Range(0, 9999).Draw(t, "port"))
		c.Admin.Pprof = flag.Draw(t, "pprof")
	}
	if flag.Draw(t, "metrics") {
		c.Admin.MetricsListen = netip.AddrPortFrom(addr.Draw(t, "metricsListen"), rapid.Uint16Min(10000).Draw(t, "metrics port"))
	}
	return c
}

// TestChanges changes each field alone.
func TestChanges(t *testing.T) {
	tests := []struct {
		path   string
		live   bool
		change func(c *Config)
	}{
		{"sources.kubernetes.enabled", false, func(c *Config) { c.Sources.Kubernetes.Enabled = true }},
		{"sources.kubernetes.kubeconfig", false, func(c *Config) { c.Sources.Kubernetes.Kubeconfig = "/a" }},
		{"sources.kubernetes.context", false, func(c *Config) { c.Sources.Kubernetes.Context = "a" }},
		{"sources.kubernetes.hostPorts", false, func(c *Config) { c.Sources.Kubernetes.HostPorts = false }},
		{"sources.kubernetes.serviceRanges", false, func(c *Config) { c.Sources.Kubernetes.ServiceRanges = false }},
		{"sources.kubernetes.events", false, func(c *Config) { c.Sources.Kubernetes.Events = false }},
		{"sources.kubernetes.eventThreshold", false, func(c *Config) { c.Sources.Kubernetes.EventThreshold++ }},
		{"sources.static.files", true, func(c *Config) { c.Sources.Static.Files = []string{"/a"} }},
		{"host.node", false, func(c *Config) { c.Host.Node = "n1" }},
		{"host.interfaces", false, func(c *Config) { c.Host.Interfaces = false }},
		{"host.include", true, func(c *Config) { c.Host.Include = prefixes("192.0.2.0/24") }},
		{"host.exclude", true, func(c *Config) { c.Host.Exclude = prefixes("192.0.2.0/24") }},
		{"host.addresses", true, func(c *Config) { c.Host.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1")} }},
		{"host.nodePortAddresses", true, func(c *Config) { c.Host.NodePortAddresses = prefixes("192.0.2.0/24") }},
		{"sweep.udp", false, func(c *Config) { c.Sweep.UDP = frontend.Off }},
		{"sweep.tcp", false, func(c *Config) { c.Sweep.TCP = frontend.Off }},
		{"sweep.sctp", false, func(c *Config) { c.Sweep.SCTP = frontend.Off }},
		{"zones", false, func(c *Config) { c.Zones = []uint16{0, 1} }},
		{"families", false, func(c *Config) { c.Families = c.Families[:1] }},
		{"dryRun", true, func(c *Config) { c.DryRun = true }},
		{"settling.window", true, func(c *Config) { c.Settling.Window++ }},
		{"settling.fullPass", true, func(c *Config) { c.Settling.FullPass++ }},
		{"settling.walkBudget", true, func(c *Config) { c.Settling.WalkBudget = 1 }},
		{"settling.rules", false, func(c *Config) { c.Settling.Rules = false }},
		{"guards.deletesPerSecond", true, func(c *Config) { c.Guards.DeletesPerSecond++ }},
		{"guards.shrinkHold", true, func(c *Config) { c.Guards.ShrinkHold++ }},
		{"guards.shrinkMinimum", true, func(c *Config) { c.Guards.ShrinkMinimum++ }},
		{"stateFile", false, func(c *Config) { c.StateFile = "" }},
		{"log.level", true, func(c *Config) { c.Log.Level = slog.LevelDebug }},
		{"log.format", false, func(c *Config) { c.Log.Format = FormatJSON }},
		{"log.auditFile", true, func(c *Config) { c.Log.AuditFile = "/a" }},
		{"admin.listen", false, func(c *Config) { c.Admin.Listen = netip.AddrPort{} }},
		{"admin.metricsListen", false, func(c *Config) { c.Admin.MetricsListen = netip.MustParseAddrPort("0.0.0.0:1") }},
		{"admin.statusAnywhere", false, func(c *Config) { c.Admin.StatusAnywhere = true }},
		{"admin.pprof", false, func(c *Config) { c.Admin.Pprof = true }},
	}
	all := Default()
	var wantLive, wantRestart []string
	for i, tt := range tests {
		t.Run(tt.path, func(t *testing.T) {
			if i >= len(fields) || fields[i].path != tt.path {
				t.Fatal("not the field in this place")
			}
			c := Default()
			tt.change(c)
			want := []string{tt.path}
			live, restart := Changes(Default(), c)
			if tt.live && (!cmp.Equal(live, want) || restart != nil) || !tt.live && (!cmp.Equal(restart, want) || live != nil) {
				t.Errorf("live %v, restart %v", live, restart)
			}
			merged, running := c, Default()
			if !tt.live {
				merged = running
			}
			if d := cmp.Diff(merged, Merge(running, c), compare); d != "" {
				t.Errorf("Merge (-want +got):\n%s", d)
			}
		})
		tt.change(all)
		if tt.live {
			wantLive = append(wantLive, tt.path)
		} else {
			wantRestart = append(wantRestart, tt.path)
		}
	}
	live, restart := Changes(Default(), all)
	if d := cmp.Diff([][]string{wantLive, wantRestart}, [][]string{live, restart}); d != "" {
		t.Errorf("all together (-want +got):\n%s", d)
	}
	if len(tests) != len(fields) {
		t.Errorf("%d of %d fields", len(tests), len(fields))
	}
}

func TestValidate(t *testing.T) {
	tests := []struct {
		name   string
		change func(c *Config)
		want   string
	}{
		{"default", func(*Config) {}, ""},
		{"all values", func(c *Config) {
			*c = Config{Settling: Settling{WalkBudget: math.NaN()}, Guards: Guards{ShrinkHold: -1}, Log: Log{Level: 1}}
		}, `sources.kubernetes.eventThreshold: must be 1 to 1000000, not 0
zones: is empty; give at least one of 0 to 65535
families: is empty; give at least one of ipv4 or ipv6
settling.window: must be 5s to 1h, not 0s
settling.walkBudget: must be 0.01 to 1, not NaN
guards.shrinkHold: must be 1s to 1h, or 0: no hold, not -1ns
guards.shrinkMinimum: must be 1 to 1000000, not 0
log.level: must be debug, info, warn or error, not "INFO+1"
log.format: must be text or json, not ""`},
		{"elements", func(c *Config) {
			c.Sources.Static.Files = []string{"a", "\xff"}
			c.Families = []conntrack.Family{7}
			c.Host.Exclude = []netip.Prefix{{}}
			c.Host.Addresses = []netip.Addr{{}}
			c.Admin.Listen = netip.AddrPortFrom(netip.Addr{}, 1)
		}, `sources.static.files: "\xff" has control characters or is not UTF-8
host.exclude: must be a CIDR such as 192.0.2.0/24, not "invalid Prefix"
host.addresses: must be an IP address, not "invalid IP"
families: must be ipv4 or ipv6, not "family 7"
admin.listen: must be IP:port, or "": none, not "invalid AddrPort"`},
		{
			"fields against each other", func(c *Config) { c.Settling.Window = time.Hour },
			"settling.window: must be shorter than settling.fullPass (5m), or full passes follow each other while anything is unsettled",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Default()
			tt.change(c)
			got := ""
			if err := c.Validate(); err != nil {
				got = err.Error()
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("errors (-want +got):\n%s", d)
			}
		})
	}
}

// FuzzDecode: whatever the input, reading it ends, and gives errors that have a
// place, or a configuration that is valid and is read back as it was printed.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		head, head + "host: {include: [192.0.2.0/24]}\nzones: [1, 2]\nsweep: {tcp: off}\n", "{\"apiVersion\":", "\ufeff{}", "a: &a [*a]\n",
		head + "host: {node: \"\\x85\\u2028\", addresses: [192.0.2.1]}\nstateFile: |\n  a\n  b\n",
		head + "sources: {static: {files: [a, a]}}\nsettling: {window: 1m30s, fullPass: 0, walkBudget: 0x1p-2}\n",
		head + "admin: {listen: '[fe80::1%\"]:1', statusAnywhere: true}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Decode("in", bytes.NewReader(data))
		if err != nil {
			for _, err := range err.(interface{ Unwrap() []error }).Unwrap() {
				var e *Error
				if !errors.As(err, &e) || e.Line < 0 || e.Line > len(data)+1 || e.Error() == "" {
					t.Errorf("%v (%+v)", err, e)
				}
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Fatalf("what was read is not valid: %v", err)
		}
		var b bytes.Buffer
		if err := Print(&b, c); err != nil {
			t.Fatal(err)
		}
		again, err := Decode("printed", bytes.NewReader(b.Bytes()))
		if err != nil {
			t.Fatalf("%v\n%s", err, b.Bytes())
		}
		if d := cmp.Diff(c, again, compare); d != "" {
			t.Errorf("read back (-printed +read):\n%s", d)
		}
	})
}
