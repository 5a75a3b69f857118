//go:build linux

package main

import (
	"context"
	"testing"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// A sweep allocates the same beside ten times the flows: nothing for a flow,
// whether it is kept or deleted. Time is no measure on a machine that does other
// things; this is, and what allocates for each flow is what makes a sweep slow.
func TestAllocationsDoNotGrow(t *testing.T) {
	const small, big = 2000, 20_000
	for _, tt := range []struct {
		name    string
		percent int
		// most is how many more the larger table may take: what is deleted goes in
		// batches, and the runtime has a few of its own.
		most uint64
	}{
		{"nothing stale", 0, 20},
		{"1 % stale", 1, 40},
		{"25 % stale", 25, 100},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var took [2]uint64
			for i, n := range []int{small, big} {
				_, c := filled(t, n)
				s := scene{table: frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy}), conn: c}
				s.table.Replace(whole().without(stale(tt.percent)).units())
				plan, err := s.full(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				var r sweep.Report
				got, err := measured(func(*sample) (err error) {
					r, err = (&sweep.Sweeper{Conn: c, Judge: s.table}).Run(context.Background(), plan)
					return err
				})
				if want := count(n, byDefault(staleFlows(tt.percent))); err != nil || r.Deleted != want {
					t.Fatalf("deleted %d, want %d; %v", r.Deleted, want, err)
				}
				took[i] = got.Allocs
			}
			t.Logf("%d allocations beside %d flows, %d beside %d", took[0], small, took[1], big)
			if took[1] > took[0]+tt.most {
				t.Errorf("%d allocations beside %d flows, %d beside %d: want %d more at most",
					took[0], small, took[1], big, tt.most)
			}
		})
	}
}
