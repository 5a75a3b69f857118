package ruleset

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Loading is tried so often, with waits that double from retryFirst on: a second
// in all. Commits that come closer than a load takes starve it.
const (
	attempts   = 8
	retryFirst = 8 * time.Millisecond
)

// ErrChanging says that the rules changed whenever they were read. Nothing can be
// judged by them now; try again later.
var ErrChanging = errors.New("nftables: the rules changed while they were read, again and again: " +
	"some program commits rules without a pause; try again")

// ErrStale says that the rules have changed since they were read: load them anew.
var ErrStale = errors.New("the rules have changed since they were read")

// Ruleset is the NAT rules of one generation. Rules are decoded, and elements of
// sets fetched, when the first packet meets them; elements only as long as the
// generation has not moved, afterwards they make an outcome anything. Its
// methods may be called from several goroutines, and wait for each other.
type Ruleset struct {
	gen  uint32
	conn *Conn

	mu     sync.Mutex
	model  *model
	eval   eval
	effort *effort // of all generations
	stale  bool
}

// effort bounds the work for packets that take long, so that a ruleset which is
// made to be slow does not get to be. Those that take little are followed at any
// time.
type effort struct {
	mu   sync.Mutex
	left int // steps; less than 0 where the last packet took more
	at   time.Time
	now  func() time.Time
}

const (
	// freeSteps are never counted: 0.3 ms.
	freeSteps = maxSteps / 32
	// mostEffort is about a second's work, and is had again after eight.
	mostEffort      = 64 * maxSteps
	effortPerSecond = 8 * maxSteps // 10 % of the time
)

func newEffort() *effort { return &effort{left: mostEffort, now: time.Now} }

// limit tells how many steps the next packet may take.
func (e *effort) limit() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.left <= 0 {
		e.refill()
	}
	if e.left <= 0 {
		return freeSteps
	}
	return maxSteps
}

func (e *effort) spend(steps int) {
	if steps <= freeSteps {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refill()
	e.left -= steps - freeSteps
}

func (e *effort) refill() {
	now := e.now()
	if !e.at.IsZero() {
		e.left += int(min(now.Sub(e.at), time.Minute).Seconds() * effortPerSecond)
		e.left = min(e.left, mostEffort)
	}
	e.at = now
}

// Load reads the rules. It waits for a commit that is under way, and returns the
// rules only if no message says that they changed meanwhile and the generation was
// the same before and after; otherwise it tries again for about a second and then
// returns [ErrChanging]. Where the kernel has no nf_tables the error is
// [ErrNoNFT].
func (c *Conn) Load(ctx context.Context) (*Ruleset, error) {
	wait := retryFirst
	for try := range attempts {
		if try > 0 {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(wait):
			}
			wait *= 2
		}
		r, err := c.load(ctx)
		if err == nil || !errors.Is(err, errAgain) {
			return r, err
		}
	}
	return nil, ErrChanging
}

// errAgain makes Load try again.
var errAgain = errors.New("the ruleset changed while it was read")

func (c *Conn) load(ctx context.Context) (*Ruleset, error) {
	before, err := c.Generation()
	if err != nil {
		return nil, err
	}
	// From here on the generation moves before anything else does.
	if err := c.barrier(before); errors.Is(err, ErrStale) {
		return nil, errAgain
	} else if err != nil {
		return nil, err
	}
	m := newModel()
	if err := c.dump(ctx, request(uapi.NftGetTable, 0), uapi.NftNewTable, m.addTable); err != nil {
		return nil, err
	}
	if err := c.dump(ctx, request(uapi.NftGetChain, 0), uapi.NftNewChain, m.addChain); err != nil {
		return nil, err
	}
	for _, t := range m.bridges {
		if err := c.dump(ctx, tableRequest(uapi.NftGetRule, t), uapi.NftNewRule, m.addRule); err != nil {
			return nil, err
		}
	}
	for _, t := range m.met() {
		if err := c.rules(ctx, m, t); err != nil {
			return nil, err
		}
		if err := c.dump(ctx, tableRequest(uapi.NftGetSet, t), uapi.NftNewSet, m.addSet); err != nil {
			return nil, err
		}
	}
	m.forgetOthers()
	after, err := c.Generation()
	if err != nil {
		return nil, err
	}
	if before != after {
		return nil, errAgain
	}
	r := &Ruleset{gen: after, conn: c, model: m, effort: c.effort}
	r.eval = eval{m: m, fetch: r.fetch}
	return r, nil
}

// What it takes to read rules. In a dump the kernel passes over all rules that were
// sent before, for each 32 KiB anew (__nf_tables_dump_rules): 80 ms for 10 000
// rules of one table or chain, but two seconds for 50 000 and 30 for 200 000. Asked
// chain by chain, it passes over those of a chain only.
const (
	chainCost = 25 * time.Microsecond
	passCost  = 120 * time.Nanosecond
	perDump   = 80 // rules
)

func dumpCost(rules uint64) time.Duration {
	return time.Duration(rules*rules/(2*perDump)) * passCost
}

// byChain tells whether rules of a table are to be asked for chain by chain: where
// that is less work, or where a chain may be too long to be read.
func (t *table) byChain(l limits) bool {
	all, each := uint64(0), time.Duration(0)
	for _, c := range t.chains {
		n := uint64(c.use)
		if n > uint64(l.rules) {
			return true
		}
		all += n
		each += chainCost + dumpCost(n)
	}
	return each < dumpCost(all)
}

// rules reads the rules of a table.
func (c *Conn) rules(ctx context.Context, m *model, t *table) error {
	filters := t.byChain(c.limits)
	for _, ch := range t.chains {
		if !filters {
			break
		}
		if uint64(ch.use) > uint64(c.limits.rules) && c.large.known(ch.object()) {
			ch.tooLong = true
			continue
		}
		start := time.Now()
		err := c.dump(ctx, withText(tableRequest(uapi.NftGetRule, t), uapi.NftaRuleChain, ch.name), uapi.NftNewRule,
			func(family Family, b []byte) error {
				a := attrs{val: find(b, uapi.NftaRuleChain)}
				switch {
				case string(a.text()) != ch.name:
					filters = false // the kernel ignores what it was asked for
					return nil
				case ch.n == c.limits.rules:
					return errLong
				}
				return m.addRule(family, b)
			})
		switch {
		case errors.Is(err, errLong):
			c.large.note(ch.object(), time.Since(start))
			ch.tooLong = true
			m.forgetRules(ch)
		case err != nil:
			return err
		}
	}
	if filters {
		return nil
	}
	for _, ch := range t.chains {
		m.forgetRules(ch)
	}
	return c.dump(ctx, tableRequest(uapi.NftGetRule, t), uapi.NftNewRule, m.addRule)
}

// dump hands the messages of one type that answer a request to add.
func (c *Conn) dump(ctx context.Context, req []byte, want uint16, add func(Family, []byte) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	interrupted, err := c.exchange(req, func(typ uint16, family Family, b []byte) error {
		if typ != want {
			return errUnexpected(typ)
		}
		return add(family, b)
	})
	if interrupted || gone(err) {
		return errAgain
	}
	return err
}

// fetch gets the elements of a set, of the generation of everything else: that was
// in force as a whole when the rules were read, and is as long as it has not moved.
func (r *Ruleset) fetch(t *table, s *set) (*elements, error) {
	switch {
	case s.elements != nil:
		return s.elements, nil
	case s.tooLarge != nil:
		return nil, s.tooLarge
	case r.stale:
		return nil, ErrStale
	case uint64(s.count) > uint64(r.conn.limits.elements), r.conn.large.known(s.object(t)):
		s.tooLarge = errHuge
		return nil, errHuge
	}
	start := time.Now()
	g := gathering{table: t, set: s, limits: r.conn.limits}
	interrupted, err := r.conn.exchange(elementsRequest(t, s), func(typ uint16, _ Family, b []byte) error {
		if typ != uapi.NftNewSetElem {
			return errUnexpected(typ)
		}
		return g.add(b)
	})
	huge := errors.Is(err, errHuge)
	if err != nil && !gone(err) && !huge {
		return nil, err
	}
	gen, generr := r.conn.Generation()
	if generr != nil {
		return nil, generr
	}
	if err != nil && !huge || interrupted || gen != r.gen {
		r.stale = true
		return nil, ErrStale
	}
	if huge {
		r.conn.large.note(s.object(t), time.Since(start))
		s.tooLarge = errHuge
		return nil, errHuge
	}
	x := g.finish()
	if r.model.held+x.size() > r.conn.limits.total {
		s.tooLarge = errMany
		return nil, errMany
	}
	r.model.held += x.size()
	s.elements = x
	return x, nil
}

// Generation returns the generation that the rules are of.
func (r *Ruleset) Generation() uint32 { return r.gen }

// Outcome tells what the rules may do with a packet. It takes from 1 µs to, at
// worst, about 10 ms, more where elements of sets have to be fetched.
func (r *Ruleset) Outcome(p Packet, h Host) *Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	o, _ := r.outcome(p, h, sent(h, p.Src))
	return o
}

// sent is what a host says of a packet's source, which may be any.
func sent(h Host, src netip.Addr) Origin {
	if !src.IsValid() {
		return Unsure
	}
	return h.Sent(src)
}

// outcome also tells what the outcome depends on. It is to be called with the
// lock held.
func (r *Ruleset) outcome(p Packet, h Host, origin Origin) (*Outcome, deps) {
	e := &r.eval
	e.host, e.limit = h, maxSteps
	if !e.retain { // people may wait
		e.limit = r.effort.limit()
	}
	o := e.outcome(e.run(p, origin))
	read, steps := e.read, e.limit-e.steps
	switch e.why {
	case whyWork, whyBusy, whyDepth, whyTargets:
		read = 0 // another source's packet need not be tried
	default:
		// Where a mark was read, what rules set it to may decide.
		if !e.marked || e.err != nil || o.Single() {
			break
		}
		trace := e.trace
		e.tracked = true
		if m := e.outcome(e.run(p, origin)); !m.Any {
			o, trace = m, e.trace
		}
		e.trace, e.tracked = trace, false
		read, steps = read|e.read, steps+e.limit-e.steps
	}
	if !e.retain {
		r.effort.spend(steps)
	}
	return o, read
}

// Step is a rule that has a part in what may happen to a packet.
type Step struct {
	Rule
	Text   string // the rule as nft or iptables would show it, more or less
	Effect string // "translates it to 198.51.100.11:53", "leads to DOCKER"
}

// String writes the rule, its text, and in parentheses its effect.
func (s Step) String() string {
	text := s.Text
	if text != "" {
		text = ": " + text
	}
	return fmt.Sprintf("%s%s (%s)", s.Rule, text, s.Effect)
}

// Explain tells what the rules may do with a packet, and which of them have a
// part in it: those that lead it to another chain or decide, in the order in
// which they are met. More than 64 are left out.
func (r *Ruleset) Explain(p Packet, h Host) (*Outcome, []Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.eval.retain = true
	defer func() { r.eval.retain = false }()
	o, _ := r.outcome(p, h, sent(h, p.Src))
	var steps []Step
	for _, t := range r.eval.trace {
		steps = append(steps, Step{t.rule(), describe(t.chain.table, t.exprs), t.effect})
	}
	return o, steps
}

// Size counts what was read.
type Size struct {
	Tables, Chains, Rules, Sets int
	Bases                       int // chains at the hooks, which packets begin at
	Bytes                       int // of the rules, as the kernel sent them
}

// Size counts what was read, which are tables with NAT rules for destinations.
func (r *Ruleset) Size() Size {
	s := Size{Bytes: r.model.raw}
	for _, t := range r.model.tables {
		s.Tables++
		s.Chains += len(t.chains)
		s.Sets += len(t.sets)
		for _, c := range t.chains {
			if c.base {
				s.Bases++
			}
			for range c.pairs {
				s.Rules++
			}
		}
	}
	return s
}

// NotUnderstood lists the rules with an expression that makes a packet's outcome
// anything, if one reaches it, and why. It decodes every rule.
func (r *Ruleset) NotUnderstood() []Step {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Step
	for _, t := range r.model.relevant() {
		for _, c := range reachable(t, t.bases()) {
			if c.tooLong {
				list = append(list, Step{Rule: ruleAt{chain: c}.rule(), Effect: whyLong})
			}
			for handle, exprs := range c.pairs {
				ops := decodeOps(t, exprs)
				if n := len(ops); n > 0 {
					if o, ok := ops[n-1].(*anyOp); ok {
						list = append(list, Step{ruleAt{c, handle}.rule(), describe(t, exprs), o.why})
					}
				}
			}
		}
	}
	return list
}

// Translators tells what else than the rules may translate flows of a network
// namespace, so that they do not tell what is possible.
type Translators struct {
	// Legacy is that iptables-legacy has a nat table, whose rules are not read.
	Legacy bool
	// IPVS is that IPVS has services.
	IPVS bool
	// Err tells why one of them is not known.
	Err error
	// Modules are kernel modules that are loaded and can translate without a rule:
	// act_ct of tc, openvswitch. Flows that no rule translates may be theirs.
	Modules []string
}

// unread tells whether other rules, which are not read, decide or may decide.
func (t Translators) unread() bool { return t.Legacy || t.IPVS || t.Err != nil }

// String says what there is, and what that means.
func (t Translators) String() string {
	switch {
	case t.Legacy:
		return "iptables-legacy has a nat table, whose rules are not read: use iptables-nft " +
			"(update-alternatives --set iptables /usr/sbin/iptables-nft), or unload iptable_nat and ip6table_nat"
	case t.IPVS:
		return "IPVS has services and decides without rules"
	case t.Err != nil:
		return fmt.Sprintf("whether iptables-legacy or IPVS translates is not known: %v", t.Err)
	}
	if len(t.Modules) > 0 {
		return "tc or a switch may translate: " + strings.Join(t.Modules, ", ") + " loaded"
	}
	return "nothing but nf_tables translates"
}

// local is what a host says of an address for Outcome.Allows.
func local(h Host, a netip.Addr) Types {
	if a.IsLoopback() {
		return TypeLocal
	}
	if t := h.Types(a); t != 0 {
		return t
	}
	return AllTypes
}
