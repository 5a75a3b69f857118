//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/internal/nft"
	"github.com/flowsweep/flowsweep/internal/testnet"
	"github.com/flowsweep/flowsweep/internal/testnet/nstest"
)

// Where things are, seen from this package's directory.
const (
	binaries  = "../../bin/e2e"
	flowsweep = "../../bin/flowsweep"
	manifest  = "../../deploy/install.yaml"
	helm      = binaries + "/helm"
)

// The network: the node between a client and the pods, which are addresses of one namespace.
//
//	client [eth0]────[client] node [pods]────[eth0] pods
//
// etcd, kube-apiserver, kube-proxy and the agent run on the node, and talk over its loopback.
const nodeName = "n1"

var (
	clientNet = dual(netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8:1::/64"))
	podNet    = dual(netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/64"))
	// serviceNet is what ClusterIPs are taken from.
	serviceNet = dual(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112"))

	clientAddr = dual(netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8:1::2"))
	nodeAddr   = dual(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1"))
	// unlisted are addresses of the node that its Node object does not tell.
	unlisted = dual(netip.MustParseAddr("192.0.2.129"), netip.MustParseAddr("2001:db8:1::81"))
)

// dual makes a list with a value for IPv4 and one for IPv6, in this order everywhere.
func dual[T any](v4, v6 T) []T { return []T{v4, v6} }

const (
	apiserverURL = "https://127.0.0.1:16443"
	etcdURL      = "http://127.0.0.1:23790"
	// adminToken belongs to system:masters.
	adminToken = "admin"
	// lastingToken is of the user that the agent's ServiceAccount is. It outlives a wiped etcd, which
	// takes the ServiceAccount and all its tokens with it.
	lastingToken = "lasting"
)

// cluster is a control plane and its one node.
type cluster struct {
	t                  testing.TB // the test that it lives as long as
	dir                string
	node, client, pods *testnet.NS
	flows              *conntrack.Conn
	judges             *judges
	commits            *commits

	processes       []*process // all that were ever started
	etcd, apiserver *process
	proxy           *process
	proxyMode       string

	http *http.Client // from the node
	kube *kubernetes.Clientset
	// daemon is the DaemonSet that the manifest made.
	daemon *appsv1.DaemonSet
}

// newCluster starts a control plane with the Node and what the manifest holds, but no proxy.
func newCluster(t testing.TB) *cluster {
	t.Helper()
	star := nstest.Star(t,
		testnet.Leaf{Name: "client", Prefixes: clientNet}, testnet.Leaf{Name: "pods", Prefixes: podNet})
	c := &cluster{t: t, dir: scratch(t), node: star.Router, client: star.Leaf("client"), pods: star.Leaf("pods")}
	t.Cleanup(func() {
		for _, p := range slices.Backward(c.processes) {
			p.kill()
		}
	})
	for i, a := range unlisted {
		must(t, c.node.AddAddr("client", netip.PrefixFrom(a, clientNet[i].Bits())))
		// Before NAT, a local sender needs a route to a ClusterIP.
		must(t, c.node.AddRoute(serviceNet[i], netip.Addr{}, "pods"))
	}
	var err error
	c.flows, err = conntrack.Dial(conntrack.Config{NetNS: c.node.Path()})
	must(t, err)
	t.Cleanup(func() { must(t, c.flows.Close()) })
	c.commits = watchCommits(t, c.node)
	c.start(t, destroyed, "conntrack", "-E", "-e", "DESTROY", "-b", "4194304")

	c.file(t, "tokens.csv", adminToken+`,admin,admin,"system:masters"`+"\n"+
		lastingToken+",system:serviceaccount:flowsweep:flowsweep,flowsweep")
	c.file(t, "sa.key", newKey(t))
	c.file(t, "admin.token", adminToken)
	c.file(t, "admin.kubeconfig", c.kubeconfig("admin.token"))
	c.http = &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			DialContext: c.dial, MaxIdleConnsPerHost: 16,
			// It asks loopback alone, and kube-apiserver makes its certificate when it first starts.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		},
	}
	t.Cleanup(c.http.CloseIdleConnections)
	c.judges = newJudges(t, c)
	c.startControlPlane(t)

	config := &rest.Config{
		Host: apiserverURL, BearerToken: adminToken, Dial: c.dial, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.path("apiserver.crt")},
	}
	httpClient, err := rest.HTTPClientFor(config)
	must(t, err)
	c.kube, err = kubernetes.NewForConfigAndClient(config, httpClient)
	must(t, err)
	t.Cleanup(func() { utilnet.CloseIdleConnectionsFor(httpClient.Transport) })
	c.provision(t)
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) file(t testing.TB, name, content string) {
	t.Helper()
	must(t, os.WriteFile(c.path(name), []byte(content), 0o600))
}

// dial connects from the node, whose loopback is not the test's.
func (c *cluster) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = c.node.Do(func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// kubeconfig returns one whose token is read from a file, again when it changes.
func (c *cluster) kubeconfig(tokenFile string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: e2e
contexts: [{name: e2e, context: {cluster: e2e, user: e2e}}]
clusters: [{name: e2e, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: e2e, user: {tokenFile: %q}}]
`, apiserverURL, c.path("apiserver.crt"), c.path(tokenFile))
}

func (c *cluster) startControlPlane(t testing.TB) {
	t.Helper()
	c.startEtcd(t)
	c.startAPIServer(t)
}

func (c *cluster) startEtcd(t testing.TB) {
	t.Helper()
	const peer = "http://127.0.0.1:23800"
	c.etcd = c.start(t, "etcd", binaries+"/etcd",
		"--data-dir="+c.path("etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
}

func (c *cluster) startAPIServer(t testing.TB) {
	t.Helper()
	c.apiserver = c.start(t, "kube-apiserver", binaries+"/kube-apiserver",
		"--etcd-servers="+etcdURL, "--cert-dir="+c.dir, "--bind-address=127.0.0.1", "--secure-port=16443",
		// The controller that publishes its address refuses loopback.
		"--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		fmt.Sprintf("--service-cluster-ip-range=%s,%s", serviceNet[0], serviceNet[1]),
		"--authorization-mode=RBAC", "--token-auth-file="+c.path("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+c.path("sa.key"), "--service-account-key-file="+c.path("sa.key"),
		// It waits for a controller that makes a ServiceAccount for each namespace.
		"--disable-admission-plugins=ServiceAccount")
	eventually(t, 2*time.Minute, "kube-apiserver is ready", func() error {
		_, err := c.get(apiserverURL + "/readyz")
		return err
	})
}

// wipe restarts the control plane with nothing in it.
func (c *cluster) wipe(t testing.TB) {
	t.Helper()
	c.apiserver.kill()
	c.etcd.kill()
	must(t, os.RemoveAll(c.path("etcd")))
	c.startControlPlane(t)
}

// provision makes the Node and what the manifest holds.
func (c *cluster) provision(t testing.TB) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	for _, a := range nodeAddr {
		node.Status.Addresses = append(node.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	_, err := c.kube.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	must(t, err)

	_, err = c.kubectl("", "apply", "--server-side", "--validate=strict", "-f", manifest)
	must(t, err)
	sets, err := c.kube.AppsV1().DaemonSets("").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	if len(sets.Items) != 1 {
		t.Fatalf("%s makes %d DaemonSets, want 1", manifest, len(sets.Items))
	}
	c.daemon = &sets.Items[0]
}

// takeToken returns a token of the ServiceAccount that the DaemonSet names.
func (c *cluster) takeToken(t testing.TB) string {
	t.Helper()
	request, err := c.kube.CoreV1().ServiceAccounts(c.daemon.Namespace).CreateToken(t.Context(),
		c.daemon.Spec.Template.Spec.ServiceAccountName, &authv1.TokenRequest{}, metav1.CreateOptions{})
	must(t, err)
	return request.Status.Token
}

// kubectl runs kubectl as administrator on the node.
func (c *cluster) kubectl(stdin string, args ...string) (string, error) {
	argv := []string{
		binaries + "/kubectl", "--kubeconfig=" + c.path("admin.kubeconfig"),
		"--cache-dir=" + c.path("kubectl"),
	}
	return run(c.node, stdin, append(argv, args...)...)
}

// startProxy starts kube-proxy, whose first rules may come later.
func (c *cluster) startProxy(t testing.TB, mode string) {
	t.Helper()
	c.proxyMode = mode
	c.proxy = c.start(t, "kube-proxy-"+mode, binaries+"/kube-proxy",
		"--kubeconfig="+c.path("admin.kubeconfig"), "--hostname-override="+nodeName, "--proxy-mode="+mode,
		// The limits are the host's, not a namespace's.
		"--conntrack-max-per-core=0", "--conntrack-min=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249")
}

// destroyed is the name of the process that logs each flow that ends.
const destroyed = "conntrack-destroyed"

// destroyed returns how often a flow between two addresses has ended.
func (c *cluster) destroyed(t testing.TB, from, to netip.AddrPort) int {
	t.Helper()
	log, err := os.ReadFile(c.path(destroyed + ".log"))
	must(t, err)
	return bytes.Count(log, fmt.Appendf(nil, " src=%s dst=%s sport=%d dport=%d ",
		from.Addr(), to.Addr(), from.Port(), to.Port()))
}

// get fetches what the agent or another server on the node answers.
func (c *cluster) get(url string) ([]byte, error) {
	req, err := http.NewRequest(http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, bytes.TrimSpace(b))
	}
	return b, err
}

func (c *cluster) getJSON(url string, into any) error {
	b, err := c.get(url)
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	return err
}

// newKey returns a private key for signing tokens, as PEM.
func newKey(t testing.TB) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
}

// commits are the moments at which rules were written on the node: by kube-proxy, and in one case by
// the test.
type commits struct {
	mu sync.Mutex
	at []time.Time
}

func watchCommits(t testing.TB, ns *testnet.NS) *commits {
	t.Helper()
	gens, err := nft.Open(ns.Path())
	must(t, err)
	c := &commits{}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		var last uint32
		for {
			gen, _, err := gens.Get()
			if err != nil {
				t.Errorf("ask for the ruleset's generation: %v", err)
				return
			}
			if gen != last {
				last = gen
				c.mu.Lock()
				c.at = append(c.at, time.Now())
				c.mu.Unlock()
			}
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond): // how exact the times are
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
		must(t, gens.Close())
	})
	return c
}

// first returns the first commit after a moment, the zero time where there was none.
func (c *commits) first(after time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range c.at {
		if at.After(after) {
			return at
		}
	}
	return time.Time{}
}

// quiet waits until no rules were written for a time.
func (c *commits) quiet(d time.Duration) {
	for {
		c.mu.Lock()
		wait := time.Duration(0)
		if n := len(c.at); n > 0 {
			wait = d - time.Since(c.at[n-1])
		}
		c.mu.Unlock()
		if wait <= 0 {
			return
		}
		time.Sleep(wait)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
