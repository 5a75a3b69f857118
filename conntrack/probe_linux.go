package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// known holds what conclusive probes have found. The running kernel is the same
// for all Conns of the process.
var known struct {
	sync.Mutex
	Features
}

// usable returns the features to dump with, probing for them once, and only
// where the filter asks for more than a family.
func (c *Conn) usable(ctx context.Context, f *Filter) (Features, error) {
	if f.Proto == 0 && !f.OrigDst.IsValid() && !f.ReplySrc.IsValid() &&
		f.Set|f.Clear == 0 && f.Zone == nil {
		return Features{}, nil
	}
	if f.Family == 0 {
		return c.Probe(ctx, IPv4) // for status and zone
	}
	return c.Probe(ctx, f.Family)
}

// Probe finds out which filters this kernel honours, since a version number
// does not tell: kernels ignore attributes they do not know, and most compare
// IPv6 addresses wrongly. With families given, only what can be used for those
// is asked; without, everything. A conclusive answer holds for the life of the
// process.
//
// It asks a scratch network namespace with a handful of flows where this
// process may make one (CAP_SYS_ADMIN), and else queries the live table, by a
// flow that is in it, changing nothing. There an empty table leaves Unknown,
// which is asked again the next time.
//
// Each query is a walk of the hash table, which all namespaces of the host
// share. In a scratch namespace it takes one for IPv4 and one or two for IPv6,
// in the live table two for each field of [Features].
func (c *Conn) Probe(ctx context.Context, families ...Family) (Features, error) {
	if c.features != nil {
		return *c.features, nil
	}
	everything := len(families) == 0
	if everything {
		families = []Family{IPv4, IPv6}
	}
	known.Lock()
	defer known.Unlock()
	found := known.Features
	for _, fam := range families {
		if found.conclusive(fam) && (!everything || found.family(fam).SCTPPorts != Unknown) {
			continue
		}
		f := found
		err := probeScratch(ctx, fam, everything, &f)
		if err != nil && ctx.Err() == nil {
			// Not permitted, or no such namespace to be had: ask the live table.
			f = found
			err = c.probeLive(ctx, fam, &f)
		}
		if err != nil {
			return Features{}, asOpError("probe", err)
		}
		found = f
		if f.conclusive(fam) {
			known.Features = f
		}
	}
	return found, nil
}

func (f *Features) conclusive(fam Family) bool {
	ff := f.family(fam)
	return ff.Proto != Unknown && ff.Addr != Unknown && ff.Ports != Unknown &&
		f.Status != Unknown && f.Zone != Unknown
}

// criterion is one part of a filter that a kernel may honour or not.
type criterion struct {
	found func(*Features) *Support
	// narrow makes the filter ask for what the flow has.
	narrow func(f *Filter, want *Flow)
	// spoil changes the flow in just this respect.
	spoil func(*Flow)
}

// The order matters: a later criterion may rest on an earlier one.
func criteria(fam Family) []criterion {
	ff := func(f *Features) *FamilyFeatures { return f.family(fam) }
	return []criterion{
		{
			func(f *Features) *Support { return &ff(f).Proto },
			func(q *Filter, w *Flow) { q.Proto = w.Proto },
			func(f *Flow) {
				f.Proto = UDP + TCP - f.Proto
				f.State = 1
			},
		},
		{
			func(f *Features) *Support { return &ff(f).Addr },
			func(q *Filter, w *Flow) { q.OrigDst, q.ReplySrc = w.Orig.Dst, w.Reply.Src },
			func(f *Flow) { f.Orig.Dst, f.Reply.Src = f.Orig.Dst.Prev(), f.Reply.Src.Prev() },
		},
		{
			func(f *Features) *Support { return &ff(f).Ports },
			func(q *Filter, w *Flow) {
				q.Proto, q.OrigDstPort, q.ReplySrcPort = w.Proto, w.Orig.DstPort, w.Reply.SrcPort
			},
			func(f *Flow) { f.Orig.DstPort ^= 0x55; f.Reply.SrcPort ^= 0x55 },
		},
		{
			func(f *Features) *Support { return &f.Status },
			func(q *Filter, w *Flow) {
				q.Set, q.Clear = w.Status&StatusSeenReply, ^w.Status&(StatusSeenReply|StatusAssured)
			},
			func(f *Flow) { f.Status ^= StatusSeenReply },
		},
		{
			func(f *Features) *Support { return &f.Zone },
			func(q *Filter, w *Flow) { q.Zone = &w.Zone },
			func(f *Flow) { f.Zone ^= 1 },
		},
	}
}

// answer sends a filter to the kernel, unprotected by Match, and tells for each
// of the flows whether the kernel returned it.
func (c *Conn) answer(ctx context.Context, q Filter, flows ...Flow) ([]bool, error) {
	seen := make([]bool, len(flows))
	family := Filter{Family: q.Family}
	_, err := c.walkAs(ctx, &q, &family, trusting(), func(f *Flow, err error) bool {
		for i := range flows {
			if f.Orig == flows[i].Orig && f.Proto == flows[i].Proto && f.Zone == flows[i].Zone {
				seen[i] = true
			}
		}
		return true
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return seen, nil // a kernel that refuses the filter does not honour it
	}
	return seen, err
}

// probeScratch probes in a network namespace of its own, which nobody else sees
// and which is gone with the thread that made it.
func probeScratch(ctx context.Context, fam Family, sctp bool, f *Features) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked: the runtime ends the thread with this goroutine, and
		// the namespace with it.
		runtime.LockOSThread()
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return
		}
		var c *Conn
		if c, err = Dial(Config{Features: &Features{}}); err != nil {
			return
		}
		defer c.Close()
		err = c.probeFilters(ctx, fam, f)
		if err == nil && sctp {
			err = c.probeSCTP(ctx, fam, f)
		}
	}()
	<-done
	return err
}

// scratchFlow has something of every criterion. Its addresses are asymmetric in
// every byte that a comparison could mistake.
func scratchFlow(fam Family) Flow {
	ip := func(n byte) netip.Addr {
		if fam == IPv4 {
			return netip.AddrFrom4([4]byte{192, 0, 2, n})
		}
		return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: n})
	}
	return Flow{
		Family: fam, Proto: UDP, Timeout: 600, Status: StatusSeenReply, Zone: 6,
		Orig:  Tuple{Src: ip(1), Dst: ip(2), SrcPort: 1001, DstPort: 1002},
		Reply: Tuple{Src: ip(4), Dst: ip(1), SrcPort: 1003, DstPort: 1001},
	}
}

// probeFilters makes one flow that a filter with everything fits, and one for
// each criterion that lacks just that. A flow of those that is returned shows
// its criterion ignored; the first one missing shows that some criterion hides
// what matches. Addresses are the known culprit, so they are left out next.
func (c *Conn) probeFilters(ctx context.Context, fam Family, f *Features) error {
	want := scratchFlow(fam)
	crit := criteria(fam)
	flows := []Flow{want}
	for i, k := range crit {
		v := want
		v.Orig.SrcPort += uint16(i + 1) // the kernel takes a tuple once only
		v.Reply.DstPort += uint16(i + 1)
		k.spoil(&v)
		flows = append(flows, v)
	}
	for _, fl := range flows {
		if err := c.Create(ctx, fl); err != nil {
			return err
		}
	}
	try := func(with []criterion) ([]bool, error) {
		q := Filter{Family: fam}
		for _, k := range with {
			k.narrow(&q, &want)
		}
		return c.answer(ctx, q, flows...)
	}
	seen, err := try(crit)
	if err != nil {
		return err
	}
	addr := f.family(fam)
	var unaddressed []criterion
	for _, k := range crit {
		if k.found(f) != &addr.Addr {
			unaddressed = append(unaddressed, k)
		}
	}
	if !seen[0] {
		if seen, err = try(unaddressed); err != nil {
			return err
		}
		for i, k := range crit { // not asked for, so not to be held against it
			if k.found(f) == &addr.Addr {
				seen[i+1] = true
			}
		}
	}
	for i, k := range crit {
		if seen[0] {
			*k.found(f) = support(!seen[i+1])
			continue
		}
		alone, err := try([]criterion{k})
		if err != nil {
			return err
		}
		*k.found(f) = support(alone[0] && !alone[i+1])
	}
	return nil
}

func (c *Conn) probeSCTP(ctx context.Context, fam Family, f *Features) error {
	want := scratchFlow(fam)
	want.Proto, want.State = SCTP, 4
	other := want
	other.Orig.SrcPort, other.Reply.DstPort = 2001, 2001
	other.Orig.DstPort ^= 0x55
	for _, fl := range []Flow{want, other} {
		if err := c.Create(ctx, fl); errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
			return nil // a kernel that does not track SCTP: Unknown
		} else if err != nil {
			return err
		}
	}
	q := Filter{Family: fam, Proto: SCTP, OrigDstPort: want.Orig.DstPort}
	seen, err := c.answer(ctx, q, want, other)
	f.family(fam).SCTPPorts = support(seen[0] && !seen[1])
	return err
}

func support(yes bool) Support {
	if yes {
		return Honoured
	}
	return NotHonoured
}

// probeLive asks the live table about a flow that is in it: a filter that fits
// the flow must return it, a filter that is spoilt in one respect must not.
func (c *Conn) probeLive(ctx context.Context, fam Family, f *Features) error {
	want, ok, err := c.sample(ctx, fam)
	if err != nil || !ok {
		return err
	}
	for _, k := range criteria(fam) {
		s := k.found(f)
		if *s != Unknown { // status and zone do not depend on the family
			continue
		}
		fits, spoilt := Filter{Family: fam}, Filter{Family: fam}
		other := want
		k.spoil(&other)
		k.narrow(&fits, &want)
		k.narrow(&spoilt, &other)
		hit, err := c.answer(ctx, fits, want)
		if err != nil {
			return err
		}
		miss, err := c.answer(ctx, spoilt, want)
		if err != nil {
			return err
		}
		now, there, err := c.Get(ctx, want)
		if err != nil {
			return err
		}
		if there && now.ID == want.ID && now.Status == want.Status {
			*s = support(hit[0] && !miss[0])
		}
	}
	return nil
}

// sample returns a TCP or UDP flow from the first messages of a dump. One with
// a long life ahead is preferred.
func (c *Conn) sample(ctx context.Context, fam Family) (best Flow, ok bool, err error) {
	seen := 0
	q := Filter{Family: fam}
	_, err = c.walk(ctx, &q, Features{}, func(fl *Flow, err error) bool {
		if (fl.Proto == UDP || fl.Proto == TCP) && (!ok || fl.Timeout > best.Timeout) {
			best, ok = *fl, true
		}
		seen++
		return seen < 1000
	})
	return best, ok, err
}
