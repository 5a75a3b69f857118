package ruleset

import (
	"encoding/binary"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// A packet's mark, and that of its connection, may have any value when it comes to a
// hook. What rules set on its way through the hook's chains, later rules there read.
type (
	marks struct{ packet, conn bits32 }

	// bits32 is a number, bit by bit known or not; in val, others are 0.
	bits32 struct{ val, known uint32 }
)

// join is what is known of marks where two ways come together.
func (m marks) join(n marks) marks { return marks{m.packet.join(n.packet), m.conn.join(n.conn)} }

func (b bits32) join(c bits32) bits32 {
	known := b.known & c.known &^ (b.val ^ c.val)
	return bits32{b.val & known, known}
}

// replace is x_tables' way to set marks: bits under a mask are cleared, then some
// are turned.
func (b bits32) replace(mask uint32, turn bits32) bits32 {
	known := (b.known | mask) & turn.known
	return bits32{(b.val&^mask ^ turn.val) & known, known}
}

func exactly(v uint32) bits32 { return bits32{v, ^uint32(0)} }

// Expressions that set marks, and the match that reads one.
type (
	setMarkOp struct { // nft_meta_set_eval, nft_ct_set_eval
		conn bool
		sreg int
	}
	xtSetMark struct { // mark_tg: struct xt_mark_tginfo2
		mark, mask uint32
	}
	xtConnmark struct { // connmark_tg_shift: struct xt_connmark_tginfo1, or 2 without a shift
		ctMark, ctMask, nfMask uint32
		mode                   byte
	}
	// forgetMark sets the packet's mark, or its connection's, to what is not known.
	forgetMark struct{ conn bool }

	xtMark struct { // mark_mt, connmark_mt
		conn       bool
		mark, mask uint32
		invert     bool
	}
)

// setsMark tells whether an expression sets a mark.
func setsMark(o op) bool {
	switch o.(type) {
	case *setMarkOp, *xtSetMark, *xtConnmark, *forgetMark:
		return true
	}
	return false
}

// set does what an expression does to the marks.
func (m *marks) set(o op, r *regs) {
	switch o := o.(type) {
	case *setMarkOp:
		b := bits32{binary.NativeEndian.Uint32(r.val[o.sreg:]), binary.NativeEndian.Uint32(r.known[o.sreg:])}
		if o.conn {
			m.conn = b
		} else {
			m.packet = b
		}
	case *xtSetMark:
		m.packet = m.packet.replace(o.mask, exactly(o.mark))
	case *xtConnmark:
		switch o.mode {
		case uapi.XtConnmarkSet:
			m.conn = m.conn.replace(o.ctMask, exactly(o.ctMark))
		case uapi.XtConnmarkSave:
			m.conn = m.conn.replace(o.ctMask, m.packet.and(o.nfMask))
		case uapi.XtConnmarkRestore:
			m.packet = m.packet.replace(o.nfMask, m.conn.and(o.ctMask))
		default:
			*m = marks{}
		}
	case *forgetMark:
		if o.conn {
			m.conn = bits32{}
		} else {
			m.packet = bits32{}
		}
	}
}

func (b bits32) and(mask uint32) bits32 { return bits32{b.val & mask, b.known | ^mask} }

func (x *xtMark) match(m marks) trilean {
	b := m.packet
	if x.conn {
		b = m.conn
	}
	b = b.and(x.mask)
	t := between(b.known == ^uint32(0) && b.val == x.mark, (b.val^x.mark)&b.known != 0)
	if x.invert {
		t = negate(t)
	}
	return t
}

// decodeSetMark decodes the target MARK, which replaces bits of the mark.
func decodeSetMark(rev uint32, b []byte) op {
	if rev != 2 || len(b) < 8 {
		return &forgetMark{}
	}
	return &xtSetMark{binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:])}
}

func decodeConnmark(rev uint32, b []byte) op {
	order := binary.NativeEndian
	o := &xtConnmark{}
	switch {
	case rev == 1 && len(b) >= 13:
		o.mode = b[12]
	case rev == 2 && len(b) >= 15 && b[13] == 0: // no shift
		o.mode = b[14]
	default:
		return &xtConnmark{mode: 0xff}
	}
	o.ctMark, o.ctMask, o.nfMask = order.Uint32(b), order.Uint32(b[4:]), order.Uint32(b[8:])
	return o
}

// decodeMarkMatch decodes the matches mark and connmark.
func decodeMarkMatch(conn bool, b []byte) op {
	if len(b) < 9 {
		return nil
	}
	return &xtMark{conn, binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:]), b[8] != 0}
}
