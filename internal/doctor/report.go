package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Level says what a finding asks of the reader.
type Level uint8

// The levels, from nothing to do to something that must be done.
const (
	OK   Level = iota
	Info       // good to know
	Warn       // costs something, or will
	Mend       // flowsweep cannot do its work
)

var levels = [...]string{"ok", "info", "warn", "mend"}

// String returns "ok", "info", "warn" or "mend".
func (l Level) String() string { return levels[l] }

// MarshalText makes it that word in JSON.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Finding is what one check found.
type Finding struct {
	ID    string `json:"id"` // stable
	Level Level  `json:"level"`
	// Unchecked: the check could not be made, for the reason in What.
	Unchecked bool   `json:"unchecked,omitempty"`
	What      string `json:"what"`
	Why       string `json:"why"`          // it matters
	Do        string `json:"do,omitempty"` // about it
}

// Report is what all checks found. In JSON fields are added, never renamed.
type Report struct {
	Release  string    `json:"kernelRelease,omitempty"`
	NetNS    string    `json:"netns,omitempty"` // as asked for
	Findings []Finding `json:"findings"`
	Summary  Summary   `json:"summary"`
}

// Summary counts findings by level. Those that are Unchecked are among Info.
type Summary struct {
	Mend      int `json:"mend"`
	Warn      int `json:"warn"`
	Info      int `json:"info"`
	OK        int `json:"ok"`
	Unchecked int `json:"unchecked"`
}

func (r *Report) add(f Finding) {
	r.Findings = append(r.Findings, f)
	switch f.Level {
	case Mend:
		r.Summary.Mend++
	case Warn:
		r.Summary.Warn++
	case Info:
		r.Summary.Info++
	case OK:
		r.Summary.OK++
	}
	if f.Unchecked {
		r.Summary.Unchecked++
	}
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

const lineWidth = 80

// WriteText writes the report for people, 80 columns wide, the worst first. Of
// what is in order a line is enough.
func (r *Report) WriteText(w io.Writer, color bool) error {
	list := slices.Clone(r.Findings)
	slices.SortStableFunc(list, func(a, b Finding) int { return cmp.Compare(b.Level, a.Level) })
	ids := 0
	for _, f := range list {
		ids = max(ids, utf8.RuneCountInString(f.ID))
	}
	var b strings.Builder
	for _, f := range list {
		level := fmt.Sprintf("%-4s", f.Level)
		if color {
			level = paint(f.Level, level)
		}
		fmt.Fprintf(&b, "%s  %-*s  ", level, ids, f.ID)
		hang(&b, len("warn  ")+ids+len("  "), f.What)
		if f.Level == OK {
			continue
		}
		for _, p := range []struct{ label, text string }{{"      why: ", f.Why}, {"      do:  ", f.Do}} {
			if p.text != "" {
				b.WriteString(p.label)
				hang(&b, len(p.label), p.text)
			}
		}
	}
	s := r.Summary
	fmt.Fprintf(&b, "\n%d to mend, %s, %d to know, %d in order",
		s.Mend, plural(s.Warn, "warning"), s.Info-s.Unchecked, s.OK)
	if s.Unchecked > 0 {
		fmt.Fprintf(&b, "; %d could not be checked", s.Unchecked)
	}
	b.WriteByte('\n')
	_, err := io.WriteString(w, b.String())
	return err
}

// hang writes words from column left on, and breaks lines before they are wider
// than a terminal. A longer word than that stands alone.
func hang(b *strings.Builder, left int, text string) {
	col := left
	for i, word := range strings.Fields(printable(text)) {
		n := utf8.RuneCountInString(word)
		if i > 0 && col+1+n > lineWidth {
			b.WriteString("\n" + strings.Repeat(" ", left))
			col = left
		} else if i > 0 {
			b.WriteByte(' ')
			col++
		}
		b.WriteString(word)
		col += n
	}
	b.WriteByte('\n')
}

// printable replaces what could upset a terminal: processes name themselves.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

func paint(l Level, s string) string {
	code := [...]string{OK: "32", Info: "36", Warn: "33", Mend: "31"}[l]
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
