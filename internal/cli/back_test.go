//go:build linux

package cli

import (
	"context"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
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

// A userland proxy that answers once more after the delete begins a flow from the
// frontend to the client, which would hold what the client sends.
func TestLateAnswer(t *testing.T) {
	client, router := newRouter(t)
	if err := router.AddAddr("lo", netip.PrefixFrom(vips[0].Addr(), 32)); err != nil {
		t.Fatal(err)
	}
	setNAT(t, router, forwarding{})
	proxy, err := router.ListenUDP(vips[0])
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	from := netip.MustParseAddrPort("192.0.2.2:40000")
	c, err := client.DialUDP(from, vips[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	exchange := func() {
		t.Helper()
		if _, err := c.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 16)
		if _, _, err := proxy.ReadFromUDPAddrPort(b); err != nil {
			t.Fatal(err)
		}
		if _, err := proxy.WriteToUDPAddrPort([]byte("!"), from); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
	}
	exchange()
	setNAT(t, router, forwarding{vips[0]: backends[0]})
	table, err := conntrack.Dial(conntrack.Config{NetNS: router.Path()})
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	flow := conntrack.Flow{
		Family: conntrack.IPv4, Proto: conntrack.UDP,
		Orig:  conntrack.Tuple{Src: from.Addr(), Dst: vips[0].Addr(), SrcPort: from.Port(), DstPort: vips[0].Port()},
		Reply: conntrack.Tuple{Src: vips[0].Addr(), Dst: from.Addr(), SrcPort: vips[0].Port(), DstPort: from.Port()},
	}
	there := func() bool {
		t.Helper()
		_, ok, err := table.Get(t.Context(), flow)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	answered := make(chan error, 1)
	go func() {
		for {
			_, ok, err := table.Get(context.Background(), flow)
			if err == nil && !ok {
				_, err = proxy.WriteToUDPAddrPort([]byte("late"), from)
				answered <- err
				return
			}
			if err != nil {
				answered <- err
				return
			}
		}
	}()
	out, code, stderr := runJSON(t, "sweep", "--netns", router.Path())
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	const want = "deleted 1 flow more, which a late answer to a deleted one had begun"
	if code != 0 || out.Summary.Deleted != 1 || noteOf(out, "late-answers") != want {
		t.Errorf("exit %d, %+v\n%s", code, out.Summary, stderr)
	}
	if there() {
		t.Error("the flow of the late answer is there")
	}
}
