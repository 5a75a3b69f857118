package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

var namespace = check{
	id:  "namespace",
	why: "each network namespace has a conntrack table of its own, and flowsweep sees one",
	run: func(_ context.Context, e *exam) []Finding {
		own, err := os.Readlink(e.proc("thread-self/ns/net"))
		if err != nil {
			return unchecked(err)
		}
		if e.NetNS != "" {
			return found(OK, fmt.Sprintf("looking into %s (%s)", e.NetNS, own), "")
		}
		// Only the first namespace of the machine may change the size of the hash
		// table that all share (nf_conntrack_standalone_init_sysctl).
		const file = "sys/net/netfilter/nf_conntrack_buckets"
		st, err := os.Stat(e.proc(file))
		switch {
		case err != nil:
			return unchecked(err)
		case st.Mode().Perm()&0o200 == 0:
			return found(Warn, "this is a namespace of its own ("+own+"), not the host's first",
				"in a container use the host's network (hostNetwork: true, --network=host), or give --netns; "+
					"where the services are forwarded in this namespace, as in a node of kind, nothing")
		}
		return found(OK, "the host's first network namespace ("+own+")", "")
	},
}

const capNetAdmin = 12 // CAP_NET_ADMIN

var capability = check{
	id:  "capability",
	why: "without CAP_NET_ADMIN the kernel neither lists nor deletes flows",
	run: func(_ context.Context, e *exam) []Finding {
		sets, err := e.capabilities()
		if err != nil {
			return unchecked(err)
		}
		has := func(set string) bool { return sets[set]&(1<<capNetAdmin) != 0 }
		const grant = "run as root, or grant it: setcap cap_net_admin+ep on the program, " +
			"AmbientCapabilities=CAP_NET_ADMIN in a systemd unit, capabilities in a container"
		switch {
		case has("CapEff"):
			return found(OK, "CAP_NET_ADMIN is effective", "")
		case has("CapPrm"):
			return found(Mend, "CAP_NET_ADMIN is permitted but not effective",
				"set the program's effective flag: setcap cap_net_admin+ep")
		case !has("CapBnd"):
			return found(Mend, "CAP_NET_ADMIN is missing, and the bounding set does not let this process get it",
				"grant it where the process is started: CapabilityBoundingSet= of the systemd unit, "+
					"capabilities of the container (setcap alone will not do)")
		}
		return found(Mend, "CAP_NET_ADMIN is missing", grant)
	},
}

// capabilities returns the sets of the calling thread: "CapEff" and so on.
func (e *exam) capabilities() (map[string]uint64, error) {
	status, err := e.text("thread-self/status")
	if err != nil {
		return nil, err
	}
	sets := map[string]uint64{}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		if !strings.HasPrefix(name, "Cap") {
			continue
		}
		set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %s is not a set of capabilities", e.proc("thread-self/status"), name)
		}
		sets[name] = set
	}
	if len(sets) == 0 {
		return nil, fmt.Errorf("%s tells no capabilities", e.proc("thread-self/status"))
	}
	return sets, nil
}

var ctnetlink = check{
	id:  "ctnetlink",
	why: "flowsweep reads and deletes flows over ctnetlink",
	run: func(ctx context.Context, e *exam) []Finding {
		_, err := e.Kernel.Count(ctx)
		switch {
		case err == nil:
			return found(OK, "the kernel answers", "")
		case errors.Is(err, conntrack.ErrNoCtnetlink):
			return found(Mend, "this kernel has no ctnetlink",
				"load the module nf_conntrack_netlink, or build the kernel with CONFIG_NF_CT_NETLINK")
		case errors.Is(err, fs.ErrPermission):
			if sets, cerr := e.capabilities(); cerr == nil && sets["CapEff"]&(1<<capNetAdmin) != 0 {
				return found(Mend, "the kernel refuses though CAP_NET_ADMIN is effective: "+
					"the network namespace belongs to another user namespace",
					"run in the user namespace that owns the network namespace: not in a rootless container")
			}
			return unchecked(err)
		}
		return found(Mend, "the kernel does not answer: "+err.Error(), "look into the kernel's log")
	},
}

// filter is one criterion of conntrack.Features.
type filter struct {
	id     string
	get    func(*conntrack.Features) []conntrack.Support // of IPv4 and IPv6, or of both
	lack   [2]Level                                      // of each, where it lacks
	effect string                                        // of a lack
	do     string
}

const newerKernel = "nothing must be done; "

var filterList = []filter{
	{
		"filter-protocol",
		func(f *conntrack.Features) []conntrack.Support { return []conntrack.Support{f.V4.Proto, f.V6.Proto} },
		[2]Level{Warn, Warn},
		"every pass copies all flows of a family, at about 2.2 µs each, where the kernel would skip most at 0.3 µs",
		newerKernel + "kernels from 5.8 on filter by protocol",
	},
	{
		"filter-address",
		func(f *conntrack.Features) []conntrack.Support { return []conntrack.Support{f.V4.Addr, f.V6.Addr} },
		[2]Level{Warn, Info},
		"after a change of one backend all flows of its protocol and port are copied instead of that backend's",
		newerKernel + "kernels from 5.8 on do it for IPv4, most compare IPv6 addresses the wrong way round " +
			"(flowsweep then compares them itself)",
	},
	{
		"filter-ports",
		func(f *conntrack.Features) []conntrack.Support { return []conntrack.Support{f.V4.Ports, f.V6.Ports} },
		[2]Level{Info, Info},
		"after a change of one service all flows of its protocol are copied instead of its port's",
		newerKernel + "kernels from 5.8 on do it",
	},
	{
		"filter-sctp-ports",
		func(f *conntrack.Features) []conntrack.Support {
			return []conntrack.Support{f.V4.SCTPPorts, f.V6.SCTPPorts}
		},
		[2]Level{Info, Info},
		"SCTP flows are narrowed down by address and protocol alone, which costs time only where there are very many",
		"nothing: no kernel known does it",
	},
	{
		"filter-status",
		func(f *conntrack.Features) []conntrack.Support { return []conntrack.Support{f.Status} },
		[2]Level{Info},
		"where only unanswered flows are swept (TCP and SCTP by default), the answered ones are copied too",
		newerKernel + "kernels from 5.15 on do it",
	},
	{
		"filter-zone",
		func(f *conntrack.Features) []conntrack.Support { return []conntrack.Support{f.Zone} },
		[2]Level{Info},
		"flows of all zones are copied, which costs time only where other zones have many",
		newerKernel + "kernels from 6.8 on do it",
	},
}

var filters = check{
	id:  "filters",
	why: "the more the kernel skips by itself, the cheaper is a pass",
	run: func(ctx context.Context, e *exam) []Finding {
		have, err := e.Kernel.Probe(ctx)
		if err != nil {
			return unchecked(err)
		}
		list := make([]Finding, 0, len(filterList))
		for _, f := range filterList {
			list = append(list, f.finding(&have))
		}
		return list
	},
}

func (f *filter) finding(have *conntrack.Features) Finding {
	out := Finding{ID: f.id, Why: "without it " + f.effect}
	support := f.get(have)
	var words []string
	unknown := false
	for i, s := range support {
		word := s.String()
		if len(support) == 2 {
			word = [2]string{"IPv4 ", "IPv6 "}[i] + word
		}
		words = append(words, word)
		switch s {
		case conntrack.Unknown:
			unknown = true
		case conntrack.NotHonoured:
			out.Level, out.Why, out.Do = max(out.Level, f.lack[i]), f.effect, f.do
		}
	}
	out.What = strings.Join(words, ", ")
	if unknown && out.Level == OK {
		out.Level, out.Unchecked = Info, true
		out.What += ": it takes a flow in the table to ask about, or CAP_SYS_ADMIN to ask in a scratch namespace"
	}
	return out
}
