package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/flowsweep/flowsweep/internal/nft"
)

// maxProcesses bounds the time that looking at processes takes.
const maxProcesses = 20_000

// scan is what was seen of the processes in this PID namespace.
type scan struct {
	seen       int
	more       bool           // there are more than were looked at
	pids       map[string]int // the lowest, by name
	namespaces map[string]int // of networks, other than this one, and the lowest PID
	hidden     int            // processes whose namespace may not be read
}

func (e *exam) processes() (*scan, error) {
	if e.scanned != nil {
		return e.scanned, nil
	}
	dir, err := os.Open(e.proc(""))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	own, err := os.Readlink(e.proc("thread-self/ns/net"))
	if err != nil {
		return nil, err
	}
	s := &scan{pids: map[string]int{}, namespaces: map[string]int{}}
	for !s.more {
		names, err := dir.Readdirnames(1000)
		for _, name := range names {
			pid, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			if s.seen == maxProcesses {
				s.more = true
				break
			}
			e.look(s, pid, own)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	e.scanned = s
	return s, nil
}

// look adds one process, which may be gone by now.
func (e *exam) look(s *scan, pid int, own string) {
	name, err := e.text(strconv.Itoa(pid) + "/comm")
	if err != nil {
		return
	}
	s.seen++
	if first, ok := s.pids[name]; !ok || pid < first {
		s.pids[name] = pid
	}
	// The link of a kernel thread or of another user's process takes
	// CAP_SYS_PTRACE.
	switch ns, err := os.Readlink(e.proc(strconv.Itoa(pid) + "/ns/net")); {
	case errors.Is(err, os.ErrPermission):
		s.hidden++
	case err == nil && ns != own:
		if first, ok := s.namespaces[ns]; !ok || pid < first {
			s.namespaces[ns] = pid
		}
	}
}

// of names what was looked at.
func (s *scan) of() string {
	switch {
	case s.more:
		return fmt.Sprintf("the first %d processes", s.seen)
	case s.seen == 1:
		return "the one process that can be seen"
	}
	return fmt.Sprintf("%d processes", s.seen)
}

var namespaces = check{
	id:  "namespaces",
	why: "each has a conntrack table of its own, and one agent serves one namespace",
	run: func(_ context.Context, e *exam) []Finding {
		s, err := e.processes()
		if err != nil {
			return unchecked(err)
		}
		what := fmt.Sprintf("%d others among %s", len(s.namespaces), s.of())
		switch len(s.namespaces) {
		case 0:
			what = "no other among " + s.of()
		case 1:
			what = "1 other among " + s.of()
		}
		if s.hidden > 0 {
			what += fmt.Sprintf("; those of %d may not be read by this user", s.hidden)
		}
		switch {
		case len(s.namespaces) > 0:
			return found(Info, what, "nothing for pods and containers, whose services are translated in the host's; "+
				"where another one translates for itself (nested Docker, kind, a router in a namespace), "+
				"run one agent for each, with --netns")
		case s.hidden > 0:
			f := found(Info, what, "")
			f[0].Unchecked = true
			return f
		}
		return found(OK, what, "")
	},
}

// proxy is something known that translates, or forwards in another way.
type proxy struct {
	id, name string
	comms    []string // names of its processes, 15 bytes at most
	objects  []nft.Object
	why, do  string
}

var knownProxies = []proxy{
	{
		"kube-proxy", "kube-proxy",
		[]string{"kube-proxy"},
		[]nft.Object{
			{Family: nft.IPv4, Table: "kube-proxy"},
			{Family: nft.IPv6, Table: "kube-proxy"},
			{Family: nft.IPv4, Table: "nat", Chain: "KUBE-SERVICES"},
			{Family: nft.IPv6, Table: "nat", Chain: "KUBE-SERVICES"},
		},
		"kube-proxy cleans stale UDP flows of its services by itself, but neither those of deleted services, " +
			"nor of node ports on addresses that it does not list, nor of node ports without endpoints",
		"give flowsweep the cluster's state: kubectl get services,endpointslices,nodes,pods -A -o yaml | " +
			"flowsweep plan --state - --node NAME",
	},
	{
		"docker", "Docker",
		[]string{"dockerd"},
		[]nft.Object{
			{Family: nft.IPv4, Table: "nat", Chain: "DOCKER"},
			{Family: nft.IPv6, Table: "nat", Chain: "DOCKER"},
			{Family: nft.IPv4, Table: "docker-bridges"},
			{Family: nft.IPv6, Table: "docker-bridges"},
		},
		"published ports are frontends whose backend moves with every new container",
		"flowsweep plan without any input judges by the rules that Docker writes, and names containers",
	},
	{
		"podman", "Podman",
		[]string{"podman", "aardvark-dns"},
		[]nft.Object{
			{Family: nft.INet, Table: "netavark"},
			{Family: nft.IPv4, Table: "nat", Chain: "NETAVARK-HOSTPORT-DNAT"},
			{Family: nft.IPv6, Table: "nat", Chain: "NETAVARK-HOSTPORT-DNAT"},
		},
		"published ports are frontends whose backend moves with every new container",
		"flowsweep plan without any input judges by the rules that Podman writes; " +
			"ports of rootless containers are forwarded in user space",
	},
	{
		"cilium", "Cilium",
		[]string{"cilium-agent"},
		[]nft.Object{{Family: nft.IPv4, Table: "nat", Chain: "CILIUM_PRE_nat"}},
		"services that Cilium forwards with eBPF (kubeProxyReplacement) have no flows in conntrack, " +
			"where flowsweep could neither see nor repair them",
		"use flowsweep for what kube-proxy or the host's own NAT still forwards",
	},
	{
		"antrea", "Antrea",
		[]string{"antrea-agent"},
		[]nft.Object{{Family: nft.IPv4, Table: "nat", Chain: "ANTREA-PREROUTING"}},
		"AntreaProxy forwards services in Open vSwitch, whose flows are in zones of its own",
		"see the zones above, and have them judged (--zone) with flowsweep plan before anything is deleted",
	},
}

var proxies = check{
	id:  "proxies",
	why: "who forwards decides what flowsweep must be told, and what it can see",
	run: func(_ context.Context, e *exam) []Finding {
		s, err := e.processes()
		if err != nil {
			return unchecked(err)
		}
		var objects []nft.Object
		for _, p := range knownProxies {
			objects = append(objects, p.objects...)
		}
		there, rulesErr := e.Kernel.Exist(objects...)
		var list []Finding
		names := make([]string, 0, len(knownProxies))
		for _, p := range knownProxies {
			names = append(names, p.name)
			if signs := p.signs(s, objects, there); len(signs) > 0 {
				list = append(list, Finding{
					ID: p.id, Level: Info, What: "seen: " + strings.Join(signs, ", "), Why: p.why, Do: p.do,
				})
			}
		}
		if len(list) > 0 {
			return list
		}
		last := len(names) - 1
		what := "no " + strings.Join(names[:last], ", ") + " or " + names[last] + " among " + s.of()
		switch {
		case rulesErr == nil:
			what += " or in nftables"
		case !errors.Is(rulesErr, nft.ErrNoNFT):
			f := unchecked(rulesErr)
			f[0].What = what + "; nftables was not looked into: " + reason(rulesErr)
			return f
		}
		return found(OK, what, "")
	},
}

// signs tells by what a proxy is seen. there answers for objects, and is empty
// where nobody could ask.
func (p *proxy) signs(s *scan, objects []nft.Object, there []bool) (signs []string) {
	for _, comm := range p.comms {
		if pid, ok := s.pids[comm]; ok {
			signs = append(signs, fmt.Sprintf("process %s (%d)", comm, pid))
		}
	}
	for i, o := range objects {
		if i < len(there) && there[i] && slices.Contains(p.objects, o) {
			signs = append(signs, o.String())
		}
	}
	return signs
}
