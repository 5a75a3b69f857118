//go:build linux

package cli

import (
	"bytes"
	"encoding/json"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

func TestDoctor(t *testing.T) {
	ns := nstest.New(t)
	type report struct {
		NetNS    string
		Findings []struct{ ID, Level, What, Why, Do string }
		Summary  map[string]int
	}
	for format, decode := range map[string]func([]byte, *report) error{
		"json": func(b []byte, r *report) error { return json.Unmarshal(b, r) },
		"yaml": func(b []byte, r *report) error { return yaml.Unmarshal(b, r) },
	} {
		t.Run(format, func(t *testing.T) {
			var out, stderr bytes.Buffer
			code := Run(t.Context(), []string{"doctor", "--netns", ns.Path(), "-o", format}, strings.NewReader(""), &out, &stderr)
			var r report
			if err := decode(out.Bytes(), &r); err != nil {
				t.Fatalf("%v: %s", err, out.String())
			}
			if code != 0 || r.NetNS != ns.Path() || len(r.Findings) < 10 || r.Summary["mend"] != 0 ||
				r.Findings[0].ID != "namespace" || r.Findings[0].Level != "ok" || stderr.Len() > 0 {
				t.Errorf("exit %d, %+v, %s", code, r, stderr.String())
			}
		})
	}
	t.Run("table", func(t *testing.T) {
		var out, stderr bytes.Buffer
		code := Run(t.Context(), []string{"doctor", "--netns", ns.Path()}, strings.NewReader(""), &out, &stderr)
		if code != 0 || !strings.Contains(out.String(), "\n0 to mend, ") || strings.Contains(out.String(), "\x1b") {
			t.Errorf("exit %d: %s%s", code, out.String(), stderr.String())
		}
	})
}

// Without CAP_NET_ADMIN, doctor says so, looks at the rest, and exits with 3.
func TestDoctorWithoutPrivilege(t *testing.T) {
	nstest.Require(t)
	var out, stderr bytes.Buffer
	var code int
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and given up; see TestWithoutPrivilege
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_NET_ADMIN, 0, 0, 0); err != nil {
			t.Error(err)
			return
		}
		cmd := program(t, "doctor")
		cmd.Stdout, cmd.Stderr = &out, &stderr
		_ = cmd.Run()
		code = cmd.ProcessState.ExitCode()
	}()
	<-done
	for _, want := range []string{
		"mend  capability       CAP_NET_ADMIN is missing, and the bounding set",
		"info  ctnetlink        not checked: it takes CAP_NET_ADMIN\n",
		"ok    ipvs             not in use\n",
		"\n1 to mend, ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
	if code != exitMend || stderr.Len() > 0 {
		t.Errorf("exit %d: %s", code, stderr.String())
	}
}
