//go:build kernels

package kernels

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// trouble is what a kernel prints when something is wrong with it.
var trouble = regexp.MustCompile(`(?m)^.*(BUG:|WARNING:|Oops|Call Trace|Kernel panic|init: ).*$`)

// boot runs the suites in a guest.
func boot(t *testing.T, dir, stage string) outcome {
	t.Helper()
	version, err := os.ReadFile(filepath.Join(dir, "version"))
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	initrd := filepath.Join(tmp, "initrd")
	console, printed := filepath.Join(tmp, "console"), filepath.Join(tmp, "printed")
	if err := writeInitrd(initrd, dir, stage); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), guestTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-accel", "tcg", "-cpu", "max", "-m", "1G", "-smp", "2", "-nodefaults", "-display", "none", "-no-reboot",
		"-serial", "file:"+console, "-serial", "file:"+printed,
		// On a busy host the emulated machine stands still now and then, which the kernel must not take
		// for a broken timer or for a fault of its own.
		"-kernel", filepath.Join(dir, "vmlinuz"), "-initrd", initrd,
		"-append", "console=ttyS0 panic=-1 quiet no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1")
	out, err := cmd.CombinedOutput()
	took := time.Since(began)
	if ctx.Err() != nil {
		err = fmt.Errorf("not done in %s", guestTime)
	}
	said, text := read(console), read(printed)
	o, errs := parse(text)
	if err != nil {
		errs = append(errs, fmt.Errorf("qemu-system-x86_64: %w", err))
	}
	for _, line := range trouble.FindAllString(said, -1) {
		errs = append(errs, errors.New(strings.TrimSpace(line)))
	}
	if len(errs) > 0 {
		t.Errorf("%v\n--- qemu\n%s--- the console\n%s--- the tests\n%s",
			errors.Join(errs...), out, said, quiet(text))
	}
	o.build, o.took = strings.TrimSpace(string(version)), took
	return o
}

// read returns a file that may not be there.
func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error() + "\n"
	}
	return string(b)
}

// writeInitrd writes the file system that a guest starts with: init, busybox, the kernel's modules and
// the suites.
func writeInitrd(path, kernel, stage string) error {
	const busybox = "/bin/busybox"
	f, err := elf.Open(busybox)
	if err != nil {
		return fmt.Errorf("%w; install busybox-static", err)
	}
	defer f.Close()
	if libs, err := f.ImportedLibraries(); err != nil || len(libs) > 0 {
		return fmt.Errorf("%s needs %v; install busybox-static", busybox, libs)
	}
	var a archive
	for _, dir := range []string{"bin", "dev", "modules", "proc", "sys", "tmp"} {
		a.add(dir, fs.ModeDir|0o755, nil)
	}
	a.file("init", "init")
	a.file("bin/busybox", busybox)
	a.tree("modules", filepath.Join(kernel, "modules"))
	a.tree("", stage)
	var list strings.Builder
	for _, s := range suites {
		fmt.Fprintf(&list, "%s %d %s\n", s.dir, int(suiteTime.Seconds()), strings.Join(s.command(), " "))
	}
	a.add("suites", 0o644, []byte(list.String()))
	a.add("TRAILER!!!", 0, nil)
	if a.err != nil {
		return a.err
	}
	return os.WriteFile(path, a.b.Bytes(), 0o600)
}

// archive is a cpio archive in the format "newc", as the kernel unpacks it
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type archive struct {
	b     bytes.Buffer
	files int
	err   error // the first
}

func (a *archive) add(name string, mode fs.FileMode, data []byte) {
	const directory, regular = 0o040000, 0o100000 // S_IFDIR, S_IFREG
	bits := regular | uint32(mode.Perm())
	if mode.IsDir() {
		bits = directory | uint32(mode.Perm())
	}
	a.files++
	a.b.WriteString("070701")
	for _, field := range []uint32{
		uint32(a.files), bits, 0, 0, 1, 0, // inode, mode, user, group, links, time
		uint32(len(data)), 0, 0, 0, 0, uint32(len(name) + 1), 0, // size, devices, length of the name, checksum
	} {
		fmt.Fprintf(&a.b, "%08x", field)
	}
	a.b.WriteString(name + "\x00")
	a.pad()
	a.b.Write(data)
	a.pad()
}

func (a *archive) pad() { a.b.Write(make([]byte, -a.b.Len()&3)) }

// file adds one file of this machine.
func (a *archive) file(name, path string) {
	data, err := os.ReadFile(path)
	if err != nil {
		a.err = errors.Join(a.err, err)
		return
	}
	a.add(name, 0o755, data)
}

// tree adds what is in a folder of this machine.
func (a *archive) tree(name, path string) {
	err := fs.WalkDir(os.DirFS(path), ".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || p == ".":
			return err
		case d.IsDir():
			a.add(filepath.Join(name, p), fs.ModeDir|0o755, nil)
		default:
			a.file(filepath.Join(name, p), filepath.Join(path, p))
		}
		return nil
	})
	a.err = errors.Join(a.err, err)
}
