package frontend

import (
	"cmp"
	"slices"
	"sort"
)

// segments finds the entries whose port range holds a port: a binary search,
// and a look at the ranges that begin below, back to where none of them reaches
// the port any more. Memory is that of the ranges, however they overlap.
type segments struct {
	all   []portsEntry // by first port once built
	last  []uint16     // the highest last port of all up to the same index
	stale bool         // all has changed since build
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
	s.last = s.last[:0]
	var most uint16
	for _, x := range s.all {
		most = max(most, x.ports.Last)
		s.last = append(s.last, most)
	}
}

// find calls f for each entry whose range holds the port.
func (s *segments) find(port uint16, f func(*entry)) {
	i := sort.Search(len(s.all), func(i int) bool { return s.all[i].ports.First > port })
	for i--; i >= 0 && s.last[i] >= port; i-- {
		if s.all[i].ports.Contains(port) {
			f(s.all[i].entry)
		}
	}
}
