//go:build linux

package guest

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

const (
	replied = conntrack.StatusSeenReply
	assured = conntrack.StatusAssured
)

// criterion is something that a dump can be asked to filter by.
type criterion struct {
	name string
	// honoured is what the probe says of it; nil: the probe has no word for it.
	honoured func(*conntrack.Features, conntrack.Family) conntrack.Support
	// want gives a flow what is asked for, spoil takes just that from it, in three ways.
	want  func(*conntrack.Flow)
	spoil func(f *conntrack.Flow, way int)
	ask   func(q *conntrack.Filter, want *conntrack.Flow)
}

func features(f *conntrack.Features, fam conntrack.Family) *conntrack.FamilyFeatures {
	if fam == conntrack.IPv6 {
		return &f.V6
	}
	return &f.V4
}

// other returns an address before, behind, and far from a.
func other(a netip.Addr, way int) netip.Addr {
	switch way {
	case 0:
		return a.Prev()
	case 1:
		return a.Next()
	}
	b := a.AsSlice()
	b[0] ^= 0x10
	far, _ := netip.AddrFromSlice(b)
	return far
}

func asFlow(proto uint8) func(*conntrack.Flow) {
	return func(f *conntrack.Flow) {
		f.Proto, f.State = proto, 0
		if proto != conntrack.UDP {
			f.State = 1
		}
	}
}

func filters() []criterion {
	list := []criterion{
		{
			"protocol",
			func(f *conntrack.Features, fam conntrack.Family) conntrack.Support { return features(f, fam).Proto },
			asFlow(conntrack.UDP),
			func(f *conntrack.Flow, way int) {
				asFlow([]uint8{conntrack.TCP, conntrack.SCTP, conntrack.TCP}[way])(f)
			},
			func(q *conntrack.Filter, w *conntrack.Flow) { q.Proto = w.Proto },
		},
		{
			"original destination address",
			func(f *conntrack.Features, fam conntrack.Family) conntrack.Support { return features(f, fam).Addr },
			asFlow(conntrack.UDP),
			func(f *conntrack.Flow, way int) { f.Orig.Dst = other(f.Orig.Dst, way) },
			func(q *conntrack.Filter, w *conntrack.Flow) { q.OrigDst = w.Orig.Dst },
		},
		{
			"reply source address",
			func(f *conntrack.Features, fam conntrack.Family) conntrack.Support { return features(f, fam).Addr },
			asFlow(conntrack.UDP),
			func(f *conntrack.Flow, way int) { f.Reply.Src = other(f.Reply.Src, way) },
			func(q *conntrack.Filter, w *conntrack.Flow) { q.ReplySrc = w.Reply.Src },
		},
	}
	for _, proto := range []uint8{conntrack.UDP, conntrack.TCP, conntrack.SCTP} {
		honoured := func(f *conntrack.Features, fam conntrack.Family) conntrack.Support {
			if proto == conntrack.SCTP {
				return features(f, fam).SCTPPorts
			}
			return features(f, fam).Ports
		}
		far := []uint16{1, 0xffff, 0x100}
		list = append(list,
			criterion{
				"original destination port of " + frontend.ProtoName(proto), honoured, asFlow(proto),
				func(f *conntrack.Flow, way int) { f.Orig.DstPort ^= far[way] },
				func(q *conntrack.Filter, w *conntrack.Flow) { q.Proto, q.OrigDstPort = w.Proto, w.Orig.DstPort },
			},
			criterion{
				"reply source port of " + frontend.ProtoName(proto), honoured, asFlow(proto),
				func(f *conntrack.Flow, way int) { f.Reply.SrcPort ^= far[way] },
				func(q *conntrack.Filter, w *conntrack.Flow) { q.Proto, q.ReplySrcPort = w.Proto, w.Reply.SrcPort },
			})
	}
	status := func(f *conntrack.Features, _ conntrack.Family) conntrack.Support { return f.Status }
	zone := func(f *conntrack.Features, _ conntrack.Family) conntrack.Support { return f.Zone }
	list = append(list,
		criterion{
			"status bit set", status,
			func(f *conntrack.Flow) { f.Status |= replied },
			func(f *conntrack.Flow, _ int) { f.Status &^= replied },
			func(q *conntrack.Filter, _ *conntrack.Flow) { q.Set = replied },
		},
		criterion{
			"status bit clear", status,
			func(f *conntrack.Flow) { f.Status &^= replied | assured },
			func(f *conntrack.Flow, way int) {
				f.Status |= []conntrack.Status{replied, replied | assured, replied}[way]
			},
			func(q *conntrack.Filter, _ *conntrack.Flow) { q.Clear = replied },
		})
	for _, z := range []uint16{0, 7} {
		list = append(list, criterion{
			fmt.Sprintf("zone %d", z), zone,
			func(f *conntrack.Flow) { f.Zone = z },
			func(f *conntrack.Flow, way int) { f.Zone = z ^ []uint16{7, 1, 0x700}[way] },
			func(q *conntrack.Filter, _ *conntrack.Flow) { q.Zone = &z },
		})
	}
	return list
}

// verdict tells what the kernel made of a filter: of the flows numbered up to wanted it should return
// all, and of those from there up to all none.
func verdict(seen map[uint16]int, refused unix.Errno, wanted, all int) string {
	hits, others := 0, 0
	for n := range uint16(all) {
		switch {
		case seen[n+1] == 0:
		case int(n) < wanted:
			hits++
		default:
			others++
		}
	}
	switch {
	case refused != 0:
		return "refused (" + unix.ErrnoName(refused) + ")"
	case hits == wanted && others == 0:
		return "right"
	case hits == wanted && others == all-wanted:
		return "ignored"
	case hits == 0 && others == all-wanted:
		return "complement"
	case hits == 0 && others == 0:
		return "nothing"
	}
	return fmt.Sprintf("%d of %d that match and %d of %d others", hits, wanted, others, all-wanted)
}

// Each filter is put to the kernel alone, beside flows that it fits and flows that lack just that.
// What the probe says must be what the kernel does: a filter that the probe took for honoured and
// that hides a flow would leave the flow stale.
func TestFilters(t *testing.T) {
	for _, k := range filters() {
		t.Run(k.name, func(t *testing.T) {
			found := map[conntrack.Family]string{}
			for _, fam := range families {
				c, s := dial(t)
				const wanted, all = 3, 6
				var want conntrack.Flow
				for n := range all {
					f := flow(fam, conntrack.UDP, n+1)
					k.want(&f)
					if n < wanted {
						want = f
					} else {
						k.spoil(&f, n-wanted)
					}
					create(t, c, f)
				}
				q := conntrack.Filter{Family: fam}
				k.ask(&q, &want)
				seen, refused, err := s.dump(fam, criteria(q))
				if err != nil {
					t.Fatal(err)
				}
				truth := verdict(seen, refused, wanted, all)
				probed, err := c.Probe(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				found[fam] = truth
				switch says := k.honoured(&probed, fam); {
				case says == conntrack.Honoured && truth != "right":
					t.Errorf("%s: the kernel's answer is %s, and the probe says that it honours the filter", fam, truth)
				case says != conntrack.Honoured && truth == "right":
					// Dear, and no more.
					found[fam] += ", not used"
				}
			}
			attr(t, found)
		})
	}
}

// A filter by everything at once, as the planner makes them, and one by status and zone for both
// families, return through a Conn exactly what fits, whatever the kernel makes of them.
func TestFiltersTogether(t *testing.T) {
	zone := uint16(7)
	for _, tc := range []struct {
		name string
		fams []conntrack.Family // of the query; 0 is both at once
		ask  func(q *conntrack.Filter, want *conntrack.Flow)
	}{
		{"backend in a zone, unreplied", families, func(q *conntrack.Filter, w *conntrack.Flow) {
			q.Proto, q.ReplySrc, q.ReplySrcPort = w.Proto, w.Reply.Src, w.Reply.SrcPort
			q.Clear, q.Zone = replied, &zone
		}},
		{"frontend in a zone, unreplied", families, func(q *conntrack.Filter, w *conntrack.Flow) {
			q.Proto, q.OrigDst, q.OrigDstPort = w.Proto, w.Orig.Dst, w.Orig.DstPort
			q.Clear, q.Zone = replied, &zone
		}},
		{"frontend and backend", families, func(q *conntrack.Filter, w *conntrack.Flow) {
			q.Proto, q.OrigDst, q.OrigDstPort = w.Proto, w.Orig.Dst, w.Orig.DstPort
			q.ReplySrc, q.ReplySrcPort = w.Reply.Src, w.Reply.SrcPort
		}},
		{"both families, unreplied in a zone", []conntrack.Family{0}, func(q *conntrack.Filter, _ *conntrack.Flow) {
			q.Clear, q.Zone = replied, &zone
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, fam := range tc.fams {
				c, _ := dial(t)
				var flows []conntrack.Flow
				for i, own := range families {
					n := 100 * (i + 1)
					want := flow(own, conntrack.UDP, n)
					want.Zone = zone
					flows = append(flows, want)
					for _, k := range filters() {
						for way := range 3 {
							n++
							f := flow(own, conntrack.UDP, n)
							f.Zone = zone
							k.want(&f)
							k.spoil(&f, way)
							flows = append(flows, f)
						}
					}
				}
				create(t, c, flows...)
				q := conntrack.Filter{Family: fam}
				sample := flow(max(fam, conntrack.IPv4), conntrack.UDP, 1)
				tc.ask(&q, &sample)
				want := map[uint16]bool{}
				for _, f := range flows {
					if q.Match(&f) {
						want[f.Orig.SrcPort] = true
					}
				}
				got, err := c.List(t.Context(), q)
				if err != nil {
					t.Fatal(err)
				}
				for _, f := range got {
					if !want[f.Orig.SrcPort] {
						t.Errorf("%s: does not fit: %s", fam, &f)
					}
					delete(want, f.Orig.SrcPort)
				}
				if len(want) > 0 || len(got) == 0 {
					t.Errorf("%s: %d flows, and %d are missing", fam, len(got), len(want))
				}
			}
		})
	}
}
