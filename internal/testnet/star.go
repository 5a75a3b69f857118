//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"net/netip"
)

// Leaf is a namespace of a [Star] in the making.
type Leaf struct {
	// Name is what Star.Leaf finds the namespace by, and the name of the
	// router's interface to it, so at most 15 bytes.
	Name string
	// Prefixes are the networks between the leaf and the router. The router has
	// the first address of each, the leaf the second: 192.0.2.1 and 192.0.2.2
	// in 192.0.2.0/24.
	Prefixes []netip.Prefix
}

// Star is a router and its leaves, each in a namespace of its own and joined to
// the router by a veth pair:
//
//	client [eth0]────[client] router [backends]────[eth0] backends
//
// A leaf's interface is called eth0, and its default routes go to the router.
// The router forwards the families that the prefixes are of. Further addresses
// may be added to any of them: service addresses to the router's lo, more
// backends to a leaf's eth0.
type Star struct {
	Router *NS
	leaves map[string]*NS
}

// NewStar builds a star; the caller closes it.
func NewStar(leaves ...Leaf) (*Star, error) {
	router, err := New()
	if err != nil {
		return nil, err
	}
	s := &Star{Router: router, leaves: make(map[string]*NS)}
	for _, l := range leaves {
		if err := s.add(l); err != nil {
			return nil, errors.Join(fmt.Errorf("testnet: leaf %s: %w", l.Name, err), s.Close())
		}
	}
	return s, nil
}

// Leaf returns the namespace of a leaf, nil where there is none of that name.
func (s *Star) Leaf(name string) *NS { return s.leaves[name] }

// Close closes all namespaces of the star.
func (s *Star) Close() error {
	err := s.Router.Close()
	for _, l := range s.leaves {
		err = errors.Join(err, l.Close())
	}
	return err
}

func (s *Star) add(l Leaf) error {
	if s.leaves[l.Name] != nil {
		return errors.New("there is one of this name")
	}
	leaf, err := New()
	if err != nil {
		return err
	}
	s.leaves[l.Name] = leaf
	if err := s.Router.Veth(l.Name, leaf, "eth0"); err != nil {
		return err
	}
	for _, p := range l.Prefixes {
		if err := s.connect(l.Name, leaf, p); err != nil {
			return err
		}
	}
	return nil
}

func (s *Star) connect(name string, leaf *NS, network netip.Prefix) error {
	first := network.Masked().Addr().Next()
	second := first.Next()
	forwarding, everywhere := "net.ipv4.ip_forward", "0.0.0.0/0"
	if first.Is6() {
		forwarding, everywhere = "net.ipv6.conf.all.forwarding", "::/0"
	}
	if err := s.Router.Sysctl(forwarding, "1"); err != nil {
		return err
	}
	if err := s.Router.AddAddr(name, netip.PrefixFrom(first, network.Bits())); err != nil {
		return err
	}
	if err := leaf.AddAddr("eth0", netip.PrefixFrom(second, network.Bits())); err != nil {
		return err
	}
	return leaf.AddRoute(netip.MustParsePrefix(everywhere), first, "eth0")
}
