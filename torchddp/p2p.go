package torchddp

import (
	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch/ts"
)

// AnySource lets a receive take what any rank sends.
const AnySource = -1

func (p *ProcessGroup) notSelf(rank int, kind string) error {
	if rank == p.rank {
		return &RankError{Rank: p.rank, Op: kind, Err: valueErrorf("Invalid %s rank: it should not be the rank of the current process", kind)}
	}
	return nil
}

// Send gives t to rank dst, which receives it with Recv or Irecv and the same tag.
func (p *ProcessGroup) Send(t *ts.Tensor, dst int, opts ...CallOption) error {
	c := call(false, opts)
	if err := p.notSelf(dst, "destination"); err != nil {
		return err
	}
	_, err := p.send(t, dst, c)
	return err
}

// Isend starts a Send. It may go to the rank itself.
func (p *ProcessGroup) Isend(t *ts.Tensor, dst int, opts ...CallOption) (*Work, error) {
	return p.send(t, dst, call(true, opts))
}

func (p *ProcessGroup) send(t *ts.Tensor, dst int, c callInfo) (*Work, error) {
	return p.start("send", func(pg *tdp.ProcessGroup) (*tdp.Work, error) { return pg.Send(t, dst, c.tag, c.Call) })
}

// Recv fills t with what rank src sent, or with [AnySource] whoever did, and gives the sender.
func (p *ProcessGroup) Recv(t *ts.Tensor, src int, opts ...CallOption) (sender int, err error) {
	c := call(false, opts)
	if err := p.notSelf(src, "source"); err != nil {
		return -1, err
	}
	_, err = p.start("recv", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		var w *tdp.Work
		sender, w, err = pg.Recv(t, checkSource(src), c.tag, c.Call)
		return w, err
	})
	if err != nil {
		return -1, err
	}
	return sender, nil
}

// checkSource keeps other negative numbers from meaning AnySource.
func checkSource(src int) int {
	if src < 0 && src != AnySource {
		return int(^uint32(0) >> 1) // no rank: refused with its number out of range
	}
	return src
}

// Irecv starts a Recv. With [AnySource], Work.Source tells after Wait who sent.
func (p *ProcessGroup) Irecv(t *ts.Tensor, src int, opts ...CallOption) (*Work, error) {
	c := call(true, opts)
	return p.start("recv", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		_, w, err := pg.Recv(t, checkSource(src), c.tag, c.Call)
		return w, err
	})
}

// P2P is one send or receive of a batch.
type P2P struct {
	Send   bool // otherwise it receives
	Tensor *ts.Tensor
	Peer   int // destination or source; [AnySource] to receive from anybody
	Tag    int
}

// BatchIsendIrecv starts many sends and receives together, so that the order in which two ranks list theirs cannot
// make them wait for each other. The Work is done when all of them are.
func (p *ProcessGroup) BatchIsendIrecv(ops []P2P, opts ...CallOption) (*Work, error) {
	c := call(true, opts)
	return p.start("batch_isend_irecv", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		tensors := make([]*ts.Tensor, len(ops))
		sends := make([]bool, len(ops))
		peers, tags := make([]int32, len(ops)), make([]int32, len(ops))
		for i, o := range ops {
			if !o.Send {
				o.Peer = checkSource(o.Peer)
			}
			tensors[i], sends[i], peers[i], tags[i] = o.Tensor, o.Send, int32(o.Peer), int32(o.Tag)
		}
		return pg.BatchP2P(tensors, sends, peers, tags, c.Call)
	})
}
