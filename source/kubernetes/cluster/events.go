package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The reasons of Events.
const (
	ReasonDisagrees  = "RulesetDisagrees"       // the node's rules make what is wrong
	ReasonCleaned    = "FrequentlyCleaned"      // flows went stale again and again
	ReasonAnnotation = "InvalidSweepAnnotation" // kubernetes.AnnotationSweep
)

const (
	// eventPause is the shortest time between two Events of one reason about one
	// Service.
	eventPause = time.Hour
	// eventsPerMinute bounds what a node writes, whatever happens to it.
	eventsPerMinute = 10
	// eventQueue bounds what waits for the API server; more is dropped.
	eventQueue = 64
	// eventTimeout bounds one attempt.
	eventTimeout = 10 * time.Second
)

// Events writes Events about Services. They are a help for people and never hold
// anything up: what cannot be written is logged and dropped.
type Events struct {
	source *Source
	log    *slog.Logger
	queue  chan event

	mu   sync.Mutex
	last map[topic]time.Time
}

// topic is what is told of once in an eventPause.
type topic struct {
	service name
	reason  string
}

type event struct {
	topic
	message string
	at      time.Time
}

// NewEvents returns what writes Events as the source's node; Run does it.
func NewEvents(s *Source, log *slog.Logger) *Events {
	return &Events{source: s, log: log, queue: make(chan event, eventQueue), last: map[topic]time.Time{}}
}

// Warn has an Event about a Service written, unless one of that reason was within
// the last hour. It returns at once.
func (e *Events) Warn(namespace, service, reason, message string) {
	now := time.Now()
	t := topic{name{Namespace: namespace, Name: service}, reason}
	e.mu.Lock()
	defer e.mu.Unlock()
	for old, at := range e.last {
		if now.Sub(at) >= eventPause {
			delete(e.last, old)
		}
	}
	if _, told := e.last[t]; told {
		return
	}
	select {
	case e.queue <- event{t, message, now}:
		e.last[t] = now
	default: // a pause later it is told of again, if it lasts
	}
}

// Run writes until ctx ends.
func (e *Events) Run(ctx context.Context) {
	pause := time.NewTicker(time.Minute / eventsPerMinute)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case ev := <-e.queue:
			if err := e.write(ctx, ev); err != nil && ctx.Err() == nil {
				e.log.Warn("an Event cannot be written; grant create on events, or set sources.kubernetes.events: false",
					"service", ev.service.String(), "reason", ev.reason, "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
	}
}

func (e *Events) write(ctx context.Context, ev event) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	uid, ok := e.source.serviceUID(ev.service)
	if !ok {
		return nil // gone since
	}
	at := metav1.NewTime(ev.at)
	obj := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ev.service.Namespace,
			Name:      fmt.Sprintf("%.200s.%x", ev.service.Name, ev.at.UnixNano()),
		},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Service", Namespace: ev.service.Namespace, Name: ev.service.Name, UID: uid,
		},
		Type: corev1.EventTypeWarning, Reason: ev.reason, Message: fmt.Sprintf("%.1000s", ev.message),
		Source:         corev1.EventSource{Component: "flowsweep", Host: e.source.cfg.Node},
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		ReportingController: "flowsweep.dev/agent", ReportingInstance: e.source.cfg.Node,
	}
	return e.source.client.of[services].Post().Namespace(obj.Namespace).Resource("events").Body(obj).Do(ctx).Error()
}

// serviceUID returns the UID of a Service that the source knows.
func (s *Source) serviceUID(n name) (types.UID, bool) {
	st := s.state.Load()
	if st == nil {
		return "", false
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	svc := st.services[n]
	if svc == nil {
		return "", false
	}
	return svc.UID, true
}
