//go:build linux

package ruleset

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Rules as programs write them: those that are shadowed, each by the rule that
// shadows it, as numbers in their chain.
func TestShadowed(t *testing.T) {
	const nat, toOne, toTwo = "type nat hook prerouting priority -100;", "dnat to 198.51.100.11", "dnat to 198.51.100.12"
	for _, tt := range []struct {
		name  string
		rules []string // of the chain p
		other string   // chains
		want  []string
	}{
		{"the same", []string{"ip daddr 203.0.113.10 udp dport 53 " + toOne, "ip daddr 203.0.113.10 udp dport 53 " + toTwo}, "", []string{"p 1<0"}},
		{"in another order", []string{"udp dport 53 ip daddr 203.0.113.10 " + toOne, "ip daddr 203.0.113.10 udp dport 53 " + toTwo}, "", []string{"p 1<0"}},
		{"another port", []string{"udp dport 53 " + toOne, "udp dport 54 " + toTwo}, "", nil},
		{"another protocol", []string{"udp dport 53 " + toOne, "tcp dport 53 " + toTwo}, "", nil},
		{"fewer tests", []string{"udp dport 53 " + toOne, `iifname "wan" udp dport 53 ` + toTwo}, "", []string{"p 1<0"}},
		{"more tests", []string{`iifname "wan" udp dport 53 ` + toOne, "udp dport 53 " + toTwo}, "", nil},
		{"a network", []string{"ip daddr 203.0.113.0/24 " + toOne, "ip daddr 203.0.113.10 udp dport 53 " + toTwo}, "", []string{"p 1<0"}},
		{"a network that ends within a byte", []string{"ip daddr 203.0.113.0/28 " + toOne, "ip daddr 203.0.113.10 " + toTwo, "ip daddr 203.0.113.16 " + toTwo}, "", []string{"p 1<0"}},
		{"an address, then its network", []string{"ip daddr 203.0.113.10 " + toOne, "ip daddr 203.0.113.0/24 " + toTwo}, "", nil},
		{"the same but one", []string{`iifname != "docker0" udp dport 53 ` + toOne, `iifname != "docker1" udp dport 53 ` + toTwo}, "", nil},
		{"accepted before", []string{"ip saddr 192.0.2.0/24 accept", "ip saddr 192.0.2.0/24 udp dport 53 " + toOne}, "", []string{"p 1<0"}},
		{"returned before", []string{"udp dport 53 return", "udp dport 53 " + toOne}, "", []string{"p 1<0"}},
		{"a rate", []string{"udp dport 53 limit rate 1/second " + toOne, "udp dport 53 " + toTwo}, "", nil},
		{"a rate behind it", []string{"udp dport 53 " + toOne, "udp dport 53 limit rate 1/second " + toTwo}, "", []string{"p 1<0"}},
		{"a random number", []string{"udp dport 53 numgen random mod 2 0 " + toOne, "udp dport 53 numgen random mod 2 0 " + toTwo}, "", nil},
		{"a mark that is set between", []string{"meta mark 1 " + toOne, "udp dport 53 meta mark set 1", "meta mark 1 " + toTwo}, "", nil},
		{"a packet that is changed between", []string{"udp dport 53 " + toOne, "ip dscp set 1", "udp dport 53 " + toTwo}, "", nil},
		{"the same set", []string{"ip daddr { 203.0.113.10, 203.0.113.11 } udp dport 53 " + toOne, "ip daddr @s udp dport 53 " + toTwo, "ip daddr @s udp dport 53 " + toOne}, "set s { type ipv4_addr; elements = { 203.0.113.10 }; }", []string{"p 2<1"}},
		{"a set that packets fill", []string{"ip daddr @d " + toOne, "ip daddr @d " + toTwo}, "set d { type ipv4_addr; flags dynamic; size 9; }", nil},
		{"a redirection", []string{"udp dport 53 redirect to :5353", "udp dport 53 " + toOne}, "", []string{"p 1<0"}},
		{
			"chains, as Podman has them",
			[]string{"udp dport 53 jump one", "udp dport 53 jump two", "udp dport 54 jump two"},
			"chain one { ip saddr 10.88.0.0/16 meta mark set 1; udp dport 53 " + toOne + "; }\nchain two { udp dport 53 " + toTwo + "; }",
			[]string{"p 1<0"},
		},
		{
			"a chain that may come to its end",
			[]string{"udp dport 53 jump one", "udp dport 53 " + toTwo},
			"chain one { ip saddr 10.88.0.0/16 " + toOne + "; }", nil,
		},
		{
			"a chain that may return",
			[]string{"udp dport 53 jump one", "udp dport 53 " + toTwo},
			"chain one { ip saddr 10.88.0.0/16 return; " + toOne + "; }", nil,
		},
		{
			"a chain that is gone to",
			[]string{"udp dport 53 goto one", "udp dport 53 " + toTwo},
			"chain one { ip saddr 10.88.0.0/16 " + toOne + "; }",
			[]string{"p 1<0"},
		},
		{"nothing behind", []string{"udp dport 53 " + toOne, "udp dport 53 accept", "udp dport 53 meta mark set 1"}, "", nil},
		{"what leads nowhere", []string{"udp dport 53 accept", "udp dport 53 jump one"}, "chain one { meta mark set 1; }", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := exec.LookPath("nft"); err != nil {
				t.Skip(err)
			}
			ns := nstest.New(t)
			text := fmt.Sprintf("table ip t {\n%s\nchain p { %s\n%s\n}\n}\n", tt.other, nat, strings.Join(tt.rules, "\n"))
			must(t, ns.Do(func() error {
				cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
				cmd.Stdin = strings.NewReader(text)
				out, err := cmd.CombinedOutput()
				if err != nil {
					t.Logf("%s%s", text, out)
				}
				return err
			}))
			if got := pairs(newJudge(t, ns, Config{}).Rules()); !slices.Equal(got, tt.want) {
				t.Errorf("%v, want %v in\n%s", got, tt.want, text)
			}
		})
	}
}

// pairs are the shadowed rules, "chain 3<1" where the fourth rule of the chain is
// shadowed by the second.
func pairs(r *Ruleset) (list []string) {
	number := func(x Rule) int {
		for _, t := range r.model.tables {
			if t.family == x.Family && t.name == x.Table {
				return slices.IndexFunc(t.chains[x.Chain].each(), func(y rule) bool { return y.handle == x.Handle })
			}
		}
		return -1
	}
	for _, s := range r.Shadowed() {
		list = append(list, fmt.Sprintf("%s %d<%d", s.Chain, number(s.Rule), number(s.By.Rule)))
	}
	return list
}

// Docker's rules, those of a container that is gone first.
func TestShadowedIPTables(t *testing.T) {
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip(err)
	}
	ns := nstest.New(t)
	must(t, ns.Do(func() error {
		cmd := exec.CommandContext(t.Context(), "iptables-nft-restore")
		cmd.Stdin = strings.NewReader(`*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p udp -m udp --dport 2055 -j DNAT --to-destination 172.17.0.2:2055
-A DOCKER ! -i docker0 -p udp -m udp --dport 2056 -j DNAT --to-destination 172.17.0.2:2055
-A DOCKER ! -i docker0 -p udp -m udp --dport 2055 -m comment --comment now -j DNAT --to-destination 172.17.0.3:2055
-A DOCKER -p udp -m multiport --dports 1,2 -j DNAT --to-destination 172.17.0.3
-A DOCKER -p udp -m multiport --dports 1,2 -m statistic --mode random --probability 0.5 -j DNAT --to-destination 172.17.0.4
-A DOCKER -p udp -m udp --dport 9 -m statistic --mode random --probability 0.5 -j DNAT --to-destination 172.17.0.4
-A DOCKER -p udp -m udp --dport 9 -m statistic --mode random --probability 0.5 -j DNAT --to-destination 172.17.0.5
COMMIT
`)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Logf("%s", out)
		}
		return err
	}))
	r := newJudge(t, ns, Config{}).Rules()
	if got, want := pairs(r), []string{"DOCKER 3<1", "DOCKER 5<4"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	all := r.Shadowed()
	if got := r.Shadowed(all[1].By.Rule); !slices.Equal(got, all[1:]) {
		t.Errorf("%v, want %v", got, all[1:])
	}
	text := all[0].Rule.String() + ": " + all[0].Text + " < " + all[0].By.Text
	if !strings.Contains(text, "172.17.0.3:2055") || !strings.HasSuffix(text, "172.17.0.2:2055") {
		t.Error(text)
	}
}

// toy is a small world of rules, interpreted here a second time: what is said to
// be shadowed is met by no packet, whatever comes out by chance.
type toy struct {
	chains map[string][]toyRule
	met    map[[2]any]bool // chain and number
}

type toyRule struct {
	tests []toyTest
	end   string // "dnat", "accept", "return", "jump x", "goto x", "mark"
}

type toyTest struct {
	what  int // iif, daddr/24, daddr, dport, by chance, mark
	value byte
	not   bool
}

type toyPacket struct {
	iif, net, host, port, mark byte
	luck                       uint32 // a bit for each test by chance
}

const (
	toyIif = iota
	toyNet
	toyAddr
	toyPort
	toyLuck
	toyMark
	toyTests
)

// run leads a packet through a chain and tells whether it comes out.
func (w *toy) run(chain string, p *toyPacket, depth int) bool {
next:
	for i, r := range w.chains[chain] {
		for _, t := range r.tests {
			var hit bool
			switch t.what {
			case toyIif:
				hit = p.iif == t.value
			case toyNet:
				hit = p.net == t.value
			case toyAddr:
				hit = p.net == t.value && p.host == 10
			case toyPort:
				hit = p.port == t.value
			case toyLuck:
				hit = p.luck&1 != 0
				p.luck >>= 1
			case toyMark:
				hit = p.mark == t.value
			}
			if hit == t.not {
				continue next
			}
		}
		w.met[[2]any{chain, i}] = true
		switch verb, to, _ := strings.Cut(r.end, " "); verb {
		case "mark":
			p.mark = 1
		case "return":
			return true
		case "jump":
			if !w.run(to, p, depth+1) {
				return false
			}
		case "goto":
			return w.run(to, p, depth+1)
		default:
			return false
		}
	}
	return true
}

func (t toyTest) exprs() []byte {
	op := uint32(uapi.NftCmpEq)
	if t.not {
		op = uapi.NftCmpNeq
	}
	switch t.what {
	case toyIif:
		return join(metaKey(uapi.NftMetaIif), cmpTo(op, word(uint32(t.value))...))
	case toyNet:
		return join(payload(uapi.NftPayloadNetworkHeader, 16, 3), cmpTo(op, 203, 0, t.value))
	case toyAddr:
		return join(payload(uapi.NftPayloadNetworkHeader, 16, 4), cmpTo(op, 203, 0, t.value, 10))
	case toyPort:
		return join(payload(uapi.NftPayloadTransportHeader, 2, 2), cmpTo(op, 0, t.value))
	case toyLuck:
		return expr("limit")
	}
	return join(metaKey(uapi.NftMetaMark), cmpTo(op, word(uint32(t.value))...))
}

func TestShadowedBruteForce(t *testing.T) {
	found := 0
	for seed := range uint64(1000) {
		rnd := rand.New(rand.NewPCG(seed, 11))
		w := &toy{chains: map[string][]toyRule{}, met: map[[2]any]bool{}}
		r := newRig(t, IPv4)
		r.base("p", uapi.NfInetPreRouting, -100, uapi.NfAccept)
		names := []string{"p", "a", "b"}
		r.chain(names[1:]...)
		for n, name := range names {
			for range 1 + rnd.IntN(5) {
				var rule toyRule
				var exprs [][]byte
				for range rnd.IntN(3) {
					x := toyTest{rnd.IntN(toyTests), byte(rnd.IntN(2)), rnd.IntN(4) == 0}
					if x.what == toyLuck {
						x.not, x.value = false, 0
					}
					rule.tests, exprs = append(rule.tests, x), append(exprs, x.exprs())
				}
				ends := []string{"dnat", "dnat", "accept", "return", "mark"}
				if n < 2 {
					ends = append(ends, "jump "+names[n+1], "goto "+names[n+1])
				}
				rule.end = ends[rnd.IntN(len(ends))]
				switch verb, to, _ := strings.Cut(rule.end, " "); verb {
				case "dnat":
					exprs = append(exprs, dnat("198.51.100.11:5353"))
				case "accept":
					exprs = append(exprs, accept())
				case "return":
					exprs = append(exprs, back())
				case "jump":
					exprs = append(exprs, jump(to))
				case "goto":
					exprs = append(exprs, goTo(to))
				}
				w.chains[name] = append(w.chains[name], rule)
				r.rule(name, exprs...)
			}
		}
		for range 1000 {
			p := toyPacket{byte(rnd.IntN(2)), byte(rnd.IntN(2)), 9 + byte(rnd.IntN(2)), byte(rnd.IntN(2)), byte(rnd.IntN(2)), rnd.Uint32()}
			w.run("p", &p, 0)
		}
		for _, pair := range pairs(r.ruleset()) {
			found++
			var chain string
			var number, by int
			if _, err := fmt.Sscanf(pair, "%s %d<%d", &chain, &number, &by); err != nil {
				t.Fatal(err)
			}
			if w.met[[2]any{chain, number}] {
				t.Fatalf("seed %d: %s, which is met: %+v", seed, pair, w.chains)
			}
		}
	}
	if found < 300 {
		t.Errorf("%d shadowed rules are too few to tell", found)
	}
}

// A long chain takes a moment, and what is written twice is found all the same.
func TestShadowedLong(t *testing.T) {
	r := newRig(t, IPv4)
	r.base("p", uapi.NfInetPreRouting, -100, uapi.NfAccept)
	rule := func(i int) {
		r.rule("p", payload(uapi.NftPayloadNetworkHeader, 16, 4), eq(203, 0, byte(i>>8), byte(i)),
			payload(uapi.NftPayloadTransportHeader, 2, 2), eq(0, 53), dnat("198.51.100.11:5353"))
	}
	const rules = 20_000
	for i := range rules {
		rule(i)
	}
	rule(7)
	if got, want := pairs(r.ruleset()), []string{fmt.Sprintf("p %d<7", rules)}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
