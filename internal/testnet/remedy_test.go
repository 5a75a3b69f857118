//go:build linux

package testnet

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRemedy(t *testing.T) {
	tests := []struct {
		name       string
		err        error
		privileged bool
		sysctls    map[string]string
		want       string
	}{
		{
			"Debian's switch", unix.EPERM, false,
			map[string]string{"kernel.unprivileged_userns_clone": "0"},
			"kernel.unprivileged_userns_clone=1",
		},
		{
			"switched on", unix.EPERM, false,
			map[string]string{"kernel.unprivileged_userns_clone": "1"},
			"seccomp",
		},
		{
			"no user namespaces", unix.ENOSPC, false,
			map[string]string{"user.max_user_namespaces": "0"},
			"user.max_user_namespaces=10000",
		},
		{
			"root needs none", unix.EPERM, true,
			map[string]string{"user.max_user_namespaces": "0"},
			"seccomp",
		},
		{
			"AppArmor", unix.EPERM, false,
			map[string]string{"kernel.apparmor_restrict_unprivileged_userns": "1"},
			"kernel.apparmor_restrict_unprivileged_userns=0",
		},
		{
			"no network namespaces", unix.ENOSPC, true,
			map[string]string{"user.max_net_namespaces": "0"},
			"user.max_net_namespaces=10000",
		},
		{
			"limit reached", unix.ENOSPC, false,
			map[string]string{"user.max_user_namespaces": "5"},
			"end the processes",
		},
		{"nested too deeply", unix.EUSERS, false, nil, "end the processes"},
		{"not built in", unix.EINVAL, false, nil, "CONFIG_USER_NS"},
		{"container", unix.EPERM, true, nil, "SYS_ADMIN"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := remedy(tt.err, tt.privileged, func(name string) string { return tt.sysctls[name] })
			if !strings.Contains(got, tt.want) || strings.Contains(got, "\n") {
				t.Errorf("got %q, want one line with %q", got, tt.want)
			}
		})
	}
}

func TestForbiddenLeavesOtherErrorsAlone(t *testing.T) {
	for _, err := range []error{nil, os.ErrNotExist, unix.ENOMEM} {
		if got := forbidden(err); !errors.Is(got, err) || errors.Is(got, ErrForbidden) {
			t.Errorf("%v became %v", err, got)
		}
	}
	err := forbidden(fmt.Errorf("start: %w", unix.EPERM))
	if !errors.Is(err, ErrForbidden) || !errors.Is(err, unix.EPERM) {
		t.Errorf("%v is not both ErrForbidden and EPERM", err)
	}
}
