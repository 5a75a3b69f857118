package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Shares of nf_conntrack_max, in percent.
const (
	fillWarn = 80
	fillMend = 95
)

var fill = check{
	id:  "table-fill",
	why: "a full table drops the first packet of every new flow (\"nf_conntrack: table full, dropping packet\")",
	run: func(_ context.Context, e *exam) []Finding {
		count, err := e.conntrackSysctl("nf_conntrack_count")
		if err != nil {
			return unchecked(err)
		}
		limit, err := e.conntrackSysctl("nf_conntrack_max")
		if err != nil {
			return unchecked(err)
		}
		if limit == 0 {
			return found(OK, plural(count, "flow")+", without a limit", "")
		}
		percent := int64(count) * 100 / int64(limit)
		what := fmt.Sprintf("%d of %s, %d %%", count, plural(limit, "flow"), percent)
		do := fmt.Sprintf("raise the limit on the host: sysctl -w net.netfilter.nf_conntrack_max=%d; "+
			"and look whose flows they are", 2*limit)
		switch {
		case percent >= fillMend:
			return found(Mend, what, do)
		case percent >= fillWarn:
			return found(Warn, what, do)
		}
		return found(OK, what, "")
	},
}

// maxPerBucket is how many flows may come on a bucket of the hash table when it
// is full; each is in two buckets, one for either direction. The kernel's own
// choice is 1, and was 4 before 5.15.
const maxPerBucket = 8

var buckets = check{
	id:  "buckets",
	why: "long chains in the hash table slow down every packet and every pass",
	run: func(_ context.Context, e *exam) []Finding {
		n, err := e.conntrackSysctl("nf_conntrack_buckets")
		if err != nil {
			return unchecked(err)
		}
		limit, err := e.conntrackSysctl("nf_conntrack_max")
		if err != nil {
			return unchecked(err)
		}
		what := fmt.Sprintf("%d for at most %s", n, plural(limit, "flow"))
		if limit > maxPerBucket*n {
			return found(Warn, what+fmt.Sprintf(": %d a bucket when it is full", limit/max(n, 1)),
				fmt.Sprintf("on the host: sysctl -w net.netfilter.nf_conntrack_buckets=%d", limit/4))
		}
		return found(OK, what, "")
	},
}

// Lives of UDP flows, in seconds, above which they are worth a word. The
// kernel's defaults are 30 and 120.
const (
	udpLong       = 120
	udpStreamLong = 600
)

var udpTimeout = check{
	id:  "udp-timeout",
	why: "so long a UDP flow stays after its last datagram: to a dead backend, too, and it fills the table",
	run: func(_ context.Context, e *exam) []Finding {
		once, err := e.conntrackSysctl("nf_conntrack_udp_timeout")
		if err != nil {
			return unchecked(err)
		}
		stream, err := e.conntrackSysctl("nf_conntrack_udp_timeout_stream")
		if err != nil {
			return unchecked(err)
		}
		what := fmt.Sprintf("%d s, and %d s for flows that were answered", once, stream)
		if once <= udpLong && stream <= udpStreamLong {
			return found(OK, what, "")
		}
		return found(Warn, what, "unless an application needs it, take the kernel's defaults: "+
			"sysctl -w net.netfilter.nf_conntrack_udp_timeout=30 net.netfilter.nf_conntrack_udp_timeout_stream=120")
	},
}

var tcpLoose = check{
	id: "tcp-loose",
	why: "a connection whose flow was deleted is picked up in its middle only if nf_conntrack_tcp_loose is on; " +
		"otherwise its packets reach no backend that could reset it",
	run: func(_ context.Context, e *exam) []Finding {
		on, err := e.conntrackSysctl("nf_conntrack_tcp_loose")
		switch {
		case err != nil:
			return unchecked(err)
		case on == 0:
			return found(Info, "off", "nothing with the default policy, which deletes no established TCP; "+
				"with --sweep tcp=all clients wait for their own timeouts")
		}
		return found(OK, "on", "")
	},
}

// Groups of NETLINK_NETFILTER, as a mask: NFNLGRP_CONNTRACK_NEW, _UPDATE and
// _DESTROY.
const (
	netlinkNetfilter = 12
	conntrackGroups  = 0x7
)

var events = check{
	id: "events",
	why: "a listener to conntrack events about doubles what a new flow costs (7.4 to 14.3 µs measured); " +
		"flowsweep is none",
	run: func(_ context.Context, e *exam) []Finding {
		mode, err := e.conntrackSysctl("nf_conntrack_events")
		if err != nil {
			return unchecked(err)
		}
		listeners, err := e.listeners()
		if err != nil {
			return unchecked(err)
		}
		switch {
		case len(listeners) > 0 && mode != 0:
			return found(Info, "listened to by "+strings.Join(listeners, ", "),
				"if new flows are many and nobody needs the events, stop the listener")
		case mode == 1:
			return found(Info, "always on, and nobody listens (net.netfilter.nf_conntrack_events=1)",
				"sysctl -w net.netfilter.nf_conntrack_events=2, where the kernel has it, makes them only for listeners")
		case mode == 0:
			return found(OK, "off", "")
		}
		return found(OK, "nobody listens", "")
	},
}

// listeners returns who has a socket in this namespace that hears of flows, as
// "conntrackd (812)".
func (e *exam) listeners() (list []string, err error) {
	table, err := e.text("thread-self/net/netlink")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(table) {
		f := strings.Fields(line) // sk, protocol, port, groups, ... (netlink_native_seq_show)
		if len(f) < 4 || f[1] != strconv.Itoa(netlinkNetfilter) {
			continue
		}
		if groups, err := strconv.ParseUint(f[3], 16, 64); err != nil || groups&conntrackGroups == 0 {
			continue
		}
		// A process's first socket has its number for a port.
		who := "port " + f[2]
		if comm, err := e.text(f[2] + "/comm"); err == nil {
			who = comm + " (" + f[2] + ")"
		}
		list = append(list, who)
	}
	return list, nil
}

// sampleSize bounds the time that looking at flows takes: to about 0.2 s.
const sampleSize = 100_000

// census is what a walk over some of the table counted.
type census struct {
	seen    int
	zones   map[uint16]int
	offload int
}

var sample = check{
	id: "zones", // unless it can be made, when it gives two findings
	run: func(ctx context.Context, e *exam) []Finding {
		c := census{zones: map[uint16]int{}}
		err := e.Kernel.Sample(ctx, sampleSize, func(f *conntrack.Flow) {
			c.seen++
			c.zones[f.Zone]++
			if f.Status&(conntrack.StatusOffload|conntrack.StatusHWOffload) != 0 {
				c.offload++
			}
		})
		var zones, offload []Finding
		if err != nil {
			zones, offload = unchecked(err), unchecked(err)
		} else {
			zones, offload = c.byZone(), c.offloaded()
		}
		zones[0].ID = "zones"
		zones[0].Why = "zones other than 0 are somebody's own, such as Open vSwitch's: flows in them are not judged by default"
		offload[0].ID = "offload"
		offload[0].Why = "a flow in a flowtable cannot be deleted (EBUSY) until it comes back from there; " +
			"flowsweep tries again"
		return append(zones, offload...)
	},
}

// of names what was looked at.
func (c *census) of() string {
	switch c.seen {
	case 0:
		return "no flow in the table"
	case sampleSize:
		return fmt.Sprintf("of the first %d flows", c.seen)
	}
	return "of " + plural(c.seen, "flow")
}

func (c *census) byZone() []Finding {
	switch c.zones[0] {
	case 0:
		if c.seen == 0 {
			return found(OK, c.of(), "")
		}
	case c.seen:
		return found(OK, "all "+c.of()+" in zone 0", "")
	}
	zones := slices.SortedFunc(maps.Keys(c.zones), func(a, b uint16) int {
		return cmp.Or(cmp.Compare(c.zones[b], c.zones[a]), cmp.Compare(a, b))
	})
	const most = 5
	var parts []string
	for _, z := range zones[:min(len(zones), most)] {
		parts = append(parts, fmt.Sprintf("%d in zone %d", c.zones[z], z))
	}
	if more := len(zones) - most; more > 0 {
		parts = append(parts, "the others in "+plural(more, "zone")+" more")
	}
	return found(Info, c.of()+": "+strings.Join(parts, ", "),
		"where services are forwarded in one of them, have it judged too (--zone)")
}

func (c *census) offloaded() []Finding {
	switch {
	case c.seen == 0:
		return found(OK, c.of(), "")
	case c.offload == 0:
		return found(OK, "none "+c.of()+" in a flowtable", "")
	}
	return found(Info, fmt.Sprintf("%d %s in a flowtable", c.offload, c.of()),
		"where a service must be repaired at once when it moves, keep its flows out of the flowtable")
}
