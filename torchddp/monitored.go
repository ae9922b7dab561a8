package torchddp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/tdp"
)

// MissingRanksError says which ranks did not come to a monitored barrier. Every Go rank that came gets it.
type MissingRanksError struct {
	Ranks   []int // in the group
	Timeout time.Duration
	Err     error // what libtorch said on this rank
}

func (e *MissingRanksError) Error() string {
	text := rankList(e.Ranks)
	return fmt.Sprintf("%s failed to pass monitored_barrier in %v", strings.ToUpper(text[:1])+text[1:], e.Timeout)
}

// Unwrap gives what libtorch said, and ErrTimeout.
func (e *MissingRanksError) Unwrap() []error { return []error{ErrTimeout, e.Err} }

var missingRanks = regexp.MustCompile(`Ranks? ((?:\d+, )*\d+) failed to pass monitoredBarrier`)

// MonitoredBarrier is a barrier in which rank 0 hears from every other rank, so that it can say who did not come: the
// error is a [*MissingRanksError] on rank 0, which tells the others. With [WithAllRanks] rank 0 waits out the timeout
// and names all that are missing. Only Gloo has it, and it takes far longer than Barrier.
func (p *ProcessGroup) MonitoredBarrier(opts ...CallOption) error {
	const op = "monitored_barrier"
	c := call(false, opts)
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.pg == nil {
		return &RankError{Rank: p.rank, Op: op, Err: p.usable()}
	}
	err := p.pg.MonitoredBarrier(c.waitAll, c.Call)
	if err == nil {
		return nil
	}
	if !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrPeer) {
		return &RankError{Rank: p.rank, Op: op, Err: err}
	}
	missing := p.missing(err)
	if len(missing) == 0 {
		return p.failed(op, err)
	}
	return &RankError{Rank: p.rank, Op: op, Err: &MissingRanksError{Ranks: missing, Timeout: orDefault(c.Timeout, p.timeout), Err: err}}
}

// missing reads the ranks in rank 0's error and tells the others, or hears them from it.
func (p *ProcessGroup) missing(err error) (ranks []int) {
	ops, historyErr := p.history()
	if historyErr != nil {
		return nil
	}
	var seq uint64
	for _, o := range ops {
		if o.Op == opNames[tdp.OpMonitoredBarrier] {
			seq = o.Seq
		}
	}
	key := fmt.Sprintf("goddp:missing:%d", seq)
	if p.rank != 0 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		data, err := p.store.Get(ctx, key)
		if err != nil || json.Unmarshal(data, &ranks) != nil {
			return nil
		}
		return ranks
	}
	if m := missingRanks.FindStringSubmatch(err.Error()); m != nil {
		for text := range strings.SplitSeq(m[1], ", ") {
			if r, err := strconv.Atoi(text); err == nil {
				ranks = append(ranks, r)
			}
		}
	}
	if data, err := json.Marshal(ranks); err == nil && len(ranks) > 0 {
		_ = p.store.Set(key, data)
	}
	return ranks
}
