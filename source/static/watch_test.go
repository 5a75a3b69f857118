package static

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/source"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// list returns a FrontendList with an item of each name.
func list(names ...string) string {
	if len(names) == 0 {
		return "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems: []\n"
	}
	s := "apiVersion: flowsweep.dev/v1alpha1\nkind: FrontendList\nitems:\n"
	for _, n := range names {
		s += "- name: " + n + "\n  protocol: UDP\n  addresses: [192.0.2.1]\n  ports: 53\n"
	}
	return s
}

func node(name, addr string) string {
	return "apiVersion: v1\nkind: Node\nmetadata: {name: " + name + "}\n" +
		"status: {addresses: [{type: InternalIP, address: " + addr + "}]}\n"
}

// sink notes what it gets: "replace a b", "host [192.0.2.1]", "fault TEXT", "well".
type sink struct {
	t   *testing.T
	dir string

	mu     sync.Mutex
	events []string
}

func (s *sink) note(event string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, strings.ReplaceAll(event, s.dir+string(filepath.Separator), ""))
}

func (s *sink) Replace(units map[string][]frontend.Frontend) {
	event := "replace"
	for _, name := range slices.Sorted(maps.Keys(units)) {
		event += " " + strings.TrimPrefix(name, "static ")
	}
	s.note(event)
}

func (s *sink) Set(unit string, _ []frontend.Frontend) {
	s.t.Errorf("Set(%q): changes come by Replace, which guards look at", unit)
}

func (s *sink) Host(h source.Host) { s.note(fmt.Sprint("host ", h.Listed)) }

func (s *sink) ServiceRanges([]netip.Prefix) { s.note("service ranges, of which files know none") }

func (s *sink) Fault(err error) {
	if err == nil {
		s.note("well")
		return
	}
	s.note("fault " + err.Error())
}

func (s *sink) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	events := s.events
	s.events = nil
	return events
}

// watched is a Watcher on files in a directory of its own, in a synctest bubble:
// time passes as the test wants it, the files are real.
type watched struct {
	*testing.T
	src    *Watcher
	dir    string
	sink   *sink
	writes int64
}

// watch calls f with a Watcher on paths in w.dir, which has looked at nothing yet:
// it does 250 ms before each return of w.polls.
func watch(t *testing.T, paths []string, node string, f func(w *watched)) {
	dir := t.TempDir()
	for i, p := range paths {
		paths[i] = filepath.Join(dir, p)
	}
	synctest.Test(t, func(t *testing.T) {
		w := &watched{T: t, src: Watch(paths, node), dir: dir, sink: &sink{t: t, dir: dir}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			time.Sleep(250 * time.Millisecond)
			ended <- w.src.Run(ctx, w.sink)
		}()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run returned %v", err)
			}
		}()
		f(w)
	})
}

// polls lets the Watcher look n times, and compares what that brought.
func (w *watched) polls(n int, want ...string) {
	w.Helper()
	time.Sleep(time.Duration(n) * pollInterval)
	synctest.Wait()
	if d := cmp.Diff(want, w.sink.take()); d != "" {
		w.Errorf("events (-want +got):\n%s", d)
	}
}

func (w *watched) path(name string) string { return filepath.Join(w.dir, name) }

func (w *watched) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// write writes a file in place. Its time is always another one, however coarse
// the file system's clock is.
func (w *watched) write(name, content string) {
	w.Helper()
	w.must(os.WriteFile(w.path(name), []byte(content), 0o600))
	w.writes++
	w.must(os.Chtimes(w.path(name), time.Time{}, time.Unix(w.writes, 0)))
}

func (w *watched) remove(name string) {
	w.Helper()
	w.must(os.Remove(w.path(name)))
}

func (w *watched) rename(from, to string) {
	w.Helper()
	w.must(os.Rename(w.path(from), w.path(to)))
}

func (w *watched) mkdir(name string) {
	w.Helper()
	w.must(os.Mkdir(w.path(name), 0o700))
}

// link makes a symbolic link, in the place of one that is there, as the kubelet
// does it.
func (w *watched) link(to, name string) {
	w.Helper()
	w.must(os.Symlink(to, w.path(name+".new")))
	w.rename(name+".new", name)
}

// reload and setFiles leave the test in the middle between two polls again, which
// count from there.
func (w *watched) reload() {
	w.src.Reload()
	time.Sleep(pollInterval / 2)
}

func (w *watched) setFiles(paths ...string) {
	w.src.SetFiles(paths)
	time.Sleep(pollInterval / 2)
}

const notThere = ": no such file or directory"

func moved(name string) string {
	return "fault " + name + ": changed twice within 1s; it is read when it rests"
}

func emptied(name string) string {
	return "fault " + name + ": an empty directory is in the place of what was there; " +
		"a state without frontends is a FrontendList without items"
}

func isEmpty(name string) string {
	return "fault " + name + ": is empty; a state without frontends is a FrontendList without items"
}

func TestWatchFile(t *testing.T) {
	tests := []struct {
		name  string
		steps func(w *watched) // a.yaml, with item a, is in force
	}{
		{"nothing happens", func(w *watched) {
			w.polls(20)
		}},
		{"rename over it", func(w *watched) {
			w.write("new", list("a", "b"))
			w.rename("new", "a.yaml")
			w.polls(1)
			w.polls(1, "replace a b")
			w.polls(5)
		}},
		{"written in place at once", func(w *watched) {
			w.write("a.yaml", list("b"))
			w.polls(2, "replace b")
		}},
		{"written in two parts, both valid", func(w *watched) {
			w.write("a.yaml", list("a"))
			w.polls(1)
			w.write("a.yaml", list("a", "b"))
			w.polls(1)
			w.polls(1, "replace a b")
		}},
		{"written in parts slowly", func(w *watched) {
			w.write("a.yaml", list("x"))
			w.polls(1)
			for i := range 5 {
				w.write("a.yaml", list("x", "y"+fmt.Sprint(i)))
				if i == 0 {
					w.polls(1, moved("a.yaml"))
				} else {
					w.polls(1)
				}
			}
			w.polls(1, "replace x y4", "well")
		}},
		{"a part that is not valid", func(w *watched) {
			w.write("a.yaml", list("a", "b")[:100])
			w.polls(2, "fault a.yaml:4: items[0].addresses: is missing; a.yaml:4: items[0].ports: is missing")
			w.polls(10)
			w.write("a.yaml", list("a", "b"))
			w.polls(2, "replace a b", "well")
		}},
		{"one item of several that is not valid", func(w *watched) {
			w.write("a.yaml", list("a", "b")+"- name: c\n")
			w.polls(2, "fault a.yaml:12: items[2].protocol: is missing; a.yaml:12: items[2].addresses: is missing; "+
				"a.yaml:12: items[2].ports: is missing")
		}},
		{"truncated, then written", func(w *watched) {
			w.write("a.yaml", "")
			w.polls(1)
			w.write("a.yaml", list("b"))
			w.polls(1, moved("a.yaml"))
			w.polls(1, "replace b", "well")
		}},
		{"truncated", func(w *watched) {
			w.write("a.yaml", "")
			w.polls(2, isEmpty("a.yaml"))
			w.polls(10)
			w.write("a.yaml", list("a"))
			w.polls(2, "well")
		}},
		{"nothing but comments", func(w *watched) {
			w.write("a.yaml", "# a\n---\n# b\n")
			w.polls(2, isEmpty("a.yaml"))
		}},
		{"null", func(w *watched) {
			w.write("a.yaml", "--- null\n")
			w.polls(2, isEmpty("a.yaml"))
		}},
		{"a list without items", func(w *watched) {
			w.write("a.yaml", list())
			w.polls(2, "replace")
		}},
		{"garbage", func(w *watched) {
			w.write("a.yaml", "\x00\x01\xff garbage")
			w.polls(2, "fault a.yaml:1: not YAML: control characters are not allowed")
			w.write("a.yaml", "[garbage]")
			w.polls(2, "fault a.yaml:1: not an object with apiVersion and kind")
		}},
		{"many problems", func(w *watched) {
			w.write("a.yaml", strings.Repeat("--- x\n", 9))
			w.polls(2, "fault "+strings.Join([]string{
				"a.yaml:1: not an object with apiVersion and kind", "a.yaml:2: not an object with apiVersion and kind",
				"a.yaml:3: not an object with apiVersion and kind", "a.yaml:4: not an object with apiVersion and kind",
				"a.yaml:5: not an object with apiVersion and kind", "and 4 more",
			}, "; "))
		}},
		{"deleted and back", func(w *watched) {
			w.remove("a.yaml")
			w.polls(2, "fault a.yaml"+notThere)
			w.polls(10)
			w.write("a.yaml", list("a"))
			w.polls(2, "well")
			w.polls(5)
		}},
		{"deleted for a moment, as some editors do", func(w *watched) {
			w.rename("a.yaml", "a.yaml~")
			w.polls(1)
			w.write("a.yaml", list("a"))
			w.polls(1, moved("a.yaml"))
			w.polls(1, "well")
		}},
		{"deleted and back with something else", func(w *watched) {
			w.remove("a.yaml")
			w.polls(3, "fault a.yaml"+notThere)
			w.write("a.yaml", list("b"))
			w.polls(2, "replace b", "well")
		}},
		{"an empty directory in its place", func(w *watched) {
			w.remove("a.yaml")
			w.mkdir("a.yaml")
			w.polls(2, emptied("a.yaml"))
			w.write("a.yaml/b.yaml", list("b"))
			w.polls(2, "replace b", "well")
		}},
		{"touched", func(w *watched) {
			for range 10 {
				w.write("a.yaml", list("a"))
				w.polls(1)
			}
		}},
		{"back before it counted", func(w *watched) {
			w.write("a.yaml", list("b"))
			w.polls(1)
			w.write("a.yaml", list("a"))
			w.polls(1, moved("a.yaml"))
			w.polls(1, "well")
			w.polls(5)
		}},
		{"too large", func(w *watched) {
			w.must(os.Truncate(w.path("a.yaml"), maxInput+1))
			w.polls(2, "fault a.yaml: more than 512 MiB; split it")
		}},
		{"reload finds a change between polls", func(w *watched) {
			w.write("a.yaml", list("b"))
			w.reload() // 250 ms before it would have been found
			w.polls(1, "replace b")
		}},
		{"reloads in a hurry prove nothing", func(w *watched) {
			w.write("a.yaml", list("b"))
			for range 10 {
				w.src.Reload()
				time.Sleep(time.Millisecond)
			}
			w.write("a.yaml", list("a", "b"))
			w.polls(3, moved("a.yaml"), "replace a b", "well")
		}},
		{"reload without a change", func(w *watched) {
			w.reload()
			w.polls(3)
		}},
		{"other files", func(w *watched) {
			w.write("b.yaml", list("b"))
			w.setFiles(w.path("b.yaml"))
			w.polls(2, "replace b")
			w.setFiles(w.path("b.yaml"), w.path("c.yaml"))
			w.polls(2, "fault c.yaml"+notThere)
			w.write("c.yaml", list("c"))
			w.polls(2, "replace b c", "well")
		}},
		{"a name that two files have", func(w *watched) {
			w.write("b.yaml", list("a"))
			w.setFiles(w.path("a.yaml"), w.path("b.yaml"))
			w.polls(3, `fault b.yaml:4: items[0].name: "a" is the name of a.yaml:4 too`)
		}},
		{"a file given twice", func(w *watched) {
			w.setFiles(w.path("a.yaml"), w.dir, w.path("a.yaml"))
			w.polls(3, "replace a")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			watch(t, []string{"a.yaml"}, "", func(w *watched) {
				w.write("a.yaml", list("a"))
				w.polls(1)
				w.polls(1, "replace a")
				tt.steps(w)
			})
		})
	}
}

func TestWatchDirectory(t *testing.T) {
	tests := []struct {
		name  string
		steps func(w *watched) // d/a.yaml and d/b.json, with items a and b, are in force
	}{
		{"gains a file", func(w *watched) {
			w.write("d/c.yml", list("c"))
			w.polls(2, "replace a b c")
		}},
		{"loses a file", func(w *watched) {
			w.remove("d/a.yaml")
			w.polls(1)
			w.polls(1, "replace b")
		}},
		{"loses its files", func(w *watched) {
			w.remove("d/a.yaml")
			w.remove("d/b.json")
			w.polls(2, "replace")
		}},
		{"loses a file for a moment", func(w *watched) {
			w.rename("d/a.yaml", "x")
			w.polls(1)
			w.rename("x", "d/a.yaml")
			w.polls(1, moved("d/a.yaml"))
			w.polls(1, "well")
		}},
		{"a file is renamed", func(w *watched) {
			w.rename("d/a.yaml", "d/z.yaml")
			w.polls(2, "replace a b")
		}},
		{"an item moves to another file, in two steps", func(w *watched) {
			w.write("d/a.yaml", list())
			w.polls(1)
			w.write("d/c.yaml", list("a"))
			w.polls(1, moved("d/c.yaml"))
			w.polls(1, "replace a b", "well")
		}},
		{"files that change in turn are told of once", func(w *watched) {
			w.write("d/a.yaml", list("a", "c"))
			w.polls(1)
			w.write("d/b.json", list("b", "d"))
			w.polls(1, moved("d/b.json"))
			w.write("d/a.yaml", list("a", "e"))
			w.polls(1)
			w.polls(1, "replace a b d e", "well")
		}},
		{"one file that is broken holds all back", func(w *watched) {
			w.write("d/a.yaml", "x")
			w.write("d/c.yaml", list("c"))
			w.polls(2, "fault d/a.yaml:1: not an object with apiVersion and kind")
			w.remove("d/a.yaml")
			w.polls(2, "replace b c", "well")
		}},
		{"files that do not count", func(w *watched) {
			w.write("d/.c.yaml", list("c"))
			w.write("d/c.yaml~", list("c"))
			w.write("d/c.txt", list("c"))
			w.write("d/yaml", list("c"))
			w.mkdir("d/sub")
			w.write("d/sub/c.yaml", list("c"))
			w.polls(4)
		}},
		{"a directory by the name of a file", func(w *watched) {
			w.mkdir("d/c.yaml")
			w.polls(2, "fault d/c.yaml: is not a regular file")
		}},
		{"a link to nowhere in the place of a file", func(w *watched) {
			w.link("nowhere", "d/a.yaml")
			w.polls(2, "fault d/a.yaml"+notThere)
		}},
		{"is deleted and comes back", func(w *watched) {
			w.must(os.RemoveAll(w.path("d")))
			w.polls(2, "fault d"+notThere)
			w.mkdir("d")
			w.write("d/a.yaml", list("a"))
			w.polls(2, "replace a", "well")
		}},
		{"is moved away", func(w *watched) {
			w.rename("d", "e")
			w.polls(2, "fault d"+notThere)
			w.rename("e", "d")
			w.polls(2, "well")
		}},
		{"an empty one in its place, as under a mount that is gone", func(w *watched) {
			w.rename("d", "e")
			w.mkdir("d")
			w.polls(2, emptied("d"))
			w.write("d/none.yaml", list())
			w.polls(2, "replace", "well")
		}},
		{"the same in another one, then emptied", func(w *watched) {
			w.rename("d", "e")
			w.mkdir("d")
			w.write("d/a.yaml", list("a"))
			w.write("d/b.json", list("b"))
			w.polls(2, "replace a b")
			w.remove("d/a.yaml")
			w.remove("d/b.json")
			w.polls(2, "replace")
		}},
		{"a file in its place", func(w *watched) {
			w.rename("d", "e")
			w.write("d", list("d"))
			w.polls(2, "replace d")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			watch(t, []string{"d"}, "", func(w *watched) {
				w.mkdir("d")
				w.write("d/a.yaml", list("a"))
				w.write("d/b.json", list("b"))
				w.polls(2, "replace a b")
				tt.steps(w)
			})
		})
	}
}

// TestWatchConfigMap: the kubelet makes a directory with the new files, and a
// link ..data that points to it takes the place of the one before.
func TestWatchConfigMap(t *testing.T) {
	for _, path := range []string{"d", "d/a.yaml"} {
		t.Run(path, func(t *testing.T) {
			watch(t, []string{path}, "", func(w *watched) {
				w.mkdir("d")
				w.mkdir("d/..1")
				w.write("d/..1/a.yaml", list("a"))
				w.link("..1", "d/..data")
				w.link("..data/a.yaml", "d/a.yaml")
				w.polls(2, "replace a")
				for i := 2; i < 5; i++ {
					version := fmt.Sprintf("d/..%d", i)
					w.mkdir(version)
					w.write(version+"/a.yaml", list(fmt.Sprint("a", i)))
					w.polls(4)
					w.link(filepath.Base(version), "d/..data")
					w.must(os.RemoveAll(w.path(fmt.Sprintf("d/..%d", i-1))))
					w.polls(1)
					w.polls(1, fmt.Sprint("replace a", i))
				}
			})
		})
	}
}

func TestWatchFirst(t *testing.T) {
	t.Run("once all can be read", func(t *testing.T) {
		watch(t, []string{"d", "a.yaml", "b.yaml"}, "", func(w *watched) {
			w.write("a.yaml", list("a"))
			w.polls(2, "fault d"+notThere+"; b.yaml"+notThere)
			w.write("b.yaml", "")
			w.polls(2, "fault d"+notThere+"; "+strings.TrimPrefix(isEmpty("b.yaml"), "fault "))
			w.write("b.yaml", list("b"))
			w.polls(2, "fault d"+notThere)
			w.mkdir("d")
			w.polls(2, "replace a b", "well")
		})
	})
	t.Run("no files", func(t *testing.T) {
		watch(t, nil, "", func(w *watched) { w.polls(2, "replace") })
	})
	t.Run("an empty directory", func(t *testing.T) {
		watch(t, []string{"d"}, "", func(w *watched) {
			w.mkdir("d")
			w.polls(2, "replace")
		})
	})
	t.Run("a directory that was made for want of a file", func(t *testing.T) {
		watch(t, []string{"a.yaml"}, "", func(w *watched) {
			w.mkdir("a.yaml")
			w.polls(2, emptied("a.yaml"))
		})
	})
	t.Run("being written", func(t *testing.T) {
		watch(t, []string{"a.yaml"}, "", func(w *watched) {
			w.write("a.yaml", list("a"))
			w.polls(1)
			w.write("a.yaml", list("a", "b"))
			w.polls(1, moved("a.yaml"))
			w.polls(1, "replace a b", "well")
		})
	})
	t.Run("the context ends before", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s := &sink{t: t}
		if err := Watch([]string{"/nowhere"}, "").Run(ctx, s); err != nil || len(s.take()) > 0 {
			t.Errorf("Run returned %v, events %q", err, s.events)
		}
	})
}

func TestWatchNode(t *testing.T) {
	const broken = "---\napiVersion: v1\nkind: Service\nmetadata: {name: odd}\n" +
		"spec: {clusterIP: 203.0.113.999, ports: [{port: 53}]}\n"
	const warning = "fault in force, but for a.yaml:6: Service default/odd: spec.clusterIP: " +
		`"203.0.113.999" is not an IP address`
	watch(t, []string{"a.yaml"}, "n1", func(w *watched) {
		w.write("a.yaml", list("a"))
		w.polls(2, "replace a")
		w.write("a.yaml", list("a")+"---\n"+node("n1", "192.0.2.9"))
		w.polls(2, "host [192.0.2.9]", "replace a")
		w.write("a.yaml", node("n1", "192.0.2.7")+broken)
		w.polls(2, "host [192.0.2.7]", "replace", warning)
		w.polls(5)
		w.write("a.yaml", "x")
		w.polls(2, "fault a.yaml:1: not an object with apiVersion and kind")
		w.write("a.yaml", node("n1", "192.0.2.7")+broken)
		w.polls(2, warning)
		w.write("a.yaml", list("a"))
		w.polls(2, "host []", "replace a", "well")
		w.write("a.yaml", node("n2", "192.0.2.7"))
		w.polls(2, "host []", "replace",
			"fault in force, but for Node n1: is not among the Nodes of the state (1); check --node")
	})
}

// TestWatchParts: a writer that stops at any point, for less than a poll each
// time, is never seen at work.
func TestWatchParts(t *testing.T) {
	watch(t, []string{"a.yaml"}, "", func(w *watched) {
		rnd := rand.New(rand.NewPCG(1, 2))
		w.write("a.yaml", list("start"))
		w.polls(2, "replace start")
		for i := range 200 {
			names := []string{fmt.Sprint("a", i), fmt.Sprint("b", i), fmt.Sprint("c", i)}
			text := list(names...)
			for at := 0; at < len(text); {
				at = min(at+1+rnd.IntN(len(text)/2), len(text))
				w.write("a.yaml", text[:at])
				time.Sleep(rand.N(pollInterval))
			}
			time.Sleep(2 * pollInterval)
			synctest.Wait()
			events := slices.DeleteFunc(w.sink.take(), func(e string) bool { return e == moved("a.yaml") || e == "well" })
			if d := cmp.Diff([]string{"replace " + strings.Join(names, " ")}, events); d != "" {
				t.Fatalf("rewrite %d (-want +got):\n%s", i, d)
			}
		}
	})
}

// TestWatchRewrites is in real time: 1000 renames as fast as they go. What is
// delivered is whole each time, in order, and ends with the last.
func TestWatchRewrites(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	s := &sink{t: t, dir: dir}
	w := Watch([]string{path}, "")
	w.every = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = w.Run(ctx, s) })
	defer work.Wait()
	defer cancel()
	const most = 1000
	for i := range most {
		if err := os.WriteFile(path+".new", []byte(list(fmt.Sprintf("a%03d", i), fmt.Sprintf("b%03d", i))), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	last := -1
	for deadline := time.Now().Add(20 * time.Second); last != most-1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the last state was not delivered; generation %d was", last)
		}
		for _, e := range s.take() {
			a, b := -1, -1
			if n, _ := fmt.Sscanf(e, "replace a%d b%d", &a, &b); n == 2 && a == b && a > last {
				last = a
			} else if strings.HasPrefix(e, "replace") {
				t.Fatalf("%q after generation %d", e, last)
			}
		}
	}
}

// TestWatchReload: a poll goes by what stat(2) says, a reload does not.
func TestWatchReload(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.yaml")
	write := func(content string) {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := &sink{t: t}
	p := poller{Watcher: Watch([]string{path}, ""), sink: s}
	p.every = 0
	write(list("a"))
	p.poll(false)
	p.poll(false)
	write(list("b"))
	p.seen[0].stat() // as if it had not changed
	p.poll(false)
	p.poll(false)
	if d := cmp.Diff([]string{"replace a"}, s.take()); d != "" {
		t.Errorf("polls (-want +got):\n%s", d)
	}
	p.poll(true)
	p.poll(false)
	if d := cmp.Diff([]string{"replace b"}, s.take()); d != "" {
		t.Errorf("a reload (-want +got):\n%s", d)
	}
}

// TestWatchMissed: readdir(3) is no proof that a file is gone.
func TestWatchMissed(t *testing.T) {
	dir := t.TempDir()
	p := &poller{}
	for _, name := range []string{"a.yaml", "b.yaml", "c.yaml", "d.yaml", "e.txt"} {
		p.seen = append(p.seen, &entry{path: filepath.Join(dir, name)})
		if name != "c.yaml" {
			if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	p.seen = append(p.seen, &entry{path: filepath.Join(dir, "elsewhere", "a.yaml")}, &entry{path: dir, dir: true})
	if d := cmp.Diff([]string{"b.yaml", "d.yaml"}, p.missed(dir, []string{"a.yaml"})); d != "" {
		t.Errorf("missed (-want +got):\n%s", d)
	}
}

func TestFaultError(t *testing.T) {
	problem := Problem{Input: "a.yaml", Line: 7, Err: errNotObject}
	err := error(&FaultError{Errs: []error{problem, os.ErrPermission}})
	var p Problem
	if !errors.As(err, &p) || p.Line != 7 || !errors.Is(err, os.ErrPermission) {
		t.Errorf("%v does not tell what is wrong", err)
	}
}
