// Package kubernetes turns Kubernetes objects into frontends. It is pure: it
// asks no API server and no kernel, so a saved state of another machine gives
// the same frontends as the live one.
//
// The rules are those of kube-proxy 1.37 wherever they decide what is
// translated here, and wider only where a flow could otherwise be called stale
// that is right: every endpoint that is serving or ready is a valid backend,
// whatever the traffic policy, the topology hints or the node say.
//
// What cannot be used (an address that does not parse, a port out of range)
// contributes nothing, is reported as one [Error] and never stops the rest.
package kubernetes

import (
	"fmt"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
)

// Objects is a state of the cluster, each object at most once.
type Objects struct {
	Services       []*corev1.Service
	EndpointSlices []*discoveryv1.EndpointSlice
	Nodes          []*corev1.Node
	Pods           []*corev1.Pod
}

// Error is one field of one object that contributes nothing.
type Error struct {
	// Object is kind, namespace and name: "Service default/dns".
	Object string
	// Path is the field: "spec.externalIPs[1]".
	Path string
	Err  error
}

func (e *Error) Error() string { return e.Object + ": " + e.Path + ": " + e.Err.Error() }

// Unwrap returns what is wrong with the field.
func (e *Error) Unwrap() error { return e.Err }

// Frontends returns the frontends of all objects as the proxy on the named node
// sees them, by what is updated at once: one Service with its EndpointSlices
// ("service default/dns") or one Pod ("pod default/agent-a"). A unit without
// frontends is left out. Without a node name no endpoint is local and no Pod
// has host ports here. Every problem is an [*Error].
//
// Frontends refer to none of the objects.
func Frontends(objs Objects, node string) (units map[string][]frontend.Frontend, problems []error) {
	type key = types.NamespacedName
	eps := make(map[key][]*Slice, len(objs.Services))
	for _, o := range objs.EndpointSlices {
		s := ReadSlice(o, node)
		k := key{Namespace: s.Namespace, Name: s.Service}
		eps[k] = append(eps[k], s)
	}
	units = make(map[string][]frontend.Frontend, len(objs.Services))
	b := builder{node: node}
	for _, svc := range objs.Services {
		if fs := b.service(svc, eps[key{Namespace: svc.Namespace, Name: svc.Name}]); len(fs) > 0 {
			units["service "+svc.Namespace+"/"+svc.Name] = fs
		}
	}
	for _, pod := range objs.Pods {
		if fs := b.pod(pod); len(fs) > 0 {
			units["pod "+pod.Namespace+"/"+pod.Name] = fs
		}
	}
	return units, b.problems
}

// builder holds what building the frontends of one object after another shares:
// the point of view, the problems found, and memory for what is in between.
type builder struct {
	node     string
	problems []error

	dests   []destination
	targets []target // of the Service port at hand
	valid   []netip.AddrPort
}

func (b *builder) report(kind, namespace, name, path string, err error) {
	b.problems = append(b.problems, problem(kind, namespace, name, path, err))
}

func problem(kind, namespace, name, path string, err error) error {
	if namespace != "" {
		name = namespace + "/" + name
	}
	return &Error{Object: kind + " " + name, Path: path, Err: err}
}

func index(list string, i int) string { return list + "[" + strconv.Itoa(i) + "]" }

// protocol returns the number of a protocol; "" is TCP, as the API defaults it.
func protocol(p corev1.Protocol) (uint8, error) {
	switch p {
	case corev1.ProtocolUDP:
		return conntrack.UDP, nil
	case corev1.ProtocolTCP, "":
		return conntrack.TCP, nil
	case corev1.ProtocolSCTP:
		return conntrack.SCTP, nil
	}
	return 0, fmt.Errorf("%q is not a protocol (UDP, TCP or SCTP)", string(p))
}

func port(p int32) (uint16, error) {
	if p < 1 || p > 65535 {
		return 0, fmt.Errorf("%d is not a port (1-65535)", p)
	}
	return uint16(p), nil
}
