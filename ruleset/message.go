package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// ErrNoNFT says that the kernel has no nf_tables: then it has no rules of nft and
// iptables-nft either.
var ErrNoNFT = errors.New("this kernel has no nf_tables")

// answer reads the datagrams that answer one request.
type answer struct {
	seq uint32
	// batch is the sequence number of a batch that was sent before the request;
	// 0: there was none.
	batch uint32
	each  func(typ uint16, family Family, attrs []byte) error

	any         bool // a message came
	done        bool
	interrupted bool
	// err is the first error of each. The rest of a dump is read all the same,
	// if another socket cannot be had: the kernel makes one dump at a time for a
	// socket.
	err error
}

// take reads one datagram. The error is a syscall.Errno where the kernel refused.
func (a *answer) take(b []byte) error {
	order := binary.NativeEndian
	for len(b) > 0 && !a.done {
		if len(b) < uapi.SizeofNlMsghdr {
			return errMalformed
		}
		n := order.Uint32(b)
		if n < uapi.SizeofNlMsghdr || int64(n) > int64(len(b)) {
			return errMalformed
		}
		typ, flags, seq := order.Uint16(b[4:]), order.Uint16(b[6:]), order.Uint32(b[8:])
		payload := b[uapi.SizeofNlMsghdr:n]
		b = b[min(align(int(n)), len(b)):]
		refusal := typ == uapi.MsgError && seq == a.batch && a.batch != 0
		if seq != a.seq && !refusal { // of a request that was given up
			continue
		}
		a.any = true
		a.interrupted = a.interrupted || flags&uapi.FDumpInt != 0
		switch typ {
		case uapi.MsgNoop:
		case uapi.MsgOverrun:
			return errMalformed
		case uapi.MsgDone, uapi.MsgError:
			a.done = true
			if len(payload) < 4 {
				return errMalformed
			}
			if errno := int32(order.Uint32(payload)); errno < 0 {
				return syscall.Errno(-errno)
			}
		default:
			if len(payload) < uapi.SizeofNfgenmsg {
				return errMalformed
			}
			if a.err == nil {
				a.err = a.each(typ, Family(payload[0]), payload[uapi.SizeofNfgenmsg:])
			}
		}
	}
	return nil
}

// generation reads what nf_tables_fill_gen_info wrote.
func generation(b []byte) (gen uint32, ok bool) {
	const genID = 1 // NFTA_GEN_ID
	a := walk(b)
	for a.next() {
		if a.typ == genID {
			gen, ok = a.u32(), true
		}
	}
	return gen, ok && !a.bad
}

func generationRequest() []byte {
	b := request(uapi.NftGetGen, 0)
	binary.NativeEndian.PutUint16(b[6:], uapi.FRequest)
	return b
}

// emptyBatch is a transaction without content, which takes its turn among the
// others. The kernel refuses it if the generation is another than gen; 0 is any.
func emptyBatch(gen uint32) []byte {
	order := binary.NativeEndian
	msg := func(typ uint16, attrs ...byte) []byte {
		b := order.AppendUint32(nil, uint32(uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg+len(attrs)))
		b = order.AppendUint16(b, typ)
		b = order.AppendUint16(b, uapi.FRequest)
		b = append(b, make([]byte, 8)...)              // sequence, port
		b = append(b, 0, 0, 0, uapi.SubsysNFTables>>8) // the subsystem, big endian
		return append(b, attrs...)
	}
	id := order.AppendUint16(nil, uapi.SizeofNlAttr+4)
	id = order.AppendUint16(id, uapi.NfnlBatchGenID)
	id = binary.BigEndian.AppendUint32(id, gen)
	return append(msg(uapi.NfnlMsgBatchBegin, id...), msg(uapi.NfnlMsgBatchEnd)...)
}

func errUnexpected(typ uint16) error {
	return fmt.Errorf("message of type %#x: %w", typ, errMalformed)
}

// gone tells whether an answer says that what was asked about is not there any
// more.
func gone(err error) bool { return errors.Is(err, syscall.ENOENT) }
