//go:build linux

package main

import (
	"strings"
	"testing"
)

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		duration(2.2):        "2.20 s",
		duration(0.2949):     "295 ms",
		duration(0.0123):     "12.3 ms",
		duration(99.96e-6):   "100 µs",
		duration(2.5e-6):     "2.50 µs",
		duration(90e-9):      "90.0 ns",
		amount(970 << 20):    "970 MiB",
		amount(500):          "0.49 KiB",
		thousands(999):       "999",
		thousands(1_000_000): "1 000 000",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestReplaceBlock(t *testing.T) {
	doc := "a\n<!-- begin: x, made by bench -->\nold\n<!-- end -->\nb\n<!-- begin: y, made by bench -->\n<!-- end -->\n"
	got, err := replaceBlock(doc, "x", "new\n")
	if want := strings.Replace(doc, "old", "new", 1); err != nil || got != want {
		t.Errorf("%v, got:\n%s", err, got)
	}
	for _, bad := range []string{"z", "begin"} {
		if _, err := replaceBlock(doc, bad, ""); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
}

// of returns figures with three samples around a time.
func of(work string, seconds float64, values map[string]float64) figures {
	f := figures{Work: work, Size: 1000}
	for _, x := range []float64{1.5, 0.9, 1} {
		f.Samples = append(f.Samples, sample{Seconds: x * seconds, Peak: 40 << 20, Allocs: 50, Values: values})
	}
	return f
}

func TestGoals(t *testing.T) {
	r := results{Figures: []figures{
		of("floor/nothing", 1, nil),
		of("sweep/backend-leaves", 1.1, nil),
		of("kube-proxy/backend-leaves", 22, nil),
		of("sweep/full-0", 1, nil),
		of("sweep/udp4-25", 1, map[string]float64{"deleted": 120_000, "deleting": 0.24}),
		of("floor/deletes", 0.2, nil),
		of("sweep/full-1", 1, nil),
		of("agent/25", 1, nil),
	}}
	for _, want := range []string{
		"| a backend leaves ÷ the kernel's floor | ≤ 1.15 × | 1.10 × (1.10 s ÷ 1.00 s) | met |",
		"| kube-proxy ÷ flowsweep, a backend leaves | ≥ 40 × | 20.00 × (22.0 s ÷ 1.10 s); the kernel's floor (1.00 s) allows 22.0 × | **not met** |",
		"| ≤ 2.5 µs each | 2.00 µs each; the kernel alone 1.67 µs: 1.20 × | met |",
		"| ≤ 32 MiB resident | 40.0 MiB | **not met** |",
		"| 0 a flow | 50 in all, 0.0500 a flow | **not met** |",
	} {
		if got := r.goals(); !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
}

func TestPlanRow(t *testing.T) {
	chosen := map[string]float64{"chosen": 1}
	r := results{Figures: []figures{
		of("plan/10-leave/backend", 3, nil), of("plan/10-leave/port", 0.5, nil), of("plan/10-leave/full", 1, chosen),
	}}
	got := strings.Join(r.planRow(event{name: "10-leave"}, 1000), "|")
	if want := "3.00 s||**500 ms**||1.00 s ←"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		of               []float64
		mid, least, most float64
	}{
		{nil, 0, 0, 0},
		{[]float64{3}, 3, 3, 3},
		{[]float64{4, 1}, 2.5, 1, 4},
		{[]float64{9, 1, 2}, 2, 1, 9},
	} {
		if mid, least, most := median(tt.of); mid != tt.mid || least != tt.least || most != tt.most {
			t.Errorf("%v: got %v, %v, %v", tt.of, mid, least, most)
		}
	}
}
