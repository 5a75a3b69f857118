package cli

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/agent"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source/kubernetes"
	"github.com/flowsweep/flowsweep/source/kubernetes/cluster"
)

// serviceEvents tells of Services what their owners should know. It is an
// agent.Observer.
type serviceEvents struct {
	events    *cluster.Events
	threshold int // cleanings in an hour

	mu       sync.Mutex
	cleaned  map[string]int // passes that deleted flows of a Service, this hour
	hourEnds time.Time
}

// serviceOf returns the Service that owns a frontend of a kind, as ServiceFrontends
// names it.
func serviceOf(owner string, k frontend.Kind) (namespace, name string, ok bool) {
	switch k {
	case frontend.ClusterIP, frontend.ExternalIP, frontend.LoadBalancerIP, frontend.NodePort:
	default:
		return "", "", false
	}
	namespace, rest, ok := strings.Cut(owner, "/")
	name, _, _ = strings.Cut(rest, ":")
	return namespace, name, ok && !strings.ContainsAny(namespace+name, " /") // not "service range 192.0.2.0/24"
}

// Disagrees implements agent.Observer.
func (e *serviceEvents) Disagrees(d agent.Disagreement) {
	if ns, name, ok := serviceOf(d.Owner, d.Kind); ok {
		e.events.Warn(ns, name, cluster.ReasonDisagrees, fmt.Sprintf(
			"the rules of this node send flows to %s to %s, which is no backend of it, since %s; is its service proxy running and up to date?",
			d.Frontend, d.Backend, d.Since.UTC().Format(time.RFC3339)))
	}
}

// Pass implements agent.Observer.
func (e *serviceEvents) Pass(p agent.Pass) {
	if p.Report.Deleted == 0 {
		return
	}
	seen := map[[2]string]bool{}
	for _, c := range p.Stale {
		if ns, name, ok := serviceOf(c.Owner, c.Kind); ok {
			seen[[2]string{ns, name}] = true
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if now := time.Now(); !now.Before(e.hourEnds) {
		e.cleaned, e.hourEnds = map[string]int{}, now.Add(time.Hour)
	}
	for s := range seen {
		id := s[0] + "/" + s[1]
		if e.cleaned[id]++; e.cleaned[id] == e.threshold+1 {
			e.events.Warn(s[0], s[1], cluster.ReasonCleaned, fmt.Sprintf(
				"its stale flows had to be cleaned more than %d times within an hour; do its backends come and go?", e.threshold))
		}
	}
}

// Settled implements agent.Observer: all is well.
func (e *serviceEvents) Settled(agent.Settled) {}

// problem tells of an annotation that does not count.
func (e *serviceEvents) problem(err error) {
	var p *kubernetes.Error
	if !errors.As(err, &p) || !strings.Contains(p.Path, kubernetes.AnnotationSweep) {
		return
	}
	if ns, name, ok := strings.Cut(strings.TrimPrefix(p.Object, "Service "), "/"); ok {
		e.events.Warn(ns, name, cluster.ReasonAnnotation, p.Path+": "+p.Err.Error())
	}
}
