package config

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// lineWidth is that of comments.
const lineWidth = 92

// Print writes the whole configuration as YAML, with a comment on each field: what
// it is, its range, whether a change of it needs a restart. Decode reads the same
// configuration from it, if it is a valid one.
func Print(w io.Writer, c *Config) error {
	b := bufio.NewWriter(w)
	comment(b, "", "The configuration of flowsweep's agent: what is given, and defaults for the rest. In "+
		"brackets: what is allowed, and \"restart\" where a change waits for one.")
	fmt.Fprintf(b, "apiVersion: %s\nkind: %s\n", APIVersion, Kind)
	var open []string // sections
	for _, f := range fields {
		parts := strings.Split(f.path, ".")
		last := len(parts) - 1
		for i := range last {
			if i < len(open) && open[i] == parts[i] {
				continue
			}
			open = append(open[:min(i, len(open))], parts[i])
			if i == 0 {
				fmt.Fprintln(b)
			}
			indent := strings.Repeat("  ", i)
			comment(b, indent, sections[strings.Join(parts[:i+1], ".")])
			fmt.Fprintf(b, "%s%s:\n", indent, parts[i])
		}
		if last == 0 {
			fmt.Fprintln(b)
		}
		open = open[:last]
		indent := strings.Repeat("  ", last)
		comment(b, indent, f.comment())
		fmt.Fprintf(b, "%s%s:%s\n", indent, parts[last], f.value(c, indent))
	}
	return b.Flush()
}

// comment returns what the field is, and in brackets what there is to know when
// it is changed.
func (f *field) comment() string {
	var notes []string
	switch {
	case f.list:
		notes = append(notes, "each "+f.allowed)
	case f.allowed != boolean.allowed:
		notes = append(notes, f.allowed)
	}
	if !f.live {
		notes = append(notes, "restart")
	}
	if len(notes) == 0 {
		return f.doc
	}
	return f.doc + " [" + strings.Join(notes, "; ") + "]"
}

// value returns what follows the field's colon: a list on the same line if it is
// short.
func (f *field) value(c *Config, indent string) string {
	values := f.print(c)
	flow := " [" + strings.Join(values, ", ") + "]"
	switch {
	case !f.list:
		return " " + values[0]
	case len(flow) <= 60:
		return flow
	}
	sep := "\n" + indent + "- "
	return sep + strings.Join(values, sep)
}

// comment writes a text in lines of at most lineWidth.
func comment(w io.Writer, indent, text string) {
	line := indent + "#"
	for word := range strings.FieldsSeq(text) {
		if len(line)+1+len(word) > lineWidth {
			fmt.Fprintln(w, line)
			line = indent + "#"
		}
		line += " " + word
	}
	fmt.Fprintln(w, line)
}
