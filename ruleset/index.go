package ruleset

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// indexFrom is how many rules make an index of a chain worth while.
const indexFrom = 64

// index tells which rules of a chain a packet may match, by the destination that
// most rules compare with first. So a walk past 7000 services of iptables takes no
// longer than one past ten.
type index struct {
	addr map[netip.Addr]int32 // the first rule for an address
	port map[uint16]int32     // the first for a port and no single address
	rest int32                // the first of all others
	next []int32              // the one that follows each, of the same kind
}

// candidates yields rules of a chain in order, each as its number; behind the last
// one, a number that none has.
type candidates struct {
	*index
	at [3]int32 // the next by address, port, and of the rest
}

// candidates returns the rules that may match a packet or do something else with it
// than let it pass.
func (c *chain) candidates(p Packet) candidates {
	rules := c.each()
	if len(rules) < indexFrom {
		return candidates{at: [3]int32{2: 0}}
	}
	family := 0
	if p.Dst.Is6() {
		family = 1
	}
	x := c.indices[family]
	if x == nil {
		x = newIndex(rules, family == 0)
		c.indices[family] = x
	}
	end := int32(len(rules))
	at := func(i int32, ok bool) int32 {
		if ok {
			return i
		}
		return end
	}
	i, ok1 := x.addr[p.Dst]
	j, ok2 := x.port[p.DstPort]
	return candidates{x, [3]int32{at(i, ok1), at(j, ok2), x.rest}}
}

func (c *candidates) take() int {
	if c.index == nil {
		c.at[2]++
		return int(c.at[2] - 1)
	}
	kind := 2
	for k := range 2 {
		if c.at[k] < c.at[kind] {
			kind = k
		}
	}
	i := c.at[kind]
	if int(i) < len(c.next) {
		c.at[kind] = c.next[i]
	}
	return int(i)
}

func newIndex(rules []rule, v4 bool) *index {
	end := int32(len(rules))
	x := &index{addr: map[netip.Addr]int32{}, port: map[uint16]int32{}, rest: end, next: make([]int32, end)}
	for i := end - 1; i >= 0; i-- {
		addr, port := rules[i].key(v4)
		var first int32
		ok := true
		switch {
		case addr.IsValid():
			first, ok = x.addr[addr]
			x.addr[addr] = i
		case port >= 0:
			first, ok = x.port[uint16(port)]
			x.port[uint16(port)] = i
		default:
			first, x.rest = x.rest, i
		}
		if !ok {
			first = end
		}
		x.next[i] = first
	}
	return x
}

// key returns the destination address, or else the port (-1: none), that a rule
// compares with before it can do anything but not match: packets of the family with
// another one pass it, as if it were not there.
func (r *rule) key(v4 bool) (addr netip.Addr, port int) {
	port = -1
	offset, size := v6Dst, 16
	if v4 {
		offset, size = v4Dst, 4
	}
	var load *payloadOp // what the register has that is compared
	for a := walk(r.exprs); a.next(); {
		if a.typ != uapi.NftaListElem {
			return addr, port
		}
		written, n := -1, 0
		switch o := decodeExpr(r.chain.table, a.val).(type) {
		case nil, *rangeOp, *xtMultiport, *xtAddrtype, *xtIprange, *xtConntrack, *xtChance, *xtMark:
		case *payloadOp:
			load = o
		case *metaOp:
			written, n = o.dreg, regBytes
		case *ctOp:
			written, n = o.dreg, regBytes
		case *fibOp:
			written, n = o.dreg, 4
		case *immediateOp:
			written, n = o.dreg, align(len(o.data))
		case *bitwiseOp:
			written, n = o.dreg, align(len(o.mask))
		case *byteorderOp:
			written, n = o.dreg, o.length
		case *cmpOp:
			if load == nil || o.op != uapi.NftCmpEq || o.sreg != load.dreg || len(o.data) != load.length {
				break
			}
			switch {
			case load.base == uapi.NftPayloadNetworkHeader && load.offset == offset && load.length == size:
				addr, _ = netip.AddrFromSlice(bytes.Clone(o.data))
				return addr, port
			case load.base == uapi.NftPayloadTransportHeader && load.offset == 2 && load.length == 2:
				port = int(binary.BigEndian.Uint16(o.data))
			}
		case *xtPorts:
			if o.dst[0] == o.dst[1] && !o.invDst {
				port = int(o.dst[0])
			}
		default:
			return addr, port
		}
		if load != nil && written >= 0 && written < load.dreg+align(load.length) && load.dreg < written+n {
			load = nil
		}
	}
	return addr, port
}
