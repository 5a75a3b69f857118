package cli

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// beCLI makes the test binary the program itself, for tests that start it.
const beCLI = "FLOWSWEEP_TEST_AS_PROGRAM"

func init() {
	if os.Getenv(beCLI) != "" {
		os.Exit(Main())
	}
}

var update = flag.Bool("update", false, "rewrite the expected output in testdata/script")

// raceEnabled: the race detector multiplies memory.
var raceEnabled bool

// program returns a command that runs this build of flowsweep.
func program(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), beCLI+"=1")
	return cmd
}

func TestScripts(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/script",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			bin := filepath.Join(env.WorkDir, ".bin")
			if err := os.Mkdir(bin, 0o777); err != nil {
				return err
			}
			env.Setenv("PATH", bin+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv(beCLI, "1")
			return os.Symlink(self, filepath.Join(bin, "flowsweep"))
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// exits CODE PROGRAM ARG...: run, and want that exit code.
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				want, err := strconv.Atoi(args[0])
				ts.Check(err)
				err = ts.Exec(args[1], args[2:]...)
				code := 0
				if ee := (*exec.ExitError)(nil); errors.As(err, &ee) {
					code = ee.ExitCode()
				} else {
					ts.Check(err)
				}
				if code != want {
					ts.Fatalf("exit code %d, want %d", code, want)
				}
			},
		},
	})
}
