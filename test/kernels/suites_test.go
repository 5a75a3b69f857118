//go:build kernels

package kernels

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// build compiles the suites into a folder laid out like the module, with the files that they read.
func build(t *testing.T) string {
	t.Helper()
	const root = "../.."
	stage := t.TempDir()
	for _, s := range suites {
		dir := filepath.Join(stage, s.dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		// With -trimpath, as the Makefile builds, most is in the build cache already.
		cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-trimpath", "-ldflags", "-s -w",
			"-o", filepath.Join(dir, "suite"), "./"+s.dir)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", cmd, err, out)
		}
		if data := filepath.Join(root, s.dir, "testdata"); exists(data) {
			if err := os.CopyFS(filepath.Join(dir, "testdata"), os.DirFS(data)); err != nil {
				t.Fatal(err)
			}
		}
	}
	program(t, stage, "nft")
	const scenarios = "test/scenarios"
	if err := os.CopyFS(filepath.Join(stage, scenarios), os.DirFS(filepath.Join(root, scenarios))); err != nil {
		t.Fatal(err)
	}
	return stage
}

// program puts a program of this machine where guests find it, and what it is linked with.
func program(t *testing.T, stage, name string) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v; install nftables", err)
	}
	out, err := exec.CommandContext(t.Context(), "ldd", path).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", path, err)
	}
	files := map[string]string{path: filepath.Join("bin", name)}
	for _, m := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
		files[m[1]] = m[1]
	}
	for from, to := range files {
		data, err := os.ReadFile(from)
		to = filepath.Join(stage, to)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// command is what runs a suite in its folder. It ends itself, with a trace, before it is ended.
func (s suite) command() []string {
	return []string{
		"./suite", "-test.v", "-test.run=" + s.run,
		"-test.timeout=" + (suiteTime - 10*time.Second).String(),
	}
}

// outcome is what the suites printed on one kernel, understood.
type outcome struct {
	build string
	tests map[string]string // "sweep TestCollateral": "PASS"
	facts []fact
	took  time.Duration
}

var (
	suiteLine = regexp.MustCompile(`^=== SUITE (\S+)$`)
	exitLine  = regexp.MustCompile(`^=== EXIT (\d+)$`)
	attrLine  = regexp.MustCompile(`^=== ATTR  (\S+) (\S+) (.*)$`)
	testLine  = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
)

// parse reads what init, or here, wrote. Each suite must have come to its end, with exit code 0.
func parse(text string) (o outcome, errs []error) {
	o.tests = map[string]string{}
	passed, ended := map[string]int{}, map[string]bool{}
	dir := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if m := suiteLine.FindStringSubmatch(line); m != nil {
			dir = m[1]
		} else if m := exitLine.FindStringSubmatch(line); m != nil {
			ended[dir] = true
			if m[1] != "0" {
				errs = append(errs, fmt.Errorf("%s: exit %s", dir, m[1]))
			}
		} else if m := attrLine.FindStringSubmatch(line); m != nil {
			o.facts = append(o.facts, fact{strings.ReplaceAll(m[1], "_", " "), m[2], m[3]})
		} else if m := testLine.FindStringSubmatch(line); m != nil {
			o.tests[dir+" "+m[2]] = m[1]
			if m[1] == "PASS" {
				passed[dir]++
			}
		}
	}
	for _, s := range suites {
		if !ended[s.dir] {
			errs = append(errs, fmt.Errorf("%s: did not come to its end", s.dir))
		} else if n := passed[s.dir]; n < s.least {
			errs = append(errs, fmt.Errorf("%s: of -test.run=%s %d tests passed, at least %d should", s.dir, s.run, n, s.least))
		}
	}
	return o, errs
}

// running returns the version of the running kernel, without what its builder appended.
func running(t *testing.T) string {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`^\d+(\.\d+)*`).FindString(unix.ByteSliceToString(u.Release[:]))
}

// here runs the suites on the running kernel, in the same surroundings as in a guest: without any
// program beside them but nft.
func here(t *testing.T, stage string) outcome {
	t.Helper()
	began := time.Now()
	var text bytes.Buffer
	for _, s := range suites {
		fmt.Fprintf(&text, "=== SUITE %s\n", s.dir)
		ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
		args := s.command()
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = filepath.Join(stage, s.dir)
		cmd.Env = []string{"PATH=" + filepath.Join(stage, "bin"), "HOME=/tmp", "TMPDIR=" + os.TempDir(), "FLOWSWEEP_REQUIRE_KERNEL=1"}
		cmd.Stdout, cmd.Stderr = &text, &text
		err := cmd.Run()
		cancel()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&text, "\n=== EXIT %d\n", cmd.ProcessState.ExitCode())
	}
	o, errs := parse(text.String())
	if len(errs) > 0 {
		t.Errorf("%v\n%s", errors.Join(errs...), quiet(text.String()))
	}
	o.took = time.Since(began)
	return o
}

var noise = regexp.MustCompile(`^(=== (RUN|ATTR)| *--- PASS)`)

// quiet leaves out what tells of nothing but success.
func quiet(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !noise.MatchString(line) {
			b.WriteString(line)
		}
	}
	return b.String()
}
