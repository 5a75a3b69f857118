package sweep

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

var (
	yes = conntrack.FamilyFeatures{Proto: conntrack.Honoured, Addr: conntrack.Honoured, Ports: conntrack.Honoured}
	// modern is what most kernels honour: IPv6 addresses are compared wrongly.
	modern = conntrack.Features{
		V4: yes, V6: conntrack.FamilyFeatures{Proto: conntrack.Honoured, Ports: conntrack.Honoured},
		Status: conntrack.Honoured, Zone: conntrack.Honoured,
	}
)

func service(name, vip string, proto uint8, backends ...string) (string, []frontend.Frontend) {
	at := netip.MustParseAddrPort(vip)
	var bs []netip.AddrPort
	for _, b := range backends {
		bs = append(bs, netip.MustParseAddrPort(b))
	}
	valid := frontend.NewBackends(bs...)
	fam := conntrack.FamilyOf(at.Addr())
	return name, []frontend.Frontend{
		{Owner: name, Kind: frontend.ClusterIP, Proto: proto, Addr: at.Addr(), Ports: frontend.Port(at.Port()), Valid: valid, Usable: len(bs)},
		{Owner: name, Kind: frontend.NodePort, Proto: proto, Family: fam, Ports: frontend.Port(30000 + at.Port()), Valid: valid, Usable: len(bs)},
	}
}

func newTable() *frontend.Table {
	t := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
	t.SetHost(frontend.Host{Listed: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	t.Set(service("dns", "203.0.113.10:53", conntrack.UDP, "198.51.100.11:5353", "198.51.100.12:5353"))
	t.Set(service("web", "203.0.113.11:443", conntrack.TCP, "198.51.100.13:443"))
	t.Set(service("six", "[2001:db8:1::10]:53", conntrack.UDP, "[2001:db8:2::11]:53", "[2001:db8:2::12]:53"))
	return t
}

func texts(p Plan) (list []string) {
	for _, q := range p.Queries {
		list = append(list, q.String())
	}
	return list
}

func TestPlan(t *testing.T) {
	for _, tc := range []struct {
		name     string
		features conntrack.Features
		families []conntrack.Family
		flows    int
		plan     func(*Planner) Plan
		want     []string
	}{
		{"full", modern, nil, 1e6, (*Planner).Full, []string{
			"ipv4 udp zone 0: full pass", "ipv4 tcp unreplied zone 0: full pass", "ipv6 udp zone 0: full pass",
		}},
		{"full, one family", modern, []conntrack.Family{conntrack.IPv6}, 1e6, (*Planner).Full, []string{"ipv6 udp zone 0: full pass"}},
		{"everything", modern, nil, 1e6, (*Planner).Everything, []string{"all families: the whole table"}},
		{"one backend leaves", modern, nil, 1e6, change("dns", "203.0.113.10:53", conntrack.UDP, "198.51.100.11:5353"), []string{
			"ipv4 udp answered from 198.51.100.12:5353 zone 0: 2 lost backends",
		}},
		{"one backend leaves, kernel without filters", conntrack.Features{}, nil, 1e6, change("dns", "203.0.113.10:53", conntrack.UDP, "198.51.100.11:5353"), []string{
			"ipv4 udp zone 0: full pass for 1 change",
		}},
		{"one IPv6 backend leaves: the kernel sees to the port, this process to the address", modern, nil, 1e6, change("six", "[2001:db8:1::10]:53", conntrack.UDP, "[2001:db8:2::11]:53"), []string{
			"ipv6 udp answered from [2001:db8:2::12]:53 zone 0: 2 lost backends",
		}},
		{"service deleted: both its frontends", modern, nil, 1e6, func(p *Planner) Plan { return p.Narrow(tableOf(p).Set("dns", nil)) }, []string{
			"ipv4 udp to 203.0.113.10:53 zone 0: 1 suspect frontend", "ipv4 udp to port 30053 zone 0: 1 suspect frontend",
		}},
		{"TCP: only what was never answered", modern, nil, 1e6, change("web", "203.0.113.11:443", conntrack.TCP, "198.51.100.14:443"), []string{
			"ipv4 tcp answered from 198.51.100.13:443 unreplied zone 0: 2 lost backends",
		}},
		{"a second backend", modern, nil, 1e6, change("web", "203.0.113.11:443", conntrack.TCP, "198.51.100.13:443", "198.51.100.14:443"), nil},
		{"many services at once", modern, nil, 1e6, func(p *Planner) Plan {
			var ch frontend.Change
			for i := range 200 {
				ch.Add(tableOf(p).Set(service(fmt.Sprint("s", i), fmt.Sprintf("203.0.113.%d:%d", i, 1000+i), conntrack.UDP, "198.51.100.1:53")))
			}
			return p.Narrow(ch)
		}, []string{"ipv4 udp zone 0: full pass for 400 changes"}},
		{"many backends of one port, IPv6: one walk", modern, nil, 1e6, func(p *Planner) Plan {
			var bs []string
			for i := range 100 {
				bs = append(bs, fmt.Sprintf("[2001:db8:2::%x]:53", i+1))
			}
			tableOf(p).Set(service("six", "[2001:db8:1::10]:53", conntrack.UDP, bs...))
			return p.Narrow(tableOf(p).Set(service("six", "[2001:db8:1::10]:53", conntrack.UDP, bs[0])))
		}, []string{"ipv6 udp answered from port 53 zone 0: 198 lost backends"}},
		{"an address of this host comes", modern, nil, 1e6, func(p *Planner) Plan {
			return p.Narrow(tableOf(p).SetHost(frontend.Host{Listed: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.3")}}))
		}, []string{"ipv4 udp to 192.0.2.3 zone 0: 1 suspect frontend", "ipv4 tcp to 192.0.2.3 unreplied zone 0: 1 suspect frontend"}},
		{"nothing", modern, nil, 1e6, func(p *Planner) Plan { return p.Narrow(frontend.Change{}) }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := &Planner{Table: newTable(), Features: tc.features, Flows: tc.flows, Families: tc.families}
			if d := cmp.Diff(tc.want, texts(tc.plan(p))); d != "" {
				t.Error(d)
			}
		})
	}
}

func tableOf(p *Planner) *frontend.Table { return p.Table.(*frontend.Table) }

func change(name, vip string, proto uint8, backends ...string) func(*Planner) Plan {
	return func(p *Planner) Plan { return p.Narrow(tableOf(p).Set(service(name, vip, proto, backends...))) }
}

// Whatever changes, and whatever the kernel honours, the narrow plan returns
// every flow that the change has made stale.
func TestNarrowMissesNothing(t *testing.T) {
	hosts := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	dsts := append(slices.Clone(hosts), netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:1::10"))
	to := map[bool][]netip.Addr{
		true:  {netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")},
		false: {netip.MustParseAddr("2001:db8:2::1"), netip.MustParseAddr("2001:db8:2::2")},
	}
	var flows []conntrack.Flow
	for _, d := range dsts {
		for port := uint16(1); port <= 3; port++ {
			for _, proto := range []uint8{conntrack.UDP, conntrack.TCP} {
				for _, b := range append(slices.Clone(to[d.Is4()]), d) {
					for toPort := uint16(1); toPort <= 3; toPort++ {
						flows = append(flows, conntrack.Flow{
							Family: conntrack.FamilyOf(d), Proto: proto,
							Orig: conntrack.Tuple{Dst: d, DstPort: port}, Reply: conntrack.Tuple{Src: b, SrcPort: toPort},
						})
					}
				}
			}
		}
	}
	genFrontend := rapid.Custom(func(t *rapid.T) frontend.Frontend {
		d := rapid.SampledFrom(dsts).Draw(t, "dst")
		first := rapid.Uint16Range(1, 3).Draw(t, "first")
		f := frontend.Frontend{
			Owner: "o", Proto: rapid.SampledFrom([]uint8{conntrack.UDP, conntrack.TCP}).Draw(t, "proto"),
			Addr: d, Ports: frontend.Ports{First: first, Last: rapid.Uint16Range(first, 3).Draw(t, "last")},
			Usable: rapid.IntRange(0, 1).Draw(t, "usable"),
		}
		if rapid.Bool().Draw(t, "everywhere") {
			f.Addr, f.Family = netip.Addr{}, conntrack.FamilyOf(d)
		}
		var bs []netip.AddrPort
		for range rapid.IntRange(0, 2).Draw(t, "backends") {
			bs = append(bs, netip.AddrPortFrom(rapid.SampledFrom(to[d.Is4()]).Draw(t, "to"), rapid.Uint16Range(0, 3).Draw(t, "port")))
		}
		f.Valid = frontend.NewBackends(bs...)
		return f
	})
	support := rapid.Custom(func(t *rapid.T) conntrack.Features {
		s := func(what string) conntrack.Support {
			return rapid.SampledFrom([]conntrack.Support{conntrack.Unknown, conntrack.Honoured, conntrack.NotHonoured}).Draw(t, what)
		}
		fam := func() conntrack.FamilyFeatures {
			return conntrack.FamilyFeatures{Proto: s("proto"), Addr: s("addr"), Ports: s("ports")}
		}
		return conntrack.Features{V4: fam(), V6: fam(), Status: s("status"), Zone: s("zone")}
	})
	rapid.Check(t, func(t *rapid.T) {
		tab := frontend.NewTable(frontend.Options{Policy: frontend.DefaultPolicy})
		p := &Planner{Table: tab, Features: support.Draw(t, "features"), Flows: rapid.IntRange(0, 1e6).Draw(t, "flows")}
		was := make([]frontend.Verdict, len(flows))
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			var ch frontend.Change
			if rapid.IntRange(0, 5).Draw(t, "step") == 0 {
				ch = tab.SetHost(frontend.Host{Listed: rapid.SliceOfDistinct(rapid.SampledFrom(hosts), rapid.ID).Draw(t, "hosts")})
			} else {
				ch = tab.Set(rapid.SampledFrom([]string{"u", "v"}).Draw(t, "unit"), rapid.SliceOfN(genFrontend, 0, 3).Draw(t, "frontends"))
			}
			narrow, full := p.Narrow(ch), p.Full()
			for i := range flows {
				v := tab.Judge(&flows[i])
				covers := func(q Query) bool { return q.Filter.Match(&flows[i]) }
				if v.Action == frontend.Delete && !slices.ContainsFunc(full.Queries, covers) {
					t.Fatalf("%s (%v) is in no query of the full plan %q", &flows[i], v, texts(full))
				}
				if v.Action == frontend.Delete && was[i].Action != frontend.Delete && !slices.ContainsFunc(narrow.Queries, covers) {
					t.Fatalf("%s (%v) is in no query of %q for %+v", &flows[i], v, texts(narrow), ch)
				}
				was[i] = v
			}
		}
	})
}
