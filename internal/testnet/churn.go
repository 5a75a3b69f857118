//go:build linux

package testnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const churnTable = "flowsweep-churn"

// Churn replaces rules by the same rules over and over, in transactions that take
// the kernel long, as somebody does who reloads large sets. Destinations are in an
// interval set with concatenations, whose new elements the kernel puts in place
// last (nft_set_commit_update), when the generation has long moved.
type Churn struct {
	ns    *NS
	conn  *netlink
	batch []byte
	last  uint32 // the message that is acknowledged
	stop  chan struct{}
	work  sync.WaitGroup
	once  sync.Once

	commits int
	err     error
}

// NewChurn makes the rules: IPv4 packets of a protocol to any of dst are sent to
// the backend, and beside them there is a set of so many elements, which is
// replaced in the same transactions: of fewer without root, if the system's
// net.core.wmem_max is not enough. [Churn.Start] begins to replace them.
func NewChurn(ns *NS, proto uint8, backend netip.AddrPort, ballast int, dst ...netip.AddrPort) (*Churn, error) {
	c := &Churn{ns: ns, stop: make(chan struct{})}
	if err := c.rules(proto, backend, ballast); err != nil {
		return nil, err
	}
	err := ns.Do(func() (err error) {
		c.conn, err = dialNetlink(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		return nil, err
	}
	c.write(ballast, dst)
	if room := c.widen(len(c.batch)); room < len(c.batch) {
		c.write(int(float64(ballast)*float64(room)/float64(len(c.batch))*0.95), dst)
	}
	if err := c.commit(); err != nil {
		c.conn.close()
		return nil, fmt.Errorf("testnet: commit %d bytes: %w", len(c.batch), err)
	}
	return c, nil
}

func (c *Churn) rules(proto uint8, backend netip.AddrPort, ballast int) error {
	n, err := nftables.New(nftables.WithNetNSFd(c.ns.FD()), nftables.WithSockOptions(widen))
	if err != nil {
		return fmt.Errorf("testnet: open nftables: %w", err)
	}
	table := n.AddTable(&nftables.Table{Name: churnTable, Family: nftables.TableFamilyIPv4})
	services := &nftables.Set{
		Table: table, Name: "services", Interval: true, Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService),
	}
	err = errors.Join(n.AddSet(services, nil),
		n.AddSet(&nftables.Set{Table: table, Name: "ballast", KeyType: nftables.TypeIPAddr, Size: uint32(ballast + 1)}, nil))
	for _, hook := range []*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookOutput} {
		chain := n.AddChain(&nftables.Chain{
			Name: fmt.Sprint("hook", *hook), Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: hook, Priority: nftables.ChainPriorityNATDest,
		})
		n.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Register: 1, Data: []byte{proto}},
			&expr.Payload{DestRegister: unix.NFT_REG32_00, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Payload{DestRegister: unix.NFT_REG32_01, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Lookup{SourceRegister: unix.NFT_REG32_00, SetName: services.Name, SetID: services.ID},
		}, Forward{}.translate(backend)...)})
	}
	if err = errors.Join(err, n.Flush()); err != nil {
		return fmt.Errorf("testnet: set rules to replace: %w", err)
	}
	return nil
}

// widen makes room for a message of a size, and returns how large one may be
// (netlink_sendmsg).
func (c *Churn) widen(size int) int {
	for _, option := range []int{unix.SO_SNDBUF, unix.SO_SNDBUFFORCE} {
		_ = unix.SetsockoptInt(c.conn.fd, unix.SOL_SOCKET, option, size+1<<10)
	}
	room, err := unix.GetsockoptInt(c.conn.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return size
	}
	return room - 32
}

// write writes the transaction: both sets are emptied, and filled again.
func (c *Churn) write(ballast int, dst []netip.AddrPort) {
	c.batch = c.batch[:0]
	seq := uint32(0)
	add := func(typ, flags uint16, h unix.Nfgenmsg, fill func(m *message)) {
		m := newMessage(typ, flags, h)
		if fill != nil {
			fill(m)
		}
		seq++
		c.batch = append(c.batch, m.finish(0, seq)...)
	}
	nested := func(m *message, typ uint16, fill func()) { m.nest(typ|unix.NLA_F_NESTED, fill) }
	elements := func(set string, n int, flags uint16, key func(i int) []byte, end bool) {
		const most = 1000 // an attribute holds 64 KiB
		add(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELSETELEM, 0, unix.Nfgenmsg{Nfgen_family: unix.NFPROTO_IPV4}, func(m *message) {
			m.text(unix.NFTA_SET_ELEM_LIST_TABLE, churnTable)
			m.text(unix.NFTA_SET_ELEM_LIST_SET, set)
		})
		for from := 0; from < n; from += most {
			var ack uint16
			if from+most >= n {
				ack = flags
			}
			add(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|ack, unix.Nfgenmsg{Nfgen_family: unix.NFPROTO_IPV4}, func(m *message) {
				m.text(unix.NFTA_SET_ELEM_LIST_TABLE, churnTable)
				m.text(unix.NFTA_SET_ELEM_LIST_SET, set)
				nested(m, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
					for i := from; i < min(n, from+most); i++ {
						nested(m, unix.NFTA_LIST_ELEM, func() {
							nested(m, unix.NFTA_SET_ELEM_KEY, func() { m.attr(unix.NFTA_DATA_VALUE, key(i)) })
							if end {
								const keyEnd = 10 // NFTA_SET_ELEM_KEY_END
								nested(m, keyEnd, func() { m.attr(unix.NFTA_DATA_VALUE, key(i)) })
							}
						})
					}
				})
			})
		}
	}
	batch := unix.Nfgenmsg{Res_id: binary.NativeEndian.Uint16([]byte{0, unix.NFNL_SUBSYS_NFTABLES})}
	add(unix.NFNL_MSG_BATCH_BEGIN, 0, batch, nil)
	elements("ballast", ballast, 0, func(i int) []byte { return []byte{10, byte(i >> 16), byte(i >> 8), byte(i)} }, false)
	elements("services", len(dst), unix.NLM_F_ACK, func(i int) []byte {
		a := dst[i].Addr().As4()
		return append(a[:], byte(dst[i].Port()>>8), byte(dst[i].Port()), 0, 0)
	}, true)
	c.last = seq
	add(unix.NFNL_MSG_BATCH_END, 0, batch, nil)
}

// commit carries the transaction out; the kernel is done when it answers.
func (c *Churn) commit() error {
	if err := unix.Sendto(c.conn.fd, c.batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 8192)
	n, _, err := unix.Recvfrom(c.conn.fd, buf, 0)
	if err != nil {
		return err
	}
	return acknowledgement(buf[:n], c.last)
}

// Start begins to replace the rules without a pause, until Stop.
func (c *Churn) Start() {
	c.work.Go(func() {
		for {
			select {
			case <-c.stop:
				return
			default:
			}
			if c.err = c.commit(); c.err != nil {
				return
			}
			c.commits++
		}
	})
}

// Stop ends what Start began, if it was called, and tells how often the rules were
// replaced. The rules stay.
func (c *Churn) Stop() (commits int, err error) {
	c.once.Do(func() {
		close(c.stop)
		c.work.Wait()
		c.conn.close()
	})
	return c.commits, c.err
}
