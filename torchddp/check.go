package torchddp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
)

// The construction check.
//
// Python's DDP compares the number of parameters by an all-gather, then their sizes with rank 0's by a broadcast, and
// a rank that finds a difference raises while the others go on and hang. Ours decides on every rank alike: each rank
// puts a hash of its whole signature into the store, all read all hashes, and where two differ the signatures
// themselves are exchanged and every rank reports the same first difference.
//
// A Python rank in the group does not take part in that. Go ranks make Python's collectives at Python's places, and
// know by the store who is a Go rank: each says so (memberKey) before it connects, and the all-gather of counts,
// which comes before the look at the hashes, ends only when every rank has come this far.

func memberKey(rank int) string { return "goddp:member:" + strconv.Itoa(rank) }

// signature is what ranks must agree on.
type signature struct {
	Problem string        `json:"problem,omitempty"` // why this rank cannot build its DDP at all
	Options string        `json:"options"`
	Params  []tensorShape `json:"params"` // those that are trained
	Frozen  []tensorShape `json:"frozen"`
	Buffers []tensorShape `json:"buffers"`
}

type tensorShape struct {
	Name         string  `json:"name"`
	DType        string  `json:"dtype"`
	Shape        []int64 `json:"shape"`
	Stride       []int64 `json:"stride"`
	RequiresGrad bool    `json:"requires_grad"`
}

func (t tensorShape) String() string {
	return fmt.Sprintf("%q %s%v", t.Name, t.DType, t.Shape)
}

func describe(n Named) (tensorShape, gotch.Device, error) {
	info, err := tdp.Describe(n.Tensor)
	if err != nil {
		return tensorShape{}, gotch.CPU, fmt.Errorf("%s: %w", n.Name, err)
	}
	if !info.Defined {
		return tensorShape{}, gotch.CPU, valueErrorf("%s is an undefined tensor: run a dummy forward to initialise it, or drop it", n.Name)
	}
	return tensorShape{n.Name, tdp.DTypeName(info.DType), info.Shape, info.Stride, info.RequiresGrad}, info.Device, nil
}

// groupRanks names sets of ranks: "ranks 0, 2" and so on.
func rankList(ranks []int) string {
	text := make([]string, len(ranks))
	for i, r := range ranks {
		text[i] = strconv.Itoa(r)
	}
	if len(ranks) == 1 {
		return "rank " + text[0]
	}
	return "ranks " + strings.Join(text, ", ")
}

// byValue tells, in the order of ranks, which ranks have which text.
func byValue(ranks []int, value func(rank int) string) string {
	var order []string
	who := map[string][]int{}
	for _, r := range ranks {
		v := value(r)
		if _, seen := who[v]; !seen {
			order = append(order, v)
		}
		who[v] = append(who[v], r)
	}
	parts := make([]string, len(order))
	for i, v := range order {
		parts[i] = rankList(who[v]) + ": " + v
	}
	return strings.Join(parts, "; ")
}

// compare finds the first difference between signatures, in an order that is the same on every rank.
func compare(sigs map[int]signature) *MismatchError {
	ranks := make([]int, 0, len(sigs))
	for r := range sigs {
		ranks = append(ranks, r)
	}
	slices.Sort(ranks)
	first := sigs[ranks[0]]
	differ := func(name, what string, value func(signature) string) *MismatchError {
		for _, r := range ranks[1:] {
			if value(sigs[r]) != value(first) {
				return &MismatchError{Parameter: name, What: what, Detail: byValue(ranks, func(r int) string { return value(sigs[r]) })}
			}
		}
		return nil
	}
	for _, r := range ranks {
		if sigs[r].Problem != "" {
			return &MismatchError{What: "error", Detail: byValue(ranks, func(r int) string { return orDefault(sigs[r].Problem, "no error") })}
		}
	}
	lists := []struct {
		kind string
		of   func(signature) []tensorShape
	}{
		{"trained parameters", func(s signature) []tensorShape { return s.Params }},
		{"frozen parameters", func(s signature) []tensorShape { return s.Frozen }},
		{"buffers", func(s signature) []tensorShape { return s.Buffers }},
	}
	// A parameter that is trained here and frozen there would show as two different counts: say it by its name.
	for _, p := range first.Params {
		for _, r := range ranks[1:] {
			for _, f := range sigs[r].Frozen {
				if f.Name == p.Name {
					return differ(p.Name, "requires_grad", func(s signature) string {
						return fmt.Sprintf("requires_grad=%t", !slices.ContainsFunc(s.Frozen, func(t tensorShape) bool { return t.Name == p.Name }))
					})
				}
			}
		}
	}
	for _, l := range lists {
		at := func(s signature, i int) (tensorShape, bool) {
			if list := l.of(s); i < len(list) {
				return list[i], true
			}
			return tensorShape{}, false
		}
		longest := 0
		for _, r := range ranks {
			longest = max(longest, len(l.of(sigs[r])))
		}
		for i := range longest {
			name := ""
			for _, r := range ranks {
				if t, ok := at(sigs[r], i); ok {
					name = t.Name
					break
				}
			}
			field := func(what string, f func(tensorShape) string) *MismatchError {
				return differ(name, what, func(s signature) string {
					t, ok := at(s, i)
					if !ok {
						return fmt.Sprintf("only %d %s", len(l.of(s)), l.kind)
					}
					return f(t)
				})
			}
			if len(l.of(first)) != longest || !allHave(ranks, func(r int) bool { _, ok := at(sigs[r], i); return ok }) {
				// The counts differ: name the first place where the lists part.
				if m := field("name", func(t tensorShape) string { return t.String() }); m != nil {
					m.What = "count"
					return m
				}
				continue
			}
			for _, m := range []*MismatchError{
				field("name", func(t tensorShape) string { return fmt.Sprintf("%q", t.Name) }),
				field("shape", func(t tensorShape) string { return fmt.Sprint(t.Shape) }),
				field("dtype", func(t tensorShape) string { return t.DType }),
				field("stride", func(t tensorShape) string { return fmt.Sprint(t.Stride) }),
				field("requires_grad", func(t tensorShape) string { return fmt.Sprint(t.RequiresGrad) }),
			} {
				if m != nil {
					return m
				}
			}
		}
	}
	return differ("", "options", func(s signature) string { return s.Options })
}

func allHave(ranks []int, has func(int) bool) bool {
	for _, r := range ranks {
		if !has(r) {
			return false
		}
	}
	return true
}

// checkSameModel compares this rank's signature with all others'. params are the trained parameters.
func (p *ProcessGroup) checkSameModel(sig signature, params *tdp.Handles) error {
	p.ddps++
	key := func(kind string, rank int) string { return fmt.Sprintf("goddp:ddp:%d:%s:%d", p.ddps, kind, rank) }
	text, err := json.Marshal(sig)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	if err := p.store.Set(key("hash", p.rank), []byte(hex.EncodeToString(sum[:]))); err != nil {
		return err
	}
	var counts []int64
	err = p.run("DDP: comparing the number of parameters", func(pg *tdp.ProcessGroup) (err error) {
		counts, err = pg.VerifyParamCounts(p.device, len(params.Tensors()), p.size)
		return err
	})
	if err != nil {
		return err
	}

	// Who else is a Go rank? Only those have hashes.
	var peers []int
	var hashKeys []string
	for r := range p.size {
		known, err := p.store.Check(memberKey(r))
		if err != nil {
			return err
		}
		if known {
			peers = append(peers, r)
			hashKeys = append(hashKeys, key("hash", r))
		}
	}
	hashes, err := p.store.MultiGet(hashKeys...)
	if err != nil {
		return err
	}
	same := true
	for _, h := range hashes {
		same = same && string(h) == string(hashes[0])
	}
	if !same || sig.Problem != "" {
		return p.explainMismatch(peers, key, text)
	}
	for _, n := range counts {
		if n != counts[0] {
			return &MismatchError{What: "count", Detail: byValue(seq(p.size), func(r int) string { return fmt.Sprintf("%d parameters", counts[r]) })}
		}
	}
	// Python's second collective.
	bad := -1
	err = p.run("DDP: comparing parameter shapes", func(pg *tdp.ProcessGroup) (err error) {
		bad, err = pg.VerifyParamShapes(params)
		return err
	})
	if err != nil {
		return err
	}
	if bad >= 0 {
		return &MismatchError{Parameter: sig.Params[bad].Name, What: "shape", Detail: fmt.Sprintf("rank %d has %v with strides %v, rank 0 has another", p.rank, sig.Params[bad].Shape, sig.Params[bad].Stride)}
	}
	return nil
}

// explainMismatch exchanges whole signatures and waits until every Go rank has read them, so that no rank's exit
// takes the store away from the others.
func (p *ProcessGroup) explainMismatch(peers []int, key func(string, int) string, text []byte) error {
	const patience = 30 * time.Second
	ctx := context.Background()
	if err := p.store.Set(key("sig", p.rank), text); err != nil {
		return err
	}
	sigs := map[int]signature{}
	for _, r := range peers {
		if err := p.store.Wait(ctx, patience, key("sig", r)); err != nil {
			return err
		}
		data, err := p.store.Get(ctx, key("sig", r))
		if err != nil {
			return err
		}
		var s signature
		if err := json.Unmarshal(data, &s); err != nil {
			return err
		}
		sigs[r] = s
	}
	mismatch := compare(sigs)
	if err := p.store.Set(key("read", p.rank), nil); err != nil {
		return err
	}
	for _, r := range peers {
		if err := p.store.Wait(ctx, patience, key("read", r)); err != nil {
			break // a peer died meanwhile: our own finding is still right
		}
	}
	if mismatch == nil {
		return fmt.Errorf("internal error: model signatures hash differently but compare equal")
	}
	return mismatch
}

func seq(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}
