package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
)

var (
	programs = regexp.MustCompile(`\bbin/([a-z0-9]+)`)
	peers    = regexp.MustCompile(`\b(python|torchrun) `)
)

// TestCommands runs the console blocks that are marked so, and looks for the lines that they show. All blocks of a page
// run in one folder, from the first to the last.
func TestCommands(t *testing.T) {
	if n := launch.GPUs().Count(); n > 0 {
		t.Skipf("the pages show what a machine without a GPU prints; this one has %d", n)
	}
	bin := t.TempDir()
	built := map[string]bool{}
	found := 0
	for _, p := range pages(t) {
		var marked []block
		for _, b := range p.blocks {
			if b.lang == "console" && b.mark == "run" {
				marked = append(marked, b)
			}
		}
		found += len(marked)
		if len(marked) == 0 {
			continue
		}
		t.Run(p.path, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Symlink(bin, filepath.Join(dir, "bin")); err != nil {
				t.Fatal(err)
			}
			for _, b := range marked {
				for _, m := range programs.FindAllStringSubmatch(b.text, -1) {
					if !built[m[1]] {
						build(t, bin, m[1])
						built[m[1]] = true
					}
				}
				for _, c := range split(b.text) {
					env := os.Environ()
					if peers.MatchString(c.line) {
						env = append(env, "PATH="+filepath.Dir(testenv.Python(t))+":"+os.Getenv("PATH"))
					}
					cmd := exec.CommandContext(t.Context(), "sh", "-c", c.line)
					cmd.Dir, cmd.Env = dir, env
					out, err := cmd.CombinedOutput()
					if gone := missing(c.shown, string(out)); len(gone) > 0 {
						t.Errorf("%s:%d: $ %s (%v)\ndid not print\n\t%s\nbut\n%s",
							p.path, b.line, c.line, err, strings.Join(gone, "\n\t"), out)
					}
				}
			}
		})
	}
	if found == 0 {
		t.Error("no commands were found")
	}
}

func build(t *testing.T, bin, name string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "./cmd/"+name)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build ./cmd/%s: %v\n%s", name, err, out)
	}
}

// command is a line after "$ ", and what it prints.
type command struct{ line, shown string }

// split cuts a console block into its commands. A command goes on after a backslash at its end.
func split(text string) []command {
	var all []command
	more := false
	for line := range strings.Lines(text) {
		switch {
		case more:
			all[len(all)-1].line += line
		case strings.HasPrefix(line, "$ "):
			all = append(all, command{line: line[2:]})
		case len(all) > 0:
			all[len(all)-1].shown += line
		}
		more = len(all) > 0 && all[len(all)-1].shown == "" && strings.HasSuffix(strings.TrimSpace(line), `\`)
	}
	return all
}
