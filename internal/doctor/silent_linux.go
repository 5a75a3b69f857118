package doctor

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flowsweep/flowsweep/internal/netns"
)

// answersIn is how long a neighbour is given to answer: ARP asks again after a
// second (net.ipv4.neigh.default.retrans_time_ms).
const answersIn = 1100 * time.Millisecond

// Silent tells which of some addresses on connected networks do not answer, and
// where: "on eth1 (FAILED)". A network namespace is given as a path, "" is that of
// the calling thread. As long as somebody sends, the kernel asks for the address
// again and again, and its entry is INCOMPLETE rather than FAILED
// (__neigh_event_send): then it is looked at twice.
func Silent(ctx context.Context, namespace string, addrs []netip.Addr) (silent map[netip.Addr]string, err error) {
	silent = map[netip.Addr]string{}
	asked := map[netip.Addr]bool{}
	for _, a := range addrs {
		asked[a.WithZone("")] = true
	}
	for look := range 2 {
		list, err := neighboursOf(namespace)
		if err != nil {
			return nil, err
		}
		pending := false
		for _, n := range list {
			if !asked[n.addr] {
				continue
			}
			switch {
			case n.state&unix.NUD_FAILED != 0:
				silent[n.addr] = "on " + n.link + " (FAILED)"
			case n.state&unix.NUD_INCOMPLETE != 0 && look > 0:
				silent[n.addr] = "on " + n.link + " (INCOMPLETE)"
			case n.state&unix.NUD_INCOMPLETE != 0:
				pending = true
			}
		}
		if !pending {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(answersIn):
		}
	}
	return silent, nil
}

// neighbour is an entry of the neighbour tables.
type neighbour struct {
	addr  netip.Addr
	link  string
	state uint16 // NUD_*
}

func neighboursOf(namespace string) (list []neighbour, err error) {
	if namespace == "" {
		return readNeighbours()
	}
	ns, err := os.Open(namespace)
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	err = netns.Do(ns, func() (err error) {
		list, err = readNeighbours()
		return err
	})
	return list, err
}

func readNeighbours() (list []neighbour, err error) {
	b, err := syscall.NetlinkRIB(unix.RTM_GETNEIGH, unix.AF_UNSPEC)
	if err != nil {
		return nil, fmt.Errorf("reading the neighbour tables: %w", err)
	}
	msgs, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return nil, fmt.Errorf("reading the neighbour tables: %w", err)
	}
	links := map[int32]string{}
	for _, m := range msgs {
		if n, index, ok := parseNeighbour(m); ok {
			name, known := links[index]
			if !known {
				name = fmt.Sprintf("interface %d", index)
				if i, err := net.InterfaceByIndex(int(index)); err == nil {
					name = i.Name
				}
				links[index] = name
			}
			n.link = name
			list = append(list, n)
		}
	}
	return list, nil
}

// parseNeighbour reads a struct ndmsg and its address (neigh_fill_info).
func parseNeighbour(m syscall.NetlinkMessage) (n neighbour, index int32, ok bool) {
	if m.Header.Type != unix.RTM_NEWNEIGH || len(m.Data) < unix.SizeofNdMsg {
		return n, 0, false
	}
	order := binary.NativeEndian
	index, n.state = int32(order.Uint32(m.Data[4:])), order.Uint16(m.Data[8:])
	for b := m.Data[unix.SizeofNdMsg:]; len(b) >= unix.SizeofRtAttr; {
		length := int(order.Uint16(b))
		if length < unix.SizeofRtAttr || length > len(b) {
			return n, 0, false
		}
		if order.Uint16(b[2:]) == unix.NDA_DST {
			n.addr, ok = netip.AddrFromSlice(b[unix.SizeofRtAttr:length])
			return n, index, ok
		}
		b = b[min((length+3)&^3, len(b)):]
	}
	return n, 0, false
}
