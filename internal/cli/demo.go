package cli

import "github.com/spf13/cobra"

func newDemo() *cobra.Command {
	return &cobra.Command{
		Use:   "demo",
		Short: "Show the problem and the repair in a private network namespace",
		Long: `demo builds a small network in namespaces of its own: a client, a node with real
nftables NAT, and backends. It lets a backend die under a sender, shows that the
kernel keeps sending to it, and repairs that with flowsweep. It needs no root where
unprivileged user namespaces are allowed, changes nothing outside its namespaces,
and exits with 1 if the repair did not happen.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return runDemo(ctx, cmd.OutOrStdout())
		},
	}
}
