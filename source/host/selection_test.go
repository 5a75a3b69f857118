package host

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

func addrs(list ...string) (as []netip.Addr) {
	for _, s := range list {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

func prefixes(list ...string) (ps []netip.Prefix) {
	for _, s := range list {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func TestSelection(t *testing.T) {
	own := addrs("192.0.2.1", "198.51.100.1", "2001:db8::1", "fe80::1", "192.0.2.1")
	tests := []struct {
		name             string
		include, exclude []netip.Prefix
		fixed            []netip.Addr
		want             []netip.Addr
	}{
		{"all, sorted, each once", nil, nil, nil, addrs("192.0.2.1", "198.51.100.1", "2001:db8::1", "fe80::1")},
		{"include", prefixes("192.0.2.0/24", "2001:db8::/32"), nil, nil, addrs("192.0.2.1", "2001:db8::1")},
		{"include of one family leaves out the other", prefixes("0.0.0.0/0"), nil, nil, addrs("192.0.2.1", "198.51.100.1")},
		{"exclude", nil, prefixes("fe80::/10", "198.51.100.1/32"), nil, addrs("192.0.2.1", "2001:db8::1")},
		{"exclude wins", prefixes("192.0.2.0/24"), prefixes("192.0.2.0/28"), nil, nil},
		{"prefix that is not masked", prefixes("192.0.2.77/24"), nil, nil, addrs("192.0.2.1")},
		{"fixed", nil, prefixes("0.0.0.0/0", "::/0"), addrs("203.0.113.5"), addrs("203.0.113.5")},
		{"fixed, that it has", nil, nil, addrs("192.0.2.1"), addrs("192.0.2.1", "198.51.100.1", "2001:db8::1", "fe80::1")},
		{
			"fixed, in other spellings", prefixes("192.0.2.0/24"), nil, addrs("::ffff:203.0.113.5", "fe80::2%eth0"),
			addrs("192.0.2.1", "203.0.113.5", "fe80::2"),
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sel := newSelection(tt.include, tt.exclude, tt.fixed)
			if got := sel.of(own); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestTimes(t *testing.T) {
	ms := time.Millisecond
	times := New(Config{}).times
	for _, tt := range []struct {
		name      string
		got, want time.Duration
	}{
		{"a cheap read", times.pause(ms), 50 * ms},
		{"a dear read", times.pause(20 * ms), 200 * ms},
		{"first failure, at least", times.backoff(1, 0), 50 * ms},
		{"first failure, at most", times.backoff(1, 1), 100 * ms},
		{"fourth failure", times.backoff(4, 1), 800 * ms},
		{"many failures", times.backoff(1000, 1), 30 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.got != tt.want {
				t.Errorf("got %v, want %v", tt.got, tt.want)
			}
		})
	}
}
