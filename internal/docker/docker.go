// Package docker asks the Docker engine of this host which containers have
// published ports, so that flows can be shown by names.
package docker

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/moby/moby/client"

	"github.com/flowsweep/flowsweep/conntrack"
)

// HostEnv is the environment variable that names the engine's socket.
const HostEnv = client.EnvOverrideHost

// answerTime bounds the wait for the engine: names are not worth more.
const answerTime = 2 * time.Second

// port is where clients send to. The zero address is every address of this host
// of a family.
type port struct {
	addr   netip.Addr
	number uint16
	proto  uint8
}

// Containers are the running containers by the ports that they have published.
type Containers struct{ names map[port]string }

// List asks the engine once. The socket is the one that DOCKER_HOST names, or
// /var/run/docker.sock; an engine that is asked over the network (tcp, ssh) may be
// another host's and is not asked. Where the engine does not answer within two
// seconds, that is an error. Listing needs the right to write to the socket,
// which root and the group docker have.
func List(ctx context.Context) (*Containers, error) {
	if h := os.Getenv(HostEnv); h != "" && !strings.HasPrefix(h, "unix://") {
		return nil, fmt.Errorf("docker: %s is %q, which may be another host's engine", HostEnv, h)
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	c, err := client.New(client.WithHostFromEnv())
	if err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	defer c.Close()
	list, err := c.ContainerList(ctx, client.ContainerListOptions{})
	if err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	all := &Containers{names: map[port]string{}}
	for _, x := range list.Items {
		if len(x.Names) == 0 {
			continue
		}
		for _, p := range x.Ports {
			proto := map[string]uint8{"udp": conntrack.UDP, "tcp": conntrack.TCP, "sctp": conntrack.SCTP}[p.Type]
			if proto != 0 && p.PublicPort != 0 {
				all.names[port{p.IP.Unmap(), p.PublicPort, proto}] = strings.TrimPrefix(x.Names[0], "/")
			}
		}
	}
	return all, nil
}

// Published returns the name of the container that has published a port at an
// address of this host, "" where none has. It allocates nothing.
func (c *Containers) Published(proto uint8, addr netip.Addr, number uint16) string {
	if name, ok := c.names[port{addr, number, proto}]; ok {
		return name
	}
	every := netip.IPv4Unspecified()
	if addr.Is6() {
		every = netip.IPv6Unspecified()
	}
	return c.names[port{every, number, proto}]
}
