// Package docs holds the documentation to its word: links resolve, Go code compiles, names exist, commands and mistakes
// print what the pages show.
//
// The pages use these marks, which a reader does not see:
//
//	<!-- run -->             the console block after it is run, in a folder with the programs in bin/
//	<!-- message: NAME -->   the block after it is what the mistake of that name prints; see messages_test.go
//	<!-- from: FILE -->      the block after it stands in that file of the repository; "// …" is what lies between
//	<!-- buckets -->         the block after it is what TestBuckets finds
//
// In shown output "…" stands for what was left out, and numbers may be others.
package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the repository.
const root = ".."

// page is a Markdown file.
type page struct {
	path   string // from the repository's root
	text   string
	blocks []block
	prose  string // the text without its blocks
}

// block is fenced code.
type block struct {
	line       int    // of its first line
	lang, mark string // mark is the comment in the line before it
	text       string
}

var (
	fence   = regexp.MustCompile("^ {0,3}```+ *([a-zA-Z]*)")
	comment = regexp.MustCompile(`^<!-- (.*) -->$`)
)

// pages reads README.md and what is under docs.
func pages(t *testing.T) []page {
	t.Helper()
	paths := []string{"README.md"}
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(p) == ".md" {
			paths = append(paths, filepath.Join("docs", p))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var all []page
	for _, p := range paths {
		text, err := os.ReadFile(filepath.Join(root, p))
		if err != nil {
			t.Fatal(err)
		}
		pg, err := parse(p, string(text))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, pg)
	}
	return all
}

// onePage reads a page by its name in this folder.
func onePage(t *testing.T, name string) page {
	t.Helper()
	all := pages(t)
	i := slices.IndexFunc(all, func(p page) bool { return p.path == "docs/"+name })
	if i < 0 {
		t.Fatalf("there is no docs/%s", name)
	}
	return all[i]
}

func parse(path, text string) (page, error) {
	p := page{path: path, text: text}
	var prose strings.Builder
	var open *block
	mark := ""
	for i, line := range strings.Split(text, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case open != nil && m != nil:
			p.blocks = append(p.blocks, *open)
			open = nil
		case open != nil:
			open.text += line + "\n"
		case m != nil:
			open = &block{line: i + 2, lang: m[1], mark: mark}
		default:
			mark = ""
			if c := comment.FindStringSubmatch(line); c != nil {
				mark = c[1]
			}
			prose.WriteString(line)
		}
		prose.WriteByte('\n')
	}
	if open != nil {
		return p, fmt.Errorf("%s:%d: the code block has no end", path, open.line)
	}
	p.prose = prose.String()
	return p, nil
}

var (
	link       = regexp.MustCompile(`\]\(([^)\s]+)(?: "[^"]*")?\)|<img[^>]* src="([^"]+)"`)
	heading    = regexp.MustCompile(`(?m)^#{1,6} +(.*?) *$`)
	notInSlugs = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// slugs are the names by which GitHub links to a page's headings.
func (p page) slugs() map[string]bool {
	all := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(p.prose, -1) {
		slug := strings.ReplaceAll(notInSlugs.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")
		name := slug
		for n := 1; all[name]; n++ {
			name = fmt.Sprintf("%s-%d", slug, n)
		}
		all[name] = true
	}
	return all
}

func TestLinks(t *testing.T) {
	all := pages(t)
	slugs := map[string]map[string]bool{}
	for _, p := range all {
		slugs[p.path] = p.slugs()
	}
	for _, p := range all {
		for _, m := range link.FindAllStringSubmatch(span.ReplaceAllString(p.prose, ""), -1) {
			target := m[1] + m[2]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(target, "#")
			to := p.path
			if file != "" {
				to = filepath.Join(filepath.Dir(p.path), file)
			}
			if _, err := os.Stat(filepath.Join(root, to)); err != nil {
				t.Errorf("%s: link to %s: %v", p.path, target, err)
				continue
			}
			if names, ok := slugs[to]; ok && anchor != "" && !names[anchor] {
				t.Errorf("%s: link to %s: the page has no such heading", p.path, target)
			}
		}
	}
}

var digits = regexp.MustCompile(`-?[0-9][0-9,]*(\.[0-9]+)?(e[-+][0-9]+)?(ns|µs|ms|s|h)?\b`)

// plain takes out of a line of output what differs from run to run.
func plain(line string) string {
	return strings.Join(strings.Fields(digits.ReplaceAllString(line, "N")), " ")
}

// pattern matches a line as a page shows it.
func pattern(shown string) *regexp.Regexp {
	parts := strings.Split(plain(shown), "…")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(parts[i])
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$")
}

// missing are the lines that a page shows and a program did not print. Their order is left open: ranks print when they
// like.
func missing(shown, printed string) []string {
	var lines []string
	for line := range strings.Lines(printed) {
		lines = append(lines, plain(line))
	}
	var gone []string
	for line := range strings.Lines(shown) {
		if strings.Trim(line, "… \n") == "" {
			continue
		}
		i := slices.IndexFunc(lines, pattern(line).MatchString)
		if i < 0 {
			gone = append(gone, strings.TrimSpace(line))
			continue
		}
		lines = slices.Delete(lines, i, i+1)
	}
	return gone
}

// The checks themselves, on text that is wrong.
func TestWhatIsMissing(t *testing.T) {
	printed := "[CPU1] Epoch 0 | Steps: 32\n[CPU0] Epoch 0 | Steps: 32\nrank 1: broadcast, 2.007s ago at a.go:3\n"
	for shown, want := range map[string]int{
		"[CPU0] Epoch 0 | Steps: 32\n[CPU1] Epoch 0 | Steps: 32\n":                        0,
		"[CPU0] Epoch 0 | Steps: 32\n…\nrank 0: …, 5ms ago at a.go:99\n":                  0,
		"[GPU0] Epoch 0 | Steps: 32\n":                                                    1,
		"[CPU0] Epoch 0\n":                                                                1,
		"[CPU0] Epoch 0 | …\n[CPU0] Epoch 0 | …\n[CPU0] Epoch 0 | …\nrank 9: all_reduce…": 2,
	} {
		if got := missing(shown, printed); len(got) != want {
			t.Errorf("%q: %d lines missing (%q), want %d", shown, len(got), got, want)
		}
	}
	p, err := parse("x.md", "# A `b` c!\n<!-- run -->\n```console\n$ ls\n```\n# A b c\n")
	if err != nil || len(p.blocks) != 1 || p.blocks[0].mark != "run" || p.blocks[0].text != "$ ls\n" {
		t.Errorf("parsed as %+v, %v", p, err)
	}
	if s := p.slugs(); !s["a-b-c"] || !s["a-b-c-1"] {
		t.Errorf("headings' names: %v", s)
	}
	if _, err := parse("x.md", "```go\n"); err == nil {
		t.Error("a block without end was taken")
	}
}
