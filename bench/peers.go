//go:build linux

package main

import (
	"context"
	"os/exec"

	timo "github.com/ti-mo/conntrack"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	kubeproxy "k8s.io/kubernetes/pkg/proxy/conntrack"
)

// peers are other programs and libraries at the same job, on the same table.
func peers() []work {
	leaves := events()[0]
	list := []work{
		{
			name: "kube-proxy/backend-leaves", title: "kube-proxy: a backend leaves",
			deletes: onlyUDP4(leaves.gone), run: cleanStaleEntries(leaves.world),
		},
		{
			name: "kube-proxy/1", title: "kube-proxy: 1 % stale",
			deletes: onlyUDP4(staleFlows(1)), run: cleanStaleEntries(whole().without(stale(1))),
		},
		{
			name: "kube-proxy/25", title: "kube-proxy: 25 % stale",
			deletes: onlyUDP4(staleFlows(25)), run: cleanStaleEntries(whole().without(stale(25))),
		},
		{
			name: "ti-mo/everything", title: "ti-mo/conntrack: everything, in memory",
			run: func(context.Context, int) (sample, error) {
				c, err := timo.Dial(nil)
				if err != nil {
					return sample{}, err
				}
				defer c.Close()
				return measured(func(s *sample) error {
					flows, err := c.Dump(nil)
					s.count("flows", float64(len(flows)))
					return err
				})
			},
		},
		{
			name: "vishvananda/everything", title: "vishvananda/netlink: everything, in memory",
			run: func(context.Context, int) (sample, error) {
				return measured(func(s *sample) error {
					flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_UNSPEC)
					s.count("flows", float64(len(flows)))
					return err
				})
			},
		},
	}
	if path, err := exec.LookPath("conntrack"); err == nil {
		list = append(list,
			work{
				name: "conntrack-tools/delete", title: "conntrack -D: a backend's flows", deletes: onlyUDP4(leaves.gone),
				run: func(ctx context.Context, _ int) (sample, error) {
					b := leaves.services[0].backend(0).String()
					return command(ctx, path, "-D", "-f", "ipv4", "-p", "udp", "--reply-src", b)
				},
			},
			work{
				name: "conntrack-tools/list", title: "conntrack -L: everything",
				run: func(ctx context.Context, _ int) (sample, error) { return command(ctx, path, "-L") },
			},
		)
	}
	return list
}

// cleanStaleEntries is what kube-proxy does at the end of a sync: it looks at
// UDP alone, and at one family at a time.
func cleanStaleEntries(w world) func(context.Context, int) (sample, error) {
	return func(ctx context.Context, _ int) (sample, error) {
		services, endpoints := w.kubeProxy(corev1.IPv4Protocol)
		ct := kubeproxy.New()
		return measured(func(*sample) error {
			kubeproxy.CleanStaleEntries(ct, corev1.IPv4Protocol, services, endpoints)
			return nil // what fails is logged
		})
	}
}
