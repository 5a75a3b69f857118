package ruleset

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/flowsweep/flowsweep/internal/nft"
)

// Others looks for translators beside nf_tables in a network namespace, given as a
// path; "" is that of the calling thread. Looking makes no table. A table of
// iptables-legacy counts even while it is empty. Modules are those of the whole
// system; what is built into the kernel does not show.
func Others(namespace string) Translators {
	legacy, err1 := nft.LegacyNAT(namespace)
	ipvs, err2 := nft.IPVS(namespace)
	modules, err3 := modulesAt("/proc/modules", "act_ct", "openvswitch", "nf_conntrack_bridge")
	return Translators{Legacy: legacy, IPVS: ipvs, Modules: modules, Err: errors.Join(err1, err2, err3)}
}

// modulesAt returns those of some modules that are loaded, by the kernel's list at
// path.
func modulesAt(path string, names ...string) (found []string, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // a kernel without modules
		return nil, nil
	}
	for line := range bytes.Lines(b) {
		name, _, _ := bytes.Cut(line, []byte{' '})
		if slices.Contains(names, string(name)) {
			found = append(found, string(name))
		}
	}
	return found, err
}
