//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
)

// sample is one measurement.
type sample struct {
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpuSeconds"` // user and system
	Allocs  uint64  `json:"allocations"`
	Bytes   uint64  `json:"allocatedBytes"`
	Peak    uint64  `json:"peakResidentBytes"` // VmHWM
	// Others is how many cores other programs took meanwhile.
	Others float64 `json:"otherCores"`
	// Values are what else the measurement counts.
	Values map[string]float64 `json:"values,omitempty"`
}

// count sets one of Values.
func (s *sample) count(name string, v float64) {
	if s.Values == nil {
		s.Values = map[string]float64{}
	}
	s.Values[name] = v
}

// profile, if set, is where a CPU profile of what is measured goes: of a child
// that is told so.
var profile string

// measured runs f and tells what it took. The peak of memory is that of f, and
// of what was there before.
func measured(f func(*sample) error) (sample, error) {
	if profile != "" {
		out, err := os.Create(profile)
		if err != nil {
			return sample{}, err
		}
		defer out.Close()
		if err := pprof.StartCPUProfile(out); err != nil {
			return sample{}, err
		}
		defer pprof.StopCPUProfile()
	}
	runtime.GC()
	// VmHWM starts over at the present size (proc(5), clear_refs).
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		return sample{}, err
	}
	var s sample
	var before, after runtime.MemStats
	cpu := cpuTime(unix.RUSAGE_SELF)
	runtime.ReadMemStats(&before)
	start := time.Now()
	err := f(&s)
	s.Seconds = time.Since(start).Seconds()
	runtime.ReadMemStats(&after)
	s.CPU = (cpuTime(unix.RUSAGE_SELF) - cpu).Seconds()
	s.Allocs, s.Bytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	peak, perr := statusBytes("self", "VmHWM")
	s.Peak = peak
	return s, errors.Join(err, perr)
}

func cpuTime(who int) time.Duration {
	var ru unix.Rusage
	if err := unix.Getrusage(who, &ru); err != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// statusBytes reads a size from /proc/PID/status.
func statusBytes(pid, field string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/%s/status", field, pid)
}

// command runs another program and measures it from outside, its start included.
// Its memory is unknown: ru_maxrss begins with what this process had at the fork.
func command(ctx context.Context, name string, args ...string) (sample, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	start := time.Now()
	err := cmd.Run()
	s := sample{Seconds: time.Since(start).Seconds()}
	if err != nil {
		return s, fmt.Errorf("%s: %w: %s", name, err, lastLine(stderr.String()))
	}
	s.CPU = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	return s, nil
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// inChild measures a work in a process of its own, which is in the namespace.
func inChild(ctx context.Context, ns *testnet.NS, o *options, name string, size int) (s sample, err error) {
	cmd := childCommand(ctx, o, name, size)
	var out bytes.Buffer
	cmd.Stdout = &out
	start, before := time.Now(), busy()
	// A process is born in the network namespace of the thread that starts it.
	if err := ns.Do(cmd.Start); err != nil {
		return s, err
	}
	if err := cmd.Wait(); err != nil {
		return s, cmp.Or(ctx.Err(), fmt.Errorf("%s: %w", name, err))
	}
	all, wall := busy()-before, time.Since(start)
	own := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime() // and its children's
	err = json.Unmarshal(out.Bytes(), &s)
	s.Others = max(0, (all-own).Seconds()/wall.Seconds())
	return s, err
}

// busy is the processor time that all programs have taken so far, in steps of
// 10 ms: the first line of /proc/stat without idle and iowait.
func busy() time.Duration {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	sum := 0
	for i, f := range strings.Fields(line) {
		if i == 0 || i == 4 || i == 5 || i > 8 { // guests' time is in that of users too
			continue
		}
		n, _ := strconv.Atoi(f)
		sum += n
	}
	return time.Duration(sum) * 10 * time.Millisecond
}

// childCommand is this program as a child that does one work, until ctx ends.
func childCommand(ctx context.Context, o *options, name string, size int) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-child", name, "-sizes", strconv.Itoa(size),
		"-profiles", o.profiles, "-flowsweep", o.program)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = os.Stderr
	return cmd
}

// child is what runs in that process.
func child(ctx context.Context, o *options) error {
	list := slices.Concat(works(o), loadWorks(), scaleWorks(o))
	i := slices.IndexFunc(list, func(w work) bool { return w.name == o.child })
	if i < 0 {
		return fmt.Errorf("no work is named %q", o.child)
	}
	if o.profiles != "" {
		profile = filepath.Join(o.profiles, fmt.Sprintf("%s-%d.pprof", strings.ReplaceAll(o.child, "/", "-"), o.sizes[0]))
	}
	s, err := list[i].run(ctx, o.sizes[0])
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(s)
}

// figures are what several measurements of one work say together.
type figures struct {
	Work    string   `json:"work"`
	Size    int      `json:"flows"`
	Samples []sample `json:"samples"`
}

// median returns the median of what get takes from each sample, and the least
// and the most.
func (f *figures) median(get func(sample) float64) (mid, least, most float64) {
	vs := make([]float64, 0, len(f.Samples))
	for _, s := range f.Samples {
		vs = append(vs, get(s))
	}
	return median(vs)
}

func median(vs []float64) (mid, least, most float64) {
	if len(vs) == 0 {
		return 0, 0, 0
	}
	slices.Sort(vs)
	n := len(vs)
	return (vs[(n-1)/2] + vs[n/2]) / 2, vs[0], vs[n-1]
}

func seconds(s sample) float64 { return s.Seconds }
