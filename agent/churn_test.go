package agent

import (
	"testing"
	"time"
)

// Changes that come faster than passes share them, and changes without end do
// not make walks without end.
func TestChurn(t *testing.T) {
	observe(t, func(r *simRun, a *Agent, _ *hungRules, o *observed) {
		time.Sleep(2 * simWindow)
		churn := func(each, length time.Duration) (passes int, walked time.Duration) {
			o.mu.Lock()
			o.passes = nil
			o.mu.Unlock()
			for end := time.Now().Add(length); time.Now().Before(end); {
				r.truth[0] = []byte{1 + r.truth[0][0]%2}
				r.tell(0)
				r.w.commit(0, r.truth[0])
				time.Sleep(each)
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			for _, p := range o.passes {
				walked += walking(&p.Report)
			}
			return len(o.passes), walked
		}
		if n, _ := churn(time.Millisecond, 2*time.Second); n < 20 || n > 101 {
			t.Errorf("2000 changes in 2 s made %d passes, want one in 20 ms at most", n)
		}
		_, _ = churn(time.Millisecond, 2*time.Minute) // until the budget is spent
		if _, walked := churn(time.Millisecond, time.Minute); walked > 20*time.Second {
			t.Errorf("changes without end make walks that take %s of a minute", walked)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.budget > 0 {
			t.Error("the budget was never spent: nothing was tested")
		}
	})
}
