package conntrack

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// diff compares flows, whose addresses have no exported fields.
func diff(want, got any) string {
	return cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
}

// sampleFlow is a DNS flow on a dead backend.
func sampleFlow() Flow {
	return Flow{
		Family: IPv4, Proto: UDP, ID: 0x11223344, Timeout: 600, Status: StatusConfirmed,
		Orig:  Tuple{Src: addr("192.0.2.50"), Dst: addr("203.0.113.10"), SrcPort: 40000, DstPort: 53},
		Reply: Tuple{Src: addr("198.51.100.11"), Dst: addr("192.0.2.50"), SrcPort: 5353, DstPort: 40000},
	}
}

// unhex reads hexadecimal lines in which everything after // is a comment.
func unhex(t *testing.T, s string) []byte {
	t.Helper()
	var digits strings.Builder
	for line := range strings.Lines(s) {
		code, _, _ := strings.Cut(line, "//")
		digits.WriteString(strings.Join(strings.Fields(code), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The messages byte by byte, as a little-endian kernel takes them.
func TestGoldenMessages(t *testing.T) {
	zone := uint16(0)
	inZone := sampleFlow()
	inZone.Zone, inZone.ZoneDir = 7, ZoneReply
	for _, tc := range []struct {
		name   string
		encode func(*message) error
		want   string
	}{
		{"delete", func(m *message) error {
			f := sampleFlow()
			return m.delete(&f, uapi.FAck, 7)
		}, `
			50000000 0201 0500 07000000 00000000 // length 80, CT_DELETE, REQUEST|ACK, sequence 7
			02 01 0000                           // AF_INET, NFNETLINK_V1: never all families
			3400 0280                            // CTA_TUPLE_REPLY
			  1400 0180                          //   CTA_TUPLE_IP
			    0800 0100 c633640b               //     CTA_IP_V4_SRC 198.51.100.11
			    0800 0200 c0000232               //     CTA_IP_V4_DST 192.0.2.50
			  1c00 0280                          //   CTA_TUPLE_PROTO
			    0500 0100 11 000000              //     CTA_PROTO_NUM UDP, padded
			    0600 0200 14e9 0000              //     CTA_PROTO_SRC_PORT 5353
			    0600 0300 9c40 0000              //     CTA_PROTO_DST_PORT 40000
			0800 0c00 11223344                   // CTA_ID`},
		{"delete in a reply zone", func(m *message) error { return m.delete(&inZone, 0, 8) }, `
			58000000 0201 0100 08000000 00000000
			02 01 0000
			3c00 0280
			  1400 0180 0800 0100 c633640b 0800 0200 c0000232
			  1c00 0280 0500 0100 11000000 0600 0200 14e90000 0600 0300 9c400000
			  0600 0300 0007 0000                // CTA_TUPLE_ZONE 7
			0800 0c00 11223344`},
		{"dump with every filter", func(m *message) error {
			m.dump(&Filter{
				Family: IPv4, Proto: UDP, OrigDst: addr("203.0.113.10"), OrigDstPort: 53,
				ReplySrc: addr("198.51.100.11"), ReplySrcPort: 5353,
				Set: StatusConfirmed, Clear: StatusSeenReply, Zone: &zone,
			}, trusting(), 7)
			return nil
		}, `
			88000000 0101 0103 07000000 00000000 // CT_GET, REQUEST|DUMP
			02 01 0000
			1400 1980                            // CTA_FILTER
			  0800 0100 2a000000                 //   ORIG_FLAGS: IP_DST, PROTO_NUM, DST_PORT
			  0800 0200 19000000                 //   REPLY_FLAGS: IP_SRC, PROTO_NUM, SRC_PORT
			2400 0180                            // CTA_TUPLE_ORIG
			  0c00 0180 0800 0200 cb00710a       //   to 203.0.113.10
			  1400 0280 0500 0100 11000000 0600 0300 00350000 // UDP, port 53
			2400 0280                            // CTA_TUPLE_REPLY
			  0c00 0180 0800 0100 c633640b       //   from 198.51.100.11
			  1400 0280 0500 0100 11000000 0600 0200 14e90000
			0800 0300 00000008                   // CTA_STATUS: CONFIRMED set
			0800 1a00 0000000a                   // CTA_STATUS_MASK: and SEEN_REPLY clear
			0600 1200 0000 0000                  // CTA_ZONE 0`},
		{"dump that the kernel is not trusted to filter", func(m *message) error {
			m.dump(&Filter{Family: IPv6, Proto: UDP, OrigDst: addr("2001:db8::10"), Clear: StatusSeenReply}, Features{}, 7)
			return nil
		}, `
			14000000 0101 0103 07000000 00000000
			0a 01 0000`},
		{"IPv6 address beside a protocol, where only the latter is honoured", func(m *message) error {
			use := trusting()
			use.V6.Addr = NotHonoured
			m.dump(&Filter{Family: IPv6, Proto: SCTP, OrigDst: addr("2001:db8::10"), OrigDstPort: 53}, Features{V6: FamilyFeatures{Proto: Honoured, Ports: Honoured}}, 7)
			return nil
		}, `
			30000000 0101 0103 07000000 00000000
			0a 01 0000
			0c00 1980 0800 0100 08000000         // ORIG_FLAGS: PROTO_NUM alone: no ports of SCTP
			1000 0180 0c00 0280 0500 0100 84000000`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var m message
			if err := tc.encode(&m); err != nil {
				t.Fatal(err)
			}
			if want := unhex(t, tc.want); !bytes.Equal(m.b, want) {
				t.Errorf("encoded\n%s\nwant\n%s", hex.Dump(m.b), hex.Dump(want))
			}
		})
	}
}

func TestDeleteRefusesIncompleteFlows(t *testing.T) {
	for name, spoil := range map[string]func(*Flow){
		"nothing":              func(f *Flow) { *f = Flow{} },
		"no id":                func(f *Flow) { f.ID = 0 },
		"no family":            func(f *Flow) { f.Family = 0 },
		"no protocol":          func(f *Flow) { f.Proto = 0 },
		"no original source":   func(f *Flow) { f.Orig.Src = netip.Addr{} },
		"no original dest":     func(f *Flow) { f.Orig.Dst = netip.Addr{} },
		"no reply source":      func(f *Flow) { f.Reply.Src = netip.Addr{} },
		"no reply dest":        func(f *Flow) { f.Reply.Dst = netip.Addr{} },
		"other family":         func(f *Flow) { f.Family = IPv6 },
		"mixed families":       func(f *Flow) { f.Reply.Src = addr("2001:db8::1") },
		"address with a scope": func(f *Flow) { f.Orig.Src = addr("fe80::1%eth0") },
	} {
		t.Run(name, func(t *testing.T) {
			f := sampleFlow()
			spoil(&f)
			var m message
			if err := m.delete(&f, 0, 1); !errors.Is(err, ErrIncomplete) {
				t.Errorf("error %v, want ErrIncomplete", err)
			}
			if len(m.b) != 0 {
				t.Errorf("%d bytes were encoded", len(m.b))
			}
		})
	}
}

// genFlow draws flows as the kernel makes them.
func genFlow(t *rapid.T) Flow {
	fam := rapid.SampledFrom([]Family{IPv4, IPv6}).Draw(t, "family")
	ip := rapid.Custom(func(t *rapid.T) netip.Addr {
		n := 4
		if fam == IPv6 {
			n = 16
		}
		a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "bytes"))
		return a
	})
	f := Flow{
		Family: fam, Proto: rapid.Uint8Range(1, 255).Draw(t, "proto"),
		ID: rapid.Uint32Min(1).Draw(t, "id"), Mark: rapid.Uint32().Draw(t, "mark"),
		Zone: rapid.Uint16().Draw(t, "zone"), Timeout: rapid.Uint32Min(1).Draw(t, "timeout"),
		Status: StatusConfirmed,
	}
	if f.Zone != 0 {
		f.ZoneDir = rapid.SampledFrom([]ZoneDir{ZoneBoth, ZoneOrig, ZoneReply}).Draw(t, "dir")
	}
	for _, tu := range []*Tuple{&f.Orig, &f.Reply} {
		tu.Src, tu.Dst = ip.Draw(t, "src"), ip.Draw(t, "dst")
		switch {
		case HasPorts(f.Proto):
			tu.SrcPort, tu.DstPort = rapid.Uint16().Draw(t, "sport"), rapid.Uint16().Draw(t, "dport")
		case f.Proto == ICMP || f.Proto == ICMPv6:
			tu.ICMPID = rapid.Uint16().Draw(t, "icmpid")
			tu.ICMPType, tu.ICMPCode = rapid.Byte().Draw(t, "type"), rapid.Byte().Draw(t, "code")
		}
	}
	if f.Proto == TCP || f.Proto == SCTP {
		f.State = rapid.Uint8().Draw(t, "state")
	}
	return f
}

// topAttrs returns the attributes behind both headers.
func topAttrs(b []byte) map[uint16][]byte {
	attrs := map[uint16][]byte{}
	for b = b[uapi.SizeofNlMsghdr+uapi.SizeofNfgenmsg:]; ; {
		typ, v, rest, ok := nextAttr(b)
		if !ok {
			return attrs
		}
		attrs[typ], b = v, rest
	}
}

// A request without a tuple would flush the table. Whatever the flow, a delete
// carries its whole reply tuple and its id, or there is no delete.
func checkDelete(t interface{ Fatalf(string, ...any) }, f *Flow) {
	var m message
	if err := m.delete(f, 0, 1); err != nil {
		if !errors.Is(err, ErrIncomplete) || len(m.b) != 0 {
			t.Fatalf("error %v with %d bytes", err, len(m.b))
		}
		return
	}
	attrs := topAttrs(m.b)
	var back Flow
	back.Family = f.Family
	var proto uint8
	if !decodeTuple(attrs[uapi.CtaTupleReply], &back, &back.Reply, &proto, ZoneReply) ||
		back.Reply != f.Reply || proto != f.Proto {
		t.Fatalf("the delete of %s carries the reply tuple %+v", f, back.Reply)
	}
	if be32(attrs[uapi.CtaID]) != f.ID || f.ID == 0 {
		t.Fatalf("the delete of %s carries the id %x", f, attrs[uapi.CtaID])
	}
	if m.b[16] != byte(f.Family) || m.b[17] != uapi.NfnetlinkV1 {
		t.Fatalf("header %x", m.b[16:20])
	}
}

func TestDeleteCarriesTupleAndID(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := genFlow(t)
		checkDelete(t, &f)
	})
}

func FuzzEncodeDelete(f *testing.F) {
	f.Add([]byte{192, 0, 2, 1}, []byte{192, 0, 2, 2}, []byte{192, 0, 2, 3}, []byte{192, 0, 2, 4}, uint8(2), uint8(17), uint32(1))
	f.Add([]byte{}, []byte{}, []byte{}, []byte{}, uint8(0), uint8(0), uint32(0))
	f.Fuzz(func(t *testing.T, a, b, c, d []byte, family, proto uint8, id uint32) {
		ip := func(b []byte) netip.Addr { x, _ := netip.AddrFromSlice(b); return x }
		fl := Flow{
			Family: Family(family), Proto: proto, ID: id,
			Orig: Tuple{Src: ip(a), Dst: ip(b)}, Reply: Tuple{Src: ip(c), Dst: ip(d)},
		}
		if !HasPorts(proto) && (proto != ICMP && proto != ICMPv6) {
			fl.Orig.SrcPort = 0
		}
		checkDelete(t, &fl)
	})
}

// What create encodes, decodeFlow reads: both speak the kernel's format, which
// the kernel tests check against the kernel itself.
func TestCreateDecodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := genFlow(t)
		f.ID = 0
		var m message
		if err := m.create(&f, nil, 1); err != nil {
			t.Fatal(err)
		}
		var back Flow
		if err := decodeFlow(m.b[uapi.SizeofNlMsghdr:], &back); err != nil {
			t.Fatal(err)
		}
		if d := diff(f, back); d != "" {
			t.Fatal(d)
		}
	})
}

func TestDecodeHostile(t *testing.T) {
	f := sampleFlow()
	var m message
	if err := m.create(&f, nil, 1); err != nil {
		t.Fatal(err)
	}
	good := m.b[uapi.SizeofNlMsghdr:]
	change := func(at int, b ...byte) []byte {
		c := bytes.Clone(good)
		copy(c[at:], b)
		return c
	}
	for _, tc := range []struct {
		name string
		b    []byte
		ok   bool
	}{
		{"good", good, true},
		{"empty", nil, false},
		{"header only", good[:4], false},
		{"family unknown", change(0, 9), false},
		{"family does not fit the addresses", change(0, 10), false},
		{"tuple longer than the message", change(4, 0xff, 0xff), false},
		{"tuple of length zero", change(4, 0, 0), false},
		{"tuple shorter than its header", change(4, 3, 0), false},
		{"address attribute too long", change(12, 0xff), false},
		{"address of three bytes", change(12, 7), false},
		{"cut in the reply tuple", good[:80], false},
		{"unknown attributes behind", append(bytes.Clone(good), 8, 0, 0xff, 0x3f, 1, 2, 3, 4), true},
		{"garbage behind", append(bytes.Clone(good), 0xff, 0xff, 0xff), true},
		{"nothing but nesting", bytes.Repeat([]byte{0xfc, 0xff, 1, 0x80}, 500), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got Flow
			if err := decodeFlow(tc.b, &got); (err == nil) != tc.ok {
				t.Errorf("error %v, want ok %v", err, tc.ok)
			}
		})
	}
}

// FuzzDecode feeds datagrams to everything that reads them.
func FuzzDecode(f *testing.F) {
	fl := sampleFlow()
	var m message
	_ = m.create(&fl, nil, 1)
	_ = m.delete(&fl, 0, 2)
	f.Add(m.b)
	f.Add([]byte{0x24, 0, 0, 0, 2, 0, 0, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff, 0x14, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		whole := len(b)
		for len(b) > 0 {
			typ, flags, _, payload, rest, ok := nextMessage(b)
			if !ok {
				break
			}
			if len(payload) > whole || len(rest) >= len(b) {
				t.Fatal("a message does not shrink what is left")
			}
			var got Flow
			if decodeFlow(payload, &got) == nil && complete(&got) != nil {
				t.Fatalf("decoded an incomplete flow: %s", got.String())
			}
			decodeError(typ, flags, payload)
			b = rest
		}
	})
}

func TestDecodeError(t *testing.T) {
	for _, tc := range []struct {
		name  string
		typ   uint16
		flags uint16
		hex   string
		errno uint32
		msg   string
	}{
		{"acknowledgement", uapi.MsgError, uapi.FCapped, "00000000 14000000 0201 0500 01000000 00000000", 0, ""},
		{"EPERM", uapi.MsgError, 0, "ffffffff 14000000 0201 0500 01000000 00000000", 1, ""},
		{
			"with words, capped", uapi.MsgError, uapi.FCapped | uapi.FAckTLVs,
			"eaffffff 50000000 0201 0500 01000000 00000000 0700 0100 6e6f00 00", 22, "no",
		},
		{
			"with words, whole request", uapi.MsgError, uapi.FAckTLVs,
			"eaffffff 14000000 0201 0500 01000000 00000000 02010000 0700 0100 6e6f00 00", 22, "no",
		},
		{
			"request claims too much", uapi.MsgError, uapi.FAckTLVs,
			"eaffffff ffffffff 0201 0500 01000000 00000000", 22, "",
		},
		{"end of a dump", uapi.MsgDone, 0, "00000000", 0, ""},
		{"end of a dump with an error", uapi.MsgDone, 0, "97ffffff", 105, ""},
		{"too short", uapi.MsgError, 0, "ffff", 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			errno, msg := decodeError(tc.typ, tc.flags, unhex(t, tc.hex))
			if errno != tc.errno || msg != tc.msg {
				t.Errorf("got %d %q, want %d %q", errno, msg, tc.errno, tc.msg)
			}
		})
	}
}

func BenchmarkDecodeFlow(b *testing.B) {
	f := sampleFlow()
	var m message
	_ = m.create(&f, nil, 1)
	b.ReportAllocs()
	for b.Loop() {
		if err := decodeFlow(m.b[uapi.SizeofNlMsghdr:], &f); err != nil {
			b.Fatal(err)
		}
	}
}
