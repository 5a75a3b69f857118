package ruleset

import (
	"bytes"
	"encoding/binary"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// regBytes is how much all registers hold (NFT_REG32_COUNT words).
const regBytes = 64

// regs are the registers, bit by bit known or not. They are unknown when a rule
// begins: some kernels keep what an earlier rule has left in them.
type regs struct {
	val   [regBytes]byte // 0 where a bit is not known
	known [regBytes]byte
	marks marks // which outlive the rule
}

// put stores a value, and zeros up to the end of its last word, as the kernel
// does (nft_data_copy, nft_reg_store8, nft_payload_eval).
func (r *regs) put(off int, data []byte) {
	copy(r.val[off:], data)
	for i := range data {
		r.known[off+i] = 0xff
	}
	for i := off + len(data); i < off+align(len(data)) && i < regBytes; i++ {
		r.val[i], r.known[i] = 0, 0xff
	}
}

func (r *regs) putWord(off int, v uint32) {
	binary.NativeEndian.PutUint32(r.val[off:], v)
	binary.NativeEndian.PutUint32(r.known[off:], ^uint32(0))
}

// forget makes bytes unknown.
func (r *regs) forget(off, n int) {
	n = min(n, regBytes-off)
	clear(r.val[off : off+n])
	clear(r.known[off : off+n])
}

// bounds writes the lowest and the highest value that bytes may have.
func (r *regs) bounds(off, n int, low, high *[regBytes]byte) {
	for i := range n {
		low[i] = r.val[off+i]
		high[i] = r.val[off+i] | ^r.known[off+i]
	}
}

func (r *regs) exact(off, n int) bool {
	for _, k := range r.known[off : off+n] {
		if k != 0xff {
			return false
		}
	}
	return true
}

func (r *regs) equals(off int, data []byte) trilean {
	all := yes
	for i, d := range data {
		k := r.known[off+i]
		if (r.val[off+i]^d)&k != 0 {
			return no
		}
		if k != 0xff {
			all = unsure
		}
	}
	return all
}

func negate(t trilean) trilean {
	switch t {
	case yes:
		return no
	case no:
		return yes
	}
	return unsure
}

// compare is nft_cmp_eval: memcmp, whatever the number's byte order.
func (r *regs) compare(o *cmpOp) trilean {
	switch o.op {
	case uapi.NftCmpEq:
		return r.equals(o.sreg, o.data)
	case uapi.NftCmpNeq:
		return negate(r.equals(o.sreg, o.data))
	}
	var low, high [regBytes]byte
	n := len(o.data)
	r.bounds(o.sreg, n, &low, &high)
	l, h := bytes.Compare(low[:n], o.data), bytes.Compare(high[:n], o.data)
	switch o.op {
	case uapi.NftCmpLt:
		return between(h < 0, l >= 0)
	case uapi.NftCmpLte:
		return between(h <= 0, l > 0)
	case uapi.NftCmpGt:
		return between(l > 0, h <= 0)
	}
	return between(l >= 0, h < 0) // NFT_CMP_GTE
}

func between(surely, never bool) trilean {
	switch {
	case surely:
		return yes
	case never:
		return no
	}
	return unsure
}

func (r *regs) within(o *rangeOp) trilean {
	var low, high [regBytes]byte
	n := len(o.from)
	r.bounds(o.sreg, n, &low, &high)
	may, must := overlap(o.from, o.to, low[:n], high[:n])
	t := between(must, !may)
	if o.invert {
		t = negate(t)
	}
	return t
}

func (r *regs) bitwise(o *bitwiseOp) {
	for i := range o.mask {
		v, k := r.val[o.sreg+i], r.known[o.sreg+i]
		k |= ^o.mask[i] // what the mask clears is known
		r.val[o.dreg+i] = (v&o.mask[i] ^ o.xor[i]) & k
		r.known[o.dreg+i] = k
	}
	// Whole words are written, and masks are padded with zeros.
	for i := o.dreg + len(o.mask); i < o.dreg+align(len(o.mask)); i++ {
		r.val[i], r.known[i] = 0, 0xff
	}
}

func (r *regs) shift(o *shiftOp) {
	order := binary.NativeEndian
	move := func(b []byte, from []byte, fill bool) {
		words := o.length / 4
		carry := uint32(0)
		if fill {
			carry = ^uint32(0) >> (32 - o.bits)
			if o.right {
				carry = ^uint32(0) << (32 - o.bits)
			}
		}
		for i := range words {
			if o.right {
				w := order.Uint32(from[4*i:])
				order.PutUint32(b[4*i:], carry|w>>o.bits)
				carry = w << (32 - o.bits)
				continue
			}
			j := words - 1 - i
			w := order.Uint32(from[4*j:])
			order.PutUint32(b[4*j:], w<<o.bits|carry)
			carry = w >> (32 - o.bits)
		}
	}
	before := *r
	move(r.val[o.dreg:], before.val[o.sreg:], false)
	move(r.known[o.dreg:], before.known[o.sreg:], true) // the bits that come in are known zeros
}

var bigEndian = binary.NativeEndian.Uint16([]byte{0, 1}) == 1

func (r *regs) byteorder(o *byteorderOp) {
	before := *r
	for i := range o.length {
		j := i
		if !bigEndian {
			j = i - i%o.size + o.size - 1 - i%o.size
		}
		r.val[o.dreg+i], r.known[o.dreg+i] = before.val[o.sreg+j], before.known[o.sreg+j]
	}
}
