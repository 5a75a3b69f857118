package static

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

var update = flag.Bool("update", false, "write the golden file")

// show writes a unit's frontend as
// "UNIT: KIND ADDRESS:PORTS/PROTOCOL OWNER [VALID BACKENDS] USABLE [foreign]".
func show(unit string, f frontend.Frontend) string {
	addr := f.Addr.String()
	if !f.Addr.IsValid() {
		addr = "*" + f.Family.String()
	}
	ports := fmt.Sprint(f.Ports.First)
	if !f.Ports.Single() {
		ports += fmt.Sprintf("-%d", f.Ports.Last)
	}
	s := fmt.Sprintf("%s: %s %s:%s/%s %s %s %d", unit, f.Kind, addr, ports,
		conntrack.ProtoName(f.Proto), f.Owner, f.Valid.All(), f.Usable)
	if f.Foreign {
		s += " foreign"
	}
	return s
}

// showAll writes the units in order of their names, then the problems: "!" those
// for which something was not read, "?" the others.
func showAll(s *State) []string {
	var got []string
	for _, name := range slices.Sorted(maps.Keys(s.Units)) {
		for _, f := range s.Units[name] {
			got = append(got, show(name, f))
		}
	}
	for _, p := range s.Problems {
		mark := "? "
		if p.Lost {
			mark = "! "
		}
		got = append(got, mark+p.Error())
	}
	return got
}

func read(t testing.TB, node string, inputs ...string) *State {
	t.Helper()
	var ins []Input
	for i, s := range inputs {
		name := "in"
		if i > 0 {
			name += fmt.Sprint(i + 1)
		}
		ins = append(ins, Input{name, strings.NewReader(s)})
	}
	s, err := Read(node, ins...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func check(t *testing.T, s *State, want []string) {
	t.Helper()
	if d := cmp.Diff(want, showAll(s)); d != "" {
		t.Errorf("frontends and problems (-want +got):\n%s", d)
	}
}

// TestScenarios reads the states of the shared scenarios. The number of
// frontends, foreign ones included, is by file: before, where there is one, and
// state.
func TestScenarios(t *testing.T) {
	want := map[string][]int{
		"backend-removed.txtar":                  {1, 1},
		"broken-object-beside-good-ones.txtar":   {2},
		"empty-port.txtar":                       {2},
		"every-frontend-kind.txtar":              {4},
		"host-port-to-host-network.txtar":        {1, 0},
		"host-port.txtar":                        {1, 1},
		"ipv6.txtar":                             {4},
		"load-balancer-in-proxy-mode.txtar":      {1},
		"local-policy-backend-arrives.txtar":     {2},
		"local-policy-untranslated.txtar":        {2},
		"masquerade-does-not-matter.txtar":       {1},
		"node-port-elsewhere.txtar":              {3},
		"node-port-on-an-unlisted-address.txtar": {2},
		"not-proxied-here.txtar":                 {1},
		"overlay-on-an-external-address.txtar":   {2},
		"same-port-two-host-addresses.txtar":     {2},
		"scaled-to-zero.txtar":                   {1, 1},
		"service-deleted.txtar":                  {1, 0},
		"service-replaced-in-one-step.txtar":     {1, 1},
		"serving-while-terminating.txtar":        {1},
		"several-slices.txtar":                   {2},
		"static-any-local-address.txtar":         {1},
		"static-forward.txtar":                   {2},
		"stream-before-the-service.txtar":        {0, 2},
		"target-port-changed.txtar":              {1},
		"tcp-and-sctp-defaults.txtar":            {2},
		"traffic-policy-keeps-translated.txtar":  {2},
		"two-services-one-frontend.txtar":        {4},
		"udp-only.txtar":                         {2},
		"unset-conditions-mean-ready.txtar":      {1},
		"zero-to-one.txtar":                      {1, 1},
		"zones-apart.txtar":                      {1},
	}
	broken := []string{
		`? state.yaml:97: Service default/odd: spec.clusterIPs[0]: "203.0.113.999" is not an IP address`,
		`? state.yaml:127: EndpointSlice default/odd-a: endpoints[0].addresses[0]: "not-an-address" is not an IP address`,
	}
	var files []string
	for _, dir := range []string{"../../test/scenarios", "../../../shared/scenarios"} {
		found, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) == 0 {
		t.Fatal("no scenarios found")
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var got []int
			var problems []string
			for _, f := range archive.Files {
				if filepath.Ext(f.Name) != ".yaml" {
					continue
				}
				s, err := Read("n1", Input{f.Name, bytes.NewReader(f.Data)})
				if err != nil {
					t.Fatal(err)
				}
				n := 0
				for _, fs := range s.Units {
					n += len(fs)
				}
				got = append(got, n)
				s.Units = nil
				problems = append(problems, showAll(s)...)
			}
			want, known := want[filepath.Base(file)]
			if !known { // a case that was added later
				return
			}
			if !slices.Equal(got, want) {
				t.Errorf("%v frontends, want %v", got, want)
			}
			wantProblems := []string(nil)
			if filepath.Base(file) == "broken-object-beside-good-ones.txtar" {
				wantProblems = broken
			}
			if d := cmp.Diff(wantProblems, problems); d != "" {
				t.Errorf("problems (-want +got):\n%s", d)
			}
		})
	}
}

// TestGolden reads a file that mixes all that there is. The golden file lists
// what comes of it; -update writes it.
func TestGolden(t *testing.T) {
	f, err := os.Open("testdata/mixed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := Read("n1", Input{"mixed.yaml", f})
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("node found: %t, addresses %v, objects ignored: %d\n%s\n",
		s.NodeFound, s.NodeAddresses, s.Ignored, strings.Join(showAll(s), "\n"))
	if *update {
		if err := os.WriteFile("testdata/mixed.golden", []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/mixed.golden")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("mixed.yaml (-want +got):\n%s", d)
	}
}

// cluster returns what kubectl get services,endpointslices prints for Services
// of one port and as many endpoints each as told.
func cluster(services, endpoints int) (yaml, json []byte) {
	var y, j bytes.Buffer
	y.WriteString("apiVersion: v1\nitems:\n")
	j.WriteString("{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n")
	for i := range services {
		fmt.Fprintf(&y, "- apiVersion: v1\n  kind: Service\n  metadata:\n    name: svc-%d\n    namespace: default\n  spec:\n"+
			"    clusterIP: 10.96.%d.%d\n    ports:\n    - name: udp\n      port: 53\n      protocol: UDP\n", i, i/250, i%250)
		fmt.Fprintf(&y, "- apiVersion: discovery.k8s.io/v1\n  kind: EndpointSlice\n  metadata:\n    name: svc-%d-a\n    namespace: default\n"+
			"    labels:\n      kubernetes.io/service-name: svc-%d\n  addressType: IPv4\n  ports:\n  - name: udp\n    port: 5353\n    protocol: UDP\n  endpoints:\n", i, i)
		fmt.Fprintf(&j, `        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "svc-%d", "namespace": "default"},
            "spec": {"clusterIP": "10.96.%d.%d", "ports": [{"name": "udp", "port": 53, "protocol": "UDP"}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "svc-%d-a", "namespace": "default",
            "labels": {"kubernetes.io/service-name": "svc-%d"}}, "addressType": "IPv4",
            "ports": [{"name": "udp", "port": 5353, "protocol": "UDP"}],
            "endpoints": [`, i, i/250, i%250, i, i)
		for k := range endpoints {
			fmt.Fprintf(&y, "  - addresses:\n    - 10.%d.%d.%d\n    conditions:\n      ready: true\n      serving: true\n      terminating: false\n"+
				"    nodeName: n%d\n    targetRef:\n      kind: Pod\n      name: pod-%d\n      namespace: default\n", 128+k, i/250, i%250, k, k)
			if k > 0 {
				j.WriteString(",")
			}
			fmt.Fprintf(&j, `
                {
                    "addresses": [
                        "10.%d.%d.%d"
                    ],
                    "conditions": {
                        "ready": true,
                        "serving": true,
                        "terminating": false
                    },
                    "nodeName": "n%d",
                    "targetRef": {
                        "kind": "Pod",
                        "name": "pod-%d",
                        "namespace": "default"
                    }
                }`, 128+k, i/250, i%250, k, k)
		}
		j.WriteString("]}")
		if i < services-1 {
			j.WriteString(",")
		}
		j.WriteString("\n")
	}
	y.WriteString("kind: List\nmetadata:\n  resourceVersion: \"\"\n")
	j.WriteString("    ],\n    \"kind\": \"List\",\n    \"metadata\": {\n        \"resourceVersion\": \"\"\n    }\n}\n")
	return y.Bytes(), j.Bytes()
}

// BenchmarkRead reads Services of 10 endpoints each.
func BenchmarkRead(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		yaml, json := cluster(services, 10)
		for _, form := range []struct {
			name string
			data []byte
		}{{"json", json}, {"yaml", yaml}} {
			b.Run(fmt.Sprintf("%s/services=%d", form.name, services), func(b *testing.B) {
				b.SetBytes(int64(len(form.data)))
				b.ReportAllocs()
				for b.Loop() {
					s, err := Read("n1", Input{"state", bytes.NewReader(form.data)})
					if err != nil || len(s.Units) != services || len(s.Problems) != 0 {
						b.Fatalf("%d units, error %v", len(s.Units), err)
					}
				}
			})
		}
	}
}
