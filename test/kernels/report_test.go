// Package kernels runs flowsweep's kernel tests on the kernels that users run: Debian's, each in a
// guest under software emulation, beside the running one. With the build tag kernels,
//
//	go test -tags kernels ./test/kernels
//
// gets the kernels, boots them, runs the tests and compares what they found with testdata/found.json,
// which docs/kernels.md is made from; with -update it writes both. Without the tag it is only seen to
// that the two agree.
package kernels

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/found.json and docs/kernels.md")

const (
	foundFile = "testdata/found.json"
	docFile   = "../../docs/kernels.md"
)

// kernel is one column of the tables.
type kernel struct {
	Name  string `json:"name"`  // "Debian 11, 5.10"; the same for each build of the series
	Build string `json:"build"` // "5.10.262-1"
	Facts []fact `json:"facts"` // in the order of the tests

	running bool // and no guest
}

// fact is what one test found (testing.T.Attr).
type fact struct {
	Test  string `json:"test"` // "TestFilters/zone 7"
	Key   string `json:"key"`
	Value string `json:"value"`
}

// value returns what a test found under a key, "" if nothing.
func (k *kernel) value(test, key string) string {
	for _, f := range k.Facts {
		if f.Test == test && f.Key == key {
			return f.Value
		}
	}
	return ""
}

// suite is a package's test program, and what of it is run on each kernel.
type suite struct {
	dir  string // of the package, below the module's root
	run  string
	what string // for docs/kernels.md
	// least is how many tests and subtests must pass, so that one is missed that is renamed.
	least int
}

var suites = []suite{
	{
		"test/kernels/guest", "^Test",
		"what the tables above show",
		40,
	},
	{
		"conntrack", "^Test",
		"flows are created, read and deleted, filters combined in every way, the probe made without a namespace of its own; " +
			"a flow that has its predecessor's id is spared",
		200,
	},
	{
		"sweep", "^Test",
		"100 stale flows go from among 10 000 others, of which none is hit; flows that come back right during a sweep stay",
		20,
	},
	{
		"internal/cli", "^(TestScenariosSweep|TestChangedOnly)$",
		"every file of [test/scenarios](../test/scenarios) in a real table, swept narrowly and with `--all`, and what is " +
			"left compared",
		200,
	},
	{
		"internal/nft", "^TestGenerationMoves$/^a_library_commits$",
		"the generation of the nftables rules moves with a commit",
		2,
	},
	{
		"source/host", "^TestFollow$",
		"the host's addresses are followed",
		1,
	},
	{
		"agent", "^TestProxyCommits$/^3_s_late$/^nft$",
		"an agent beside a proxy, with traffic, repairs a flow once the rules are right",
		2,
	},
	{
		"ruleset", "^TestBeside$/(VRF|ipvlan|bridge|IPVS|PROXY|prefix|local|untracked)",
		"right flows are judged on hosts whose flows do not tell what they met: VRFs, ipvlan, bridges that track connections, " +
			"IPVS, SYNPROXY, TPROXY, local routes in other tables",
		20,
	},
}

func readFound() (list []kernel, err error) {
	b, err := os.ReadFile(foundFile)
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	return list, err
}

// TestDoc sees to it that docs/kernels.md is what was found.
func TestDoc(t *testing.T) {
	list, err := readFound()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(docFile, doc(list), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(docFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, doc(list)) {
		t.Errorf("%s is not what %s makes it; 'go test ./test/kernels -update' writes it anew", docFile, foundFile)
	}
}

// doc renders docs/kernels.md.
func doc(list []kernel) []byte {
	var b bytes.Buffer
	w := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	builds := make([]string, len(list))
	for i, k := range list {
		builds[i] = k.Build
	}
	last := len(builds) - 1

	w("# Kernels\n")
	w("<!-- Written by 'go test -tags kernels ./test/kernels -update'. -->\n")
	w("What a kernel lacks makes flowsweep slower there and never wrong. `make kernels` boots the newest")
	w("builds of Debian's cloud kernels under software emulation, runs the tests there and on the running")
	w("kernel, and fails where one of them fails, where a test that ran here did not run there, or where")
	w("a table below is not what was found.\n")
	w("As tried: %s under emulation, %s without.\n", strings.Join(builds[:last], ", "), builds[last])

	w("## What a dump can be asked to filter by\n")
	w("Each filter was put to the kernel alone, over flows that it fits and flows that lack just that, in a")
	w("message made by the test. *right*: those that fit came, and no others. *ignored*: all came.")
	w("*complement*: those came that do not fit. flowsweep uses the filters that are right, and does the")
	w("others itself, after the kernel has sent more; the test fails where `conntrack.Conn.Probe` takes one")
	w("for honoured that is not right. A version number does not tell: 6.12.90 compares IPv6 addresses as")
	w("wrongly as most, 6.12.117 rightly, and a newer series may still be wrong.\n")
	table(&b, "filter", list, "TestFilters/")

	w("## What a delete hits\n")
	w("Deletes that name a flow in one way or another, for UDP, TCP and SCTP. ENOENT: there is no such flow,")
	w("and the one that resembles it stays. A predecessor is a flow that was deleted before this one came,")
	w("with another translation, to the same place in memory. flowsweep deletes by reply tuple, zone and id.\n")
	table(&b, "a delete by", list, "TestDeletes/")

	w("## What is planned\n")
	w("The queries for a change, planned for a table of a million flows and carried out on a small one: *40")
	w("for 18*: the kernel sent 40 flows of which 18 were asked for. What was then deleted is, on each kernel,")
	w("exactly what is stale in the whole table, read without any filter.\n")
	plans(&b, list)

	w("## What else was run\n")
	for _, s := range suites {
		w("- `%s`: %s", s.dir, s.what)
	}
	return b.Bytes()
}

// row writes one line of a table.
func row(b *bytes.Buffer, cells ...string) {
	fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
}

func head(b *bytes.Buffer, cells ...string) {
	row(b, cells...)
	row(b, slices.Repeat([]string{"---"}, len(cells))...)
}

func names(list []kernel) (cells []string) {
	for _, k := range list {
		cells = append(cells, k.Name)
	}
	return cells
}

// table writes what the tests of a name found, a test a row.
func table(b *bytes.Buffer, title string, list []kernel, prefix string) {
	head(b, append([]string{title}, names(list)...)...)
	for _, f := range list[0].Facts {
		label, ok := strings.CutPrefix(f.Test, prefix)
		if !ok {
			continue
		}
		cells := []string{label}
		for _, k := range list {
			cells = append(cells, k.value(f.Test, f.Key))
		}
		row(b, cells...)
	}
	b.WriteByte('\n')
}

// plans writes a row for each plan that some kernel had for a change.
func plans(b *bytes.Buffer, list []kernel) {
	head(b, append([]string{"change", "queries"}, names(list)...)...)
	for _, f := range list[0].Facts {
		label, ok := strings.CutPrefix(f.Test, "TestPlans/")
		if !ok || f.Key != "plan" {
			continue
		}
		var seen []string
		for _, k := range list {
			plan := k.value(f.Test, "plan")
			if slices.Contains(seen, plan) {
				continue
			}
			seen = append(seen, plan)
			cells := []string{label, strings.ReplaceAll(plan, "; ", "<br>")}
			for _, k := range list {
				copied := ""
				if k.value(f.Test, "plan") == plan {
					copied = k.value(f.Test, "copied")
				}
				cells = append(cells, copied)
			}
			row(b, cells...)
		}
	}
	b.WriteByte('\n')
}
