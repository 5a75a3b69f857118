// Package uapi holds the kernel's netlink constants that golang.org/x/sys/unix
// lacks or defines on Linux alone, so that messages can be encoded and decoded,
// tested and fuzzed on every operating system.
package uapi

// Header sizes and alignment (include/uapi/linux/netlink.h and
// linux/netfilter/nfnetlink.h).
const (
	SizeofNlMsghdr = 16
	SizeofNlAttr   = 4
	SizeofNfgenmsg = 4
	SizeofNlMsgerr = 4 + SizeofNlMsghdr
	Align          = 4
)

// Message types and flags of netlink.
const (
	MsgNoop    = 1
	MsgError   = 2
	MsgDone    = 3
	MsgOverrun = 4

	FRequest = 0x1
	FAck     = 0x4
	FDumpInt = 0x10 // NLM_F_DUMP_INTR
	FRoot    = 0x100
	FMatch   = 0x200
	FDump    = FRoot | FMatch
	FExcl    = 0x200
	FCreate  = 0x400
	FCapped  = 0x100 // NLM_F_CAPPED, in an error
	FAckTLVs = 0x200 // NLM_F_ACK_TLVS, in an error

	ErrAttrMsg = 1 // NLMSGERR_ATTR_MSG

	AttrNested   = 0x8000
	AttrTypeMask = 0x3fff
)

// nfnetlink's message type is subsystem<<8 | message.
const (
	SubsysCTNetlink = 1 << 8

	CtNew      = SubsysCTNetlink | 0 // IPCTNL_MSG_CT_NEW
	CtGet      = SubsysCTNetlink | 1 // IPCTNL_MSG_CT_GET
	CtDelete   = SubsysCTNetlink | 2 // IPCTNL_MSG_CT_DELETE
	CtGetStats = SubsysCTNetlink | 5 // IPCTNL_MSG_CT_GET_STATS
)

// NfnetlinkV1 in nfgenmsg.version makes a request without a tuple keep to the
// family in its header; version 0 does not (ctnetlink_flush_conntrack).
const NfnetlinkV1 = 1

// enum ctattr_type (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	CtaTupleOrig   = 1
	CtaTupleReply  = 2
	CtaStatus      = 3
	CtaProtoinfo   = 4
	CtaTimeout     = 7
	CtaMark        = 8
	CtaID          = 12
	CtaTupleMaster = 14
	CtaZone        = 18
	CtaFilter      = 25
	CtaStatusMask  = 26
)

// enum ctattr_tuple, ctattr_ip and ctattr_l4proto.
const (
	CtaTupleIP    = 1
	CtaTupleProto = 2
	CtaTupleZone  = 3

	CtaIPv4Src = 1
	CtaIPv4Dst = 2
	CtaIPv6Src = 3
	CtaIPv6Dst = 4

	CtaProtoNum      = 1
	CtaProtoSrcPort  = 2
	CtaProtoDstPort  = 3
	CtaProtoICMPID   = 4
	CtaProtoICMPType = 5
	CtaProtoICMPCode = 6
	CtaProtoICMP6ID  = 7
	CtaProtoICMP6Typ = 8
	CtaProtoICMP6Cod = 9
)

// enum ctattr_protoinfo and the states inside.
const (
	CtaProtoinfoTCP  = 1
	CtaProtoinfoSCTP = 3

	CtaProtoinfoTCPState      = 1
	CtaProtoinfoSCTPState     = 1
	CtaProtoinfoSCTPVtagOrig  = 2
	CtaProtoinfoSCTPVtagReply = 3
)

// enum ctattr_filter, and the flags inside (CTA_FILTER_F_*, declared in the
// kernel's private net/netfilter/nf_internals.h).
const (
	CtaFilterOrigFlags  = 1
	CtaFilterReplyFlags = 2

	FilterIPSrc    = 1 << 0
	FilterIPDst    = 1 << 1
	FilterProtoNum = 1 << 3
	FilterSrcPort  = 1 << 4
	FilterDstPort  = 1 << 5
)

// enum ctattr_stats_global.
const (
	CtaStatsGlobalEntries    = 1
	CtaStatsGlobalMaxEntries = 2
)
