//go:build linux

package main

import (
	"testing"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// The parts of a table are together as long as the whole, so that each filter
// reached the kernel as it was meant.
func TestRawDumps(t *testing.T) {
	ns, _ := filled(t, 2000)
	var r *raw
	err := ns.Do(func() (err error) {
		r, err = dialRaw()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	zone, other := uint16(0), uint16(7)
	some := entryAt(0).flow()
	for _, tt := range []struct {
		name  string
		of    conntrack.Filter
		parts []conntrack.Filter
	}{
		{"families", conntrack.Filter{}, []conntrack.Filter{{Family: conntrack.IPv4}, {Family: conntrack.IPv6}}},
		{"protocols", conntrack.Filter{Family: conntrack.IPv6}, []conntrack.Filter{
			{Family: conntrack.IPv6, Proto: conntrack.UDP}, {Family: conntrack.IPv6, Proto: conntrack.TCP},
		}},
		{"status", udp4, []conntrack.Filter{
			{Family: conntrack.IPv4, Proto: conntrack.UDP, Set: conntrack.StatusSeenReply},
			{Family: conntrack.IPv4, Proto: conntrack.UDP, Clear: conntrack.StatusSeenReply},
		}},
		{"zones", udp4, []conntrack.Filter{
			{Family: conntrack.IPv4, Proto: conntrack.UDP, Zone: &zone},
			{Family: conntrack.IPv4, Proto: conntrack.UDP, Zone: &other},
		}},
		{"no such address", conntrack.Filter{Family: conntrack.IPv4, OrigDst: outgoing(0).Prev()}, nil},
		{"both ends", conntrack.Filter{
			Family: some.Family, Proto: some.Proto, OrigDst: some.Orig.Dst, OrigDstPort: some.Orig.DstPort,
			ReplySrc: some.Reply.Src, ReplySrcPort: some.Reply.SrcPort,
		}, []conntrack.Filter{{Family: some.Family, OrigDst: some.Orig.Dst, ReplySrc: some.Reply.Src}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const end = uapi.SizeofNlMsghdr + 4 // of each dump: NLMSG_DONE
			flows := func(f conntrack.Filter) int {
				n, err := r.dump(f)
				if err != nil {
					t.Fatal(err)
				}
				return n - end
			}
			sum := 0
			for _, f := range tt.parts {
				sum += flows(f)
			}
			if got := flows(tt.of); got != sum || (got == 0) != (tt.parts == nil) {
				t.Errorf("%d bytes in all, %d in parts", got, sum)
			}
		})
	}
}
