//go:build linux

package testnet

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// unhex reads annotated hex: what follows a # is a comment.
func unhex(t *testing.T, s string) []byte {
	t.Helper()
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the bytes are those of a little-endian machine")
	}
	var digits strings.Builder
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMessage(t *testing.T) {
	m := newMessage(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.IfInfomsg{Index: 7})
	m.text(unix.IFLA_IFNAME, "va")
	m.nest(unix.IFLA_LINKINFO, func() { m.text(unix.IFLA_INFO_KIND, "veth") })
	m.uint32(unix.IFLA_NET_NS_FD, 9)
	want := unhex(t, `
		40000000 1000 0506 05000000 00000000  # nlmsghdr: length 64, RTM_NEWLINK, request ack excl create
		00 00 0000 07000000 00000000 00000000 # ifinfomsg: index 7
		0700 0300 766100 00                   # IFLA_IFNAME "va", padding
		1000 1200                             # IFLA_LINKINFO
		0900 0100 7665746800 000000           #   IFLA_INFO_KIND "veth", padding
		0800 1c00 09000000                    # IFLA_NET_NS_FD 9
	`)
	if diff := cmp.Diff(want, m.finish(unix.NLM_F_ACK, 5)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestAcknowledgement(t *testing.T) {
	const success = `24000000 0200 0001 05000000 00000000 00000000 14000000 1000 0506 05000000 00000000`
	const eexist = `efffffff 14000000 1000 0506 05000000 00000000`
	tests := []struct {
		name, hex, want string
	}{
		{"success", success, ""},
		{"error", `24000000 0200 0001 05000000 00000000` + eexist, "file exists"},
		{"error with text", `30000000 0200 0003 05000000 00000000` + eexist + `
			0c00 0100 62616420 6e6f00 00 # NLMSGERR_ATTR_MSG "bad no"`, "file exists (bad no)"},
		{"text behind another attribute", `38000000 0200 0003 05000000 00000000` + eexist + `
			0800 0200 10000000           # NLMSGERR_ATTR_OFFS
			0700 0100 6e6f00 00`, "file exists (no)"},
		{"request not left out", `38000000 0200 0002 05000000 00000000` + eexist + `
			0700 0100 6e6f00 00`, "file exists"},
		{"attribute too long", `2c000000 0200 0003 05000000 00000000` + eexist + `ff00 0100`, "file exists"},
		{"attribute too short", `2c000000 0200 0003 05000000 00000000` + eexist + `0000 0100`, "file exists"},
		{"attribute unpadded", `2b000000 0200 0003 05000000 00000000` + eexist + `0700 0200 6e6f00`, "file exists"},
		{"empty", ``, "unexpected answer from the kernel"},
		{"truncated", success[:len(success)-1*8], "unexpected answer from the kernel"},
		{"of another request", strings.Replace(success, "0500", "0600", 1), "unexpected answer from the kernel"},
		{"no acknowledgement", strings.Replace(success, "0200", "1000", 1), "unexpected answer from the kernel"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if err := acknowledgement(unhex(t, tt.hex), 5); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
