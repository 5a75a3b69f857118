package admin

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/sweep"
)

// docs/metrics.md is generated from the names, labels and HELP texts here and in
// state.go.

// Metrics counts what an agent does. It is the agent's Observer and a part of
// what a Server shows.
type Metrics struct {
	passes       *prometheus.CounterVec
	passDuration *prometheus.HistogramVec
	passStale    *prometheus.HistogramVec
	walkDuration *prometheus.HistogramVec
	rewalks      prometheus.Counter
	returned     prometheus.Counter
	malformed    prometheus.Counter
	judged       *prometheus.CounterVec
	deleted      *prometheus.CounterVec
	gone         prometheus.Counter
	busy         prometheus.Counter
	failed       prometheus.Counter
	settled      prometheus.Histogram
	repaired     prometheus.Histogram

	all []prometheus.Collector
}

var _ agent.Observer = (*Metrics)(nil)

// NewMetrics returns metrics that have counted nothing. Every series whose labels
// are known is there from the start, so that a first event is seen as an increase.
func NewMetrics() *Metrics {
	m := &Metrics{}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		m.all = append(m.all, c)
		return c
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.all = append(m.all, c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
		m.all = append(m.all, h)
		return h
	}
	histograms := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		m.all = append(m.all, h)
		return h
	}
	work := prometheus.ExponentialBuckets(0.001, 2, 15) // 1 ms to 16 s

	m.passes = counters("flowsweep_passes_total",
		"Passes over the table, by kind (full, narrow) and result (ok, failed, or interrupted by the agent's end).",
		"kind", "result")
	m.passDuration = histograms("flowsweep_pass_duration_seconds",
		"Seconds that a pass took, deletes and waits for the delete rate included, by kind; of passes with result ok.",
		work, "kind")
	m.passStale = histograms("flowsweep_pass_stale_flows",
		"Stale flows that a pass found, by kind; of passes with result ok.",
		append([]float64{0}, prometheus.ExponentialBuckets(1, 10, 7)...), "kind")
	m.walkDuration = histograms("flowsweep_walk_duration_seconds",
		"Seconds that the kernel's walks for one query took, deletes and waits left out, by family.",
		work, "family")
	m.rewalks = counter("flowsweep_repeated_walks_total",
		"Walks that were made again because the hash table was resized meanwhile.")
	m.returned = counter("flowsweep_returned_flows_total",
		"Flows that the kernel returned to walks. Far more than were judged means that it does not filter.")
	m.malformed = counter("flowsweep_malformed_messages_total",
		"Messages of the kernel that held no flow that can be judged.")
	m.judged = counters("flowsweep_judged_flows_total",
		"Flows judged, by verdict and reason. Those with verdict delete are the stale ones.",
		"verdict", "reason")
	m.deleted = counters("flowsweep_deleted_flows_total",
		"Stale flows whose delete the kernel confirmed, by family, by reason, and by the kind of the frontend that they were sent to.",
		"family", "reason", "frontend_kind")
	m.gone = counter("flowsweep_gone_flows_total",
		"Stale flows that had gone by themselves, or been replaced, before they could be deleted.")
	m.busy = counter("flowsweep_busy_flows_total",
		"Stale flows that could not be deleted because a flowtable handles them; counted again with each attempt.")
	m.failed = counter("flowsweep_failed_flows_total",
		"Stale flows that the kernel refused to delete; counted again with each attempt.")
	m.settled = histogram("flowsweep_settled_seconds",
		"Seconds from a frontend's first change to the proof that no flow is stale: the watch window and what came before it. "+
			"Changes that follow each other within the window count as one.",
		prometheus.ExponentialBuckets(15, 2, 10)) // 15 s to 2 h
	m.repaired = histogram("flowsweep_repair_seconds",
		"Seconds from a frontend's first change to the last stale flow that was found, of changes that made any. "+
			"Changes that follow each other within the window count as one.",
		prometheus.ExponentialBuckets(0.0125, 2, 16)) // 12.5 ms to 7 min

	for _, full := range []bool{true, false} {
		for _, result := range []string{"ok", "failed", "interrupted"} {
			m.passes.WithLabelValues(kind(full), result)
		}
		m.passDuration.WithLabelValues(kind(full))
		m.passStale.WithLabelValues(kind(full))
	}
	for r := range frontend.Reasons {
		m.judged.WithLabelValues(r.Action().String(), r.String())
	}
	for _, fam := range []conntrack.Family{conntrack.IPv4, conntrack.IPv6} {
		m.walkDuration.WithLabelValues(fam.String())
		for r := range frontend.Reasons {
			if r.Action() != frontend.Delete {
				continue
			}
			for k := range frontend.Kinds {
				m.deletedOf(sweep.Class{Family: fam, Reason: r, Kind: k})
			}
		}
	}
	return m
}

func kind(full bool) string {
	if full {
		return "full"
	}
	return "narrow"
}

func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return "failed"
}

func (m *Metrics) deletedOf(c sweep.Class) prometheus.Counter {
	return m.deleted.WithLabelValues(c.Family.String(), c.Reason.String(), c.Kind.String())
}

// Pass implements agent.Observer.
func (m *Metrics) Pass(p agent.Pass) {
	m.passes.WithLabelValues(kind(p.Full), result(p.Err)).Inc()
	r := &p.Report
	if p.Err == nil {
		m.passDuration.WithLabelValues(kind(p.Full)).Observe(r.Duration.Seconds())
		m.passStale.WithLabelValues(kind(p.Full)).Observe(float64(r.Count(frontend.Delete)))
	}
	for _, q := range r.Queries {
		m.walkDuration.WithLabelValues(q.Filter.Family.String()).Observe((q.Duration - q.Deleting).Seconds())
		m.rewalks.Add(float64(max(0, q.Walks-1)))
	}
	m.returned.Add(float64(r.Returned))
	m.malformed.Add(float64(r.Malformed))
	for i, n := range r.Verdicts {
		reason := frontend.Reason(i)
		m.judged.WithLabelValues(reason.Action().String(), reason.String()).Add(float64(n))
	}
	for c, d := range r.Classes {
		m.deletedOf(c).Add(float64(d.Deleted))
	}
	m.gone.Add(float64(r.Gone))
	m.busy.Add(float64(r.Busy))
	m.failed.Add(float64(r.Failed))
}

// Disagrees implements agent.Observer. The gauge of disagreements is that of the
// status, which also tells when they end.
func (m *Metrics) Disagrees(agent.Disagreement) {}

// Settled implements agent.Observer.
func (m *Metrics) Settled(s agent.Settled) {
	m.settled.Observe(s.After.Seconds())
	if s.Repaired > 0 {
		m.repaired.Observe(s.Repaired.Seconds())
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}
