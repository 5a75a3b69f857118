//go:build e2e && linux

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// deployment tries what the manifest says as a whole: the agent with the arguments, the environment,
// the configuration, the folders and the rights that its DaemonSet gives it.
func deployment(t *testing.T, r *report) {
	c := newCluster(t)
	c.startProxy(t, "nftables")
	var backends int

	t.Run("as the DaemonSet says", func(t *testing.T) {
		s := c.scene(t, r, "deployment", &backends)
		p := s.startPod()
		defer p.stop(s)
		s.readyz()
		b := s.backend()
		svc := s.service()
		svc.endpoints(b.ready())
		stale := s.everywhere(svc, b)
		s.change(svc.delete)
		for _, st := range stale {
			for i := range st.senders {
				if o := s.await(soon, st, i, nil); !o.right {
					s.Errorf("%s %s is not repaired within %s", st.what, st.to[i], soon)
				}
			}
		}
	})

	t.Run("without the right to read Pods", func(t *testing.T) {
		s := c.scene(t, r, "deployment", &backends)
		s.editRole(func(r *rbacv1.PolicyRule) {
			r.Resources = slices.DeleteFunc(r.Resources, func(name string) bool { return name == "pods" })
		})
		p := s.startPod()
		defer p.stop(s)
		eventually(s, soon, "the agent says what right it lacks", func() error {
			_, err := s.get("http://" + adminAddr + "/readyz")
			if err == nil {
				return fmt.Errorf("it is ready")
			}
			if said := err.Error(); !strings.Contains(said, "503") || !strings.Contains(said, "pods is forbidden") {
				return fmt.Errorf("it says: %w", err)
			}
			return nil
		})
		s.editRole(func(r *rbacv1.PolicyRule) {
			if slices.Contains(r.Resources, "services") {
				r.Resources = append(r.Resources, "pods")
			}
		})
		s.readyz()
	})

	for _, name := range []string{"base", "overlays/dry-run", "overlays/custom"} {
		t.Run("kustomize "+name, func(t *testing.T) {
			_, err := c.kubectl("", "apply", "--server-side", "--validate=strict", "-k", "../../deploy/kustomize/"+name)
			must(t, err)
		})
	}
	t.Run("helm", func(t *testing.T) {
		rendered, err := run(c.node, "", "env", "HELM_CACHE_HOME="+c.path("helm"), "HELM_CONFIG_HOME="+c.path("helm"),
			"HELM_DATA_HOME="+c.path("helm"), helm, "template", "flowsweep", "../../deploy/helm/flowsweep",
			"--namespace=flowsweep", "--set=config.admin.metricsListen=0.0.0.0:9634")
		must(t, err)
		// Other tools own the fields by now.
		_, err = c.kubectl(rendered, "apply", "--server-side", "--validate=strict", "--force-conflicts", "-f", "-")
		must(t, err)
	})
}

// startPod starts the agent as a container: its root holds what an image and the DaemonSet's volumes
// hold, the API server is found by the environment, and the capabilities are those that are granted.
func (s *scene) startPod() *process {
	s.Helper()
	container := s.daemon.Spec.Template.Spec.Containers[0]
	root := s.path("root")
	write := func(name, content string) {
		must(s, os.MkdirAll(filepath.Dir(root+name), 0o755))
		must(s, os.WriteFile(root+name, []byte(content), 0o600))
	}
	const secrets = "/var/run/secrets/kubernetes.io/serviceaccount/"
	ca, err := os.ReadFile(s.path("apiserver.crt"))
	must(s, err)
	write(secrets+"ca.crt", string(ca))
	write(secrets+"token", s.takeToken(s))
	for _, m := range container.VolumeMounts {
		volume := s.volume(m.Name)
		if volume.ConfigMap == nil {
			must(s, os.MkdirAll(root+m.MountPath, 0o755))
			continue
		}
		maps := s.kube.CoreV1().ConfigMaps(s.daemon.Namespace)
		content, err := maps.Get(s.Context(), volume.ConfigMap.Name, metav1.GetOptions{})
		must(s, err)
		write(m.MountPath, content.Data[m.SubPath])
	}
	must(s, os.MkdirAll(root+"/proc", 0o755))
	program, err := os.ReadFile(flowsweep)
	must(s, err)
	must(s, os.WriteFile(root+"/flowsweep", program, 0o755))

	caps := "-all,+sys_chroot" // which chroot needs
	for _, name := range container.SecurityContext.Capabilities.Add {
		caps += ",+" + strings.ToLower(string(name))
	}
	argv := []string{
		"unshare", "--mount", "--propagation=private", "sh", "-ec", `mount -t proc proc "$0/proc"; exec "$@"`, root,
		"setpriv", "--bounding-set=" + caps, "--no-new-privs", "chroot", root,
	}
	argv = append(argv, "/flowsweep")
	argv = append(argv, container.Args...)
	env := append(s.daemonEnv(), "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=16443")
	return s.start(s, "flowsweep-pod", append(append([]string{"env"}, env...), argv...)...)
}

func (s *scene) volume(name string) corev1.Volume {
	s.Helper()
	for _, v := range s.daemon.Spec.Template.Spec.Volumes {
		if v.Name == name {
			return v
		}
	}
	s.Fatalf("the DaemonSet has no volume %s", name)
	return corev1.Volume{}
}

func (s *scene) readyz() {
	s.Helper()
	eventually(s, reconnect, "flowsweep is ready", func() error {
		_, err := s.get("http://" + adminAddr + "/readyz")
		return err
	})
}

// editRole changes the rules of the agent's ClusterRole.
func (s *scene) editRole(change func(*rbacv1.PolicyRule)) {
	s.Helper()
	roles := s.kube.RbacV1().ClusterRoles()
	role, err := roles.Get(s.Context(), "flowsweep", metav1.GetOptions{})
	must(s, err)
	for i := range role.Rules {
		change(&role.Rules[i])
	}
	_, err = roles.Update(s.Context(), role, metav1.UpdateOptions{})
	must(s, err)
}
