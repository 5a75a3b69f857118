package frontend

import (
	"cmp"
	"slices"
	"sort"
)

// segments finds the entries whose port range holds a port. From one border to
// the next the set is the same, so that a look-up is one binary search, however
// the ranges overlap.
type segments struct {
	all   []portsEntry
	stale bool // all has changed since build

	borders []int      // first port of each segment, ascending
	sets    [][]*entry // parallel to borders
}

type portsEntry struct {
	ports Ports
	entry *entry
}

func (s *segments) add(p Ports, e *entry) {
	s.all = append(s.all, portsEntry{p, e})
	s.stale = true
}

func (s *segments) remove(e *entry) {
	s.all = slices.DeleteFunc(s.all, func(x portsEntry) bool { return x.entry == e })
	s.stale = true
}

func (s *segments) build() {
	if !s.stale {
		return
	}
	s.stale = false
	slices.SortFunc(s.all, func(a, b portsEntry) int { return cmp.Compare(a.ports.First, b.ports.First) })
	s.borders, s.sets = nil, nil
	for _, x := range s.all {
		s.borders = append(s.borders, int(x.ports.First), int(x.ports.Last)+1)
	}
	slices.Sort(s.borders)
	s.borders = slices.Compact(s.borders)
	var open []portsEntry
	next := 0
	for _, port := range s.borders {
		open = slices.DeleteFunc(open, func(x portsEntry) bool { return int(x.ports.Last) < port })
		for ; next < len(s.all) && int(s.all[next].ports.First) == port; next++ {
			open = append(open, s.all[next])
		}
		set := make([]*entry, len(open))
		for i, x := range open {
			set[i] = x.entry
		}
		s.sets = append(s.sets, set)
	}
}

func (s *segments) find(port uint16) []*entry {
	i := sort.Search(len(s.borders), func(i int) bool { return s.borders[i] > int(port) })
	if i == 0 {
		return nil
	}
	return s.sets[i-1]
}
