package conntrack

// DumpStats tells what one dump cost and gave.
type DumpStats struct {
	Returned  int // flows that the kernel copied to this process
	Wanted    int // of those, flows that satisfied the filter
	Malformed int // messages that held no flow that could be judged; passed over
}

// DeleteResult counts the outcomes of a Delete. They add up to the number of
// flows that the kernel was asked about.
type DeleteResult struct {
	Deleted int
	Gone    int // not there any more, or another flow has the tuple by now
	Busy    int // offloaded to a flowtable; may be deleted when it comes back
	Failed  int

	// Errs has the first error of each kind: EBUSY, and every errno behind
	// Failed.
	Errs []error
}

// Add sums up two results, keeping the first error of each kind.
func (r *DeleteResult) Add(o DeleteResult) {
	r.Deleted += o.Deleted
	r.Gone += o.Gone
	r.Busy += o.Busy
	r.Failed += o.Failed
	for _, err := range o.Errs {
		r.addErr(err)
	}
}

func (r *DeleteResult) addErr(err error) {
	for _, e := range r.Errs {
		if e.Error() == err.Error() {
			return
		}
	}
	r.Errs = append(r.Errs, err)
}

// Config says how to reach a table. The zero Config is right for most.
type Config struct {
	// NetNS is a network namespace, as a path (/run/netns/NAME,
	// /proc/PID/ns/net). Empty: the one that the calling thread is in.
	// Entering another one needs CAP_SYS_ADMIN.
	NetNS string

	// Features overrides the probe of what the kernel honours.
	Features *Features
}
