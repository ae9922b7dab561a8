package gotchprep

import (
	"fmt"
	"regexp"
	"strings"
)

// cfunc is the prototype of one function of gotch's C ABI.
type cfunc struct {
	name   string
	ret    string // "void", "tensor", "tensor *", ...
	params []cparam
	// outs is how many tensors the function writes through its first parameter, 0 if it has no such parameter.
	outs int
}

type cparam struct{ typ, name string }

var (
	cComment  = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	cWord     = regexp.MustCompile(`[A-Za-z_]\w*|\*`)
	cFuncPtr  = regexp.MustCompile(`^void \(\*(\w+)\)\(.*\)$`)
	cppOutput = regexp.MustCompile(`\bout__\[(\d+)\] =`)
)

// parseHeader reads the prototypes of a C header, as a C compiler sees it (not C++).
func parseHeader(text string) ([]*cfunc, error) {
	text = cComment.ReplaceAllString(text, "")
	var b strings.Builder
	skip := []bool{false}
	for _, line := range strings.Split(text, "\n") {
		t := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(t, "#ifdef __cplusplus"):
			skip = append(skip, true)
		case strings.HasPrefix(t, "#if"):
			skip = append(skip, skip[len(skip)-1])
		case strings.HasPrefix(t, "#else"):
			skip[len(skip)-1] = !skip[len(skip)-1]
		case strings.HasPrefix(t, "#endif"):
			skip = skip[:len(skip)-1]
		case strings.HasPrefix(t, "#"), skip[len(skip)-1]:
		default:
			b.WriteString(line + " ")
		}
		if len(skip) == 0 {
			return nil, fmt.Errorf("unbalanced #endif")
		}
	}
	var out []*cfunc
	for _, decl := range strings.Split(b.String(), ";") {
		decl = strings.Join(strings.Fields(decl), " ")
		if decl == "" || strings.HasPrefix(decl, "typedef ") {
			continue
		}
		f, err := parsePrototype(decl)
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, nil
}

func parsePrototype(decl string) (*cfunc, error) {
	open := strings.IndexByte(decl, '(')
	if open < 0 || !strings.HasSuffix(decl, ")") {
		return nil, fmt.Errorf("not a prototype: %q", decl)
	}
	head := cWord.FindAllString(decl[:open], -1)
	if len(head) < 2 {
		return nil, fmt.Errorf("not a prototype: %q", decl)
	}
	f := &cfunc{name: head[len(head)-1], ret: strings.Join(head[:len(head)-1], " ")}
	args, depth, from := decl[open+1:len(decl)-1], 0, 0
	add := func(p string) error {
		p = strings.TrimSpace(p)
		if m := cFuncPtr.FindStringSubmatch(p); m != nil {
			f.params = append(f.params, cparam{"callback", m[1]})
			return nil
		}
		words := cWord.FindAllString(p, -1)
		if len(words) == 0 {
			return fmt.Errorf("not a parameter: %q in %q", p, decl)
		}
		name := fmt.Sprintf("a%d", len(f.params))
		if last := words[len(words)-1]; len(words) > 1 && last != "*" {
			name, words = last, words[:len(words)-1]
		}
		f.params = append(f.params, cparam{strings.Join(words, " "), name})
		return nil
	}
	if strings.TrimSpace(args) == "" {
		return f, nil
	}
	for i := 0; i <= len(args); i++ {
		switch {
		case i == len(args) || args[i] == ',' && depth == 0:
			if err := add(args[from:i]); err != nil {
				return nil, err
			}
			from = i + 1
		case args[i] == '(':
			depth++
		case args[i] == ')':
			depth--
		}
	}
	return f, nil
}
