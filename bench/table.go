//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
)

// fill creates those of the first n flows that are not in the table and that
// missing selects (nil: all), and makes sure that the table then holds n flows.
func fill(ctx context.Context, c *conntrack.Conn, n int, missing func(entry) bool) error {
	for i := range n {
		e := entryAt(i)
		if missing != nil && !missing(e) {
			continue
		}
		if err := c.Create(ctx, e.flow()); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("flow %d of %d: %w", i, n, err)
		}
	}
	switch got, err := c.Count(ctx); {
	case err != nil:
		return err
	case got != n:
		return fmt.Errorf("the table holds %d flows instead of %d", got, n)
	}
	return nil
}

// limitPath is one setting for all network namespaces, and can be written in the
// first one alone (nf_conntrack_standalone_init_sysctl).
const limitPath = "/proc/sys/net/netfilter/nf_conntrack_max"

// raiseLimit lets tables hold n flows. The caller calls restore when it is done.
func raiseLimit(n int) (restore func() error, err error) {
	old, err := readInt(limitPath)
	if err != nil || old == 0 || old >= n {
		return func() error { return nil }, err
	}
	if err := os.WriteFile(limitPath, []byte(strconv.Itoa(n)), 0); err != nil {
		return nil, fmt.Errorf("nf_conntrack_max is %d and cannot be raised to %d without root: %w", old, n, err)
	}
	fmt.Fprintf(os.Stderr, "nf_conntrack_max is %d from now on. Should this program be killed, set it back: "+
		"sysctl net.netfilter.nf_conntrack_max=%d\n", n, old)
	return func() error { return os.WriteFile(limitPath, []byte(strconv.Itoa(old)), 0) }, nil
}

func readInt(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}
