// Package strictyaml reads parsed YAML strictly: a key that is unknown or given
// twice, and a value of another type than wanted, are reported with their place,
// all of them and not the first alone.
package strictyaml

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ErrMissing is what is wrong with a field that must be given.
var ErrMissing = errors.New("is missing")

// Report takes what is wrong with a node. The path is the node's in its document:
// "items[2].ports".
type Report func(n *yaml.Node, path string, err error)

// Fields returns the values of a mapping that has no other keys than the known
// ones, each at most once; null is no value. It is nil for another node.
func (r Report) Fields(n *yaml.Node, path string, known ...string) map[string]*yaml.Node {
	if n.Kind != yaml.MappingNode {
		r(n, path, fmt.Errorf("must be a mapping, not %s", Describe(n)))
		return nil
	}
	if path != "" {
		path += "."
	}
	seen := make(map[string]bool, len(known))
	fields := make(map[string]*yaml.Node, len(known))
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, v := Resolve(n.Content[i]), Resolve(n.Content[i+1])
		switch {
		case !slices.Contains(known, key.Value):
			r(key, path+key.Value, fmt.Errorf("is not a field; there are %s", strings.Join(known, ", ")))
		case seen[key.Value]:
			r(key, path+key.Value, errors.New("is given twice"))
		case v.ShortTag() != "!!null":
			fields[key.Value] = v
		}
		seen[key.Value] = true
	}
	return fields
}

// List returns the elements of a list, nil for another node.
func (r Report) List(n *yaml.Node, path string) []*yaml.Node {
	if n.Kind != yaml.SequenceNode {
		r(n, path, fmt.Errorf("must be a list, not %s", Describe(n)))
		return nil
	}
	items := make([]*yaml.Node, len(n.Content))
	for i, c := range n.Content {
		items[i] = Resolve(c)
	}
	return items
}

// Value parses a node, if there is one.
func Value[T any](r Report, n *yaml.Node, path string, parse func(*yaml.Node) (T, error)) (v T) {
	if n == nil {
		return v
	}
	v, err := parse(n)
	if err != nil {
		r(n, path, err)
	}
	return v
}

// Values parses the elements of a list, if there is one.
func Values[T any](r Report, n *yaml.Node, path string, parse func(*yaml.Node) (T, error)) []T {
	if n == nil {
		return nil
	}
	var vs []T
	for i, c := range r.List(n, path) {
		vs = append(vs, Value(r, c, path+"["+strconv.Itoa(i)+"]", parse))
	}
	return vs
}

// Text returns a string. What YAML takes for something else must be quoted, so
// that a name 1e3 or true is never another than the one that was written.
func Text(n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" {
		return "", fmt.Errorf("must be a string, not %s", Describe(n))
	}
	return n.Value, nil
}

// Describe returns what a node is, to follow "must be a list, not".
func Describe(n *yaml.Node) string {
	switch n.ShortTag() {
	case "!!map":
		return "a mapping"
	case "!!seq":
		return "a list"
	case "!!null":
		return "null"
	case "!!str":
		return strconv.Quote(n.Value)
	}
	return n.Value + " without quotes"
}

// Resolve returns the node that an alias stands for, and any other node itself.
func Resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

var lineNumber = regexp.MustCompile(`^line (\d+): `)

// SyntaxError takes an error of the YAML parser apart: the line it names, counted
// from the beginning of what was parsed, and what is wrong there.
func SyntaxError(err error) (line int, _ error) {
	line = 1
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := lineNumber.FindStringSubmatch(text); m != nil {
		line, _ = strconv.Atoi(m[1])
		text = text[len(m[0]):]
	}
	if strings.Contains(text, "alphabetic or numeric character") {
		text += `; a * or & that is meant as such stands in quotes: "*"`
	}
	return line, fmt.Errorf("not YAML: %s", text)
}

const (
	maxAliased = 64 << 20
	maxDepth   = 1000
)

// Bounds refuses documents of a few lines that stand for more than memory, time
// or the stack hold. The zero value is ready, for all documents of a reader.
type Bounds struct{ aliased int }

// Check tells whether what walks the tree may follow aliases as if they were
// nodes: a node nests at most 1000 deep with all that its aliases stand for, and
// the aliases of all documents checked stand for at most 64 MiB.
func (b *Bounds) Check(doc *yaml.Node) error {
	_, err := b.measure(doc, map[*yaml.Node]extent{})
	return err
}

// extent is how large a node is with all that its aliases stand for: in bytes of
// text, at least one a node.
type extent struct{ size, depth int }

// measure returns the extent of a node. An anchor's extent is known before any of
// its aliases is met, or the anchor contains itself.
func (b *Bounds) measure(n *yaml.Node, anchors map[*yaml.Node]extent) (extent, error) {
	if n.Kind == yaml.AliasNode {
		e, ok := anchors[n.Alias]
		if !ok {
			return e, fmt.Errorf("the anchor &%s contains itself", n.Value)
		}
		if b.aliased += e.size; b.aliased > maxAliased {
			return e, fmt.Errorf("aliases stand for more than %d MiB", maxAliased>>20)
		}
		return e, nil
	}
	e := extent{size: 1 + len(n.Value)}
	for _, c := range n.Content {
		child, err := b.measure(c, anchors)
		if err != nil {
			return e, err
		}
		e.size += child.size
		e.depth = max(e.depth, child.depth)
	}
	if e.depth++; e.depth > maxDepth {
		return e, fmt.Errorf("nested more than %d deep", maxDepth)
	}
	if n.Anchor != "" {
		anchors[n] = e
	}
	return e, nil
}
