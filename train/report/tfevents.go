package report

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"math"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// TensorFlow's Go module holds these messages ready-made, but needs its C library and is not kept up; there are few,
// and their numbers never change. They are in tensorflow/core/util/event.proto, core/framework/{summary,tensor}.proto
// and tensorboard/plugins/hparams/plugin_data.proto.

// message is a protobuf message that is being written, field by field.
type message []byte

func (m message) uint(field protowire.Number, v uint64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), v)
}

func (m message) double(field protowire.Number, v float64) message {
	return protowire.AppendFixed64(protowire.AppendTag(m, field, protowire.Fixed64Type), math.Float64bits(v))
}

func (m message) float(field protowire.Number, v float64) message {
	bits := math.Float32bits(float32(v))
	return protowire.AppendFixed32(protowire.AppendTag(m, field, protowire.Fixed32Type), bits)
}

func (m message) bytes(field protowire.Number, v []byte) message {
	return protowire.AppendBytes(protowire.AppendTag(m, field, protowire.BytesType), v)
}

func (m message) text(field protowire.Number, v string) message { return m.bytes(field, []byte(v)) }

// event is an Event at a time and step.
func event(at time.Time, step int64) message {
	return message(nil).double(1, float64(at.UnixNano())/1e9).uint(2, uint64(step))
}

func (m message) fileVersion() message { return m.text(3, "brain.Event:2") }

func (m message) summary(values ...message) message {
	var s message
	for _, v := range values {
		s = s.bytes(1, v)
	}
	return m.bytes(5, s)
}

// sessionStart makes readers forget what an earlier file of the run says of this step and later ones.
func (m message) sessionStart() message { return m.bytes(7, message(nil).uint(1, 1)) }

func scalar(tag string, v float64) message { return message(nil).text(1, tag).float(2, v) }

// plugin is a SummaryMetadata.
func plugin(name string, content message, description string) message {
	m := message(nil).bytes(1, message(nil).text(1, name).bytes(2, content))
	if description != "" {
		m = m.text(3, description)
	}
	return m.uint(4, 2) // DATA_CLASS_TENSOR
}

// markdown is a Summary.Value for the page "Text".
func markdown(tag, text string) message {
	const dtString = 7
	shape := message(nil).bytes(2, message(nil).uint(1, 1))
	tensor := message(nil).uint(1, dtString).bytes(2, shape).text(8, text)
	return message(nil).text(1, tag).bytes(8, tensor).bytes(9, plugin("text", nil, ""))
}

// sessionInfo is a Summary.Value for the page "HParams": field 3 tells of a session's start, field 4 of its end.
func sessionInfo(tag string, field protowire.Number, info message) message {
	const dtFloat = 1
	null := message(nil).uint(1, dtFloat).bytes(2, nil).float(5, 0)
	return message(nil).text(1, tag).bytes(8, null).bytes(9, plugin("hparams", message(nil).bytes(field, info), ""))
}

func hparam(name, value string) message {
	return message(nil).text(1, name).bytes(2, protobufValue(value))
}

// writeRecord frames a message as TFRecord does: length, its checksum, content, its checksum.
func writeRecord(w io.Writer, m message) error {
	b := make([]byte, 12, len(m)+16)
	binary.LittleEndian.PutUint64(b, uint64(len(m)))
	binary.LittleEndian.PutUint32(b[8:], masked(b[:8]))
	b = append(b, m...)
	b = binary.LittleEndian.AppendUint32(b, masked(m))
	_, err := w.Write(b)
	return err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// masked is the CRC32C as TFRecord stores it: a checksum over data that holds checksums would be weak otherwise.
func masked(b []byte) uint32 {
	sum := crc32.Checksum(b, castagnoli)
	return (sum>>15 | sum<<17) + 0xa282ead8
}
