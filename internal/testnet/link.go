//go:build linux

package testnet

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Link is an interface to be made by [NS.AddLink].
type Link struct {
	Name string
	// Kind is what ip link calls the type: bridge, vrf, ipvlan, macvlan. Whether a
	// kernel has it shows when one is made: else the error is an EOPNOTSUPP.
	Kind string
	// Parent is the interface that an ipvlan or a macvlan is on.
	Parent string
	// Into is the namespace that it is put into; nil: the one that it is made in.
	Into *NS
	// Table is a VRF's routing table.
	Table uint32
	// Mode is an ipvlan's, unix.IPVLAN_MODE_L3 say, which x/sys lacks: L2 is 0, L3
	// is 1, L3S is 2.
	Mode uint16
}

// AddLink makes an interface and brings it up. As with [NS.Veth], it has no IPv6
// link-local address of the kernel's own.
func (n *NS) AddLink(l Link) error {
	m := newMessage(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.IfInfomsg{})
	m.text(unix.IFLA_IFNAME, l.Name)
	err := error(nil)
	if l.Parent != "" {
		var parent uint32
		parent, err = n.route.index(l.Parent)
		m.uint32(unix.IFLA_LINK, parent)
	}
	in := n
	if l.Into != nil {
		in = l.Into
		m.uint32(unix.IFLA_NET_NS_FD, uint32(in.FD()))
	}
	m.nest(unix.IFLA_LINKINFO, func() {
		m.text(unix.IFLA_INFO_KIND, l.Kind)
		m.nest(unix.IFLA_INFO_DATA, func() {
			switch l.Kind {
			case "vrf":
				m.uint32(unix.IFLA_VRF_TABLE, l.Table)
			case "ipvlan":
				m.uint16(unix.IFLA_IPVLAN_MODE, l.Mode)
			}
		})
	})
	if err == nil {
		err = n.route.request(m)
	}
	if err == nil {
		_, err = in.withoutLinkLocal(l.Name)
	}
	if err == nil {
		err = in.SetUp(l.Name)
	}
	if err != nil {
		return fmt.Errorf("testnet: add %s %s: %w", l.Kind, l.Name, err)
	}
	return nil
}

// DelLink removes an interface, and with a veth also its peer.
func (n *NS) DelLink(ifname string) error {
	m := newMessage(unix.RTM_DELLINK, 0, unix.IfInfomsg{})
	m.text(unix.IFLA_IFNAME, ifname)
	if err := n.route.request(m); err != nil {
		return fmt.Errorf("testnet: delete %s: %w", ifname, err)
	}
	return nil
}

// SetDown takes an interface down: the kernel removes the routes that lead to it,
// and its IPv6 addresses.
func (n *NS) SetDown(ifname string) error {
	return n.changeLink("take down", ifname, unix.IfInfomsg{Change: unix.IFF_UP}, nil)
}

// SetQuiet makes an interface send without asking for neighbours: what it sends
// has its own hardware address as the destination, and nobody takes it.
func (n *NS) SetQuiet(ifname string) error {
	return n.changeLink("quieten", ifname, unix.IfInfomsg{Flags: unix.IFF_NOARP, Change: unix.IFF_NOARP}, nil)
}

// SetMaster makes an interface a port of a bridge or of a VRF; with an empty name
// it is none any more.
func (n *NS) SetMaster(ifname, master string) error {
	var index uint32
	if master != "" {
		var err error
		if index, err = n.route.index(master); err != nil {
			return fmt.Errorf("testnet: find %s: %w", master, err)
		}
	}
	return n.changeLink("enslave", ifname, unix.IfInfomsg{}, func(m *message) { m.uint32(unix.IFLA_MASTER, index) })
}

// SetHardwareAddr gives an interface a MAC address.
func (n *NS) SetHardwareAddr(ifname string, a net.HardwareAddr) error {
	return n.changeLink("change the address of", ifname, unix.IfInfomsg{}, func(m *message) { m.attr(unix.IFLA_ADDRESS, a) })
}

// Rename gives an interface that is down another name.
func (n *NS) Rename(ifname, name string) error {
	index, err := n.route.index(ifname)
	if err != nil {
		return fmt.Errorf("testnet: find %s: %w", ifname, err)
	}
	return n.changeLink("rename", "", unix.IfInfomsg{Index: int32(index)}, func(m *message) { m.text(unix.IFLA_IFNAME, name) })
}

// Interface returns what the kernel tells of an interface.
func (n *NS) Interface(ifname string) (i *net.Interface, err error) {
	err = n.Do(func() (err error) {
		i, err = net.InterfaceByName(ifname)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("testnet: find %s: %w", ifname, err)
	}
	return i, nil
}

func (n *NS) changeLink(what, ifname string, h unix.IfInfomsg, more func(*message)) error {
	m := newMessage(unix.RTM_NEWLINK, 0, h)
	if ifname != "" {
		m.text(unix.IFLA_IFNAME, ifname)
	}
	if more != nil {
		more(m)
	}
	if err := n.route.request(m); err != nil {
		return fmt.Errorf("testnet: %s %s: %w", what, ifname, err)
	}
	return nil
}
