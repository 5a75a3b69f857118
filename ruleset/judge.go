package ruleset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Verdict is what the rules say of a flow.
type Verdict uint8

// The verdicts; beside each, what a sweep does with the flow.
const (
	NotJudged         Verdict = iota // ignore: not a protocol with ports
	OtherZone                        // ignore: not the default conntrack zone
	Expected                         // ignore: a helper announced it, and no rule translated it
	Plain                            // ignore: untranslated, and no rule would translate it
	Right                            // keep: as a rule may have left it
	MayPass                          // keep: untranslated, and rules may translate it or not
	Unpredictable                    // keep: anything is possible, or nothing is known now
	UnknownTranslator                // keep: translated, though no rule would; by whom is not known
	BackendGone                      // delete: translated as no rule would, though rules translate it
	Untranslated                     // delete: untranslated, though rules would translate it
	FrontendGone                     // delete: translated by a rule that is gone
)

var verdictNames = [...]string{
	"not-judged", "zone", "expected", "plain", "right", "may-pass", "unpredictable", "unknown-translator",
	"backend-gone", "untranslated", "frontend-gone",
}

// String returns the verdict's word.
func (v Verdict) String() string { return verdictNames[v] }

// Stale tells whether the flow should be deleted.
func (v Verdict) Stale() bool { return v >= BackendGone }

// Judgement is the judgement of one flow.
type Judgement struct {
	Verdict Verdict
	// By is a rule that translates the flow's destination now, or the one that is
	// not understood; the zero Rule where there is none.
	By Rule
	// Why says what keeps the flow from being judged, for Unpredictable and
	// UnknownTranslator.
	Why string
}

// Destination is where flows are sent.
type Destination struct {
	Proto uint8
	Addr  netip.AddrPort
}

// Config says what a Judge works on. The zero Config is right for the namespace
// of the calling thread.
type Config struct {
	// NetNS is a network namespace, as a path (/run/netns/NAME). Empty: the one
	// that the calling thread is in. Entering another one needs CAP_SYS_ADMIN.
	NetNS string
	// Host is to be asked for addresses and routes; nil: a NetHost of the
	// namespace. The Judge does not close it.
	Host Host
	// Seen are destinations for which there were rules earlier, as [Judge.Seen]
	// told them: their flows are known to have been translated by rules.
	Seen []Destination
	// Translators tells what else may translate; nil: [Others] of the namespace.
	Translators func() Translators
}

const (
	// othersShare bounds the looks for other translators, while stale flows are
	// found, to so much of the time: they take 60 µs, or 120 µs in another
	// namespace. Before flows are deleted, Confirm looks in any case.
	othersShare = 20

	maxMemo = 1 << 16 // outcomes remembered by destination, and as many by source
	maxSeen = 1 << 16
	// maxMemoTargets bounds the translations in all remembered outcomes: 32 MB.
	maxMemoTargets = 1 << 20
)

// Judge judges flows by the rules of one generation, until [Judge.Reload]. A flow
// is called stale only while that generation is the present one, which is asked
// for at that moment. Who deletes flows for it asks [Judge.Confirm] first. It is
// safe for concurrent use; only one flow is judged at a time.
type Judge struct {
	cfg     Config
	conn    *Conn
	host    Host
	netHost *NetHost // to be closed
	older   older    // kept, so that judging allocates nothing

	mu       sync.Mutex
	rules    *Ruleset
	epoch    uint64
	stale    bool
	err      error // of the last reload, or why the rules are stale
	others   Translators
	othersAt time.Time // they are looked for again
	doubts   string    // of flows that no rule translates, if others may
	memo     memo
	seen     map[memoKey]struct{}
}

// view is how much of a host's answers an outcome goes by.
type view uint8

const (
	viewLikely  view = iota // all: so most packets meet the rules
	viewCertain             // what is true of every packet
	viewEither              // that, but the packet may be another host's or this one's
	viewOlder               // that, but the interface is the likely one
	viewAny                 // none: any hook, any interface, any type of address
)

// memoKey is what every outcome depends on.
type memoKey struct {
	dst    [16]byte
	port   uint16
	proto  uint8
	v4     bool
	origin Origin
	view   view
}

// whyKey is what a guess is doubted for.
type whyKey struct {
	memoKey
	to netip.AddrPort
}

// sourceKey is that and what some outcomes depend on besides; the rest is zero.
type sourceKey struct {
	memoKey
	src   [16]byte
	sport uint16
	in    uint32 // Interfaces.ID
}

type memoEntry struct {
	deps deps     // what has to be looked up by sourceKey
	out  *Outcome // nil if deps is not 0
	// until is when a packet is tried again that there was no time for.
	until time.Time
}

// busyFor is how long that takes.
const busyFor = 5 * time.Second

type memo struct {
	byDst   map[memoKey]memoEntry
	bySrc   map[sourceKey]*Outcome
	why     map[whyKey]string
	targets int
}

// plain is the outcome of most flows.
var plain = &Outcome{Untranslated: true}

// NewJudge reads the rules of a namespace. Where the kernel has no nf_tables, no
// rule translates anything.
func NewJudge(ctx context.Context, cfg Config) (*Judge, error) {
	j := &Judge{cfg: cfg, host: cfg.Host, seen: map[memoKey]struct{}{}}
	if j.cfg.Translators == nil {
		j.cfg.Translators = func() Translators { return Others(cfg.NetNS) }
	}
	var err error
	if j.conn, err = Open(cfg.NetNS); err != nil {
		return nil, err
	}
	if j.host == nil {
		if j.netHost, err = OpenHost(cfg.NetNS); err != nil {
			return nil, errors.Join(err, j.Close())
		}
		j.host = j.netHost
	}
	for _, d := range cfg.Seen {
		if len(j.seen) < maxSeen {
			j.seen[seenKey(d.Proto, d.Addr)] = struct{}{}
		}
	}
	if _, err := j.Reload(ctx); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

// Close frees the sockets. Afterwards every flow is Unpredictable.
func (j *Judge) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stale, j.err = true, errors.New("the judge is closed")
	err := j.conn.Close()
	if j.netHost != nil {
		err = errors.Join(err, j.netHost.Close())
	}
	return err
}

// Reload reads the rules anew if their generation has moved, and tells what that
// makes suspect. On an error, every flow is Unpredictable until it succeeds.
func (j *Judge) Reload(ctx context.Context) (Change, error) {
	j.lookForOthers()
	gen, err := j.conn.Generation()
	j.mu.Lock()
	old, stale := j.rules, j.stale
	j.mu.Unlock()
	if err == nil && old != nil && !stale && old.gen == gen {
		return Change{}, nil
	}
	var rules *Ruleset
	if err == nil {
		rules, err = j.conn.Load(ctx)
	}
	if errors.Is(err, ErrNoNFT) {
		rules, err = &Ruleset{conn: j.conn, model: newModel(), effort: j.conn.effort}, nil
		rules.eval = eval{m: rules.model, fetch: rules.fetch}
	}
	var change Change
	if err == nil && old != nil {
		change = rules.since(ctx, old)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.stale, j.err = true, err
		return Change{}, err
	}
	j.remember()
	j.rules, j.stale, j.err = rules, false, nil
	j.memo = memo{}
	return change, nil
}

// remember notes the destinations that rules have translated so far.
func (j *Judge) remember() {
	for k, e := range j.memo.byDst {
		if k.view == viewLikely && e.out != nil && e.out.Translated() {
			j.note(k)
		}
	}
	for k, o := range j.memo.bySrc {
		if k.view == viewLikely && o.Translated() {
			j.note(k.memoKey)
		}
	}
}

func (j *Judge) note(k memoKey) {
	k.origin = 0
	if len(j.seen) < maxSeen {
		j.seen[k] = struct{}{}
	}
}

func seenKey(proto uint8, a netip.AddrPort) memoKey {
	return memoKey{dst: a.Addr().As16(), port: a.Port(), proto: proto, v4: a.Addr().Is4()}
}

// Seen returns the destinations, of flows judged so far, that rules have
// translated; at most 65 536. Given to the next Judge as [Config.Seen], they are
// known to it.
func (j *Judge) Seen() []Destination {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.remember()
	list := make([]Destination, 0, len(j.seen))
	for k := range j.seen {
		a := netip.AddrFrom16(k.dst)
		if k.v4 {
			a = a.Unmap()
		}
		list = append(list, Destination{k.proto, netip.AddrPortFrom(a, k.port)})
	}
	return list
}

// Forget lets go of what was seen at a destination.
func (j *Judge) Forget(d Destination) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.seen, seenKey(d.Proto, d.Addr))
}

// Generation returns the generation of the rules that flows are judged by.
func (j *Judge) Generation() uint32 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.rules.gen
}

// Rules returns the rules that flows are judged by, for reports.
func (j *Judge) Rules() *Ruleset {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.rules
}

// Err tells why every flow is Unpredictable now, if so: [ErrStale] where
// [Judge.Reload] helps, or what it failed with.
func (j *Judge) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case j.stale:
		return j.err
	case j.others.unread():
		return errors.New(j.others.String())
	}
	return nil
}

// Translators returns what else may translate, as it was when it was last looked
// for.
func (j *Judge) Translators() Translators {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.others
}

// Judge judges a flow. What it reads of the flow are the tuples, zone and status.
// From the second flow to a destination on it takes less than a microsecond,
// unless rules there read the source.
func (j *Judge) Judge(f *conntrack.Flow) Judgement {
	j.mu.Lock()
	defer j.mu.Unlock()
	v, _ := j.judge(f)
	return v
}

// judge also returns the outcome that decided, nil where none did.
func (j *Judge) judge(f *conntrack.Flow) (Judgement, *Outcome) {
	switch {
	case !conntrack.HasPorts(f.Proto) || f.Proto == conntrack.GRE:
		return Judgement{Verdict: NotJudged}, nil
	case f.Zone != 0:
		return Judgement{Verdict: OtherZone}, nil
	case f.Status&conntrack.StatusExpected != 0:
		return Judgement{Verdict: Expected}, nil
	}
	if why := j.blind(); why != "" {
		return Judgement{Verdict: Unpredictable, Why: why}, nil
	}
	o := j.outcome(f, viewLikely)
	v := j.verdict(f, o)
	if v.Verdict.Stale() {
		if v, o = j.reconsider(f, v, o); v.Verdict == Unpredictable {
			return v, o
		}
	}
	if v.Verdict.Stale() || v.Verdict == UnknownTranslator {
		j.refreshOthers()
		if j.others.unread() {
			return Judgement{Verdict: Unpredictable, Why: j.others.String()}, nil
		}
		v = j.verdict(f, o)
	}
	if v.Verdict.Stale() && !j.fresh() {
		return Judgement{Verdict: Unpredictable, Why: j.blind()}, nil
	}
	return v, o
}

// blind tells why nothing can be judged, if so.
func (j *Judge) blind() string {
	switch {
	case j.stale:
		return j.err.Error()
	case j.others.unread():
		return j.others.String()
	}
	return ""
}

// fresh tells whether the rules are still the present ones. If so, every flow that
// has been seen until now was made by them or by earlier ones, since the generation
// moves before packets meet other rules.
func (j *Judge) fresh() bool {
	gen, err := j.conn.Generation()
	switch {
	case errors.Is(err, ErrNoNFT) && j.rules.gen == 0:
	case err != nil:
		j.stale, j.err = true, err
		return false
	case gen != j.rules.gen:
		j.stale, j.err = true, ErrStale
		return false
	}
	return true
}

// Confirm returns nil if what Judge has called stale since the last reload is so
// at this moment: the rules are in force, all of them; nothing else translates; and
// no address or route has changed since the last flow was judged. It is for right
// before deletes, once for many flows, and takes about 70 µs, but waits for a
// commit that is under way. Flows are to be judged anew after an error, which tells
// what has changed; where that cannot be mended, as [ErrStale] by Reload, they are
// Unpredictable then.
func (j *Judge) Confirm() error {
	if j.lookForOthers() {
		return errOthers
	}
	j.mu.Lock()
	rules, err := j.rules, j.err
	switch {
	case j.stale:
	case j.others.unread():
		err = errors.New(j.others.String())
	case !j.host.Current(conntrack.TCP), j.host.Epoch() != j.epoch:
		err = errHost
	}
	j.mu.Unlock()
	if err != nil {
		return err
	}
	err = j.conn.barrier(rules.gen)
	if errors.Is(err, ErrNoNFT) && rules.gen == 0 {
		return nil
	}
	if err != nil {
		j.mu.Lock()
		if j.rules == rules {
			j.stale, j.err = true, err
		}
		j.mu.Unlock()
	}
	return err
}

// Why Confirm refuses what is well again by the next judgement.
var (
	errOthers = errors.New("what may translate beside the rules has changed")
	errHost   = errors.New("addresses or routes have changed")
)

func (j *Judge) refreshOthers() {
	if start := time.Now(); !start.Before(j.othersAt) {
		j.setOthers(j.cfg.Translators(), start)
	}
}

// lookForOthers looks at once, and tells whether something else was found than the
// last time.
func (j *Judge) lookForOthers() bool {
	start := time.Now()
	t := j.cfg.Translators()
	j.mu.Lock()
	defer j.mu.Unlock()
	was, doubts := j.others.unread(), j.doubts
	j.setOthers(t, start)
	return j.others.unread() != was || j.doubts != doubts
}

func (j *Judge) setOthers(t Translators, start time.Time) {
	if !slices.Equal(t.Modules, j.others.Modules) {
		j.doubts = ""
		if len(t.Modules) > 0 {
			j.doubts = "it may have been translated by tc or a switch: " + strings.Join(t.Modules, " and ") + " loaded"
		}
	}
	now := time.Now()
	j.others, j.othersAt = t, now.Add((othersShare-1)*now.Sub(start))
}

func (j *Judge) verdict(f *conntrack.Flow, o *Outcome) Judgement {
	if o.Any {
		return Judgement{Unpredictable, o.By, o.Why}
	}
	got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	types := AllTypes
	if len(o.Ranges) > 0 {
		types = local(j.host, got.Addr())
	}
	v := Judgement{Verdict: FrontendGone}
	switch {
	case o.Allows(got, types): // where it is untranslated, a translation that changes nothing
		return Judgement{Right, o.By, ""}
	case f.Translated() && o.Translated():
		v = Judgement{BackendGone, o.By, ""}
	case f.Translated():
	case o.Untranslated && o.Translated():
		return Judgement{MayPass, o.By, ""}
	case !o.Translated():
		return Judgement{Verdict: Plain} // dropped, perhaps: deleting it would help nobody
	default:
		v = Judgement{Untranslated, o.By, ""}
	}
	if why := j.doubt(f, v.Verdict); why != "" {
		return Judgement{UnknownTranslator, Rule{}, why}
	}
	return v
}

// doubt tells why a flow that looks stale may have met no rule, or something else
// than the rules.
func (j *Judge) doubt(f *conntrack.Flow, v Verdict) string {
	if v == FrontendGone {
		dst := netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort)
		if _, ok := j.seen[seenKey(f.Proto, dst)]; ok {
			return ""
		}
		if f.Status&conntrack.StatusDstNAT == 0 {
			return "no rule is known to have translated it: its DST_NAT bit is not set"
		}
	}
	if t := j.rules.model.bridge; t != "" {
		return "it may have crossed a bridge, where no NAT rule is met: table bridge " + quote(t) + " tracks connections"
	}
	return j.doubts
}

const (
	whyMoved = "addresses, routes or interfaces of this host have just changed"
	whyOther = "a rule translates it so for a packet that meets another hook or interface, or whose addresses are of another type"
)

// reconsider looks once more at a flow that looks stale by what most packets meet.
// A tuple does not tell the hook, the interface and what the addresses were to this
// host when the flow began. So one that is translated is stale only if no rule
// translates any packet so; and one that is not translated, if what is certain of
// the host leaves no way around the rules. If such a flow is older than all NAT
// rules, they have not passed it whatever way it took: the likely interface does.
func (j *Judge) reconsider(f *conntrack.Flow, v Judgement, o *Outcome) (Judgement, *Outcome) {
	if !j.host.Current(f.Proto) {
		return Judgement{Unpredictable, o.By, whyMoved}, o
	}
	if j.host.Epoch() != j.epoch {
		o = j.outcome(f, viewLikely)
		if v = j.verdict(f, o); !v.Verdict.Stale() {
			return v, o
		}
	}
	views := []view{viewCertain}
	switch {
	case f.Translated():
		views[0] = viewAny
	case f.Status&conntrack.StatusDstNATDone == 0:
		// No NAT rule has seen it: it began before there were any, at boot. That it
		// passed them by an interface it did not take, the next one of its kind shows.
		views[0] = viewOlder
	case j.leadsHere(o):
		// A process of this host gets what is sent there. If it is a transparent proxy
		// it sends that on with the source that it came with.
		views = append(views, viewEither)
	}
	got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	for _, w := range views {
		p := j.outcome(f, w)
		switch {
		case p.Any:
			return Judgement{Unpredictable, p.By, p.Why}, p
		case p.Allows(got, AllTypes), !f.Translated() && p.Untranslated:
			return Judgement{Unpredictable, p.By, j.why(f, w)}, p
		}
	}
	return v, o
}

// leadsHere tells whether rules translate to an address of this host.
func (j *Judge) leadsHere(o *Outcome) bool {
	here := func(a netip.Addr) bool { return !a.IsValid() || local(j.host, a)&TypeLocal != 0 }
	return slices.ContainsFunc(o.To, func(a netip.AddrPort) bool { return here(a.Addr()) }) ||
		slices.ContainsFunc(o.Ranges, func(r Range) bool { return here(r.Min) || here(r.Max) })
}

// older is what is certain of a Host, but for the interfaces.
type older struct {
	Host
	likely Host
}

func (o older) Inputs(a netip.Addr) *Interfaces  { return o.likely.Inputs(a) }
func (o older) Outputs(a netip.Addr) *Interfaces { return o.likely.Outputs(a) }

// partly is a Host of which something is not known.
type partly struct {
	Host
	ways  bool // neither input nor output interface
	local netip.Addr
}

func (p partly) Inputs(a netip.Addr) *Interfaces {
	if p.ways {
		return nil
	}
	return p.Host.Inputs(a)
}

func (p partly) Outputs(a netip.Addr) *Interfaces {
	if p.ways {
		return nil
	}
	return p.Host.Outputs(a)
}

func (p partly) Types(a netip.Addr) Types {
	if p.local == a {
		return TypeLocal
	}
	return p.Host.Types(a)
}

// why tells which guess decides that a flow is stale.
func (j *Judge) why(f *conntrack.Flow, v view) string {
	k := whyKey{keyOf(f, v, 0), netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)}
	why, known := j.memo.why[k]
	if !known {
		why = j.findWhy(f, v)
		if len(j.memo.why) < maxMemo && j.memo.why != nil {
			j.memo.why[k] = why
		}
	}
	return why
}

func (j *Judge) findWhy(f *conntrack.Flow, v view) string {
	allowed := func(h Host, origin Origin) bool {
		j.rules.mu.Lock()
		o, _ := j.rules.outcome(PacketOf(f), h, origin)
		j.rules.mu.Unlock()
		if f.Translated() {
			return !o.Any && o.Allows(netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort), AllTypes)
		}
		return o.Untranslated
	}
	likely := j.host.Sent(f.Orig.Src)
	begins := "another host may have sent it"
	if likely == Foreign {
		begins = "this host may have sent it, as a transparent proxy, say"
	}
	if !f.Translated() {
		h, origin := j.through(v, f)
		if allowed(h, likely) {
			return j.wayPast(f, h, likely, allowed)
		}
		if origin == likely {
			return whyOther
		}
		return "no rule of the other hook translates it, and " + begins
	}
	switch {
	case allowed(partly{Host: j.host, ways: true}, likely):
		return "a rule translates it so that comes in, or goes out, by another interface, and which it took cannot be told"
	case allowed(j.host, Unsure):
		return "a rule of the other hook translates it so, and " + begins
	case allowed(partly{Host: j.host, local: f.Orig.Dst}, likely):
		return fmt.Sprintf("a rule would translate it so if %s were an address of this host", f.Orig.Dst)
	}
	return whyOther
}

// wayPast names an interface by which a flow may have passed the rules.
func (j *Judge) wayPast(f *conntrack.Flow, h Host, origin Origin, allowed func(Host, Origin) bool) string {
	if origin == Own {
		return "no rule translates what goes out by another interface, and which it took cannot be told"
	}
	if in := h.Inputs(f.Orig.Src); in != nil {
		for _, i := range in.List {
			if allowed(oneWay{h, &Interfaces{ID: 1, List: []Interface{i}}}, origin) {
				sure := "rp_filter is not strict there"
				if f.Family == conntrack.IPv6 {
					sure = "nothing makes sure of the interface for IPv6"
				}
				return fmt.Sprintf("no rule translates what comes in by %s, and it may have: %s", i.Name, sure)
			}
		}
	}
	return "by which interface it came in cannot be told"
}

// oneWay is a Host of one interface.
type oneWay struct {
	Host
	in *Interfaces
}

func (o oneWay) Inputs(netip.Addr) *Interfaces { return o.in }

// through returns what a view sees of the host, and the hooks of a flow by it.
func (j *Judge) through(v view, f *conntrack.Flow) (Host, Origin) {
	switch v {
	case viewAny:
		return Unknown{}, Unsure
	case viewEither:
		return j.host.Certain(), Unsure
	case viewOlder:
		j.older = older{j.host.Certain(), j.host}
		return &j.older, j.older.Sent(f.Orig.Src)
	case viewCertain:
		h := j.host.Certain()
		return h, h.Sent(f.Orig.Src)
	}
	return j.host, j.host.Sent(f.Orig.Src)
}

// outcome remembers outcomes.
func (j *Judge) outcome(f *conntrack.Flow, v view) *Outcome {
	if e := j.host.Epoch(); e != j.epoch {
		j.remember()
		j.epoch, j.memo = e, memo{}
	}
	host, origin := j.through(v, f)
	k := keyOf(f, v, origin)
	entry, known := j.memo.byDst[k]
	if !entry.until.IsZero() && !time.Now().Before(entry.until) {
		known = false
	}
	if known {
		if entry.out != nil {
			return entry.out
		}
		if o := j.memo.bySrc[sourceKeyOf(host, k, entry.deps, f)]; o != nil {
			return o
		}
	}
	j.rules.mu.Lock()
	o, read := j.rules.outcome(PacketOf(f), host, origin)
	failed, stale := j.rules.eval.err, j.rules.stale
	j.rules.mu.Unlock()
	if stale && !j.stale {
		j.stale, j.err = true, ErrStale
	}
	if failed != nil {
		return o // of this moment only
	}
	if o.equal(plain) {
		o = plain
	}
	next := memoEntry{deps: entry.deps | read&^depOut}
	switch o.Why {
	case whyWork, whyDepth, whyTargets: // whatever the source
		next.deps = 0
	case whyBusy:
		next = memoEntry{until: time.Now().Add(busyFor)}
	}
	j.memoize(host, k, next, o, f)
	return o
}

func keyOf(f *conntrack.Flow, v view, origin Origin) memoKey {
	return memoKey{
		dst: f.Orig.Dst.As16(), port: f.Orig.DstPort, proto: f.Proto, v4: f.Family == conntrack.IPv4, origin: origin, view: v,
	}
}

func (j *Judge) memoize(host Host, k memoKey, e memoEntry, o *Outcome, f *conntrack.Flow) {
	m := &j.memo
	m.targets += len(o.To) + len(o.Ranges)
	if m.byDst == nil || len(m.byDst) >= maxMemo || m.targets > maxMemoTargets {
		j.remember()
		*m = memo{
			byDst: map[memoKey]memoEntry{}, bySrc: map[sourceKey]*Outcome{}, why: map[whyKey]string{},
			targets: len(o.To) + len(o.Ranges),
		}
	}
	if e.deps == 0 {
		e.out = o
	} else {
		if len(m.bySrc) >= maxMemo {
			j.remember()
			clear(m.bySrc)
		}
		m.bySrc[sourceKeyOf(host, k, e.deps, f)] = o
	}
	m.byDst[k] = e
}

func sourceKeyOf(h Host, k memoKey, d deps, f *conntrack.Flow) sourceKey {
	s := sourceKey{memoKey: k}
	if d&depSrc != 0 {
		s.src = f.Orig.Src.As16()
	} else if d&depIn != 0 { // which the source tells otherwise
		if in := h.Inputs(f.Orig.Src); in != nil {
			s.in = in.ID
		}
	}
	if d&depSport != 0 {
		s.sport = f.Orig.SrcPort
	}
	return s
}

// To tells what the rules may do with packets to a destination, wherever they come
// from, and which rules have a part in it, as [Ruleset.Explain] does.
func (j *Judge) To(d Destination) (*Outcome, []Step) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if why := j.blind(); why != "" || !j.fresh() {
		return &Outcome{Any: true, Why: cmp.Or(why, j.blind())}, nil
	}
	j.host.Epoch()
	return j.rules.Explain(Packet{Proto: d.Proto, Dst: d.Addr.Addr(), DstPort: d.Addr.Port()}, j.host)
}

// Outcome tells what the rules may do with a packet to a destination, wherever it
// comes from.
func (j *Judge) Outcome(d Destination) *Outcome {
	j.mu.Lock()
	defer j.mu.Unlock()
	if why := j.blind(); why != "" || !j.fresh() {
		return &Outcome{Any: true, Why: cmp.Or(why, j.blind())}
	}
	j.host.Epoch()
	return j.rules.Outcome(Packet{Proto: d.Proto, Dst: d.Addr.Addr(), DstPort: d.Addr.Port()}, j.host)
}

// See notes that rules have translated destinations, as Config.Seen does.
func (j *Judge) See(list ...Destination) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, d := range list {
		if len(j.seen) < maxSeen {
			j.seen[seenKey(d.Proto, d.Addr)] = struct{}{}
		}
	}
}

// Explain judges a flow and tells the steps in words, one a line.
func (j *Judge) Explain(f *conntrack.Flow) (Judgement, []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	v, o := j.judge(f)
	var steps []string
	say := func(format string, args ...any) { steps = append(steps, fmt.Sprintf(format, args...)) }
	name := strings.ToUpper(conntrack.ProtoName(f.Proto))
	switch {
	case v.Verdict == NotJudged:
		say("the protocol is %s, whose flows are not judged by rules", name)
		return v, steps
	case v.Verdict == OtherZone:
		say("the flow is in conntrack zone %d; rules are judged for the default zone only", f.Zone)
		return v, steps
	case v.Verdict == Expected:
		say("a connection-tracking helper announced the flow (status EXPECTED): no rule translated it")
		return v, steps
	case o == nil:
		say("nothing is judged now: %s", v.Why)
		return v, steps
	}
	switch j.host.Sent(f.Orig.Src) {
	case Own:
		say("its source %s is this host's: it meets the rules of the hook output", f.Orig.Src)
	case Foreign:
		say("its source %s is another host's: it meets the rules of the hook prerouting", f.Orig.Src)
	case Unsure:
		say("whether its source %s was this host's is not certain: prerouting and output are both considered", f.Orig.Src)
	}
	o, rules := j.rules.Explain(PacketOf(f), j.host)
	for _, r := range rules {
		steps = append(steps, r.String())
	}
	if len(rules) == 0 && !o.Any {
		say("no rule leads it anywhere")
	}
	say("what the present rules may do with a packet to %s: %s", netip.AddrPortFrom(f.Orig.Dst, f.Orig.DstPort), o)
	got := netip.AddrPortFrom(f.Reply.Src, f.Reply.SrcPort)
	if f.Translated() {
		say("it is translated: answers come from %s", got)
	} else {
		say("it is not translated: answers come from the original destination itself")
	}
	switch v.Verdict {
	case Plain:
		say("nothing would translate it")
	case Right:
		say("the present rules may leave a flow like that")
	case MayPass:
		say("some rules would translate it, but it cannot be told whether they match")
	case UnknownTranslator, Unpredictable:
		if v.Why != "" { // what most packets meet is above
			say("it is left alone: %s", v.Why)
		}
	case BackendGone:
		say("no rule may have translated it to %s", got)
	case Untranslated:
		say("a new flow would be translated by %s", v.By)
	case FrontendGone:
		say("the rule that translated it is gone")
	}
	return v, steps
}
