// Package host is the source of this host's own addresses, followed over
// rtnetlink as they come and go: node ports, host ports and frontends of every
// address are judged by them. It knows no frontends.
//
// A change seen on the kernel's multicast groups says only that the addresses
// are to be read again: what counts is always a whole dump. So a lost message
// costs nothing, and order does not matter.
package host

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

// Config says which addresses count as this host's. The zero Config takes all
// that the calling thread's network namespace has.
type Config struct {
	// NetNS is the network namespace to follow, as a path. Empty: that of the
	// thread that Run opens its sockets on. Entering another one needs
	// CAP_SYS_ADMIN; otherwise no privilege is needed.
	NetNS string
	// Include, unless empty, leaves out the addresses that are in none of its
	// prefixes, Exclude those that are in one of its own.
	Include, Exclude []netip.Prefix
	// Addresses count too, whether an interface has them or not, and whatever
	// Include and Exclude say: those that a load balancer in front of the host
	// translates to, say.
	Addresses []netip.Addr
}

// Times of a Source. Tests shorten them.
type times struct {
	// settle is how long a change waits for others before the addresses are
	// read: an address that moves is a deletion and an addition.
	settle time.Duration
	// resync is the longest time between two reads. With the next one it is found
	// out that a socket is gone.
	resync time.Duration
	// retry is the wait after a first failure; it doubles up to retryMax.
	retry, retryMax time.Duration
}

// Source is a [source.Source] named "host".
type Source struct {
	netns string
	times times
	// rcvbuf is the receive buffer of the socket that changes come on, in bytes;
	// 0 is the system's.
	rcvbuf int

	mu      sync.Mutex
	counts  selection
	updated chan struct{} // holds one token: counts has changed
}

var _ source.Source = (*Source)(nil)

// New returns a source that [Source.Run] starts.
func New(cfg Config) *Source {
	return &Source{
		netns: cfg.NetNS,
		times: times{
			settle: 50 * time.Millisecond, resync: time.Minute,
			retry: 100 * time.Millisecond, retryMax: 30 * time.Second,
		},
		counts:  newSelection(cfg.Include, cfg.Exclude, cfg.Addresses),
		updated: make(chan struct{}, 1),
	}
}

// Name returns "host".
func (*Source) Name() string { return "host" }

// Update replaces what [New] was told of include, exclude and addresses. A
// running source delivers the outcome at once.
func (s *Source) Update(include, exclude []netip.Prefix, addresses []netip.Addr) {
	sel := newSelection(include, exclude, addresses)
	s.mu.Lock()
	s.counts = sel
	s.mu.Unlock()
	select {
	case s.updated <- struct{}{}:
	default: // one is on its way
	}
}

func (s *Source) selection() selection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts
}

// selection is the part of a Config that may change while the source runs.
type selection struct {
	include, exclude []netip.Prefix
	fixed            []netip.Addr
}

func newSelection(include, exclude []netip.Prefix, fixed []netip.Addr) selection {
	sel := selection{slices.Clone(include), slices.Clone(exclude), nil}
	for _, a := range fixed {
		sel.fixed = append(sel.fixed, a.Unmap().WithZone(""))
	}
	return sel
}

// of returns the addresses that count, sorted and each once.
func (sel *selection) of(own []netip.Addr) []netip.Addr {
	list := slices.Clone(sel.fixed)
	for _, a := range own {
		if (len(sel.include) == 0 || in(sel.include, a)) && !in(sel.exclude, a) {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}

func in(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// delivery is what a sink has been told by one Run.
type delivery struct {
	s    *Source
	sink source.Sink

	known bool // own is what the kernel said last
	own   []netip.Addr

	sent   []netip.Addr
	began  bool
	faulty bool
}

// hold takes what the kernel says now.
func (d *delivery) hold(own []netip.Addr) {
	d.known, d.own = true, own
	d.deliver()
	if d.faulty {
		d.faulty = false
		d.sink.Fault(nil)
	}
}

// deliver tells the sink if anything has changed for it.
func (d *delivery) deliver() {
	if !d.known {
		return
	}
	sel := d.s.selection()
	list := sel.of(d.own)
	if d.began && slices.Equal(list, d.sent) {
		return
	}
	d.began, d.sent = true, list
	d.sink.Host(source.Host{Other: slices.Clone(list)}) // which is the sink's from now on
}

func (d *delivery) fault(err error) {
	d.faulty = true
	d.sink.Fault(err)
}

// pause returns how long a change waits for others: never so short that reading
// takes more than a tenth of a core, on a host with very many addresses.
func (t times) pause(cost time.Duration) time.Duration { return max(t.settle, 10*cost) }

// backoff returns the wait after a number of failures in a row, of which the
// last half is by chance, so that many hosts do not do the same at once.
func (t times) backoff(failures int, chance float64) time.Duration {
	wait := min(t.retry<<min(failures-1, 20), t.retryMax)
	return wait/2 + time.Duration(chance*float64(wait/2))
}
