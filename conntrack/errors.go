package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrUnsupported: this operating system has no conntrack table.
	ErrUnsupported = errors.New("the conntrack table needs Linux; read a saved one with --flows")
	// ErrNoCtnetlink: the kernel has no netlink interface to conntrack.
	ErrNoCtnetlink = errors.New("this kernel has no ctnetlink: load the module nf_conntrack_netlink, " +
		"or build it with CONFIG_NF_CT_NETLINK")
	// ErrResized: the hash table changed its size while it was dumped, so
	// that flows may have been missed. Dump again.
	ErrResized = errors.New("the conntrack hash table was resized during the dump")
	// ErrInterrupted: the kernel says that the dump is not consistent.
	ErrInterrupted = errors.New("the kernel interrupted the dump")
	// ErrTruncated: a message was longer than the buffer.
	ErrTruncated = errors.New("netlink message truncated")
	// ErrNoAnswer: a request was sent and nothing came back in time.
	ErrNoAnswer = errors.New("the kernel did not answer")
	// ErrDumpRunning: Dump was called while another one runs on the same Conn.
	ErrDumpRunning = errors.New("a dump is already running on this Conn")
	// ErrIncomplete: a flow lacks what a request must carry.
	ErrIncomplete = errors.New("incomplete flow")
)

// OpError is an operation that the kernel refused. The errno in Err is reached
// by errors.Is(err, syscall.EPERM) and the like.
type OpError struct {
	Op  string // "dump", "delete", "create", "count", "open"
	Err error
	Msg string // the kernel's own words (NLMSGERR_ATTR_MSG), often empty
}

func (e *OpError) Error() string {
	s := "conntrack " + e.Op + ": " + e.Err.Error()
	if e.Msg != "" {
		s += " (" + e.Msg + ")"
	}
	if errors.Is(e.Err, syscall.EPERM) {
		s += ": CAP_NET_ADMIN is missing; run as root, or grant it " +
			"(setcap cap_net_admin+ep, systemd AmbientCapabilities=, a container's capabilities)"
	}
	return s
}

func (e *OpError) Unwrap() error { return e.Err }

// Is makes a refusal for want of CAP_NET_ADMIN match fs.ErrPermission too.
func (e *OpError) Is(target error) bool {
	return target == fs.ErrPermission && errors.Is(e.Err, syscall.EPERM)
}

func incomplete(f *Flow, what string) error {
	return fmt.Errorf("%w: %s in %s", ErrIncomplete, what, f)
}
