//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Server is a UDP server that tells its clients which one it is: it answers
// each datagram with the same payload and, behind it, its own address.
type Server struct {
	conn     *net.UDPConn
	addr     netip.AddrPort
	name     []byte
	received atomic.Uint64
	done     chan error // what serve returned
	close    func() error
}

// Echo starts a server in a namespace. Bound to the unspecified address it
// answers from the address that the route to the client prefers, which need not
// be the one that it was asked at.
func Echo(ns *NS, addr netip.AddrPort) (*Server, error) {
	conn, err := ns.ListenUDP(addr)
	if err != nil {
		return nil, err
	}
	local := localAddr(conn)
	s := &Server{conn: conn, addr: local, name: []byte(local.String()), done: make(chan error, 1)}
	s.close = sync.OnceValue(s.shut)
	go func() { s.done <- s.serve() }()
	return s, nil
}

// Addr returns the address that the server is bound to, and answers with.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Received returns how many datagrams came in so far.
func (s *Server) Received() uint64 { return s.received.Load() }

// Close stops the server; from then on the kernel answers with ICMP's "port
// unreachable". It returns what stopped the server before, if anything did.
// Closing twice does no harm.
func (s *Server) Close() error { return s.close() }

func (s *Server) shut() error {
	err := s.conn.Close()
	if serveErr := <-s.done; serveErr != nil {
		err = serveErr
	}
	if err != nil {
		return fmt.Errorf("testnet: echo server %s: %w", s.addr, err)
	}
	return nil
}

func (s *Server) serve() error {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := s.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return unlessClosed(err)
		}
		s.received.Add(1)
		if _, err := s.conn.WriteToUDPAddrPort(append(buf[:n], s.name...), from); err != nil && !lost(err) {
			return unlessClosed(err)
		}
	}
}

// Ask sends one datagram from a namespace and returns which server answered.
// Without an answer within the timeout the error is an os.ErrDeadlineExceeded,
// ECONNREFUSED where ICMP told that there will be none. The zero from lets the
// kernel choose the port, which once in some ten thousand times is that of an
// earlier flow; a flow that must be new takes a port of its own.
func Ask(ns *NS, from, to netip.AddrPort, timeout time.Duration) (netip.AddrPort, error) {
	conn, err := ns.DialUDP(from, to)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 512)
	err = conn.SetDeadline(time.Now().Add(timeout))
	var n int
	if err == nil {
		// Without payload the answer is the name alone.
		_, err = conn.Write(nil)
	}
	if err == nil {
		n, err = conn.Read(buf)
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("testnet: ask %s: %w", to, err)
	}
	return netip.ParseAddrPort(string(buf[:n]))
}

func localAddr(c *net.UDPConn) netip.AddrPort {
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// lost tells whether a socket's error means no more than that a datagram did
// not arrive: ICMP errors, which the kernel reports with the next call, missing
// routes and neighbours, packets that a firewall drops.
func lost(err error) bool {
	for _, errno := range []error{
		unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.EPERM, unix.ENOBUFS,
	} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

func unlessClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
