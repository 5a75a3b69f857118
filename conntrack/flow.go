package conntrack

import (
	"net/netip"
	"strconv"
)

// Family is a flow's layer 3 protocol. The values are Linux's AF_INET and
// AF_INET6 on every operating system, so that saved tables can be read
// anywhere.
type Family uint8

// The two families that conntrack tracks.
const (
	IPv4 Family = 2
	IPv6 Family = 10
)

// FamilyOf returns the family of an address; an IPv4-mapped IPv6 address
// counts as IPv6, as the kernel counts it.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "ipv4" or "ipv6", the words that conntrack prints.
func (f Family) String() string {
	switch f {
	case IPv4:
		return "ipv4"
	case IPv6:
		return "ipv6"
	}
	return "family " + strconv.Itoa(int(f))
}

// Protocol numbers of layer 4 (IANA) that conntrack treats by name.
const (
	ICMP    uint8 = 1
	TCP     uint8 = 6
	UDP     uint8 = 17
	DCCP    uint8 = 33
	GRE     uint8 = 47
	ICMPv6  uint8 = 58
	SCTP    uint8 = 132
	UDPLite uint8 = 136
)

// Tuple is one direction of a flow as the kernel keys it
// (struct nf_conntrack_tuple).
type Tuple struct {
	Src, Dst netip.Addr

	// SrcPort and DstPort are the ports of TCP, UDP, UDP-Lite, SCTP and
	// DCCP, and the keys of GRE. They are zero for every other protocol.
	SrcPort, DstPort uint16

	// ICMPType, ICMPCode and ICMPID are set for ICMP and ICMPv6 alone.
	ICMPType, ICMPCode uint8
	ICMPID             uint16
}

// ZoneDir says for which directions of a flow its zone holds.
type ZoneDir uint8

// A zone holds for both directions unless a rule set it for one alone
// (nft "ct original zone set", iptables "-j CT --zone-orig").
const (
	ZoneBoth ZoneDir = iota
	ZoneOrig
	ZoneReply
)

// Status is the bit set of enum ip_conntrack_status
// (include/uapi/linux/netfilter/nf_conntrack_common.h).
type Status uint32

// The status bits that matter for reading, judging and creating flows.
const (
	StatusExpected  Status = 1 << 0 // announced by a helper (SIP media, FTP data)
	StatusSeenReply Status = 1 << 1 // packets were seen in both directions
	StatusAssured   Status = 1 << 2 // not the first to go when the table is full
	StatusConfirmed Status = 1 << 3 // in the table
	StatusSrcNAT    Status = 1 << 4 // source translated
	StatusDstNAT    Status = 1 << 5 // destination translated
	// StatusDstNATDone says that the NAT rules for destinations were asked, whether or
	// not one translated. A flow without it began before there were any (the hooks
	// are registered with the first chain, nf_nat_register_fn), or was made over netlink.
	StatusDstNATDone Status = 1 << 8
	StatusDying      Status = 1 << 9
	StatusOffload    Status = 1 << 14 // handled by a flowtable; cannot be deleted
	StatusHWOffload  Status = 1 << 15 // handled by a network card
)

// Flow is one entry of the table. It is a plain value without references to
// the table or to a buffer: a copy stays good for ever.
type Flow struct {
	Family Family
	Proto  uint8 // IANA protocol number

	Orig  Tuple // as the first packet came in, before translation
	Reply Tuple // as answers are expected: Reply.Src is where the flow goes

	Zone    uint16 // 0 is the default zone
	ZoneDir ZoneDir

	// ID is the kernel's identifier (CTA_ID, nf_ct_get_id), 0 where the text
	// that the flow was read from did not tell it.
	ID     uint32
	Status Status
	Mark   uint32

	// Timeout is what remains of the flow's life, in seconds.
	Timeout uint32

	// State is the protocol's state: enum tcp_conntrack or sctp_conntrack.
	// It is 0 for every other protocol; StateName gives its word.
	State uint8
}

// Translated tells whether answers come from elsewhere than the first packet
// went to. The status bit StatusDstNAT is not asked: the tuples are what the
// kernel translates by.
func (f *Flow) Translated() bool {
	return f.Reply.Src != f.Orig.Dst || f.Reply.SrcPort != f.Orig.DstPort
}

// Replied tells whether the flow was ever answered.
func (f *Flow) Replied() bool { return f.Status&StatusSeenReply != 0 }

// HasPorts tells whether a protocol's tuples carry ports (or keys, for GRE).
func HasPorts(proto uint8) bool {
	switch proto {
	case TCP, UDP, DCCP, GRE, SCTP, UDPLite:
		return true
	}
	return false
}

var protoNames = map[uint8]string{
	ICMP: "icmp", TCP: "tcp", UDP: "udp", DCCP: "dccp", GRE: "gre",
	ICMPv6: "icmpv6", SCTP: "sctp", UDPLite: "udplite",
}

// ProtoName returns the word that conntrack prints for a protocol number,
// "unknown" for one that it has no word for.
func ProtoName(proto uint8) string {
	if s, ok := protoNames[proto]; ok {
		return s
	}
	return "unknown"
}

// enum tcp_conntrack and enum sctp_conntrack, in the kernel's order.
var (
	tcpStates = [...]string{
		"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT",
		"CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "SYN_SENT2",
	}
	sctpStates = [...]string{
		"NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED",
		"SHUTDOWN_SENT", "SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT",
		"HEARTBEAT_SENT", "HEARTBEAT_ACKED", // the last by kernels before 6.2
	}
)

// StateName returns the word for State, "" for protocols without states.
func (f *Flow) StateName() string {
	var names []string
	switch f.Proto {
	case TCP:
		names = tcpStates[:]
	case SCTP:
		names = sctpStates[:]
	default:
		return ""
	}
	if int(f.State) < len(names) {
		return names[f.State]
	}
	return "STATE_" + strconv.Itoa(int(f.State))
}
