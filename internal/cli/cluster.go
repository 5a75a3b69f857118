package cli

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"github.com/flowsweep/flowsweep/agent/config"
	"github.com/flowsweep/flowsweep/source/kubernetes"
	"github.com/flowsweep/flowsweep/source/kubernetes/cluster"
	"github.com/flowsweep/flowsweep/source/static"
)

// nodeNameEnv names the Node that this process runs on, as a DaemonSet sets it
// from spec.nodeName.
const nodeNameEnv = "NODE_NAME"

// clusterFlags say which cluster, the same for every command.
type clusterFlags struct {
	kubernetes bool
	kubeconfig string
	context    string
}

func (k *clusterFlags) register(c *cobra.Command) {
	f := c.Flags()
	f.BoolVar(&k.kubernetes, "kubernetes", false,
		"take the state from a cluster's API server: in a Pod by its ServiceAccount,\nelsewhere as kubectl does")
	f.StringVar(&k.kubeconfig, "kubeconfig", "", "kubeconfig `FILE` of the cluster; implies --kubernetes")
	f.StringVar(&k.context, "context", "", "`NAME` of a context of the kubeconfig file; implies --kubernetes")
}

func (k *clusterFlags) given() bool { return k.kubernetes || k.kubeconfig != "" || k.context != "" }

// nodeName returns the name of this host's Node: the one given, that of the
// environment, or the host name.
func nodeName(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	if n := os.Getenv(nodeNameEnv); n != "" {
		return n, nil
	}
	n, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("%w; give the name of this host's Node with --node or in %s", err, nodeNameEnv)
	}
	return n, nil
}

// read lists the cluster once.
func (k *clusterFlags) read(cmd *cobra.Command, node string) (*static.State, []netip.Prefix, error) {
	api, err := cluster.Connect(k.kubeconfig, k.context)
	if err != nil {
		return nil, nil, err
	}
	if node, err = nodeName(node); err != nil {
		return nil, nil, err
	}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	w, err := cluster.Read(ctx, cluster.Config{API: api, Node: node, HostPorts: true, ServiceRanges: true})
	if err != nil {
		return nil, nil, fmt.Errorf("reading the cluster: %w", err)
	}
	s := &static.State{Units: w.Units, NodeFound: true, NodeAddresses: w.NodeAddresses, PodRanges: w.PodRanges}
	for _, err := range w.Problems {
		var e *kubernetes.Error
		if errors.As(err, &e) {
			s.Problems = append(s.Problems, static.Problem{Object: e.Object, Path: e.Path, Err: e.Err})
		}
	}
	return s, w.ServiceRanges, nil
}

// clusterConfig is what of the configuration the source of a cluster goes by.
func clusterConfig(c *config.Config) (cluster.Config, error) {
	k := &c.Sources.Kubernetes
	api, err := cluster.Connect(k.Kubeconfig, k.Context)
	if err != nil {
		return cluster.Config{}, fmt.Errorf("source kubernetes: %w", err)
	}
	node, err := nodeName(c.Host.Node)
	return cluster.Config{API: api, Node: node, HostPorts: k.HostPorts, ServiceRanges: k.ServiceRanges}, err
}
