//go:build linux

package testnet

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Route is a route of any table and type.
type Route struct {
	// Type is unix.RTN_*; 0 is unicast.
	Type uint8
	// Table is 0 for main, and unix.RT_TABLE_LOCAL for routes of type RTN_LOCAL.
	Table uint32
	Dst   netip.Prefix
	// Via is the gateway; the zero Addr: what is there is directly connected.
	Via netip.Addr
	Dev string
}

// String writes what is behind "ip route add".
func (r Route) String() string {
	s := map[uint8]string{
		unix.RTN_LOCAL: "local ", unix.RTN_BLACKHOLE: "blackhole ", unix.RTN_UNREACHABLE: "unreachable ",
		unix.RTN_PROHIBIT: "prohibit ", unix.RTN_THROW: "throw ",
	}[r.Type] + r.Dst.String()
	if r.Via.IsValid() {
		s += " via " + r.Via.String()
	}
	if r.Dev != "" {
		s += " dev " + r.Dev
	}
	if r.Table != 0 {
		s += fmt.Sprint(" table ", r.Table)
	}
	return s
}

// SetRoute adds a route.
func (n *NS) SetRoute(r Route) error {
	if err := n.route.changeRoute(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r); err != nil {
		return fmt.Errorf("testnet: add route %s: %w", r, err)
	}
	return nil
}

// DelRoute removes a route.
func (n *NS) DelRoute(r Route) error {
	if err := n.route.changeRoute(unix.RTM_DELROUTE, 0, r); err != nil {
		return fmt.Errorf("testnet: delete route %s: %w", r, err)
	}
	return nil
}

func (c *netlink) changeRoute(typ, flags uint16, r Route) error {
	h := unix.RtMsg{
		Family:   family(r.Dst.Addr()),
		Dst_len:  uint8(r.Dst.Bits()),
		Protocol: unix.RTPROT_STATIC,
		Type:     r.Type,
	}
	if h.Type == 0 {
		h.Type = unix.RTN_UNICAST
	}
	switch {
	case h.Type == unix.RTN_LOCAL:
		h.Scope = unix.RT_SCOPE_HOST
	case h.Type == unix.RTN_UNICAST && !r.Via.IsValid():
		h.Scope = unix.RT_SCOPE_LINK
	}
	table := r.Table
	if table == 0 {
		table = unix.RT_TABLE_MAIN
		if h.Type == unix.RTN_LOCAL {
			table = unix.RT_TABLE_LOCAL
		}
	}
	m := newMessage(typ, flags, h)
	m.uint32(unix.RTA_TABLE, table)
	m.attr(unix.RTA_DST, r.Dst.Masked().Addr().AsSlice())
	if r.Via.IsValid() {
		m.attr(unix.RTA_GATEWAY, r.Via.AsSlice())
	}
	if r.Dev != "" {
		index, err := c.index(r.Dev)
		if err != nil {
			return err
		}
		m.uint32(unix.RTA_OIF, index)
	}
	return c.request(m)
}

// Rule is a policy rule: which packets look a table up.
type Rule struct {
	// V6 tells the family, where no prefix does.
	V6       bool
	Priority uint32
	From, To netip.Prefix
	// In and Out are interfaces' names.
	In, Out string
	Mark    uint32
	Table   uint32
}

// String writes what is behind "ip rule add".
func (r Rule) String() string {
	s := fmt.Sprint("pref ", r.Priority)
	for _, x := range []struct{ word, value string }{
		{"from", prefixText(r.From)}, {"to", prefixText(r.To)}, {"iif", r.In}, {"oif", r.Out},
	} {
		if x.value != "" {
			s += " " + x.word + " " + x.value
		}
	}
	if r.Mark != 0 {
		s += fmt.Sprint(" fwmark ", r.Mark)
	}
	return s + fmt.Sprint(" lookup ", r.Table)
}

func prefixText(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return p.String()
}

// SetRule adds a policy rule.
func (n *NS) SetRule(r Rule) error {
	if err := n.route.request(r.message(unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL)); err != nil {
		return fmt.Errorf("testnet: add rule %s: %w", r, err)
	}
	return nil
}

// DelRule removes a policy rule.
func (n *NS) DelRule(r Rule) error {
	if err := n.route.request(r.message(unix.RTM_DELRULE, 0)); err != nil {
		return fmt.Errorf("testnet: delete rule %s: %w", r, err)
	}
	return nil
}

func (r Rule) message(typ, flags uint16) *message {
	// struct fib_rule_hdr is struct rtmsg with other names: Type is the action.
	h := unix.RtMsg{Family: unix.AF_INET, Type: unix.FR_ACT_TO_TBL}
	if r.V6 || r.From.IsValid() && r.From.Addr().Is6() || r.To.IsValid() && r.To.Addr().Is6() {
		h.Family = unix.AF_INET6
	}
	if r.From.IsValid() {
		h.Src_len = uint8(r.From.Bits())
	}
	if r.To.IsValid() {
		h.Dst_len = uint8(r.To.Bits())
	}
	m := newMessage(typ, flags, h)
	m.uint32(unix.FRA_TABLE, r.Table)
	m.uint32(unix.FRA_PRIORITY, r.Priority)
	if r.From.IsValid() {
		m.attr(unix.FRA_SRC, r.From.Masked().Addr().AsSlice())
	}
	if r.To.IsValid() {
		m.attr(unix.FRA_DST, r.To.Masked().Addr().AsSlice())
	}
	if r.In != "" {
		m.text(unix.FRA_IIFNAME, r.In)
	}
	if r.Out != "" {
		m.text(unix.FRA_OIFNAME, r.Out)
	}
	if r.Mark != 0 {
		m.uint32(unix.FRA_FWMARK, r.Mark)
	}
	return m
}
