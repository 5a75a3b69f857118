package ruleset

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/internal/uapi"
)

// Limits of what is kept of a ruleset, each far above what is met: 100 000
// rules of iptables-nft take 33 MB.
const (
	maxRaw     = 128 << 20 // bytes of expressions
	maxObjects = 1 << 20   // tables, chains and sets
)

// limits are how much is read of a chain and of sets. What is in one that has more
// is not known.
type limits struct {
	rules    int // of one chain
	elements int // of one set
	bytes    int // keys and data of one set
	total    int // memory for all sets
}

var usualLimits = limits{rules: 1 << 16, elements: 1 << 18, bytes: 32 << 20, total: 128 << 20}

// tooMuch remembers which chains and sets have more than is read, so that not each
// generation reads so much to find it out.
type tooMuch struct {
	mu    sync.Mutex
	until map[object]time.Time
}

// object is a chain or a set. No handle is given twice.
type object struct {
	table, handle uint64
	set           bool
}

// askFactor is how many times longer than it took to find out it is believed.
const askFactor = 20

func (m *tooMuch) note(o object, took time.Duration) {
	if o.table == 0 || o.handle == 0 { // a kernel without handles
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(m.until, func(_ object, t time.Time) bool { return now.After(t) })
	if m.until == nil {
		m.until = map[object]time.Time{}
	}
	m.until[o] = now.Add(askFactor * took)
}

func (m *tooMuch) known(o object) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Before(m.until[o])
}

// ErrTooLarge says that a ruleset is larger than what this package reads.
var ErrTooLarge = errors.New("the ruleset is larger than is read (128 MiB of rules)")

var errMalformed = errors.New("malformed message from the kernel")

// Family is the family of a table (NFPROTO_*).
type Family uint8

// The families whose NAT rules translate flows.
const (
	INet Family = uapi.NfprotoInet
	IPv4 Family = uapi.NfprotoIPv4
	IPv6 Family = uapi.NfprotoIPv6

	bridgeFamily Family = uapi.NfprotoBridge
)

// String returns the word that nft prints.
func (f Family) String() string {
	switch f {
	case INet:
		return "inet"
	case IPv4:
		return "ip"
	case IPv6:
		return "ip6"
	}
	return fmt.Sprintf("family %d", uint8(f))
}

type tableKey struct {
	family Family
	name   string
}

// table is what was read of one table.
type table struct {
	tableKey
	handle  uint64 // of the table; none is given twice (nf_tables_newtable)
	dormant bool   // its hooks are not registered
	nat     bool   // has a base chain that translates destinations
	early   bool   // has a chain that a connection's packet meets before it is translated
	chains  map[string]*chain
	sets    map[string]*set
}

// chain is one chain with its rules, raw until a flow reaches it.
type chain struct {
	table    *table
	name     string
	handle   uint64 // none is given twice in a table
	use      uint32 // rules in it, and jumps to it
	hooked   bool   // a base chain, of whatever type
	base     bool   // of type nat, at prerouting or output
	early    bool   // of another type there, behind conntrack
	hook     uint32
	priority int32
	drop     bool   // policy of a base chain
	raw      []byte // rules as addRule appends them
	rules    []rule
	split    bool      // raw, into rules
	indices  [2]*index // for packets of IPv4 and IPv6, once one was here
	// inert: nothing in it ends or turns a packet's way, so that it may be passed over;
	// the second also that nothing sets a mark.
	inert [2]trilean
	// met is what it did with the packet that is followed now, for each marks that it
	// came with.
	met     []chainResult
	at      uint64 // the model's run that met is of
	n       int    // rules, while they are read
	tooLong bool   // it has more than are read
}

// rule is one rule, which is decoded when it is looked at.
type rule struct {
	chain   *chain
	handle  uint64
	exprs   []byte // NFTA_RULE_EXPRESSIONS
	ops     []op
	decoded bool
	inert   [2]trilean // as passes tells
}

// operations decodes the rule.
func (r *rule) operations() []op {
	if !r.decoded {
		r.ops, r.decoded = decodeOps(r.chain.table, r.exprs), true
	}
	return r.ops
}

// trilean is no, yes, or not known yet.
type trilean int8

const (
	unsure trilean = iota
	no
	yes
)

// model is the rules of one generation, as far as they were asked for.
type model struct {
	tables  map[tableKey]*table
	objects int
	raw     int
	held    int // memory for elements
	// runs counts the hooks and interfaces that packets were followed through.
	runs uint64
	// base has the base chains by hook, ordered by priority (baseChains).
	base map[uint32][]*chain
	// writers has those of the chains before, by hook, from which packets come to
	// rules that write addresses or ports: NAT rules read what these have written,
	// and the flow's tuple has what came in.
	writers map[uint32][]*chain
	// bridge is a table of the family bridge that makes connections of bridged
	// packets (nf_conntrack_bridge); "": none.
	bridge  string
	bridges []*table
}

func newModel() *model { return &model{tables: map[tableKey]*table{}} }

// addTable takes in an answer to NFT_MSG_GETTABLE.
func (m *model) addTable(family Family, b []byte) error {
	t := &table{tableKey: tableKey{family: family}}
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaTableName:
			t.name = string(a.text())
		case uapi.NftaTableFlags:
			t.dormant = a.u32()&uapi.NftTableFDormant != 0
		case uapi.NftaTableHandle:
			t.handle = a.u64()
		}
	}
	if a.bad || t.name == "" {
		return fmt.Errorf("table: %w", errMalformed)
	}
	switch family {
	case INet, IPv4, IPv6:
	case bridgeFamily: // of which only the rules matter
		m.bridges = append(m.bridges, t)
		return m.count()
	default: // no packet that is tracked meets it as a NAT rule
		return nil
	}
	t.chains, t.sets = map[string]*chain{}, map[string]*set{}
	m.tables[t.tableKey] = t
	return m.count()
}

func (m *model) count() error {
	if m.objects++; m.objects > maxObjects {
		return ErrTooLarge
	}
	return nil
}

// addChain takes in an answer to NFT_MSG_GETCHAIN.
func (m *model) addChain(family Family, b []byte) error {
	c := &chain{}
	var typ, hook []byte
	var in string
	policy := uint32(uapi.NfAccept)
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaChainTable:
			in = string(a.text())
		case uapi.NftaChainHandle:
			c.handle = a.u64()
		case uapi.NftaChainUse:
			c.use = a.u32()
		case uapi.NftaChainName:
			c.name = string(a.text())
		case uapi.NftaChainHook:
			hook = a.val
		case uapi.NftaChainPolicy:
			policy = a.u32()
		case uapi.NftaChainType:
			typ = a.text()
		}
	}
	if a.bad || c.name == "" {
		return fmt.Errorf("chain: %w", errMalformed)
	}
	t := m.tables[tableKey{family, in}]
	if t == nil {
		return nil // of another family, or made since the tables were read
	}
	if c.hooked = hook != nil; c.hooked {
		h := walk(hook)
		known := 0
		for h.next() {
			switch h.typ {
			case uapi.NftaHookHooknum:
				c.hook = h.u32()
				known++
			case uapi.NftaHookPriority:
				c.priority = int32(h.u32())
				known++
			}
		}
		if h.bad || known != 2 {
			return fmt.Errorf("chain %s: hook: %w", c.name, errMalformed)
		}
		destination := c.hook == uapi.NfInetPreRouting || c.hook == uapi.NfInetLocalOut
		c.base = destination && string(typ) == "nat"
		c.early = destination && !c.base && c.priority >= priorityConntrack
		c.drop = policy == uapi.NfDrop
		t.nat, t.early = t.nat || c.base, t.early || c.early
	}
	c.table = t
	t.chains[c.name] = c
	return m.count()
}

// priorityConntrack is NF_IP_PRI_CONNTRACK: what a chain before it writes is in the
// tuple.
const priorityConntrack = -200

// relevant returns the tables with NAT rules for destinations.
func (m *model) relevant() []*table {
	return m.list(func(t *table) bool { return t.nat })
}

// met returns the tables whose rules can be met on the way to a translation.
func (m *model) met() []*table {
	return m.list(func(t *table) bool { return t.nat || t.early && len(m.relevant()) > 0 })
}

func (m *model) list(wanted func(*table) bool) []*table {
	var list []*table
	for _, t := range m.tables {
		if !t.dormant && wanted(t) {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, b *table) int {
		return cmp.Or(cmp.Compare(a.family, b.family), cmp.Compare(a.name, b.name))
	})
	return list
}

// reachable returns the chains of a table that packets may come to from some of
// them, these included, in no particular order. It decodes all their rules.
func reachable(t *table, from []*chain) []*chain {
	var list []*chain
	seen := map[*chain]bool{}
	add := func(c *chain) {
		if c != nil && !seen[c] {
			seen[c] = true
			list = append(list, c)
		}
	}
	for _, c := range from {
		add(c)
	}
	for i := 0; i < len(list); i++ {
		for j := range list[i].each() {
			for _, o := range list[i].rules[j].operations() {
				switch o := o.(type) {
				case *verdictOp:
					add(o.chain)
				case *lookupOp:
					if o.dreg != regVerdict {
						continue
					}
					if o.set.elements == nil { // not fetched: it may lead anywhere
						for _, c := range t.chains {
							add(c)
						}
						continue
					}
					for _, v := range o.set.elements.to {
						add(v.chain)
					}
				}
			}
		}
	}
	return list
}

// bases returns the base chains of a table that translate destinations.
func (t *table) bases() (list []*chain) {
	for _, c := range t.chains {
		if c.base {
			list = append(list, c)
		}
	}
	return list
}

// ruleHeader is how much addRule puts before the expressions of a rule: its
// handle and their length.
const ruleHeader = 12

// addRule takes in an answer to NFT_MSG_GETRULE, and leaves the expressions as
// they are: most rules are never reached.
func (m *model) addRule(family Family, b []byte) error {
	var table, name, exprs []byte
	var handle uint64
	a := walk(b)
	for a.next() {
		switch a.typ {
		case uapi.NftaRuleTable:
			table = a.text()
		case uapi.NftaRuleChain:
			name = a.text()
		case uapi.NftaRuleHandle:
			handle = a.u64()
		case uapi.NftaRuleExpressions:
			exprs = a.val
		}
	}
	if a.bad || table == nil || name == nil {
		return fmt.Errorf("rule: %w", errMalformed)
	}
	if family == bridgeFamily {
		if tracks(exprs) {
			m.bridge = string(table)
		}
		return nil
	}
	t := m.tables[tableKey{family, string(table)}]
	if t == nil {
		return nil
	}
	c := t.chains[string(name)]
	if c == nil {
		return nil // made since the chains were read: the generation has moved
	}
	c.n++
	m.raw += ruleHeader + len(exprs)
	if m.raw > maxRaw {
		return ErrTooLarge
	}
	c.raw = binary.NativeEndian.AppendUint64(c.raw, handle)
	c.raw = binary.NativeEndian.AppendUint32(c.raw, uint32(len(exprs)))
	c.raw = append(c.raw, exprs...)
	return nil
}

func (c *chain) object() object { return object{c.table.handle, c.handle, false} }

// forgetRules takes back what was read of a chain.
func (m *model) forgetRules(c *chain) {
	m.raw -= len(c.raw)
	c.raw, c.n = nil, 0
}

// pairs yields handle and expressions of each rule.
func (c *chain) pairs(yield func(handle uint64, exprs []byte) bool) {
	for b := c.raw; len(b) >= ruleHeader; {
		handle, n := binary.NativeEndian.Uint64(b), int(binary.NativeEndian.Uint32(b[8:]))
		if !yield(handle, b[ruleHeader:ruleHeader+n:ruleHeader+n]) {
			return
		}
		b = b[ruleHeader+n:]
	}
}

// each returns the rules of a chain that is looked at.
func (c *chain) each() []rule {
	if c.split {
		return c.rules
	}
	c.split = true
	c.rules = make([]rule, 0, c.n)
	for handle, exprs := range c.pairs {
		c.rules = append(c.rules, rule{chain: c, handle: handle, exprs: exprs})
	}
	return c.rules
}

// harmless tells whether a packet leaves a chain, and the chains that it jumps
// to, as it came in, whatever the rules match: then they need not be looked at.
// Chains that only set marks are such, unless marks matter.
func (c *chain) harmless(depth int, marks bool) bool {
	if known := c.inert[index01(marks)]; known != unsure {
		return known == yes
	}
	if depth > maxDepth || c.tooLong {
		return false // not remembered: seen from elsewhere it may be less deep
	}
	h := yes
	for i := range c.each() {
		if !c.rules[i].returns(depth, marks) {
			h = no
			break
		}
	}
	c.inert[index01(marks)] = h
	return h == yes
}

func index01(b bool) int {
	if b {
		return 1
	}
	return 0
}

// returns tells whether all that a rule can decide is to leave the chain by its
// end or a return, or to jump to a chain that does the same.
func (r *rule) returns(depth int, marks bool) bool {
	for _, o := range r.operations() {
		if marks && setsMark(o) {
			return false
		}
		if !decisive(o) {
			continue
		}
		v, ok := o.(*verdictOp)
		if !ok {
			return false
		}
		switch v.code {
		case uapi.NftReturn:
		case uapi.NftJump, uapi.NftGoto:
			if !v.chain.harmless(depth+1, marks) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// passes tells whether a rule may be passed over: whatever it matches, the
// packet goes on to the next rule, and if marks matter, with the same marks.
func (r *rule) passes(marks bool) bool {
	inert := &r.inert[index01(marks)]
	if *inert == unsure {
		*inert = yes
		for _, o := range r.operations() {
			if marks && setsMark(o) {
				*inert = no
				break
			}
			if !decisive(o) {
				continue
			}
			v, ok := o.(*verdictOp)
			if !ok || v.code != uapi.NftJump || !v.chain.harmless(0, marks) {
				*inert = no
				break
			}
		}
	}
	return *inert == yes
}

// baseChains orders the base chains of a hook as nf_nat_inet_fn calls them:
// those of ip, or of ip6, together with those of inet, by priority.
func (m *model) baseChains(hook uint32) []*chain {
	if m.base == nil {
		m.base = map[uint32][]*chain{}
		for _, t := range m.relevant() {
			for _, c := range t.bases() {
				m.base[c.hook] = append(m.base[c.hook], c)
			}
		}
		for _, list := range m.base {
			slices.SortFunc(list, byPriority)
		}
	}
	return m.base[hook]
}

func byPriority(a, b *chain) int {
	return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.table.family, b.table.family),
		cmp.Compare(a.table.name, b.table.name), cmp.Compare(a.name, b.name))
}
