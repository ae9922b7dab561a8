package torchddp

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type record struct {
	Name  string `json:"name"`
	Loss  float64
	Steps []int
	Tags  map[string]bool
	Next  *record `json:"next"`
}

func recordOf(rank int) record {
	r := record{Name: strings.Repeat("x", 10*rank), Loss: 0.5 * float64(rank), Steps: []int{rank, 2}, Tags: map[string]bool{"a": true}}
	if rank > 0 {
		r.Next = &record{Name: "inner", Steps: []int{}, Tags: map[string]bool{}}
	}
	return r
}

// TestObjectCollectives: values of different sizes, with every codec.
func TestObjectCollectives(t *testing.T) {
	for name, codec := range map[string]Codec{"gob": nil, "json": JSON, "pickle": Pickle} {
		t.Run(name, func(t *testing.T) {
			group(t, 3, func(pg *ProcessGroup) error {
				me := pg.Rank()
				o := ObjectOptions{Codec: codec}
				same := func(what string, got, want record) error {
					// gob leaves empty lists and maps out
					for _, r := range []*record{&got, &want} {
						for ; r != nil; r = r.Next {
							if len(r.Steps) == 0 {
								r.Steps = nil
							}
							if len(r.Tags) == 0 {
								r.Tags = nil
							}
						}
					}
					if !reflect.DeepEqual(got, want) {
						return fmt.Errorf("%s: got %+v, want %+v", what, got, want)
					}
					return nil
				}
				all, err := AllGatherObject(pg, recordOf(me), o)
				if err != nil {
					return err
				}
				for r, v := range all {
					if err := same("all_gather_object", v, recordOf(r)); err != nil {
						return err
					}
				}
				all, err = GatherObject(pg, recordOf(me), 1, o)
				if err != nil || (me == 1) != (len(all) == 3) {
					return fmt.Errorf("gather_object: %v %v", all, err)
				}
				for r, v := range all {
					if err := same("gather_object", v, recordOf(r)); err != nil {
						return err
					}
				}
				one, err := BroadcastObject(pg, recordOf(me), 2, o)
				if err := errors.Join(err, same("broadcast_object", one, recordOf(2))); err != nil {
					return err
				}
				list := []record{recordOf(me), recordOf(me + 1)}
				if err := errors.Join(BroadcastObjectList(pg, list, 0, o), same("broadcast_object_list", list[1], recordOf(1))); err != nil {
					return err
				}
				var give []record
				if me == 1 {
					give = []record{recordOf(0), recordOf(1), recordOf(2)}
				}
				one, err = ScatterObject(pg, give, 1, o)
				if err := errors.Join(err, same("scatter_object_list", one, recordOf(me))); err != nil {
					return err
				}
				if me == 0 {
					return SendObjectList(pg, []record{recordOf(1), recordOf(2)}, 2, o)
				}
				if me == 2 {
					from, err := RecvObjectList(pg, list, 0, o)
					if err != nil || from != 0 {
						return fmt.Errorf("recv_object_list from %d: %v", from, err)
					}
					return errors.Join(same("recv_object_list", list[0], recordOf(1)), same("the second", list[1], recordOf(2)))
				}
				return nil
			})
		})
	}
}

// TestObjectOfOneRankCannotBeEncoded: no rank waits for it.
func TestObjectOfOneRankCannotBeEncoded(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		value := func() any {
			if pg.Rank() == 1 {
				return make(chan int)
			}
			return 1
		}
		for _, codec := range []Codec{Gob, JSON, Pickle} {
			o := ObjectOptions{Codec: codec}
			_, e1 := AllGatherObject(pg, value(), o)
			_, e2 := GatherObject(pg, value(), 0, o)
			_, e3 := BroadcastObject(pg, value(), 1, o)
			_, e4 := ScatterObject(pg, []any{1, value()}, 1, o)
			for i, err := range []error{e1, e2, e3, e4} {
				if err == nil {
					return fmt.Errorf("%T, collective %d: no error", codec, i)
				}
				if pg.Rank() == 0 && !strings.Contains(err.Error(), "rank 1 could not encode its value") {
					return fmt.Errorf("%T, collective %d: %w", codec, i, err)
				}
			}
		}
		// A value larger than allowed is the same.
		_, err := AllGatherObject(pg, strings.Repeat("x", 100), ObjectOptions{MaxBytes: 50})
		if !errors.Is(err, ErrValue) {
			return fmt.Errorf("100 bytes of 50: %v", err)
		}
		if _, err := ScatterObject(pg, []int{1}, 0); err == nil {
			return errors.New("a list too short was scattered")
		}
		if _, err := BroadcastObject(pg, 1, 2); !errors.Is(err, ErrValue) {
			return fmt.Errorf("root outside: %v", err)
		}
		return pg.Barrier()
	})
}

func TestPickleCodec(t *testing.T) {
	type inner struct{ A, B int }
	check := func(v any, into any, want any) {
		t.Helper()
		data, err := Pickle.Marshal(v)
		require.NoError(t, err)
		require.NoError(t, Pickle.Unmarshal(data, into))
		require.Equal(t, want, reflect.ValueOf(into).Elem().Interface())
	}
	check(map[string]any{"a": []int{1, 2}, "b": nil, "c": 1.5}, new(any), map[string]any{"a": []any{int64(1), int64(2)}, "b": nil, "c": 1.5})
	check(map[int]string{1: "x"}, new(map[int]string), map[int]string{1: "x"})
	check(inner{1, 2}, new(map[string]int), map[string]int{"A": 1, "B": 2})
	check(map[string]int{"A": 1, "B": 2, "C": 3}, new(inner), inner{1, 2})
	check([]byte{1, 0, 255}, new([]byte), []byte{1, 0, 255})
	check(uint64(1<<63), new(uint64), uint64(1<<63))
	check([2]float32{1, 2}, new([2]float64), [2]float64{1, 2})
	check(3, new(float64), 3.0)
	check(complex64(complex(1, 2)), new(complex128), complex(1, 2))
	check((*inner)(nil), new(*inner), (*inner)(nil))

	data, err := Pickle.Marshal(300)
	require.NoError(t, err)
	require.ErrorIs(t, Pickle.Unmarshal(data, new(int8)), ErrValue, "300 is no int8")
	require.ErrorIs(t, Pickle.Unmarshal(data, new(string)), ErrValue)
	require.Error(t, Pickle.Unmarshal([]byte("cos\nsystem\n(S'true'\ntR."), new(any)), "a pickle must not name functions")
	require.Error(t, Pickle.Unmarshal(nil, new(any)))
	_, err = Pickle.Marshal(func() {})
	require.ErrorIs(t, err, ErrValue)
	var loop []any
	loop = append(loop, &loop)
	_, err = Pickle.Marshal(loop)
	require.ErrorIs(t, err, ErrValue, "a list that holds itself")
}
