//go:build engines && linux

package engines

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
)

// docker plays the cases beside Docker, with its userland proxy or without.
//
// Docker deletes the flows of a container's address when it stops. What is sent until it is back
// makes a flow that is not translated, and stays so: with the proxy it is the proxy's, which answers
// from the host's first address; without, it is lost.
func docker(t *testing.T, r *report, proxy bool) {
	h := newHost(t)
	s := newStage(t, r, "Docker", h)
	s.startAgent(t)
	early := s.early(t)
	e := newDocker(t, h, fmt.Sprintf("--userland-proxy=%t", proxy), "--live-restore")
	s.engine += " " + e.do(t, nil, "version", "--format", "{{.Server.Version}}")
	if !proxy {
		s.engine += " without userland proxy"
	}

	// With the proxy, rules leave alone what comes from loopback and from containers. For the host's
	// own flows they ask for the input interface, of which the kernel's version tells what it is
	// where there is none.
	loopbacks, owns := always("plain"), func(word string) string {
		if word == "untranslated" {
			return "may-pass"
		}
		return word
	}
	if !proxy {
		loopbacks, owns = asJudged, asJudged
	}
	containers := loopbacks
	s.bystand(t, e, early, "untranslated", loopbacks, containers)

	// restarted plays the restart of a container, and repairs by hand or lets the agent do it.
	restarted := func(t *testing.T, name string, byHand bool, restart func(s *scene, move func())) {
		s.play(t, name, func(s *scene) {
			c := e.container(s, "restarted", publish("8053:5353/udp"), "serve", "5353")
			defer c.remove(s)
			outside := s.send("from outside", s.client, at(hostAddr, 8053))
			second := s.send("from outside, the second address", s.client, at(hostAddr2, 8053))
			own := s.send("from the host", s.ns, at(hostAddr, 8053))
			lo := s.send("from loopback", s.ns, at(loopback, 8053))
			inside := s.sendFrom(e, "inside", at(c.gateway, 8053))
			all := func(word string) verdicts {
				return verdicts{outside: word, second: word, own: owns(word), lo: loopbacks(word), inside: containers(word)}
			}
			s.answered(c.at(5353), outside, second, own, lo)
			s.judged(all(right(c.at(5353))))

			restart(s, func() {
				c.move(s, func() { s.sent(outside, second, own, lo, inside) })
			})
			switch {
			case !byHand:
				s.repaired(all("untranslated"))
			case proxy:
				s.answered(c.at(5353), outside, own, lo, inside)
				s.unanswered(second)
				s.swept(all("untranslated"))
			default:
				s.unanswered(outside, second, own, lo, inside)
				s.swept(all("untranslated"))
			}
			s.answered(c.at(5353), outside, second, own, lo, inside)
			after := all(right(c.at(5353)))
			if proxy {
				after[own] = "may-pass"
			}
			s.judged(after)
		})
	}
	atOnce := func(_ *scene, move func()) { move() }

	t.Run("agent", func(t *testing.T) {
		restarted(t, "restarted with another address", false, atOnce)
		restarted(t, "restarted while the agent is away", false, func(s *scene, move func()) {
			s.endAgent(s, "KILL")
			move()
			s.startAgent(s)
		})
		s.play(t, "engine restarted", func(s *scene) {
			c := e.container(s, "lives", publish("8053:5353/udp"), "serve", "5353")
			defer c.remove(s)
			outside := s.send("from outside", s.client, at(hostAddr, 8053))
			second := s.send("from outside, the second address", s.client, at(hostAddr2, 8053))
			own := s.send("from the host", s.ns, at(hostAddr, 8053))
			s.answered(c.at(5353), outside, second, own)
			s.gap = true
			lives := s.ends(outside, second, own)
			must(s, os.WriteFile(s.path("iptables.slow"), nil, 0o644))
			var meanwhile []*stream
			e.restartDocker(s, "TERM", func() {
				meanwhile = append(meanwhile, s.send("begun meanwhile", s.client, at(hostAddr2, 8053)))
			})
			must(s, os.Remove(s.path("iptables.slow")))
			s.lived(c.at(5353), lives, meanwhile)
		})
	})
	s.endAgent(t, "TERM")

	restarted(t, "restarted with another address", true, atOnce)

	s.play(t, "removed", func(s *scene) {
		c := e.container(s, "removed", publish("8053:5353/udp"), "serve", "5353")
		outside := s.send("from outside", s.client, at(hostAddr, 8053))
		own := s.send("from the host", s.ns, at(hostAddr, 8053))
		s.answered(c.at(5353), outside, own)
		c.remove(s)
		s.swept(verdicts{outside: "plain", own: "plain"})
	})

	s.play(t, "a stream before the container", func(s *scene) {
		outside := s.send("from outside", s.client, at(hostAddr, 9053))
		second := s.send("from outside, the second address", s.client, at(hostAddr2, 9053))
		s.judged(verdicts{outside: "plain", second: "plain"})
		c := e.container(s, "late", publish("9053:5353/udp"), "serve", "5353")
		defer c.remove(s)
		if proxy {
			s.answered(c.at(5353), outside)
		} else {
			s.unanswered(outside)
		}
		s.unanswered(second)
		s.swept(verdicts{outside: "untranslated", second: "untranslated"})
		s.answered(c.at(5353), outside, second)
		s.judged(verdicts{outside: right(c.at(5353)), second: right(c.at(5353))})
	})

	s.play(t, "one port on two addresses", func(s *scene) {
		one := e.container(s, "one", publish(hostAddr.String()+":7053:5353/udp"), "serve", "5353")
		defer one.remove(s)
		two := e.container(s, "two", publish(hostAddr2.String()+":7053:5353/udp"), "serve", "5353")
		defer two.remove(s)
		to1 := s.send("to the first", s.client, at(hostAddr, 7053))
		to2 := s.send("to the second", s.client, at(hostAddr2, 7053))
		s.answered(one.at(5353), to1)
		s.answered(two.at(5353), to2)
		s.judged(verdicts{to1: right(one.at(5353)), to2: right(two.at(5353))})
		ended := len(s.destroyed(s, to1))
		two.move(s, func() { s.sent(to2) })
		s.swept(verdicts{to1: right(one.at(5353)), to2: "untranslated"})
		s.answered(one.at(5353), to1)
		s.answered(two.at(5353), to2)
		s.notEnded(to1, ended)
	})

	s.play(t, "range of ports", func(s *scene) {
		c := e.container(s, "range", publish("7100-7109:6100-6109/udp"), "serve", "6100-6109")
		defer c.remove(s)
		first := s.send("to the first port", s.client, at(hostAddr, 7100))
		last := s.send("to the last port", s.client, at(hostAddr2, 7109))
		beside := s.send("beside the range", s.client, at(hostAddr, 7110))
		s.answered(c.at(6100), first)
		s.answered(c.at(6109), last)
		c.move(s, func() { s.sent(first, last) })
		s.swept(verdicts{first: "untranslated", last: "untranslated", beside: "plain"})
		s.answered(c.at(6100), first)
		s.answered(c.at(6109), last)
		s.judged(verdicts{first: right(c.at(6100)), last: right(c.at(6109)), beside: "plain"})
	})

	// Not every engine deletes flows, and this one cannot where ctnetlink is missing.
	s.play(t, "flows that were kept", func(s *scene) {
		c := e.container(s, "kept", publish("8053:5353/udp"), "serve", "5353")
		st := s.send("from outside", s.client, at(hostAddr, 8053))
		s.answered(c.at(5353), st)
		keep := func(change func()) {
			must(s, st.Close())
			was := c.at(5353)
			change()
			s.run(s, nil, "conntrack", "-I", "-p", "udp", "--timeout", "100",
				"-s", st.from.Addr().String(), "--sport", fmt.Sprint(st.from.Port()),
				"-d", st.to.Addr().String(), "--dport", fmt.Sprint(st.to.Port()), "--dst-nat", was.String())
			s.resend(st)
			s.unanswered(st)
		}
		was := c.at(5353)
		keep(func() { c.move(s) })
		s.swept(verdicts{st: "backend-gone " + was.String()})
		s.answered(c.at(5353), st)
		was = c.at(5353)
		keep(func() { c.remove(s) })
		s.swept(verdicts{st: "frontend-gone " + was.String()})
		s.judged(verdicts{st: "plain"})
	})

	s.play(t, "engine restarted", func(s *scene) {
		c := e.container(s, "lives", publish("8053:5353/udp"), "serve", "5353")
		defer c.remove(s)
		outside := s.send("from outside", s.client, at(hostAddr, 8053))
		s.answered(c.at(5353), outside)
		s.gap = true
		e.restartDocker(s, "KILL")
		s.answered(c.at(5353), outside)
		s.swept(verdicts{outside: right(c.at(5353))})
	})
}

// early starts a stream before there are rules. It will be a bystander.
func (s *stage) early(t testing.TB) *stream {
	t.Helper()
	return s.send(t, "from outside to a container that stays", s.client, at(hostAddr, 8000), bystanderPace)
}

// bystand starts a container that stays, and what sends to it and past it all the time. The flow of the
// early stream is left stale for the agent, as the word says; "" stands for an engine that deletes it.
// The functions tell what the rules say of flows from loopback and from containers, where they say so of
// others.
func (s *stage) bystand(t *testing.T, e *engine, early *stream, word string, loopbacks, containers func(string) string) {
	t.Helper()
	boot := s.scene(t, "a stream before the engine")
	boot.streams = []*stream{early}
	c := e.container(t, "stays", publish("8000:5353/udp"), "serve", "5353")
	if word == "" {
		boot.shared(verdicts{early: right(c.at(5353))})
	} else {
		boot.repaired(verdicts{early: word})
	}
	boot.answered(c.at(5353), early)
	s.bystanders[early] = right(c.at(5353))
	s.bystander(t, "from the host to a container that stays", s.ns, at(hostAddr, 8000), right(c.at(5353)))
	s.bystander(t, "from loopback to a container that stays", s.ns, at(loopback, 8000), loopbacks(right(c.at(5353))))
	s.listen(t, s.ns, at(hostAddr, 7))
	s.bystander(t, "to the host itself", s.client, at(hostAddr, 7), "plain")
	s.listen(t, s.client, at(clientAddr, 7))
	for name, to := range map[string]netip.AddrPort{"to-stays": at(c.gateway, 8000), "out": at(clientAddr, 7)} {
		st := s.sendInside(t, e, name, to)
		s.bystanders[st] = "plain" // the source's translation does not count
		if to.Port() == 8000 {
			s.bystanders[st] = containers(right(c.at(5353)))
		}
	}
}

func at(addr netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr, port) }

func right(to netip.AddrPort) string { return "right " + to.String() }

func asJudged(word string) string { return word }

func always(word string) func(string) string { return func(string) string { return word } }
