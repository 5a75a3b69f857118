//go:build kernels

package kernels

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	cache = "../../bin/kernels"

	// suiteTime is more than any suite takes, and guestTime than all of them, also where guests share
	// two cores with something else.
	suiteTime = 5 * time.Minute
	guestTime = 10 * time.Minute
)

// debian are the kernels that are fetched, by their folder in the cache.
var debian = []struct{ series, name string }{
	{"5.10", "Debian 11, 5.10"},
	{"6.1", "Debian 12, 6.1"},
	{"6.12", "Debian 13, 6.12"},
}

// TestKernels runs the suites on every kernel, as many at once as there are cores.
func TestKernels(t *testing.T) {
	if runtime.GOOS+"/"+runtime.GOARCH != "linux/amd64" {
		t.Fatal("the kernels are for linux/amd64, and the tests run on the running kernel as well")
	}
	fetch := exec.CommandContext(t.Context(), "./fetch", cache)
	if out, err := fetch.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", fetch, err, out)
	} else if len(out) > 0 {
		t.Logf("%s", out)
	}
	stage := build(t)

	list := make([]kernel, len(debian)+1)
	outcomes := make([]outcome, len(list))
	t.Run("on", func(t *testing.T) {
		for i, d := range debian {
			t.Run(d.series, func(t *testing.T) {
				t.Parallel()
				list[i].Name = d.name
				outcomes[i] = boot(t, filepath.Join(cache, d.series), stage)
				list[i].Build = outcomes[i].build
			})
		}
		t.Run("running", func(t *testing.T) {
			t.Parallel()
			k := &list[len(debian)]
			k.Build, k.running = running(t), true
			k.Name = strings.Join(strings.Split(k.Build, ".")[:2], ".")
			outcomes[len(debian)] = here(t, stage)
		})
	})
	if t.Failed() {
		return
	}

	native := outcomes[len(debian)].tests
	var ran []kernel // without those that -run leaves out
	for i, o := range outcomes {
		if o.tests == nil {
			continue
		}
		k := list[i]
		k.Facts = o.facts
		ran = append(ran, k)
		if missing := unlike(native, o.tests); native != nil && missing != "" {
			t.Errorf("%s (%s) beside the running kernel:\n%s", k.Name, k.Build, missing)
		}
		t.Logf("%s (%s): %d tests passed in %s", k.Name, k.Build, len(o.tests), o.took.Round(time.Second))
	}
	switch {
	case t.Failed():
	case !*update:
		compare(t, ran)
	case len(ran) < len(list):
		t.Error("-update needs every kernel")
	default:
		write(t, ran)
	}
}

// write writes what was found; TestDoc, which comes next, the documentation.
func write(t *testing.T, list []kernel) {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "\t")
	if err := errors.Join(e.Encode(list), os.WriteFile(foundFile, b.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// compare compares with what was found before, a newer build of a series included: where it does
// something else, the tables change, and somebody should look at it. The running kernel is compared
// where it is the one that the tables are about.
func compare(t *testing.T, list []kernel) {
	t.Helper()
	before, err := readFound()
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range list {
		i := slices.IndexFunc(before, func(b kernel) bool { return b.Name == k.Name })
		if k.running && (i < 0 || before[i].Build != k.Build) {
			t.Logf("%s is not in %s: not compared", k.Build, docFile)
			continue
		}
		var known kernel // nothing, of a new series
		if i >= 0 {
			known = before[i]
		}
		if known.Build != k.Build {
			t.Logf("%s: tried %s; %s has %s", k.Name, k.Build, docFile, known.Build)
		}
		flat := func(facts []fact) map[string]string {
			m := map[string]string{}
			for _, f := range facts {
				m[f.Test+" "+f.Key] = f.Value
			}
			return m
		}
		if d := differ(flat(known.Facts), flat(k.Facts)); d != "" {
			t.Errorf("%s (%s) is not as %s says; if that is right, 'go test -tags kernels ./test/kernels -update' "+
				"writes it:\n%s", k.Name, k.Build, docFile, d)
		}
	}
}

// unlike lists the tests that ran here and did not there, or that there did otherwise. What this kernel
// lacks, another may have.
func unlike(here, there map[string]string) string {
	here, there = maps.Clone(here), maps.Clone(there)
	for test, outcome := range here {
		if outcome == "SKIP" && there[test] == "PASS" {
			delete(here, test)
			delete(there, test)
		}
	}
	return differ(here, there)
}

// differ lists what two maps do not have in common, "" if nothing.
func differ(want, got map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if g, ok := got[k]; !ok {
			fmt.Fprintf(&b, "  %s: %s, now missing\n", k, want[k])
		} else if g != want[k] {
			fmt.Fprintf(&b, "  %s: %s, now %s\n", k, want[k], g)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[k]; !ok {
			fmt.Fprintf(&b, "  %s: %s, new\n", k, got[k])
		}
	}
	return b.String()
}
