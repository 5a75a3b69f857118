package ruleset

import (
	"net/netip"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Host knows what rules ask beside the packet: whose an address is, and where
// packets come in and go out. Its answers are those that are true of most packets:
// a guess, by which a flow may be called right. What is certain of them is asked
// of another Host, [Host.Certain], before a flow is called stale. It is asked with
// a Judge's lock held and must not call the Judge.
type Host interface {
	// Epoch moves whenever answers may have changed since the last call, which is
	// asked before anything else for each flow.
	Epoch() uint64
	// Current tells whether the answers for packets of a protocol are those of this
	// moment. Where something has changed it makes them so, unless that was done a
	// moment ago.
	Current(proto uint8) bool
	// Certain returns a Host that says only what is true of every packet, at the
	// same epoch.
	Certain() Host
	// Sent tells whether packets with a source address are this host's own: they
	// meet the rules of the output hook, all others those of prerouting.
	Sent(src netip.Addr) Origin
	// Types returns what fib and addrtype may say of an address, as a set of
	// 1<<RTN_* ([TypeLocal] and so on); AllTypes where it is not known.
	Types(a netip.Addr) Types
	// Inputs returns the interfaces on which packets from an address may come in;
	// nil where that is not known.
	Inputs(src netip.Addr) *Interfaces
	// Outputs returns the interfaces to which this host's own packets to an
	// address may be routed; nil where that is not known.
	Outputs(dst netip.Addr) *Interfaces
}

// Origin says whether packets come from this host.
type Origin uint8

// The zero Origin is the one of which least is known.
const (
	Unsure  Origin = iota // the address came or went, or is not known
	Foreign               // another host's
	Own                   // this host's
)

// Types is a set of types of an address: 1<<RTN_* (linux/rtnetlink.h).
type Types uint16

// The types that matter; AllTypes is all there are.
const (
	TypeUnicast   Types = 1 << uapi.RtnUnicast
	TypeLocal     Types = 1 << uapi.RtnLocal
	TypeBroadcast Types = 1 << uapi.RtnBroadcast
	TypeAnycast   Types = 1 << uapi.RtnAnycast
	TypeMulticast Types = 1 << uapi.RtnMulticast

	// typeNowhere are those of an IPv6 address that no route leads to
	// (__nft_fib6_eval_type).
	typeNowhere Types = 1<<uapi.RtnBlackhole | 1<<uapi.RtnUnreachable | 1<<uapi.RtnProhibit | 1<<uapi.RtnThrow

	AllTypes Types = 1<<uapi.RtnUnspec | TypeUnicast | TypeLocal | TypeBroadcast | TypeAnycast |
		TypeMulticast | typeNowhere
)

// Interfaces is a set of interfaces of which a packet takes one.
type Interfaces struct {
	// ID is another one for every other set, as long as the Host's epoch does not
	// move. It is not 0.
	ID   uint32
	List []Interface
}

// Interface is a network interface as rules name it.
type Interface struct {
	Index uint32
	Name  string
}

// Unknown is a Host that knows nothing.
type Unknown struct{}

// Epoch returns 0.
func (Unknown) Epoch() uint64 { return 0 }

// Current returns true.
func (Unknown) Current(uint8) bool { return true }

// Certain returns the Host itself.
func (u Unknown) Certain() Host { return u }

// Sent returns Unsure.
func (Unknown) Sent(netip.Addr) Origin { return Unsure }

// Types returns AllTypes.
func (Unknown) Types(netip.Addr) Types { return AllTypes }

// Inputs returns nil.
func (Unknown) Inputs(netip.Addr) *Interfaces { return nil }

// Outputs returns nil.
func (Unknown) Outputs(netip.Addr) *Interfaces { return nil }
