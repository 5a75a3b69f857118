package agent

import (
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
	gens      *nft.Generations
	namespace string

	mu      sync.Mutex
	checked time.Time
	alone   bool // nothing else translates
}

// NewRuleset returns the ruleset of a network namespace ("": the present one).
// gens may be nil, where the kernel has no nf_tables.
func NewRuleset(gens *nft.Generations, namespace string) Ruleset {
	return &nftRuleset{gens: gens, namespace: namespace}
}

// Generation implements Ruleset. iptables-legacy and IPVS commit without a sign,
// so that where either is in use no generation is trusted.
func (r *nftRuleset) Generation() (uint32, bool) {
	if r.gens == nil {
		return 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.checked.IsZero() || time.Since(r.checked) >= trustTime {
		legacy, lerr := nft.LegacyNAT(r.namespace)
		ipvs, ierr := nft.IPVS(r.namespace)
		r.checked, r.alone = time.Now(), lerr == nil && ierr == nil && !legacy && !ipvs
	}
	gen, ok, err := r.gens.Get()
	return gen, ok && err == nil && r.alone
}
