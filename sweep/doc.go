// Package sweep finds stale flows in the kernel's table and deletes them.
//
//	frontend.Change ──▶ Planner ──▶ Plan ──▶ Sweeper: dump ─▶ judge ─▶ delete ──▶ Report
//
// A [Planner] turns what a change made suspect into the cheapest kernel queries;
// a [Sweeper] walks them, judges each flow and deletes in batches. Memory does
// not depend on the table's size. Service proxies that have just written their
// rules need only [CleanStaleEntries].
package sweep
