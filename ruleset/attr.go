package ruleset

import (
	"bytes"
	"encoding/binary"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// attrs walks over netlink attributes (struct nlattr).
type attrs struct {
	rest []byte
	typ  uint16
	val  []byte
	bad  bool // an attribute claims more than there is
}

func walk(b []byte) attrs { return attrs{rest: b} }

// next steps to the next attribute. After the last one, bad tells whether the
// bytes were all well-formed.
func (a *attrs) next() bool {
	if len(a.rest) == 0 {
		return false
	}
	if len(a.rest) < uapi.SizeofNlAttr {
		a.bad = true
		return false
	}
	n := int(binary.NativeEndian.Uint16(a.rest))
	if n < uapi.SizeofNlAttr || n > len(a.rest) {
		a.bad = true
		return false
	}
	a.typ = binary.NativeEndian.Uint16(a.rest[2:]) & uapi.AttrTypeMask
	a.val = a.rest[uapi.SizeofNlAttr:n]
	a.rest = a.rest[min(align(n), len(a.rest)):]
	return true
}

// align rounds up as NLMSG_ALIGN and NLA_ALIGN do.
func align(n int) int { return (n + uapi.Align - 1) &^ (uapi.Align - 1) }

// u32 reads the value as nf_tables writes numbers: big endian.
func (a *attrs) u32() uint32 {
	if len(a.val) != 4 {
		a.bad = true
		return 0
	}
	return binary.BigEndian.Uint32(a.val)
}

// host32 reads the value as rtnetlink writes numbers: as the machine does.
func (a *attrs) host32() uint32 {
	if len(a.val) != 4 {
		a.bad = true
		return 0
	}
	return binary.NativeEndian.Uint32(a.val)
}

func (a *attrs) u64() uint64 {
	if len(a.val) != 8 {
		a.bad = true
		return 0
	}
	return binary.BigEndian.Uint64(a.val)
}

// text reads a string that may or may not end in a zero.
func (a *attrs) text() []byte {
	s, _, _ := bytes.Cut(a.val, []byte{0})
	return s
}

// find returns the value of the first attribute of a type, nil where there is
// none.
func find(b []byte, typ uint16) []byte {
	for a := walk(b); a.next(); {
		if a.typ == typ {
			return a.val
		}
	}
	return nil
}
