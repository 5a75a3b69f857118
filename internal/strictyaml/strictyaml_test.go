package strictyaml

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

func parse(t *testing.T, text string) *yaml.Node {
	t.Helper()
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Content[0]
}

func TestFields(t *testing.T) {
	tests := []struct {
		name string
		in   string
		path string
		want []string // the fields, then what is reported
	}{
		{"known ones", "a: 1\nb: [2]\n", "", []string{"a", "b"}},
		{"null is no value", "a: ~\nb:\n", "", nil},
		{"aliases", "a: &x 1\nb: *x\n", "", []string{"a", "b"}},
		{"an unknown one", "a: 1\nc: 2\n", "", []string{"a", "2: c: is not a field; there are a, b"}},
		{"with a path", "c: 2\n", "items[2]", []string{"1: items[2].c: is not a field; there are a, b"}},
		{"twice", "a: 1\nb: 2\na: 3\n", "", []string{"a", "b", "3: a: is given twice"}},
		{"twice, first null", "a: ~\na: 3\n", "", []string{"2: a: is given twice"}},
		{"a key that is no scalar", "[a]: 1\n", "", []string{"1: : is not a field; there are a, b"}},
		{"merge keys", "a: &x {b: 1}\n<<: *x\n", "", []string{"a", "2: <<: is not a field; there are a, b"}},
		{"a list", "[a]", "x", []string{"1: x: must be a mapping, not a list"}},
		{"a string", "a", "x", []string{`1: x: must be a mapping, not "a"`}},
		{"null", "~", "x", []string{"1: x: must be a mapping, not null"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var reported []string
			r := Report(func(n *yaml.Node, path string, err error) {
				reported = append(reported, fmt.Sprintf("%d: %s: %v", n.Line, path, err))
			})
			got := slices.Sorted(maps.Keys(r.Fields(parse(t, tt.in), tt.path, "a", "b")))
			if d := cmp.Diff(tt.want, append(got, reported...)); d != "" {
				t.Errorf("fields and reports (-want +got):\n%s", d)
			}
		})
	}
}

func TestValues(t *testing.T) {
	tests := []struct {
		name string
		in   string
		want []string // the values, then what is reported
	}{
		{"strings", "[a, 'b', \"1\"]", []string{"a", "b", "1"}},
		{"empty", "[]", nil},
		{"aliases", "[&x a, *x]", []string{"a", "a"}},
		{"what is none", "[1, true, ~, [], {}, 2001-01-01]", []string{
			"", "", "", "", "", "",
			"x[0]: must be a string, not 1 without quotes",
			"x[1]: must be a string, not true without quotes",
			"x[2]: must be a string, not null",
			"x[3]: must be a string, not a list",
			"x[4]: must be a string, not a mapping",
			"x[5]: must be a string, not 2001-01-01 without quotes",
		}},
		{"no list", "a", []string{`x: must be a list, not "a"`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var reported []string
			r := Report(func(_ *yaml.Node, path string, err error) {
				reported = append(reported, path+": "+err.Error())
			})
			got := Values(r, parse(t, tt.in), "x", Text)
			if d := cmp.Diff(tt.want, append(got, reported...)); d != "" {
				t.Errorf("values and reports (-want +got):\n%s", d)
			}
		})
	}
	r := Report(func(*yaml.Node, string, error) { t.Error("an absent node was reported") })
	if Value(r, nil, "x", Text) != "" || Values(r, nil, "x", Text) != nil {
		t.Error("an absent node has a value")
	}
}

func TestSyntaxError(t *testing.T) {
	tests := []struct {
		name, in string
		line     int
		want     string
	}{
		{"with its line", "a: 1\nb: [\n", 2, "not YAML: did not find expected node content"},
		{"without one", "\x01", 1, "not YAML: control characters are not allowed"},
		{"* without quotes", "a:\n- *\n", 2, `not YAML: did not find expected alphabetic or numeric character; a * or & that is meant as such stands in quotes: "*"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			line, err := SyntaxError(yaml.Unmarshal([]byte(tt.in), new(yaml.Node)))
			if line != tt.line || err.Error() != tt.want {
				t.Errorf("line %d: %v", line, err)
			}
		})
	}
}

func TestBounds(t *testing.T) {
	// Each line stands for ten times the one before.
	bomb := "a0: &a0 " + strings.Repeat("x", 1000) + "\n"
	for i := 1; i < 8; i++ {
		alias := "*a" + strconv.Itoa(i-1)
		bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.Repeat(alias+",", 9)+alias)
	}
	tests := []struct {
		name string
		in   string
		want string
	}{
		{"deep enough", strings.Repeat("[", 998) + strings.Repeat("]", 998), ""},
		{"too deep", strings.Repeat("[", 1001) + strings.Repeat("]", 1001), "nested more than 1000 deep"},
		{"itself", "a: &a [*a]\n", "the anchor &a contains itself"},
		{"an alias", "a: &a [1]\nb: *a\n", ""},
		{"aliases of aliases", bomb, "aliases stand for more than 64 MiB"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b Bounds
			got := ""
			if err := b.Check(parse(t, tt.in)); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	t.Run("over several documents", func(t *testing.T) {
		var b Bounds
		doc := parse(t, "a: &a "+strings.Repeat("x", 1<<20)+"\nb: [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n")
		var err error
		n := 0
		for ; err == nil && n < 100; n++ {
			err = b.Check(doc)
		}
		if n != 7 || err == nil {
			t.Errorf("document %d: %v", n, err)
		}
	})
}
