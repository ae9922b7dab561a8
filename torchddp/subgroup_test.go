package torchddp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sugarme/gotch"
)

var bg = context.Background()

// sumOfRanks checks that a group talks: every member gives its global rank.
func sumOfRanks(g *ProcessGroup, global int, want ...int) error {
	if !slices.Equal(g.Ranks(), want) {
		return fmt.Errorf("%v has the ranks %v, want %v", g, g.Ranks(), want)
	}
	sum := 0
	for _, r := range want {
		sum += r
	}
	x := tensorOf(gotch.Float, float64(global))
	return errors.Join(g.AllReduce(x, Sum), wantValues("sum over "+g.String(), x, float64(sum)))
}

func TestNewGroup(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		me := pg.Rank()
		g, err := pg.NewGroup(bg, []int{2, 0}, GroupOptions{Timeout: 20 * time.Second})
		if err != nil {
			return err
		}
		if g.Name() != "1" || g.World() != pg {
			return fmt.Errorf("name %s", g.Name())
		}
		switch me {
		case 1:
			if g.IsMember() || g.Rank() != -1 || g.Size() != -1 {
				return fmt.Errorf("rank 1 is not in %v", g)
			}
			if err := g.Barrier(); !errors.Is(err, ErrNotMember) || !errors.Is(err, ErrValue) {
				return fmt.Errorf("barrier outside: %v", err)
			}
			if _, err := AllGatherObject(g, 1); !errors.Is(err, ErrNotMember) {
				return fmt.Errorf("object outside: %v", err)
			}
		default:
			if g.Rank() != me/2 || g.Size() != 2 {
				return fmt.Errorf("rank %d is %d of %d", me, g.Rank(), g.Size())
			}
			if err := sumOfRanks(g, me, 0, 2); err != nil {
				return err
			}
			// Roots are the group's: rank 1 of it is global rank 2.
			x := tensorOf(gotch.Float, float64(me))
			if err := errors.Join(g.Broadcast(x, 1), wantValues("broadcast in a group", x, 2)); err != nil {
				return err
			}
		}
		// Translation works inside and outside.
		if r, err := g.GlobalRank(1); err != nil || r != 2 {
			return fmt.Errorf("GlobalRank(1) = %d, %v", r, err)
		}
		if r, err := g.GroupRank(2); err != nil || r != 1 {
			return fmt.Errorf("GroupRank(2) = %d, %v", r, err)
		}
		if _, err := g.GroupRank(1); !errors.Is(err, ErrValue) {
			return fmt.Errorf("GroupRank(1): %v", err)
		}
		// Another one with all ranks, and one that only its members make.
		all, err := pg.NewGroup(bg, nil, GroupOptions{})
		if err != nil {
			return err
		}
		if err := sumOfRanks(all, me, 0, 1, 2); err != nil || all.Name() != "2" || all.Timeout() != DefaultTimeout {
			return fmt.Errorf("%v %s %v", err, all.Name(), all.Timeout())
		}
		local, err := pg.NewGroup(bg, []int{0, 1}, GroupOptions{LocalSync: true})
		if err != nil {
			return err
		}
		if me < 2 {
			if err := sumOfRanks(local, me, 0, 1); err != nil {
				return err
			}
		}
		// Destroying one leaves the others.
		if err := errors.Join(all.Destroy(), g.Destroy()); err != nil {
			return err
		}
		if err := all.Barrier(); !errors.Is(err, ErrDestroyed) {
			return fmt.Errorf("after Destroy: %v", err)
		}
		return sumOfRanks(pg, me, 0, 1, 2)
	})
}

func TestNewGroupRefusesNonsense(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		part, err := pg.NewGroup(bg, nil, GroupOptions{})
		if err != nil {
			return err
		}
		for name, c := range map[string]struct {
			err  error
			text string
		}{
			"too many":       {second(pg.NewGroup(bg, []int{0, 1, 2}, GroupOptions{})), "should be less or equal to the world size"},
			"outside":        {second(pg.NewGroup(bg, []int{0, 2}, GroupOptions{})), "rank should be within the world size"},
			"negative":       {second(pg.NewGroup(bg, []int{-1}, GroupOptions{})), "rank should be within"},
			"twice":          {second(pg.NewGroup(bg, []int{1, 1}, GroupOptions{})), "rank 1 is given twice"},
			"none":           {second(pg.NewGroup(bg, []int{}, GroupOptions{})), "at least one rank"},
			"of a part":      {second(part.NewGroup(bg, nil, GroupOptions{})), "called on the group of all ranks"},
			"rebuild a part": {second(part.Rebuild(bg, RebuildOptions{})), "called on the group of all ranks"},
			"size 0":         {third(pg.NewSubgroups(bg, 0, GroupOptions{})), "must be positive"},
			"size 3":         {third(pg.NewSubgroups(bg, 3, GroupOptions{})), "must not exceed the world size"},
			"no lists":       {third(pg.NewSubgroupsByEnumeration(bg, nil, GroupOptions{})), "cannot be empty"},
			"overlap":        {third(pg.NewSubgroupsByEnumeration(bg, [][]int{{0}, {1, 0}}, GroupOptions{})), "Rank 0 has appeared in both subgroup [0] and [1 0]"},
			"split nothing":  {second(pg.Split(bg, nil, GroupOptions{})), "cannot be empty"},
			"split overlap":  {second(pg.Split(bg, [][]int{{0}, {0, 1}}, GroupOptions{})), "rank 0 is in two parts"},
			"split backend":  {second(pg.Split(bg, [][]int{{0}}, GroupOptions{Backend: NCCL})), "a part has the backend of the whole"},
			"backend":        {second(pg.NewGroup(bg, nil, GroupOptions{Backend: "mpi"})), "unknown backend"},
		} {
			if !errors.Is(c.err, ErrValue) {
				return fmt.Errorf("%s: %v", name, c.err)
			}
			if err := contains(c.err, c.text); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return pg.Barrier()
	})
}

func third[A, B any](_ A, _ B, err error) error { return err }

func TestSubgroups(t *testing.T) {
	group(t, 4, func(pg *ProcessGroup) error {
		me := pg.Rank()
		mine, all, err := pg.NewSubgroups(bg, 2, GroupOptions{})
		if err != nil || len(all) != 2 || mine != all[me/2] {
			return fmt.Errorf("%v %v %v", mine, all, err)
		}
		first := me / 2 * 2
		if err := sumOfRanks(mine, me, first, first+1); err != nil {
			return err
		}
		if _, _, err := pg.NewSubgroups(bg, 3, GroupOptions{}); !errors.Is(err, ErrValue) {
			return fmt.Errorf("4 ranks by 3: %v", err)
		}
		mine, _, err = pg.NewSubgroupsByEnumeration(bg, [][]int{{0, 3}, {1}}, GroupOptions{})
		if err != nil {
			return err
		}
		switch me {
		case 2:
			if mine.IsMember() {
				return fmt.Errorf("rank 2 is in no subgroup")
			}
		case 1:
			if err := sumOfRanks(mine, 1, 1); err != nil {
				return err
			}
		default:
			if err := sumOfRanks(mine, me, 0, 3); err != nil {
				return err
			}
		}
		// Two machines with interleaved ranks.
		mine, _, err = pg.NewSubgroupsByNode(bg, fmt.Sprintf("node%d", me%2), GroupOptions{})
		if err != nil {
			return err
		}
		if err := sumOfRanks(mine, me, me%2, me%2+2); err != nil {
			return err
		}
		// Parts keep the order they are given in.
		part, err := pg.Split(bg, [][]int{{3, 0}, {2}}, GroupOptions{})
		if err != nil {
			return err
		}
		switch me {
		case 0, 3:
			if want := map[int]int{3: 0, 0: 1}[me]; part.Rank() != want {
				return fmt.Errorf("rank %d is %d of the part, want %d", me, part.Rank(), want)
			}
			if err := sumOfRanks(part, me, 3, 0); err != nil {
				return err
			}
			// A part of a part.
			half, err := part.Split(bg, [][]int{{1}}, GroupOptions{})
			if err != nil {
				return err
			}
			if me == 0 {
				if err := sumOfRanks(half, 0, 0); err != nil {
					return err
				}
			}
		case 1:
			if part.IsMember() {
				return fmt.Errorf("rank 1 is in no part")
			}
		}
		return pg.Barrier()
	})
}

func TestSeveralBackendsInAGroup(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		g, err := pg.NewGroup(bg, nil, GroupOptions{Backend: "cpu:gloo,cuda:gloo"})
		if err != nil {
			return err
		}
		return errors.Join(sumOfRanks(g, pg.Rank(), 0, 1), g.Barrier())
	})
}
