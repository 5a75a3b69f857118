package static

import (
	"strings"
	"testing"
)

func TestFrontendList(t *testing.T) {
	const top = "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems:\n"
	// An item begins at line 4; the fields stand in for its own.
	item := func(fields string) string {
		s := top + "- name: a\n"
		for _, f := range []string{"protocol: UDP", "addresses: [192.0.2.1]", "ports: 53", "backends: [198.51.100.11]"} {
			key, _, _ := strings.Cut(f, ":")
			if !strings.Contains(fields, key+":") {
				s += "  " + f + "\n"
			}
		}
		return s + "  " + fields + "\n"
	}
	named := func(name string) string {
		return top + "- " + name + "\n  protocol: UDP\n  addresses: [192.0.2.1]\n  ports: 53\n"
	}
	const whole = "static a: static 192.0.2.1:53/udp a [198.51.100.11:0] 1"
	tests := []struct {
		name string
		in   string
		want []string
	}{
		{"whole", item(""), []string{whole}},
		{"TCP", item("protocol: TCP"), []string{"static a: static 192.0.2.1:53/tcp a [198.51.100.11:0] 1"}},
		{"SCTP", item("protocol: SCTP"), []string{"static a: static 192.0.2.1:53/sctp a [198.51.100.11:0] 1"}},
		{"protocol in lower case", item("protocol: udp"), []string{`! in:8: items[0].protocol: "udp" is not a protocol (UDP, TCP or SCTP)`}},
		{"protocol NO", item("protocol: NO"), []string{`! in:8: items[0].protocol: "NO" is not a protocol (UDP, TCP or SCTP)`}},
		{"protocol by number", item("protocol: 17"), []string{`! in:8: items[0].protocol: must be a string, not 17 without quotes`}},

		{
			"all addresses: of the backends' family",
			item(`addresses: ["*"]`),
			[]string{"static a: static *ipv4:53/udp a [198.51.100.11:0] 1"},
		},
		{
			"all addresses: of both families that backends have",
			item("addresses: [\"*\"]\n  backends: [198.51.100.11, \"2001:db8:2::11\"]"),
			[]string{
				"static a: static *ipv4:53/udp a [198.51.100.11:0] 1",
				"static a: static *ipv6:53/udp a [[2001:db8:2::11]:0] 1",
			},
		},
		{
			"all addresses: of both families where there is no backend",
			item("addresses: [\"*\"]\n  backends: []"),
			[]string{"static a: static *ipv4:53/udp a [] 0", "static a: static *ipv6:53/udp a [] 0"},
		},
		{
			"all addresses among others, an address twice",
			item(`addresses: [192.0.2.1, "*", "2001:db8::1", 192.0.2.1]`),
			[]string{
				whole,
				"static a: static *ipv4:53/udp a [198.51.100.11:0] 1",
				"static a: static 2001:db8::1:53/udp a [] 0",
			},
		},
		{"* without quotes", item("addresses: [*]"), []string{
			`! in:8: not YAML: did not find expected alphabetic or numeric character; a * or & that is meant as such stands in quotes: "*"`,
		}},
		{"addresses not a list", item("addresses: 192.0.2.1"), []string{`! in:8: items[0].addresses: must be a list, not "192.0.2.1"`}},
		{"no address", item("addresses: []"), []string{`! in:8: items[0].addresses: is empty; "*" is every address of this host`}},
		{
			"bad addresses",
			item(`addresses: [192.0.2.0/24, 0.0.0.0, "::", "fe80::1%eth0", "::ffff:192.0.2.1", 192.0.2.01, 7, ~, [], "192.0.2.1:53"]`),
			[]string{
				`! in:8: items[0].addresses[0]: "192.0.2.0/24" is not an IP address or "*"`,
				`! in:8: items[0].addresses[1]: "0.0.0.0" is not an address that clients send to; write "*" for every address of this host`,
				`! in:8: items[0].addresses[2]: "::" is not an address that clients send to; write "*" for every address of this host`,
				`! in:8: items[0].addresses[3]: "fe80::1%eth0" has a zone, which flows do not have; write fe80::1`,
				`! in:8: items[0].addresses[4]: "::ffff:192.0.2.1" is an IPv4 address; write 192.0.2.1`,
				`! in:8: items[0].addresses[5]: "192.0.2.01" is not an IP address or "*"`,
				`! in:8: items[0].addresses[6]: must be a string, not 7 without quotes`,
				`! in:8: items[0].addresses[7]: must be a string, not null`,
				`! in:8: items[0].addresses[8]: must be a string, not a list`,
				`! in:8: items[0].addresses[9]: "192.0.2.1:53" is not an IP address or "*"`,
			},
		},

		{"port as a string", item(`ports: "53"`), []string{whole}},
		{
			"ports and ranges in any order, overlapping",
			item(`ports: "8000-8010, 53,53,8005-8020,54, 65535"`),
			[]string{
				"static a: static 192.0.2.1:53/udp a [198.51.100.11:0] 1",
				"static a: static 192.0.2.1:54/udp a [198.51.100.11:0] 1",
				"static a: static 192.0.2.1:8000-8020/udp a [198.51.100.11:0] 1",
				"static a: static 192.0.2.1:65535/udp a [198.51.100.11:0] 1",
			},
		},
		{"range without quotes", item("ports: 50000-50099"), []string{"static a: static 192.0.2.1:50000-50099/udp a [198.51.100.11:0] 1"}},
		{"list without quotes", item("ports: 53,53"), []string{whole}},
		{"port 70000", item(`ports: "70000"`), []string{`! in:8: items[0].ports: "70000" is not a port (1-65535)`}},
		{"port 0", item("ports: 0"), []string{`! in:8: items[0].ports: "0" is not a port (1-65535)`}},
		{"port -1", item("ports: -1"), []string{`! in:8: items[0].ports: "-1" is not a range of ports (1-65535)`}},
		{"port of 20 digits", item("ports: 99999999999999999999"), []string{`! in:8: items[0].ports: must be a port, "53,5353" or "50000-50099", not 99999999999999999999 without quotes`}},
		{"port in octal", item("ports: 0123"), []string{`! in:8: items[0].ports: "0123" is not a port (1-65535)`}},
		{"port in hexadecimal", item("ports: 0x35"), []string{`! in:8: items[0].ports: "0x35" is not a port (1-65535)`}},
		{"port with underscores", item("ports: 5_3"), []string{`! in:8: items[0].ports: "5_3" is not a port (1-65535)`}},
		{"port in base 60", item("ports: 1:20"), []string{`! in:8: items[0].ports: "1:20" is not a port (1-65535)`}},
		{"port with a fraction", item("ports: 53.0"), []string{`! in:8: items[0].ports: must be a port, "53,5353" or "50000-50099", not 53.0 without quotes`}},
		{"ports as a list", item("ports: [53]"), []string{`! in:8: items[0].ports: must be a port, "53,5353" or "50000-50099", not a list`}},
		{"backward range", item("ports: 54-53"), []string{`! in:8: items[0].ports: "54-53" ends before it begins`}},
		{"range to 0", item("ports: 53-0"), []string{`! in:8: items[0].ports: "53-0" is not a range of ports (1-65535)`}},
		{"range of three", item("ports: 53-54-55"), []string{`! in:8: items[0].ports: "53-54-55" is not a range of ports (1-65535)`}},
		{"trailing comma", item(`ports: "53,"`), []string{`! in:8: items[0].ports: "" is not a port (1-65535)`}},
		{"empty ports", item(`ports: ""`), []string{`! in:8: items[0].ports: "" is not a port (1-65535)`}},

		{
			"backends of each form and family, one twice",
			item("addresses: [192.0.2.1, \"2001:db8::1\"]\n  backends: [\"198.51.100.11:5353\", 198.51.100.12, 198.51.100.12, " +
				"\"[2001:db8:2::11]:53\", \"2001:db8:2::12\", \"2001:db8:2::13:53\"]"),
			[]string{
				"static a: static 192.0.2.1:53/udp a [198.51.100.11:5353 198.51.100.12:0] 2",
				"static a: static 2001:db8::1:53/udp a [[2001:db8:2::11]:53 [2001:db8:2::12]:0 [2001:db8:2::13:53]:0] 3",
			},
		},
		{"empty backends", item("backends: []"), []string{"static a: static 192.0.2.1:53/udp a [] 0"}},
		{"null backends", item("backends:"), []string{"static a: static 192.0.2.1:53/udp a [] 0"}},
		{
			"one port behind a range", item("ports: 1-9\n  backends: [\"198.51.100.11:53\"]"),
			[]string{"static a: static 192.0.2.1:1-9/udp a [198.51.100.11:53] 1"},
		},
		{"missing backends", top + "- {name: a, protocol: UDP, addresses: [192.0.2.1], ports: 53}\n", []string{"static a: static 192.0.2.1:53/udp a [] 0"}},
		{"backends of another family alone", item(`backends: ["2001:db8:2::11"]`), []string{"static a: static 192.0.2.1:53/udp a [] 0"}},
		{
			"bad backends",
			item(`backends: ["*", "198.51.100.11:0", "198.51.100.11:70000", "[2001:db8:2::11]", "host:53", 0.0.0.0, "[fe80::1%eth0]:53", "::ffff:192.0.2.1"]`),
			[]string{
				`! in:8: items[0].backends[0]: "*" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[1]: "198.51.100.11:0" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[2]: "198.51.100.11:70000" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[3]: "[2001:db8:2::11]" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[4]: "host:53" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[5]: "0.0.0.0" is not a backend (IP, IP:port or [IPv6]:port)`,
				`! in:8: items[0].backends[6]: "fe80::1%eth0" has a zone, which flows do not have; write fe80::1`,
				`! in:8: items[0].backends[7]: "::ffff:192.0.2.1" is an IPv4 address; write 192.0.2.1`,
			},
		},

		{"no name", top + "- {protocol: UDP, addresses: [192.0.2.1], ports: 53}\n", []string{"! in:4: items[0].name: is missing"}},
		{"name that YAML takes for a number", named("name: 1e3"), []string{"! in:4: items[0].name: must be a string, not 1e3 without quotes"}},
		{"name that YAML 1.1 takes for false", named("name: off"), []string{"static off: static 192.0.2.1:53/udp off [] 0"}},
		{"empty name", named(`name: ""`), []string{`! in:4: items[0].name: "" is not a name: it is empty or has control characters`}},
		{"name of two lines", named(`name: "a\nb"`), []string{`! in:4: items[0].name: "a\nb" is not a name: it is empty or has control characters`}},
		{
			"a name twice: the second does not count",
			named("name: a") + "- {name: a, protocol: TCP, addresses: [192.0.2.1], ports: 53}\n",
			[]string{"static a: static 192.0.2.1:53/udp a [] 0", `! in:8: items[1].name: "a" is the name of in:4 too`},
		},
		{
			"every problem of an item, and the next one counts",
			top + "- name: a\n  protocol: tcp\n  port: 53\n  name: b\n- {name: c, protocol: UDP, addresses: [192.0.2.1], ports: 53}\n",
			[]string{
				"static c: static 192.0.2.1:53/udp c [] 0",
				"! in:6: items[0].port: is not a field; there are name, protocol, addresses, ports, backends",
				"! in:7: items[0].name: is given twice",
				"! in:4: items[0].addresses: is missing",
				"! in:4: items[0].ports: is missing",
				`! in:5: items[0].protocol: "tcp" is not a protocol (UDP, TCP or SCTP)`,
			},
		},
		{"null is missing", top + "- {name: ~, protocol: null, addresses: , ports: }\n", []string{
			"! in:4: items[0].name: is missing",
			"! in:4: items[0].protocol: is missing",
			"! in:4: items[0].addresses: is missing",
			"! in:4: items[0].ports: is missing",
		}},
		{"item not a mapping", top + "- a\n- [b]\n-\n", []string{
			`! in:4: items[0]: must be a mapping, not "a"`,
			"! in:5: items[1]: must be a mapping, not a list",
			"! in:6: items[2]: must be a mapping, not null",
		}},
		{"merge key", top + "- &a {name: a, protocol: UDP, addresses: [192.0.2.1], ports: 53}\n- {<<: *a, name: b}\n", []string{
			"static a: static 192.0.2.1:53/udp a [] 0",
			"! in:5: items[1].<<: is not a field; there are name, protocol, addresses, ports, backends",
			"! in:5: items[1].protocol: is missing",
			"! in:5: items[1].addresses: is missing",
			"! in:5: items[1].ports: is missing",
		}},
		{"shared by an alias", top + "- {name: a, protocol: UDP, addresses: [192.0.2.1], ports: 53, backends: &pool [198.51.100.11]}\n" +
			"- {name: b, protocol: TCP, addresses: [192.0.2.1], ports: 53, backends: *pool}\n", []string{
			whole, "static b: static 192.0.2.1:53/tcp b [198.51.100.11:0] 1",
		}},
		{"no items", "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\n", []string{"! in:1: items: is missing"}},
		{"empty items", top[:len(top)-1] + " []\n", nil},
		{"items not a list", top[:len(top)-1] + " {a: b}\n", []string{"! in:3: items: must be a list, not a mapping"}},
		{
			"unknown field beside items that count",
			"metadata: {}\n" + item(""),
			[]string{whole, "! in:1: metadata: is not a field; there are apiVersion, kind, items"},
		},
		{"items twice", top[:len(top)-1] + " []\n" + "items: []\n", []string{"! in:4: items: is given twice"}},
		{
			"version of the future", "apiVersion: flowsweep.dev/v1\nkind: FrontendList\nitems: []\n",
			[]string{`! in:1: apiVersion: "flowsweep.dev/v1" is not read; write flowsweep.dev/v1alpha1`},
		},
		{
			"kind of a typing error", "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendsList\nitems: []\n",
			[]string{`! in:1: kind: "FrontendsList" is not a kind of flowsweep.dev; write FrontendList`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { check(t, read(t, "", tt.in), tt.want) })
	}
}
