// Package doctor examines what a host gives flowsweep to work with: the kernel,
// privileges, limits, what writes the rules, and what else is about. It changes
// nothing, and does without privilege as far as it can.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/nft"
)

// System is what the checks look at.
type System struct {
	// Root is the folder that holds proc: "/" on a living host.
	Root string
	// NetNS is the network namespace that the user has asked for, "" for the
	// present one. The calling thread must be in it.
	NetNS  string
	Kernel Kernel
}

// Kernel answers what proc does not tell. An answer that takes a privilege
// fails with fs.ErrPermission where that is missing.
type Kernel interface {
	// Count asks ctnetlink for the number of flows. A kernel without fails with
	// conntrack.ErrNoCtnetlink.
	Count(ctx context.Context) (int, error)
	// Probe finds out which filters the kernel honours.
	Probe(ctx context.Context) (conntrack.Features, error)
	// Sample calls f for the first flows of the table, limit at most.
	Sample(ctx context.Context, limit int, f func(*conntrack.Flow)) error
	// Generation is that of nf_tables, as nft.Generations.Get tells it.
	Generation() (gen uint32, ok bool, err error)
	// Exist tells which tables and chains there are.
	Exist(objects ...nft.Object) ([]bool, error)
	// Rules reads the NAT rules and judges the first flows of the table by them,
	// limit at most. A kernel without nf_tables fails with ruleset.ErrNoNFT.
	Rules(ctx context.Context, limit int) (*Ruleset, error)
	// NAT tells which other network namespaces translate: of those of the processes
	// given ("net:[INODE]" to PID), of those with a name, and of those that are
	// mounted. all is false where some were not looked into.
	NAT(ctx context.Context, pids map[string]int) (list []Elsewhere, all bool, err error)
	// SocketPrograms tells at which hooks of the cgroup root BPF programs see what
	// sockets connect or send to, and where that is mounted.
	SocketPrograms() (hooks []string, root string, err error)
}

// Elsewhere is another network namespace that translates.
type Elsewhere struct {
	Path                string // for --netns
	Rules, Legacy, IPVS bool   // by which of them
}

// check is one thing to look at. It may find several; what lacks an ID or a
// reason gets the check's own.
type check struct {
	id  string
	why string
	run func(context.Context, *exam) []Finding
}

// checks are made, and listed in JSON, in this order.
var checks = []check{
	namespace, capability, ctnetlink, filters,
	fill, buckets, udpTimeout, tcpLoose, events, sample,
	settling, rules, ipvs, sockets, namespaces, otherRules, proxies,
}

// Examine makes every check. One that cannot be made says so in its finding.
func Examine(ctx context.Context, s System) (*Report, error) {
	e := &exam{System: s}
	r := &Report{NetNS: s.NetNS, Findings: []Finding{}}
	if release, err := e.text("sys/kernel/osrelease"); err == nil {
		r.Release = release
	}
	for _, c := range checks {
		for _, f := range c.run(ctx, e) {
			if f.ID == "" {
				f.ID = c.id
			}
			if f.Why == "" {
				f.Why = c.why
			}
			r.add(f)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// exam is one run of the checks.
type exam struct {
	System
	scanned *scan // of processes, once made
}

// proc returns the path of a file below proc. The files of a thread's network
// namespace are below thread-self, since self is the whole process's.
func (e *exam) proc(name string) string { return filepath.Join(e.Root, "proc", name) }

// text returns what a file below proc holds, without the end of its line.
func (e *exam) text(name string) (string, error) {
	b, err := os.ReadFile(e.proc(name))
	return strings.TrimSpace(string(b)), err
}

// number returns the number in a file below proc.
func (e *exam) number(name string) (int, error) {
	s, err := e.text(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a number", e.proc(name), s)
	}
	return n, nil
}

// conntrackSysctl returns the value of net.netfilter.NAME.
func (e *exam) conntrackSysctl(name string) (int, error) {
	n, err := e.number("sys/net/netfilter/" + name)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("this kernel has no net.netfilter.%s, or does not track connections (yet)", name)
	}
	return n, err
}

func found(l Level, what, do string) []Finding {
	return []Finding{{Level: l, What: what, Do: do}}
}

// unchecked is the finding of a check that could not be made.
func unchecked(err error) []Finding {
	return []Finding{{Level: Info, Unchecked: true, What: "not checked: " + reason(err)}}
}

// reason is an error in few words. What lacks is a finding of its own.
func reason(err error) string {
	var path *fs.PathError
	switch {
	case errors.As(err, &path) && errors.Is(err, fs.ErrPermission):
		return path.Path + " may not be read by this user"
	case errors.Is(err, fs.ErrPermission):
		return "it takes CAP_NET_ADMIN"
	}
	return err.Error()
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}
