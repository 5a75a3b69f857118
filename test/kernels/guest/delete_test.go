//go:build linux

package guest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/uapi"
)

// named is how a delete names the flow that it means. Zone 0 is not told to the kernel.
type named struct {
	reply conntrack.Tuple
	zone  uint16
	id    uint32
}

// delete sends one delete, for f, and returns what the kernel did: "deleted", or its error. Where that
// is not what happened to f, it says so.
func (s *socket) delete(t *testing.T, c *conntrack.Conn, f conntrack.Flow, as named) string {
	t.Helper()
	var code unix.Errno
	msg := remove(f.Family, f.Proto, as, 1, uapi.FAck)
	err := s.answer(msg, 1, func(typ uint16, _ uint32, payload []byte) { code = errno(typ, payload) })
	if err != nil {
		t.Fatal(err)
	}
	_, there, err := c.Get(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case code == 0 && !there:
		return "deleted"
	case code == 0:
		return "said to be deleted, but there"
	case there:
		return unix.ErrnoName(code)
	}
	return unix.ErrnoName(code) + ", but gone"
}

// A delete by reply tuple, zone and id hits the flow that has all three and no other. The requests are
// made here, byte by byte, so that this says what the kernel does and not what conntrack asks for.
func TestDeletes(t *testing.T) {
	for _, tc := range []struct {
		name  string
		zone  uint16 // of the flow
		spoil func(*named, conntrack.Flow)
		want  string
	}{
		{"reply tuple and id", 0, func(*named, conntrack.Flow) {}, "deleted"},
		{"another id", 0, func(n *named, _ conntrack.Flow) { n.id ^= 1 }, "ENOENT"},
		{"another reply source", 0, func(n *named, _ conntrack.Flow) { n.reply.Src = n.reply.Src.Next() }, "ENOENT"},
		{"another reply source port", 0, func(n *named, _ conntrack.Flow) { n.reply.SrcPort++ }, "ENOENT"},
		{"reply tuple, zone and id", 7, func(*named, conntrack.Flow) {}, "deleted"},
		{"another zone", 7, func(n *named, _ conntrack.Flow) { n.zone = 8 }, "ENOENT"},
		{"no zone, for a flow in one", 7, func(n *named, _ conntrack.Flow) { n.zone = 0 }, "ENOENT"},
		{"a zone, for a flow in none", 0, func(n *named, _ conntrack.Flow) { n.zone = 7 }, "ENOENT"},
		// A flow is in the hash table by both of its tuples (nf_conntrack_find_get), whichever attribute
		// the tuple stands in.
		{"the original tuple in its place", 0, func(n *named, f conntrack.Flow) { n.reply = f.Orig }, "deleted"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, s := dial(t)
			found := map[conntrack.Family]string{}
			for _, fam := range families {
				for i, proto := range []uint8{conntrack.UDP, conntrack.TCP, conntrack.SCTP} {
					f := flow(fam, proto, i+1)
					f.Zone = tc.zone
					create(t, c, f)
					now, ok, err := c.Get(t.Context(), f)
					if err != nil || !ok {
						t.Fatalf("%s: %v, %v", &f, ok, err)
					}
					as := named{now.Reply, now.Zone, now.ID}
					tc.spoil(&as, now)
					got := s.delete(t, c, now, as)
					if got != tc.want {
						t.Errorf("%s, want %s: %s", got, tc.want, &now)
					}
					if i == 0 {
						found[fam] = got
					} else if found[fam] != got {
						found[fam] += ", " + conntrack.ProtoName(proto) + " " + got
					}
				}
			}
			attr(t, found)
		})
	}
	t.Run("a predecessor's reply tuple and id", func(t *testing.T) {
		successor(t, func(f conntrack.Flow) conntrack.Tuple { return f.Reply }, true)
	})
	t.Run("a predecessor's original tuple and id", func(t *testing.T) {
		successor(t, func(f conntrack.Flow) conntrack.Tuple { return f.Orig }, false)
	})
	t.Run("256 in a batch, 3 of them with another id", batch)
}

// successor has a flow deleted and come back with another translation, at the same place in memory, and
// then sends a delete that was meant for its predecessor. It reports whether any was hit, and fails if
// it must not be.
func successor(t *testing.T, by func(conntrack.Flow) conntrack.Tuple, mustStay bool) {
	c, s := dial(t)
	found := map[conntrack.Family]string{}
	for _, fam := range families {
		found[fam] = "ENOENT"
		for n := range 100 {
			stale := flow(fam, conntrack.UDP, n+1)
			create(t, c, stale)
			was, _, err := c.Get(t.Context(), stale)
			if err != nil {
				t.Fatal(err)
			}
			if res, err := c.Delete(t.Context(), was); err != nil || res.Deleted != 1 {
				t.Fatalf("%+v, %v", res, err)
			}
			right := stale
			right.Reply.Src = right.Reply.Src.Next()
			create(t, c, right)
			if got := s.delete(t, c, right, named{by(was), 0, was.ID}); got != "ENOENT" {
				found[fam] = got
			}
		}
		if mustStay && found[fam] != "ENOENT" {
			t.Errorf("%s: a successor was hit: %s", fam, found[fam])
		}
	}
	attr(t, found)
}

// batch asks for one acknowledgement, at the end: each request that fails is answered by its own
// number, and the others are carried out.
func batch(t *testing.T) {
	const n = 256
	wrong := map[int]bool{0: true, n / 2: true, n - 2: true}
	found := map[conntrack.Family]string{}
	for _, fam := range families {
		c, s := dial(t)
		var requests []byte
		for i := range n {
			f := flow(fam, conntrack.UDP, i+1)
			create(t, c, f)
			now, ok, err := c.Get(t.Context(), f)
			if err != nil || !ok {
				t.Fatalf("%s: %v, %v", &f, ok, err)
			}
			as, flags := named{now.Reply, 0, now.ID}, uint16(0)
			if wrong[i] {
				as.id ^= 1
			}
			if i == n-1 {
				flags = uapi.FAck
			}
			requests = append(requests, remove(fam, f.Proto, as, uint32(i+1), flags)...)
		}
		failed := map[int]unix.Errno{}
		err := s.answer(requests, n, func(typ uint16, seq uint32, payload []byte) {
			if code := errno(typ, payload); code != 0 {
				failed[int(seq)-1] = code
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, code := range failed {
			if !wrong[i] || code != unix.ENOENT {
				t.Errorf("%s: request %d: %v", fam, i, code)
			}
		}
		left, err := c.List(t.Context(), conntrack.Filter{})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range left {
			if !wrong[int(f.Orig.SrcPort)-1] {
				t.Errorf("not deleted: %s", &f)
			}
		}
		if len(left) != len(wrong) || len(failed) != len(wrong) {
			t.Errorf("%s: %d left, %d refused, want %d", fam, len(left), len(failed), len(wrong))
		}
		found[fam] = fmt.Sprintf("%d deleted, %d ENOENT", n-len(left), len(failed))
	}
	attr(t, found)
}
