//go:build linux

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// console finds the blocks of documentation that show a command and its output.
var console = regexp.MustCompile("(?ms)^```\n[$] flowsweep (.*?)\n(.*?)^```$")

// What the documentation shows is what the commands print.
func TestDocumentedCommands(t *testing.T) {
	t.Chdir("../..")
	files, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := 0
	for _, file := range append(files, "README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range console.FindAllSubmatch(text, -1) {
			shown++
			var args []string
			for i, part := range strings.Split(string(m[1]), "'") { // quoting is all that is used of a shell
				if i%2 == 1 {
					args = append(args, part)
				} else {
					args = append(args, strings.Fields(part)...)
				}
			}
			var out bytes.Buffer
			Run(t.Context(), args, strings.NewReader(""), &out, &out)
			if got := out.String(); got != string(m[2]) {
				t.Errorf("%s: flowsweep %s prints\n%s", file, m[1], got)
			}
		}
	}
	if shown < 2 {
		t.Errorf("%d commands are shown", shown)
	}
}

// The demo repairs what it breaks (else it exits with 1), and the README's
// transcript is its own, but for times, ports and how long each sender was
// watched.
func TestDemo(t *testing.T) {
	nstest.Require(t)
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, shown, ok := strings.Cut(string(text), "This is what the demo prints:\n\n```\n")
	if !ok {
		t.Fatal("the README shows no demo")
	}
	shown, _, _ = strings.Cut(shown, "```")
	out, err := program(t, "demo").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	norm := func(s string) string {
		for _, p := range []string{` *\d+\.\d+ s`, `192\.0\.2\.2:\d+`, `\d+\.\d ms`, `(?m)^  [ABC] [0-9.]+$`} {
			s = regexp.MustCompile(p).ReplaceAllString(s, "#")
		}
		return s
	}
	if got, want := norm(string(out)), norm(shown); got != want {
		t.Errorf("the demo prints\n%s\nand the README shows\n%s", got, want)
	}
}
