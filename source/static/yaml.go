package static

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/flowsweep/flowsweep/internal/strictyaml"
)

const (
	// maxYAML bounds what is parsed at once: the tree takes some 18 times its text.
	maxYAML = 32 << 20
	// maxHead bounds what a list holds beside its items.
	maxHead = 64 << 10
)

// yaml reads what stands between two markers.
func (r *reader) yaml(data []byte, line int) {
	h, from, to := yamlList(data)
	if of, ok := h.list(); ok {
		line += bytes.Count(data[:from], []byte("\n"))
		r.seen = r.seen || from == to
		for from < to {
			end := from + nextItem(data[from:to])
			r.yamlNodes(data[from:end], line, func(n *yaml.Node) { r.yamlItems(of, n, line) })
			line += bytes.Count(data[from:end], []byte("\n"))
			from = end
		}
		return
	}
	r.yamlNodes(data, line, func(n *yaml.Node) {
		h := headOf(n, head{})
		if of, ok := h.list(); ok {
			r.yamlItems(of, lookup(n, "items"), line)
		} else {
			r.yamlObject(h, n, line)
		}
	})
}

// yamlList finds the items of a list as kubectl prints it: below a line "items:",
// each beginning with "- ", its further lines indented. It returns the list's
// head and where the items stand, and a zero head for whatever looks different.
//
// Such items are parsed one by one: memory holds the tree of one and not of all,
// and one that does not parse does not hide the others. The price is that an
// alias reaches no anchor of another item, which kubectl never prints.
func yamlList(data []byte) (h head, from, to int) {
	const key = "items:"
	at := 0
	if !bytes.HasPrefix(data, []byte(key)) {
		at = bytes.Index(data, []byte("\n"+key)) + 1
		if at == 0 {
			return head{}, 0, 0
		}
	}
	rest := bytes.TrimLeft(data[at+len(key):], " \t\r")
	if !bytes.HasPrefix(rest, []byte("\n- ")) {
		return head{}, 0, 0
	}
	from = len(data) - len(rest) + 1
	for to = from; to < len(data) && strings.IndexByte("- \t\r\n#", data[to]) >= 0; {
		end := bytes.IndexByte(data[to:], '\n')
		if end < 0 {
			to = len(data)
			break
		}
		to += end + 1
	}
	if at+len(data)-to > maxHead {
		return head{}, 0, 0
	}
	var doc yaml.Node
	if yaml.Unmarshal(slices.Concat(data[:at], data[to:]), &doc) != nil || len(doc.Content) == 0 {
		return head{}, 0, 0
	}
	return headOf(doc.Content[0], head{}), from, to
}

// nextItem returns the offset of the next line, but the first, that begins an item.
func nextItem(data []byte) int {
	if i := bytes.Index(data, []byte("\n- ")); i >= 0 {
		return i + 1
	}
	return len(data)
}

// yamlNodes parses YAML documents and hands over the root of each.
func (r *reader) yamlNodes(data []byte, line int, use func(root *yaml.Node)) {
	if len(data) > maxYAML {
		r.report(line, "", "", fmt.Errorf("more than %d MiB in one document; split it, or write Kubernetes objects as JSON", maxYAML>>20))
		return
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			at, err := strictyaml.SyntaxError(err)
			r.report(line+at-1, "", "", err)
			return
		}
		if err := r.bounds.Check(&doc); err != nil {
			r.report(line, "", "", err)
			return
		}
		if root := doc.Content[0]; root.ShortTag() != "!!null" {
			use(root)
		}
	}
}

// yamlItems reads the items of a list.
func (r *reader) yamlItems(of head, items *yaml.Node, line int) {
	if items == nil || items.ShortTag() == "!!null" || items.Kind == yaml.SequenceNode && len(items.Content) == 0 {
		r.seen = true // a list without items says something, too
		return
	}
	if items.Kind != yaml.SequenceNode {
		r.report(line+items.Line-1, "", "items", errors.New("must be a list"))
		return
	}
	for _, item := range items.Content {
		item = strictyaml.Resolve(item)
		r.yamlObject(headOf(item, of), item, line)
	}
}

// yamlObject reads one object of a document that begins at the given line.
func (r *reader) yamlObject(h head, n *yaml.Node, line int) {
	if h.own() {
		r.frontendList(h, n, line)
		return
	}
	r.object(h, line+n.Line-1, func() ([]byte, error) { return appendJSON(nil, n) })
}

// headOf returns what an object says of itself, and of as far as it does not.
func headOf(n *yaml.Node, of head) head {
	set := func(field *string, n *yaml.Node, key string) {
		if v := lookup(n, key); v != nil && v.Kind == yaml.ScalarNode {
			*field = v.Value
		}
	}
	set(&of.APIVersion, n, "apiVersion")
	set(&of.Kind, n, "kind")
	if meta := lookup(n, "metadata"); meta != nil {
		set(&of.Metadata.Namespace, meta, "namespace")
		set(&of.Metadata.Name, meta, "name")
	}
	return of
}

// lookup returns the value of a key, nil where n has no such key.
func lookup(n *yaml.Node, key string) *yaml.Node {
	fields := fieldsOf(n)
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i].Value == key {
			return strictyaml.Resolve(fields[i+1])
		}
	}
	return nil
}

// fieldsOf returns the keys and values of a mapping in turn, nil for another
// node. What merge keys (<<) bring in counts where the mapping does not say it.
func fieldsOf(n *yaml.Node) []*yaml.Node {
	if n.Kind != yaml.MappingNode {
		return nil
	}
	isMerge := func(n *yaml.Node) bool { return n.ShortTag() == "!!merge" }
	if !slices.ContainsFunc(n.Content, isMerge) {
		return n.Content
	}
	var fields []*yaml.Node
	known := map[string]bool{}
	add := func(pairs []*yaml.Node) {
		for i := 0; i+1 < len(pairs); i += 2 {
			if key := pairs[i]; !isMerge(key) && !known[key.Value] {
				known[key.Value] = true
				fields = append(fields, key, pairs[i+1])
			}
		}
	}
	add(n.Content)
	for i := 0; i+1 < len(n.Content); i += 2 {
		if !isMerge(n.Content[i]) {
			continue
		}
		from := strictyaml.Resolve(n.Content[i+1])
		if from.Kind == yaml.SequenceNode {
			for _, m := range from.Content {
				add(fieldsOf(strictyaml.Resolve(m)))
			}
		} else {
			add(fieldsOf(from))
		}
	}
	return fields
}

// appendJSON appends a node as JSON, by YAML's own types: the typed decoding of
// a Kubernetes object begins there, as it does in kubectl.
func appendJSON(b []byte, n *yaml.Node) ([]byte, error) {
	n = strictyaml.Resolve(n)
	var err error
	switch n.Kind {
	case yaml.MappingNode:
		b = append(b, '{')
		for i, f := range fieldsOf(n) {
			switch {
			case i%2 == 1:
				b = append(b, ':')
			case i > 0:
				b = append(b, ',')
			}
			if i%2 == 0 {
				f = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: strictyaml.Resolve(f).Value}
			}
			if b, err = appendJSON(b, f); err != nil {
				return nil, err
			}
		}
		return append(b, '}'), nil
	case yaml.SequenceNode:
		b = append(b, '[')
		for i, c := range n.Content {
			if i > 0 {
				b = append(b, ',')
			}
			if b, err = appendJSON(b, c); err != nil {
				return nil, err
			}
		}
		return append(b, ']'), nil
	default:
		var v any = n.Value
		if n.ShortTag() != "!!str" {
			if err := n.Decode(&v); err != nil {
				return nil, err
			}
		}
		text, err := json.Marshal(v)
		return append(b, text...), err
	}
}
