package static

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf16"
)

// Documents of one frontend each, in each form.
const (
	listA = "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems:\n" +
		"- name: a\n  protocol: UDP\n  addresses: [192.0.2.1]\n  ports: 53\n"
	listB = `{"apiVersion":"flowsweep.dev/v1alpha1","kind":"FrontendList","items":[` +
		`{"name":"b","protocol":"TCP","addresses":["192.0.2.1"],"ports":"53"}]}` + "\n"
	svcYAML = "apiVersion: v1\nkind: Service\nmetadata:\n  name: y\n  namespace: default\nspec:\n" +
		"  clusterIP: 203.0.113.10\n  ports:\n  - port: 53\n    protocol: UDP\n"
	svcJSON = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"j","namespace":"default"},` +
		`"spec":{"clusterIP":"203.0.113.11","ports":[{"port":53,"protocol":"UDP"}]}}` + "\n"
)

const (
	hasA = "static a: static 192.0.2.1:53/udp a [] 0"
	hasB = "static b: static 192.0.2.1:53/tcp b [] 0"
	hasY = "service default/y: cluster-ip 203.0.113.10:53/udp default/y [] 0"
	hasJ = "service default/j: cluster-ip 203.0.113.11:53/udp default/j [] 0"
)

// indent returns YAML as an element of a list.
func indent(s string) string {
	return "- " + strings.TrimSuffix(strings.ReplaceAll(s, "\n", "\n  "), "  ")
}

func TestStreams(t *testing.T) {
	utf16LE := []byte{0xff, 0xfe}
	utf16BE := []byte{0xfe, 0xff}
	for _, u := range utf16.Encode([]rune(listA)) {
		utf16LE = append(utf16LE, byte(u), byte(u>>8))
		utf16BE = append(utf16BE, byte(u>>8), byte(u))
	}
	tests := []struct {
		name string
		in   string
		want []string
	}{
		{"nothing", "", []string{"! in: is empty; a state without frontends is a FrontendList without items"}},
		{"blanks, comments and markers", "# a\n\n---\n--- # b\n \t\n...\n---", []string{"! in: is empty; a state without frontends is a FrontendList without items"}},
		{"YAML", listA, []string{hasA}},
		{"JSON", listB, []string{hasB}},
		{"YAML in flow style", `{apiVersion: flowsweep.dev/v1alpha1, kind: FrontendList, items: [{name: a, protocol: UDP, addresses: [192.0.2.1], ports: 53}]}`, []string{hasA}},
		{"documents of each form", listA + "---\n" + listB + "---\n" + svcYAML + "---\n" + svcJSON, []string{hasJ, hasY, hasA, hasB}},
		{"JSON stream", listB + svcJSON, []string{hasJ, hasB}},
		{"JSON stream without line breaks", strings.TrimSpace(listB) + strings.TrimSpace(svcJSON), []string{hasJ, hasB}},
		{"JSON stream with comments", "# a\n" + listB + "# b\n" + svcJSON + "# c", []string{hasJ, hasB}},
		{"markers with content, directives", "%YAML 1.1\n--- # a\n" + listA + "...\n--- " + listB + "---\t\n" + svcYAML, []string{hasY, hasA, hasB}},
		{"CRLF", strings.ReplaceAll(listA+"---\n"+svcYAML+"---\n"+svcJSON, "\n", "\r\n"), []string{hasJ, hasY, hasA}},
		{"CRLF in a list", strings.ReplaceAll("apiVersion: v1\nitems:\n"+indent(svcYAML)+"kind: List\n", "\n", "\r\n"), []string{hasY}},
		{"byte order mark", "\ufeff" + listB, []string{hasB}},
		{"UTF-16, little endian", string(utf16LE), []string{hasA}},
		{"UTF-16, big endian", string(utf16BE), []string{hasA}},
		{"--- in a line is no marker", "apiVersion: v1\nkind: Service\nmetadata:\n  name: y\n  annotations:\n    a: |\n      b\n      ---\n    ---b: c\n" +
			"spec:\n  clusterIP: 203.0.113.10\n  ports:\n  - port: 53\n    protocol: UDP\n", []string{hasY}},

		{
			"a document that does not parse hides no other",
			listA + "---\na: [\n---\n" + listB + "---\n\"\n---\n" + svcYAML,
			[]string{
				hasY, hasA, hasB,
				"! in:9: not YAML: did not find expected node content",
				"! in:13: not YAML: found unexpected end of stream",
			},
		},
		{
			"JSON that does not parse hides none that begins on a line of its own",
			listB + "{\n \"a\": 1,\n \"b\": x\n}\n" + svcJSON,
			[]string{hasJ, hasB, "! in:4: not JSON: invalid character 'x' looking for beginning of value"},
		},
		{"JSON that ends early", listB + svcJSON[:100], []string{hasB, "! in:2: not JSON: unexpected end of JSON input"}},
		{"JSON and then something else", listB + "[1]\nfoo\n" + svcJSON, []string{hasJ, hasB, "! in:2: not an object: a document begins with {"}},
		{"a scalar", "a\n", []string{"! in:1: not an object with apiVersion and kind"}},
		{"a list", "\n- a\n", []string{"! in:2: not an object with apiVersion and kind"}},
		{"no kind", "apiVersion: v1\nmetadata: {name: a}\n", []string{"! in:1: default/a: not an object with apiVersion and kind"}},
		{"no apiVersion", `{"kind":"Service","metadata":{"name":"a"}}`, []string{"! in:1: Service default/a: not an object with apiVersion and kind"}},
		{"an anchor that contains itself", "a: &a [*a]\n", []string{"! in:1: the anchor &a contains itself"}},
		{"deep nesting", strings.Repeat("[", 1001) + strings.Repeat("]", 1001), []string{"! in:1: nested more than 1000 deep"}},
		{"deeper nesting", strings.Repeat("[", 100_000), []string{"! in:1: not YAML: exceeded max depth of 10000"}},
		{"deep nesting in JSON", `{"a":` + strings.Repeat("[", 100_000), []string{"! in:1: not JSON: invalid character '[' exceeded max depth"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { check(t, read(t, "", tt.in), tt.want) })
	}
}

func TestKubernetesObjects(t *testing.T) {
	kubectl := func(items ...string) string {
		return "apiVersion: v1\nitems:\n" + strings.Join(items, "") + "kind: List\nmetadata:\n  resourceVersion: \"\"\n"
	}
	item := func(yaml string) string { // an item of a list of one kind does not say which
		return indent(strings.TrimPrefix(yaml, "apiVersion: v1\nkind: Service\n"))
	}
	const broken = "apiVersion: v1\nkind: Service\nmetadata:\n  name: bad\nspec:\n  ports: 53\n"
	tests := []struct {
		name string
		in   string
		want []string
	}{
		{"unknown fields", svcYAML + "  more: 1\nother: {a: b}\n", []string{hasY}},
		{"List", kubectl(indent(svcYAML), indent(strings.ReplaceAll(svcYAML, "name: y", "name: z"))), []string{
			hasY, "service default/z: cluster-ip 203.0.113.10:53/udp default/z [] 0",
		}},
		{"List, kind first, indented", "apiVersion: v1\nkind: List\nitems:\n  - " + strings.ReplaceAll(strings.TrimSpace(svcYAML), "\n", "\n    ") + "\n", []string{hasY}},
		{"List in JSON, items before the kind", `{"apiVersion":"v1","items":[` + svcJSON + "," + svcJSON + `],"kind":"List"}`, []string{hasJ}},
		{"ServiceList", "apiVersion: v1\nkind: ServiceList\nitems:\n" + item(svcYAML), []string{hasY}},
		{"ServiceList in JSON", `{"kind":"ServiceList","apiVersion":"v1","items":[{"metadata":{"name":"j"},"spec":{"clusterIP":"203.0.113.11","ports":[{"port":53,"protocol":"UDP"}]}}]}`, []string{hasJ}},
		{"FrontendList inside a List", kubectl(indent(listA), indent(svcYAML)) + "---\n" + `{"apiVersion":"v1","kind":"List","items":[` + listB + `]}`, []string{hasY, hasA, hasB}},
		{"empty List", "apiVersion: v1\nkind: List\nitems: []\n---\n" + `{"apiVersion":"v1","kind":"List","items":null}` + "\n---\nkind: List\n", nil},
		{"items of a List not a list", "apiVersion: v1\nkind: List\nitems: a\n", []string{"! in:3: items: must be a list"}},
		{"no namespace", strings.ReplaceAll(svcYAML, "  namespace: default\n", ""), []string{hasY}},
		{
			"merge keys and numbers as keys",
			"apiVersion: v1\nkind: List\nitems:\n- &y\n  " + strings.ReplaceAll(strings.TrimSpace(svcYAML), "\n", "\n  ") +
				"\n-\n  <<: [*y]\n  metadata: {name: z, annotations: {1: a}}\n",
			[]string{hasY, "service default/z: cluster-ip 203.0.113.10:53/udp default/z [] 0"},
		},
		{
			"the same object twice: the later wins",
			svcYAML + "---\n" + strings.ReplaceAll(svcYAML, ".10", ".12"),
			[]string{"service default/y: cluster-ip 203.0.113.12:53/udp default/y [] 0"},
		},
		{
			"an item that does not decode", kubectl(indent(broken), indent(svcYAML)),
			[]string{hasY, "! in:3: Service default/bad: spec.ports: number where []v1.ServicePort belongs"},
		},
		{
			"an item that does not parse", kubectl(indent(svcYAML), "- a: [\n", indent(svcYAML)),
			[]string{hasY, "! in:13: not YAML: did not find expected node content"},
		},
		{
			"items of JSON that do not decode",
			`{"kind":"List","apiVersion":"v1","items":[` + "\n5,\n" + `{"apiVersion":"v1","kind":"Service","metadata":{"name":"bad"},` + "\n" +
				`"spec":{"ports":[{"port":"dns"}]}},` + "\n" + svcJSON + `]}`,
			[]string{hasJ, "! in:2: not an object with apiVersion and kind", "! in:4: Service default/bad: spec.ports.port: string where int32 belongs"},
		},
		{"no name", "apiVersion: v1\nkind: Service\n", []string{"! in:1: Service: metadata.name: is missing"}},
		{"a List in a List", kubectl("- apiVersion: v1\n  kind: List\n  items: []\n"), []string{"! in:3: a List inside a list is not read; give its items"}},
		{
			"EndpointSlice of an old version",
			"apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: a}\n---\n" +
				"apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSliceList\nitems:\n- metadata: {name: b}\n",
			[]string{
				"! in:1: EndpointSlice default/a: apiVersion: discovery.k8s.io/v1beta1 is not read; give discovery.k8s.io/v1",
				"! in:8: EndpointSlice default/b: apiVersion: discovery.k8s.io/v1beta1 is not read; give discovery.k8s.io/v1",
			},
		},
		{"a number that is not JSON", "apiVersion: v1\nkind: Service\nmetadata: {name: a, generation: .nan}\n", []string{
			"! in:1: Service default/a: json: unsupported value: NaN",
		}},
		{
			"what a field makes no sense of is told with its object's line", "\n" + strings.ReplaceAll(svcYAML, ".10", ".999"),
			[]string{`? in:2: Service default/y: spec.clusterIP: "203.0.113.999" is not an IP address`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { check(t, read(t, "", tt.in), tt.want) })
	}
}

func TestIgnored(t *testing.T) {
	s := read(t, "", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"items":"[]"}}
{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"apps/v1","kind":"Deployment"},{"apiVersion":"v1","kind":"Secret"}]}
---
apiVersion: serving.knative.dev/v1
kind: Service
spec: [not, a, Service, of, the, core]
`)
	check(t, s, []string{
		"! in: holds nothing that is read, only 4 objects of other kinds; give Service, EndpointSlice, Node, Pod or FrontendList",
	})
	if s.Ignored != 4 {
		t.Errorf("%d ignored, want 4", s.Ignored)
	}
}

// TestSeveralInputs: names of items are unique in all inputs, a Service's slices
// may be in another one, and a later object replaces an earlier one.
func TestSeveralInputs(t *testing.T) {
	const slice = `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"j-a","labels":{"kubernetes.io/service-name":"j"}},
"addressType":"IPv4","endpoints":[{"addresses":[%q]}],"ports":[{"protocol":"UDP","port":53}]}`
	s := read(t, "",
		listA+"---\n"+fmt.Sprintf(slice, "bad"),
		svcJSON+"---\n"+listA,
		fmt.Sprintf(slice, "198.51.100.11"))
	check(t, s, []string{
		"service default/j: cluster-ip 203.0.113.11:53/udp default/j [198.51.100.11:53] 1",
		hasA,
		`! in2:6: items[0].name: "a" is the name of in:4 too`,
	})
}

func TestNode(t *testing.T) {
	const (
		node = `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"},"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}` + "\n"
		pod  = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"nodeName":"n1","containers":[{"ports":[{"containerPort":1,"hostPort":2}]}]},"status":{"podIP":"198.51.100.11"}}` + "\n"
	)
	tests := []struct {
		name, node, in string
		want           []string
		found          bool
	}{
		{"found", "n1", node, nil, true},
		{"not among those given", "n2", node, []string{"? Node n2: is not among the Nodes of the state (1); check --node"}, false},
		{"no Node given", "n1", svcYAML, []string{hasY}, false},
		{"none named", "", node, nil, false},
		{"host port", "n1", pod, []string{"pod default/a: host-port *ipv4:2/tcp default/a [198.51.100.11:1] 1"}, false},
		{"host ports, none named", "", pod + strings.Replace(pod, `"a"`, `"b"`, 1), []string{
			"? the state has Pods with host ports, which count on their own node alone; name it with --node",
		}, false},
		{"Pods without host ports, none named", "", strings.Replace(pod, `,"hostPort":2`, "", 1), nil, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := read(t, tt.node, tt.in)
			check(t, s, tt.want)
			var addrs []netip.Addr
			if tt.found {
				addrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			}
			if s.NodeFound != tt.found || !slices.Equal(s.NodeAddresses, addrs) {
				t.Errorf("found %t with %v, want %t with %v", s.NodeFound, s.NodeAddresses, tt.found, addrs)
			}
		})
	}
}

// Host ports are not known where there are Services and no Pods, nor where nobody
// says of which node they are.
func TestHostPortsUnknown(t *testing.T) {
	const (
		node = `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}}` + "\n"
		pod  = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"},"spec":{"nodeName":"n2"}}` + "\n"
	)
	for _, tt := range []struct {
		name, node, in string
		want           bool
	}{
		{"no Pods", "n1", node + svcJSON, true},
		{"no Pods, no Node", "n1", svcJSON, true},
		{"a Pod", "n1", node + svcJSON + pod, false},
		{"a Pod, no Node", "n1", svcJSON + pod, false},
		{"a Pod, and no name", "", node + svcJSON + pod, true},
		{"nothing of Kubernetes", "n1", listA, false},
		{"a Node alone", "n1", node, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if s := read(t, tt.node, tt.in); s.HostPortsUnknown != tt.want {
				t.Errorf("unknown: %t", s.HostPortsUnknown)
			}
		})
	}
}

// TestBounds: a few lines must not stand for more than memory and time hold.
func TestBounds(t *testing.T) {
	bomb := "a0: &a0 [x, x]\n"
	for i := range 40 {
		bomb += fmt.Sprintf("a%d: &a%d [*a%d, *a%d]\n", i+1, i+1, i, i)
	}
	var deep strings.Builder
	for i := range 20 {
		fmt.Fprintf(&deep, "a%d: &a%d %s", i+1, i+1, strings.Repeat("[", 100))
		if i > 0 {
			fmt.Fprintf(&deep, "*a%d", i)
		}
		deep.WriteString(strings.Repeat("]", 100) + "\n")
	}
	many := "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems:\n" +
		"- {name: a, protocol: UDP, addresses: &a [" + strings.Repeat("192.0.2.1, ", 1000) + "], ports: &p \"" + strings.Repeat("1,3,5,7,9,11,", 100) + "1\"}\n"
	for i := range 1000 {
		many += fmt.Sprintf("- {name: b%d, protocol: UDP, addresses: *a, ports: *p}\n", i)
	}
	tests := []struct {
		name, in, want string
	}{
		{"aliases of aliases", bomb, "! in:1: aliases stand for more than 64 MiB"},
		{"aliases that nest", deep.String(), "! in:1: nested more than 1000 deep"},
		{"addresses times ports", many, "! in:178: items[174]: more than 1048576 frontends in all; write fewer addresses or port ranges"},
		{"one large document", "a: b\n" + strings.Repeat("# comment\n", maxYAML/10), "! in:1: more than 32 MiB in one document; split it, or write Kubernetes objects as JSON"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := read(t, "", tt.in)
			if len(s.Problems) == 0 {
				t.Fatal("no problem")
			}
			s.Problems, s.Units = s.Problems[:1], nil
			check(t, s, []string{tt.want})
		})
	}
}

func TestReadErrors(t *testing.T) {
	broken := errors.New("broken pipe")
	_, err := Read("", Input{"a", strings.NewReader(listA)}, Input{"b", iotest.ErrReader(broken)})
	if !errors.Is(err, broken) || err.Error() != "reading b: broken pipe" {
		t.Errorf("error %v", err)
	}
	if _, err := readAll(bytes.NewReader(make([]byte, 1<<20+1)), 1<<20); err == nil || err.Error() != "more than 1 MiB; give less at once" {
		t.Errorf("error %v of a large input", err)
	}
	if data, err := readAll(bytes.NewReader(make([]byte, 1<<20)), 1<<20); err != nil || len(data) != 1<<20 {
		t.Errorf("%d bytes, error %v of an input of the largest size", len(data), err)
	}
}
