package torchddp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/goddp/goddp/internal/tdp"
)

// What the ranks did last.
//
// Every group keeps its last operations in a ring (csrc/tdp/history.h). When a collective of a rank times out or loses
// its peer, the rank asks all others through the world's store, and they answer with their rings: those that wait in a
// collective as well as those that compute, because a goroutine of each (the responder) listens on a connection of its
// own. The error then shows them side by side.

// OpRecord is an operation that a rank started in a group.
type OpRecord struct {
	Seq     uint64        `json:"seq"` // counts the group's collectives from 1, and apart from them sends and receives
	Op      string        `json:"op"`
	State   string        `json:"state"` // "done", "failed", or "started": nobody has seen its end
	DType   string        `json:"dtype,omitempty"`
	Shape   []int64       `json:"shape,omitempty"` // of the first tensor
	Tensors int           `json:"tensors,omitempty"`
	Peer    int           `json:"peer"`           // root, source or destination in the group; -1: none
	Site    string        `json:"site,omitempty"` // file:line of the program, or "" for what DDP's reducer started
	Age     time.Duration `json:"age"`            // since it started
}

// What is the operation with its tensor, without numbers and places.
func (o OpRecord) what() string {
	var b strings.Builder
	b.WriteString(o.Op)
	if o.DType != "" {
		fmt.Fprintf(&b, " %s%v", o.DType, o.Shape)
	}
	if o.Tensors > 1 {
		fmt.Fprintf(&b, " and %d more", o.Tensors-1)
	}
	if o.Peer >= 0 {
		switch o.Op {
		case "send":
			fmt.Fprintf(&b, " to %d", o.Peer)
		case "recv":
			fmt.Fprintf(&b, " from %d", o.Peer)
		default:
			fmt.Fprintf(&b, " root %d", o.Peer)
		}
	}
	return b.String()
}

func (o OpRecord) String() string {
	where := "by DDP"
	if o.Site != "" {
		where = "at " + o.Site
	}
	return fmt.Sprintf("#%d %s, %s, %v ago %s", o.Seq, o.what(), o.State, o.Age.Round(time.Millisecond), where)
}

// fits tells whether two ranks' operations belong together.
func (o OpRecord) fits(p OpRecord) bool {
	if o.Op != p.Op || o.DType != p.DType || o.Peer != p.Peer || o.Tensors != p.Tensors {
		return false
	}
	switch o.Op {
	case "all_to_all", "all_to_all_single", "all_gather": // the ranks' inputs may differ
		return true
	}
	return slices.Equal(o.Shape, p.Shape)
}

func (o OpRecord) pointToPoint() bool { return o.Op == "send" || o.Op == "recv" }

// c10d::OpType in Python's names.
var opNames = map[int]string{
	0: "broadcast", 1: "all_reduce", 2: "all_reduce_coalesced", 3: "reduce", 4: "all_gather", 5: "all_gather_into_tensor",
	6: "all_gather_coalesced", 7: "gather", 8: "scatter", 9: "reduce_scatter", 10: "all_to_all_single", 11: "all_to_all",
	12: "send", 13: "recv", 14: "recv", 15: "barrier", 16: "reduce_scatter_tensor", 17: "reduce_scatter_tensor_coalesced",
	tdp.OpMonitoredBarrier: "monitored_barrier",
}

// siteName resolves a program counter to dir/file.go:line.
func siteName(pc uintptr) string {
	if pc == 0 {
		return ""
	}
	frame, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	if frame.File == "" {
		return ""
	}
	return filepath.Join(filepath.Base(filepath.Dir(frame.File)), filepath.Base(frame.File)) + ":" + strconv.Itoa(frame.Line)
}

// History gives the last operations of this rank in the group, oldest first: at most 64.
func (p *ProcessGroup) History() ([]OpRecord, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.history()
}

// history is History where p.mu is held.
func (p *ProcessGroup) history() ([]OpRecord, error) {
	if p.pg == nil {
		return nil, &RankError{Rank: p.rank, Op: "history", Err: p.usable()}
	}
	entries, err := p.pg.History()
	if err != nil {
		return nil, err
	}
	list := make([]OpRecord, len(entries))
	for i, e := range entries {
		state := "started"
		switch e.State {
		case tdp.Done:
			state = "done"
		case tdp.Failed:
			state = "failed"
		}
		name, ok := opNames[e.Op]
		if !ok {
			name = "operation " + strconv.Itoa(e.Op)
		}
		list[i] = OpRecord{Seq: e.Seq, Op: name, State: state, Peer: e.Peer, Site: siteName(e.Site), Age: e.Age}
		if e.DType >= 0 {
			list[i].DType, list[i].Shape, list[i].Tensors = tdp.DTypeName(e.DType), e.Shape, e.Tensors
			if list[i].Shape == nil {
				list[i].Shape = []int64{}
			}
		}
	}
	return list, nil
}

// RankReport is what one rank did last in a group.
type RankReport struct {
	Rank int        `json:"rank"` // in the group
	Ops  []OpRecord `json:"ops"`  // oldest first
	// Missing says why there is no report, or is "".
	Missing string `json:"-"`
}

// last gives the newest collective, or point-to-point operation.
func (r RankReport) last(p2p bool) (OpRecord, bool) {
	for _, o := range slices.Backward(r.Ops) {
		if o.pointToPoint() == p2p {
			return o, true
		}
	}
	return OpRecord{}, false
}

func (r RankReport) at(seq uint64) (OpRecord, bool) {
	for _, o := range slices.Backward(r.Ops) {
		if !o.pointToPoint() && o.Seq == seq {
			return o, true
		}
	}
	return OpRecord{}, false
}

// CollectiveError is a collective that timed out, lost its peer, or met another one, with what all ranks did last.
type CollectiveError struct {
	Group string
	Op    OpRecord // this rank's operation
	Err   error
	Ranks []RankReport // by rank
}

// Unwrap gives the cause.
func (e *CollectiveError) Unwrap() error { return e.Err }

func (e *CollectiveError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s #%d of group %s", e.Op.what(), e.Op.Seq, e.Group)
	if e.Op.Site != "" {
		fmt.Fprintf(&b, " at %s", e.Op.Site)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if d := e.Diagnosis(); d != "" {
		fmt.Fprintf(&b, "\n%s", d)
	}
	if len(e.Ranks) > 0 {
		b.WriteString("\nwhat the ranks did last:")
	}
	for _, r := range e.Ranks {
		fmt.Fprintf(&b, "\n  rank %d: ", r.Rank)
		if r.Missing != "" {
			b.WriteString(r.Missing)
			continue
		}
		if len(r.Ops) == 0 {
			b.WriteString("no operation in this group yet")
		}
		const shown = 3
		for i, o := range r.Ops[max(0, len(r.Ops)-shown):] {
			if i > 0 {
				b.WriteString("\n          ")
			}
			b.WriteString(o.String())
		}
	}
	return b.String()
}

// Diagnosis says in one sentence where the ranks part, or "" where the reports do not tell.
func (e *CollectiveError) Diagnosis() string {
	if e.Op.pointToPoint() {
		return ""
	}
	var behind, other []int
	var ahead []int
	for _, r := range e.Ranks {
		if r.Missing != "" {
			continue
		}
		last, ok := r.last(false)
		switch {
		case !ok || last.Seq < e.Op.Seq:
			behind = append(behind, r.Rank)
		case last.Seq > e.Op.Seq:
			ahead = append(ahead, r.Rank)
		}
		if o, ok := r.at(e.Op.Seq); ok && !e.Op.fits(o) {
			other = append(other, r.Rank)
		}
	}
	switch {
	case len(other) > 0:
		var parts []string
		for _, r := range e.Ranks {
			if o, ok := r.at(e.Op.Seq); ok && slices.Contains(other, r.Rank) {
				site := ""
				if o.Site != "" {
					site = " at " + o.Site
				}
				parts = append(parts, fmt.Sprintf("rank %d ran %s%s", r.Rank, o.what(), site))
			}
		}
		return fmt.Sprintf("the ranks differ in collective #%d: this rank ran %s, but %s", e.Op.Seq, e.Op.what(), strings.Join(parts, "; "))
	case len(behind) > 0:
		verb := "has"
		if len(behind) > 1 {
			verb = "have"
		}
		return fmt.Sprintf("%s %s not come to collective #%d", rankList(behind), verb, e.Op.Seq)
	case len(ahead) > 0:
		return fmt.Sprintf("%s went on after collective #%d without this rank", rankList(ahead), e.Op.Seq)
	}
	return ""
}

// patience is how long a failed collective waits for the other ranks' reports.
const patience = 2 * time.Second

const reportedOps = 8

func requestKey(n int64) string { return "goddp:request:" + strconv.FormatInt(n, 10) }
func reportKey(n int64, globalRank int) string {
	return fmt.Sprintf("goddp:report:%d:%d", n, globalRank)
}

// failed explains an error of this group's operation. p.mu is held for reading.
func (p *ProcessGroup) failed(op string, err error) error {
	if !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrPeer) && !errors.Is(err, ErrDesync) || errors.Is(err, ErrCancelled) {
		return &RankError{Rank: p.rank, Op: op, Err: err}
	}
	mine, historyErr := p.history()
	if historyErr != nil || len(mine) == 0 {
		return &RankError{Rank: p.rank, Op: op, Err: err}
	}
	e := &CollectiveError{Group: p.name, Err: err, Op: mine[len(mine)-1]}
	// The operation that failed is the newest failed one of this name; others may have started since.
	for _, o := range slices.Backward(mine) {
		if o.State == "failed" {
			e.Op = o
			break
		}
	}
	e.Ranks = p.reports(mine, e.Op)
	return &RankError{Rank: p.rank, Op: op, Err: e}
}

// reports asks all ranks of the group what they did last. It takes patience at most, whatever the state of the store.
func (p *ProcessGroup) reports(mine []OpRecord, op OpRecord) []RankReport {
	list := make([]RankReport, p.size)
	for r := range list {
		list[r] = RankReport{Rank: r, Missing: "no report (it ended, cannot be reached, or is not a Go rank)"}
	}
	list[p.rank] = RankReport{Rank: p.rank, Ops: mine[max(0, len(mine)-reportedOps):]}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// The store's own connection may be busy or broken: a second one, in a goroutine that may outlive us.
	clone, err := cancellable(ctx, "asking the other ranks", p.job.world.store.clone, func(s *Store) { _ = s.Close() })
	if err != nil {
		return list
	}
	found := make(chan RankReport, p.size)
	go func() {
		defer close(found)
		defer clone.Close()
		p.ask(ctx, clone, list[p.rank], op, found)
	}()
	for {
		select {
		case r, ok := <-found:
			if !ok {
				return list
			}
			list[r.Rank] = r
		case <-ctx.Done():
			return list
		}
	}
}

// ask sends what comes back to found.
func (p *ProcessGroup) ask(ctx context.Context, store *Store, own RankReport, op OpRecord, found chan<- RankReport) {
	if store.SetTimeout(patience) != nil {
		return
	}
	// Ranks that fail in the same operation ask once together.
	incident := fmt.Sprintf("goddp:incident:%s:%s:%t:%d", p.job.world.name, p.name, op.pointToPoint(), op.Seq)
	first, err := store.Add(incident, 1)
	if err != nil {
		return
	}
	numberKey := incident + ":number"
	var n int64
	if first == 1 {
		if n, err = store.Add("goddp:requests", 1); err != nil {
			return
		}
		if err := errors.Join(store.Set(requestKey(n), []byte(p.name)), store.Set(numberKey, []byte(strconv.FormatInt(n, 10)))); err != nil {
			return
		}
	} else {
		text, err := store.Get(ctx, numberKey)
		if err != nil {
			return
		}
		if n, err = strconv.ParseInt(string(text), 10, 64); err != nil {
			return
		}
	}
	// Said by hand as well, for stores that the responder cannot listen on.
	if data, err := json.Marshal(own); err == nil {
		_ = store.Set(reportKey(n, p.ranks[p.rank]), data)
	}
	for r, global := range p.ranks {
		if r == p.rank {
			continue
		}
		data, err := store.Get(ctx, reportKey(n, global))
		if err != nil {
			if ctx.Err() != nil || !errors.Is(err, ErrTimeout) {
				return
			}
			continue
		}
		var report RankReport
		if json.Unmarshal(data, &report) == nil {
			report.Rank = r
			found <- report
		}
	}
}

// responder answers other ranks' requests for reports while this rank computes.
type responder struct{ stopped atomic.Bool }

func (r *responder) stop() {
	if r != nil {
		r.stopped.Store(true)
	}
}

// answerRequests starts the world's responder. It listens on a connection of its own, in slices after which it looks
// whether the group is still there; so it outlives the group by one slice at most.
func answerRequests(world *ProcessGroup) *responder {
	r := &responder{}
	if world.size == 1 || world.rebuild.polls() {
		return r
	}
	store, err := world.store.clone()
	if err != nil {
		return r // the job runs without
	}
	const slice = 5 * time.Second
	job := world.job
	go func() {
		defer store.Close()
		for n := int64(1); !r.stopped.Load(); {
			err := store.use(func(h *tdp.Store) error { return h.Wait(slice, requestKey(n)) })
			if errors.Is(err, ErrTimeout) {
				continue
			}
			if err != nil || r.stopped.Load() {
				return // the store is gone
			}
			name, err := store.Get(context.Background(), requestKey(n))
			if err != nil {
				return
			}
			if p := job.find(string(name)); p != nil {
				p.answer(store, n)
			}
			n++
		}
	}()
	return r
}

// answer posts this rank's report. It does not wait for a Destroy in progress.
func (p *ProcessGroup) answer(store *Store, n int64) {
	if !p.mu.TryRLock() {
		return
	}
	ops, err := p.history()
	p.mu.RUnlock()
	if err != nil {
		return
	}
	if data, err := json.Marshal(RankReport{Rank: p.rank, Ops: ops[max(0, len(ops)-reportedOps):]}); err == nil {
		_ = store.Set(reportKey(n, p.ranks[p.rank]), data)
	}
}

// polls tells whether the store's waits are loops over a file, which a listener should not sit in.
func (o InitOptions) polls() bool { return strings.HasPrefix(o.InitMethod, "file:") }
