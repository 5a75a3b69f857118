package static

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/flowsweep/flowsweep/conntrack"
	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/strictyaml"
)

const (
	apiGroup   = "flowsweep.dev"
	apiVersion = apiGroup + "/v1alpha1"
	listKind   = "FrontendList"
)

// listReader reads a FrontendList of a document that begins at line base.
type listReader struct {
	*reader
	base int
	fail strictyaml.Report
}

func (r *reader) frontendList(h head, n *yaml.Node, base int) {
	r.seen = true
	l := listReader{r, base, func(n *yaml.Node, path string, err error) {
		r.report(base+n.Line-1, "", path, err)
	}}
	if h.Kind != listKind {
		l.fail(n, "kind", fmt.Errorf("%q is not a kind of %s; write %s", h.Kind, apiGroup, listKind))
		return
	}
	if h.APIVersion != apiVersion {
		l.fail(n, "apiVersion", fmt.Errorf("%q is not read; write %s", h.APIVersion, apiVersion))
		return
	}
	fields := l.fail.Fields(n, "", "apiVersion", "kind", "items")
	if fields["items"] == nil {
		l.fail(n, "items", strictyaml.ErrMissing)
		return
	}
	for i, item := range l.fail.List(fields["items"], "items") {
		l.item(item, "items["+strconv.Itoa(i)+"]")
	}
}

// item reads an item into a unit. Every problem in it is reported; one is
// enough that the item does not count.
func (l *listReader) item(n *yaml.Node, path string) {
	before := len(l.state.Problems)
	fields := l.fail.Fields(n, path, "name", "protocol", "addresses", "ports", "backends")
	if fields == nil {
		return
	}
	for _, key := range []string{"name", "protocol", "addresses", "ports"} {
		if fields[key] == nil {
			l.fail(n, path+"."+key, strictyaml.ErrMissing)
		}
	}
	name := strictyaml.Value(l.fail, fields["name"], path+".name", parseName)
	proto := strictyaml.Value(l.fail, fields["protocol"], path+".protocol", parseProtocol)
	addrs := strictyaml.Values(l.fail, fields["addresses"], path+".addresses", parseAddress)
	ports := strictyaml.Value(l.fail, fields["ports"], path+".ports", parsePorts)
	backends := strictyaml.Values(l.fail, fields["backends"], path+".backends", parseBackend)
	if a := fields["addresses"]; a != nil && a.Kind == yaml.SequenceNode && len(a.Content) == 0 {
		l.fail(a, path+".addresses", errors.New(`is empty; "*" is every address of this host`))
	}
	if at, taken := l.names[name]; taken {
		l.fail(fields["name"], path+".name", fmt.Errorf("%q is the name of %s:%d too", name, at.input, at.line))
	} else if name != "" {
		l.names[name] = place{input: l.input, line: l.base + n.Line - 1}
	}
	if len(l.state.Problems) > before {
		return
	}
	if l.frontends += len(addrs) * len(ports); l.frontends > maxFrontends {
		l.fail(n, path, fmt.Errorf("more than %d frontends in all; write fewer addresses or port ranges", maxFrontends))
		return
	}

	var unit []frontend.Frontend
	for _, family := range []conntrack.Family{conntrack.IPv4, conntrack.IPv6} {
		valid := frontend.NewBackends(slices.DeleteFunc(slices.Clone(backends), func(b netip.AddrPort) bool {
			return conntrack.FamilyOf(b.Addr()) != family
		})...)
		for i, addr := range addrs {
			if addr.IsValid() && conntrack.FamilyOf(addr) != family || slices.Contains(addrs[:i], addr) {
				continue
			}
			// "*" was not written for a family of which there is nothing to send to:
			// whoever translates that port there has nothing to do with the item.
			if !addr.IsValid() && valid.Len() == 0 && len(backends) > 0 {
				continue
			}
			for _, p := range ports {
				unit = append(unit, frontend.Frontend{
					Owner:  name,
					Kind:   frontend.Static,
					Proto:  proto,
					Addr:   addr,
					Family: family,
					Ports:  p,
					Valid:  valid,
					Usable: valid.Len(),
				})
			}
		}
	}
	l.state.Units["static "+name] = unit
}

func parseName(n *yaml.Node) (string, error) {
	s, err := strictyaml.Text(n)
	if err == nil && (s == "" || strings.ContainsFunc(s, unicode.IsControl)) {
		err = fmt.Errorf("%q is not a name: it is empty or has control characters", s)
	}
	return s, err
}

func parseProtocol(n *yaml.Node) (uint8, error) {
	s, err := strictyaml.Text(n)
	if err != nil {
		return 0, err
	}
	switch s {
	case "UDP":
		return conntrack.UDP, nil
	case "TCP":
		return conntrack.TCP, nil
	case "SCTP":
		return conntrack.SCTP, nil
	}
	return 0, fmt.Errorf("%q is not a protocol (UDP, TCP or SCTP)", s)
}

// parseAddress returns the zero Addr for "*".
func parseAddress(n *yaml.Node) (netip.Addr, error) {
	s, err := strictyaml.Text(n)
	if err != nil || s == "*" {
		return netip.Addr{}, err
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}, fmt.Errorf(`%q is not an IP address or "*"`, s)
	}
	if a.IsUnspecified() {
		return netip.Addr{}, fmt.Errorf(`%q is not an address that clients send to; write "*" for every address of this host`, s)
	}
	return a, checkForm(a)
}

// checkForm refuses the forms of an address that no flow has, so that a
// frontend does not silently match nothing.
func checkForm(a netip.Addr) error {
	if a.Zone() != "" {
		return fmt.Errorf("%q has a zone, which flows do not have; write %s", a, a.WithZone(""))
	}
	if a.Is4In6() {
		return fmt.Errorf("%q is an IPv4 address; write %s", a, a.Unmap())
	}
	return nil
}

func parseBackend(n *yaml.Node) (netip.AddrPort, error) {
	s, err := strictyaml.Text(n)
	if err != nil {
		return netip.AddrPort{}, err
	}
	a, err := netip.ParseAddr(s)
	b := netip.AddrPortFrom(a, 0)
	if err != nil {
		if b, err = netip.ParseAddrPort(s); err == nil && b.Port() == 0 {
			err = strconv.ErrRange
		}
	}
	if err != nil || b.Addr().IsUnspecified() {
		return netip.AddrPort{}, fmt.Errorf("%q is not a backend (IP, IP:port or [IPv6]:port)", s)
	}
	return b, checkForm(b.Addr())
}

// parsePorts returns ranges in order that do not overlap. It goes by the text
// that was written: the number that YAML makes of 0x35, 010 or 1_000 may not be
// what was meant.
func parsePorts(n *yaml.Node) ([]frontend.Ports, error) {
	if tag := n.ShortTag(); n.Kind != yaml.ScalarNode || tag != "!!str" && tag != "!!int" {
		return nil, fmt.Errorf(`must be a port, "53,5353" or "50000-50099", not %s`, strictyaml.Describe(n))
	}
	var ranges []frontend.Ports
	for part := range strings.SplitSeq(n.Value, ",") {
		part = strings.TrimSpace(part)
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		p := frontend.Ports{First: parsePort(from), Last: parsePort(to)}
		switch {
		case !isRange && p.First == 0:
			return nil, fmt.Errorf("%q is not a port (1-65535)", part)
		case p.First == 0 || p.Last == 0:
			return nil, fmt.Errorf("%q is not a range of ports (1-65535)", part)
		case p.Last < p.First:
			return nil, fmt.Errorf("%q ends before it begins", part)
		}
		ranges = append(ranges, p)
	}
	slices.SortFunc(ranges, func(a, b frontend.Ports) int { return cmp.Compare(a.First, b.First) })
	merged := ranges[:1]
	for _, p := range ranges[1:] {
		if last := &merged[len(merged)-1]; p.First <= last.Last {
			last.Last = max(last.Last, p.Last)
		} else {
			merged = append(merged, p)
		}
	}
	return merged, nil
}

// parsePort returns 0 for what is not a port in plain decimal digits.
func parsePort(s string) uint16 {
	p, err := strconv.ParseUint(s, 10, 16)
	if err != nil || s[0] == '0' {
		return 0
	}
	return uint16(p)
}
