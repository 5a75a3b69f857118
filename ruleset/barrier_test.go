//go:build linux

package ruleset

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestBarrier(t *testing.T) {
	ns := nstest.New(t)
	must(t, ns.SetNAT())
	c, err := Open(ns.Path())
	must(t, err)
	gen, err := c.Generation()
	must(t, err)
	for range 100 {
		must(t, c.barrier(gen))
	}
	if now, err := c.Generation(); now != gen || err != nil {
		t.Fatalf("it moved the generation from %d to %d, %v", gen, now, err)
	}
	must(t, ns.SetNAT())
	for _, other := range []uint32{gen, gen + 2, 0} {
		if err := c.barrier(other); !errors.Is(err, ErrStale) {
			t.Errorf("%d where it is %d: %v", other, gen+1, err)
		}
	}
	must(t, c.barrier(gen+1)) // what was refused leaves nothing behind
	if err := withoutCapabilities(func() error { return c.barrier(gen + 1) }); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("without CAP_NET_ADMIN: %v", err)
	}
	must(t, c.barrier(gen+1))
	must(t, c.Close())
	if err := c.barrier(gen + 1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// What the kernel answers to an empty batch and the request behind it: nothing and
// the generation, or a refusal first.
func TestBarrierAnswer(t *testing.T) {
	const (
		gen     = `1c000000 0f0a 0000 07000000 00000000 00 00 0007 0800 0100 00010007`
		refusal = `24000000 0200 0000 06000000 00000000 %s 1c000000 1000 0100 06000000 00000000`
	)
	for _, tt := range []struct {
		name, hex string
		want      error
	}{
		{"taken", gen, nil},
		{"ERESTART: another generation", strings.ReplaceAll(refusal, "%s", "abffffff"), unix.ERESTART},
		{"EPERM", strings.ReplaceAll(refusal, "%s", "ffffffff"), unix.EPERM},
		{"EOPNOTSUPP: no nf_tables", strings.ReplaceAll(refusal, "%s", "a1ffffff"), ErrNoNFT},
		{"the answer to an earlier batch", strings.ReplaceAll(refusal, "06000000 00000000 %s", "05000000 00000000 abffffff") + gen, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			a := answer{seq: 7, batch: 6, each: func(uint16, Family, []byte) error { n++; return nil }}
			err := a.take(unhex(t, tt.hex))
			var errno unix.Errno
			if errors.As(err, &errno) {
				err = refused(errno)
			}
			if !errors.Is(err, tt.want) || err == nil && n != 1 {
				t.Errorf("%v, %d messages", err, n)
			}
		})
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

func BenchmarkGeneration(b *testing.B) {
	ns := nstest.New(b)
	must(b, ns.SetNAT())
	c, err := Open(ns.Path())
	must(b, err)
	defer c.Close()
	gen, err := c.Generation()
	must(b, err)
	b.Run("ask", func(b *testing.B) {
		for b.Loop() {
			if _, err := c.Generation(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("barrier", func(b *testing.B) {
		for b.Loop() {
			must(b, c.barrier(gen))
		}
	})
}

// A large transaction is not seen half done. In most rounds it was, by several loads
// each, and a judge that lives on took the empty anonymous set over from one
// generation to the next.
func TestLoadMeetsCommit(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("install nftables: ", err)
	}
	const rounds, elements = 8, 10_000 // more is too long for a message without privilege
	s := newScene(t)
	s.run(t, `table ip t {
	set bulk { type ipv4_addr
	}
	set pairs { type ipv4_addr . inet_service; flags interval
	}
	chain q {
	}
	chain p { type nat hook prerouting priority -100
		ip daddr . udp dport @pairs dnat to 198.51.100.1
		jump q
	}
}
`, "nft", "-f", "-")
	// One transaction fills the set of the first rule anew, puts another rule with
	// another set in the place of the second, and does much else.
	var bulk strings.Builder
	for i := range elements {
		fmt.Fprintf(&bulk, "10.64.%d.%d,", i>>8, i&0xff)
	}
	change := fmt.Sprintf(`flush set ip t bulk
add element ip t bulk { %s }
flush set ip t pairs
add element ip t pairs { 203.0.113.1 . 50-60, 203.0.113.7 . 50-60 }
flush chain ip t q
add rule ip t q ip daddr . udp dport { 203.0.113.2 . 50-60, 203.0.113.8 . 50-60 } dnat to 198.51.100.2
`, bulk.String())
	s.run(t, change, "nft", "-f", "-")
	done := make(chan error, 1)
	go func() {
		for range rounds {
			if out, err := s.try(change, "nft", "-f", "-"); err != nil {
				done <- fmt.Errorf("%w: %s", err, out)
				return
			}
		}
		done <- nil
	}()

	j, err := NewJudge(t.Context(), Config{NetNS: s.router.Path(), Host: s.host})
	must(t, err)
	defer j.Close()
	seen := [2]map[string]int{{}, {}} // by a new reader each time, and by the judge
	for err = errAgain; errors.Is(err, errAgain); {
		select {
		case err = <-done:
		default:
		}
		rs, lerr := s.rules.Load(t.Context())
		if errors.Is(lerr, ErrChanging) {
			continue
		}
		must(t, lerr)
		if _, rerr := j.Reload(t.Context()); rerr != nil {
			continue
		}
		for n, rules := range []*Ruleset{rs, j.Rules()} {
			for i := range 2 {
				p := Packet{
					conntrack.UDP, netip.MustParseAddr("10.1.0.2"), netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i)}), 40000, 53,
				}
				o := rules.Outcome(p, s.host)
				seen[n][o.String()]++
				if !o.Any && o.String() != fmt.Sprintf("198.51.100.%d:53", 1+i) {
					seen[n]["wrong"]++
				}
			}
		}
	}
	must(t, err)
	t.Logf("read anew: %v; by a judge that lives on: %v", seen[0], seen[1])
	if n := seen[0]["wrong"] + seen[1]["wrong"]; n > 0 {
		t.Errorf("%d packets seem to pass that every ruleset translates", n)
	}
}
