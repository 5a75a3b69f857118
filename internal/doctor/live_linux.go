package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/netns"
	"github.com/flowsweep/flowsweep/internal/nft"
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

func (l *live) Exist(objects ...nft.Object) ([]bool, error) {
	return nft.Exist(l.namespace, objects...)
}
