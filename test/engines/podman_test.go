//go:build engines && linux

package engines

import (
	"testing"
	"time"
)

// podman plays the cases beside Podman with a network backend.
//
// netavark deletes no flow. CNI's portmap deletes those to the ports that a new container publishes,
// and none when one goes.
func podman(t *testing.T, r *report, backend string) {
	h := newHost(t)
	s := newStage(t, r, "Podman", h)
	s.startAgent(t)
	early := s.early(t)
	e := newPodman(t, h, backend)
	cni := backend == "cni"
	s.engine += " " + e.do(t, nil, "version", "--format", "{{.Client.Version}}") + " with " + backend
	e.squat(t) // makes the bridge
	// A bridge's link-layer address is the lowest of its ports'. When that port goes, containers that
	// know the address lose what they send, until they have asked anew.
	bridge := "podman0"
	if cni {
		bridge = "cni-podman0"
	}
	h.run(t, nil, "ip", "link", "set", bridge, "address", "02:00:00:00:00:01")
	late := "untranslated"
	if cni {
		late = ""
	}
	s.bystand(t, e, early, late, asJudged, asJudged)

	// after is what a new container finds of flows that went to the one before.
	after := func(now, before string) string {
		if cni {
			return "right " + now
		}
		return "backend-gone " + before
	}

	// replaced plays that another container takes a name, and repairs by hand or lets the agent do it.
	replaced := func(t *testing.T, name string, byHand bool, replace func(s *scene, anew func())) {
		s.play(t, name, func(s *scene) {
			ports := publish("8053:5353/udp", "7100-7109:6100-6109/udp")
			serve := []string{"serve", "5353", "6100-6109"}
			c := e.container(s, "replaced", ports, serve...)
			outside := s.send("from outside", s.client, at(hostAddr, 8053))
			second := s.send("from outside, the second address", s.client, at(hostAddr2, 8053))
			ranged := s.send("from outside, in the range", s.client, at(hostAddr, 7104))
			own := s.send("from the host", s.ns, at(hostAddr, 8053))
			lo := s.send("from loopback, in the range", s.ns, at(loopback, 7109))
			inside := s.sendFrom(e, "inside", at(c.gateway, 8053))
			answered := func() {
				s.answered(c.at(5353), outside, second, own, inside)
				s.answered(c.at(6104), ranged)
				s.answered(c.at(6109), lo)
				s.judged(verdicts{
					outside: right(c.at(5353)), second: right(c.at(5353)), own: right(c.at(5353)), inside: right(c.at(5353)),
					ranged: right(c.at(6104)), lo: right(c.at(6109)),
				})
			}
			answered()

			was := *c
			defer func() { c.remove(s) }()
			replace(s, func() {
				c.remove(s)
				e.squat(s)
				c = e.container(s, "replaced", ports, serve...)
			})
			if c.addr == was.addr {
				s.Fatalf("the container got its address %s again: this proves nothing", c.addr)
			}
			if byHand && !cni {
				s.unanswered(outside, second, own, ranged, lo, inside)
			}
			first, middle, last := after(c.at(5353).String(), was.at(5353).String()),
				after(c.at(6104).String(), was.at(6104).String()), after(c.at(6109).String(), was.at(6109).String())
			left := verdicts{outside: first, second: first, own: first, inside: first, ranged: middle, lo: last}
			switch {
			case byHand:
				s.swept(left)
			case cni:
				s.shared(left)
			default:
				s.repaired(left)
			}
			answered()
		})
	}
	atOnce := func(_ *scene, anew func()) { anew() }

	t.Run("agent", func(t *testing.T) {
		replaced(t, "replaced", false, atOnce)
		replaced(t, "replaced while the agent is away", false, func(s *scene, anew func()) {
			s.endAgent(s, "KILL")
			anew()
			s.startAgent(s)
		})
		if cni {
			return
		}
		s.play(t, "removed while the agent is away", func(s *scene) {
			c := e.container(s, "removed", publish("8053:5353/udp"), "serve", "5353")
			outside := s.send("from outside", s.client, at(hostAddr, 8053))
			own := s.send("from the host", s.ns, at(hostAddr, 8053))
			s.answered(c.at(5353), outside, own)
			s.endAgent(s, "TERM")
			c.remove(s)
			s.startAgent(s)
			s.gone(verdicts{outside: "frontend-gone", own: "frontend-gone"})
			s.judged(verdicts{outside: "plain", own: "plain"})
		})
		s.play(t, "rules flushed and reloaded", func(s *scene) {
			c := e.container(s, "lives", publish("8053:5353/udp"), "serve", "5353")
			defer c.remove(s)
			outside := s.send("from outside", s.client, at(hostAddr, 8053))
			second := s.send("from outside, the second address", s.client, at(hostAddr2, 8053))
			s.answered(c.at(5353), outside, second)
			s.gap = true
			lives := s.ends(outside, second)
			s.run(s, nil, "iptables-nft", "-t", "nat", "-F")
			in := s.send("begun meanwhile", s.client, at(hostAddr, 8053))
			s.sent(in)
			time.Sleep(2 * time.Second) // in which the agent has seen that no rules are left
			e.do(s, nil, "network", "reload", "--all")
			s.lived(c.at(5353), lives, []*stream{in})
		})
	})
	s.endAgent(t, "TERM")

	replaced(t, "replaced", true, atOnce)

	s.play(t, "removed", func(s *scene) {
		c := e.container(s, "removed", publish("8053:5353/udp"), "serve", "5353")
		outside := s.send("from outside", s.client, at(hostAddr, 8053))
		own := s.send("from the host", s.ns, at(hostAddr, 8053))
		lo := s.send("from loopback", s.ns, at(loopback, 8053))
		s.answered(c.at(5353), outside, own, lo)
		c.remove(s)
		gone := "frontend-gone " + c.at(5353).String()
		s.swept(verdicts{outside: gone, own: gone, lo: gone})
		s.judged(verdicts{outside: "plain", own: "plain", lo: "plain"})
	})

	s.play(t, "a stream before the container", func(s *scene) {
		outside := s.send("from outside", s.client, at(hostAddr, 9053))
		own := s.send("from the host", s.ns, at(hostAddr, 9053))
		s.judged(verdicts{outside: "plain", own: "plain"})
		c := e.container(s, "late", publish("9053:5353/udp"), "serve", "5353")
		defer c.remove(s)
		if cni {
			s.swept(verdicts{outside: right(c.at(5353)), own: right(c.at(5353))})
		} else {
			s.unanswered(outside, own)
			s.swept(verdicts{outside: "untranslated", own: "untranslated"})
		}
		s.answered(c.at(5353), outside, own)
		s.judged(verdicts{outside: right(c.at(5353)), own: right(c.at(5353))})
	})

	s.play(t, "another offset of a range", func(s *scene) {
		// The address stays, so that the port alone tells. The host still knows its link-layer address.
		const ip, mac = "10.88.0.200", "02:00:00:00:00:c8"
		run := func(name, ports string) *container {
			return e.container(s, name, append(publish(ports), "--ip", ip, "--mac-address", mac), "serve", "6200-6219")
		}
		c := run("offset-0", "7200-7209:6200-6209/udp")
		first := s.send("to the first port", s.client, at(hostAddr, 7200))
		last := s.send("to the last port", s.client, at(hostAddr, 7209))
		s.answered(c.at(6200), first)
		s.answered(c.at(6209), last)
		s.judged(verdicts{first: right(c.at(6200)), last: right(c.at(6209))})
		c.remove(s)
		c = run("offset-10", "7200-7209:6210-6219/udp")
		defer c.remove(s)
		s.swept(verdicts{
			first: after(c.at(6210).String(), c.at(6200).String()), last: after(c.at(6219).String(), c.at(6209).String()),
		})
		s.answered(c.at(6210), first)
		s.answered(c.at(6219), last)
		s.judged(verdicts{first: right(c.at(6210)), last: right(c.at(6219))})
	})
}
