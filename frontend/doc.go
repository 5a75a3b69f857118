// Package frontend holds the desired state of a host that forwards: which
// addresses and ports clients send to (frontends) and where their flows may go
// (backends). Its one judgement, [Table.Judge], tells for a conntrack flow
// whether it is to be deleted, to be kept, or nobody's business here, and why.
//
// A source puts frontends into a [Table] by the unit that it updates at once,
// with [Table.Set]; the [Change] that comes back says which flows can have
// become stale by that. A frontend that is gone stays as a [Tombstone] until
// nothing is translated for it any more.
//
// The package knows nothing of Kubernetes and opens no socket.
package frontend
