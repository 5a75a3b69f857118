package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/flowsweep/flowsweep/conntrack"
)

// scenario is a file of the corpus: the judgement as data.
type scenario struct {
	args   []string // with the state files
	flows  string   // path
	parsed []conntrack.Flow
	want   []string // verdict and reason, line by line
}

// scenarioDirs are the corpus of this project and, where the project is checked
// out beside them, the shared ones.
var scenarioDirs = []string{"../../test/scenarios", "../../../shared/scenarios"}

func eachScenario(t *testing.T, f func(t *testing.T, s *scenario)) {
	n := 0
	for _, dir := range scenarioDirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			n++
			t.Run(filepath.Base(filepath.Dir(dir))+"/"+strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
				f(t, readScenario(t, file))
			})
		}
	}
	if n < 32 {
		t.Fatalf("only %d scenarios found", n)
	}
}

func readScenario(t *testing.T, file string) *scenario {
	t.Helper()
	ar, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := &scenario{}
	for _, f := range ar.Files {
		path := filepath.Join(dir, f.Name)
		if err := os.WriteFile(path, f.Data, 0o600); err != nil {
			t.Fatal(err)
		}
		switch f.Name {
		case "args":
			s.args = append(s.args, strings.Fields(string(f.Data))...)
		case "before.yaml":
			s.args = append(s.args, "--before", path)
		case "state.yaml":
			s.args = append(s.args, "--state", path)
		case "flows.txt":
			s.flows = path
			for fl, err := range conntrack.ReadText(bytes.NewReader(f.Data)) {
				if err != nil {
					t.Fatal(err)
				}
				s.parsed = append(s.parsed, fl.Flow)
			}
		case "want.txt":
			s.want = strings.Split(strings.TrimSpace(string(f.Data)), "\n")
		default:
			t.Fatalf("%s has an unknown section %s", file, f.Name)
		}
	}
	if len(s.parsed) == 0 || len(s.parsed) != len(s.want) {
		t.Fatalf("%d flows, %d verdicts", len(s.parsed), len(s.want))
	}
	return s
}

// output is what -o json prints.
type output struct {
	Flows   []row
	Summary summary
}

// runJSON runs a command line and decodes its output.
func runJSON(t *testing.T, args ...string) (out output, code int, stderr string) {
	t.Helper()
	var o, e bytes.Buffer
	code = Run(t.Context(), append(args, "-o", "json"), strings.NewReader(""), &o, &e)
	if err := json.Unmarshal(o.Bytes(), &out); err != nil {
		t.Fatalf("%v in %q; stderr: %s", err, o.String(), e.String())
	}
	return out, code, e.String()
}

func TestScenariosPlan(t *testing.T) {
	eachScenario(t, func(t *testing.T, s *scenario) {
		out, code, stderr := runJSON(t, append([]string{"plan", "--flows", s.flows}, s.args...)...)
		if code != 0 {
			t.Fatalf("exit %d: %s", code, stderr)
		}
		if len(out.Flows) != len(s.want) {
			t.Fatalf("%d flows listed, want %d", len(out.Flows), len(s.want))
		}
		for i, r := range out.Flows {
			if got := r.Verdict + " " + r.Reason; got != s.want[i] {
				t.Errorf("line %d: %s, want %s\n%s", r.Line, got, s.want[i], &s.parsed[i])
			}
		}
	})
}

// Every scenario's flows are explained, with the same verdict at the end.
func TestScenariosExplain(t *testing.T) {
	eachScenario(t, func(t *testing.T, s *scenario) {
		for i := range s.parsed {
			var o, e bytes.Buffer
			args := append([]string{"explain", "--flows", s.flows, s.parsed[i].String()}, s.args...)
			if code := Run(t.Context(), args, nil, &o, &e); code != 0 {
				t.Fatalf("exit %d: %s", code, e.String())
			}
			if want := fmt.Sprintf("\nverdict: %s", s.want[i]); !strings.Contains(o.String(), want) {
				t.Errorf("want %q in\n%s", want, o.String())
			}
		}
	})
}
