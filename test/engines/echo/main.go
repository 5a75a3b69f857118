// Command echo is what the containers of test/engines run, and all that their image holds. As a
// server it answers as testnet.Echo does, with the container's own address:
//
//	echo serve 5353 6000-6009
//
// As a sender it prints for each datagram which server answered, or that it was lost:
//
//	echo send 40000 192.0.2.1:8000
package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	pace     = 50 * time.Millisecond
	patience = 500 * time.Millisecond
)

func main() {
	var err error
	switch {
	case len(os.Args) > 2 && os.Args[1] == "serve":
		err = serve(os.Args[2:])
	case len(os.Args) > 3 && os.Args[1] == "send":
		err = send(os.Args[2], os.Args[3])
	default:
		err = fmt.Errorf("usage: %s serve PORTS... | send PORT SERVER", os.Args[0])
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// serve answers at ports and ranges of ports until one of the servers fails.
func serve(ports []string) error {
	addr, err := own()
	if err != nil {
		return err
	}
	ended := make(chan error)
	for _, text := range ports {
		first, last, isRange := strings.Cut(text, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 16)
		if err != nil {
			return err
		}
		to, err := strconv.ParseUint(last, 10, 16)
		if err != nil {
			return err
		}
		for port := from; port <= to; port++ {
			conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, uint16(port))))
			if err != nil {
				return err
			}
			go func() { ended <- echo(conn) }()
		}
	}
	return <-ended
}

// own returns the address that the engine gave the container.
func own() (netip.Addr, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			return p.Addr(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("no address but %v", addrs)
}

func echo(conn *net.UDPConn) error {
	name := conn.LocalAddr().String()
	buf := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		// An error is the client's business: it has gone, or says so by ICMP.
		_, _ = conn.WriteToUDPAddrPort(append(buf[:n], name...), from)
	}
}

// send sends a datagram from a port, waits for the answer, and so on.
func send(port, server string) error {
	local, err := net.ResolveUDPAddr("udp4", ":"+port)
	if err != nil {
		return err
	}
	remote, err := net.ResolveUDPAddr("udp4", server)
	if err != nil {
		return err
	}
	conn, err := net.DialUDP("udp4", local, remote)
	if err != nil {
		return err
	}
	payload := []byte("x") // Docker's proxy passes on no empty datagram
	buf := make([]byte, 2048)
	for ; ; time.Sleep(pace) {
		_, err := conn.Write(payload)
		if err == nil {
			err = conn.SetReadDeadline(time.Now().Add(patience))
		}
		n := 0
		if err == nil {
			n, err = conn.Read(buf)
		}
		if err != nil {
			fmt.Println("lost:", err)
			continue
		}
		fmt.Println(string(buf[min(n, len(payload)):n]))
	}
}
