package config

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/flowsweep/flowsweep/frontend"
	"github.com/flowsweep/flowsweep/internal/strictyaml"
)

// kind is how values of a type are written.
type kind[T any] struct {
	allowed string // follows "must be"
	parse   func(n *yaml.Node) (T, error)
	check   func(v T) error // for what is parsed, and what is set otherwise
	print   func(v T) string
	repeats bool // a list may have one twice
}

// errNotAllowed is what parse and check return where kind.allowed tells all.
var errNotAllowed = errors.New("not allowed")

// read returns the value of a node.
func (k kind[T]) read(n *yaml.Node) (T, error) {
	v, err := k.parse(n)
	if err == nil {
		err = k.check(v)
	}
	if errors.Is(err, errNotAllowed) {
		err = fmt.Errorf("must be %s, not %s", k.allowed, strings.TrimSuffix(strictyaml.Describe(n), " without quotes"))
	}
	return v, err
}

// verify tells whether read returns v for what print makes of it.
func (k kind[T]) verify(v T) error {
	err := k.check(v)
	if errors.Is(err, errNotAllowed) {
		err = fmt.Errorf("must be %s, not %s", k.allowed, k.print(v))
	}
	return err
}

func scalar(n *yaml.Node, tags ...string) bool {
	return n.Kind == yaml.ScalarNode && slices.Contains(tags, n.ShortTag())
}

func between[T int | uint16 | float64 | time.Duration](v, least, most T) error {
	if v >= least && v <= most { // NaN is not
		return nil
	}
	return errNotAllowed
}

var boolean = kind[bool]{
	allowed: "true or false",
	parse: func(n *yaml.Node) (v bool, err error) {
		if !scalar(n, "!!bool") || n.Decode(&v) != nil {
			return false, errNotAllowed
		}
		return v, nil
	},
	check: func(bool) error { return nil },
	print: strconv.FormatBool,
}

func text(what string) kind[string] {
	return kind[string]{
		allowed: what,
		parse:   strictyaml.Text,
		check: func(s string) error {
			if s == "" {
				return errNotAllowed
			}
			if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
				return fmt.Errorf("%q has control characters or is not UTF-8", s)
			}
			return nil
		},
		print: strconv.Quote,
	}
}

// optional is a kind written as a string, with "" for the zero value: none.
func optional[T comparable](k kind[T]) kind[T] {
	var none T
	return kind[T]{
		allowed: k.allowed + `, or "": none`,
		parse: func(n *yaml.Node) (T, error) {
			if scalar(n, "!!str") && n.Value == "" {
				return none, nil
			}
			return k.parse(n)
		},
		check: func(v T) error {
			if v == none {
				return nil
			}
			return k.check(v)
		},
		print: func(v T) string {
			if v == none {
				return `""`
			}
			return k.print(v)
		},
	}
}

// orZero is a kind with 0 for what the note says.
func orZero[T int | time.Duration](k kind[T], note string) kind[T] {
	return kind[T]{
		allowed: k.allowed + ", or 0: " + note,
		parse: func(n *yaml.Node) (T, error) {
			if scalar(n, "!!int") && n.Value == "0" {
				return 0, nil
			}
			return k.parse(n)
		},
		check: func(v T) error {
			if v == 0 {
				return nil
			}
			return k.check(v)
		},
		print: func(v T) string {
			if v == 0 {
				return "0"
			}
			return k.print(v)
		},
	}
}

// words is a kind with a word for each value.
func words[T comparable](list []string, values ...T) kind[T] {
	last := len(list) - 1
	return kind[T]{
		allowed: strings.Join(list[:last], ", ") + " or " + list[last],
		parse: func(n *yaml.Node) (v T, err error) {
			i := slices.Index(list, n.Value)
			if i < 0 || !scalar(n, "!!str") {
				return v, errNotAllowed
			}
			return values[i], nil
		},
		check: func(v T) error {
			if !slices.Contains(values, v) {
				return errNotAllowed
			}
			return nil
		},
		print: func(v T) string {
			i := slices.Index(values, v)
			switch {
			case i < 0:
				return strconv.Quote(fmt.Sprint(v))
			case list[i] == "off": // false, for parsers of YAML 1.1
				return `"off"`
			}
			return list[i]
		},
	}
}

var sweepWord = words([]string{"all", "unreplied", "off"}, frontend.All, frontend.Unreplied, frontend.Off)

// integer goes by the text that was written: the number that YAML makes of 0x35,
// 010 or 1_000 may not be what was meant.
func integer[T int | uint16](least, most T) kind[T] {
	return kind[T]{
		allowed: fmt.Sprintf("%d to %d", least, most),
		parse: func(n *yaml.Node) (T, error) {
			v, err := strconv.Atoi(n.Value)
			if !scalar(n, "!!int") || err != nil || strconv.Itoa(v) != n.Value || between(v, int(least), int(most)) != nil {
				return 0, errNotAllowed
			}
			return T(v), nil
		},
		check: func(v T) error { return between(v, least, most) },
		print: func(v T) string { return fmt.Sprint(v) },
	}
}

func number(least, most float64) kind[float64] {
	return kind[float64]{
		allowed: fmt.Sprintf("%v to %v", least, most),
		parse: func(n *yaml.Node) (float64, error) {
			v, err := strconv.ParseFloat(n.Value, 64)
			if !scalar(n, "!!float", "!!int") || err != nil {
				return 0, errNotAllowed
			}
			return v, nil
		},
		check: func(v float64) error { return between(v, least, most) },
		print: func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) },
	}
}

func duration(least, most time.Duration) kind[time.Duration] {
	return kind[time.Duration]{
		allowed: formatDuration(least) + " to " + formatDuration(most),
		parse: func(n *yaml.Node) (time.Duration, error) {
			v, err := time.ParseDuration(n.Value)
			if !scalar(n, "!!str") || err != nil {
				return 0, errNotAllowed
			}
			return v, nil
		},
		check: func(v time.Duration) error { return between(v, least, most) },
		print: formatDuration,
	}
}

// formatDuration leaves out the units that are zero: "5m" for 5m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

var cidr = kind[netip.Prefix]{
	allowed: "a CIDR such as 192.0.2.0/24",
	parse: func(n *yaml.Node) (p netip.Prefix, err error) {
		s, err := strictyaml.Text(n)
		if err != nil {
			return p, err
		}
		if p, err = netip.ParsePrefix(s); err == nil {
			return p, nil
		}
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			return p, fmt.Errorf("%q is an address; write %s", s, netip.PrefixFrom(a, a.BitLen()))
		}
		return p, fmt.Errorf("%q is not a CIDR such as 192.0.2.0/24", s)
	},
	check: func(p netip.Prefix) error {
		switch {
		case !p.IsValid():
			return errNotAllowed
		case p.Addr().Is4In6():
			return fmt.Errorf("%q is of IPv4-mapped addresses, which no interface has; write it as IPv4", p)
		case p != p.Masked():
			return fmt.Errorf("%q has bits beyond its length; write %s for the range or %s for the address",
				p, p.Masked(), netip.PrefixFrom(p.Addr(), p.Addr().BitLen()))
		}
		return nil
	},
	print: func(p netip.Prefix) string { return strconv.Quote(p.String()) },
}

// nodePortRange is what kube-proxy takes among its nodePortAddresses: a cidr,
// whose bits beyond its length do not matter, or one of its words.
var nodePortRange = kind[netip.Prefix]{
	allowed: cidr.allowed + ", primary, localhost or all",
	parse: func(n *yaml.Node) (netip.Prefix, error) {
		s, err := strictyaml.Text(n)
		if err != nil {
			return netip.Prefix{}, err
		}
		if _, err := netip.ParseAddr(s); err == nil {
			return cidr.parse(n)
		}
		return frontend.ParseNodePorts(s)
	},
	check: func(p netip.Prefix) error {
		if frontend.NodePortsWord(p) != "" {
			return nil
		}
		return cidr.check(p)
	},
	print: func(p netip.Prefix) string {
		return cmp.Or(frontend.NodePortsWord(p), cidr.print(p))
	},
	repeats: true,
}

var address = kind[netip.Addr]{
	allowed: "an IP address",
	parse: func(n *yaml.Node) (a netip.Addr, err error) {
		s, err := strictyaml.Text(n)
		if err != nil {
			return a, err
		}
		if a, err = netip.ParseAddr(s); err != nil {
			return a, fmt.Errorf("%q is not an IP address", s)
		}
		return a, nil
	},
	check: func(a netip.Addr) error {
		switch {
		case !a.IsValid():
			return errNotAllowed
		case a.Zone() != "":
			return fmt.Errorf("%q has a zone, which flows do not have; write %s", a, a.WithZone(""))
		case a.Is4In6():
			return fmt.Errorf("%q is an IPv4 address; write %s", a, a.Unmap())
		case a.IsUnspecified() || a.IsLoopback() || a.IsMulticast():
			return fmt.Errorf("%q is not an address at which this host has services for others", a)
		}
		return nil
	},
	print: func(a netip.Addr) string { return strconv.Quote(a.String()) },
}

var addrPort = kind[netip.AddrPort]{
	allowed: "IP:port",
	parse: func(n *yaml.Node) (a netip.AddrPort, err error) {
		s, err := strictyaml.Text(n)
		if err != nil {
			return a, err
		}
		if a, err = netip.ParseAddrPort(s); err != nil {
			return a, fmt.Errorf("%q is not IP:port, such as 127.0.0.1:9633, [::1]:9633 or, for every address, [::]:9633", s)
		}
		return a, nil
	},
	check: func(a netip.AddrPort) error {
		if !a.IsValid() {
			return errNotAllowed
		}
		return nil
	},
	print: func(a netip.AddrPort) string { return strconv.Quote(a.String()) },
}
