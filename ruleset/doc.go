// Package ruleset tells what the present NAT rules of a network namespace could
// do with a flow: which translations of its destination are possible, whether it
// may pass untranslated, and which rules decide. A flow that is translated as no
// rule could have translated it is stale, whoever wrote the rules: Docker,
// Podman, a service proxy or a person.
//
// [Open] reads nf_tables, which is what nft and iptables-nft write, into a
// [Ruleset], the rules of one generation. [Ruleset.Outcome] interprets them for
// the first packet of a flow, [Judge] judges whole tables of flows by that, and
// remembers outcomes. What is not in the rules, addresses and routes, a [Host]
// knows.
//
// The interpreter must never say that something is impossible that the kernel
// may do. So every expression is either understood exactly, or it makes the
// outcome of a packet that reaches it anything at all ([Outcome.Any]); what a
// packet's tuple does not tell may have any value, as its mark until a rule sets
// it; what is random may come out any way. Work for a packet is bounded, and what
// would need more of it is anything, too.
//
// Two things are taken for granted: nothing but the base chains of type nat at
// the hooks prerouting and output translates destinations (iptables-legacy and
// IPVS are looked for, see [Translators]); and no rule writes addresses or ports
// into packets between connection tracking and those hooks.
//
// The kernel's side is net/netfilter/nf_tables_core.c, nft_*.c, xt_*.c and
// nf_nat_core.c, whose functions the comments name.
package ruleset
