//go:build linux

package testnet

import "golang.org/x/sys/unix"

// OuterEnv is the variable that makes a process believe it was re-executed.
const OuterEnv = outerEnv

// FlushConntrack empties the namespace's conntrack table.
func FlushConntrack(ns *NS) error {
	return ns.Do(func() error {
		c, err := dialNetlink(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer c.close()
		const deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE
		return c.request(newMessage(deleteFlow, 0, unix.Nfgenmsg{}))
	})
}
