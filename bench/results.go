//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// results are all that a run of the benchmark has found.
type results struct {
	Machine machine   `json:"machine"`
	Started time.Time `json:"started"`
	Runs    int       `json:"runs"`
	Figures []figures `json:"figures"`
	Skipped []string  `json:"skipped,omitempty"`
}

// machine is what absolute times depend on.
type machine struct {
	CPU       string   `json:"cpu"`
	Cores     int      `json:"cores"`
	Kernel    string   `json:"kernel"`
	Arch      string   `json:"arch"`
	Buckets   int      `json:"buckets"` // of the hash table
	Go        string   `json:"go"`
	Libraries []string `json:"libraries"`
}

// libraryPaths are the modules that are measured beside flowsweep.
var libraryPaths = []string{"k8s.io/kubernetes", "github.com/ti-mo/conntrack", "github.com/vishvananda/netlink"}

func thisMachine() machine {
	m := machine{CPU: "unknown", Cores: runtime.NumCPU(), Arch: runtime.GOARCH, Go: runtime.Version()}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "model name"); ok {
				m.CPU = strings.TrimLeft(strings.TrimSpace(v), ": \t")
				break
			}
		}
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	m.Buckets, _ = readInt("/proc/sys/net/netfilter/nf_conntrack_buckets")
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if slices.Contains(libraryPaths, d.Path) {
				m.Libraries = append(m.Libraries, strings.TrimPrefix(d.Path, "github.com/")+" "+d.Version)
			}
		}
	}
	if out, err := exec.Command("conntrack", "--version").Output(); err == nil {
		version, _, _ := strings.Cut(strings.TrimPrefix(string(out), "conntrack v"), " ")
		m.Libraries = append(m.Libraries, "conntrack-tools v"+version)
	}
	return m
}

func readResults(file string) (*results, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var r results
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path.Base(file), err)
	}
	return &r, nil
}

func (r *results) write(file string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o600)
}

// find returns the figures of a work, nil where it was not measured.
func (r *results) find(name string, size int) *figures {
	for i := range r.Figures {
		if f := &r.Figures[i]; f.Work == name && f.Size == size && len(f.Samples) > 0 {
			return f
		}
	}
	return nil
}

// sizes returns the table sizes that were measured, in order.
func (r *results) sizes() (list []int) {
	for _, f := range r.Figures {
		if f.Size > 0 && !strings.HasPrefix(f.Work, "latency/") && !slices.Contains(list, f.Size) {
			list = append(list, f.Size)
		}
	}
	slices.Sort(list)
	return list
}

// seconds returns the median time of a work; ok is false where it was not
// measured.
func (r *results) seconds(name string, size int) (s float64, ok bool) {
	f := r.find(name, size)
	if f == nil {
		return 0, false
	}
	s, _, _ = f.median(seconds)
	return s, true
}

// value returns the median of what a work counted.
func (r *results) value(work string, size int, name string) (v float64, ok bool) {
	f := r.find(work, size)
	if f == nil {
		return 0, false
	}
	if _, ok := f.Samples[0].Values[name]; !ok {
		return 0, false
	}
	v, _, _ = f.median(func(s sample) float64 { return s.Values[name] })
	return v, true
}
