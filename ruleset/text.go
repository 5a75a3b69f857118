package ruleset

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

func quote(s string) string { return strconv.Quote(s) }

// describe writes a rule for people: as nft would, or iptables for its own
// extensions, without what only counts.
func describe(t *table, exprs []byte) string {
	w := writer{v6: t.family == IPv6}
	for a := walk(exprs); a.next(); {
		name, data := exprOf(a.val)
		if name == "match" {
			if match, _, info, _ := xtInfo(data); match == "comment" {
				w.say("/* %s */", textOf(info))
			}
		}
	}
	for _, o := range decodeOps(t, exprs) {
		w.op(o)
	}
	return strings.Join(w.words, " ")
}

func textOf(b []byte) []byte {
	a := attrs{val: b}
	return a.text()
}

// writer turns expressions into text. What a register holds is known by the
// expression that loaded it.
type writer struct {
	v6    bool
	words []string
	regs  [regBytes]loaded
}

// loaded is what a register holds, and how what is compared with it is written:
// any number of bytes, since a rule may compare more or fewer than were loaded.
type loaded struct {
	text  string
	value func([]byte) string
	to    string // the text where a packet is translated to it, if that is another
	data  []byte // what it is, if that is known
}

func (w *writer) say(format string, args ...any) {
	w.words = append(w.words, fmt.Sprintf(format, args...))
}

func (w *writer) load(reg int, text string, value func([]byte) string) {
	if reg >= 0 && reg < regBytes {
		w.regs[reg] = loaded{text: text, value: value}
	}
}

func (w *writer) at(reg int) loaded {
	if reg >= 0 && reg < regBytes && w.regs[reg].value != nil {
		return w.regs[reg]
	}
	return loaded{text: "reg", value: hexValue}
}

func hexValue(b []byte) string { return fmt.Sprintf("%#x", b) }

func addrValue(b []byte) string {
	if a, ok := netip.AddrFromSlice(b); ok {
		return a.String()
	}
	if len(b) < 4 { // the beginning of an address is a prefix
		return netip.AddrFrom4([4]byte(append(append([]byte{}, b...), 0, 0, 0, 0)[:4])).String() + fmt.Sprintf("/%d", 8*len(b))
	}
	if len(b) < 16 {
		return netip.AddrFrom16([16]byte(append(append([]byte{}, b...), make([]byte, 16)...)[:16])).String() +
			fmt.Sprintf("/%d", 8*len(b))
	}
	return hexValue(b)
}

func portValue(b []byte) string {
	if len(b) == 2 {
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	}
	return hexValue(b)
}

func protoValue(b []byte) string {
	if len(b) == 1 {
		return conntrack.ProtoName(b[0])
	}
	return hexValue(b)
}

func nameValue(b []byte) string {
	if len(b) == 0 || b[len(b)-1] != 0 {
		return quote(string(b) + "*")
	}
	return quote(string(textOf(b)))
}

func wordValue(b []byte) string {
	if len(b) == 4 {
		return strconv.FormatUint(uint64(binary.NativeEndian.Uint32(b)), 10)
	}
	return hexValue(b)
}

func markValue(b []byte) string {
	if len(b) == 4 {
		return fmt.Sprintf("%#x", binary.NativeEndian.Uint32(b))
	}
	return hexValue(b)
}

func familyValue(b []byte) string {
	switch {
	case bytes.Equal(b, []byte{uapi.NfprotoIPv6}):
		return "ipv6"
	case bytes.Equal(b, []byte{uapi.NfprotoIPv4}):
		return "ipv4"
	}
	return hexValue(b)
}

func typeValue(b []byte) string {
	names := [...]string{"unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit", "throw"}
	if len(b) == 4 {
		if v := binary.NativeEndian.Uint32(b); v < uint32(len(names)) {
			return names[v]
		}
	}
	return hexValue(b)
}

func stateValue(b []byte) string {
	if len(b) != 4 {
		return hexValue(b)
	}
	v := binary.NativeEndian.Uint32(b)
	var list []string
	for i, name := range [...]string{"invalid", "established", "related", "new"} {
		if v>>i&1 != 0 {
			list = append(list, name)
		}
	}
	if len(list) == 0 {
		return markValue(b)
	}
	return strings.Join(list, ",")
}

// payload names a field of a header.
func (w *writer) payload(o *payloadOp) (string, func([]byte) string) {
	type place struct {
		base           uint32
		offset, length int
	}
	switch (place{o.base, o.offset, o.length}) {
	case place{uapi.NftPayloadNetworkHeader, v4Src, 4}:
		return "ip saddr", addrValue
	case place{uapi.NftPayloadNetworkHeader, v4Dst, 4}:
		return "ip daddr", addrValue
	case place{uapi.NftPayloadNetworkHeader, v6Src, 16}:
		return "ip6 saddr", addrValue
	case place{uapi.NftPayloadNetworkHeader, v6Dst, 16}:
		return "ip6 daddr", addrValue
	case place{uapi.NftPayloadNetworkHeader, 9, 1}:
		return "ip protocol", protoValue
	case place{uapi.NftPayloadTransportHeader, 0, 2}:
		return "th sport", portValue
	case place{uapi.NftPayloadTransportHeader, 2, 2}:
		return "th dport", portValue
	}
	switch {
	case o.base == uapi.NftPayloadNetworkHeader && !w.v6 && o.offset == v4Dst && o.length < 4:
		return "ip daddr", addrValue
	case o.base == uapi.NftPayloadNetworkHeader && !w.v6 && o.offset == v4Src && o.length < 4:
		return "ip saddr", addrValue
	case o.base == uapi.NftPayloadNetworkHeader && o.offset == v6Dst && o.length < 16:
		return "ip6 daddr", addrValue
	}
	return fmt.Sprintf("@%d,%d,%d", o.base, 8*o.offset, 8*o.length), hexValue
}

func (w *writer) op(o op) {
	switch o := o.(type) {
	case *payloadOp:
		text, value := w.payload(o)
		w.load(o.dreg, text, value)
	case *metaOp:
		w.meta(o)
	case *ctOp:
		w.ct(o)
	case *fibOp:
		text := "fib daddr type"
		if o.source {
			text = "fib saddr type"
		}
		w.load(o.dreg, text, typeValue)
	case *immediateOp:
		w.regs[o.dreg] = loaded{value: hexValue, to: immediate(o.data), data: o.data}
	case *bitwiseOp:
		l := w.at(o.sreg)
		w.load(o.dreg, fmt.Sprintf("%s & %s", l.text, l.value(o.mask)), l.value)
	case *shiftOp:
		op := "<<"
		if o.right {
			op = ">>"
		}
		w.load(o.dreg, fmt.Sprintf("%s %s %d", w.at(o.sreg).text, op, o.bits), hexValue)
	case *byteorderOp:
		w.load(o.dreg, w.at(o.sreg).text, hexValue)
	case *cmpOp:
		l := w.at(o.sreg)
		op := [...]string{"", "!= ", "< ", "<= ", "> ", ">= "}[o.op]
		w.say("%s %s%s", l.text, op, l.value(o.data))
	case *rangeOp:
		l, not := w.at(o.sreg), ""
		if o.invert {
			not = "!= "
		}
		w.say("%s %s%s-%s", l.text, not, l.value(o.from), l.value(o.to))
	case *lookupOp:
		w.lookup(o)
	case *enumOp:
		w.load(o.dreg, fmt.Sprintf("random mod %d", o.count), wordValue)
	case *unknownOp:
		if o.dreg == regNone {
			w.say("(perhaps)")
		} else {
			w.load(o.dreg, "(unknown)", hexValue)
		}
	case *verdictOp:
		w.say("%s", verdictText(o))
	case *natOp:
		w.say("dnat to %s", w.translation(o.addrMin, o.addrMax, o.portMin, o.portMax))
	case *redirOp:
		w.say("redirect%s", strings.TrimSuffix(" to "+w.translation(regNone, regNone, o.portMin, o.portMax), " to "))
	case *setMarkOp:
		name := "meta mark"
		if o.conn {
			name = "ct mark"
		}
		l := w.at(o.sreg)
		text := cmp.Or(l.to, l.text)
		if l.data != nil {
			text = markValue(l.data)
		}
		w.say("%s set %s", name, text)
	case *anyOp:
		w.say("(%s)", o.why)
	default:
		w.xt(o)
	}
}

// immediate writes what is put into a register to translate by: an address or a
// port.
func immediate(b []byte) string {
	switch len(b) {
	case 2:
		return portValue(b)
	case 4, 16:
		return addrValue(b)
	}
	return hexValue(b)
}

func verdictText(v *verdictOp) string {
	switch v.code {
	case uapi.NfAccept:
		return "accept"
	case uapi.NfDrop:
		return "drop"
	case uapi.NftReturn:
		return "return"
	case uapi.NftJump:
		return "jump " + v.chain.name
	case uapi.NftGoto:
		return "goto " + v.chain.name
	}
	return "continue"
}

func (w *writer) lookup(o *lookupOp) {
	name := "@" + o.set.name
	if strings.HasPrefix(o.set.name, "__") {
		name = fmt.Sprintf("{ … } (%s)", o.set.name)
	}
	// The parts of a concatenation are in the words from the first register on.
	var parts []string
	for off := o.sreg; off < o.sreg+o.set.keyLen && off < regBytes; off += uapi.NftReg32Size {
		if l := w.regs[off]; l.text != "" {
			parts = append(parts, l.text)
		}
	}
	text := strings.Join(parts, " . ")
	switch {
	case o.dreg == regVerdict:
		w.say("%s vmap %s", text, name)
	case o.dreg != regNone:
		w.load(o.dreg, text+" map "+name, hexValue)
		for off := o.dreg; off < o.dreg+o.set.dataLen; off += uapi.NftReg32Size {
			w.regs[off] = loaded{value: hexValue, to: "(" + text + " map " + name + ")"}
		}
	case o.invert:
		w.say("%s != %s", text, name)
	default:
		w.say("%s %s", text, name)
	}
}

// translation writes what registers hold.
func (w *writer) translation(amin, amax, pmin, pmax int) string {
	get := func(low, high int) string {
		if low < 0 {
			return ""
		}
		a, b := w.at(low), w.at(high)
		from, to := cmp.Or(a.to, a.text), cmp.Or(b.to, b.text)
		if from != to {
			return from + "-" + to
		}
		return from
	}
	addr, port := get(amin, amax), get(pmin, pmax)
	if strings.Contains(addr, ":") && port != "" {
		addr = "[" + addr + "]"
	}
	if port == "" || addr == port {
		return addr
	}
	return addr + ":" + port
}

func (w *writer) meta(o *metaOp) {
	text, value := fmt.Sprintf("meta key %d", o.key), hexValue
	switch o.key {
	case uapi.NftMetaNfproto:
		text, value = "meta nfproto", familyValue
	case uapi.NftMetaL4proto:
		text, value = "meta l4proto", protoValue
	case uapi.NftMetaIif:
		text, value = "iif", wordValue
	case uapi.NftMetaOif:
		text, value = "oif", wordValue
	case uapi.NftMetaIifname:
		text, value = "iifname", nameValue
	case uapi.NftMetaOifname:
		text, value = "oifname", nameValue
	case uapi.NftMetaMark:
		text, value = "meta mark", markValue
	case uapi.NftMetaSkuid:
		text, value = "meta skuid", wordValue
	case uapi.NftMetaSkgid:
		text, value = "meta skgid", wordValue
	}
	w.load(o.dreg, text, value)
}

func (w *writer) ct(o *ctOp) {
	text, value := fmt.Sprintf("ct key %d", o.key), hexValue
	switch o.key {
	case uapi.NftCtState:
		text, value = "ct state", stateValue
	case uapi.NftCtDirection:
		text = "ct direction"
	case uapi.NftCtStatus:
		text, value = "ct status", markValue
	case uapi.NftCtMark:
		text, value = "ct mark", markValue
	case uapi.NftCtSrc, uapi.NftCtSrcIP, uapi.NftCtSrcIP6:
		text, value = "ct saddr", addrValue
	case uapi.NftCtDst, uapi.NftCtDstIP, uapi.NftCtDstIP6:
		text, value = "ct daddr", addrValue
	case uapi.NftCtProtocol:
		text, value = "ct protocol", protoValue
	case uapi.NftCtProtoSrc:
		text, value = "ct proto-src", portValue
	case uapi.NftCtProtoDst:
		text, value = "ct proto-dst", portValue
	}
	w.load(o.dreg, text, value)
}

func portRange(r [2]uint16) string {
	if r[0] == r[1] {
		return strconv.Itoa(int(r[0]))
	}
	return fmt.Sprintf("%d:%d", r[0], r[1])
}

func not(b bool) string {
	if b {
		return "! "
	}
	return ""
}

func (w *writer) xt(o op) {
	switch o := o.(type) {
	case *xtPorts:
		if o.src != [2]uint16{0, 0xffff} || o.invSrc {
			w.say("%s--sport %s", not(o.invSrc), portRange(o.src))
		}
		if o.dst != [2]uint16{0, 0xffff} || o.invDst {
			w.say("%s--dport %s", not(o.invDst), portRange(o.dst))
		}
	case *xtMultiport:
		var list []string
		for _, r := range o.ranges {
			list = append(list, portRange(r))
		}
		w.say("-m multiport %s%s %s", not(o.invert), [...]string{"--sports", "--dports", "--ports"}[o.flags], strings.Join(list, ","))
	case *xtAddrtype:
		if o.source != 0 {
			w.say("-m addrtype %s--src-type %s", not(o.invSource), typesText(Types(o.source)))
		}
		if o.dest != 0 {
			w.say("-m addrtype %s--dst-type %s", not(o.invDest), typesText(Types(o.dest)))
		}
	case *xtIprange:
		for i, name := range [...]string{"--src-range", "--dst-range"} {
			if o.used[i] {
				w.say("-m iprange %s%s %s-%s", not(o.inv[i]), name, o.ranges[i][0], o.ranges[i][1])
			}
		}
	case *xtConntrack:
		w.say("-m conntrack")
	case *xtChance:
		w.say("-m statistic")
	case *xtSetMark:
		w.say("-j MARK --set-xmark %#x/%#x", o.mark, o.mask)
	case *xtConnmark:
		w.say("-j CONNMARK")
	case *forgetMark:
		w.say("(sets a mark)")
	case *xtMark:
		name := "mark"
		if o.conn {
			name = "connmark"
		}
		w.say("-m %s %s--mark %#x/%#x", name, not(o.invert), o.mark, o.mask)
	case *xtRecent:
		w.say("-m recent %s--set", not(o.invert))
	case *xtUnknown:
		w.say("-m %s", o.name)
	case *xtNat:
		name, option := "DNAT", "--to-destination"
		switch {
		case o.redirect:
			name, option = "REDIRECT", "--to-ports"
		case o.flags&uapi.NfNatRangeNetmap != 0:
			name, option = "NETMAP", "--to"
		}
		r := Range{MinPort: o.portMin, MaxPort: o.portMax}
		if o.flags&uapi.NfNatRangeMapIPs != 0 {
			r.Min, r.Max = o.addrMin, o.addrMax
		}
		text := strings.TrimPrefix(r.String(), "this host")
		if o.flags&uapi.NfNatRangeProtoSpecified == 0 {
			text = strings.TrimSuffix(text, ":0")
		}
		w.say("-j %s", name)
		if text != "" {
			w.say("%s %s", option, text)
		}
	}
}

func typesText(t Types) string {
	var list []string
	for i := range uint32(16) {
		if t>>i&1 != 0 {
			list = append(list, strings.ToUpper(typeValue(binary.NativeEndian.AppendUint32(nil, i))))
		}
	}
	return strings.Join(list, ",")
}
