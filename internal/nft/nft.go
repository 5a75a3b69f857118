// Package nft tells when the NAT rules of a network namespace were last
// written, and whether that can be told there at all: [Generations] counts the
// commits of nft and iptables-nft, of which iptables-legacy ([LegacyNAT]) and
// IPVS ([IPVS]) know nothing. It reads, and never writes a rule or makes a
// table.
package nft

import "errors"

// ErrNoNFT says that the kernel has no nf_tables.
var ErrNoNFT = errors.New("this kernel has no nf_tables: load the module nf_tables, " +
	"or build it with CONFIG_NF_TABLES")

// Family is the family of an nftables table (NFPROTO_*, linux/netfilter.h).
type Family uint8

// The families that NAT rules live in.
const (
	INet Family = 1
	IPv4 Family = 2
	IPv6 Family = 10
)

// String returns the word that nft prints.
func (f Family) String() string {
	switch f {
	case INet:
		return "inet"
	case IPv6:
		return "ip6"
	}
	return "ip"
}

// Object is a table, or a chain in it where Chain is set. iptables-nft keeps
// the tables of iptables as tables of the same names.
type Object struct {
	Family Family
	Table  string
	Chain  string
}

// String writes it as nft would: "table ip nat", "chain ip nat KUBE-SERVICES".
func (o Object) String() string {
	if o.Chain == "" {
		return "table " + o.Family.String() + " " + o.Table
	}
	return "chain " + o.Family.String() + " " + o.Table + " " + o.Chain
}
