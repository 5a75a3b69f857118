package conntrack

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzParse: what is read is printed and read again as the same flow.
func FuzzParse(f *testing.F) {
	names, err := filepath.Glob(filepath.Join("testdata", "text", "*.txt"))
	if err != nil || len(names) == 0 {
		f.Fatalf("no recorded files: %v", err)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			f.Add(line)
		}
	}
	f.Add("udp 17 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
		"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 [ASSURED] [HW_OFFLOAD]")
	f.Fuzz(func(t *testing.T, line string) {
		flow, err := Parse(line)
		if err != nil {
			if flow != (Flow{}) {
				t.Fatalf("an error and a flow: %v, %s", err, &flow)
			}
			return
		}
		if flow.Status&StatusOffload != 0 {
			flow.Status &^= StatusAssured // the tool prints one of the two
		}
		again, err := Parse(flow.String())
		if err != nil {
			t.Fatalf("%v: %s", err, &flow)
		}
		if again != flow {
			t.Fatalf("\nread    %s\nas      %+v\nprinted %s\nas      %+v", line, flow, &flow, again)
		}
	})
}

// FuzzReadText: it comes to an end, counts lines upwards, and reads of each
// line what Parse does.
func FuzzReadText(f *testing.F) {
	f.Add("")
	f.Add(udpLine + "\n" + shownLine)
	f.Add("[DESTROY] " + udpLine + "\n[NEW] " + udpLine[:90] + "\n")
	f.Add("\ufeff" + udpLine[:80] + shownLine + "\r\n" + udpLine[80:] + "\r\n\r\nx\n" + udpLine)
	f.Fuzz(func(t *testing.T, text string) {
		lines := strings.Split(text, "\n")
		before := 0
		for flow, err := range ReadText(strings.NewReader(text)) {
			n := flow.Line
			if err != nil {
				if flow.Flow != (Flow{}) {
					t.Fatalf("an error and a flow: %v, %s", err, &flow.Flow)
				}
				bad, ok := errors.AsType[*LineError](err)
				if !ok {
					t.Fatal(err)
				}
				n = bad.Line
			}
			if n <= before || n > len(lines) {
				t.Fatalf("line %d after line %d, of %d", n, before, len(lines))
			}
			before = n
			if err != nil {
				continue
			}
			line := strings.TrimPrefix(lines[n-1], "\ufeff")
			if summary([]byte(line)) >= 0 {
				continue
			}
			if want, err := Parse(strings.TrimSpace(line)); err != nil || want != flow.Flow {
				t.Fatalf("line %d: %s, but Parse says %s, %v", n, &flow.Flow, &want, err)
			}
		}
	})
}
