package cli

import (
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/flowsweep/flowsweep/internal/doctor"
)

// exitMend: doctor found something that must be mended.
const exitMend = 3

var doctorFormats = []string{"table", "json", "yaml"}

func newDoctor() *cobra.Command {
	var in inputs
	var output string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Examine what this host gives flowsweep to work with",
		Long: `doctor looks at the kernel and its filters, privileges, the table's limits and
timeouts, what writes the NAT rules, and what else is about. For each finding it
tells what it is, why it matters and what to do. It changes nothing, and looks as
far as its privileges reach.

It exits with 3 where something must be mended before flowsweep can do its work.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case !slices.Contains(doctorFormats, output):
				return usagef("--output: %q is none of %s", output, strings.Join(doctorFormats, ", "))
			case cmd.Flags().Changed("netns") && in.netns == "":
				return usagef("--netns must not be empty: an unset variable would mean this host")
			}
			r, err := doctor.Host(cmd.Context(), in.namespace())
			if err != nil {
				return err
			}
			if err := writeReport(cmd.OutOrStdout(), r, output); err != nil {
				return err
			}
			if r.Summary.Mend > 0 {
				return &exitError{exitMend, nil}
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&in.netns, "netns", "", "network namespace to look into: a path, or a name under /run/netns")
	f.StringVarP(&output, "output", "o", "table", "table, json or yaml")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(doctorFormats, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func writeReport(w io.Writer, r *doctor.Report, format string) error {
	switch format {
	case "json":
		return r.WriteJSON(w)
	case "yaml":
		b, err := yaml.Marshal(r)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	}
	return r.WriteText(w, isTerminal(w))
}
