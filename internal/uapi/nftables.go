package uapi

// SubsysNFTables is nf_tables' part of a message type (NFNL_SUBSYS_NFTABLES << 8).
const SubsysNFTables = 10 << 8

// Messages that begin and end a transaction, and the attribute of the first that
// holds the generation which it is for (linux/netfilter/nfnetlink.h).
const (
	NfnlMsgBatchBegin = 0x10
	NfnlMsgBatchEnd   = 0x11

	NfnlBatchGenID = 1
)

// enum nf_tables_msg_types (include/uapi/linux/netfilter/nf_tables.h).
const (
	NftNewTable   = SubsysNFTables | 0
	NftGetTable   = SubsysNFTables | 1
	NftNewChain   = SubsysNFTables | 3
	NftGetChain   = SubsysNFTables | 4
	NftNewRule    = SubsysNFTables | 6
	NftGetRule    = SubsysNFTables | 7
	NftNewSet     = SubsysNFTables | 9
	NftGetSet     = SubsysNFTables | 10
	NftNewSetElem = SubsysNFTables | 12
	NftGetSetElem = SubsysNFTables | 13
	NftNewGen     = SubsysNFTables | 15
	NftGetGen     = SubsysNFTables | 16
)

// Families of tables (enum nf_inet_addr protocol families, NFPROTO_*).
const (
	NfprotoInet   = 1
	NfprotoIPv4   = 2
	NfprotoBridge = 7
	NfprotoIPv6   = 10
)

// enum nf_inet_hooks, of those that translate destinations.
const (
	NfInetPreRouting = 0
	NfInetLocalOut   = 3
)

// Verdicts: NF_* (linux/netfilter.h) and enum nft_verdicts.
const (
	NfDrop   = 0
	NfAccept = 1

	NftContinue = -1
	NftBreak    = -2
	NftJump     = -3
	NftGoto     = -4
	NftReturn   = -5
)

// Registers: enum nft_registers.
const (
	NftRegVerdict = 0
	NftReg1       = 1
	NftReg4       = 4
	NftReg32First = 8
	NftReg32Last  = 23
	NftRegSize    = 16
	NftReg32Size  = 4
)

// enum nft_list_attributes, nft_hook_attributes, nft_table_attributes,
// nft_chain_attributes and their flags.
const (
	NftaListElem = 1

	NftaHookHooknum  = 1
	NftaHookPriority = 2

	NftaTableName    = 1
	NftaTableFlags   = 2
	NftaTableHandle  = 4
	NftTableFDormant = 1 << 0

	NftaChainTable  = 1
	NftaChainHandle = 2
	NftaChainName   = 3
	NftaChainHook   = 4
	NftaChainPolicy = 5
	NftaChainUse    = 6
	NftaChainType   = 7
)

// enum nft_rule_attributes.
const (
	NftaRuleTable       = 1
	NftaRuleChain       = 2
	NftaRuleHandle      = 3
	NftaRuleExpressions = 4
	NftaRuleUserdata    = 7
)

// enum nft_set_attributes, nft_set_flags, nft_set_desc_attributes and
// nft_set_field_attributes.
const (
	NftaSetTable       = 1
	NftaSetName        = 2
	NftaSetFlags       = 3
	NftaSetKeyLen      = 5
	NftaSetDataType    = 6
	NftaSetDataLen     = 7
	NftaSetDesc        = 9
	NftaSetHandle      = 16
	NftaSetExpr        = 17
	NftaSetExpressions = 18
	NftaSetCount       = 20

	NftSetAnonymous = 1 << 0
	NftSetConstant  = 1 << 1
	NftSetInterval  = 1 << 2
	NftSetMap       = 1 << 3
	NftSetTimeout   = 1 << 4
	NftSetEval      = 1 << 5
	NftSetObject    = 1 << 6

	NftaSetDescConcat = 2
	NftaSetFieldLen   = 1

	NftDataVerdict = 0xffffff00
)

// enum nft_set_elem_list_attributes, nft_set_elem_attributes and
// nft_set_elem_flags.
const (
	NftaSetElemListTable    = 1
	NftaSetElemListSet      = 2
	NftaSetElemListElements = 3

	NftaSetElemKey         = 1
	NftaSetElemData        = 2
	NftaSetElemFlags       = 3
	NftaSetElemTimeout     = 4
	NftaSetElemExpiration  = 5
	NftaSetElemExpr        = 7
	NftaSetElemKeyEnd      = 10
	NftaSetElemExpressions = 11

	NftSetElemIntervalEnd = 1 << 0
	NftSetElemCatchall    = 1 << 1
)

// enum nft_data_attributes, nft_verdict_attributes and nft_expr_attributes.
const (
	NftaDataValue   = 1
	NftaDataVerdict = 2

	NftaVerdictCode  = 1
	NftaVerdictChain = 2

	NftaExprName = 1
	NftaExprData = 2
)

// Attributes of the expressions, each enum after its expression, and what they
// may hold.
const (
	NftaImmediateDreg = 1
	NftaImmediateData = 2

	NftaBitwiseSreg = 1
	NftaBitwiseDreg = 2
	NftaBitwiseLen  = 3
	NftaBitwiseMask = 4
	NftaBitwiseXor  = 5
	NftaBitwiseOp   = 6
	NftaBitwiseData = 7

	NftBitwiseMaskXor = 0
	NftBitwiseLshift  = 1
	NftBitwiseRshift  = 2

	NftaByteorderSreg = 1
	NftaByteorderDreg = 2
	NftaByteorderLen  = 4
	NftaByteorderSize = 5

	NftaCmpSreg = 1
	NftaCmpOp   = 2
	NftaCmpData = 3

	NftCmpEq  = 0
	NftCmpNeq = 1
	NftCmpLt  = 2
	NftCmpLte = 3
	NftCmpGt  = 4
	NftCmpGte = 5

	NftaRangeSreg = 1
	NftaRangeOp   = 2
	NftaRangeFrom = 3
	NftaRangeTo   = 4

	NftaLookupSet   = 1
	NftaLookupSreg  = 2
	NftaLookupDreg  = 3
	NftaLookupFlags = 5
	NftLookupFInv   = 1 << 0

	NftaDynsetOp      = 3
	NftDynsetOpAdd    = 0
	NftDynsetOpDelete = 2

	NftaPayloadDreg   = 1
	NftaPayloadBase   = 2
	NftaPayloadOffset = 3
	NftaPayloadLen    = 4
	NftaPayloadSreg   = 5

	NftPayloadLLHeader        = 0
	NftPayloadNetworkHeader   = 1
	NftPayloadTransportHeader = 2

	NftaMetaDreg = 1
	NftaMetaKey  = 2
	NftaMetaSreg = 3

	NftMetaProtocol = 1
	NftMetaMark     = 3
	NftMetaIif      = 4
	NftMetaOif      = 5
	NftMetaIifname  = 6
	NftMetaOifname  = 7
	NftMetaSkuid    = 10
	NftMetaSkgid    = 11
	NftMetaNfproto  = 15
	NftMetaL4proto  = 16

	NftaCtDreg      = 1
	NftaCtKey       = 2
	NftaCtDirection = 3
	NftaCtSreg      = 4

	NftCtState      = 0
	NftCtDirection  = 1
	NftCtStatus     = 2
	NftCtMark       = 3
	NftCtL3protocol = 7
	NftCtSrc        = 8
	NftCtDst        = 9
	NftCtProtocol   = 10
	NftCtProtoSrc   = 11
	NftCtProtoDst   = 12
	NftCtSrcIP      = 19
	NftCtDstIP      = 20
	NftCtSrcIP6     = 21
	NftCtDstIP6     = 22

	NftaFibDreg   = 1
	NftaFibResult = 2
	NftaFibFlags  = 3

	NftFibResultAddrtype = 3
	NftaFibFSaddr        = 1 << 0
	NftaFibFDaddr        = 1 << 1
	NftaFibFIif          = 1 << 3
	NftaFibFOif          = 1 << 4

	NftaHashDreg    = 2
	NftaHashModulus = 4
	NftaHashOffset  = 6
	NftaHashSetName = 8

	NftaNgDreg    = 1
	NftaNgModulus = 2
	NftaNgOffset  = 4

	NftaNatType        = 1
	NftaNatFamily      = 2
	NftaNatRegAddrMin  = 3
	NftaNatRegAddrMax  = 4
	NftaNatRegProtoMin = 5
	NftaNatRegProtoMax = 6
	NftaNatFlags       = 7

	NftNatDnat = 1

	NftaRedirRegProtoMin = 1
	NftaRedirRegProtoMax = 2

	NftaObjrefImmType = 1
	NftaObjrefImmName = 2
	NftaObjrefSetName = 4

	NftObjectCounter  = 1
	NftObjectCtExpect = 9

	// NftaDreg is the destination register of rt and exthdr; that of socket
	// and of osf have numbers of their own.
	NftaRtDreg     = 1
	NftaExthdrDreg = 1
	NftaExthdrSreg = 8
	NftaSocketDreg = 2
	NftaOsfDreg    = 1
	NftaXfrmDreg   = 1

	NftaMatchName = 1
	NftaMatchRev  = 2
	NftaMatchInfo = 3

	NftaDynsetSetName = 1
)

// XT_CONNMARK_* (linux/netfilter/xt_connmark.h).
const (
	XtConnmarkSet     = 0
	XtConnmarkSave    = 1
	XtConnmarkRestore = 2
)

// NF_NAT_RANGE_* (linux/netfilter/nf_nat.h).
const (
	NfNatRangeMapIPs         = 1 << 0
	NfNatRangeProtoSpecified = 1 << 1
	NfNatRangeProtoOffset    = 1 << 5
	NfNatRangeNetmap         = 1 << 6
)

// What conntrack says of the first packet of a flow (enum ip_conntrack_info,
// ip_conntrack_status; NF_CT_STATE_BIT).
const (
	CtStateBitNew = 1 << 3
	// CtStatusUnset are the bits that are never set where destinations are
	// translated: EXPECTED, SEEN_REPLY, ASSURED, CONFIRMED, SRC_NAT, DST_NAT,
	// SRC_NAT_DONE, DST_NAT_DONE. A flow that a helper expected is not meant.
	CtStatusUnset = 0x1bf
)

// Types of routes, RTN_* (linux/rtnetlink.h), as fib and addrtype see addresses.
const (
	RtnUnspec      = 0
	RtnUnicast     = 1
	RtnLocal       = 2
	RtnBroadcast   = 3
	RtnAnycast     = 4
	RtnMulticast   = 5
	RtnBlackhole   = 6
	RtnUnreachable = 7
	RtnProhibit    = 8
	RtnThrow       = 9
)
