package static

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

// pollInterval is how often a Watcher looks at its files.
//
// It polls and asks for no inotify events, because a look by path sees alike
// whatever happens: a rename over the file, a symbolic link that is swapped above
// it (the ..data of a ConfigMap), a mount over its directory, and a write on
// another host where the file lies on NFS or in an overlay's lower layer, of
// which inotify tells nothing. It costs a stat(2) a file.
const pollInterval = 500 * time.Millisecond

// Watcher is the source of a set of files. It reads them again when they change:
//
//   - What is read counts when two polls in a row, half a second apart, found the
//     same, for all files together. So one that is being written is left alone,
//     and what moves from one file to another is never missing.
//   - It counts as a whole. As long as a file cannot be read, is empty, or holds
//     another [Problem] that is Lost, what was good last stays in force, and Fault
//     tells the place.
//   - A file that vanishes from a directory is taken out of the state. One that
//     was named itself, and a directory, must be there.
//   - Before the first Replace everything must have been good once.
//
// A writer that pauses in the middle for longer than the polls are apart, at a
// point where what is there is valid, cannot be told from one that is done: write
// another file and rename it over the first.
type Watcher struct {
	node  string
	every time.Duration
	poke  chan struct{}

	mu    sync.Mutex
	files []string
}

var _ source.Source = (*Watcher)(nil)

// Watch returns the source of files, as the proxy on the named node sees them
// (see [Read]). A directory stands for the *.yaml, *.yml and *.json files in it,
// in order of their names, without those that begin with a dot and without
// subdirectories.
func Watch(files []string, node string) *Watcher {
	return &Watcher{
		node:  node,
		every: pollInterval,
		poke:  make(chan struct{}, 1),
		files: slices.Clone(files),
	}
}

// Name implements source.Source.
func (w *Watcher) Name() string { return "static" }

// Reload reads all files again at once, whatever stat(2) says of them. It does
// not wait; what was found counts when the next poll finds the same.
func (w *Watcher) Reload() {
	select {
	case w.poke <- struct{}{}:
	default: // one is due already
	}
}

// SetFiles replaces the files and reads them at once. As long as one of them
// cannot be read, the state of those before stays in force.
func (w *Watcher) SetFiles(files []string) {
	w.mu.Lock()
	w.files = slices.Clone(files)
	w.mu.Unlock()
	w.Reload()
}

func (w *Watcher) paths() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.files
}

// Run implements source.Source: each state that counts is delivered with Host,
// as far as the state has this node or had it, and Replace; a fault is a
// [*FaultError]. It returns nil when ctx ends, but not while a file system hangs.
func (w *Watcher) Run(ctx context.Context, sink source.Sink) error {
	p := poller{Watcher: w, sink: sink}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		anew := false
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-w.poke:
			anew = true
		}
		p.poll(anew)
		// Not a Ticker, whose ticks may follow each other closely: two polls that
		// agree prove nothing then.
		timer.Reset(w.every)
	}
}

// FaultError is what keeps files, or parts of them, from counting.
type FaultError struct {
	// Applied: the files' present state is in force, without the fields that
	// make no sense. Otherwise the last good one is.
	Applied bool
	// Errs are what is wrong, each with its place; a [Problem] where the content
	// is.
	Errs []error
}

// Error returns the first few.
func (e *FaultError) Error() string {
	const most = 5
	var b strings.Builder
	if e.Applied {
		b.WriteString("in force, but for ")
	}
	for i, err := range e.Errs {
		switch {
		case i == most:
			fmt.Fprintf(&b, "; and %d more", len(e.Errs)-most)
			return b.String()
		case i > 0:
			b.WriteString("; ")
		}
		b.WriteString(err.Error())
	}
	return b.String()
}

// Unwrap returns what is wrong.
func (e *FaultError) Unwrap() []error { return e.Errs }

var (
	errNotRegular = errors.New("is not a regular file")
	errEmptied    = errors.New("an empty directory is in the place of what was there; " +
		"a state without frontends is a FrontendList without items")
)

// entry is what was found at a path.
type entry struct {
	path string
	info fs.FileInfo // with symbolic links followed; nil where that failed
	dir  bool        // a directory that was named; its files are further entries
	err  error       // why it cannot be read
	data []byte
	sum  [sha256.Size]byte
}

// poller is a Watcher at work.
type poller struct {
	*Watcher
	sink source.Sink

	seen    []*entry  // by the last poll
	since   time.Time // when this was first seen
	judged  bool      // it was found twice and is in force, or a fault
	moves   int       // polls in a row that found something else each
	applied []*entry  // what is in force; nil before the first Replace
	partial error     // what of it is not in force
	hasHost bool
	fault   string // that stands
}

func (p *poller) poll(anew bool) {
	now := p.list()
	if !anew && p.judged && slices.EqualFunc(now, p.seen, sameStamp) {
		return
	}
	for _, e := range now {
		e.read()
	}
	before := p.seen
	p.seen = now
	switch {
	case before == nil || !slices.EqualFunc(now, before, sameContent):
		p.since, p.judged = time.Now(), false
		// The first move is what every change begins with; further ones are told
		// of once, until the files rest.
		if p.moves++; p.moves == 2 {
			p.tell(&FaultError{Errs: moving(before, now, p.every)})
		}
	case !p.judged && time.Since(p.since) >= p.every: // Reload may come in between
		p.judged, p.moves = true, 0
		p.judge()
	}
	for _, e := range now {
		e.data = nil
	}
}

// list returns what stands at the paths, as far as stat(2) tells.
func (p *poller) list() []*entry {
	list := []*entry{}
	known := map[string]bool{}
	add := func(path string) *entry {
		e := &entry{path: path}
		if !known[path] {
			known[path] = true
			e.stat()
			list = append(list, e)
		}
		return e
	}
	for _, path := range p.paths() {
		e := add(filepath.Clean(path))
		if e.info == nil || !e.info.IsDir() {
			continue
		}
		var names []string
		e.dir = true
		names, e.err = p.names(e.path)
		for _, name := range names {
			add(filepath.Join(e.path, name))
		}
	}
	return list
}

// names returns the files in a directory, in order.
func (p *poller) names(dir string) ([]string, error) {
	found, err := os.ReadDir(dir)
	if err != nil {
		return nil, at(dir, err)
	}
	var names []string
	for _, f := range found {
		if Reads(f.Name()) {
			names = append(names, f.Name())
		}
	}
	names = append(names, p.missed(dir, names)...)
	slices.Sort(names)
	return names, nil
}

// missed returns files that the last poll found and that are there, though they
// are not among the names: readdir(3) may pass over a file that another one is
// renamed over meanwhile.
func (p *poller) missed(dir string, names []string) (missed []string) {
	for _, e := range p.seen {
		name := filepath.Base(e.path)
		if filepath.Dir(e.path) != dir || !Reads(name) {
			continue
		}
		if _, found := slices.BinarySearch(names, name); found {
			continue
		}
		if _, err := os.Lstat(e.path); !errors.Is(err, fs.ErrNotExist) {
			missed = append(missed, name)
		}
	}
	return missed
}

// Reads tells by its name whether a file in a directory is one of the state.
func Reads(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return name[0] != '.'
	}
	return false
}

func (e *entry) stat() {
	info, err := os.Stat(e.path)
	switch {
	case err != nil:
		e.err = at(e.path, err)
		return
	case !info.Mode().IsRegular(): // a FIFO would never end
		e.err = fmt.Errorf("%s: %w", e.path, errNotRegular)
	case info.Size() > maxInput:
		e.err = fmt.Errorf("%s: more than %d MiB; split it", e.path, maxInput>>20)
	}
	e.info = info
}

func (e *entry) read() {
	if e.dir || e.err != nil {
		return
	}
	f, err := os.Open(e.path)
	if err != nil {
		e.err = at(e.path, err)
		return
	}
	defer f.Close()
	if e.data, err = readAll(f, maxInput); err != nil {
		e.err = at(e.path, err)
		return
	}
	e.sum = sha256.Sum256(e.data)
}

// at returns an error as "path: what is wrong".
func at(path string, err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	return fmt.Errorf("%s: %w", path, err)
}

// same tells whether both were found, or not found, alike.
func same(a, b *entry) bool {
	if a.path != b.path || a.dir != b.dir || (a.err == nil) != (b.err == nil) ||
		a.err != nil && a.err.Error() != b.err.Error() {
		return false
	}
	return !a.dir || os.SameFile(a.info, b.info)
}

// sameStamp tells whether nothing says that the content may have changed. The
// time of the inode's change is among what is compared, as the other one can be
// set back (cp -p, rsync -t).
func sameStamp(a, b *entry) bool {
	if !same(a, b) {
		return false
	}
	x, y := a.info, b.info
	return a.dir || a.err != nil || os.SameFile(x, y) && x.Size() == y.Size() &&
		x.ModTime().Equal(y.ModTime()) && changeTime(x).Equal(changeTime(y))
}

func sameContent(a, b *entry) bool { return same(a, b) && a.sum == b.sum }

// moving names what two polls found different.
func moving(before, now []*entry, every time.Duration) (errs []error) {
	gone := map[string]*entry{}
	for _, e := range before {
		gone[e.path] = e
	}
	var paths []string
	for _, e := range now {
		if b := gone[e.path]; b == nil || !sameContent(b, e) {
			paths = append(paths, e.path)
		}
		delete(gone, e.path)
	}
	paths = slices.AppendSeq(paths, maps.Keys(gone))
	slices.Sort(paths)
	for _, path := range paths {
		errs = append(errs, fmt.Errorf("%s: changed twice within %v; it is read when it rests", path, 2*every))
	}
	return errs
}

// judge puts what was found into force, or tells why not.
func (p *poller) judge() {
	if p.applied != nil && slices.EqualFunc(p.seen, p.applied, sameContent) {
		p.tell(p.partial)
		return
	}
	state, errs := p.state()
	if len(errs) > 0 {
		p.tell(&FaultError{Errs: errs})
		return
	}
	// First the addresses: what is judged by the new frontends needs them.
	if p.hasHost = p.hasHost || state.NodeFound || state.HostPortsUnknown; p.hasHost {
		p.sink.Host(source.Host{
			Listed: state.NodeAddresses, Pods: state.PodRanges, HostPortsUnknown: state.HostPortsUnknown,
		})
	}
	p.sink.Replace(state.Units)
	p.applied, p.partial = p.seen, nil
	if len(state.Problems) > 0 {
		e := &FaultError{Applied: true}
		for _, problem := range state.Problems {
			e.Errs = append(e.Errs, problem)
		}
		p.partial = e
	}
	p.tell(p.partial)
}

// state parses what was found. It must be whole.
func (p *poller) state() (*State, []error) {
	var inputs []Input
	var errs []error
	for _, e := range p.seen {
		switch {
		case e.err != nil:
			errs = append(errs, e.err)
		case e.dir:
			if p.emptied(e) {
				errs = append(errs, fmt.Errorf("%s: %w", e.path, errEmptied))
			}
		default:
			inputs = append(inputs, Input{e.path, bytes.NewReader(e.data)})
		}
	}
	state, err := Read(p.node, inputs...)
	if err != nil {
		return nil, append(errs, err)
	}
	for _, problem := range state.Problems {
		if problem.Lost {
			errs = append(errs, problem)
		}
	}
	return state, errs
}

// emptied tells whether a directory without files hides some: it is in the place
// of another that had files (a mount that is gone), or of a file (which container
// runtimes make where the file to mount is missing).
func (p *poller) emptied(dir *entry) bool {
	inside := func(e *entry) bool { return filepath.Dir(e.path) == dir.path }
	if slices.ContainsFunc(p.seen, inside) {
		return false
	}
	i := slices.IndexFunc(p.applied, func(e *entry) bool { return e.path == dir.path })
	switch {
	case i < 0:
		return Reads(filepath.Base(dir.path))
	case !p.applied[i].dir:
		return true
	}
	return !os.SameFile(p.applied[i].info, dir.info) && slices.ContainsFunc(p.applied, inside)
}

// tell reports what is wrong, nil where all is well, unless it is known.
func (p *poller) tell(fault error) {
	text := ""
	if fault != nil {
		text = fault.Error()
	}
	if text != p.fault {
		p.fault = text
		p.sink.Fault(fault)
	}
}
