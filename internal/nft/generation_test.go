//go:build linux

package nft

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

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

func TestRequests(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		got        []byte
	}{
		{"generation", `
			14000000 100a 0100 00000000 00000000 # length 20, NFT_MSG_GETGEN, REQUEST
			00 00 0000                           # nfgenmsg: AF_UNSPEC
		`, newRequest(unix.NFT_MSG_GETGEN, 0)},
		{"table", `
			24000000 010a 0100 00000000 00000000 # NFT_MSG_GETTABLE, and no NLM_F_DUMP
			0a 00 0000                           # AF_INET6
			0f00 0100 6b7562652d70726f787900 00  # NFTA_TABLE_NAME "kube-proxy", padding
		`, Object{IPv6, "kube-proxy", ""}.request()},
		{"chain", `
			28000000 040a 0100 00000000 00000000 # NFT_MSG_GETCHAIN
			02 00 0000
			0800 0100 6e617400                   # NFTA_CHAIN_TABLE "nat"
			0b00 0300 444f434b455200 00          # NFTA_CHAIN_NAME "DOCKER", padding
			`, Object{IPv4, "nat", "DOCKER"}.request()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if want := unhex(t, tt.want); !bytes.Equal(tt.got, want) {
				t.Errorf("encoded\n%s\nwant\n%s", hex.Dump(tt.got), hex.Dump(want))
			}
		})
	}
}

const goodAnswer = `
	30000000 0f0a 0000 01000000 00000000 # NFT_MSG_NEWGEN
	00 00 0007                           # nfgenmsg, res_id: the generation's lower half
	0800 0100 00010007                   # NFTA_GEN_ID 0x10007
	0800 0200 000004d2                   # NFTA_GEN_PROC_PID
	0b00 0300 726573742e3000 00          # NFTA_GEN_PROC_NAME`

func TestGenerationAnswer(t *testing.T) {
	tests := []struct {
		name string
		hex  string
		gen  uint32
		ok   bool
	}{
		{"good", goodAnswer, 0x10007, true},
		{"behind another attribute", `20000000 0f0a 0000 01000000 00000000 00000000 0500 0300 61000000 0800 0100 00000009`, 9, true},
		{"empty", ``, 0, false},
		{"header alone", `10000000 0f0a 0000 01000000 00000000`, 0, false},
		{"another message", `1c000000 000a 0000 01000000 00000000 00000000 0800 0100 00000009`, 0, false},
		{"no generation", `1c000000 0f0a 0000 01000000 00000000 00000000 0800 0200 00000009`, 0, false},
		{"attribute too long", `1c000000 0f0a 0000 01000000 00000000 00000000 ff00 0100 00000009`, 0, false},
		{"attribute of no length", `1c000000 0f0a 0000 01000000 00000000 00000000 0000 0200 00000009`, 0, false},
		{"unpadded at the end", `19000000 0f0a 0000 01000000 00000000 00000000 0500 0200 61`, 0, false},
		{"of two bytes", `1a000000 0f0a 0000 01000000 00000000 00000000 0600 0100 0009`, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if gen, ok := generation(unhex(t, tt.hex)); gen != tt.gen || ok != tt.ok {
				t.Errorf("got %d, %v, want %d, %v", gen, ok, tt.gen, tt.ok)
			}
		})
	}
}

func FuzzGenerationAnswer(f *testing.F) {
	f.Add([]byte{0x1c, 0, 0, 0, 0x0f, 0x0a, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0, 0, 0, 0, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		gen, ok := generation(b)
		if ok && !bytes.Contains(b, binary.BigEndian.AppendUint32(nil, gen)) {
			t.Errorf("%d is not in the message", gen)
		}
	})
}

func open(tb testing.TB, ns *testnet.NS) *Generations {
	tb.Helper()
	g, err := Open(ns.Path())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = g.Close() })
	return g
}

func get(tb testing.TB, g *Generations) (uint32, bool) {
	tb.Helper()
	gen, ok, err := g.Get()
	if err != nil {
		tb.Fatal(err)
	}
	return gen, ok
}

func forward() testnet.Forward {
	return testnet.Forward{
		Proto: unix.IPPROTO_UDP, Dst: netip.MustParseAddrPort("203.0.113.10:53"),
		Backends: []netip.AddrPort{netip.MustParseAddrPort("198.51.100.11:53")},
	}
}

// in runs a command in the namespace, and skips the test where it is not
// installed.
func in(t *testing.T, ns *testnet.NS, command string) {
	t.Helper()
	args := strings.Fields(command)
	if _, err := exec.LookPath(args[0]); err != nil {
		t.Skip(err)
	}
	err := ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = append(cmd.Environ(), nstest.LockFile(t))
		out, err := cmd.CombinedOutput()
		if err != nil {
			return errors.Join(err, errors.New(string(out)))
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
}

func TestGenerationMoves(t *testing.T) {
	tests := []struct {
		name string
		do   func(*testing.T, *testnet.NS)
	}{
		{"a library commits", func(t *testing.T, ns *testnet.NS) {
			if err := ns.SetNAT(forward()); err != nil {
				t.Fatal(err)
			}
		}},
		{"iptables-nft adds a rule", func(t *testing.T, ns *testnet.NS) {
			in(t, ns, "iptables-nft -w -t nat -A OUTPUT -p udp --dport 53 -j DNAT --to-destination 198.51.100.11")
		}},
		{"ip6tables-nft adds a rule", func(t *testing.T, ns *testnet.NS) {
			in(t, ns, "ip6tables-nft -w -t nat -A OUTPUT -p udp --dport 53 -j DNAT --to-destination 2001:db8::11")
		}},
		{"nft adds a table", func(t *testing.T, ns *testnet.NS) { in(t, ns, "nft add table ip t") }},
		{"an element of a map", func(t *testing.T, ns *testnet.NS) {
			in(t, ns, "nft add map ip t m { type inet_service : ipv4_addr ; }")
			in(t, ns, "nft add element ip t m { 53 : 198.51.100.11 }")
		}},
		{"the last table goes", func(t *testing.T, ns *testnet.NS) { in(t, ns, "nft flush ruleset") }},
	}
	ns := nstest.New(t)
	g := open(t, ns)
	if gen, ok := get(t, g); ok {
		t.Errorf("generation %d says that something was committed", gen)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before, _ := get(t, g)
			tt.do(t, ns)
			after, ok := get(t, g)
			if after <= before || !ok {
				t.Errorf("generation %d became %d, %v", before, after, ok)
			}
		})
	}
}

func TestGenerationStays(t *testing.T) {
	ns, other := nstest.New(t), nstest.New(t)
	if err := ns.SetNAT(forward()); err != nil {
		t.Fatal(err)
	}
	g := open(t, ns)
	tests := []struct {
		name string
		do   func(*testing.T)
	}{
		{"asked again", func(*testing.T) {}},
		{"another namespace commits", func(t *testing.T) {
			if err := other.SetNAT(forward()); err != nil {
				t.Fatal(err)
			}
		}},
		{"rules are listed", func(t *testing.T) {
			c, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
			if err != nil {
				t.Fatal(err)
			}
			if tables, err := c.ListTables(); err != nil || len(tables) == 0 {
				t.Fatal(tables, err)
			}
		}},
		{"a commit fails", func(t *testing.T) {
			c, err := nftables.New(nftables.WithNetNSFd(ns.FD()))
			if err != nil {
				t.Fatal(err)
			}
			c.AddTable(&nftables.Table{Name: "good", Family: nftables.TableFamilyIPv4})
			c.DelTable(&nftables.Table{Name: "missing", Family: nftables.TableFamilyIPv4})
			if c.Flush() == nil {
				t.Fatal("it did not")
			}
		}},
		{"a flow comes", func(t *testing.T) {
			c, err := conntrack.Dial(conntrack.Config{NetNS: ns.Path()})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			f, err := conntrack.Parse("udp 17 600 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 [UNREPLIED] " +
				"src=198.51.100.11 dst=192.0.2.50 sport=53 dport=1")
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Create(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}},
		{"iptables-legacy adds a rule", func(t *testing.T) {
			in(t, ns, "iptables-legacy -w -t filter -A INPUT -p udp --dport 53 -j ACCEPT")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before, _ := get(t, g)
			tt.do(t)
			if after, ok := get(t, g); after != before || !ok {
				t.Errorf("generation %d became %d, %v", before, after, ok)
			}
		})
	}
}

func TestGetAllocatesNothing(t *testing.T) {
	g := open(t, nstest.New(t))
	if n := testing.AllocsPerRun(100, func() { get(t, g) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A number that no subsystem has is refused as nf_tables is by a kernel without.
func TestNoNFT(t *testing.T) {
	g := open(t, nstest.New(t))
	binary.NativeEndian.PutUint16(g.req[4:], 0x7f<<8)
	if gen, ok, err := g.Get(); !errors.Is(err, ErrNoNFT) || ok {
		t.Errorf("got %d, %v, %v, want %v", gen, ok, err, ErrNoNFT)
	}
}

// An answer that comes late is not taken for the next one's.
func TestLateAnswer(t *testing.T) {
	ns := nstest.New(t)
	g := open(t, ns)
	if err := g.s.write(g.req); err != nil { // nobody reads this one
		t.Fatal(err)
	}
	if err := ns.SetNAT(forward()); err != nil {
		t.Fatal(err)
	}
	if gen, ok := get(t, g); !ok {
		t.Errorf("generation %d is that before the commit", gen)
	}
}

// withoutCapabilities runs f on a thread that has none, though it be root's.
func withoutCapabilities(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func TestWithoutCapability(t *testing.T) {
	ns := nstest.New(t)
	g := open(t, ns)
	err := withoutCapabilities(func() error {
		_, _, err := g.Get()
		return err
	})
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN is missing") {
		t.Errorf("got %v", err)
	}
}

func TestClosed(t *testing.T) {
	g := open(t, nstest.New(t))
	if err := errors.Join(g.Close(), g.Close()); err != nil {
		t.Error(err)
	}
	if _, _, err := g.Get(); err == nil {
		t.Error("a closed socket answers")
	}
}

func TestOpenWithoutNamespace(t *testing.T) {
	if _, err := Open("/nonexistent"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("got %v", err)
	}
}

func TestExist(t *testing.T) {
	ns := nstest.New(t)
	if err := ns.SetNAT(forward()); err != nil {
		t.Fatal(err)
	}
	got, err := Exist(ns.Path(),
		Object{INet, "flowsweep-test", ""}, Object{IPv4, "flowsweep-test", ""}, Object{INet, "nothing", ""},
		Object{INet, "flowsweep-test", "forwards"}, Object{INet, "flowsweep-test", "nothing"},
		Object{INet, "nothing", "forwards"})
	if err != nil {
		t.Fatal(err)
	}
	if want := []bool{true, false, false, true, false, false}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// The table appears with the first look of iptables-legacy, and not with ours.
func TestLegacyNAT(t *testing.T) {
	ns := nstest.New(t)
	for range 2 {
		if got, err := LegacyNAT(ns.Path()); got || err != nil {
			t.Fatalf("a new namespace: got %v, %v", got, err)
		}
	}
	in(t, ns, "iptables-nft -w -t nat -A OUTPUT -p udp --dport 53 -j DNAT --to-destination 198.51.100.11")
	if got, err := LegacyNAT(ns.Path()); got || err != nil {
		t.Errorf("with rules of iptables-nft: got %v, %v", got, err)
	}
	in(t, ns, "iptables-legacy -w -t nat -A OUTPUT -p udp --dport 53 -j DNAT --to-destination 198.51.100.11")
	if got, err := LegacyNAT(ns.Path()); !got || err != nil {
		t.Errorf("with rules of iptables-legacy: got %v, %v", got, err)
	}
	if got, err := LegacyNAT(nstest.New(t).Path()); got || err != nil {
		t.Errorf("another namespace: got %v, %v", got, err)
	}
}

func TestIPVS(t *testing.T) {
	if got, err := IPVS(nstest.New(t).Path()); got || err != nil {
		t.Errorf("a new namespace: got %v, %v", got, err)
	}
}

func BenchmarkGet(b *testing.B) {
	g := open(b, nstest.New(b))
	b.ReportAllocs()
	for b.Loop() {
		get(b, g)
	}
}
