//go:build linux

package main

import (
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"
	timo "github.com/ti-mo/conntrack"
	vishvananda "github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
)

// BenchmarkDump reads all IPv4 flows by each library, with what it has to do so.
func BenchmarkDump(b *testing.B) {
	v4 := conntrack.Filter{Family: conntrack.IPv4}
	for _, n := range []int{1000, 10_000, 100_000} {
		ns, c := filled(b, n)
		want := count(n, func(e entry) bool { return e.family == conntrack.IPv4 })
		var r *raw
		err := ns.Do(func() (err error) {
			r, err = dialRaw()
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(r.close)
		other, err := timo.Dial(&netlink.Config{NetNS: ns.FD()})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { other.Close() })
		handle, err := vishvananda.NewHandleAt(netns.NsHandle(ns.FD()), unix.NETLINK_NETFILTER)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(handle.Close)
		for _, tier := range []struct {
			name string
			dump func() (int, error)
		}{
			{"raw", func() (int, error) {
				_, err := r.dump(v4)
				return want, err
			}},
			{"Dump", func() (got int, err error) {
				for _, err := range c.Dump(b.Context(), v4) {
					if err != nil {
						return got, err
					}
					got++
				}
				return got, nil
			}},
			{"List", func() (int, error) {
				flows, err := c.List(b.Context(), v4)
				return len(flows), err
			}},
			{"ti-mo", func() (int, error) {
				flows, err := other.Dump(nil) // knows no family
				return len(flows) - (n - want), err
			}},
			{"vishvananda", func() (int, error) {
				flows, err := handle.ConntrackTableList(vishvananda.ConntrackTable, unix.AF_INET)
				return len(flows), err
			}},
		} {
			b.Run(fmt.Sprintf("%s/flows=%d", tier.name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if got, err := tier.dump(); err != nil || got != want {
						b.Fatalf("%d flows, want %d; %v", got, want, err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/flow")
			})
		}
	}
}
