package conntrack

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

var _ encoding.TextAppender = (*Flow)(nil)

var compareAddrs = cmpopts.EquateComparable(netip.Addr{})

const (
	confirmed = StatusConfirmed
	replied   = StatusConfirmed | StatusSeenReply
)

// tuple is short for a tuple with ports: tuple("192.0.2.50:1", "203.0.113.10:53").
func tuple(src, dst string) Tuple {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return Tuple{Src: s.Addr(), SrcPort: s.Port(), Dst: d.Addr(), DstPort: d.Port()}
}

func addrs(src, dst string) Tuple {
	return Tuple{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst)}
}

func icmp(src, dst string, typ uint8, id uint16) Tuple {
	t := addrs(src, dst)
	t.ICMPType, t.ICMPID = typ, id
	return t
}

func udpFlow(change func(*Flow)) Flow {
	f := Flow{
		Family: IPv4, Proto: UDP, Timeout: 29, Status: replied,
		Orig:  tuple("192.0.2.50:1", "203.0.113.10:53"),
		Reply: tuple("203.0.113.10:53", "192.0.2.50:1"),
	}
	change(&f)
	return f
}

// TestText has lines as the tool prints them, so that they are read and printed
// alike.
func TestText(t *testing.T) {
	tests := []struct {
		name string
		line string
		want Flow
	}{
		{
			"udp",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 mark=0 use=1",
			udpFlow(func(*Flow) {}),
		},
		{
			"unreplied, destination translated, marked, in a zone, with id",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 [UNREPLIED] " +
				"src=198.51.100.11 dst=192.0.2.50 sport=5353 dport=1 mark=4294967295 zone=7 use=1 id=4294967295",
			udpFlow(func(f *Flow) {
				f.Status = confirmed | StatusDstNAT
				f.Reply = tuple("198.51.100.11:5353", "192.0.2.50:1")
				f.Mark, f.Zone, f.ID = 1<<32-1, 7, 1<<32-1
			}),
		},
		{
			"only the destination port translated",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=5353 dport=1 mark=0 use=1",
			udpFlow(func(f *Flow) {
				f.Status |= StatusDstNAT
				f.Reply.SrcPort = 5353
			}),
		},
		{
			"only the source port translated",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1024 [ASSURED] mark=0 use=1",
			udpFlow(func(f *Flow) {
				f.Status |= StatusSrcNAT | StatusAssured
				f.Reply.DstPort = 1024
			}),
		},
		{
			"both translated",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=198.51.100.11 dst=198.51.100.1 sport=53 dport=1 mark=0 use=1",
			udpFlow(func(f *Flow) {
				f.Status |= StatusSrcNAT | StatusDstNAT
				f.Reply = tuple("198.51.100.11:53", "198.51.100.1:1")
			}),
		},
		{
			"zone of the original direction",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 zone-orig=8 [UNREPLIED] " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 mark=0 use=1",
			udpFlow(func(f *Flow) { f.Status, f.Zone, f.ZoneDir = confirmed, 8, ZoneOrig }),
		},
		{
			"zone of the reply direction",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 zone-reply=65535 mark=0 use=1",
			udpFlow(func(f *Flow) { f.Zone, f.ZoneDir = 65535, ZoneReply }),
		},
		{
			"offloaded, which has no timeout",
			"udp      17 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 [OFFLOAD] mark=0 use=1",
			udpFlow(func(f *Flow) { f.Timeout = 0; f.Status |= StatusOffload }),
		},
		{
			"offloaded with a timeout, as kernels before 4.19 print it",
			"udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 [OFFLOAD] mark=0 use=1",
			udpFlow(func(f *Flow) { f.Status |= StatusOffload }),
		},
		{
			"tcp offloaded to hardware, which has no state either",
			"tcp      6 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 [HW_OFFLOAD] mark=0 use=1",
			udpFlow(func(f *Flow) {
				f.Proto, f.Timeout = TCP, 0
				f.Status |= StatusOffload | StatusHWOffload
			}),
		},
		{
			"tcp",
			"tcp      6 431999 ESTABLISHED src=2001:db8::50 dst=2001:db8:113::10 sport=1 dport=443 " +
				"src=2001:db8:51::11 dst=2001:db8::50 sport=8443 dport=1 [ASSURED] mark=0 use=1",
			Flow{
				Family: IPv6, Proto: TCP, State: 3, Timeout: 431999,
				Status: replied | StatusAssured | StatusDstNAT,
				Orig:   tuple("[2001:db8::50]:1", "[2001:db8:113::10]:443"),
				Reply:  tuple("[2001:db8:51::11]:8443", "[2001:db8::50]:1"),
			},
		},
		{
			"sctp",
			"sctp     132 9 SHUTDOWN_ACK_SENT src=192.0.2.50 dst=203.0.113.10 sport=1 dport=38412 " +
				"src=203.0.113.10 dst=192.0.2.50 sport=38412 dport=1 [ASSURED] mark=0 use=1",
			Flow{
				Family: IPv4, Proto: SCTP, State: 7, Timeout: 9, Status: replied | StatusAssured,
				Orig:  tuple("192.0.2.50:1", "203.0.113.10:38412"),
				Reply: tuple("203.0.113.10:38412", "192.0.2.50:1"),
			},
		},
		{
			"udplite",
			"udplite  136 0 src=192.0.2.50 dst=203.0.113.10 sport=0 dport=65535 [UNREPLIED] " +
				"src=203.0.113.10 dst=192.0.2.50 sport=65535 dport=0 mark=0 use=1",
			Flow{
				Family: IPv4, Proto: UDPLite, Status: confirmed,
				Orig:  tuple("192.0.2.50:0", "203.0.113.10:65535"),
				Reply: tuple("203.0.113.10:65535", "192.0.2.50:0"),
			},
		},
		{
			"dccp, whose ports newer kernels do not track",
			"dccp     33 599 src=192.0.2.50 dst=203.0.113.10 sport=0 dport=0 [UNREPLIED] " +
				"src=203.0.113.10 dst=192.0.2.50 sport=0 dport=0 mark=0 use=1",
			Flow{
				Family: IPv4, Proto: DCCP, Timeout: 599, Status: confirmed,
				Orig:  addrs("192.0.2.50", "203.0.113.10"),
				Reply: addrs("203.0.113.10", "192.0.2.50"),
			},
		},
		{
			"gre",
			"gre      47 29 src=192.0.2.50 dst=203.0.113.10 srckey=0x0 dstkey=0xffab [UNREPLIED] " +
				"src=203.0.113.10 dst=192.0.2.50 srckey=0xffab dstkey=0x0 mark=0 use=1",
			Flow{
				Family: IPv4, Proto: GRE, Timeout: 29, Status: confirmed,
				Orig:  tuple("192.0.2.50:0", "203.0.113.10:65451"),
				Reply: tuple("203.0.113.10:65451", "192.0.2.50:0"),
			},
		},
		{
			"icmp, with two ids in one line",
			"icmp     1 29 src=192.0.2.50 dst=203.0.113.10 type=8 code=0 id=77 [UNREPLIED] " +
				"src=203.0.113.10 dst=192.0.2.50 type=0 code=0 id=77 mark=0 use=1 id=5",
			Flow{
				Family: IPv4, Proto: ICMP, Timeout: 29, Status: confirmed, ID: 5,
				Orig:  icmp("192.0.2.50", "203.0.113.10", 8, 77),
				Reply: icmp("203.0.113.10", "192.0.2.50", 0, 77),
			},
		},
		{
			"icmp with its id translated",
			"icmp     1 29 src=192.0.2.50 dst=203.0.113.10 type=8 code=0 id=77 " +
				"src=203.0.113.10 dst=192.0.2.50 type=0 code=0 id=78 mark=0 use=1",
			Flow{
				Family: IPv4, Proto: ICMP, Timeout: 29, Status: replied | StatusSrcNAT,
				Orig:  icmp("192.0.2.50", "203.0.113.10", 8, 77),
				Reply: icmp("203.0.113.10", "192.0.2.50", 0, 78),
			},
		},
		{
			"icmpv6",
			"icmpv6   58 29 src=2001:db8::50 dst=2001:db8::1 type=128 code=0 id=65535 " +
				"src=2001:db8::1 dst=2001:db8::50 type=129 code=0 id=65535 mark=0 use=1",
			Flow{
				Family: IPv6, Proto: ICMPv6, Timeout: 29, Status: replied,
				Orig:  icmp("2001:db8::50", "2001:db8::1", 128, 65535),
				Reply: icmp("2001:db8::1", "2001:db8::50", 129, 65535),
			},
		},
		{
			"a protocol without a name or ports",
			"unknown  253 599 src=192.0.2.50 dst=203.0.113.10 " +
				"src=198.51.100.11 dst=192.0.2.50 mark=0 use=1",
			Flow{
				Family: IPv4, Proto: 253, Timeout: 599, Status: replied | StatusDstNAT,
				Orig:  addrs("192.0.2.50", "203.0.113.10"),
				Reply: addrs("198.51.100.11", "192.0.2.50"),
			},
		},
		{
			"IPv4-compatible addresses, as inet_ntop writes them",
			"unknown  253 599 src=::192.0.2.50 dst=::1 [UNREPLIED] " +
				"src=::1 dst=::192.0.2.50 mark=0 use=1",
			Flow{
				Family: IPv6, Proto: 253, Timeout: 599, Status: confirmed,
				Orig:  addrs("::192.0.2.50", "::1"),
				Reply: addrs("::1", "::192.0.2.50"),
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.line)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, compareAddrs); diff != "" {
				t.Errorf("Parse (-want +got):\n%s", diff)
			}
			if s := tt.want.String(); s != tt.line {
				t.Errorf("String:\ngot  %s\nwant %s", s, tt.line)
			}
		})
	}
}

// TestParseForms has one flow in the forms that String does not print.
func TestParseForms(t *testing.T) {
	const (
		orig  = "src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53"
		reply = "src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1"
		flow  = orig + " " + reply
	)
	with := udpFlow
	same := udpFlow(func(*Flow) {})
	noTimeout := with(func(f *Flow) { f.Timeout = 0 })
	tcp := func(state uint8) Flow {
		return with(func(f *Flow) { f.Proto, f.State = TCP, state })
	}
	tests := []struct {
		name string
		line string
		want Flow
	}{
		{"no more than the tuples", "udp 17 " + flow, noTimeout},
		{"tabs and spaces at will", "\t udp\t17  29 " + flow + "\tuse=1 ", same},
		{"line feed", "udp 17 29 " + flow + " use=1\n", same},
		{"carriage return", "udp 17 29 " + flow + " use=1\r\n", same},
		{"-o extended", "ipv4     2 udp      17 29 " + flow + " mark=0 use=1", same},
		{"-o labels", "udp 17 29 " + flow + " mark=0 use=1 labels=eth0-in,b", same},
		{"-o labels with spaces", "udp 17 29 " + flow + " mark=0 use=1 labels=bit zero,b", same},
		{"-o labels, none named", "udp 17 29 " + flow + " mark=0 use=1 labels", same},
		{
			"-o ktimestamp",
			"udp 17 29 " + flow + " mark=0 delta-time=1 [start=Thu Jan  1 00:00:00 1970] use=1",
			same,
		},
		{
			"counters and contexts",
			"udp 17 29 " + orig + " packets=1 bytes=18446744073709551615 " + reply +
				" packets=0 bytes=0 mark=0 secctx=system_u:object_r:unlabeled_t:s0 secmark=1 helper=sip use=1",
			same,
		},
		{"fields and flags of the future", "udp 17 29 " + orig + " new=1 [NEWER] " + reply +
			" newest= [MORE THAN THAT] use=1", same},
		{"event", "    [NEW] udp 17 29 " + flow, same},
		{
			"event by a process", " [UPDATE] udp 17 29 " + flow + " mark=0 id=5 labels=a [USERSPACE] portid=9",
			with(func(f *Flow) { f.ID = 5 }),
		},
		{"-o timestamp", "[1796021377.035728]\t    [NEW] udp 17 29 " + flow, same},
		{"-o timestamp of an entry", "[1796021377.035728]\tudp 17 29 " + flow, same},
		{"zone=0 of /proc", "udp 17 29 " + flow + " mark=0 zone=0 use=2", same},
		{"zone-orig=0 is the default zone", "udp 17 29 " + orig + " zone-orig=0 " + reply, same},
		{
			"gre of /proc",
			"ipv4     2 gre      47 29 timeout=30, stream_timeout=180 " +
				"src=192.0.2.50 dst=203.0.113.10 srckey=0x1 dstkey=0x35 " +
				"src=203.0.113.10 dst=192.0.2.50 srckey=0x35 dstkey=0x1 mark=0 use=2",
			with(func(f *Flow) { f.Proto = GRE }),
		},
		{
			"dccp of /proc where the kernel does not know it",
			"ipv4     2 unknown  33 29 src=192.0.2.50 dst=203.0.113.10 " +
				"src=203.0.113.10 dst=192.0.2.50 mark=0 use=2",
			with(func(f *Flow) {
				f.Proto, f.Orig, f.Reply = DCCP,
					addrs("192.0.2.50", "203.0.113.10"), addrs("203.0.113.10", "192.0.2.50")
			}),
		},
		{
			"dccp of older kernels, with a state", "dccp 33 29 PARTOPEN " + flow,
			with(func(f *Flow) { f.Proto = DCCP }),
		},
		{
			"a protocol named after our time",
			"homa 146 29 src=192.0.2.50 dst=203.0.113.10 src=203.0.113.10 dst=192.0.2.50 use=1",
			with(func(f *Flow) {
				f.Proto, f.Orig, f.Reply = 146,
					addrs("192.0.2.50", "203.0.113.10"), addrs("203.0.113.10", "192.0.2.50")
			}),
		},
		{
			"IPv6 in full, as /proc prints it",
			"ipv6     10 udp      17 29 src=2001:0db8:0000:0000:0000:0000:0000:0050 " +
				"dst=2001:0db8:0113:0000:0000:0000:0000:0010 sport=1 dport=53 " +
				"src=2001:0db8:0113:0000:0000:0000:0000:0010 " +
				"dst=2001:0db8:0000:0000:0000:0000:0000:0050 sport=53 dport=1 mark=0 use=2",
			with(func(f *Flow) {
				f.Family = IPv6
				f.Orig = tuple("[2001:db8::50]:1", "[2001:db8:113::10]:53")
				f.Reply = tuple("[2001:db8:113::10]:53", "[2001:db8::50]:1")
			}),
		},
		{"tcp state unknown", "tcp 6 29 LISTEN " + flow, tcp(0)},
		{"tcp state missing", "tcp 6 29 " + flow, tcp(0)},
		{"tcp state SYN_SENT2", "tcp 6 29 SYN_SENT2 " + flow, tcp(9)},
		{
			"assured and offloaded", "udp 17 " + flow + " [ASSURED] [OFFLOAD]",
			with(func(f *Flow) { f.Timeout = 0; f.Status |= StatusAssured | StatusOffload }),
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.line)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, compareAddrs); diff != "" {
				t.Errorf("Parse (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseErrors(t *testing.T) {
	const (
		orig  = "src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53"
		reply = "src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1"
		udp   = "udp 17 29 " + orig + " " + reply
		orig6 = "src=2001:db8::50 dst=2001:db8:113::10 sport=1 dport=53"
	)
	tests := []struct {
		name string
		line string
		want string // a part of the message
	}{
		{"empty", "", `"" is no protocol`},
		{"prose", "no flows here", "protocol number \"flows\" is not a number"},
		{"xml", "<flow><meta>", "no protocol: want a line of conntrack -L"},
		{"save format", "-A -t 29 -s 192.0.2.50", "no protocol"},
		{"expectation", "300 proto=17 " + orig, "no protocol"},
		{"line number before", "12:udp 17 29 " + orig + " " + reply, "no protocol"},
		{"two lines", udp + "\n" + udp, "more than one line"},
		{"two flows in one line", udp + " use=1udp 17 29 " + orig + " " + reply, `"17" is neither`},
		{"two flows after labels", udp + " labels=a udp 17 29 " + orig, "a tuple too many"},
		{"event of a flow's end", "[DESTROY] udp 17 " + orig + " " + reply, "the flow is gone"},
		{"unknown event", "[EXPIRED] udp 17 29 " + orig + " " + reply, "before the protocol"},
		{
			"layer 3 number disagrees",
			"ipv4 10 udp 17 29 " + orig + " " + reply,
			"ipv4 has number 2, not 10",
		},
		{"layer 3 number missing", "ipv4 udp 17 29 " + orig + " " + reply, "layer 3 protocol"},
		{
			"layer 3 disagrees with the addresses",
			"ipv6 10 udp 17 29 " + orig + " " + reply,
			"an ipv6 flow with ipv4 addresses",
		},
		{"layer 3 without a name", "unknown 7 udp 17 29 " + orig + " " + reply, "original tuple"},
		{"protocol number disagrees", "udp 6 29 " + orig + " " + reply, "udp does not have number 6"},
		{"protocol name disagrees", "foo 17 29 " + orig + " " + reply, "foo does not have number 17"},
		{"known name, unknown number", "udp 253 29 " + orig + " " + reply, "udp does not have number 253"},
		{"unknown is never udp", "unknown 17 29 " + orig + " " + reply, "unknown does not have number 17"},
		{
			"protocol number missing",
			"udp " + orig + " " + reply,
			"protocol number \"src=192.0.2.50\" is not a number up to 255",
		},
		{"protocol number too large", "unknown 256 29 " + orig + " " + reply, "up to 255"},
		{"timeout too large", "udp 17 4294967296 " + orig + " " + reply, "up to 4294967295"},
		{
			"timeout negative",
			"udp 17 -1 " + orig + " " + reply,
			`original tuple: "-1" where src= should stand`,
		},
		{"word after the state", "tcp 6 29 NONE CLOSE " + orig + " " + reply, `"CLOSE" where src=`},
		{"no tuple", "udp 17 29", "original tuple: the line ends where src= should stand"},
		{"one tuple", "udp 17 29 " + orig, "reply tuple: the line ends where src= should stand"},
		{
			"one tuple and its attributes",
			"udp 17 29 " + orig + " [UNREPLIED] mark=0 use=1",
			"reply tuple: the line ends",
		},
		{"three tuples", udp + " " + reply, "a tuple too many"},
		{"no source", "udp 17 29 dst=203.0.113.10 sport=1 dport=53 " + reply, "where src= should stand"},
		{"no destination", "udp 17 29 src=192.0.2.50 sport=1 dport=53 " + reply, "where dst= should stand"},
		{
			"two sources",
			"udp 17 29 src=192.0.2.50 src=192.0.2.51 dst=203.0.113.10 sport=1 dport=53 " + reply,
			"where dst= should stand",
		},
		{
			"two destinations",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 dst=203.0.113.10 sport=1 dport=53 " + reply,
			"where sport= should stand",
		},
		{
			"no ports",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 src=203.0.113.10 dst=192.0.2.50",
			"original tuple: \"src=203.0.113.10\" where sport=",
		},
		{
			"no reply ports",
			"udp 17 29 " + orig + " src=203.0.113.10 dst=192.0.2.50 mark=0",
			"reply tuple: \"mark=0\" where sport=",
		},
		{"two source ports", "udp 17 29 " + orig + " sport=1 " + reply, "out of place"},
		{"two reply ports", udp + " dport=1", "out of place"},
		{"id before the reply tuple", "udp 17 29 " + orig + " id=5 " + reply, "out of place"},
		{
			"port too large",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=65536 " + reply,
			"original tuple: dport=\"65536\" is not a number up to 65535",
		},
		{
			"port empty",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 sport= dport=53 " + reply,
			`sport="" is not a number`,
		},
		{
			"port negative",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 sport=-1 dport=53 " + reply,
			`sport="-1" is not`,
		},
		{
			"port with a sign",
			"udp 17 29 src=192.0.2.50 dst=203.0.113.10 sport=+1 dport=53 " + reply,
			`sport="+1" is not`,
		},
		{"ports of a protocol without", "unknown 253 29 " + orig + " " + reply, "out of place"},
		{"gre with ports", "gre 47 29 " + orig + " " + reply, "where srckey=0x should stand"},
		{"icmp with ports", "icmp 1 29 " + orig + " " + reply, "where type= should stand"},
		{
			"icmp without an id",
			"icmp 1 29 src=192.0.2.50 dst=203.0.113.10 type=8 code=0 " + reply,
			"where id= should stand",
		},
		{
			"icmp type too large",
			"icmp 1 29 src=192.0.2.50 dst=203.0.113.10 type=256 code=0 id=0 " + reply,
			"type=\"256\" is not a number up to 255",
		},
		{"mixed families", "udp 17 29 " + orig6 + " " + reply, "IPv4 and IPv6 addresses in one flow"},
		{
			"mixed families within a tuple",
			"udp 17 29 src=192.0.2.50 dst=2001:db8::1 sport=1 dport=53 " + reply,
			"IPv4 and IPv6",
		},
		{
			"IPv4-mapped",
			"udp 17 29 src=::ffff:192.0.2.50 dst=2001:db8::1 sport=1 dport=53 " + reply,
			"not a plain IPv4 or IPv6 address",
		},
		{
			"zoned",
			"udp 17 29 src=fe80::1%eth0 dst=2001:db8::1 sport=1 dport=53 " + reply,
			"src=\"fe80::1%eth0\" is not a plain",
		},
		{
			"address too short",
			"udp 17 29 src=192.0.2 dst=203.0.113.10 sport=1 dport=53 " + reply,
			`src="192.0.2" is not`,
		},
		{"address empty", "udp 17 29 src= dst=203.0.113.10 sport=1 dport=53 " + reply, `src="" is not`},
		{
			"address with a port",
			"udp 17 29 src=192.0.2.50:1 dst=203.0.113.10 sport=1 dport=53 " + reply,
			`src="192.0.2.50:1" is not`,
		},
		{"stray word", udp + " mark=0 zo", `"zo" is neither a field nor a flag`},
		{"stray word between the tuples", "udp 17 29 " + orig + " ? " + reply, `"?" is neither`},
		{"field without a key", udp + " =1", `"=1" is neither`},
		{"mark too large", udp + " mark=4294967296", "mark=\"4294967296\" is not a number"},
		{"two marks", udp + " mark=0 mark=0", "a second mark="},
		{"two ids", udp + " id=1 id=1", "a second id="},
		{
			"two zones",
			"udp 17 29 " + orig + " zone-orig=1 " + reply + " zone-reply=2",
			"a second zone-reply=",
		},
		{"zone too large", udp + " zone=65536", "up to 65535"},
		{"id too large", udp + " id=4294967296", "up to 4294967295"},
		{"flag not closed", "udp 17 29 " + orig + " [UNREPLIED " + reply, "is not a flag"},
		{"flag closed too late", udp + " [UNREPLIED mark=0 use=1 [ASSURED]", "is not a flag"},
		{"flag around a tuple", "udp 17 29 " + orig + " [X " + reply + "]", "is not a flag"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, err := Parse(tt.line)
			if err == nil {
				t.Fatalf("no error, but %s", &f)
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q, want one with %q", err, tt.want)
			}
			if f != (Flow{}) {
				t.Errorf("an error and a flow: %s", &f)
			}
		})
	}
}

func TestParseShortensErrors(t *testing.T) {
	_, err := Parse("udp 17 29 src=" + strings.Repeat("9", 60000))
	if err == nil || len(err.Error()) > 300 {
		t.Errorf("error of %d bytes", len(err.Error()))
	}
}

// TestRecorded reads what the tool and the kernel printed of one table in
// different forms (testdata/text/record.sh).
func TestRecorded(t *testing.T) {
	plain := readFile(t, "plain.txt")
	if len(plain) != 59 {
		t.Fatalf("plain.txt: %d flows, want 59", len(plain))
	}
	ids := readFile(t, "id.txt")

	t.Run("printed alike", func(t *testing.T) {
		for _, file := range []struct {
			name  string
			flows []Flow
		}{{"plain.txt", plain}, {"id.txt", ids}} {
			text, err := os.ReadFile(filepath.Join("testdata", "text", file.name))
			if err != nil {
				t.Fatal(err)
			}
			// plain.txt was captured together with standard error.
			want := strings.Replace(strings.ReplaceAll(string(text), "\r\n", "\n"),
				"conntrack v1.4.7 (conntrack-tools): 59 flow entries have been shown.\n", "", 1)
			var got strings.Builder
			for _, f := range file.flows {
				fmt.Fprintln(&got, &f)
			}
			if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(got.String(), "\n")); diff != "" {
				t.Errorf("%s (-recorded +printed):\n%s", file.name, diff)
			}
		}
	})

	for _, tt := range []struct {
		name   string
		want   []Flow
		others []string
	}{
		{"without id", plain, []string{"extended.txt", "proc.txt"}},
		{"with id", ids, []string{"extended-id-labels.txt"}},
		{"all extensions, without id", readFile(t, "labels.txt"), []string{"proc-everything.txt"}},
	} {
		for _, other := range tt.others {
			t.Run(tt.name+"/"+other, func(t *testing.T) {
				got := readFile(t, other)
				opts := cmp.Options{compareAddrs, cmpopts.IgnoreFields(Flow{}, "Timeout")}
				if diff := cmp.Diff(tt.want, got, opts); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}

	t.Run("all extensions, with id", func(t *testing.T) {
		got := readFile(t, "everything.txt")
		for i := range got {
			if got[i].ID == 0 {
				t.Errorf("flow %d has no id", i)
			}
			got[i].ID = 0
		}
		opts := cmp.Options{compareAddrs, cmpopts.IgnoreFields(Flow{}, "Timeout")}
		if diff := cmp.Diff(readFile(t, "labels.txt"), got, opts); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})

	for _, name := range []string{"events.txt", "events-everything.txt"} {
		t.Run(name, func(t *testing.T) {
			var flows, gone int
			for f, err := range openFile(t, name) {
				switch bad, _ := errors.AsType[*LineError](err); {
				case err == nil:
					flows++
					if f.Flow.Status&StatusSeenReply != 0 {
						t.Errorf("line %d: a new flow that was answered", f.Line)
					}
				case bad != nil && strings.Contains(bad.Text, "[DESTROY]"):
					gone++
				default:
					t.Error(err)
				}
			}
			if flows != 3 || gone != 1 {
				t.Errorf("%d flows, %d gone; want 3 and 1", flows, gone)
			}
		})
	}
}

func openFile(t *testing.T, name string) func(func(TextFlow, error) bool) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "text", name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return ReadText(f)
}

func readFile(t *testing.T, name string) []Flow {
	t.Helper()
	var flows []Flow
	for f, err := range openFile(t, name) {
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		flows = append(flows, f.Flow)
	}
	if len(flows) == 0 {
		t.Fatalf("%s: no flows", name)
	}
	return flows
}

const (
	udpLine = "udp      17 29 src=192.0.2.50 dst=203.0.113.10 sport=1 dport=53 " +
		"src=203.0.113.10 dst=192.0.2.50 sport=53 dport=1 mark=0 use=1"
	shownLine = "conntrack v1.4.7 (conntrack-tools): 3 flow entries have been shown."
)

func TestReadText(t *testing.T) {
	cut := strings.Index(udpLine, " 17") // amid the padding
	tests := []struct {
		name string
		in   string
		want []string // "line" for a flow, "line: part of the error" for another
	}{
		{"nothing", "", nil},
		{"blank lines alone", "\n \n\t\r\n", nil},
		{"flows", udpLine + "\n" + udpLine + "\n", []string{"1", "2"}},
		{"no line end at the end", udpLine + "\n" + udpLine, []string{"1", "2"}},
		{"carriage returns", udpLine + "\r\n\r\n" + udpLine + "\r\n", []string{"1", "3"}},
		{"byte order mark", "\ufeff" + udpLine + "\n", []string{"1"}},
		{"byte order mark in line 2", "\n\ufeff" + udpLine + "\n", []string{"2: no protocol"}},
		{
			"bad lines among good ones", "x\n" + udpLine + "\ny\n\n" + udpLine + "\nz",
			[]string{"1: protocol", "2", "3: protocol", "5", "6: protocol"},
		},
		{"closing line at the end", udpLine + "\n" + shownLine + "\n", []string{"1"}},
		{"closing line first", shownLine + "\r\n" + udpLine + "\n", []string{"2"}},
		{"closing line alone", shownLine, nil},
		{
			"closing line amid a flow",
			udpLine + "\n" + udpLine[:cut] + shownLine + "\n" + udpLine[cut:] + "\n" + udpLine + "\n",
			[]string{"1", "2", "4"},
		},
		{
			"closing line after a space",
			udpLine[:cut+1] + shownLine + "\n" + udpLine[cut+1:] + "\n",
			[]string{"1"},
		},
		{
			"closing line amid the last flow, cut off",
			udpLine[:cut] + shownLine + "\n" + udpLine[cut:len(udpLine)-6],
			[]string{"1: ends within"},
		},
		{
			"closing line amid a bad line",
			"x" + shownLine + "\ny\n" + udpLine + "\n",
			[]string{"1: protocol", "3"},
		},
		{"closing line after half a flow", udpLine[:80] + shownLine, []string{"1: reply tuple"}},
		{
			"two closing lines amid flows",
			udpLine[:80] + shownLine + "\n" + udpLine[:80] + shownLine + "\n" + udpLine + "\n",
			[]string{"1: reply tuple", "3"},
		},
		{
			"closing line of a deletion",
			udpLine + "\n" + strings.Replace(shownLine, "shown", "deleted", 1) + "\n",
			[]string{"1", "2: protocol"},
		},
		{
			"another message of the tool",
			"conntrack v1.4.7 (conntrack-tools): Operation failed\n",
			[]string{"1: protocol"},
		},
		{"cut off in a port", udpLine[:strings.LastIndex(udpLine, "3 dport")], []string{"1: reply tuple"}},
		{"cut off after the tuple", udpLine[:strings.Index(udpLine, " mark")], []string{"1: ends within"}},
		{"cut off in the mark", udpLine[:strings.Index(udpLine, " use")], []string{"1: ends within"}},
		{
			"longest line",
			udpLine + strings.Repeat(" ", maxLine-len(udpLine)-1) + "\n" + udpLine + "\n",
			[]string{"1", "2"},
		},
		{
			"too long a line", udpLine + strings.Repeat(" ", maxLine-len(udpLine)) + "\n" + udpLine + "\n",
			[]string{"1: longer than 65536 bytes", "2"},
		},
		{
			"far too long a line",
			strings.Repeat("x", 5*maxLine) + "\n" + udpLine + "\n",
			[]string{"1: longer than", "2"},
		},
		{
			"too long a line at the end",
			udpLine + "\n" + strings.Repeat("x", 5*maxLine),
			[]string{"1", "2: longer than"},
		},
		{"NUL bytes", "\x00\x00\n" + udpLine + "\n", []string{"1: no protocol", "2"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, r := range []struct {
				name string
				wrap func(io.Reader) io.Reader
			}{
				{"at once", func(r io.Reader) io.Reader { return r }},
				{"byte by byte", iotest.OneByteReader},
				{"with the end told early", iotest.DataErrReader},
			} {
				var n int
				for f, err := range ReadText(r.wrap(strings.NewReader(tt.in))) {
					if n == len(tt.want) {
						t.Fatalf("%s: more than %d results: %v, %v", r.name, n, f, err)
					}
					line, part, isErr := strings.Cut(tt.want[n], ": ")
					n++
					got := f.Line
					if bad, ok := errors.AsType[*LineError](err); ok {
						got = bad.Line
						if bad.Unwrap() == nil || len(bad.Text) > excerptLen+len("…") {
							t.Errorf("%s: error %#v", r.name, bad)
						}
					}
					if line != fmt.Sprint(got) || isErr != (err != nil) ||
						err != nil && !strings.Contains(err.Error(), part) {
						t.Errorf("%s: result %d: line %d, %v; want %s", r.name, n, got, err, tt.want[n-1])
					}
					want := udpFlow(func(*Flow) {})
					if err != nil {
						want = Flow{}
					}
					if f.Flow != want {
						t.Errorf("%s: result %d: flow %s", r.name, n, &f.Flow)
					}
				}
				if n != len(tt.want) {
					t.Errorf("%s: %d results, want %d", r.name, n, len(tt.want))
				}
			}
		})
	}
}

func TestReadTextStops(t *testing.T) {
	t.Run("where the caller stops", func(t *testing.T) {
		for _, in := range []string{udpLine + "\n", "bad\n"} {
			n := 0
			for _, err := range ReadText(strings.NewReader(strings.Repeat(in, 3))) {
				if (err != nil) != (in == "bad\n") {
					t.Error(err)
				}
				if n++; n == 2 {
					break
				}
			}
			if n != 2 {
				t.Errorf("%d results, want 2", n)
			}
		}
	})

	t.Run("where the reader fails", func(t *testing.T) {
		broken := errors.New("disk on fire")
		long := strings.Repeat("x", 2*maxLine)
		for name, in := range map[string]string{
			"after a line": udpLine + "\n", "amid a line": udpLine + "\n" + udpLine[:90],
			"amid a long line": udpLine + "\n" + long,
		} {
			var flows int
			var last error
			for _, err := range ReadText(io.MultiReader(strings.NewReader(in), iotest.ErrReader(broken))) {
				if last != nil {
					t.Errorf("%s: goes on after %v", name, last)
				}
				if err == nil {
					flows++
				}
				last = err
			}
			if _, ok := errors.AsType[*LineError](last); ok || !errors.Is(last, broken) || flows != 1 ||
				!strings.Contains(last.Error(), "line 2") {
				t.Errorf("%s: %d flows, then %v", name, flows, last)
			}
		}
	})
}

func TestLineErrorIsReadable(t *testing.T) {
	in := "\x1b[31mred\tand\xff " + strings.Repeat("é", 200)
	for _, err := range ReadText(strings.NewReader(in + "\n")) {
		bad, ok := errors.AsType[*LineError](err)
		if !ok {
			t.Fatalf("error %v", err)
		}
		if !strings.HasPrefix(bad.Text, "\ufffd[31mred and\ufffd é") || !strings.HasSuffix(bad.Text, "…") {
			t.Errorf("text %q", bad.Text)
		}
		if strings.ContainsAny(err.Error(), "\x1b\t") {
			t.Errorf("message %q", err)
		}
		if !strings.HasPrefix(err.Error(), "line 1: ") {
			t.Errorf("message %q does not begin with the line", err)
		}
	}
}

// drawFlow returns a flow as a table may hold it and its text tells it.
func drawFlow(t *rapid.T) Flow {
	f := Flow{
		Proto: rapid.OneOf(rapid.SampledFrom([]uint8{ICMP, TCP, UDP, DCCP, GRE, ICMPv6, SCTP, UDPLite}),
			rapid.Uint8()).Draw(t, "proto"),
		Zone: rapid.OneOf(rapid.Just(uint16(0)), rapid.Uint16()).Draw(t, "zone"),
		ID:   rapid.OneOf(rapid.Just(uint32(0)), rapid.Uint32()).Draw(t, "id"),
		Mark: rapid.Uint32().Draw(t, "mark"),
	}
	if f.Zone != 0 {
		f.ZoneDir = rapid.SampledFrom([]ZoneDir{ZoneBoth, ZoneOrig, ZoneReply}).Draw(t, "zone direction")
	}
	f.Status = StatusConfirmed |
		rapid.SampledFrom([]Status{0, StatusSeenReply}).Draw(t, "replied") |
		rapid.SampledFrom([]Status{0, StatusAssured, StatusOffload, StatusOffload | StatusHWOffload}).Draw(t, "flag")
	if f.Status&StatusOffload == 0 {
		f.Timeout = rapid.Uint32().Draw(t, "timeout")
		switch f.Proto {
		case TCP:
			f.State = rapid.Uint8Max(uint8(len(tcpStates)-1)).Draw(t, "state")
		case SCTP:
			f.State = rapid.Uint8Max(uint8(len(sctpStates)-1)).Draw(t, "state")
		}
	}

	f.Family = rapid.SampledFrom([]Family{IPv4, IPv6}).Draw(t, "family")
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		if f.Family == IPv4 {
			return netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "IPv4")))
		}
		// Few set bytes, for the sake of "::".
		ip := rapid.SliceOfN(rapid.OneOf(rapid.Just(byte(0)), rapid.Byte()), 16, 16).
			Filter(func(b []byte) bool { return !netip.AddrFrom16([16]byte(b)).Is4In6() }).Draw(t, "IPv6")
		return netip.AddrFrom16([16]byte(ip))
	})
	pool := rapid.SliceOfN(addr, 1, 4).Draw(t, "addresses")
	draw := func(t2 *Tuple, name string) {
		t2.Src = rapid.SampledFrom(pool).Draw(t, name+" src")
		t2.Dst = rapid.SampledFrom(pool).Draw(t, name+" dst")
		switch {
		case f.Proto == ICMP || f.Proto == ICMPv6:
			t2.ICMPType = rapid.Uint8().Draw(t, name+" type")
			t2.ICMPCode = rapid.Uint8().Draw(t, name+" code")
			t2.ICMPID = rapid.Uint16Max(2).Draw(t, name+" icmp id")
		case HasPorts(f.Proto):
			t2.SrcPort = rapid.Uint16().Draw(t, name+" sport")
			t2.DstPort = rapid.Uint16().Draw(t, name+" dport")
		}
	}
	draw(&f.Orig, "original")
	if rapid.Bool().Draw(t, "translated") {
		draw(&f.Reply, "reply")
	} else {
		f.Reply = f.Orig
		f.Reply.Src, f.Reply.Dst = f.Orig.Dst, f.Orig.Src
		f.Reply.SrcPort, f.Reply.DstPort = f.Orig.DstPort, f.Orig.SrcPort
	}
	if f.Reply.Src != f.Orig.Dst || f.Reply.SrcPort != f.Orig.DstPort {
		f.Status |= StatusDstNAT
	}
	if f.Reply.Dst != f.Orig.Src || f.Reply.DstPort != f.Orig.SrcPort || f.Reply.ICMPID != f.Orig.ICMPID {
		f.Status |= StatusSrcNAT
	}
	return f
}

func TestTextRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawFlow(t)
		line := f.String()
		got, err := Parse(line)
		if err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if got != f {
			t.Fatalf("%s (-want +got):\n%s", line, cmp.Diff(f, got, compareAddrs))
		}
	})
}

// TestTextCutShort shows that no beginning of a line is read as another flow
// from a file that ends there.
func TestTextCutShort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := drawFlow(t)
		f.ID = 0
		line := f.String()
		n := rapid.IntRange(1, len(line)-1).Draw(t, "length")
		for got, err := range ReadText(strings.NewReader(line[:n])) {
			if err == nil && got.Flow != f {
				t.Fatalf("%s\nread as\n%s", line[:n], &got.Flow)
			}
		}
	})
}

func TestAppendText(t *testing.T) {
	f := udpFlow(func(*Flow) {})
	got, err := f.AppendText([]byte("> "))
	if err != nil || !bytes.Equal(got, []byte("> "+udpLine)) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestTextAllocations(t *testing.T) {
	line := udpLine + " id=5"
	f := udpFlow(func(f *Flow) { f.ID = 5 })
	buf := make([]byte, 0, 256)
	for _, tt := range []struct {
		name string
		f    func()
		most float64
	}{
		{"Parse", func() { _, _ = Parse(line) }, 0},
		{"AppendText", func() { _, _ = f.AppendText(buf) }, 0},
		{"String", func() { _ = f.String() }, 2},
	} {
		if got := testing.AllocsPerRun(100, tt.f); got > tt.most {
			t.Errorf("%s: %v allocations, want at most %v", tt.name, got, tt.most)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	lines := map[string]string{
		"plain": udpLine,
		"proc-ipv6": "ipv6     10 tcp      6 431999 ESTABLISHED " +
			"src=2001:0db8:0000:0000:0000:0000:0000:0050 dst=2001:0db8:0113:0000:0000:0000:0000:0010 " +
			"sport=40001 dport=443 packets=10 bytes=1000 " +
			"src=2001:0db8:0051:0000:0000:0000:0000:0011 dst=2001:0db8:0000:0000:0000:0000:0000:0050 " +
			"sport=8443 dport=40001 packets=9 bytes=900 [ASSURED] mark=0 zone=0 delta-time=9 use=2",
	}
	for name, line := range lines {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(line)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(line); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkString(b *testing.B) {
	f := udpFlow(func(*Flow) {})
	b.ReportAllocs()
	for b.Loop() {
		_ = f.String()
	}
}

func BenchmarkReadText(b *testing.B) {
	const lines = 1000
	text := strings.Repeat(udpLine+"\n", lines)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for _, err := range ReadText(strings.NewReader(text)) {
			if err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != lines {
			b.Fatalf("%d flows", n)
		}
	}
}
