// Package record keeps the figures of the benchmarks: a JSON file for programs and a page for people, written from it.
//
// A [Section] is one benchmark's figures with what they were taken on. Sections are replaced one by one, so the record
// may hold figures of several days; each says of which.
package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
)

// Record is all that was measured.
type Record struct {
	Sections []Section `json:"sections"`
}

// Section is one benchmark's part.
type Section struct {
	Name   string  `json:"name"`
	Title  string  `json:"title"`
	Text   string  `json:"text,omitempty"` // Markdown: what was measured, and how
	Taken  Taken   `json:"taken"`
	Tables []Table `json:"tables"`
}

// Taken says when and on what figures were taken.
type Taken struct {
	Date     time.Time     `json:"date"`
	Seconds  float64       `json:"seconds"` // how long it took
	Commit   string        `json:"commit"`
	Dirty    bool          `json:"dirty,omitempty"` // files were changed since that commit
	Rounds   int           `json:"rounds"`
	Quick    bool          `json:"quick,omitempty"`
	Machine  Machine       `json:"machine"`
	Versions []NamedString `json:"versions"`
	// Busy is the part of the cores that was in use just before, when nothing of the benchmark ran.
	Busy float64 `json:"busy"`
}

// Machine is what it was measured on.
type Machine struct {
	CPU    string  `json:"cpu"`
	Cores  []int   `json:"cores"` // those that were used
	Memory float64 `json:"memory"`
	System string  `json:"system"`
	Load   string  `json:"load"` // the kernel's load averages
}

// NamedString is a version by the name of what has it.
type NamedString struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Table has a row for each thing measured and a column for each side.
type Table struct {
	Caption string   `json:"caption,omitempty"`
	First   string   `json:"first"` // the heading of the rows' names
	Sides   []string `json:"sides"`
	Ratio   string   `json:"ratio,omitempty"` // the heading of the ratios; none: there are none
	Rows    []Row    `json:"rows"`
}

// Row is one thing measured.
type Row struct {
	Name   string         `json:"name"`
	Unit   Unit           `json:"unit"`
	Values []pair.Summary `json:"values"` // one a side
	Ratio  *pair.Summary  `json:"ratio,omitempty"`
	Target *Target        `json:"target,omitempty"`
	Note   string         `json:"note,omitempty"`
}

// Target is a bound that a row is held to.
type Target struct {
	Key     string  `json:"key,omitempty"` // of an entry of [Wanted]
	AtMost  float64 `json:"at_most,omitempty"`
	AtLeast float64 `json:"at_least,omitempty"`
	Seen    float64 `json:"seen"`
	Unit    Unit    `json:"unit,omitempty"` // of the bound; "" for a ratio
}

// Met says whether the bound holds.
func (t Target) Met() bool {
	if t.AtLeast != 0 {
		return t.Seen >= t.AtLeast
	}
	return t.Seen <= t.AtMost
}

// AtMost holds the ratio of a row to a bound.
func (r Row) AtMost(key string, bound float64) Row {
	if r.Ratio != nil {
		r.Target = &Target{Key: key, AtMost: bound, Seen: r.Ratio.Median}
	}
	return r
}

// Compare makes a row of turns: a summary of each side's, and the first side's as a multiple of the second's.
func Compare(name string, unit Unit, metric string, turns []pair.Turns) Row {
	row := Row{Name: name, Unit: unit}
	for _, t := range turns {
		row.Values = append(row.Values, t.Summary(metric))
	}
	if len(turns) > 1 {
		ratio := pair.Ratio(turns[0], turns[1], metric)
		row.Ratio = &ratio
	}
	return row
}

// One makes a row of one number of one side.
func One(name string, unit Unit, v float64) Row {
	return Row{Name: name, Unit: unit, Values: []pair.Summary{pair.Summarize([]float64{v})}}
}

// Names are the sides' names, as a table's heading has them.
func Names(turns []pair.Turns) []string {
	var out []string
	for _, t := range turns {
		out = append(out, t.Name)
	}
	return out
}

// Put adds a section, in place of the one of its name if there is one. New ones come in the order of names; those that
// order does not list stand last.
func (r *Record) Put(s Section, order []string) {
	r.Sections = slices.DeleteFunc(r.Sections, func(o Section) bool { return o.Name == s.Name })
	r.Sections = append(r.Sections, s)
	place := func(s Section) int {
		if i := slices.Index(order, s.Name); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortStableFunc(r.Sections, func(a, b Section) int { return place(a) - place(b) })
}

const jsonName, pageName = "benchmarks.json", "benchmarks.md"

// Load reads the record in a folder. None there is an empty one.
func Load(dir string) (*Record, error) {
	path := filepath.Join(dir, jsonName)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Record{}, nil
	}
	if err != nil {
		return nil, err
	}
	r := new(Record)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s is no record of benchmarks (delete it to begin anew): %w", path, err)
	}
	return r, nil
}

// Save writes the record and its page into a folder.
func (r *Record) Save(dir string) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(r); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, jsonName), text.Bytes(), 0o666),
		os.WriteFile(filepath.Join(dir, pageName), []byte(r.Page()), 0o666))
}
