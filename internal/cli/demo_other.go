//go:build !linux

package cli

import (
	"context"
	"errors"
	"io"
)

func runDemo(context.Context, io.Writer) error {
	return &exitError{exitFailed, errors.New("demo needs Linux: it builds network namespaces")}
}
