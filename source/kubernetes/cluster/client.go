package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Connect returns how to reach the API server: in a Pod by the token of its
// ServiceAccount, elsewhere, and where a file or context is given, as kubectl
// does: by the kubeconfig file given, else by those of KUBECONFIG, else by that in
// the home directory, and by the context given, else by the current one.
func Connect(kubeconfig, kubeContext string) (*rest.Config, error) {
	if kubeconfig == "" && kubeContext == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster): // below
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%w: the Pod has no ServiceAccount token; set automountServiceAccountToken", err)
		default:
			return cfg, err
		}
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	rules.Warner = func(error) {}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		rules, &clientcmd.ConfigOverrides{CurrentContext: kubeContext}).ClientConfig()
	empty := clientcmd.IsEmptyConfig(err) // whose text advises what is not heeded here
	switch {
	case err == nil:
		return cfg, nil
	case kubeconfig != "" && empty:
		return nil, fmt.Errorf("kubeconfig file %s: the context names no cluster", kubeconfig)
	case kubeconfig != "":
		return nil, fmt.Errorf("kubeconfig file %s: %w", kubeconfig, err)
	case empty:
		return nil, errors.New("this is no Pod of a cluster, and no kubeconfig file names a cluster; give one with --kubeconfig")
	}
	return nil, fmt.Errorf("kubeconfig: %w", err)
}

// client asks for the kinds that are watched. A clientset of package
// k8s.io/client-go/kubernetes would do too, and brings every API group there is
// into the process.
type client struct {
	of    [kinds]rest.Interface
	codec runtime.ParameterCodec
}

func newClient(cfg *rest.Config) (*client, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	c := &client{codec: runtime.NewParameterCodec(scheme)}
	codecs := serializer.NewCodecFactory(scheme)

	cfg = rest.CopyConfig(cfg)
	cfg.NegotiatedSerializer = codecs.WithoutConversion()
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.QPS = -1 // the API server has limits of its own, and a long list is many requests
	if cfg.UserAgent == "" {
		cfg.UserAgent = "flowsweep"
	}
	http, err := rest.HTTPClientFor(cfg) // one connection for all kinds
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	group := func(path string, gv schema.GroupVersion) (rest.Interface, error) {
		cfg := rest.CopyConfig(cfg)
		cfg.APIPath, cfg.GroupVersion = path, &gv
		r, err := rest.RESTClientForConfigAndClient(cfg, http)
		if err != nil {
			return nil, fmt.Errorf("API server: %w", err)
		}
		return r, nil
	}
	core, err := group("/api", corev1.SchemeGroupVersion)
	if err != nil {
		return nil, err
	}
	discovery, err := group("/apis", discoveryv1.SchemeGroupVersion)
	if err != nil {
		return nil, err
	}
	networking, err := group("/apis", networkingv1.SchemeGroupVersion)
	if err != nil {
		return nil, err
	}
	c.of = [kinds]rest.Interface{
		services: core, endpointSlices: discovery, nodes: core, pods: core, serviceCIDRs: networking,
	}
	return c, nil
}

// listTimeout bounds a request for a list, or a page of one. The API server's own
// limit is, by default, the same.
const listTimeout = time.Minute

func (c *client) list(ctx context.Context, cfg *Config, k kind, o metav1.ListOptions) (runtime.Object, error) {
	cfg.narrow(k, &o)
	list := resources[k].list()
	err := c.of[k].Get().Resource(k.String()).VersionedParams(&o, c.codec).Timeout(listTimeout).Do(ctx).Into(list)
	return list, err
}

func (c *client) watch(ctx context.Context, cfg *Config, k kind, o metav1.ListOptions) (watch.Interface, error) {
	cfg.narrow(k, &o)
	o.Watch = true
	return c.of[k].Get().Resource(k.String()).VersionedParams(&o, c.codec).Watch(ctx)
}
