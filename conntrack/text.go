package conntrack

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
)

// String returns the line that "conntrack -L" prints for the flow, or, where
// the ID is known, the one that "conntrack -L -o id" prints. The reference
// count, which Flow does not hold, is given as use=1.
func (f *Flow) String() string {
	b, _ := f.AppendText(make([]byte, 0, 256))
	return string(b)
}

// AppendText appends what String returns. The error is always nil.
func (f *Flow) AppendText(b []byte) ([]byte, error) {
	start := len(b)
	b = append(b, ProtoName(f.Proto)...)
	for len(b)-start < 9 {
		b = append(b, ' ')
	}
	b = strconv.AppendUint(b, uint64(f.Proto), 10)

	// An offloaded flow has no timer: ctnetlink_fill_info tells neither its
	// timeout nor its state.
	offloaded := f.Status&(StatusOffload|StatusHWOffload) != 0
	if !offloaded || f.Timeout != 0 {
		b = appendNumber(b, " ", f.Timeout)
	}
	if state := f.StateName(); state != "" && (!offloaded || f.State != 0) {
		b = append(b, ' ')
		b = append(b, state...)
	}

	b = appendTuple(b, &f.Orig, f.Proto)
	if f.Zone != 0 && f.ZoneDir == ZoneOrig {
		b = appendNumber(b, " zone-orig=", uint32(f.Zone))
	}
	if f.Status&StatusSeenReply == 0 {
		b = append(b, " [UNREPLIED]"...)
	}
	b = appendTuple(b, &f.Reply, f.Proto)
	if f.Zone != 0 && f.ZoneDir == ZoneReply {
		b = appendNumber(b, " zone-reply=", uint32(f.Zone))
	}

	// Of these three the tool prints one alone.
	switch {
	case f.Status&StatusHWOffload != 0:
		b = append(b, " [HW_OFFLOAD]"...)
	case f.Status&StatusOffload != 0:
		b = append(b, " [OFFLOAD]"...)
	case f.Status&StatusAssured != 0:
		b = append(b, " [ASSURED]"...)
	}
	b = appendNumber(b, " mark=", f.Mark)
	if f.Zone != 0 && f.ZoneDir == ZoneBoth {
		b = appendNumber(b, " zone=", uint32(f.Zone))
	}
	b = append(b, " use=1"...)
	if f.ID != 0 {
		b = appendNumber(b, " id=", f.ID)
	}
	return b, nil
}

func appendTuple(b []byte, t *Tuple, proto uint8) []byte {
	b = appendAddr(append(b, " src="...), t.Src)
	b = appendAddr(append(b, " dst="...), t.Dst)
	switch {
	case proto == GRE:
		b = strconv.AppendUint(append(b, " srckey=0x"...), uint64(t.SrcPort), 16)
		b = strconv.AppendUint(append(b, " dstkey=0x"...), uint64(t.DstPort), 16)
	case proto == ICMP || proto == ICMPv6:
		b = appendNumber(b, " type=", uint32(t.ICMPType))
		b = appendNumber(b, " code=", uint32(t.ICMPCode))
		b = appendNumber(b, " id=", uint32(t.ICMPID))
	case HasPorts(proto):
		b = appendNumber(b, " sport=", uint32(t.SrcPort))
		b = appendNumber(b, " dport=", uint32(t.DstPort))
	}
	return b
}

// appendAddr writes an address as inet_ntop(3) does. It differs from
// netip.Addr in the IPv4-compatible addresses, ::a.b.c.d.
func appendAddr(b []byte, a netip.Addr) []byte {
	if a.Is6() {
		ip := a.As16()
		if [12]byte(ip[:12]) == [12]byte{} && (ip[12] != 0 || ip[13] != 0) {
			return netip.AddrFrom4([4]byte(ip[12:])).AppendTo(append(b, "::"...))
		}
	}
	return a.AppendTo(b)
}

func appendNumber(b []byte, key string, n uint32) []byte {
	return strconv.AppendUint(append(b, key...), uint64(n), 10)
}

// Parse reads one flow from a line as conntrack(8) prints it, with any of the
// -o options extended, id, timestamp, ktimestamp, labels and userspace, or as
// /proc/net/nf_conntrack shows it (ct_seq_show). A trailing line end is
// allowed.
//
// Both tuples must be complete and exact; whatever makes them doubtful is an
// error. Fields and flags beside them that Parse does not know are passed over,
// and so is an unknown state word (State is then 0). Events ("conntrack -E")
// are read like entries, except [DESTROY], whose flow is gone.
//
// Text does not tell everything: StatusConfirmed is always set, StatusSrcNAT
// and StatusDstNAT follow from the tuples, and StatusExpected and StatusDying
// are never known.
func Parse(line string) (Flow, error) {
	f, _, err := parse(line)
	return f, err
}

// parse also tells whether the line reached use=, the last field that every
// listing of the table has.
func parse(line string) (f Flow, whole bool, err error) {
	p := textParser{rest: strings.TrimRight(line, "\r\n")}
	if strings.Contains(p.rest, "\n") || strings.Contains(p.rest, "\r") {
		p.fail("more than one line")
	}
	f = p.flow()
	if p.err != nil {
		return Flow{}, false, p.err
	}
	return f, p.use, nil
}

// textParser goes through a line field by field. After the first error it
// stays where it is, so that only the end needs to look at err.
type textParser struct {
	tok  string // the field at hand, "" at the line's end
	rest string // what comes after it

	place string // where in the line that is, for the error
	err   error

	seen   uint8 // the once bits of the fields met
	labels bool  // label names follow, which may contain spaces
	use    bool  // use= was met
}

// Fields that may be given once.
const (
	seenID = 1 << iota
	seenMark
	seenZone
)

// next moves on to the next field. A flag is one field up to its closing
// bracket, spaces included: [start=Thu Jan  1 00:00:00 1970].
func (p *textParser) next() {
	if p.err != nil {
		return
	}
	s := p.rest
	for s != "" && isBlank(s[0]) {
		s = s[1:]
	}
	end := 0
	if strings.HasPrefix(s, "[") {
		end = strings.IndexByte(s, ']') + 1
	} else {
		for end < len(s) && !isBlank(s[end]) {
			end++
		}
	}
	if end == 0 { // no closing bracket
		end = len(s)
	}
	p.tok, p.rest = s[:end], s[end:]
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

func (p *textParser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = errors.New(p.place + fmt.Sprintf(format, args...))
	}
}

func (p *textParser) flow() Flow {
	var f Flow
	p.next()
	withKeys := p.header(&f)

	f.Status = StatusConfirmed | StatusSeenReply
	p.place = "original tuple: "
	p.tuple(&f.Orig, f.Proto, withKeys)
	p.place = ""
	for p.err == nil && p.tok != "" && !strings.HasPrefix(p.tok, "src=") {
		p.attribute(&f, false)
	}
	p.place = "reply tuple: "
	p.tuple(&f.Reply, f.Proto, withKeys)
	p.place = ""
	for p.err == nil && p.tok != "" {
		p.attribute(&f, true)
	}

	family := FamilyOf(f.Orig.Src)
	if f.Family != 0 && f.Family != family {
		p.fail("an %s flow with %s addresses", f.Family, family)
	}
	f.Family = family
	for _, a := range [...]netip.Addr{f.Orig.Dst, f.Reply.Src, f.Reply.Dst} {
		if FamilyOf(a) != family {
			p.fail("IPv4 and IPv6 addresses in one flow")
		}
	}
	f.Status |= natStatus(&f)
	return f
}

// header reads what stands before the tuples: an event's time and kind, the
// layer 3 protocol, the layer 4 protocol, the timeout and the state. It tells
// whether the tuples carry the protocol's ports, keys or ICMP fields.
func (p *textParser) header(f *Flow) (withKeys bool) {
	for strings.HasPrefix(p.tok, "[") && p.err == nil {
		switch {
		case p.tok == "[NEW]" || p.tok == "[UPDATE]":
		case p.tok == "[DESTROY]":
			p.fail("[DESTROY]: the flow is gone; give a listing of the table instead")
		case strings.Trim(p.tok, "[0123456789.]") != "":
			p.fail("%q before the protocol: want [NEW], [UPDATE] or a time", excerpt(p.tok))
		}
		p.next()
	}

	switch p.tok {
	case "ipv4":
		f.Family = IPv4
	case "ipv6":
		f.Family = IPv6
	}
	if f.Family != 0 {
		name := p.tok
		p.next()
		if n := p.number("layer 3 protocol ", p.tok, 10, 8); Family(n) != f.Family {
			p.fail("layer 3 protocol %s has number %d, not %d", name, f.Family, n)
		}
		p.next()
	}

	name := p.tok
	if !isProtoName(name) {
		p.fail("%q is no protocol: want a line of conntrack -L or /proc/net/nf_conntrack",
			excerpt(name))
	}
	p.next()
	f.Proto = uint8(p.number("protocol number ", p.tok, 10, 8))
	if !protoNamed(name, f.Proto) {
		p.fail("protocol %s does not have number %d", name, f.Proto)
	}
	p.next()

	if p.tok != "" && p.tok[0] >= '0' && p.tok[0] <= '9' {
		f.Timeout = uint32(p.number("timeout ", p.tok, 10, 32))
		p.next()
	}
	if isStateWord(p.tok) {
		f.State = stateNamed(p.tok, f.Proto)
		p.next()
	}
	// gre_print_conntrack: "timeout=30, stream_timeout=180".
	for f.Proto == GRE && (strings.HasPrefix(p.tok, "timeout=") ||
		strings.HasPrefix(p.tok, "stream_timeout=")) && p.err == nil {
		p.next()
	}
	return name != "unknown"
}

func isProtoName(s string) bool {
	return s != "" && 'a' <= s[0] && s[0] <= 'z' && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-'
	})
}

func isStateWord(s string) bool {
	return s != "" && 'A' <= s[0] && s[0] <= 'Z' && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_'
	})
}

// protoNamed tells whether a protocol's number can stand after a name. The
// kernel says "unknown" of a protocol that it was built without (the newest
// know no DCCP) and tracks it by its addresses alone. A name unknown to us may
// go with a number that is.
func protoNamed(name string, proto uint8) bool {
	want := ProtoName(proto)
	switch {
	case name == want:
		return true
	case want == "unknown":
		for _, known := range protoNames {
			if name == known {
				return false
			}
		}
		return true
	}
	switch proto {
	case TCP, UDP, ICMP, ICMPv6: // always built in
		return false
	}
	return name == "unknown"
}

// stateNamed is the reverse of Flow.StateName, 0 for a word unknown to it.
func stateNamed(word string, proto uint8) uint8 {
	var names []string
	switch proto {
	case TCP:
		names = tcpStates[:]
	case SCTP:
		names = sctpStates[:]
	}
	for i, name := range names {
		if name == word {
			return uint8(i)
		}
	}
	return 0
}

func (p *textParser) tuple(t *Tuple, proto uint8, withKeys bool) {
	t.Src = p.addr("src=")
	t.Dst = p.addr("dst=")
	if !withKeys {
		return
	}
	switch {
	case proto == GRE:
		t.SrcPort = uint16(p.field("srckey=0x", 16, 16))
		t.DstPort = uint16(p.field("dstkey=0x", 16, 16))
	case proto == ICMP || proto == ICMPv6:
		t.ICMPType = uint8(p.field("type=", 10, 8))
		t.ICMPCode = uint8(p.field("code=", 10, 8))
		t.ICMPID = uint16(p.field("id=", 10, 16))
	case HasPorts(proto):
		t.SrcPort = uint16(p.field("sport=", 10, 16))
		t.DstPort = uint16(p.field("dport=", 10, 16))
	}
}

// value returns what follows key in the field at hand, and moves on.
func (p *textParser) value(key string) string {
	v, ok := strings.CutPrefix(p.tok, key)
	switch {
	case ok:
	case p.tok == "":
		p.fail("the line ends where %s should stand", key)
	default:
		p.fail("%q where %s should stand", excerpt(p.tok), key)
	}
	p.next()
	return v
}

func (p *textParser) addr(key string) netip.Addr {
	v := p.value(key)
	if p.err != nil {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(v)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		p.fail("%s%q is not a plain IPv4 or IPv6 address", key, excerpt(v))
	}
	return a
}

func (p *textParser) field(key string, base, bits int) uint64 {
	return p.number(key, p.value(key), base, bits)
}

func (p *textParser) number(key, v string, base, bits int) uint64 {
	n, err := strconv.ParseUint(v, base, bits)
	if err != nil {
		p.fail("%s%q is not a number up to %d", key, excerpt(v), uint64(1)<<bits-1)
	}
	return n
}

// attribute reads a field beside the tuples, and moves on. After the reply
// tuple id= is the flow's, before it can only be a piece of a broken tuple.
func (p *textParser) attribute(f *Flow, afterReply bool) {
	tok := p.tok
	if tok[0] == '[' {
		p.flag(f, tok)
		p.next()
		return
	}
	key, v, isField := strings.Cut(tok, "=")
	switch {
	case !isField && tok == "labels": // what the tool prints where no label has a name
		p.labels = true
	case !isField && !p.labels, key == "":
		p.fail("%q is neither a field nor a flag", excerpt(tok))
	case !isField:
	case key == "id" && afterReply:
		p.once(seenID, "id=")
		f.ID = uint32(p.number("id=", v, 10, 32))
	case isTupleKey(key):
		p.fail("%q out of place: a tuple too many or not whole", excerpt(tok))
	case key == "mark":
		p.once(seenMark, "mark=")
		f.Mark = uint32(p.number("mark=", v, 10, 32))
	case key == "zone":
		p.zone(f, ZoneBoth, "zone=", v)
	case key == "zone-orig":
		p.zone(f, ZoneOrig, "zone-orig=", v)
	case key == "zone-reply":
		p.zone(f, ZoneReply, "zone-reply=", v)
	case key == "labels":
		p.labels = true
	case key == "use":
		p.use = true
	}
	p.next()
}

func isTupleKey(key string) bool {
	switch key {
	case "src", "dst", "sport", "dport", "srckey", "dstkey", "type", "code", "id":
		return true
	}
	return false
}

func (p *textParser) zone(f *Flow, dir ZoneDir, key, v string) {
	p.once(seenZone, key)
	f.Zone = uint16(p.number(key, v, 10, 16))
	if f.Zone != 0 { // the default zone is the same in both directions
		f.ZoneDir = dir
	}
}

func (p *textParser) once(bit uint8, key string) {
	if p.seen&bit != 0 {
		p.fail("a second %s", key)
	}
	p.seen |= bit
}

func (p *textParser) flag(f *Flow, tok string) {
	switch tok {
	case "[UNREPLIED]":
		f.Status &^= StatusSeenReply
	case "[ASSURED]":
		f.Status |= StatusAssured
	case "[OFFLOAD]":
		f.Status |= StatusOffload
	case "[HW_OFFLOAD]":
		f.Status |= StatusOffload | StatusHWOffload
	default:
		// One = is that of [start=…]; more would be fields swallowed by a
		// bracket that was not closed in time.
		if tok[len(tok)-1] != ']' || strings.LastIndexByte(tok, '[') != 0 ||
			strings.Count(tok, "=") > 1 {
			p.fail("%q is not a flag", excerpt(tok))
		}
	}
}

// natStatus returns the NAT bits that nf_nat_setup_info sets for the flow's
// tuples. An ICMP id belongs to the source.
func natStatus(f *Flow) (s Status) {
	o, r := &f.Orig, &f.Reply
	if r.Src != o.Dst || r.SrcPort != o.DstPort {
		s |= StatusDstNAT
	}
	if r.Dst != o.Src || r.DstPort != o.SrcPort || r.ICMPID != o.ICMPID {
		s |= StatusSrcNAT
	}
	return s
}

// LineError tells which line of a saved table is not a flow, and why.
type LineError struct {
	Line int    // from 1
	Text string // the line's beginning, printable
	Err  error
}

// Error returns "line 3: reason: text".
func (e *LineError) Error() string {
	return fmt.Sprintf("line %d: %v: %q", e.Line, e.Err, e.Text)
}

// Unwrap returns the reason.
func (e *LineError) Unwrap() error { return e.Err }

// TextFlow is a flow of a saved table and the line it stands on, from 1.
type TextFlow struct {
	Line int
	Flow Flow
}

// maxLine is the longest line in bytes that ReadText reads, its end included.
// conntrack's own are below 4 KiB.
const maxLine = 64 << 10

// maxSkip is how much without a line end is skipped as one bad line. More is no
// text (a device, an image).
const maxSkip = 64 << 20

// ReadText reads a saved table, one flow a line in the forms that Parse knows.
// Blank lines, a byte order mark and the tool's closing line ("3 flow entries
// have been shown.") are skipped.
//
// For a line that is not a flow it yields a *LineError and goes on with the
// next. A last line that has no line end must have reached use=, since what
// was cut off might have changed its meaning. Where r fails it yields an error
// of another type and ends. It holds one line in memory at a time, and reads
// ahead of the flow it yields; the sequence can be used once.
func ReadText(r io.Reader) iter.Seq2[TextFlow, error] {
	return func(yield func(TextFlow, error) bool) {
		lines := lineReader{br: bufio.NewReaderSize(r, maxLine)}
		for {
			n, text, err := lines.next()
			last := errors.Is(err, io.EOF)
			var f Flow
			switch {
			case last && text == "":
				return
			case err == nil || last:
				var whole bool
				f, whole, err = parse(text)
				if err == nil && last && !whole {
					f, err = Flow{}, errCut
				}
			case !errors.Is(err, errTooLong):
				yield(TextFlow{}, fmt.Errorf("read flows, line %d: %w", n, err))
				return
			}
			if err != nil {
				err = &LineError{Line: n, Text: excerpt(text), Err: err}
			}
			if !yield(TextFlow{Line: n, Flow: f}, err) || last {
				return
			}
		}
	}
}

var (
	errTooLong = fmt.Errorf("longer than %d bytes", maxLine)
	errCut     = errors.New("the input ends within this line; save the table again")
)

// lineReader reads lines up to maxLine.
type lineReader struct {
	br *bufio.Reader
	n  int // the line read last
}

// next returns the next line that is neither blank nor the tool's closing
// line, and where it begins. It comes with io.EOF if no line end follows, and
// shortened with errTooLong.
func (l *lineReader) next() (n int, text string, err error) {
	cut := "" // the beginning of a line that the closing line was written into
	for {
		line, err := l.read()
		if cut == "" {
			n = l.n
			if i := summary(line); i >= 0 && !errors.Is(err, errTooLong) {
				cut, line = string(line[:i]), nil
				if err == nil {
					continue
				}
			}
		}
		text = strings.TrimSpace(cut + string(line))
		if text != "" || err != nil {
			return n, text, err
		}
		cut = ""
	}
}

// read returns one line, valid until the next call.
func (l *lineReader) read() ([]byte, error) {
	l.n++
	line, err := l.br.ReadSlice('\n')
	if l.n == 1 {
		line = bytes.TrimPrefix(line, []byte("\ufeff"))
	}
	if !errors.Is(err, bufio.ErrBufferFull) {
		return line, err
	}
	begin := bytes.Clone(line[:2*excerptLen])
	for n := maxLine; errors.Is(err, bufio.ErrBufferFull); n += maxLine {
		if n > maxSkip {
			return begin, fmt.Errorf("more than %d MiB without a line end", maxSkip>>20)
		}
		_, err = l.br.ReadSlice('\n')
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = errTooLong
	}
	return begin, err
}

// summary returns where in a line the tool's closing line begins, or -1. The
// tool writes it to standard error; captured into one file with the flows, it
// lands amid one of them, at the last full buffer of standard output. That of
// "conntrack -D" is no such line: the flows above it are gone.
func summary(line []byte) int {
	if !bytes.HasSuffix(bytes.TrimSpace(line), []byte(" flow entries have been shown.")) {
		return -1
	}
	return bytes.LastIndex(line, []byte("conntrack v"))
}

// excerptLen is how many bytes of the input an error shows.
const excerptLen = 120

// excerpt returns the beginning of s, without what could upset a terminal.
func excerpt(s string) string {
	more := ""
	if len(s) > excerptLen {
		s, more = s[:excerptLen], "…"
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case unicode.IsPrint(r):
			return r
		}
		return unicode.ReplacementChar
	}, s) + more
}
