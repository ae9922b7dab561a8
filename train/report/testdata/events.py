"""Reads the event files of a folder with TensorBoard's own reader and prints what it finds as JSON."""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata
from tensorboard.util import tensor_util

reader = event_accumulator.EventAccumulator(
    sys.argv[1], size_guidance={event_accumulator.TENSORS: 0, event_accumulator.SCALARS: 0}
)
reader.Reload()

curves = {}
for tag in reader.Tags()["scalars"]:  # simple_value, before TensorBoard's own migration to tensors
    curves[tag] = [[e.step, str(e.value), e.wall_time] for e in reader.Scalars(tag)]
for tag in reader.Tags()["tensors"]:
    if reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
        curves[tag] = [[e.step, str(tensor_util.make_ndarray(e.tensor_proto).item()), e.wall_time] for e in reader.Tensors(tag)]
texts = {
    tag: [tensor_util.make_ndarray(e.tensor_proto)[0].decode() for e in reader.Tensors(tag)]
    for tag in reader.Tags()["tensors"]
    if reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
}
hparams, status = {}, []
for path in sys.argv[2:]:  # the plugin's own parsers: those of the reader keep the first metadata of a tag only
    for event in EventFileLoader(path).Load():
        for value in event.summary.value:
            content = value.metadata.plugin_data.content
            if value.tag == metadata.SESSION_START_INFO_TAG:
                for name, v in metadata.parse_session_start_info_plugin_data(content).hparams.items():
                    hparams[name] = getattr(v, v.WhichOneof("kind"))
            if value.tag == metadata.SESSION_END_INFO_TAG:
                status.append(metadata.parse_session_end_info_plugin_data(content).status)
print(json.dumps({"curves": curves, "texts": texts, "hparams": hparams, "status": status}))
