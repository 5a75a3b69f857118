//go:build linux

package nft

import (
	"os"
	"path/filepath"
	"testing"
)

// tree writes files below a folder that stands for /proc. A file whose content
// is "unreadable" is just that.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o644)
		if content == "unreadable" {
			mode = 0
		}
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	names4  = "thread-self/net/ip_tables_names"
	names6  = "thread-self/net/ip6_tables_names"
	ipvs    = "thread-self/net/ip_vs"
	base    = "ip_tables 36864 1 iptable_filter, Live 0x0\nx_tables 65536 3 ip_tables, Live 0x0\n"
	natToo  = "iptable_nat 12288 1 - Live 0x0\n" + base
	noNames = "nf_tables 385024 0 - Live 0x0\n"
)

func TestLegacyNATAt(t *testing.T) {
	tests := []struct {
		name  string
		files map[string]string
		want  bool
		fails bool
	}{
		{"x_tables not loaded", nil, false, false},
		{"no table", map[string]string{names4: "", names6: ""}, false, false},
		{"filter alone", map[string]string{names4: "filter\n", names6: "filter\nmangle\n"}, false, false},
		{"nat", map[string]string{names4: "filter\nnat\n"}, true, false},
		{"nat of IPv6", map[string]string{names4: "filter\n", names6: "nat\n"}, true, false},
		{"not a table's name", map[string]string{names4: "nat2\nxnat\n"}, false, false},

		{"unreadable, nat module not loaded", map[string]string{names4: "unreadable", "modules": base}, false, false},
		{"unreadable, nat module loaded", map[string]string{names4: "unreadable", "modules": natToo}, true, false},
		{"unreadable, nat of the other family", map[string]string{
			names4: "unreadable", "modules": "ip6table_nat 12288 0 - Live 0x0\n" + base,
		}, false, false},
		{"unreadable, built in", map[string]string{names4: "unreadable", "modules": noNames}, false, true},
		{"unreadable, no modules", map[string]string{names4: "unreadable"}, false, true},
		{"unreadable, but IPv6 is known", map[string]string{names4: "unreadable", names6: "nat\n"}, true, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			proc := tree(t, tt.files)
			var got bool
			err := withoutCapabilities(func() (err error) { // which read what they may not
				got, err = LegacyNATAt(proc)
				return err
			})
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("got %v, %v, want %v, error %v", got, err, tt.want, tt.fails)
			}
		})
	}
}

const head = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
`

func TestIPVSAt(t *testing.T) {
	tests := []struct {
		name  string
		files map[string]string
		want  bool
	}{
		{"not loaded", nil, false},
		{"no service", map[string]string{ipvs: head}, false},
		{"a service", map[string]string{ipvs: head + "UDP  CB00710A:0035 rr  \n  -> C633640B:0035      Masq    1      0          0         \n"}, true},
		{"by mark", map[string]string{ipvs: head + "FWM  00000001 wlc  \n"}, true},
	}
	t.Run("cannot be read", func(t *testing.T) {
		proc := tree(t, map[string]string{ipvs + "/folder": ""})
		if used, err := IPVSAt(proc); used || err == nil {
			t.Errorf("got %v, %v", used, err)
		}
	})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := IPVSAt(tree(t, tt.files))
			if got != tt.want || err != nil {
				t.Errorf("got %v, %v, want %v", got, err, tt.want)
			}
		})
	}
}

func TestIPVSHoldsAt(t *testing.T) {
	const (
		service = head + "UDP  CB00710A:0035 rr  \n"
		sysctl  = "sys/net/ipv4/vs/expire_nodest_conn"
	)
	tests := []struct {
		name        string
		files       map[string]string
		used, holds bool
		fails       bool
	}{
		{"not loaded", nil, false, false, false},
		{"no service, and nothing to hold", map[string]string{ipvs: head, sysctl: "0\n"}, false, false, false},
		{"holds", map[string]string{ipvs: service, sysctl: "0\n"}, true, true, false},
		{"lets go", map[string]string{ipvs: service, sysctl: "1\n"}, true, false, false},
		{"unknown", map[string]string{ipvs: service}, true, false, true},
		{"no number", map[string]string{ipvs: service, sysctl: "no\n"}, true, false, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			used, holds, err := IPVSHoldsAt(tree(t, tt.files))
			if used != tt.used || holds != tt.holds || (err != nil) != tt.fails {
				t.Errorf("used %t, holds %t, %v, want %t, %t, error %t", used, holds, err, tt.used, tt.holds, tt.fails)
			}
		})
	}
}
