package admin

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flowsweep/flowsweep/agent"
)

// state shows what the agent knows of itself at the moment of a scrape.
type state struct {
	agent   Agent
	table   *table
	version string
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	buildInfo = desc("flowsweep_build_info", "1, labelled with the version.", "version")
	ready     = desc("flowsweep_ready",
		"1 where all sources have delivered their first full list and a first pass is done, else 0.")
	dryRun = desc("flowsweep_dry_run", "1 where nothing is deleted, else 0.")

	frontends  = desc("flowsweep_frontends", "Frontends known.")
	tombstones = desc("flowsweep_tombstones", "Frontends that are gone and whose flows are still cleaned.")
	unsettled  = desc("flowsweep_unsettled_frontends",
		"Frontends, and addresses of this host, that changed and are watched until no flow is stale; "+
			"after the agent's start one more, for all of them.")
	disagrees = desc("flowsweep_ruleset_disagrees",
		"Wrong translations that the rules make again and again, whatever is deleted.")

	sourceComplete = desc("flowsweep_source_complete",
		"1 where the source has delivered its first full list, else 0.", "source")
	sourceFault = desc("flowsweep_source_fault",
		"1 where something keeps the source from being up to date, else 0.", "source")
	sourceHeld = desc("flowsweep_source_held",
		"1 where a list of the source is held back because it lacks more than half of the frontends, else 0.", "source")
	sourceFrontends = desc("flowsweep_source_frontends", "Frontends of the source that are in force.", "source")
	sourceUpdated   = desc("flowsweep_source_updated_timestamp_seconds",
		"When the source delivered something last, in seconds since 1970; absent before the first time.", "source")

	failures = desc("flowsweep_failed_passes_in_a_row", "Passes that have failed since the last one with result ok.")
	lastFull = desc("flowsweep_last_full_pass_timestamp_seconds",
		"When the last full pass with result ok began, in seconds since 1970; absent before the first.")
	stateFault = desc("flowsweep_state_file_fault",
		"1 where the state file cannot be written, else 0.")

	tableEntries = desc("flowsweep_table_entries",
		"Flows in the conntrack table, of any kind; absent where the kernel has not told of late.")
	tableMax = desc("flowsweep_table_max_entries",
		"Flows that the conntrack table may hold (nf_conntrack_max); absent where the kernel has not told of late.")
)

// Describe implements prometheus.Collector.
func (*state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		buildInfo, ready, dryRun, frontends, tombstones, unsettled, disagrees,
		sourceComplete, sourceFault, sourceHeld, sourceFrontends, sourceUpdated,
		failures, lastFull, stateFault, tableEntries, tableMax,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It asks the kernel nothing.
func (s *state) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	when := func(d *prometheus.Desc, t time.Time, labels ...string) {
		if !t.IsZero() {
			gauge(d, float64(t.UnixMilli())/1000, labels...)
		}
	}
	st := s.agent.Status()
	gauge(buildInfo, 1, s.version)
	gauge(ready, number(unready(&st) == ""))
	gauge(dryRun, number(st.DryRun))
	gauge(frontends, float64(st.Frontends))
	gauge(tombstones, float64(st.Tombstones))
	gauge(unsettled, float64(st.UnsettledTotal))
	gauge(disagrees, float64(len(st.Disagrees)))
	for _, src := range st.Sources {
		gauge(sourceComplete, number(src.Complete), src.Name)
		gauge(sourceFault, number(src.Fault != ""), src.Name)
		gauge(sourceHeld, number(src.Held != ""), src.Name)
		gauge(sourceFrontends, float64(src.Frontends), src.Name)
		when(sourceUpdated, src.Updated, src.Name)
	}
	gauge(failures, float64(st.Failures))
	when(lastFull, st.LastFull)
	gauge(stateFault, number(st.StateFile != ""))
	if entries, limit, ok := s.table.last(); ok {
		gauge(tableEntries, float64(entries))
		if limit > 0 {
			gauge(tableMax, float64(limit))
		}
	}
}

// unready tells why an agent is not ready, "" where it is.
func unready(s *agent.Status) string {
	if s.NotReady == "" && !s.Ready {
		return "not ready"
	}
	return s.NotReady
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
