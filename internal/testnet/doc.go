// Package testnet builds small networks out of Linux network namespaces: for
// kernel tests, and for "flowsweep demo".
//
// A program or a test binary first calls [Reexec], which gives it namespaces
// of its own: without root that takes a user namespace, which only a new
// process can enter. Inside, [New] makes further network namespaces, [NewStar]
// a router with a few of them around it, [NS.SetNAT] loads the rules that a
// service proxy would, and [Echo] and [Send] put traffic through them that
// tells which backend served each datagram. For hosts that are less tidy there
// are links, routes and policy rules of any kind ([Link], [Route], [Rule]),
// sockets that send from foreign addresses ([SocketOptions]) and packets whose
// sender need not exist ([Raw]). Kernel tests find all of this
// wrapped for the testing package in internal/testnet/nstest.
//
// Nothing outlives the process: the namespaces have no name in the file
// system, so the kernel removes each with the last descriptor that refers to
// it, and everything in it.
//
// Only Linux has what this package is made of; elsewhere it is empty.
package testnet
