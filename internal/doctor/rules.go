package doctor

import (
	"context"
	"errors"
	"fmt"

	"github.com/flowsweep/flowsweep/internal/nft"
)

var settling = check{
	id: "settling",
	why: "a stale flow that is deleted before the proxy has written its new rules comes back with the next packet, " +
		"so flowsweep looks again after the rules have changed",
	run: func(_ context.Context, e *exam) []Finding {
		const byTime = "; flowsweep looks again by time: 1, 2, 4, ... 32 s after a change"
		gen, committed, err := e.Kernel.Generation()
		if err != nil && !errors.Is(err, nft.ErrNoNFT) {
			return unchecked(err)
		}
		noNFT := err != nil
		legacy, err := nft.LegacyNATAt(e.proc(""))
		if err != nil {
			f := unchecked(err)
			f[0].What += byTime
			return f
		}
		virtual, err := nft.IPVSAt(e.proc(""))
		if err != nil {
			return unchecked(err)
		}
		switch {
		case legacy:
			return found(Info, "iptables-legacy has a nat table here, which changes without a sign"+byTime,
				"let the proxy write with nftables or iptables-nft, and repairs follow its commits at once; "+
					"a table that nobody writes to any more goes with a restart")
		case virtual:
			return found(Info, "IPVS forwards here, which changes without a sign"+byTime, "")
		case noNFT:
			return found(Info, "this kernel has no nf_tables"+byTime, "")
		case !committed:
			return found(Info, "nothing was ever committed to nftables here"+byTime, "")
		}
		return found(OK, fmt.Sprintf("by the generation of the nftables ruleset, which is %d", gen), "")
	},
}

var ipvs = check{
	id: "ipvs",
	why: "IPVS sends the packets of a connection that it knows by a table of its own: " +
		"to a destination that is gone, too, and deleting the conntrack entry does not change that",
	run: func(_ context.Context, e *exam) []Finding {
		used, holds, err := nft.IPVSHoldsAt(e.proc(""))
		switch {
		case err != nil:
			return unchecked(err)
		case !used:
			return found(OK, "not in use", "")
		case holds:
			return found(Mend, "in use, and net.ipv4.vs.expire_nodest_conn is 0", nft.IPVSRemedy)
		}
		return found(OK, "in use, with net.ipv4.vs.expire_nodest_conn=1", "")
	},
}
