package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// StateFileError says that a state file is not this agent's, and is left as it is.
type StateFileError struct {
	Path, Why string
	InUse     bool // it is a state file, of an agent that runs
}

// Error implements error.
func (e *StateFileError) Error() string { return "state file " + e.Path + " " + e.Why }

func isStateFileError(err error) bool {
	_, ok := errors.AsType[*StateFileError](err)
	return ok
}

// CheckStateFile returns a *StateFileError where an agent that is given the file
// would refuse to run.
func CheckStateFile(path string) error {
	p := statePath{path: path}
	defer p.release()
	if err := p.claim(); isStateFileError(err) {
		return err
	}
	return nil // what else is wrong may pass
}

// statePath is where the state file is. What stands there is replaced, so that it
// must be known to be one: a name is easily mistaken for that of a desired state.
// It is locked, since two agents with one file would each take the other's
// frontends for gone when they start.
type statePath struct {
	path string
	lock *os.File // what stands there, nil where nothing did
}

// claim finds out whether the file may be replaced, and locks it.
func (p *statePath) claim() error {
	refuse := func(why string) error { return &StateFileError{Path: p.path, Why: why} }
	for range 10 {
		info, err := os.Stat(p.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case info.IsDir():
			return refuse("is a directory")
		case !info.Mode().IsRegular():
			return refuse("is no regular file")
		}
		f, err := os.Open(p.path)
		if err != nil {
			return err // and what is in it is not known
		}
		if info.Size() > 0 && !isState(f) {
			_ = f.Close()
			return refuse("is no state file, or damaged beyond recognition, and is not replaced")
		}
		if p.lock != nil {
			if held, err := p.lock.Stat(); err == nil && os.SameFile(held, info) {
				return f.Close()
			}
		}
		if !tryLock(f) {
			_ = f.Close()
			return &StateFileError{p.path, "is in use by another agent; give each one of its own", true}
		}
		// It may have been replaced meanwhile by the agent that held the lock.
		if now, err := os.Stat(p.path); err == nil && os.SameFile(now, info) {
			p.hold(f)
			return nil
		}
		_ = f.Close()
	}
	return refuse("is replaced again and again")
}

func (p *statePath) hold(f *os.File) {
	p.release()
	p.lock = f
}

func (p *statePath) release() {
	if p.lock != nil {
		_ = p.lock.Close()
		p.lock = nil
	}
}

// write replaces the file at once, so that a crash leaves the old one or the new
// one. Where a link stands, what it leads to is replaced.
func (p *statePath) write(s *stateFile) (err error) {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := p.claim(); err != nil {
		return err
	}
	path, err := followLinks(p.path)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	tryLock(f) // nobody else knows it
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	p.hold(f)
	return nil
}

// followLinks returns what a path leads to, whether or not there is anything.
func followLinks(path string) (string, error) {
	for range 40 {
		to, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // no link
		}
		if !filepath.IsAbs(to) {
			to = filepath.Dir(path) + string(filepath.Separator) + to
		}
		path = to
	}
	return "", fmt.Errorf("%s: too many symbolic links", path)
}

// stateKeys are the members of a state file as earlier versions wrote it, without
// its kind.
var stateKeys = []string{"version", "saved", "frontends", "tombstones", "seen"}

// isState tells whether a file is a state file, or was one until it was damaged:
// it begins as one. A later version may have members that nobody knows here.
func isState(r io.Reader) bool {
	d := json.NewDecoder(io.LimitReader(r, 1<<16))
	token := func() any {
		t, _ := d.Token() // nil where there is none
		return t
	}
	if token() != json.Delim('{') {
		return false
	}
	first, value := token(), token()
	if first == "kind" {
		return value == stateKind
	}
	if _, number := value.(float64); first != "version" || !number {
		return false
	}
	second, _ := token().(string)
	return slices.Contains(stateKeys, second)
}
