#!/bin/bash
# Records the files beside it: what conntrack(8) and /proc/net/nf_conntrack
# print of one table in every form, made in a private namespace.
# Needs conntrack, nft and ip; run it as any user.
#
# [OFFLOAD] and [HW_OFFLOAD] are missing here: they need a flowtable.
# shellcheck disable=SC2086 # the tuples are words to be split
set -eu
if [ "${1-}" != inside ]; then
	exec unshare --map-root-user --net --mount "$0" inside
fi
cd "$(dirname "$0")"

# The label names are read from a fixed path.
etc=$(mktemp -d)
trap 'umount /etc; rm -r "$etc"' EXIT
mkdir "$etc/xtables"
printf '%s\n' '0 bit zero' '1 eth0-in' '2 tenant7' >"$etc/xtables/connlabel.conf"
mount -t overlay overlay -o lowerdir="$etc":/etc /etc

ip link set lo up
ip addr add 203.0.113.10/32 dev lo

port=20000
create() { # protocol, options
	local proto=$1
	shift
	port=$((port + 1))
	conntrack -I -t 100000 -p "$proto" "$@" 2>/dev/null
}
v4="-s 192.0.2.50 -d 203.0.113.10"
v6="-s 2001:db8::50 -d 2001:db8:113::10"

for to in "$v4" "$v6"; do
	create udp $to --sport $port --dport 53
	create udp $to --sport $port --dport 53 -u SEEN_REPLY -m 4294967295
	create udp $to --sport $port --dport 53 -u SEEN_REPLY,ASSURED -w 7
	create udp $to --sport $port --dport 53 --orig-zone 8
	create udp $to --sport $port --dport 53 --reply-zone 65535
	create udplite $to --sport $port --dport 9
	for state in NONE SYN_SENT SYN_RECV ESTABLISHED FIN_WAIT CLOSE_WAIT LAST_ACK \
		TIME_WAIT CLOSE SYN_SENT2; do
		create tcp $to --sport $port --dport 80 --state $state -u SEEN_REPLY,ASSURED
	done
	for state in CLOSED COOKIE_WAIT COOKIE_ECHOED ESTABLISHED SHUTDOWN_SENT \
		SHUTDOWN_RECD SHUTDOWN_ACK_SENT; do
		create sctp $to --sport $port --dport 38412 --state $state \
			--orig-vtag 1 --reply-vtag 2
	done
	create dccp $to --sport $port --dport 5001 --state REQUEST --role client
	create gre $to --srckey 0xab --dstkey 0x10
	create 253 $to
done
create icmp $v4 --icmp-type 8 --icmp-code 0 --icmp-id 77
create icmpv6 $v6 --icmpv6-type 128 --icmpv6-code 0 --icmpv6-id 65535
create udp $v4 --sport $port --dport 53 -g 198.51.100.11:5353 -u SEEN_REPLY
create udp $v4 --sport $port --dport 53 -n 198.51.100.1:1024 -u SEEN_REPLY
create udp $v6 --sport $port --dport 53 -r 2001:db8:51::11 -q 2001:db8::50 \
	--reply-port-src 5353 --reply-port-dst $port
create udp -s ::192.0.2.50 -d ::1 --sport $port --dport 53
create udp -s ::2:0:0 -d 2001:db8:0:1:2:3:4:5 --sport $port --dport 53

conntrack -L >plain.txt 2>&1
conntrack -L -o id >id.txt
conntrack -L -o extended >extended.txt 2>/dev/null
conntrack -L -o extended,id,labels >extended-id-labels.txt 2>/dev/null
cat /proc/net/nf_conntrack >proc.txt
conntrack -F 2>/dev/null

# Everything that the kernel adds on request: counters, times, a helper, labels.
sysctl -qw net.netfilter.nf_conntrack_acct=1 net.netfilter.nf_conntrack_timestamp=1
nft -f - <<'RULES'
table ip t {
	ct helper tftp { type "tftp" protocol udp; }
	chain out {
		type filter hook output priority 0
		udp dport 69 ct helper set "tftp"
		udp dport { 5001, 5002 } ct label set 0
		udp dport 5002 ct label set 2
		udp dport 5003 ct label set 9
	}
}
RULES
for p in 69 5001 5002 5003; do echo x >/dev/udp/203.0.113.10/$p; done
conntrack -L -o labels >labels.txt 2>/dev/null
conntrack -L -o extended,id,ktimestamp,labels,timestamp >everything.txt 2>/dev/null
cat /proc/net/nf_conntrack >proc-everything.txt
conntrack -F 2>/dev/null

conntrack -E >events.txt 2>/dev/null &
conntrack -E -o extended,id,timestamp,labels,userspace >events-everything.txt 2>/dev/null &
sleep 0.5
create tcp $v4 --sport 21000 --dport 80 --state SYN_SENT
create icmpv6 $v6 --icmpv6-type 128 --icmpv6-code 0 --icmpv6-id 5
echo x >/dev/udp/203.0.113.10/5001
conntrack -D -p udp >/dev/null 2>&1
sleep 0.5
kill %1 %2
wait || true
