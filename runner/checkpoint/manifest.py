"""The manifest: what makes a directory a checkpoint, and what its files must look like. Knows no arrays and no jax.

`manifest.json` holds the step, the identity of the run, shape, dtype and digest of every leaf, size and CRC-32C of
every file, and a digest of itself. In a bucket a tombstone stands in its place (`tombstone`) where a step was never
committed and whoever may still be writing it has lost the right to.

The keys of `manifest.json`, the file that makes a directory a checkpoint.

Who decides about a step: the commit of a checkpoint, or the tombstone that says it will never be one.

A process of an earlier attempt may still be about to commit a step that its successor has found unfinished. Each of
the two is an act of which only one can win, on a disk and in a bucket.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypedDict

from runner.errors import NewerFormatError
from runner.records import Key, validate_record
from runner.run.environment import ENVIRONMENT_KEYS
from runner.spec import Trajectory, hash_record
from runner.storage import (
    ABSENT,
    DiskError,
    ForbiddenError,
    JsonObject,
    LocalStore,
    Store,
    WrongKindError,
    compute_crc32c,
    encode_json,
    find_kind,
    parse_json,
    parse_number,
)

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


FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
TOMBSTONE = "void"  # the key of a tombstone: the attempt that has put it
_NUM_READERS = 8
_NEEDED = ("name", "step", "arrays", "leaves", "fingerprint", "identity", "files")

Files = dict[str, list[Any]]  # name -> [bytes, CRC-32C]


class ShardRecord(TypedDict):
    """One block of a leaf, as JSON: where it begins, its extent, and the files that hold it, in order."""

    start: list[int]
    shape: list[int]
    pieces: list[str]


class NotCommittedError(FileNotFoundError):
    """The directory holds no checkpoint: its save did not end, or was made void."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint says of itself: the keys of `manifest.json`, which `manifest_key` explains one by one.

    The checkpoint's directory is `checkpoints/<name>`. `format` and `digest` are of the file alone.
    """

    name: str = ""
    attempt: int = 0
    time: float = 0.0
    step: int = 0
    job: str = ""
    identity: Trajectory = field(default_factory=dict)
    arrays: str = ""
    leaves: dict[str, LeafRecord] = field(default_factory=dict)
    fingerprint: str = ""
    metric: float | None = None
    topology: JsonObject | None = None
    carry: JsonObject | None = None
    environment: JsonObject | None = None
    files: Files = field(default_factory=dict)
    shards: dict[str, list[ShardRecord]] | None = None
    seconds: float = 0.0
    contested: bool = False

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def is_of_a_step(self) -> bool:
        """Whether it is resumed from and retained by count: its name is its step's number."""
        return self.name == str(self.step)

    def encode(self) -> bytes:
        """The content of `manifest.json`."""
        return seal(self.to_json())

    def to_json(self) -> JsonObject:
        """As JSON; what is absent is left out."""
        present = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"format": FORMAT} | {
            key: value for key, value in present.items() if value is not None and value is not False
        }

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """The inverse of `to_json`; keys that are not known are passed over. Raises `ValueError` for other types."""
        validate_record(record, MANIFEST_KEYS, _NEEDED)
        manifest = cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})
        manifest.check_parts()
        return manifest

    def check_parts(self) -> None:
        """Raise `ValueError` if the parts of lists have other types, or parts name others that are not there."""
        for name, entry in self.files.items():
            if not (isinstance(entry, list) and list(map(type, entry)) == [int, str]):
                raise ValueError(f"files.{name} is not [bytes, CRC-32C]")
        shapes = [leaf["shape"] for leaf in self.leaves.values()]
        for shard in (shard for shards in (self.shards or {}).values() for shard in shards):
            shapes += [shard["start"], shard["shape"]]
            if not all(isinstance(piece, str) and piece in self.files for piece in shard["pieces"]):
                raise ValueError("a shard names a piece that is none of the files")
        if not all(type(size) is int for shape in shapes for size in shape):
            raise ValueError("a shape is not a list of whole numbers")


def seal(record: JsonObject) -> bytes:
    """`record` with its own digest, as the content of a file."""
    return encode_json(record | {"digest": hash_record(record)})


def parse_manifest(content: bytes) -> JsonObject:
    """The content of a `manifest.json`, checked against its digest.

    Raises `NewerFormatError`, or `ValueError` if it is damaged.
    """
    record = parse_json(content)
    written = record.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise NewerFormatError(f"written by a newer runner, in format {written}; this one reads {FORMAT}")
    digest, tombstone = record.pop("digest", None), record.get(TOMBSTONE, 0)
    if digest != hash_record(record) or written != FORMAT or not isinstance(tombstone, int):
        raise ValueError("damaged: it does not match its own digest")
    return record


def read_manifest(store: Store, directory: str) -> Manifest:
    """The manifest of one checkpoint, whose directory has its name.

    Raises `NotCommittedError`, `NewerFormatError`, `ValueError` if it is damaged, else as the store does.
    """
    try:
        record = parse_manifest(store.read(f"{directory}/{MANIFEST}"))
    except FileNotFoundError as error:
        raise NotCommittedError("no manifest.json: it was never committed") from error
    except NewerFormatError as error:
        raise NewerFormatError(f"{store.url}/{directory}: {error}") from error
    if TOMBSTONE in record:
        raise NotCommittedError(f"attempt {record[TOMBSTONE]} found it unfinished")
    manifest = Manifest.from_json(record)
    name = directory.removeprefix(f"{CHECKPOINTS}/")
    if manifest.name != name or parse_number(name) not in (None, manifest.step):
        raise ValueError(f"it is of checkpoint {manifest.name}, step {manifest.step}, and stands in {name}")
    return manifest


# A checkpoint that cannot be read now, or is bad: others may be good. What a bucket raises says nothing of either.
UNREADABLE_ERRORS = (FileNotFoundError, ValueError, DiskError, ForbiddenError, WrongKindError)


def list_steps(store: Store) -> list[int]:
    """Every step that has a directory, committed or not, ascending by number."""
    return sorted(step for step in map(parse_number, store.list_names(CHECKPOINTS)) if step is not None)


def read_committed(store: Store) -> dict[int, Manifest]:
    """The manifests of all steps that have a whole one, ascending by step."""

    def read(step: int) -> Manifest | None:
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except UNREADABLE_ERRORS:
            return None

    numbers = list_steps(store)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        manifests = list(pool.map(read, numbers))
    return {step: manifest for step, manifest in zip(numbers, manifests, strict=True) if manifest is not None}


def read_newest_manifest(store: Store) -> Manifest | None:
    """The newest manifest that can be read, None if there is none. Raises `NewerFormatError` if it meets one before."""
    for step in reversed(list_steps(store)):
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except NewerFormatError:
            raise
        except UNREADABLE_ERRORS:
            continue
    return None


def find_file_problems(
    store: Store, directory: str, files: Files, part: int = 0, num_parts: int = 1, trust_store: bool = True
) -> list[str]:
    """What is wrong with the bytes of a checkpoint, a line a bad file. Checks every `num_parts`-th file.

    Reads every byte, except where the store reports digests of its own and is trusted.
    """
    sizes = store.list_sizes(directory)

    def problem(name: str) -> str | None:
        size, digest = files[name]
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, the manifest says {size}"
        path = f"{directory}/{name}"
        try:
            found = (
                store.compute_digest(path)
                if trust_store or store.root is not None
                else compute_crc32c(store.read(path))
            )
        except FileNotFoundError:
            return f"{name} is missing"
        return None if found == digest else f"{name} does not match its CRC-32C"

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        found = pool.map(problem, sorted(files)[part::num_parts])
        return [text for text in found if text is not None]


RETIRED_SUFFIX = ".retired"  # the directory of a step whose files are being deleted


def commit(store: Store, directory: str, manifest: Manifest, attempt: int) -> None:
    """Create the manifest of `directory`, all of whose files are durable.

    Raises `FileExistsError` or `FileNotFoundError` if another attempt was first: with a commit or a tombstone.
    """
    name = f"{directory}/{MANIFEST}"
    if isinstance(store, LocalStore):
        store.create_from(f"{directory}/{manifest.arrays}", name, manifest.encode())
        return
    present, version = store.read_versioned(name)
    if present == _tombstone(attempt):
        store.write_if(name, replace(manifest, contested=True).encode(), version)
    else:
        store.write_if(name, manifest.encode(), ABSENT)


def uncommit(store: Store, directory: str, attempt: int) -> None:
    """Make a committed checkpoint one no more, before its files are deleted.

    Where an earlier attempt may still be about to commit the same step, a tombstone stays in its place.
    """
    content, version = store.read_versioned(f"{directory}/{MANIFEST}") if store.root is None else (b"", ABSENT)
    if "contested" in _whole(content):
        store.write_if(f"{directory}/{MANIFEST}", _tombstone(attempt), version)
    else:
        store.remove(f"{directory}/{MANIFEST}")


def retire_uncommitted(store: Store, step: int, attempt: int) -> None:
    """Delete a step that was never committed, so that no earlier attempt can commit it any more; else leave it alone.

    On a disk the whole directory is renamed, which decides at once; if a manifest came with it, it is renamed back.
    In a bucket a tombstone takes the place that only one can take, and stays until this attempt commits the step.
    """
    directory = f"{CHECKPOINTS}/{step}"
    if store.root is None:
        if _put_tombstone(store, directory, attempt):
            remove_files(store, directory)
        return
    if _is_directory(store, directory) and not store.exists(f"{directory}/{MANIFEST}"):
        store.move_tree(directory, f"{directory}{RETIRED_SUFFIX}")
        finish_retirements(store)


def finish_retirements(store: Store) -> None:
    """End what a killed retirement: delete the renamed directory, or give a committed one its name.

    Where that name is taken by another that is committed too, both stay. What is no directory was not put there by a
    run, and stays.
    """
    for name in store.list_names(CHECKPOINTS) if store.root is not None else []:
        buried, source = f"{CHECKPOINTS}/{name}", f"{CHECKPOINTS}/{name.removesuffix(RETIRED_SUFFIX)}"
        if (
            buried == source
            or parse_number(name.removesuffix(RETIRED_SUFFIX)) is None
            or not _is_directory(store, buried)
        ):
            continue
        if not store.exists(f"{buried}/{MANIFEST}"):
            store.remove_tree(buried)
        elif not store.exists(f"{source}/{MANIFEST}"):
            store.remove_tree(source)
            store.move_tree(buried, source)


def _is_directory(store: Store, name: str) -> bool:
    """Whether a directory of a disk stands there."""
    try:
        return store.root is not None and find_kind(store.root / name) == "a directory"
    except WrongKindError:
        return False


def remove_files(store: Store, directory: str) -> None:
    """Delete all of a checkpoint but its manifest; on a disk the directory goes too, if it has none."""
    for name in store.list_names(directory):
        if name != MANIFEST:
            store.remove_tree(f"{directory}/{name}")
    if store.root is not None and not store.exists(f"{directory}/{MANIFEST}"):
        store.remove_tree(directory)


def _put_tombstone(store: Store, directory: str, attempt: int) -> bool:
    """Whether a tombstone stands there now; False if the step is committed, or a newer attempt has put its own."""
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if version != ABSENT and not 0 < _whole(content).get(TOMBSTONE, 0) <= attempt:
        return False
    try:
        store.write_if(f"{directory}/{MANIFEST}", _tombstone(attempt), version)
    except FileExistsError:
        return False
    return True


def _tombstone(attempt: int) -> bytes:
    return seal({"format": FORMAT, TOMBSTONE: attempt})


def _whole(content: bytes) -> JsonObject:
    """What a manifest or tombstone says; nothing if it is damaged, or of a newer runner."""
    try:
        return parse_manifest(content)
    except ValueError:
        return {}
