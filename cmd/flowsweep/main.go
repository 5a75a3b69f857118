// Flowsweep finds conntrack flows that go to dead backends, and deletes them.
package main

import (
	"os"

	"github.com/flowsweep/flowsweep/internal/cli"
)

func main() { os.Exit(cli.Main()) }
