package agent

import (
	"slices"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/internal/nft"
)

// trustTime is how long the answer holds whether there are other translators
// than nf_tables: it takes a few files of /proc to find out.
const trustTime = 10 * time.Second

// nftRuleset tells commits by the generation of nf_tables, which iptables-nft
// writes too.
type nftRuleset struct {
	gens *nft.Generations // nil: there are none

	// What else may translate, as nft.LegacyNAT and nft.IPVSHolds tell it.
	legacy func() (bool, error)
	ipvs   func() (used, holds bool, err error)

	mu      sync.Mutex
	checked time.Time
	other   string // what else translates, or may; "": nothing
	why     string // the last generation was not to be trusted
	held    bool   // IPVS holds on to servers that are gone
}

// NewRuleset returns the ruleset of a network namespace ("": the present one).
// gens may be nil, where the kernel has no nf_tables.
func NewRuleset(gens *nft.Generations, namespace string) Ruleset {
	return &nftRuleset{
		gens:   gens,
		legacy: func() (bool, error) { return nft.LegacyNAT(namespace) },
		ipvs:   func() (bool, bool, error) { return nft.IPVSHolds(namespace) },
	}
}

// Generation implements Ruleset. iptables-legacy and IPVS commit without a sign,
// so that where either is in use no generation is trusted.
func (r *nftRuleset) Generation() (uint32, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.checked.IsZero() || time.Since(r.checked) >= trustTime {
		r.look()
	}
	if r.gens == nil {
		if r.why = r.other; r.why == "" {
			r.why = "the generation of nftables cannot be asked for"
		}
		return 0, false
	}
	gen, ok, err := r.gens.Get()
	switch r.why = r.other; {
	case r.why != "":
	case err != nil:
		r.why = err.Error()
	case !ok:
		r.why = "nothing was ever committed to nftables here"
	}
	return gen, r.why == ""
}

// look finds out what else translates.
func (r *nftRuleset) look() {
	legacy, lerr := r.legacy()
	used, holds, ierr := r.ipvs()
	r.checked, r.other, r.held = time.Now(), "", holds
	switch {
	case legacy:
		r.other = "iptables-legacy has a nat table here, whose rules are not read"
	case used: // whatever the error is, that is known
		r.other = "IPVS forwards here, by a table of its own"
	case lerr != nil:
		r.other = lerr.Error()
	case ierr != nil:
		r.other = ierr.Error()
	}
}

// Untrusted implements circumstances.
func (r *nftRuleset) Untrusted() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why
}

// Warnings implements circumstances.
func (r *nftRuleset) Warnings() (list []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held {
		list = append(list, nft.IPVSHeld)
	}
	return list
}

// circumstances is what a Ruleset may tell besides, as of the last call of
// Generation.
type circumstances interface {
	// Untrusted tells why the generation is not trusted, "" where it is.
	Untrusted() string
	// Warnings tells what the deletes of flows do not mend.
	Warnings() []string
}

// noteCircumstances notes, and logs where it is new, why the NAT rules are not
// asked, and what the agent can do nothing about.
func (a *Agent) noteCircumstances(trusted bool) {
	var warnings []string
	why := "commits to the rules cannot be seen"
	if c, ok := a.rules.(circumstances); ok {
		why, warnings = c.Untrusted(), c.Warnings()
	}
	switch {
	case a.byRules: // then nothing is judged, which is said elsewhere
		why = ""
	case a.exact == nil:
		why = a.noRules
	case trusted && !slices.Contains(a.table.Zones(), 0):
		why = "zone 0 is not judged, and no other one's flows are told by rules"
	case trusted:
		why = ""
	}
	switch {
	case why != "" && why != a.unasked:
		a.log.Info("the NAT rules are not asked: a flow that looks stale may be what they would make again; "+
			"what comes back after its delete is deleted ever more rarely, and reported", "why", why)
	case why == "" && a.unasked != "":
		a.log.Info("the NAT rules are asked")
	}
	for _, w := range warnings {
		if !slices.Contains(a.warnings, w) {
			a.log.Warn(w)
		}
	}
	a.unasked, a.warnings = why, warnings
}
