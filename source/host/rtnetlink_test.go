//go:build linux

package host

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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

func TestDumpRequest(t *testing.T) {
	want := unhex(t, `
		18000000 1600 0103 07000000 00000000 # length 24, RTM_GETADDR, REQUEST|DUMP, sequence 7, to the kernel
		00 00 00 00 00000000                 # ifaddrmsg: AF_UNSPEC, any interface
	`)
	if got := dumpRequest(7); !bytes.Equal(got, want) {
		t.Errorf("encoded\n%s\nwant\n%s", hex.Dump(got), hex.Dump(want))
	}
}

// As a kernel writes them, in answer to request 7 of port 0x4d2.
const (
	header = `1400 0200 07000000 d2040000` // RTM_NEWADDR, MULTI, sequence, port

	ipv4 = `
		58000000` + header + `
		02 18 80 00 02000000       # AF_INET, /24, IFA_F_PERMANENT, universe, interface 2
		0800 0100 c0000201         # IFA_ADDRESS 192.0.2.1
		0800 0200 c0000201         # IFA_LOCAL
		0800 0400 c00002ff         # IFA_BROADCAST
		0900 0300 65746830 00 000000 # IFA_LABEL "eth0", padding
		0800 0800 80000000         # IFA_FLAGS
		1400 0600 ffffffff ffffffff 10270000 10270000 # IFA_CACHEINFO: for ever
	`
	pointToPoint = `
		28000000` + header + `
		02 20 80 00 03000000
		0800 0100 c6336401         # IFA_ADDRESS 198.51.100.1: the peer
		0800 0200 c6336402         # IFA_LOCAL 198.51.100.2
	`
	ipv6 = `
		34000000` + header + `
		0a 40 80 00 02000000       # AF_INET6, /64
		1400 0100 20010db8000000000000000000000001
		0800 0800 80000000
	`
	ipv6Peer = `
		40000000` + header + `
		0a 80 80 00 02000000
		1400 0200 20010db8000000000000000000000002 # IFA_LOCAL
		1400 0100 20010db8000000000000000000000003 # IFA_ADDRESS: the peer
	`
	loopback4 = `20000000` + header + `02 08 80 fe 01000000 0800 0200 7f000001`
	loopback6 = `2c000000` + header + `0a 80 80 fe 01000000 1400 0100 00000000000000000000000000000001`
	done      = `14000000 0300 0200 07000000 d2040000 00000000`
)

// flagged is ipv6 with other flags.
func flagged(flags string) string {
	return strings.Replace(ipv6, "0800 0800 80000000", "0800 0800"+flags, 1)
}

func TestDecode(t *testing.T) {
	tests := []struct {
		name  string
		hex   string
		want  []netip.Addr
		done  bool
		inter bool
		err   error
	}{
		{"IPv4", ipv4, addrs("192.0.2.1"), false, false, nil},
		{"point to point", pointToPoint, addrs("198.51.100.2"), false, false, nil},
		{"IPv6", ipv6, addrs("2001:db8::1"), false, false, nil},
		{"IPv6 with a peer", ipv6Peer, addrs("2001:db8::2"), false, false, nil},
		{"loopback", loopback4 + loopback6, nil, false, false, nil},
		{"several, and the end", ipv4 + ipv6 + done, addrs("192.0.2.1", "2001:db8::1"), true, false, nil},

		{"tentative", flagged("c0000000"), addrs("2001:db8::1"), false, false, nil},
		{"deprecated", flagged("a0000000"), addrs("2001:db8::1"), false, false, nil},
		{"temporary, deprecated, no prefix route", flagged("a1020000"), addrs("2001:db8::1"), false, false, nil},
		{"duplicate", flagged("c8000000"), nil, false, false, nil},
		{"duplicate, in the header alone", `2c000000` + header + `0a 40 88 00 02000000
			1400 0100 20010db8000000000000000000000001`, nil, false, false, nil},
		{
			"flags of another size", strings.Replace(ipv6, "0800 0800 80000000", "0500 0800 08000000", 1),
			addrs("2001:db8::1"), false, false, nil,
		},

		{"of another request", strings.ReplaceAll(ipv4, "07000000", "06000000"), nil, false, false, nil},
		{"of another socket", strings.ReplaceAll(ipv4, "d2040000", "d3040000"), nil, false, false, nil},
		{"another's end", strings.ReplaceAll(done, "d2040000", "00000000"), nil, false, false, nil},
		{"interrupted", strings.Replace(ipv4, "1400 0200", "1400 1200", 1) + done, addrs("192.0.2.1"), true, true, nil},
		{"interrupted at the end", ipv4 + strings.Replace(done, "0300 0200", "0300 1200", 1), addrs("192.0.2.1"), true, true, nil},
		{"error", `24000000 0200 0000 07000000 d2040000 a1ffffff 18000000 1600 0103 07000000 00000000`, nil, false, false, unix.EOPNOTSUPP},
		{"end with an error", strings.Replace(done, "d2040000 00000000", "d2040000 fcffffff", 1), nil, false, false, unix.EINTR},
		{"end without a code", `10000000 0300 0200 07000000 d2040000`, nil, true, false, nil},

		{"header cut", ipv4 + "1400", addrs("192.0.2.1"), false, false, errTruncated},
		{"message cut", ipv4 + "ff000000" + header, addrs("192.0.2.1"), false, false, errTruncated},
		{"length 0", "00000000" + header, nil, false, false, errTruncated},
		{"no ifaddrmsg", "14000000" + header + "02 18 80 00", nil, false, false, nil},
		{"no attributes", "18000000" + header + "02 18 80 00 02000000", nil, false, false, nil},
		{"attribute too long", "20000000" + header + "02 18 80 00 02000000 0900 0200 c0000201", nil, false, false, nil},
		{"attribute of length 0", "20000000" + header + "02 18 80 00 02000000 0000 0200 c0000201", nil, false, false, nil},
		{"unpadded at the end", "21000000" + header + "02 18 80 00 02000000 0800 0200 c0000201 05", addrs("192.0.2.1"), false, false, nil},
		{"address of the other family", "20000000" + header + "0a 18 80 00 02000000 0800 0200 c0000201", nil, false, false, nil},
		{"family unknown", "20000000" + header + "07 18 80 00 02000000 0800 0200 c0000201", nil, false, false, nil},
		{"no address at all", "20000000" + header + "02 18 80 00 02000000 0800 0200 00000000", nil, false, false, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, a, err := decode(unhex(t, tt.hex), 7, 0x4d2, nil)
			if !slices.Equal(got, tt.want) || a.done != tt.done || a.interrupted != tt.inter || !errors.Is(err, tt.err) {
				t.Errorf("got %v, %+v, %v, want %v, done %v, interrupted %v, %v",
					got, a, err, tt.want, tt.done, tt.inter, tt.err)
			}
		})
	}
}

// Whatever comes, what is taken for an address is one, and stands there.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{ipv4, pointToPoint, ipv6, ipv6Peer, loopback6, done, flagged("c8000000")} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		list, _, _ := decode(b, 7, 0x4d2, nil)
		for _, a := range list {
			if !a.IsValid() || a.IsLoopback() || a.IsUnspecified() || a.Zone() != "" || !bytes.Contains(b, a.AsSlice()) {
				t.Errorf("%v in\n%s", a, hex.Dump(b))
			}
		}
	})
}
