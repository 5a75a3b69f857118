//go:build e2e && linux

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	status "github.com/flowsweep/flowsweep/agent"
)

const (
	window     = 5 * time.Second
	shrinkHold = 15 * time.Second
	adminAddr  = "127.0.0.1:9633"
)

// settling is how an agent knows that the proxy has caught up, as its status tells it.
type settling string

const (
	byRules settling = "rules"      // by what the NAT rules can still do
	byTime  settling = "generation" // by time, and by the commits of rules
	noAgent settling = ""
)

// agent is flowsweep as the DaemonSet runs it, with the rights of its ServiceAccount.
type agent struct {
	*process
	c       *cluster
	settles settling
	audit   string
}

// settling tells how an agent settles; a nil agent is kube-proxy alone.
func (a *agent) settling() settling {
	if a == nil {
		return noAgent
	}
	return a.settles
}

// startAgent starts flowsweep and waits until it is ready.
func (c *cluster) startAgent(t testing.TB, token string, by settling) *agent {
	t.Helper()
	c.file(t, "agent.token", token)
	c.file(t, "agent.kubeconfig", c.kubeconfig("agent.token"))
	// In one mode node ports are told to be where kube-proxy serves them; in the other the agent has
	// to go by what is certain.
	nodePortAddresses := "[]"
	if c.proxyMode == "nftables" {
		nodePortAddresses = "[primary]"
	}
	// Cases follow each other as fast as they can, on a machine that has several control planes to
	// run: the share of a core that walks may take is no part of what is tried here.
	const walkBudget = 1
	a := &agent{c: c, settles: by, audit: c.path("audit.jsonl")}
	c.file(t, "agent.yaml", fmt.Sprintf(`apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
sources: {kubernetes: {enabled: true, kubeconfig: %q}}
host: {nodePortAddresses: %s}
settling: {window: %s, walkBudget: %d, rules: %t}
guards: {shrinkHold: %s, shrinkMinimum: 5}
stateFile: %q
log: {level: debug, auditFile: %q}
admin: {listen: %q}
`, c.path("agent.kubeconfig"), nodePortAddresses, window, walkBudget, by == byRules, shrinkHold, c.path("state.json"),
		a.audit, adminAddr))
	a.start(t)
	return a
}

func (a *agent) start(t testing.TB) {
	t.Helper()
	argv := append([]string{"env"}, a.c.daemonEnv()...)
	a.process = a.c.start(t, "flowsweep", append(argv, flowsweep, "run", "--config="+a.c.path("agent.yaml"))...)
	eventually(t, time.Minute, "flowsweep is ready", func() error {
		_, err := a.c.get("http://" + adminAddr + "/readyz")
		return err
	})
	if got := a.status(t).Settling; got != string(a.settles) {
		t.Errorf("flowsweep settles by %q, want %q", got, a.settles)
	}
}

// rests waits until nothing is unsettled, its start included.
func (a *agent) rests(t testing.TB) {
	t.Helper()
	eventually(t, time.Minute, "all is settled", func() error {
		if s := a.status(t); s.UnsettledTotal > 0 {
			return fmt.Errorf("%+v", s.Unsettled)
		}
		return nil
	})
}

// daemonEnv returns the environment that the DaemonSet gives to the agent, as NAME=VALUE.
func (c *cluster) daemonEnv() []string {
	env := []string{"NODE_NAME=" + nodeName}
	for _, v := range c.daemon.Spec.Template.Spec.Containers[0].Env {
		if v.ValueFrom == nil {
			env = append(env, v.Name+"="+v.Value)
		}
	}
	return env
}

func (a *agent) status(t testing.TB) (s status.Status) {
	t.Helper()
	must(t, a.c.getJSON("http://"+adminAddr+"/statusz", &s))
	return s
}

// source returns the status of the Kubernetes source.
func (a *agent) source(t testing.TB) status.SourceStatus {
	t.Helper()
	for _, s := range a.status(t).Sources {
		if s.Name == "kubernetes" {
			return s
		}
	}
	t.Fatal("the agent has no source kubernetes")
	return status.SourceStatus{}
}

// knows waits until the agent knows so many Services as scene.service makes them, beside the
// apiserver's own.
func (a *agent) knows(t testing.TB, services int) {
	t.Helper()
	const each = 2 * 2 // a ClusterIP and a node port, in each family
	eventually(t, reconnect, fmt.Sprintf("flowsweep knows %d Services", services), func() error {
		if src := a.source(t); src.Frontends != 1+each*services {
			return fmt.Errorf("%+v", src)
		}
		return nil
	})
}

// deletion is a line of the audit file.
type deletion struct {
	Time     time.Time `json:"time"`
	Reason   string    `json:"reason"`
	Frontend string    `json:"frontend"`
	Owner    string    `json:"owner"`
	Flow     struct {
		Original struct {
			Src     netip.Addr `json:"source"`
			SrcPort uint16     `json:"sourcePort"`
			Dst     netip.Addr `json:"destination"`
			DstPort uint16     `json:"destinationPort"`
		} `json:"original"`
	} `json:"flow"`
}

// deletions returns what the agent has deleted since a time.
func (a *agent) deletions(since time.Time) ([]deletion, error) {
	b, err := os.ReadFile(a.audit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []deletion
	lines := json.NewDecoder(bytes.NewReader(b[:bytes.LastIndexByte(b, '\n')+1]))
	for lines.More() {
		var d deletion
		if err := lines.Decode(&d); err != nil {
			return nil, fmt.Errorf("%s: %w", a.audit, err)
		}
		if d.Time.After(since) {
			list = append(list, d)
		}
	}
	return list, nil
}

// deletes returns how often the agent has deleted a sender's flow since a time. A nil agent deletes
// nothing.
func (a *agent) deletes(st *stream, i int, since time.Time) (n int) {
	if a == nil {
		return 0
	}
	list, err := a.deletions(since)
	if err != nil {
		return -1
	}
	from, to := st.senders[i].Local(), st.to[i]
	for _, d := range list {
		o := d.Flow.Original
		if netip.AddrPortFrom(o.Src, o.SrcPort) == from && netip.AddrPortFrom(o.Dst, o.DstPort) == to {
			n++
		}
	}
	return n
}

// passes returns how many passes the agent has made.
func (a *agent) passes(t testing.TB) (n int) {
	t.Helper()
	b, err := a.c.get("http://" + adminAddr + "/metrics")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		var count int
		if _, err := fmt.Sscan(value, &count); err == nil && strings.HasPrefix(name, "flowsweep_passes_total{") {
			n += count
		}
	}
	return n
}
