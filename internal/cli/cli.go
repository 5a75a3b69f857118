// Package cli is the command line of flowsweep.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes. A command that did what it was asked ends with 0, whatever it
// found.
const (
	exitFailed = 1
	exitUsage  = 2
	exitStale  = 3 // plan --fail-on-stale
)

// exitError ends the program with a code; err may be nil where all was said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// Main runs the command line of this process and returns its exit code.
func Main() int {
	return Run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// interruptible returns a context that the first SIGINT or SIGTERM ends, so that
// what was done is still told. The second one ends the process. Until it is
// called the first one does: there is nothing to tell while inputs are read.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	code := exitFailed
	var ee *exitError
	if errors.As(err, &ee) {
		code = ee.code
	}
	if msg := err.Error(); msg != "" {
		fmt.Fprintf(stderr, "flowsweep: %s\n", msg)
	}
	if code == exitUsage {
		fmt.Fprintf(stderr, "Run \"%s --help\" for usage.\n", cmd.CommandPath())
	}
	return code
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "flowsweep",
		Short: "Find and delete conntrack flows that go to dead backends",
		Long: `flowsweep keeps a Linux host's connection-tracking table in agreement with the
services that the host forwards to. When a backend goes away, the kernel goes on
translating established UDP flows to it for as long as the sender sends. flowsweep
finds exactly those flows and deletes them, so that the next packet is looked at
afresh. It never touches a flow that is right, or that is not a service's.`,
		Args:          cobra.ArbitraryArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return cmd.Help()
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitUsage, err} })
	root.CompletionOptions.HiddenDefaultCmd = false
	root.AddCommand(newDemo(), newPlan(), newSweep(), newExplain(), newDoctor(), newRun(), newStatus(), newConfig(), newVersion(), newMan())
	root.InitDefaultCompletionCmd("completion")
	root.SetHelpCommand(newHelp())
	for _, c := range root.Commands() {
		strict(c)
	}
	return root
}

// strict makes wrong arguments a matter of usage, in all commands below c.
func strict(c *cobra.Command) {
	check := c.Args
	if check == nil {
		check = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("%s takes no arguments, but got %q", cmd.Name(), args[0])
			}
			return nil
		}
	}
	c.Args = func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &exitError{exitUsage, err}
		}
		return nil
	}
	if c.HasSubCommands() && c.RunE == nil && c.Run == nil {
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	for _, sub := range c.Commands() {
		strict(sub)
	}
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Tell about a command",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return usagef("there is no command %q", strings.Join(args, " "))
			}
			return about.Help()
		},
	}
}

// version is set by the linker (see Makefile).
var version string

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "flowsweep %s %s %s/%s\n",
				versionString(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}

func versionString() string {
	if info, ok := debug.ReadBuildInfo(); version == "" && ok {
		return cmp.Or(strings.Trim(info.Main.Version, "()"), "devel")
	}
	return cmp.Or(version, "devel")
}
