//go:build linux

package testnet_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func sample(t *testing.T, s *testnet.Sender, n int) testnet.Tally {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	tally, err := s.Sample(ctx, n)
	if err != nil {
		t.Fatal(err)
	}
	return tally
}

// The very bug: the rules have changed, and the flow has not.
func TestPinnedFlow(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			client, node, ns := clientNodeBackends(t)
			servers, backends := serve(t, ns, f.backends[:2])
			forward := testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: f.service, Backends: backends[:1]}
			setNAT(t, node, forward)

			sender := nstest.Send(t, client, netip.AddrPortFrom(f.client, 40000), f.service, 10*time.Millisecond)
			if got := sample(t, sender, 10); got.From[backends[0]] != 10 {
				t.Fatalf("before: %s", got)
			}

			// The backend is replaced, and the proxy says so.
			forward.Backends = backends[1:]
			setNAT(t, node, forward)
			if err := servers[0].Close(); err != nil {
				t.Fatal(err)
			}
			if got := sample(t, sender, 20); got.Lost != 20 {
				t.Errorf("the flow is not pinned: %s", got)
			}
			if got := ask(t, client, f.service); got != backends[1] {
				t.Errorf("a new flow went to %s, want %s", got, backends[1])
			}
			if got := sample(t, sender, 5); got.Lost != 5 {
				t.Errorf("the flow is not pinned any more: %s", got)
			}

			if err := testnet.FlushConntrack(node); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if r, err := sender.Await(ctx, backends[1]); err != nil || r.From != backends[1] || r.RTT <= 0 {
				t.Errorf("without its flow the sender is not repaired: %+v, %v", r, err)
			}
			if got := sample(t, sender, 10); got.From[backends[1]] != 10 {
				t.Errorf("after: %s", got)
			}
		})
	}
}

func TestSender(t *testing.T) {
	ns := nstest.New(t)
	server := nstest.Echo(t, ns, addrPort("127.0.0.1:53"))
	from := addrPort("127.0.0.1:40000")
	sender := nstest.Send(t, ns, from, server.Addr(), 10*time.Millisecond)
	if got := sender.Local(); got != from {
		t.Errorf("sends from %s, want %s", got, from)
	}
	if got, err := sender.Await(t.Context(), netip.AddrPort{}); err != nil || got.From != server.Addr() {
		t.Errorf("await: %+v, %v", got, err)
	}
	sample(t, sender, 30)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if got := sample(t, sender, 10); got.Lost != 10 {
		t.Errorf("without a server: %s", got)
	}
	server = nstest.Echo(t, ns, server.Addr())
	if got := sample(t, sender, 10); got.From[server.Addr()] < 9 {
		// The datagram on its way when the server began may be lost.
		t.Errorf("with a server again: %s", got)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := sender.Await(ctx, addrPort("192.0.2.1:1")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("await a server that is not there: %v", err)
	}
	if err := sender.Close(); err != nil {
		t.Error(err)
	}
	if err := sender.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
	if _, err := sender.Sample(t.Context(), 1); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("sample of a closed sender: %v", err)
	}

	records := sender.Records()
	if !slices.IsSortedFunc(records, func(a, b testnet.Record) int { return a.Sent.Compare(b.Sent) }) {
		t.Error("records are out of order")
	}
	const length = 100 * time.Millisecond
	var sent, lost, answered int
	periods := sender.Timeline(length)
	for i, p := range periods {
		if d := p.Start.Sub(records[0].Sent); d%length != 0 || i == 0 && d != 0 {
			t.Errorf("period %d starts after %s", i, d)
		}
		if p.Sent != p.Lost+p.Pending+p.From[server.Addr()] {
			t.Errorf("period %d does not add up: %s", i, p)
		}
		sent, lost, answered = sent+p.Sent, lost+p.Lost, answered+p.From[server.Addr()]
	}
	if sent != len(records) || lost < 10 || answered < 40 || len(periods) < 3 {
		t.Errorf("%d records, but %d sent, %d lost, %d answered in %d periods",
			len(records), sent, lost, answered, len(periods))
	}
}

// A sender must live through all that a network can do to its datagrams.
func TestSenderOutlivesUnreachableBackends(t *testing.T) {
	client, node, ns := clientNodeBackends(t)
	f := families[0]
	_, backends := serve(t, ns, f.backends[:1])
	setNAT(t, node, testnet.Forward{Proto: unix.IPPROTO_UDP, Dst: f.service, Backends: backends})
	sender := nstest.Send(t, client, netip.AddrPort{}, f.service, 10*time.Millisecond)
	sample(t, sender, 5)
	if err := ns.DelAddr("eth0", f.backends[0]); err != nil {
		t.Fatal(err)
	}
	if got := sample(t, sender, 10); got.Lost != 10 {
		t.Errorf("address gone: %s", got)
	}
	if err := ns.AddAddr("eth0", f.backends[0]); err != nil {
		t.Fatal(err)
	}
	// Neighbour discovery gave up on the address, for a while.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := sender.Await(ctx, backends[0]); err != nil {
		t.Errorf("address back: %v", err)
	}
}

func TestSenderOfNonsense(t *testing.T) {
	ns := nstest.New(t)
	conn, err := ns.ListenUDP(addrPort("127.0.0.1:53"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, answer := range []string{"short", "12345678nonsense"} {
		sender, err := testnet.Send(ns, netip.AddrPort{}, addrPort("127.0.0.1:53"), 10*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.WriteToUDPAddrPort([]byte(answer), sender.Local()); err != nil {
			t.Fatal(err)
		}
		if _, err := sender.Sample(t.Context(), 1000); err == nil || !strings.Contains(err.Error(), "echo server") {
			t.Errorf("answer %q: %v", answer, err)
		}
		if err := sender.Close(); err == nil {
			t.Errorf("answer %q: Close says nothing of it", answer)
		}
	}
	if _, err := testnet.Send(ns, netip.AddrPort{}, addrPort("127.0.0.1:53"), 0); err == nil {
		t.Error("interval 0 is accepted")
	}
}

func TestAskWithoutAnswer(t *testing.T) {
	ns := nstest.New(t)
	silent, err := ns.ListenUDP(addrPort("127.0.0.1:53"))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	_, err = testnet.Ask(ns, netip.AddrPort{}, addrPort("127.0.0.1:53"), 20*time.Millisecond)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("silence: %v", err)
	}
	_, err = testnet.Ask(ns, netip.AddrPort{}, addrPort("127.0.0.1:54"), 5*time.Second)
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("closed port: %v", err)
	}
}

func TestTallyString(t *testing.T) {
	a, b := addrPort("198.51.100.2:53"), addrPort("198.51.100.3:53")
	tests := []struct {
		name  string
		tally testnet.Tally
		want  string
	}{
		{"nothing", testnet.Tally{}, "0 sent"},
		{"one fate", testnet.Tally{Sent: 3, Lost: 3}, "3 sent: 3 lost"},
		{
			"all",
			testnet.Tally{Sent: 9, Lost: 2, Pending: 1, From: map[netip.AddrPort]int{b: 2, a: 4}},
			"9 sent: 4 from 198.51.100.2:53, 2 from 198.51.100.3:53, 2 lost, 1 pending",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.tally.String(); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
