package kubernetes

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// NodeAddresses returns the IP addresses that a Node lists, without loopback:
// those on which a proxy serves node ports. The internal ones come first, so that
// the first of a family is the one that kube-proxy calls primary (GetNodeHostIPs
// of k8s.io/component-helpers). Host names and what does not parse are left out.
func NodeAddresses(node *corev1.Node) []netip.Addr {
	var addrs []netip.Addr
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range node.Status.Addresses {
			ip, err := parseAddr(a.Address)
			if a.Type == kind && err == nil && !ip.IsLoopback() && !slices.Contains(addrs, ip) {
				addrs = append(addrs, ip)
			}
		}
	}
	return addrs
}

// PodRanges returns the ranges that a Node's own pods have their addresses from, and
// those of the addresses of such pods, as PodAddresses gives them, that are in none.
func PodRanges(node *corev1.Node, pods ...netip.Addr) (list []netip.Prefix) {
	texts := node.Spec.PodCIDRs
	if len(texts) == 0 {
		texts = []string{node.Spec.PodCIDR}
	}
	for _, s := range texts {
		if p, err := netip.ParsePrefix(s); err == nil && !p.Addr().Is4In6() {
			list = append(list, p.Masked())
		}
	}
	slices.SortFunc(pods, netip.Addr.Compare)
	for _, a := range pods {
		if !slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) }) {
			list = append(list, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return list
}

// PodAddresses returns the addresses that a Pod of the named node has for itself:
// none where it is another node's, on the host's network, or finished.
func PodAddresses(pod *corev1.Pod, node string) []netip.Addr {
	if !here(pod, node) {
		return nil
	}
	var unheard builder // PodFrontends reports what is wrong
	return unheard.podAddrs(pod)
}

// parseAddr reads an address as kube-proxy does (ParseIPSloppy of
// k8s.io/utils/net): leading zeros are decimal, an IPv4-mapped IPv6 address is
// the IPv4 address, a zone is an error. Objects from before stricter validation
// still hold such addresses.
func parseAddr(s string) (netip.Addr, error) {
	if s == "" {
		return netip.Addr{}, errors.New("is empty")
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, err = netip.ParseAddr(trimZeros(s))
	}
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	}
	return a.Unmap(), nil
}

// trimZeros takes the leading zeros from the dotted decimal part of an address.
func trimZeros(s string) string {
	i := strings.LastIndexByte(s, ':') + 1
	parts := strings.Split(s[i:], ".")
	if len(parts) != 4 {
		return s
	}
	for j, p := range parts {
		if t := strings.TrimLeft(p, "0"); t != "" {
			parts[j] = t
		} else if p != "" {
			parts[j] = "0"
		}
	}
	return s[:i] + strings.Join(parts, ".")
}
