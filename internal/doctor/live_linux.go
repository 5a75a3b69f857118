package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/netns"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/ruleset"
)

// Host examines this host, in a network namespace given as a path; "" is the
// present one. Entering another one needs CAP_SYS_ADMIN.
func Host(ctx context.Context, namespace string) (r *Report, err error) {
	s := System{Root: "/", NetNS: namespace, Kernel: &live{namespace}}
	if namespace == "" {
		return Examine(ctx, s)
	}
	ns, err := os.Open(namespace)
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	// proc shows each thread the sysctls and tables of its own namespace.
	err = netns.Do(ns, func() (err error) {
		r, err = Examine(ctx, s)
		return err
	})
	return r, err
}

// live is the running kernel.
type live struct{ namespace string }

// dial opens the table for one question: a doctor asks few.
func (l *live) dial(ask func(*conntrack.Conn) error) error {
	c, err := conntrack.Dial(conntrack.Config{NetNS: l.namespace})
	if err != nil {
		return err
	}
	defer c.Close()
	return ask(c)
}

func (l *live) Count(ctx context.Context) (n int, err error) {
	err = l.dial(func(c *conntrack.Conn) (err error) {
		n, err = c.Count(ctx)
		return err
	})
	return n, err
}

func (l *live) Probe(ctx context.Context) (f conntrack.Features, err error) {
	err = l.dial(func(c *conntrack.Conn) (err error) {
		f, err = c.Probe(ctx)
		return err
	})
	return f, err
}

func (l *live) Sample(ctx context.Context, limit int, f func(*conntrack.Flow)) error {
	return l.dial(func(c *conntrack.Conn) error {
		n := 0
		for fl, err := range c.Dump(ctx, conntrack.Filter{}) {
			// A table that was resized meanwhile has shown enough.
			if err != nil && !errors.Is(err, conntrack.ErrResized) {
				return err
			}
			if err != nil || n == limit {
				break
			}
			n++
			f(fl)
		}
		return nil
	})
}

func (l *live) Generation() (gen uint32, ok bool, err error) {
	g, err := nft.Open(l.namespace)
	if err != nil {
		return 0, false, err
	}
	defer g.Close()
	return g.Get()
}

// Rules times the reading alone, and then judges.
func (l *live) Rules(ctx context.Context, limit int) (*Ruleset, error) {
	start := time.Now()
	j, err := ruleset.NewJudge(ctx, ruleset.Config{NetNS: l.namespace})
	if err != nil {
		return nil, err
	}
	defer j.Close()
	r := &Ruleset{Took: time.Since(start), Size: j.Rules().Size(), Others: j.Translators()}
	if j.Generation() == 0 {
		return nil, ruleset.ErrNoNFT
	}
	unanswered := map[netip.Addr]Nobody{}
	err = l.Sample(ctx, limit, func(f *conntrack.Flow) {
		switch v := j.Judge(f); v.Verdict {
		case ruleset.NotJudged, ruleset.OtherZone, ruleset.Expected:
			return
		case ruleset.MayPass, ruleset.Unpredictable, ruleset.UnknownTranslator:
			r.Doubted++
		case ruleset.Right:
			if f.Translated() && !f.Replied() {
				x := unanswered[f.Reply.Src]
				x.To, x.Flows = f.Reply.Src, x.Flows+1
				if x.By == (ruleset.Rule{}) {
					x.By = v.By
				}
				unanswered[x.To] = x
			}
		}
		r.Flows++
	})
	if err != nil {
		return nil, err
	}
	// Where that cannot be asked, nothing is told of it.
	silent, _ := Silent(ctx, l.namespace, slices.Collect(maps.Keys(unanswered)))
	for _, a := range slices.SortedFunc(maps.Keys(silent), netip.Addr.Compare) {
		x := unanswered[a]
		x.Where = silent[a]
		r.Nobody = append(r.Nobody, x)
	}
	// Only now: it decodes every rule, of which the flows need few.
	r.NotUnderstood = j.Rules().NotUnderstood()
	r.Shadowed = j.Rules().Shadowed()
	return r, nil
}

const (
	// maxNamespaces and namespacesFor bound the looking into others.
	maxNamespaces = 256
	namespacesFor = 2 * time.Second
)

// NAT enters the others one by one, which takes CAP_SYS_ADMIN.
func (l *live) NAT(ctx context.Context, pids map[string]int) (list []Elsewhere, all bool, err error) {
	at := map[string]string{}
	for ns, pid := range pids {
		at[ns] = fmt.Sprintf("/proc/%d/ns/net", pid)
	}
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, false, err
	}
	all = true
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, false, err
	}
	for _, m := range mountsOf("nsfs", mounts) {
		if strings.HasPrefix(m.root, "net:[") && m.root != own {
			at[m.root] = m.path
		}
	}
	// Names last: they are the shortest, and some are no mounts of this process.
	for _, named := range []string{"/run/docker/netns", "/run/netns"} {
		names, err := os.ReadDir(named)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = false
		}
		for _, name := range names {
			var st unix.Stat_t
			path := filepath.Join(named, name.Name())
			if err := unix.Stat(path, &st); err != nil {
				continue
			}
			if ns := fmt.Sprintf("net:[%d]", st.Ino); ns != own {
				at[ns] = path
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, namespacesFor)
	defer cancel()
	n := 0
	for _, path := range at {
		if n++; n > maxNamespaces || ctx.Err() != nil {
			return list, false, nil
		}
		x, err := translates(ctx, path)
		switch {
		case errors.Is(err, fs.ErrPermission):
			return nil, false, errors.New("it takes CAP_SYS_ADMIN to enter namespaces, and CAP_NET_ADMIN in them")
		case err != nil: // it may be gone
			all = false
		}
		if x.Rules || x.Legacy || x.IPVS {
			list = append(list, x)
		}
	}
	return list, all, nil
}

// translates looks by what a namespace translates, and returns what it has found
// beside an error.
func translates(ctx context.Context, path string) (x Elsewhere, err error) {
	var errs [3]error
	x.Path = path
	x.Rules, errs[0] = hasNAT(ctx, path)
	x.Legacy, errs[1] = nft.LegacyNAT(path)
	x.IPVS, errs[2] = nft.IPVS(path)
	return x, errors.Join(errs[:]...)
}

func hasNAT(ctx context.Context, path string) (bool, error) {
	c, err := ruleset.Open(path)
	if err != nil {
		return false, err
	}
	defer c.Close()
	r, err := c.Load(ctx)
	if errors.Is(err, ruleset.ErrNoNFT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return r.Size().Bases > 0, nil
}

// SocketPrograms asks the root of cgroup v2, wherever it is mounted.
func (l *live) SocketPrograms() (hooks []string, root string, err error) {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, "", err
	}
	list := mountsOf("cgroup2", mounts)
	if len(list) == 0 {
		return nil, "", errors.New("cgroup v2 is not mounted here, so that programs at its root are not seen")
	}
	hooks, err = socketPrograms(list[0].path)
	return hooks, list[0].path, err
}

func (l *live) Exist(objects ...nft.Object) ([]bool, error) {
	return nft.Exist(l.namespace, objects...)
}
