//go:build linux

package cli

import (
	"context"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// What comes back is told, and what comes back right is not.
func TestCameBack(t *testing.T) {
	client, router := newRouter(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	nstest.LegacyNAT(t, router) // or the rules would tell before
	setNAT(t, router, forwarding{vips[0]: backends[0], vips[1]: backends[0]})
	for i, vip := range vips[:2] {
		from := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(40000+i))
		s := nstest.Send(t, client, from, vip, 20*time.Millisecond)
		if _, err := s.Await(ctx, backends[0]); err != nil {
			t.Fatal(err)
		}
	}
	setNAT(t, router, forwarding{vips[0]: backends[0], vips[1]: backends[1]}) // the first is behind
	state := writeFile(t, strings.NewReplacer(`["203.0.113.10"]`, `["203.0.113.10","203.0.113.11"]`, "198.51.100.11:53", backends[1].String()).Replace(oneService))
	out, code, stderr := runJSON(t, "sweep", "--netns", router.Path(), "--state", state)
	want := regexp.MustCompile(`^1 of 2 deleted flows came back stale within 0.25 s, since what made it so is still there: ` +
		`flowsweep explain '192\.0\.2\.2:40000>203\.0\.113\.10:53/udp'$`)
	if code != 0 || stderr != "" || out.Summary.Deleted != 2 || out.Summary.CameBack != 1 || !want.MatchString(noteOf(out, "came-back")) {
		t.Errorf("exit %d, %+v\n%s", code, out.Summary, stderr)
	}
	setNAT(t, router, forwarding{vips[0]: backends[1], vips[1]: backends[1]})
	out, code, stderr = runJSON(t, "sweep", "--netns", router.Path(), "--state", state)
	if code != 0 || out.Summary.Deleted != 1 || out.Summary.CameBack != 0 || noteOf(out, "came-back") != "" {
		t.Errorf("exit %d, %+v\n%s", code, out.Summary, stderr)
	}
	out, code, stderr = runJSON(t, "plan", "--netns", router.Path(), "--state", state)
	if code != 0 || out.Summary.Delete != 0 || noteOf(out, "came-back") != "" {
		t.Errorf("exit %d, %+v\n%s", code, out.Summary, stderr)
	}
}
