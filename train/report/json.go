package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
)

// JSON writes one JSON object a line. The member "record" says what it is: "run", "step" or "epoch"; times are in
// seconds, epochs are counted from 0. What JSON has no number for is the text "NaN", "Infinity" or "-Infinity".
func JSON(w io.Writer) Sink { return &jsonLines{w: w} }

type jsonLines struct {
	w io.Writer
}

func (j *jsonLines) String() string { return "JSON lines" }

func (j *jsonLines) Begin(r Run) error {
	hyper := make(object, 0, len(r.Hyper))
	for _, p := range r.Hyper {
		hyper = append(hyper, member{p.Name, p.Value})
	}
	hosts := r.Hosts
	if hosts == nil {
		hosts = []string{}
	}
	return j.line(object{
		{"record", "run"}, {"time", stamp(r.Started)}, {"name", r.Name}, {"model", r.Model}, {"device", r.Device},
		{"backend", r.Backend}, {"world", r.World}, {"hosts", hosts}, {"epochs", r.Epochs},
		{"steps_per_epoch", r.StepsPerEpoch}, {"start_epoch", r.StartEpoch}, {"start_step", r.StartStep},
		{"batch_size", r.BatchSize}, {"parameters", r.Parameters}, {"hyper", hyper},
	})
}

func (j *jsonLines) Step(s Step) error {
	o := object{
		{"record", "step"}, {"time", stamp(s.Time)}, {"epoch", s.Epoch}, {"step", s.Step},
		{"global_step", s.GlobalStep}, {"steps", s.steps()}, {"values", values(s.Values)}, {"lr", num(s.LR)},
		{"samples_per_second", num(s.Throughput)}, {"seconds", seconds(s.Times)}, {"bytes_reduced", s.Bytes},
	}
	if len(s.Buckets) > 0 {
		list := make([]object, len(s.Buckets))
		for i, b := range s.Buckets {
			list[i] = object{{"bytes", b.Bytes}, {"seconds", b.Time.Seconds()}}
		}
		o = append(o, member{"buckets", list})
	}
	if len(s.Ranks) > 0 {
		list := make([]object, len(s.Ranks))
		for i, r := range s.Ranks {
			list[i] = object{{"rank", r.Rank}, {"seconds", seconds(r.Times)}}
		}
		o = append(o, member{"ranks", list})
	}
	return j.line(o)
}

func (j *jsonLines) Epoch(e Epoch) error {
	return j.line(object{
		{"record", "epoch"}, {"time", stamp(e.Time)}, {"epoch", e.Epoch}, {"global_step", e.Step},
		{"seconds", e.Duration.Seconds()}, {"train", values(e.Train)}, {"eval", values(e.Eval)}, {"lr", num(e.LR)},
		{"samples_per_second", num(e.Throughput)}, {"note", e.Note},
	})
}

func (j *jsonLines) Close() error { return nil }

func (j *jsonLines) line(o object) error {
	text, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("report: JSON: %w", err)
	}
	_, err = j.w.Write(append(text, '\n'))
	return err
}

// object is a JSON object whose members keep their order.
type object []member

type member struct {
	name  string
	value any
}

func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(m.name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(m.value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// num is a number that may be none.
type num float64

func (r num) MarshalJSON() ([]byte, error) {
	switch v := float64(r); {
	case math.IsNaN(v):
		return []byte(`"NaN"`), nil
	case math.IsInf(v, 1):
		return []byte(`"Infinity"`), nil
	case math.IsInf(v, -1):
		return []byte(`"-Infinity"`), nil
	default:
		return json.Marshal(v)
	}
}

func values(list []Value) object {
	o := make(object, 0, len(list))
	for _, v := range list {
		o = append(o, member{v.Name, num(v.Value)})
	}
	return o
}

func seconds(t Times) object {
	o := make(object, 0, len(phases)+1)
	for _, p := range phases {
		o = append(o, member{p.name, p.of(t).Seconds()})
	}
	return append(o, member{"step", t.Total.Seconds()})
}
