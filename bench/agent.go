//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/flowsweep/flowsweep/conntrack"
)

// admin is where agents serve their metrics, in a namespace of the benchmark.
const admin = "127.0.0.1:9633"

// agent is a running "flowsweep run".
type agent struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	ended  chan struct{} // closed once it has, by err
	err    error
}

// startAgent runs the program with a configuration. It takes over what the
// sources and the deletes are; what would reach beyond the namespace is off.
func startAgent(ctx context.Context, program, sources string) (*agent, error) {
	dir, err := os.MkdirTemp("", "flowsweep-bench-")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "agent.yaml")
	text := "apiVersion: flowsweep.dev/v1alpha1\nkind: AgentConfiguration\n" + sources +
		"stateFile: \"\"\nguards: {deletesPerSecond: 0}\nadmin: {listen: " + admin + ", pprof: true}\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	a := &agent{ended: make(chan struct{})}
	a.cmd = exec.CommandContext(ctx, program, "run", "--config", config)
	a.cmd.Stderr = &a.stderr
	a.cmd.Cancel = func() error { return a.cmd.Process.Signal(unix.SIGTERM) }
	a.cmd.WaitDelay = 10 * time.Second
	if err := a.cmd.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	go func() {
		a.err = a.cmd.Wait()
		_ = os.RemoveAll(dir)
		close(a.ended)
	}()
	return a, nil
}

// stop ends the agent and waits until it has.
func (a *agent) stop() {
	_ = a.cmd.Process.Signal(unix.SIGTERM)
	<-a.ended
}

// ready waits until the agent says that its first pass is done.
func (a *agent) ready(ctx context.Context) error {
	for {
		resp, err := http.Get("http://" + admin + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-a.ended:
			return fmt.Errorf("flowsweep run: %w: %s", cmp.Or(a.err, errors.New("it ended")), lastLine(a.stderr.String()))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// get returns what the agent serves.
func (a *agent) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return b, err
}

// memory returns what of the agent is resident, now (VmRSS) or at most so far
// (VmHWM).
func (a *agent) memory(field string) (uint64, error) {
	return statusBytes(strconv.Itoa(a.cmd.Process.Pid), field)
}

// processes are whole programs of flowsweep.
func processes(o *options) []work {
	return []work{{
		name: "agent/25", title: "flowsweep run: from its start until 25 % are swept",
		deletes: byDefault(staleFlows(25)),
		run: func(ctx context.Context, size int) (sample, error) {
			c, err := conntrack.Dial(conntrack.Config{})
			if err != nil {
				return sample{}, err
			}
			defer c.Close()
			state, err := writeObjects(whole().without(stale(25)))
			if err != nil {
				return sample{}, err
			}
			defer remove(state)
			start := time.Now()
			a, err := startAgent(ctx, o.program, "sources: {static: {files: ["+strconv.Quote(state)+"]}}\n")
			if err != nil {
				return sample{}, err
			}
			defer a.stop()
			if err := a.ready(ctx); err != nil {
				return sample{}, err
			}
			// What leads to a backend that it never knew, it deletes at a second look.
			want := size - count(size, byDefault(staleFlows(25)))
			for {
				left, err := c.Count(ctx)
				if err != nil {
					return sample{}, err
				}
				if left <= want {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
			s := sample{Seconds: time.Since(start).Seconds()}
			s.Peak, err = a.memory("VmHWM")
			return s, err
		},
	}}
}

// writeObjects writes a world to a file as "kubectl get -o json" prints it.
func writeObjects(w world) (path string, err error) {
	f, err := os.CreateTemp("", "flowsweep-bench-*.json")
	if err != nil {
		return "", err
	}
	list := struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Items      []any  `json:"items"`
	}{"v1", "List", nil}
	w.each(func(svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
		list.Items = append(list.Items, svc, slice)
	})
	if err := errors.Join(json.NewEncoder(f).Encode(list), f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// remove deletes a temporary file.
func remove(path string) { _ = os.Remove(path) }
