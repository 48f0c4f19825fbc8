"""The keys of `manifest.json`, the file that makes a directory a checkpoint."""

from dataclasses import replace
from typing import TypedDict

from runner.attempt.environment import ENVIRONMENT_KEYS
from runner.record import Key

MANIFEST_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("name", str, "Name of the checkpoint: the step, or what the job called it."),
    Key("attempt", int, "Attempt that saved it."),
    Key("time", float, "Begin of the save.", "Unix seconds"),
    Key("step", int, "Optimizer steps completed."),
    Key("job", str, "Id of the run, drawn when its directory was claimed first; the id in W&B too."),
    Key("identity", dict, "The trajectory by dotted key, and for trainers the data's fingerprint as `config.data`."),
    Key("topology", dict, "The hardware that saved it; trainers only."),
    Key("topology.mesh", dict, "Axis -> size."),
    Key("topology.device_kind", str, "What JAX calls the devices."),
    Key("topology.processes", int, "Processes of the job."),
    Key("topology.micro_batch_examples", int, "Examples that a device held at once; the same hardware takes it again."),
    Key(
        "carry",
        dict,
        "What the steps since the last row add to the next one; trainers only, where a save falls between two rows.",
    ),
    Key("carry.loss_sum", float, "Their losses, each times its real target tokens (or 1, where all have as many)."),
    Key("carry.weight", float, "Those tokens, or the number of steps."),
    Key("environment", dict, "What the save was made with."),
    *(replace(key, name=f"environment.{key.name}") for key in ENVIRONMENT_KEYS),
    Key("metric", float | None, "Value that `checkpoint.keep_best` compares; only with that key."),
    Key("arrays", str, "Directory of the arrays, beside the manifest."),
    Key("leaves", dict, "Dotted path of a leaf of the state -> its description."),
    Key("leaves.*.shape", list, "Global shape."),
    Key("leaves.*.dtype", str, "Element type."),
    Key("leaves.*.digest", str, "Digest of the leaf's bits, taken on the device, 16 hexadecimal digits."),
    Key("fingerprint", str, "Digest over all leaves, 32 hexadecimal digits."),
    Key("files", dict, "File -> [bytes, CRC-32C], of every file but this one."),
    Key("shards", dict, "Leaf -> list of its blocks; only where arrays are stored as pieces, as in buckets."),
    Key("shards.*.start", list, "Where the block begins on each axis."),
    Key("shards.*.shape", list, "Its extent on each axis."),
    Key("shards.*.pieces", list, "Files that hold it, in order."),
    Key("seconds", float, "From the begin of the save until it was durable.", "s"),
    Key("digest", str, "SHA-256 of all other keys, as canonical JSON."),
    Key("contested", bool, "True in a bucket where an earlier attempt may still try to commit the same step."),
    Key("void", int, "Attempt that gave the step up: this is no checkpoint. Then only `format` and `digest` beside."),
)


class LeafShape(TypedDict):
    """Shape and dtype of a leaf, as JSON."""

    shape: list[int]
    dtype: str


class LeafRecord(LeafShape):
    """What a manifest says of a leaf."""

    digest: str
