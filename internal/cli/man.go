package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// newMan writes the pages itself: cobra/doc would bring a Markdown parser and a
// converter into the module, and take the plain text of the help for Markdown.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write the man pages",
		Hidden: true, // for packagers
		Long: `man writes a man page for every command into the folder DIR, which must exist.
SOURCE_DATE_EPOCH, in seconds, dates the pages; without it they have no date.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			date := ""
			if s := os.Getenv("SOURCE_DATE_EPOCH"); s != "" {
				sec, err := strconv.ParseInt(s, 10, 64)
				if err != nil {
					return fmt.Errorf("SOURCE_DATE_EPOCH: %q is no number of seconds", s)
				}
				date = time.Unix(sec, 0).UTC().Format(time.DateOnly)
			}
			return writeManPages(args[0], cmd.Root(), date)
		},
	}
}

// writeManPages writes the page of c and those of the commands below it.
func writeManPages(dir string, c *cobra.Command, date string) error {
	file := filepath.Join(dir, pageName(c)+".1")
	if err := os.WriteFile(file, manPage(c, date), 0o644); err != nil {
		return err
	}
	for _, sub := range c.Commands() {
		if !hasPage(sub) {
			continue
		}
		if err := writeManPages(dir, sub, date); err != nil {
			return err
		}
	}
	return nil
}

// hasPage leaves out what is hidden, and completion, whose help is cobra's and in
// Markdown.
func hasPage(c *cobra.Command) bool { return c.IsAvailableCommand() && c.Name() != "completion" }

func pageName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// exitCodes are the manual's words for the exit codes; docs/output.md has more.
var exitCodes = []struct {
	code    int
	meaning string
}{
	{0, "Done, whatever was found."},
	{exitFailed, "Failed, or interrupted; the message says what and where."},
	{exitUsage, "Wrong usage."},
	{exitStale, "Something was found that needs attention; only of commands that say so."},
}

// manPage renders the help of c in the macros of man(7), for groff and mandoc.
func manPage(c *cobra.Command, date string) []byte {
	c.InitDefaultHelpFlag()
	p := &page{}
	p.macro("TH", strings.ToUpper(roff(pageName(c))), "1", date, "flowsweep", "flowsweep manual")
	p.macro("SH", "NAME")
	p.line(roff(pageName(c)) + ` \- ` + roff(c.Short))
	p.macro("SH", "SYNOPSIS")
	p.line(bold(c.CommandPath()) + roff(strings.TrimPrefix(c.UseLine(), c.CommandPath())))
	p.macro("SH", "DESCRIPTION")
	if c.Long != "" {
		p.prose(c.Long)
	} else {
		p.prose(c.Short + ".")
	}
	var related []string
	if c.HasParent() {
		related = append(related, pageName(c.Parent()))
	}
	listed := false
	for _, sub := range c.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		if !listed {
			p.macro("SH", "COMMANDS")
			listed = true
		}
		p.entry(bold(sub.CommandPath()), sub.Short)
		if hasPage(sub) {
			related = append(related, pageName(sub))
		}
	}
	p.options("OPTIONS", c.NonInheritedFlags().FlagUsages())
	p.options("OPTIONS OF EVERY COMMAND", c.InheritedFlags().FlagUsages())
	if !c.HasParent() {
		p.macro("SH", "EXIT STATUS")
		for _, e := range exitCodes {
			p.entry(bold(strconv.Itoa(e.code)), e.meaning)
		}
	}
	if c.Example != "" {
		p.macro("SH", "EXAMPLES")
		p.prose(c.Example)
	}
	if len(related) > 0 {
		p.macro("SH", "SEE ALSO")
		for i, name := range related {
			if i < len(related)-1 {
				p.macro("BR", roff(name), "(1),")
			} else {
				p.macro("BR", roff(name), "(1)")
			}
		}
	}
	return p.Bytes()
}

// page is roff text.
type page struct{ bytes.Buffer }

// line writes one line of text; s is roff.
func (p *page) line(s string) {
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		p.WriteString(`\&`) // else a request
	}
	p.WriteString(s + "\n")
}

// macro writes a macro call; args are roff.
func (p *page) macro(name string, args ...string) {
	p.WriteString("." + name)
	for _, a := range args {
		if a == "" || strings.Contains(a, " ") {
			a = `"` + a + `"`
		}
		p.WriteString(" " + a)
	}
	p.WriteByte('\n')
}

// entry writes a term, which is roff, and its description, which is plain text.
func (p *page) entry(term, text string) {
	p.macro("TP")
	p.line(term)
	p.line(roff(strings.Join(strings.Fields(text), " ")))
}

// prose writes plain text as the help has it: paragraphs are filled, indented
// lines are shown as they are.
func (p *page) prose(text string) {
	text = strings.Trim(text, "\n")
	verbatim, gap := false, false
	for _, l := range strings.Split(text, "\n") {
		if strings.TrimSpace(l) == "" {
			gap = true
			continue
		}
		indented := strings.HasPrefix(l, " ") || strings.HasPrefix(l, "\t")
		if verbatim && !indented {
			p.macro("EE")
			p.macro("RE")
		}
		switch {
		case gap && verbatim && indented:
			p.line("")
		case gap:
			p.macro("PP")
		}
		if indented && !verbatim {
			p.macro("RS", "4")
			p.macro("EX")
		}
		if indented {
			l = strings.TrimPrefix(strings.TrimPrefix(l, "\t"), "  ")
		}
		p.line(roff(l))
		verbatim, gap = indented, false
	}
	if verbatim {
		p.macro("EE")
		p.macro("RE")
	}
}

// usage finds a flag in the lines of pflag's FlagUsages: shorthand, name,
// argument, text. The text stands two spaces away at least.
var usage = regexp.MustCompile(`(?m)^ +(?:(-\w), )?(--[\w-]+)(?: (\S+))? {2,}(\S.*)$`)

// options describes flags as the help does, from its lines.
func (p *page) options(heading, usages string) {
	flags := usage.FindAllStringSubmatch(usages, -1)
	if len(flags) > 0 {
		p.macro("SH", heading)
	}
	for _, f := range flags {
		term := bold(f[2])
		if f[1] != "" {
			term = bold(f[1]) + ", " + term
		}
		if f[3] != "" {
			term += " " + italic(f[3])
		}
		p.entry(term, f[4])
	}
}

func bold(s string) string   { return `\fB` + roff(s) + `\fR` }
func italic(s string) string { return `\fI` + roff(s) + `\fR` }

// roff escapes plain text. A bare hyphen, quote or the like would be set as its
// typographic cousin, and could not be pasted into a shell.
func roff(s string) string { return roffEscapes.Replace(s) }

var roffEscapes = strings.NewReplacer(
	`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, `"`, `\(dq`, "^", `\(ha`, "~", `\(ti`,
)
