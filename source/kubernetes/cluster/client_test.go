package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const twoContexts = `apiVersion: v1
kind: Config
current-context: one
contexts:
- {name: one, context: {cluster: a, user: u}}
- {name: two, context: {cluster: b, user: u}}
- {name: torn, context: {cluster: c, user: u}}
clusters:
- {name: a, cluster: {server: "https://192.0.2.1:6443"}}
- {name: b, cluster: {server: "https://192.0.2.2:6443"}}
users:
- {name: u, user: {token: t}}
`

// No file of the user who runs the test and no Pod that it runs in matters.
func TestConnect(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good", twoContexts)
	bad := map[string]string{
		"garbage": file("garbage", "}{"), "empty": file("empty", ""), "other": file("other", "apiVersion: v1\nkind: Pod\n"),
		"missing": filepath.Join(dir, "missing"),
	}
	for name, tc := range map[string]struct {
		env                  map[string]string
		kubeconfig, kcontext string
		host                 string   // of the API server
		errs                 []string // what the error says
	}{
		"file given":         {kubeconfig: good, host: "https://192.0.2.1:6443"},
		"context given":      {kubeconfig: good, kcontext: "two", host: "https://192.0.2.2:6443"},
		"file of KUBECONFIG": {env: map[string]string{"KUBECONFIG": good}, host: "https://192.0.2.1:6443"},
		"its other context":  {env: map[string]string{"KUBECONFIG": good}, kcontext: "two", host: "https://192.0.2.2:6443"},
		"a given file goes first": {
			env: map[string]string{"KUBECONFIG": bad["garbage"]}, kubeconfig: good, host: "https://192.0.2.1:6443",
		},
		"a given file goes before the Pod": {
			env: map[string]string{"KUBERNETES_SERVICE_HOST": "192.0.2.9", "KUBERNETES_SERVICE_PORT": "443"}, kubeconfig: good,
			host: "https://192.0.2.1:6443",
		},
		"a missing file of KUBECONFIG is passed over": {
			env:  map[string]string{"KUBECONFIG": bad["missing"] + string(filepath.ListSeparator) + good},
			host: "https://192.0.2.1:6443",
		},

		"no cluster and no file": {
			errs: []string{"this is no Pod of a cluster, and no kubeconfig file names a cluster; give one with --kubeconfig"},
		},
		"Pod without a token": {
			env: map[string]string{"KUBERNETES_SERVICE_HOST": "192.0.2.9", "KUBERNETES_SERVICE_PORT": "443"},
			errs: []string{
				"serviceaccount/token: no such file or directory",
				": the Pod has no ServiceAccount token; set automountServiceAccountToken",
			},
		},
		"no such file": {
			kubeconfig: bad["missing"],
			errs:       []string{"kubeconfig file " + bad["missing"] + ": ", "no such file or directory"},
		},
		"garbage": {kubeconfig: bad["garbage"], errs: []string{"kubeconfig file " + bad["garbage"] + ": "}},
		"empty file": {
			kubeconfig: bad["empty"], errs: []string{"kubeconfig file " + bad["empty"] + ": the context names no cluster"},
		},
		"file of another kind": {
			kubeconfig: bad["other"], errs: []string{"kubeconfig file " + bad["other"] + ": ", `no kind "Pod"`},
		},
		"no such context": {
			kubeconfig: good, kcontext: "three",
			errs: []string{"kubeconfig file " + good + ": ", `context "three" does not exist`},
		},
		"no such context anywhere": {
			kcontext: "three", errs: []string{"kubeconfig: ", `context "three" does not exist`},
		},
		"context without cluster": {
			kubeconfig: good, kcontext: "torn", errs: []string{"kubeconfig file " + good + ": the context names no cluster"},
		},
		"garbage in KUBECONFIG": {
			env: map[string]string{"KUBECONFIG": bad["garbage"]}, errs: []string{"kubeconfig: ", bad["garbage"]},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, key := range []string{"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"} {
				t.Setenv(key, tc.env[key])
			}
			t.Setenv("KUBECONFIG", bad["missing"]) // and not the home directory's
			if v := tc.env["KUBECONFIG"]; v != "" {
				t.Setenv("KUBECONFIG", v)
			}
			cfg, err := Connect(tc.kubeconfig, tc.kcontext)
			if tc.errs == nil {
				if err != nil || cfg.Host != tc.host || cfg.BearerToken != "t" {
					t.Errorf("%+v, %v, want host %s", cfg, err, tc.host)
				}
				return
			}
			text := fmt.Sprint(err)
			for _, want := range tc.errs {
				if !strings.Contains(text, want) {
					t.Errorf("error %q lacks %q", text, want)
				}
			}
			if strings.Contains(text, "\n") || strings.Contains(text, "KUBERNETES_MASTER") {
				t.Errorf("error %q", text)
			}
		})
	}
}
