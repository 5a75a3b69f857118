//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// natTable is the nftables table, of family inet, that SetNAT owns.
const natTable = "flowsweep-test"

// masqueradeMark is the bit of the packet mark that carries the wish for
// masquerading from a flow's DNAT rule to the postrouting hook.
const masqueradeMark = 0x4000

// Forward is what a service proxy would do for one address, port and protocol.
type Forward struct {
	Proto uint8 // unix.IPPROTO_UDP, IPPROTO_TCP or IPPROTO_SCTP
	// Dst is where clients send to. With the zero Addr it is the port of every
	// address that the namespace has (a node port), loopback included.
	Dst netip.AddrPort
	// Backends are taken in turn, new flow by new flow, beginning with the first
	// after each SetNAT. Without backends there is no rule. They are of Dst's
	// family; with the zero Addr in Dst, each family has its own turn. A backend
	// with port 0 keeps the port that the client sent to.
	Backends []netip.AddrPort
	// Masquerade makes the namespace the flow's source towards the backend.
	Masquerade bool
}

// SetNAT replaces all NAT rules of the namespace, for packets that it routes and
// for its own, in one commit. As with any proxy's rules, only new flows see
// them: those that conntrack knows go where they went. With the first call the
// kernel begins to track connections, and without forwards it keeps doing so.
//
// Rules for 150 backends, of all forwards together, are certain to fit into the
// socket's buffers; without root, the system's net.core.rmem_max is the limit.
func (n *NS) SetNAT(forwards ...Forward) error {
	c, err := nftables.New(nftables.WithNetNSFd(n.FD()), nftables.WithSockOptions(widen))
	if err != nil {
		return fmt.Errorf("testnet: open nftables: %w", err)
	}
	table := c.AddTable(&nftables.Table{Name: natTable, Family: nftables.TableFamilyINet})
	chain := func(name string, hook *nftables.ChainHook, prio *nftables.ChainPriority) *nftables.Chain {
		return c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: prio,
		})
	}
	prerouting := chain("prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest)
	output := chain("output", nftables.ChainHookOutput, nftables.ChainPriorityNATDest)
	postrouting := chain("postrouting", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	shared := c.AddChain(&nftables.Chain{Name: "forwards", Table: table})
	// The table is emptied rather than deleted, so that its hooks, and with them
	// connection tracking, never pause.
	c.FlushTable(table)
	for _, from := range []*nftables.Chain{prerouting, output} {
		c.AddRule(&nftables.Rule{Table: table, Chain: from, Exprs: []expr.Any{
			&expr.Verdict{Kind: expr.VerdictJump, Chain: shared.Name},
		}})
	}
	for _, f := range forwards {
		rules, err := f.rules()
		if err != nil {
			return err
		}
		for _, r := range rules {
			c.AddRule(&nftables.Rule{Table: table, Chain: shared, Exprs: r})
		}
	}
	mark := binaryutil.NativeEndian.PutUint32(masqueradeMark)
	c.AddRule(&nftables.Rule{Table: table, Chain: postrouting, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mark, Xor: make([]byte, 4)},
		&expr.Cmp{Register: 1, Data: mark},
		&expr.Masq{},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("testnet: set NAT rules: %w", err)
	}
	return nil
}

// widen makes room in a netlink socket for a commit, which is sent as one
// message, and for its answers: the kernel acknowledges and repeats every rule
// before the first of them is read.
func widen[C interface {
	SetReadBuffer(bytes int) error
	SetWriteBuffer(bytes int) error
}](c C) error {
	const size = 4 << 20
	return errors.Join(c.SetReadBuffer(size), c.SetWriteBuffer(size))
}

// rules returns one rule a backend. The kernel's counter sends the first rule
// every n-th new flow, the second every (n-1)th of those left, and so on.
func (f Forward) rules() ([][]expr.Any, error) {
	var v4, v6 []netip.AddrPort
	for _, b := range f.Backends {
		if !b.Addr().IsValid() || f.Dst.Addr().IsValid() && b.Addr().Is4() != f.Dst.Addr().Is4() {
			return nil, fmt.Errorf("testnet: forward of %s: backend %s is not of its family", f.Dst, b)
		}
		if b.Port() == 0 {
			b = netip.AddrPortFrom(b.Addr(), f.Dst.Port())
		}
		if b.Addr().Is4() {
			v4 = append(v4, b)
		} else {
			v6 = append(v6, b)
		}
	}
	var rules [][]expr.Any
	for _, backends := range [][]netip.AddrPort{v4, v6} {
		for i, b := range backends {
			r := f.match(b.Addr().Is4())
			if rest := len(backends) - i; rest > 1 {
				r = append(r,
					&expr.Numgen{Register: 1, Modulus: uint32(rest), Type: unix.NFT_NG_INCREMENTAL},
					&expr.Cmp{Register: 1, Data: make([]byte, 4)})
			}
			rules = append(rules, append(r, f.translate(b)...))
		}
	}
	return rules, nil
}

// match returns the expressions that select the forward's packets of a family.
func (f Forward) match(is4 bool) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16) // of daddr in struct iphdr
	if !is4 {
		family, offset = unix.NFPROTO_IPV6, 24 // in struct ipv6hdr
	}
	m := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Register: 1, Data: []byte{family}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Register: 1, Data: []byte{f.Proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Register: 1, Data: binaryutil.BigEndian.PutUint16(f.Dst.Port())},
	}
	if a := f.Dst.Addr(); a.IsValid() {
		daddr := a.AsSlice()
		return append(m,
			&expr.Payload{
				DestRegister: 1, Base: expr.PayloadBaseNetworkHeader,
				Offset: offset, Len: uint32(len(daddr)),
			},
			&expr.Cmp{Register: 1, Data: daddr})
	}
	return append(m,
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)})
}

// translate returns the expressions that send a flow to a backend.
func (f Forward) translate(to netip.AddrPort) []expr.Any {
	var t []expr.Any
	if f.Masquerade {
		t = append(t,
			&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(masqueradeMark)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1})
	}
	family := uint32(unix.NFPROTO_IPV4)
	if to.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	return append(t,
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{
			Type: expr.NATTypeDestNAT, Family: family,
			RegAddrMin: 1, RegProtoMin: 2, Specified: true,
		})
}
