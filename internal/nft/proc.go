package nft

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// legacyTables are what x_tables shows of a family, and the module that its nat
// table is in.
var legacyTables = []struct{ names, base, nat string }{
	{"ip_tables_names", "ip_tables", "iptable_nat"},
	{"ip6_tables_names", "ip6_tables", "ip6table_nat"},
}

// LegacyNATAt is [LegacyNAT] for the calling thread's namespace, by the proc
// file system mounted at proc.
func LegacyNATAt(proc string) (bool, error) {
	var unknown error // the first of what is in the way: one is enough
	for _, t := range legacyTables {
		names, err := os.ReadFile(filepath.Join(proc, "thread-self/net", t.names))
		switch {
		case errors.Is(err, fs.ErrNotExist): // ip_tables is not loaded
			continue
		case errors.Is(err, fs.ErrPermission): // 0440: only root's group may read it
			maybe, err := natModule(proc, t.base, t.nat)
			if err != nil {
				unknown = cmp.Or(unknown, fmt.Errorf("%s is for root to read, and %w", t.names, err))
			} else if maybe {
				return true, nil
			}
			continue
		case err != nil:
			unknown = cmp.Or(unknown, err)
			continue
		}
		for name := range strings.Lines(string(names)) {
			if strings.TrimSpace(name) == "nat" {
				return true, nil
			}
		}
	}
	if unknown != nil {
		return false, fmt.Errorf("whether iptables-legacy has a nat table is unknown: %w", unknown)
	}
	return false, nil
}

// natModule tells whether the nat table's module is loaded, in which case some
// namespace has the table. Only if base is a module can nat be none that is
// built in, since Kconfig limits a symbol to what it depends on.
func natModule(proc, base, nat string) (bool, error) {
	f, err := os.Open(filepath.Join(proc, "modules"))
	if errors.Is(err, fs.ErrNotExist) { // CONFIG_MODULES=n
		return false, fmt.Errorf("the kernel has no modules, so that %s may be built in", nat)
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	modular := false
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		switch name, _, _ := strings.Cut(lines.Text(), " "); name {
		case nat:
			return true, nil
		case base:
			modular = true
		}
	}
	if err := lines.Err(); err != nil {
		return false, err
	}
	if !modular {
		return false, fmt.Errorf("%s is built into the kernel, as %s may be", base, nat)
	}
	return false, nil
}

// IPVSAt is [IPVS] for the calling thread's namespace, by the proc file system
// mounted at proc.
func IPVSAt(proc string) (bool, error) {
	f, err := os.Open(filepath.Join(proc, "thread-self/net/ip_vs"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for IPVS: %w", err)
	}
	defer f.Close()
	// Three lines of heading, then a line for each service, with lines for its
	// destinations that begin with "->" (ip_vs_info_seq_show).
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		switch kind, _, _ := strings.Cut(lines.Text(), " "); kind {
		case "TCP", "UDP", "SCTP", "FWM":
			return true, nil
		}
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("looking for IPVS: %w", err)
	}
	return false, nil
}

// IPVSRemedy is what ends the connections that IPVS holds.
const IPVSRemedy = "sysctl -w net.ipv4.vs.expire_nodest_conn=1 ends such connections with their next packet"

// IPVSHeld is what to tell whoever deletes flows where IPVS holds connections.
const IPVSHeld = "IPVS forwards here by a table of its own, which deleting flows does not change: " +
	"net.ipv4.vs.expire_nodest_conn is 0, so that what clients send on connections to a server that is gone stays lost; " +
	IPVSRemedy

// IPVSHoldsAt is [IPVSHolds] for the calling thread's namespace, by the proc
// file system mounted at proc.
func IPVSHoldsAt(proc string) (used, holds bool, err error) {
	if used, err = IPVSAt(proc); err != nil || !used {
		return used, false, err
	}
	path := filepath.Join(proc, "sys/net/ipv4/vs/expire_nodest_conn")
	b, err := os.ReadFile(path)
	if err != nil {
		return true, false, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return true, false, fmt.Errorf("%s: %q is not a number", path, strings.TrimSpace(string(b)))
	}
	return true, n == 0, nil
}
