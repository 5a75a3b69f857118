package cli

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

// One page with all that roff could misread: a leading dot and quote, hyphens,
// backslashes, quotes of every kind, indented lines between paragraphs.
func TestManPage(t *testing.T) {
	root := &cobra.Command{Use: "tool", Short: "Do it", Run: func(*cobra.Command, []string) {}}
	c := &cobra.Command{
		Use:   "mow FIELD",
		Short: "Cut what's high",
		Long: `.mow cuts the grass of
'FIELD', not its "flowers". A file:

  a: ^b\c
    - ~d

  e: ` + "`f`" + `

The rest stays.`,
		Example: "  tool mow 'a field' --at-most 3",
		Run:     func(*cobra.Command, []string) {},
	}
	c.Flags().Uint("at-most", 0, "stop after `N` fields")
	c.Flags().StringP("blade", "b", "sharp", "which blade")
	c.Flags().Bool("secret", false, "for tests")
	c.Flags().Bool("old", false, "as it was")
	if err := errors.Join(c.Flags().MarkHidden("secret"), c.Flags().MarkDeprecated("old", "no more")); err != nil {
		t.Fatal(err)
	}
	root.AddCommand(c)
	want := `.TH TOOL\-MOW 1 2023-11-14 flowsweep "flowsweep manual"
.SH NAME
tool\-mow \- Cut what\(aqs high
.SH SYNOPSIS
\fBtool mow\fR FIELD [flags]
.SH DESCRIPTION
\&.mow cuts the grass of
\(aqFIELD\(aq, not its \(dqflowers\(dq. A file:
.PP
.RS 4
.EX
a: \(hab\ec
  \- \(tid

e: \(gaf\(ga
.EE
.RE
.PP
The rest stays.
.SH OPTIONS
.TP
\fB\-\-at\-most\fR \fIN\fR
stop after N fields
.TP
\fB\-b\fR, \fB\-\-blade\fR \fIstring\fR
which blade (default \(dqsharp\(dq)
.TP
\fB\-h\fR, \fB\-\-help\fR
help for mow
.SH EXAMPLES
.RS 4
.EX
tool mow \(aqa field\(aq \-\-at\-most 3
.EE
.RE
.SH "SEE ALSO"
.BR tool (1)
`
	if diff := cmp.Diff(want, string(manPage(c, "2023-11-14"))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func manPages(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	var out bytes.Buffer
	if code := Run(t.Context(), []string{"man", dir}, strings.NewReader(""), &out, &out); code != 0 {
		t.Fatalf("exit %d: %s", code, out.String())
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	pages := make(map[string]string, len(files))
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		pages[f.Name()] = string(b)
	}
	return pages
}

func collect[F any](visitAll func(func(F))) (fs []F) {
	visitAll(func(f F) { fs = append(fs, f) })
	return fs
}

// Every command that the help lists has its page, with every option that its help
// has; each page that is referred to is there; nothing depends on the day.
func TestManPagesComplete(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	pages := manPages(t)
	var want []string
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		name := pageName(c) + ".1"
		want = append(want, name)
		for _, f := range collect(c.LocalFlags().VisitAll) {
			if !f.Hidden && !strings.Contains(pages[name], `\fB`+roff("--"+f.Name)+`\fR`) {
				t.Errorf("%s lacks --%s", name, f.Name)
			}
		}
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() && sub.Name() != "completion" {
				walk(sub)
			}
		}
	}
	walk(newRoot())
	got := make([]string, 0, len(pages))
	for name, text := range pages {
		got = append(got, name)
		if !strings.HasPrefix(text, ".TH FLOWSWEEP") || !strings.Contains(text, " 1 2023-11-14 ") {
			t.Errorf("%s begins with %q", name, text[:min(60, len(text))])
		}
		for l := range strings.Lines(text) {
			if ref := strings.Fields(l); len(ref) == 3 && ref[0] == ".BR" {
				if file := strings.ReplaceAll(ref[1], `\`, "") + ".1"; pages[file] == "" {
					t.Errorf("%s refers to %s", name, file)
				}
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff(pages, manPages(t)); diff != "" {
		t.Errorf("a second run differs:\n%s", diff)
	}
	if p := pages["flowsweep.1"]; !strings.Contains(p, `\fBflowsweep completion\fR`) || strings.Contains(p, `\fBflowsweep man\fR`) {
		t.Errorf("the list of commands is wrong:\n%s", p)
	}
}

func TestManDate(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "")
	if p := manPages(t)["flowsweep.1"]; !strings.HasPrefix(p, ".TH FLOWSWEEP 1 \"\" flowsweep ") {
		t.Errorf("dated: %q", p[:60])
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	var out bytes.Buffer
	if code := Run(t.Context(), []string{"man", t.TempDir()}, nil, &out, &out); code != exitFailed ||
		out.String() != "flowsweep: SOURCE_DATE_EPOCH: \"yesterday\" is no number of seconds\n" {
		t.Errorf("exit %d: %s", code, out.String())
	}
}
