package ruleset

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// unhex reads annotated hex: what follows a # is a comment.
func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		tb.Skip("the bytes are those of a little-endian machine")
	}
	var digits strings.Builder
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func TestRequests(t *testing.T) {
	tab := &table{tableKey: tableKey{IPv6, "kube-proxy"}}
	for _, tt := range []struct {
		name, want string
		got        []byte
	}{
		{"generation", `
			14000000 100a 0100 00000000 00000000 # length 20, NFT_MSG_GETGEN, REQUEST
			00 00 0000                           # nfgenmsg: AF_UNSPEC
		`, generationRequest()},
		{"a barrier", `
			1c000000 1000 0100 00000000 00000000 # length 28, NFNL_MSG_BATCH_BEGIN, REQUEST
			00 00 000a                           # AF_UNSPEC, NFNETLINK_V0, NFNL_SUBSYS_NFTABLES
			0800 0100 00010007                   # NFNL_BATCH_GENID
			14000000 1100 0100 00000000 00000000 # length 20, NFNL_MSG_BATCH_END, REQUEST
			00 00 000a
		`, emptyBatch(0x10007)},
		{"all chains", `
			14000000 040a 0103 00000000 00000000 # NFT_MSG_GETCHAIN, REQUEST|DUMP
			00 00 0000
		`, request(uapi.NftGetChain, 0)},
		{"rules of a table", `
			24000000 070a 0103 00000000 00000000 # NFT_MSG_GETRULE, REQUEST|DUMP
			0a 00 0000                           # NFPROTO_IPV6
			0f00 0100 6b7562652d70726f787900 00  # NFTA_RULE_TABLE "kube-proxy", padding
		`, tableRequest(uapi.NftGetRule, tab)},
		{"elements of a set", `
			30000000 0d0a 0103 00000000 00000000 # NFT_MSG_GETSETELEM, REQUEST|DUMP
			0a 00 0000
			0f00 0100 6b7562652d70726f787900 00  # NFTA_SET_ELEM_LIST_TABLE
			0b00 0200 5f5f6d61703000 00          # NFTA_SET_ELEM_LIST_SET "__map0"
		`, elementsRequest(tab, &set{name: "__map0"})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if want := unhex(t, tt.want); !bytes.Equal(tt.got, want) {
				t.Errorf("encoded\n%s\nwant\n%s", hex.Dump(tt.got), hex.Dump(want))
			}
		})
	}
}

// The messages of one small ruleset, attribute by attribute as Linux 6.18 sends
// them.
const (
	chainMessage = `
		0800 0100 6e617400                  # NFTA_CHAIN_TABLE "nat"
		0c00 0200 0000000000000001          # NFTA_CHAIN_HANDLE
		0700 0300 70726500                  # NFTA_CHAIN_NAME "pre"
		1400 0480                           # NFTA_CHAIN_HOOK
		  0800 0100 00000000                #   NFTA_HOOK_HOOKNUM NF_INET_PRE_ROUTING
		  0800 0200 ffffff9c                #   NFTA_HOOK_PRIORITY -100
		0800 0500 00000001                  # NFTA_CHAIN_POLICY NF_ACCEPT
		0800 0700 6e617400                  # NFTA_CHAIN_TYPE "nat"
		0800 0a00 00000001                  # NFTA_CHAIN_FLAGS NFT_CHAIN_BASE
		0800 0600 00000003                  # NFTA_CHAIN_USE`
	ruleMessage = `
		0800 0100 6e617400                  # NFTA_RULE_TABLE
		0800 0200 70726500                  # NFTA_RULE_CHAIN
		0c00 0300 0000000000000005          # NFTA_RULE_HANDLE 5
		2801 0480                           # NFTA_RULE_EXPRESSIONS
		  3400 0180                         #   NFTA_LIST_ELEM
		    0c00 0100 7061796c6f616400      #     NFTA_EXPR_NAME "payload"
		    2400 0280                       #     NFTA_EXPR_DATA
		      0800 0100 00000001            #       NFTA_PAYLOAD_DREG NFT_REG_1
		      0800 0200 00000002            #       NFTA_PAYLOAD_BASE transport header
		      0800 0300 00000002            #       NFTA_PAYLOAD_OFFSET
		      0800 0400 00000002            #       NFTA_PAYLOAD_LEN
		  2c00 0180
		    0800 0100 636d7000              #     "cmp"
		    2000 0280
		      0800 0100 00000001            #       NFTA_CMP_SREG
		      0800 0200 00000000            #       NFTA_CMP_OP NFT_CMP_EQ
		      0c00 0380 0600 0100 0035 0000 #       NFTA_CMP_DATA 53, padded
		  2c00 0180
		    0c00 0100 636f756e74657200      #     "counter"
		    1c00 0280
		      0c00 0100 0000000000000054    #       bytes
		      0c00 0200 0000000000000001    #       packets
		  2c00 0180
		    0e00 0100 696d6d65646961746500 0000 #   "immediate"
		    1800 0280
		      0800 0100 00000001            #       NFTA_IMMEDIATE_DREG
		      0c00 0280 0800 0100 c633640b  #       198.51.100.11
		  2c00 0180
		    0e00 0100 696d6d65646961746500 0000
		    1800 0280
		      0800 0100 00000009            #       NFT_REG32_01
		      0c00 0280 0600 0100 14e9 0000 #       5353
		  4000 0180
		    0800 0100 6e617400              #     "nat"
		    3400 0280
		      0800 0100 00000001            #       NFTA_NAT_TYPE NFT_NAT_DNAT
		      0800 0200 00000002            #       NFTA_NAT_FAMILY IPv4
		      0800 0300 00000001            #       NFTA_NAT_REG_ADDR_MIN
		      0800 0400 00000001            #       NFTA_NAT_REG_ADDR_MAX
		      0800 0500 00000009            #       NFTA_NAT_REG_PROTO_MIN
		      0800 0700 00000002            #       NFTA_NAT_FLAGS NF_NAT_RANGE_PROTO_SPECIFIED`
	setMessage = `
		0800 0100 6e617400                  # NFTA_SET_TABLE
		0c00 0200 706f7274 73000000         # NFTA_SET_NAME "ports"
		0800 0300 0000001c                  # NFTA_SET_FLAGS INTERVAL|MAP|TIMEOUT
		0800 0400 00000001                  # NFTA_SET_KEY_TYPE
		0800 0500 00000008                  # NFTA_SET_KEY_LEN 8
		0800 0600 ffffff00                  # NFTA_SET_DATA_TYPE verdict
		0800 0700 00000000                  # NFTA_SET_DATA_LEN
		0c00 1000 0000000000000007          # NFTA_SET_HANDLE
		2000 0980                           # NFTA_SET_DESC
		  1c00 0280                         #   NFTA_SET_DESC_CONCAT
		    0c00 0180 0800 0100 00000004    #     a field of 4 bytes
		    0c00 0180 0800 0100 00000002    #     a field of 2`
	elementsMessage = `
		0800 0100 6e617400                  # NFTA_SET_ELEM_LIST_TABLE
		0a00 0200 706f72747300 0000         # NFTA_SET_ELEM_LIST_SET
		6800 0380                           # NFTA_SET_ELEM_LIST_ELEMENTS
		  4400 0180                         #   NFTA_LIST_ELEM
		    1000 0180 0c00 0100 0a000000 00320000 # KEY: 10.0.0.0, 50
		    1000 0a80 0c00 0100 0affffff 003c0000 # KEY_END: 10.255.255.255, 60
		    2000 0280                       #     DATA
		      1c00 0280                     #       verdict
		        0800 0100 fffffffc          #         NFT_GOTO
		        1000 0200 70726500 00000000 00000000 # chain "pre", with more than one zero
		  2000 0180                         #   the catch-all
		    0800 0300 00000002              #     NFT_SET_ELEM_CATCHALL
		    1400 0280
		      1000 0280
		        0800 0100 ffffffff          #         NFT_CONTINUE
		        0400 0300`
)

// golden decodes the messages above.
func golden(t *testing.T) *model {
	t.Helper()
	m := newModel()
	for _, err := range []error{
		m.addTable(IPv4, unhex(t, "0800 0100 6e617400 0800 0200 00000000 0c00 0400 0000000000000009")),
		m.addChain(IPv4, unhex(t, chainMessage)),
		m.addRule(IPv4, unhex(t, ruleMessage)),
		m.addSet(IPv4, unhex(t, setMessage)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func TestGolden(t *testing.T) {
	m := golden(t)
	tab := m.tables[tableKey{IPv4, "nat"}]
	if tab == nil || tab.handle != 9 || !tab.nat || tab.dormant {
		t.Fatalf("table %+v", tab)
	}
	c := tab.chains["pre"]
	if c == nil || !c.base || c.hook != uapi.NfInetPreRouting || c.priority != -100 || c.drop {
		t.Fatalf("chain %+v", c)
	}
	want := []op{
		&payloadOp{uapi.NftPayloadTransportHeader, 2, 2, 0},
		&cmpOp{0, uapi.NftCmpEq, []byte{0, 53}},
		&immediateOp{0, []byte{198, 51, 100, 11}},
		&immediateOp{4, []byte{0x14, 0xe9}},
		&natOp{IPv4, 0, 0, 4, 4, 2},
	}
	rules := c.each()
	if len(rules) != 1 || rules[0].handle != 5 {
		t.Fatalf("rules %+v", rules)
	}
	opts := cmp.AllowUnexported(payloadOp{}, cmpOp{}, immediateOp{}, natOp{}, set{}, elements{}, verdictOp{})
	if d := cmp.Diff(want, rules[0].operations(), opts); d != "" {
		t.Errorf("rule (-want +got):\n%s", d)
	}
	if got, want := describe(tab, rules[0].exprs), "th dport 53 dnat to 198.51.100.11:5353"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	s := tab.sets["ports"]
	wantSet := &set{
		name: "ports", handle: 7, isMap: true, verdicts: true, interval: true, timed: true, keyLen: 8, fields: []int{4, 2},
	}
	if d := cmp.Diff(wantSet, s, opts); d != "" {
		t.Errorf("set (-want +got):\n%s", d)
	}
	g := gathering{table: tab, set: s, limits: usualLimits}
	if err := g.add(unhex(t, elementsMessage)); err != nil {
		t.Fatal(err)
	}
	x := g.finish()
	if x.n != 1 || x.catchall != 1 || !bytes.Equal(x.low[:8], []byte{10, 0, 0, 0, 0, 50, 0, 0}) ||
		!bytes.Equal(x.high[:8], []byte{10, 255, 255, 255, 0, 60, 0, 0}) || !x.unsafe[0] {
		t.Errorf("elements %+v", x)
	}
	if x.to[0].code != uapi.NftGoto || x.to[0].chain != c || x.to[1].code != uapi.NftContinue {
		t.Errorf("verdicts %+v, %+v", x.to[0], x.to[1])
	}
}

func TestAnswer(t *testing.T) {
	tests := []struct {
		name, hex   string
		err         error
		messages    int
		done        bool
		interrupted bool
	}{
		{"one message", `1c000000 0f0a 0000 07000000 00000000 00 00 0007 0800 0100 00010007`, nil, 1, false, false},
		{"interrupted", `1c000000 0f0a 1200 07000000 00000000 00 00 0007 0800 0100 00010007`, nil, 1, false, true},
		{"the end", `14000000 0300 0200 07000000 00000000 00000000`, nil, 0, true, false},
		{"an interrupted end", `14000000 0300 1200 07000000 00000000 00000000`, nil, 0, true, true},
		{"an answer to another request", `14000000 0300 0200 06000000 00000000 00000000`, nil, 0, false, false},
		{"refused", `24000000 0200 0000 07000000 00000000 ffffffff 14000000 070a0103 07000000 00000000`, syscall.EPERM, 0, true, false},
		{"acknowledged", `24000000 0200 0000 07000000 00000000 00000000 14000000 070a0103 07000000 00000000`, nil, 0, true, false},
		{"lost", `10000000 0400 0000 07000000 00000000`, errMalformed, 0, false, false},
		{"length too short", `0f000000 0300 0000 07000000 00000000`, errMalformed, 0, false, false},
		{"length too long", `ff000000 0300 0000 07000000 00000000`, errMalformed, 0, false, false},
		{"header cut short", `14000000 0300`, errMalformed, 0, false, false},
		{"end without a code", `10000000 0300 0000 07000000 00000000`, errMalformed, 0, true, false},
		{"no nfgenmsg", `10000000 0f0a 0000 07000000 00000000`, errMalformed, 0, false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			a := answer{seq: 7, each: func(typ uint16, _ Family, b []byte) error {
				n++
				if gen, ok := generation(b); typ != uapi.NftNewGen || !ok || gen != 0x10007 {
					t.Errorf("type %#x, generation %#x, %v", typ, gen, ok)
				}
				return nil
			}}
			err := a.take(unhex(t, tt.hex))
			if !errors.Is(err, tt.err) || n != tt.messages || a.done != tt.done || a.interrupted != tt.interrupted {
				t.Errorf("%v, %d messages, %+v", err, n, a)
			}
		})
	}
}

func TestMalformed(t *testing.T) {
	m := golden(t)
	tab := m.tables[tableKey{IPv4, "nat"}]
	for name, err := range map[string]error{
		"table without a name":      m.addTable(IPv4, unhex(t, "0800 0200 00000000")),
		"table cut short":           m.addTable(IPv4, unhex(t, "ff00 0100 61")),
		"chain without a name":      m.addChain(IPv4, unhex(t, "0800 0100 6e617400")),
		"hook without a priority":   m.addChain(IPv4, join(str(uapi.NftaChainTable, "nat"), str(uapi.NftaChainName, "x"), str(uapi.NftaChainType, "nat"), nla(uapi.NftaChainHook, num(uapi.NftaHookHooknum, 0)))),
		"rule without a chain":      m.addRule(IPv4, unhex(t, "0800 0100 6e617400")),
		"set with a huge key":       m.addSet(IPv4, join(str(uapi.NftaSetTable, "nat"), str(uapi.NftaSetName, "x"), num(uapi.NftaSetKeyLen, 65))),
		"fields that do not add up": m.addSet(IPv4, join(str(uapi.NftaSetTable, "nat"), str(uapi.NftaSetName, "x"), num(uapi.NftaSetKeyLen, 8), concat(4, 2, 2))),
		"map without data":          m.addSet(IPv4, join(str(uapi.NftaSetTable, "nat"), str(uapi.NftaSetName, "x"), num(uapi.NftaSetKeyLen, 8), num(uapi.NftaSetFlags, uapi.NftSetMap))),
		"key of another length":     (&gathering{table: tab, set: tab.sets["ports"]}).add(nla(uapi.NftaSetElemListElements, elem([]byte{1}))),
		"element without a verdict": (&gathering{table: tab, set: tab.sets["ports"]}).add(nla(uapi.NftaSetElemListElements, elem(make([]byte, 8)))),
	} {
		if !errors.Is(err, errMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What belongs to tables and chains that are not known is passed over.
	for _, err := range []error{
		m.addTable(7, str(uapi.NftaTableName, "bridge")), m.addChain(IPv6, unhex(t, chainMessage)),
		m.addRule(IPv6, unhex(t, ruleMessage)), m.addSet(IPv6, unhex(t, setMessage)),
	} {
		if err != nil {
			t.Error(err)
		}
	}
}

// FuzzAnswer reads datagrams of whatever content.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte{0x14, 0, 0, 0, 3, 0, 2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{0x1c, 0, 0, 0, 0x0f, 0x0a, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 8, 0, 1, 0, 0, 1, 0, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		read := 0
		a := answer{seq: 7, each: func(_ uint16, _ Family, b []byte) error {
			read += uapi.SizeofNlMsghdr + uapi.SizeofNfgenmsg + len(b)
			_, _ = generation(b)
			return nil
		}}
		_ = a.take(b)
		if read > len(b) {
			t.Errorf("%d bytes of messages in %d", read, len(b))
		}
	})
}
