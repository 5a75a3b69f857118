// Package conntrack reads and changes the Linux kernel's connection-tracking
// table over netlink (ctnetlink), without cgo and without copying more of the
// table than is wanted.
//
// A [Flow] is one entry, a plain value. [Dial] opens the table of a network
// namespace. There are two tiers of reading: [Conn.Dump] iterates over borrowed
// flows, in constant memory and without an allocation a flow, and [Conn.List]
// copies them. [Conn.Delete] deletes flows as they were seen, and spares what
// has taken their place since.
//
// What is read always satisfies the [Filter] given. How much of it the kernel
// applies is found out by [Conn.Probe], since it cannot be told by the kernel's
// version, and since some kernels answer wrongly; the rest is done here. So a
// filter saves time and never decides what is true.
//
// [Parse], [ReadText] and [Flow.String] speak the text of conntrack(8) and
// /proc/net/nf_conntrack, on every operating system; Dial needs Linux and, in
// the user namespace that owns the network namespace, CAP_NET_ADMIN.
//
// The kernel's side of all this is net/netfilter/nf_conntrack_netlink.c, whose
// functions the comments name.
package conntrack
