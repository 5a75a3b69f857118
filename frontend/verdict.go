package frontend

import (
	"fmt"
	"slices"
	"strings"

	"github.com/flowsweep/flowsweep/conntrack"
)

// Action is what is to be done with a flow.
type Action uint8

// The actions. Ignore means that the flow is nobody's business here.
const (
	Ignore Action = iota
	Keep
	Delete
)

var actionNames = [...]string{"ignore", "keep", "delete"}

// String returns the action's word in reports.
func (a Action) String() string { return actionNames[a] }

// Reason says why. Each belongs to one action.
type Reason uint8

// The reasons, by the action that they go with.
const (
	// Ignore.
	NotSwept          Reason = iota // "protocol": not TCP, UDP or SCTP, or switched off
	OtherZone                       // "zone": not a zone that the host's services use
	ExpectedFlow                    // "expected": a helper announced it, no rule translated it
	NoFrontend                      // "no-frontend"
	Serving                         // Keep: goes to a valid backend
	AwaitingBackend                 // "awaiting-backends": untranslated, and nothing to translate it to
	UncertainAddr                   // "uncertain-address": stale, if what is not known of the address were so (Verdict.Why)
	ByPolicy                        // "policy": stale, but its protocol is not to be cut
	Unconfirmed                     // by the agent: not deleted until it is certain, or worth it
	RulesetDisagrees                // "ruleset-disagrees": stale, but the NAT rules would make it again as it is
	Unpredictable                   // by rules: what they do with it cannot be told exactly
	UnknownTranslator               // "unknown-translator": what translated it may be no rule
	BackendGone                     // Delete: translated to what is no valid backend
	NoBackends                      // "no-backends": translated, and the frontend has no backend at all
	Untranslated                    // "untranslated": passed before there was anything to translate it to
	FrontendGone                    // "frontend-gone": translated for a frontend that is gone
	Reasons                         // how many there are
)

var reasonNames = [...]string{
	"protocol", "zone", "expected", "no-frontend",
	"serving", "awaiting-backends", "uncertain-address", "policy", "unconfirmed", "ruleset-disagrees", "unpredictable", "unknown-translator",
	"backend-gone", "no-backends", "untranslated", "frontend-gone",
}

// String returns the reason's word in reports.
func (r Reason) String() string { return reasonNames[r] }

// Action returns the action that the reason belongs to.
func (r Reason) Action() Action {
	switch {
	case r <= NoFrontend:
		return Ignore
	case r <= UnknownTranslator:
		return Keep
	}
	return Delete
}

// Verdict is the judgement of one flow.
type Verdict struct {
	Action Action
	Reason Reason

	// Owner and Kind are those of the frontend that the flow was sent to; Owner
	// is empty where there is none. Where several owners claim the frontend, it
	// is the one that decided.
	Owner string
	Kind  Kind
	// Why says in words what keeps the flow from being judged, for Unpredictable,
	// UnknownTranslator and UncertainAddr; for RulesetDisagrees it is the rule that
	// would make the flow again, or that none would translate it.
	Why string
	// Else, with UncertainAddr, is the reason to delete the flow where somebody
	// knows better, such as NAT rules that certainly would not leave it so. It is
	// NotSwept where the policy would leave the flow all the same.
	Else Reason
}

// Settled returns the verdict where somebody knows that nothing leaves the flow as it
// is: an uncertain one becomes what it is without the doubt.
func (v Verdict) Settled() Verdict {
	if v.Reason == UncertainAddr && v.Else.Action() == Delete {
		v.Action, v.Reason, v.Why, v.Else = Delete, v.Else, "", NotSwept
	}
	return v
}

// String returns action and reason, "delete backend-gone".
func (v Verdict) String() string { return v.Action.String() + " " + v.Reason.String() }

// Sweep says which stale flows of a protocol may be deleted.
type Sweep uint8

// The zero value is Off.
const (
	Off       Sweep = iota // judge none
	Unreplied              // those that were never answered: no connection exists yet
	All
)

var sweepNames = [...]string{"off", "unreplied", "all"}

// String returns the word that ParsePolicy reads.
func (s Sweep) String() string { return sweepNames[s] }

// Policy says for each protocol what may be deleted.
type Policy struct{ UDP, TCP, SCTP Sweep }

// DefaultPolicy cuts no established connection of TCP or SCTP: their endpoints
// notice a dead peer by themselves, UDP's senders do not.
var DefaultPolicy = Policy{UDP: All, TCP: Unreplied, SCTP: Unreplied}

// Of returns what may be deleted of a protocol.
func (p Policy) Of(proto uint8) Sweep {
	switch proto {
	case conntrack.UDP:
		return p.UDP
	case conntrack.TCP:
		return p.TCP
	case conntrack.SCTP:
		return p.SCTP
	}
	return Off
}

// String returns the policy as ParsePolicy reads it.
func (p Policy) String() string {
	return fmt.Sprintf("udp=%s,tcp=%s,sctp=%s", p.UDP, p.TCP, p.SCTP)
}

// ParseSweep returns what a word of String stands for.
func ParseSweep(word string) (Sweep, bool) {
	i := slices.Index(sweepNames[:], word)
	return Sweep(max(i, 0)), i >= 0
}

// ParsePolicy reads "udp=all,tcp=off". Protocols that it does not name have
// what DefaultPolicy says.
func ParsePolicy(s string) (Policy, error) {
	p := DefaultPolicy
	named, err := ParsePolicies(s)
	if err != nil {
		return p, err
	}
	for proto, at := range map[uint8]*Sweep{conntrack.UDP: &p.UDP, conntrack.TCP: &p.TCP, conntrack.SCTP: &p.SCTP} {
		if sweep, ok := named[proto]; ok {
			*at = sweep
		}
	}
	return p, nil
}

// ParsePolicies reads what ParsePolicy reads, and returns the protocols that
// are named, by their numbers.
func ParsePolicies(s string) (map[uint8]Sweep, error) {
	named := map[uint8]Sweep{}
	for part := range strings.SplitSeq(s, ",") {
		name, word, _ := strings.Cut(strings.TrimSpace(part), "=")
		proto, ok := map[string]uint8{"udp": conntrack.UDP, "tcp": conntrack.TCP, "sctp": conntrack.SCTP}[name]
		if !ok || !strings.Contains(part, "=") {
			return nil, fmt.Errorf("%q: want PROTOCOL=WHAT with protocol udp, tcp or sctp", part)
		}
		if _, again := named[proto]; again {
			return nil, fmt.Errorf("%q: %s is given twice", part, name)
		}
		sweep, ok := ParseSweep(word)
		if !ok {
			return nil, fmt.Errorf("%q: want all, unreplied or off after %s=", part, name)
		}
		named[proto] = sweep
	}
	return named, nil
}
