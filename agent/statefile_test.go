package agent

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flowsweep/flowsweep/source"
)

func TestIsState(t *testing.T) {
	now, err := json.Marshal(stateFile{Kind: stateKind, Version: stateVersion})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		content string
		want    bool
	}{
		"this version's":             {string(now), true},
		"cut short":                  {string(now[:40]), true},
		"of a version to come":       {`{"kind":"flowsweep-state","format":"other"}`, true},
		"an earlier version's":       {`{"version":1,"saved":"2026-11-13T12:00:00Z","frontends":[]}`, true},
		"that, printed prettily":     {"{\n  \"version\": 1,\n  \"saved\": \"2026", true},
		"that, without a time":       {`{"version":1,"frontends":[{"addr":"203`, true},
		"cut before it shows":        {`{"version":1,`, false},
		"another kind":               {`{"kind":"FrontendList","items":[]}`, false},
		"a state as JSON":            {`{"apiVersion":"flowsweep.dev/v1alpha1","kind":"FrontendList","items":[]}`, false},
		"another program's":          {`{"version": 4, "terraform_version": "1.9.0"}`, false},
		"a version in words":         {`{"version":"1","saved":"2026-11-13T12:00:00Z"}`, false},
		"a list":                     {`[{"version":1,"saved":1}]`, false},
		"text":                       {"version: 1\nsaved: now\n", false},
		"zeros":                      {"\x00\x00\x00\x00", false},
		"space":                      {" \n", false},
		"nothing":                    {"", false},
		"a kind that comes too late": {`{"version":2,"kind":"flowsweep-state"}`, false},
	} {
		if got := isState(strings.NewReader(tc.content)); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// An agent does not run with a file that is not its own, and another one's is not
// its own.
func TestRunRefusesAStateFile(t *testing.T) {
	run := func(path string) error {
		var err error
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(true)
			cfg := holding()
			cfg.StateFile = path
			err = New(Options{Conn: w, Ruleset: w, Sources: []source.Source{&simSource{w: w}}, Config: cfg}).Run(t.Context())
		})
		return err
	}
	path := filepath.Join(t.TempDir(), "state.json")
	if err := os.WriteFile(path, []byte("items: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if e, ok := errors.AsType[*StateFileError](run(path)); !ok || e.InUse {
		t.Errorf("a foreign file: %v", e)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other := statePath{path: path}
	if err := other.write(&stateFile{Kind: stateKind}); err != nil {
		t.Fatal(err)
	}
	if e, ok := errors.AsType[*StateFileError](run(path)); !ok || !e.InUse {
		t.Errorf("another agent's: %v", e)
	}
	if err := other.write(&stateFile{Kind: stateKind}); err != nil { // which goes on
		t.Error(err)
	}
	other.release()
	if err := CheckStateFile(path); err != nil {
		t.Errorf("after it has ended: %v", err)
	}
}

// Two agents that start before either has written: the first one to write has the
// file, and the other tells that it cannot.
func TestStateFileTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	a, b := statePath{path: path}, statePath{path: path}
	for _, p := range []*statePath{&a, &b} {
		if err := p.claim(); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.write(&stateFile{Kind: stateKind}); err != nil {
		t.Fatal(err)
	}
	if err := b.write(&stateFile{Kind: stateKind}); !isStateFileError(err) {
		t.Errorf("the second writes as well: %v", err)
	}
	a.release()
	if err := b.write(&stateFile{Kind: stateKind}); err != nil {
		t.Errorf("the first has ended: %v", err)
	}
	b.release()
}

// Where a link stands, it stays, and leads to the state.
func TestStateFileBehindALink(t *testing.T) {
	for name, there := range map[string]bool{"to a state file": true, "to nothing yet": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
					t.Fatal(err)
				}
				target, link := filepath.Join(dir, "data", "real.json"), filepath.Join(dir, "state.json")
				if there {
					if err := os.WriteFile(target, nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if err := os.Symlink("data/real.json", link); err != nil {
					t.Fatal(err)
				}
				w := newWorld(true)
				cfg := holding()
				cfg.StateFile = link
				r, _, stop := live(t, w, cfg)
				r.healthy()
				time.Sleep(time.Minute)
				stop()
				info, err := os.Lstat(link)
				if err != nil || info.Mode()&os.ModeSymlink == 0 {
					t.Errorf("the link is %v, %v", info, err)
				}
				if b, err := os.ReadFile(target); err != nil || !isState(strings.NewReader(string(b))) {
					t.Errorf("what it leads to is %s, %v", b, err)
				}
			})
		})
	}
}
