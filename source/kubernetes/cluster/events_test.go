package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

// telling plays with Events of a source that knows x/dns and, of one port each,
// as many Services s0, s1, ... as told.
func telling(t *testing.T, services int, play func(t *testing.T, a *api, e *Events)) (log string) {
	t.Helper()
	var out bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(population()...)
		for i := range services {
			a.has.put(typed(named(service(), fmt.Sprint("s", i))))
		}
		src, err := New(a.config())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		e := NewEvents(src, slog.New(slog.NewTextHandler(&out, nil)))
		var done sync.WaitGroup
		done.Go(func() { _ = src.Run(ctx, discard{}) })
		done.Go(func() { e.Run(ctx) })
		pass(time.Second)
		play(t, a, e)
		cancel()
		done.Wait() // within the bubble: that nothing is left is synctest's to tell
	})
	return out.String()
}

// posted decodes what was written, in order.
func (a *api) posted(t *testing.T) (list []*corev1.Event) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme).UniversalDeserializer()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, body := range a.events {
		obj, _, err := decoder.Decode(body, nil, nil)
		if err != nil {
			t.Fatalf("%v in %q", err, body)
		}
		list = append(list, obj.(*corev1.Event))
	}
	return list
}

// What is written says of which Service, by whom, when and why.
func TestEvent(t *testing.T) {
	telling(t, 0, func(t *testing.T, a *api, e *Events) {
		at := time.Now()
		e.Warn("x", "dns", ReasonDisagrees, "the rules are wrong")
		pass(time.Second)
		got := a.posted(t)
		when := metav1.NewTime(at.Truncate(time.Second))
		want := []*corev1.Event{{
			TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
			ObjectMeta:     metav1.ObjectMeta{Namespace: "x", Name: fmt.Sprintf("dns.%x", at.UnixNano())},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "x", Name: "dns", UID: "dns-uid"},
			Type:           "Warning", Reason: "RulesetDisagrees", Message: "the rules are wrong",
			Source:         corev1.EventSource{Component: "flowsweep", Host: "n1"},
			FirstTimestamp: when, LastTimestamp: when, Count: 1,
			ReportingController: "flowsweep.dev/agent", ReportingInstance: "n1",
		}}
		if d := gocmp.Diff(want, got); d != "" {
			t.Errorf("events (-want +got):\n%s", d)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		last := a.requests[len(a.requests)-1]
		if last.Method != "POST" || last.URL.Path != "/api/v1/namespaces/x/events" {
			t.Errorf("%s %s", last.Method, last.URL)
		}
	})
}

// Of one reason, a Service has one Event an hour; of two reasons, and two
// Services of one reason, both.
func TestEventsOncePerHour(t *testing.T) {
	telling(t, 1, func(t *testing.T, a *api, e *Events) {
		count := func(want int, when string) {
			t.Helper()
			if got := len(a.posted(t)); got != want {
				t.Errorf("%d events %s, want %d", got, when, want)
			}
		}
		for range 100 {
			e.Warn("x", "dns", ReasonCleaned, "again")
			pass(30 * time.Second)
		}
		count(1, "in 50 minutes")
		e.Warn("x", "dns", ReasonDisagrees, "another reason")
		e.Warn("x", "s0", ReasonCleaned, "another Service")
		pass(9 * time.Minute)
		e.Warn("x", "dns", ReasonCleaned, "a minute too early")
		pass(time.Minute)
		count(3, "after another reason and another Service")
		e.Warn("x", "dns", ReasonCleaned, "an hour later")
		pass(time.Minute)
		count(4, "after an hour")
		pass(2 * time.Hour)
		e.Warn("x", "s0", ReasonCleaned, "and what is over is forgotten")
		if len(e.last) != 1 {
			t.Errorf("%d topics are remembered, want 1", len(e.last))
		}
	})
}

// Whatever happens at once, what waits is bounded and what a minute sees is too;
// what found no room is told of when it lasts.
func TestEventsAreBounded(t *testing.T) {
	telling(t, 200, func(t *testing.T, a *api, e *Events) {
		all := func() {
			for i := range 200 {
				e.Warn("x", fmt.Sprint("s", i), ReasonCleaned, "all at once")
			}
		}
		before := time.Now()
		all()
		if took := time.Since(before); took > 0 {
			t.Errorf("Warn took %s", took)
		}
		pass(time.Minute)
		if n := len(a.posted(t)); n < eventsPerMinute || n > eventsPerMinute+1 {
			t.Errorf("%d events in a minute, want %d", n, eventsPerMinute)
		}
		pass(10 * time.Minute)
		first := len(a.posted(t))
		if first < eventQueue || first > eventQueue+1 { // one may be on its way at once
			t.Errorf("%d events, want those %d that found room", first, eventQueue)
		}
		all()
		pass(10 * time.Minute)
		events := a.posted(t)
		seen := map[string]bool{}
		for _, ev := range events {
			if seen[ev.InvolvedObject.Name] {
				t.Errorf("%s has two", ev.InvolvedObject.Name)
			}
			seen[ev.InvolvedObject.Name] = true
		}
		if n := len(events) - first; n < eventQueue || n > eventQueue+2 {
			t.Errorf("%d more events, want those %d that found room now", n, eventQueue)
		}
	})
}

// One that cannot be written is logged with the remedy and dropped, and holds up
// no other.
func TestEventsThatCannotBeWritten(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"forbidden": {
			apierrors.NewForbidden(schema.GroupResource{Resource: "events"}, "", errors.New("not you")),
			`msg="an Event cannot be written; grant create on events, or set sources.kubernetes.events: false" ` +
				`service=x/dns reason=FrequentlyCleaned err="events is forbidden: not you"`,
		},
		"nobody listens": {refused(40000), "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			log := telling(t, 1, func(t *testing.T, a *api, e *Events) {
				a.broken(tc.err, kinds)
				e.Warn("x", "dns", ReasonCleaned, "lost")
				pass(time.Minute)
				a.broken(nil, kinds)
				e.Warn("x", "s0", ReasonCleaned, "not lost")
				pass(time.Minute)
				if events := a.posted(t); events[len(events)-1].InvolvedObject.Name != "s0" {
					t.Errorf("%v", events)
				}
			})
			if n := strings.Count(log, "\n"); n != 1 || !strings.Contains(log, tc.want) {
				t.Errorf("log %q, want one line with %q", log, tc.want)
			}
		})
	}
}

// A Service that is gone has no Event, a name that is none does no harm, and the
// text is as short as it must be.
func TestEventsAtTheEdge(t *testing.T) {
	log := telling(t, 0, func(t *testing.T, a *api, e *Events) {
		a.remove(service())
		pass(time.Second)
		e.Warn("x", "dns", ReasonCleaned, "gone")
		e.Warn("", "", ReasonCleaned, "nobody")
		pass(time.Minute)
		if n := len(a.posted(t)); n != 0 {
			t.Errorf("%d events", n)
		}
		long := service(func(s *corev1.Service) { s.Name = strings.Repeat("n", 253) })
		a.put(long)
		pass(time.Second)
		e.Warn("x", long.Name, ReasonAnnotation, strings.Repeat("m", 5000))
		pass(time.Minute)
		if got := a.posted(t); len(got) != 1 || len(got[0].Name) > 253 || len(got[0].Message) > 1024 {
			t.Errorf("%d events", len(got))
		}
	})
	if log != "" {
		t.Errorf("log %q", log)
	}
}

// An Event that is told of before the source runs, or while nobody writes, waits
// and holds nothing up.
func TestEventsBeforeTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(population()...)
		src, err := New(a.config())
		if err != nil {
			t.Fatal(err)
		}
		e := NewEvents(src, slog.New(slog.DiscardHandler))
		e.Warn("x", "dns", ReasonCleaned, "early")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		e.Run(ctx) // the source never does
		if n := len(a.posted(t)); n != 0 {
			t.Errorf("%d events", n)
		}
	})
}
