package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/flowsweep/flowsweep/internal/strictyaml"
)

// maxSize is far more than any configuration needs.
const maxSize = 1 << 20

// Load reads a file. The errors are those of Decode, and of opening it.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	defer f.Close()
	return Decode(path, f)
}

// Decode reads an AgentConfiguration; name stands for it in errors. What is absent
// or null has its default, except that a source is off that a given sources does
// not name. The errors are of type *[Error], in order of their lines and joined.
func Decode(name string, r io.Reader) (*Config, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	d := decoder{file: name, config: Default(), lines: map[string]int{}}
	switch root := d.parse(data); {
	case root != nil && d.head(root):
		d.mapping(root, "")
		d.config.check(func(path string, err error) { d.fail(d.lines[path], path, err) })
	case len(d.errs) == 0:
		d.fail(0, "", fmt.Errorf("is empty; it begins with apiVersion: %s and kind: %s", APIVersion, Kind))
	}
	if len(d.errs) > 0 {
		return nil, d.err()
	}
	return d.config, nil
}

type decoder struct {
	file   string
	config *Config
	lines  map[string]int // where fields are given
	errs   []*Error
}

func (d *decoder) fail(line int, path string, err error) {
	d.errs = append(d.errs, &Error{File: d.file, Line: line, Path: path, Err: err})
}

func (d *decoder) report(n *yaml.Node, path string, err error) { d.fail(n.Line, path, err) }

func (d *decoder) err() error {
	slices.SortStableFunc(d.errs, func(a, b *Error) int { return cmp.Compare(a.Line, b.Line) })
	var list []error
	for _, e := range d.errs {
		list = append(list, e)
	}
	return errors.Join(list...)
}

// parse returns the root of the only document, nil where there is none or an
// error.
func (d *decoder) parse(data []byte) (root *yaml.Node) {
	if len(data) > maxSize {
		d.fail(0, "", fmt.Errorf("more than %d MiB", maxSize>>20))
		return nil
	}
	var bounds strictyaml.Bounds
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return root
		}
		if err != nil {
			line, err := strictyaml.SyntaxError(err)
			d.fail(line, "", err)
			return nil
		}
		if err := bounds.Check(&doc); err != nil {
			d.fail(0, "", err)
			return nil
		}
		switch first := strictyaml.Resolve(doc.Content[0]); {
		case first.ShortTag() == "!!null":
		case root != nil:
			d.fail(first.Line, "", errors.New("a second document; a configuration is one"))
			return nil
		default:
			root = first
		}
	}
}

// head tells whether it is an AgentConfiguration. What it is else has other
// fields, of which there is nothing to say.
func (d *decoder) head(root *yaml.Node) bool {
	if root.Kind != yaml.MappingNode {
		d.report(root, "", fmt.Errorf("must be a mapping, not %s", strictyaml.Describe(root)))
		return false
	}
	for _, want := range [][2]string{{"apiVersion", APIVersion}, {"kind", Kind}} {
		key, value := want[0], want[1]
		found := false
		for i := 0; i+1 < len(root.Content); i += 2 {
			if root.Content[i].Value != key {
				continue
			}
			found = true
			if v := strictyaml.Resolve(root.Content[i+1]); v.Value != value {
				d.report(v, key, fmt.Errorf("must be %s, not %s", value, strictyaml.Describe(v)))
			}
		}
		if !found {
			d.fail(0, key, fmt.Errorf("is missing; write %s: %s", key, value))
		}
	}
	return len(d.errs) == 0
}

// mapping reads the fields below a path.
func (d *decoder) mapping(n *yaml.Node, prefix string) {
	var known []string
	if prefix == "" {
		known = []string{"apiVersion", "kind"}
	}
	for _, f := range fields {
		if key, ok := below(f.path, prefix); ok && !slices.Contains(known, key) {
			known = append(known, key)
		}
	}
	values := strictyaml.Report(d.report).Fields(n, strings.TrimSuffix(prefix, "."), known...)
	for _, key := range known {
		v := values[key]
		if v == nil {
			continue
		}
		path := prefix + key
		d.lines[path] = v.Line
		if path == "sources" {
			d.config.Sources.Static.Files = nil // it is off unless it is named
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.path == path })
		if i >= 0 {
			d.field(&fields[i], v)
		} else if prefix != "" || key != "apiVersion" && key != "kind" {
			d.mapping(v, path+".")
		}
	}
}

// below returns the first part of a path below a prefix.
func below(path, prefix string) (key string, ok bool) {
	rest, ok := strings.CutPrefix(path, prefix)
	key, _, _ = strings.Cut(rest, ".")
	return key, ok
}

// field reads a field. One that is not valid has its default, so that what else
// depends on it is judged by something sensible.
func (d *decoder) field(f *field, n *yaml.Node) {
	before := len(d.errs)
	f.decode(d.report, n, d.config)
	if len(d.errs) > before {
		f.take(d.config, Default())
	}
}
