// Package static reads the desired state from files: YAML or JSON documents,
// this project's FrontendList and Kubernetes objects mixed at will, as kubectl
// prints them.
//
// FrontendList is read strictly: whatever is unknown, missing or malformed is a
// problem, and its item does not count. Kubernetes objects are read as other
// clients read them: fields that do not matter here are passed over. Whatever
// is a problem is reported with its place, and the rest counts.
//
//	apiVersion: flowsweep.dev/v1alpha1
//	kind: FrontendList
//	items:
//	- name: wireguard                  # unique in all inputs
//	  protocol: UDP                    # UDP, TCP or SCTP
//	  addresses: ["192.0.2.1"]         # or "*": every address of this host
//	  ports: "50000-50099"             # a port, "53,5353", ranges, or all of these
//	  backends: ["198.51.100.142"]     # an address: the same port; "192.0.2.9:53"; "[2001:db8::1]:53"
//
// Only backends of an address's own family count for it, so that one list may
// serve several items; an address without any has no backends. "*" stands for the
// addresses of the families that there are backends of, and of both where there
// is none at all. Ports of a range that lead to a backend with a port all lead to
// that port.
package static

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/strictyaml"
	"github.com/flowsweep/flowsweep/source/kubernetes"
)

const (
	// maxInput bounds the memory that one input takes.
	maxInput = 512 << 20
	// maxFrontends bounds what the items of FrontendLists make, each of its
	// addresses times its ports.
	maxFrontends = 1 << 20
)

// Input is a stream of documents. Name stands for it in problems: a file's
// path, "-" for standard input.
type Input struct {
	Name string
	R    io.Reader
}

// State is what the inputs say.
type State struct {
	// Units are the frontends by what is updated at once: "static NAME" for an
	// item of a FrontendList, "service NAMESPACE/NAME", "pod NAMESPACE/NAME".
	Units map[string][]frontend.Frontend

	// NodeFound tells whether a Node of the name given was read;
	// NodeAddresses are the addresses that it lists, without loopback.
	NodeFound     bool
	NodeAddresses []netip.Addr
	// PodRanges are the ranges of its pods, and the addresses of those that are in
	// none.
	PodRanges []netip.Prefix
	// HostPortsUnknown says that there are Services, and no Pod or no name of a
	// node, by which the host ports of their node would be known.
	HostPortsUnknown bool

	// Ignored is the number of objects of kinds that say nothing of frontends.
	Ignored int

	// Problems are in the order of the inputs, first those of reading objects,
	// then those of what the Kubernetes objects say.
	Problems []Problem
}

// Problem is something in an input that does not count.
type Problem struct { //nolint:errname // it is part of a result; the error of Read is another thing
	Input  string // the input's name; "" where it is about all of them
	Line   int    // from 1; 0 where it is about the whole input
	Object string // a Kubernetes object, as far as known: "Service default/dns"
	Path   string // the field: "items[2].ports"
	Err    error

	// Lost says that a whole document, object or item was not read, so that the
	// frontends and backends it has only seem to be missing. It is false where a
	// field of an object that was read makes no sense: no proxy serves that.
	Lost bool
}

// Error returns all that is known, as "state.yaml:7: items[2].ports: what is wrong".
func (p Problem) Error() string {
	var s string
	if p.Input != "" {
		s = p.Input
		if p.Line > 0 {
			s += ":" + strconv.Itoa(p.Line)
		}
		s += ": "
	}
	if p.Object != "" {
		s += p.Object + ": "
	}
	if p.Path != "" {
		s += p.Path + ": "
	}
	return s + p.Err.Error()
}

// Unwrap returns what is wrong.
func (p Problem) Unwrap() error { return p.Err }

// Read reads the inputs, in order, and builds the frontends as the proxy on the
// named node sees them. Without a name no endpoint is local and no Pod has host
// ports.
//
// An object given twice counts as given last, like with kubectl apply; an item
// of a FrontendList that has another's name is a problem. Objects without a
// namespace are in "default". An input holds at most 512 MiB, a YAML document 32
// MiB unless it is a list as kubectl prints it. JSON is read several times
// faster than YAML.
//
// The error is that of reading an input; what is wrong inside it is in
// [State].Problems. Whoever concludes from what a state lacks looks there first,
// for problems that are Lost.
func Read(node string, inputs ...Input) (*State, error) {
	r := reader{
		state:   &State{Units: map[string][]frontend.Frontend{}},
		objects: map[string]place{},
		names:   map[string]place{},
	}
	for _, in := range inputs {
		data, err := readAll(in.R, maxInput)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", in.Name, err)
		}
		r.input = in.Name
		ignored := r.state.Ignored
		r.seen = false
		r.stream(toUTF8(data))
		switch ignored = r.state.Ignored - ignored; {
		case !r.seen && ignored == 0:
			r.report(0, "", "", errors.New("is empty; a state without frontends is a FrontendList without items"))
		case !r.seen:
			r.report(0, "", "", fmt.Errorf("holds nothing that is read, only %d objects of other kinds; "+
				"give Service, EndpointSlice, Node, Pod or FrontendList", ignored))
		}
	}
	r.build(node)
	return r.state, nil
}

func readAll(r io.Reader, limit int) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	if err == nil && len(data) > limit {
		err = fmt.Errorf("more than %d MiB; give less at once", limit>>20)
	}
	return data, err
}

// reader gathers what the inputs hold.
type reader struct {
	state *State
	input string // the one at hand

	kubernetes kubernetes.Objects
	objects    map[string]place // of the Kubernetes objects, by kind, namespace and name
	names      map[string]place // of the items of FrontendLists
	frontends  int              // that those items make
	seen       bool             // the input at hand had something that is read, or should have been
	bounds     strictyaml.Bounds
}

// place is where something was read.
type place struct {
	input string
	line  int
	index int // of a Kubernetes object in its list
}

// report adds a problem for which something is not read.
func (r *reader) report(line int, object, path string, err error) {
	r.seen = true
	r.state.Problems = append(r.state.Problems,
		Problem{Input: r.input, Line: line, Object: object, Path: path, Err: err, Lost: true})
}

// build turns the Kubernetes objects into frontends.
func (r *reader) build(node string) {
	s := r.state
	units, problems := kubernetes.Frontends(r.kubernetes, node)
	for name, fs := range units {
		s.Units[name] = fs
	}
	for _, err := range problems {
		var e *kubernetes.Error
		if errors.As(err, &e) {
			at := r.objects[e.Object]
			s.Problems = append(s.Problems, Problem{
				Input: at.input, Line: at.line, Object: e.Object, Path: e.Path, Err: e.Err,
			})
		}
	}
	s.HostPortsUnknown = len(r.kubernetes.Services) > 0 && (len(r.kubernetes.Pods) == 0 || node == "")
	if node == "" {
		if hasHostPorts(r.kubernetes.Pods) {
			s.Problems = append(s.Problems, Problem{
				Err: errors.New("the state has Pods with host ports, which count on their own node alone; name it with --node"),
			})
		}
		return
	}
	for _, n := range r.kubernetes.Nodes {
		if n.Name == node {
			s.NodeFound = true
			var pods []netip.Addr
			for _, p := range r.kubernetes.Pods {
				pods = append(pods, kubernetes.PodAddresses(p, node)...)
			}
			s.NodeAddresses, s.PodRanges = kubernetes.NodeAddresses(n), kubernetes.PodRanges(n, pods...)
		}
	}
	if n := len(r.kubernetes.Nodes); n > 0 && !s.NodeFound {
		s.Problems = append(s.Problems, Problem{
			Object: "Node " + node,
			Err:    fmt.Errorf("is not among the Nodes of the state (%d); check --node", n),
		})
	}
}

func hasHostPorts(pods []*corev1.Pod) bool {
	for _, p := range pods {
		if fs, _ := kubernetes.PodFrontends(p, p.Spec.NodeName); len(fs) > 0 {
			return true
		}
	}
	return false
}
