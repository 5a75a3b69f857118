package static

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

// FuzzRead: whatever the input, reading it ends, does not panic and gives
// frontends that a table can hold and problems that can be printed.
func FuzzRead(f *testing.F) {
	for _, s := range []string{
		listA, listB, svcYAML, svcJSON,
		"apiVersion: v1\nitems:\n" + indent(svcYAML) + "kind: List\n",
		listA + "---\n" + listB + "--- #\n" + svcYAML + "...\n---\n" + svcJSON + svcJSON,
		"a: &a [x, *a]\n<<: *a\n", "{\"a\":", "\ufeff{}", "\xff\xfe{\x00}\x00", "%YAML 1.1\n---\n- !!binary aGk=\n- !!int \"0x1\"\n",
	} {
		f.Add([]byte(s))
	}
	mixed, err := os.ReadFile("testdata/mixed.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(mixed)
	files, err := filepath.Glob("../../test/scenarios/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, a := range archive.Files {
			if strings.HasSuffix(a.Name, ".yaml") {
				f.Add(a.Data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Read("n1", Input{"in", bytes.NewReader(data)})
		if err != nil {
			t.Fatal(err)
		}
		for name, fs := range s.Units {
			for _, fe := range fs {
				switch {
				case fe.Owner == "", fe.Proto == 0, fe.Family == 0, fe.Ports.First == 0, fe.Ports.Last < fe.Ports.First:
					t.Errorf("%s: %+v", name, fe)
				case fe.Usable < 0, fe.Addr.Zone() != "", fe.Addr.Is4In6(), fe.Addr.IsValid() && fe.Addr.IsUnspecified():
					t.Errorf("%s: %+v", name, fe)
				}
			}
		}
		for _, p := range s.Problems {
			// For YAML, CR and others end a line, too.
			if p.Error() == "" || p.Line < 0 || p.Line > len(data)+1 {
				t.Errorf("line %d: %v", p.Line, p)
			}
		}
	})
}
