"""Manifest, commit and tombstone of a checkpoint. This module reads no arrays and imports no jax.

A directory `checkpoints/<name>` is a checkpoint if and only if it has a `manifest.json`. The manifest holds the step,
the identity of the run, shape, dtype and digest of every leaf, size and CRC-32C of every file, and a digest of itself.

Two processes may decide about the same step: a process of an earlier attempt may be about to commit a step that a newer
attempt retires because it is uncommitted. Both decisions are atomic operations of the store, and only the first
succeeds:

- `commit` creates the manifest, which can be created only once;
- `retire_uncommitted` makes sure that the manifest can never be created. On a disk it renames the directory, without
  which the commit fails. In a bucket it puts a *tombstone* in the place of the manifest: a `manifest.json` with the key
  `void`, which says that the step was never committed and that earlier attempts can no longer commit it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypedDict

from runner.attempts.environment import ENVIRONMENT_KEYS
from runner.attempts.events import LINEAGE_KEYS
from runner.console import warn
from runner.errors import NewerFormatError
from runner.spec import Trajectory, hash_record
from runner.storage import (
    ABSENT,
    INT_MAX,
    DiskError,
    ForbiddenError,
    JsonObject,
    Key,
    LocalStore,
    Store,
    WrongKindError,
    as_local,
    compute_crc32c,
    encode_json,
    find_kind,
    parse_json,
    parse_number,
    validate_record,
)

FORMAT = 2  # newest one; 1 has no `indexes`, and marks tombstones
FORMAT_1 = 1
MANIFEST = "manifest.json"
CHECKPOINTS, QUARANTINE = "checkpoints", "quarantine"
ARRAYS = "arrays."  # beginning of the name of each directory of arrays
TOMBSTONE = "void"  # key that marks a tombstone; its value is the attempt that wrote it
RETIRED_SUFFIX = ".retired"  # suffix of the directory of a retired step, until its files are deleted
_NUM_READERS = 8
ANCESTORS_MAX = 100  # of a fork of a fork; the oldest are forgotten
MAX_LISTINGS = 10  # of a run that deletes its old checkpoints while one of them is read
_REQUIRED_KEYS = ("name", "step", "arrays", "leaves", "fingerprint", "identity", "files")

MANIFEST_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("name", str, "Name of the checkpoint: the step, or what the job called it."),
    Key("attempt", int, "Attempt that saved it."),
    Key("time", float, "Start of the save.", "Unix seconds"),
    Key("step", int, "Optimizer steps completed."),
    Key("job", str, "Id of the run, drawn when its directory was first claimed; also the run's id in W&B."),
    Key("identity", dict, "The trajectory by dotted key, and for trainers the data's fingerprint as `config.data`."),
    Key("lineage", dict, "Checkpoint of another run with which this run began; only if it is a fork."),
    *(replace(key, name=f"lineage.{key.name}") for key in LINEAGE_KEYS),
    Key("lineage.ancestors", list, "Lineages of the parent, of its parent and so on, in the same form."),
    Key("topology", dict, "Hardware of the attempt that saved it; trainers only."),
    Key("topology.mesh", dict, "Axis -> size."),
    Key("topology.device_kind", str, "Device kind, as JAX reports it."),
    Key("topology.processes", int, "Number of processes of the job."),
    Key(
        "topology.micro_batch_examples",
        int,
        "Micro-batch size per device; reused by later attempts on the same hardware.",
    ),
    Key("topology.program", dict, "Program of the train step that has made the step."),
    Key("topology.program.digest", str, "Digest of its StableHLO, as in the event `compile`."),
    Key("topology.program.facts", dict, "Values on which the digest depends besides the code, as in `compile`."),
    Key("topology.program.known", dict, "Newest programs of the run: digest of the facts -> digest of the program."),
    Key("topology.program.known.*", str, "Digest of the program."),
    Key("topology.program.changes", int, "Changes of the program, with spec and hardware unchanged, up to the step."),
    Key(
        "carry",
        dict,
        "Sums over the steps since the last row, for the next row; trainers only, if the step has no row, or has it "
        "(or an evaluation in it) only because the run ended there.",
    ),
    Key(
        "carry.loss_sum",
        float,
        "Sum of their losses, each weighted by its number of real target tokens (by 1 if all have the same).",
    ),
    Key("carry.weight", float, "Sum of these weights."),
    Key(
        "carry.last",
        dict,
        "Loss and meta of the step itself, from which its row is made if the total of the run is set to this step.",
    ),
    Key(
        "carry.end",
        str,
        "What the step has only because the run ended there, and loses if the run is extended: `row` or `evaluation`.",
    ),
    Key("carry.metric", float, "`metric` of the step if the run is extended; absent if it then has none."),
    Key("environment", dict, "Software and settings of the attempt that saved it."),
    *(replace(key, name=f"environment.{key.name}") for key in ENVIRONMENT_KEYS),
    Key("metric", float | None, "Value that `checkpoint.keep_best` compares; only if that key is set."),
    Key(
        "roll_back_to",
        int,
        "Step up to which a spike of the loss that lasts may take the run back; the newest checkpoint up to it is "
        "kept. Only with `stability.roll_back`.",
    ),
    Key("features", dict, "Fields of features of the job, by the key that switches each on; absent if they have none."),
    Key("arrays", str, "Directory of the arrays, beside the manifest."),
    Key("leaves", dict, "Dotted path of a leaf of the state -> its description."),
    Key("leaves.*.shape", list, "Global shape."),
    Key("leaves.*.dtype", str, "Element type."),
    Key("leaves.*.digest", str, "Digest of the leaf's bits, computed on the device, 16 hexadecimal digits."),
    Key("fingerprint", str, "Digest over all leaves, 32 hexadecimal digits."),
    Key("files", dict, "File -> [size in bytes, CRC-32C], for every file except the manifest."),
    Key("indexes", list, "Files with the tables of the shards of each process, `<arrays>/<process>.json`."),
    Key("owners", dict, "Processes that have written the blocks of the leaves; the keys are numbers."),
    Key("owners.*.leaves", list, "Names of leaves with this grid."),
    Key("owners.*.grid", list, "Number of blocks on each axis; all have the same size."),
    Key("owners.*.runs", list, "[number of blocks, process] for the blocks in C order."),
    Key("shards", dict, "Leaf -> list of its blocks; only in format 1 in buckets."),
    Key("shards.*.start", list, "Start index of the block on each axis."),
    Key("shards.*.shape", list, "Size of the block on each axis."),
    Key("shards.*.pieces", list, "Files that hold the block, in order."),
    Key(
        "read_back",
        bool,
        "True if every byte was read back before the commit; retention keeps the newest such checkpoint.",
    ),
    Key("seconds", float, "Time from the start of the save until it was durable.", "s"),
    Key("digest", str, "SHA-256 of all other keys, as canonical JSON."),
    Key("contested", bool, "True in a bucket if an earlier attempt may still try to commit the same step."),
    Key(
        "void",
        int,
        "Attempt that wrote this tombstone: the step is no checkpoint. Its only other keys are `format` and `digest`.",
    ),
)

INDEX_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("files", dict, "File -> [size in bytes, CRC-32C], for every other file of this process."),
    Key("shards", dict, "Leaf -> list of its blocks that this process has written."),
    Key("shards.*.start", list, "Start index of the block on each axis."),
    Key("shards.*.shape", list, "Size of the block on each axis."),
    Key("shards.*.pieces", list, "Ranges that hold the block, in order, each [file, first byte, bytes, CRC-32C]."),
    Key("digest", str, "SHA-256 of all other keys, as canonical JSON."),
)

Files = dict[str, list[Any]]  # name -> [bytes, CRC-32C]


class LeafShape(TypedDict):
    """Shape and dtype of a leaf, as JSON."""

    shape: list[int]
    dtype: str


class LeafRecord(LeafShape):
    """Shape, dtype and digest of a leaf, as JSON."""

    digest: str


class ShardRecord(TypedDict):
    """One block of a leaf, as JSON: its start and size on each axis, and the files that hold it, in order."""

    start: list[int]
    shape: list[int]
    pieces: list[str]


class OwnersRecord(TypedDict):
    """Processes that have written the blocks of some leaves, as JSON; see `blocks.Owners`."""

    leaves: list[str]
    grid: list[int]
    runs: list[list[int]]


class NotCommittedError(FileNotFoundError):
    """Error for a directory without a checkpoint: its save was never committed, or it was retired."""


# Errors of one checkpoint that is bad or cannot be read now, while others may be good. The errors of an unreachable
# bucket are not among them, because they say nothing about any checkpoint.
UNREADABLE_ERRORS = (FileNotFoundError, ValueError, DiskError, ForbiddenError, WrongKindError)


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`. `MANIFEST_KEYS` describes each key.

    The directory of the checkpoint is `checkpoints/<name>`. The keys `format` and `digest` belong to the file alone.
    """

    name: str = ""
    attempt: int = 0
    time: float = 0.0
    step: int = 0
    job: str = ""
    identity: Trajectory = field(default_factory=dict)
    lineage: JsonObject | None = None
    arrays: str = ""
    leaves: dict[str, LeafRecord] = field(default_factory=dict)
    fingerprint: str = ""
    metric: float | None = None
    roll_back_to: int | None = None
    features: JsonObject | None = None
    topology: JsonObject | None = None
    carry: JsonObject | None = None
    environment: JsonObject | None = None
    files: Files = field(default_factory=dict)
    indexes: list[str] | None = None
    owners: dict[str, OwnersRecord] | None = None
    shards: dict[str, list[ShardRecord]] | None = None
    read_back: bool = False
    seconds: float = 0.0
    contested: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def is_checked_in_reading(self) -> bool:
        """True if a reader checks the bytes that it reads; False for arrays that Orbax has written."""
        return self.indexes is not None or self.shards is not None

    @property
    def is_step(self) -> bool:
        """True if the name is the number of the step: only such checkpoints are resumed from and deleted by count."""
        return self.name == str(self.step)

    def encode(self) -> bytes:
        """Return the content of `manifest.json`."""
        return seal(self.to_json())

    def to_json(self) -> JsonObject:
        """Return the manifest as JSON, without the keys that are absent."""
        present = {each.name: getattr(self, each.name) for each in fields(self)}
        # A manifest without `indexes` stays one that earlier versions read, such as that of a copied checkpoint.
        return {"format": FORMAT_1 if self.indexes is None else FORMAT} | {
            key: value for key, value in present.items() if value is not None and value is not False
        }

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Return the manifest that a JSON object describes; the inverse of `to_json`.

        Unknown keys are ignored, so that a later version may add keys. Raises `ValueError` if a key is missing, has
        another type, or names a file that is not in the manifest.
        """
        validate_record(record, MANIFEST_KEYS, _REQUIRED_KEYS)
        manifest = cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})
        # The table of keys says nothing about the elements of lists, and readers index into these.
        validate_files(manifest.files)
        if not all(isinstance(name, str) and name in manifest.files for name in manifest.indexes or ()):
            raise ValueError("indexes has a name that is not among the files")
        for owners in (manifest.owners or {}).values():
            numbers = [owners["grid"], *owners["runs"]]
            if not all(
                isinstance(each, list) and all(type(number) is int and 0 <= number <= INT_MAX for number in each)
                for each in numbers
            ):
                raise ValueError("owners has something that is not a list of whole numbers")
            if not all(len(run) == 2 and run[1] < len(manifest.indexes or ()) for run in owners["runs"]):
                raise ValueError("owners has a run that is not [number of blocks, process with a table]")
            if not all(isinstance(name, str) for name in owners["leaves"]):
                raise ValueError("owners has a leaf that is no name")
        shapes = [leaf["shape"] for leaf in manifest.leaves.values()]
        for shard in (shard for shards in (manifest.shards or {}).values() for shard in shards):
            shapes += [shard["start"], shard["shape"]]
            if not all(isinstance(piece, str) and piece in manifest.files for piece in shard["pieces"]):
                raise ValueError("a shard names a piece that is not among the files")
        if not all(type(size) is int and 0 <= size <= INT_MAX for shape in shapes for size in shape):
            raise ValueError("a shape is not a list of whole numbers")
        return manifest

    def make_lineage(self, store: Store, changes: dict[str, list[Any]]) -> JsonObject:
        """Return the lineage of a fork of this checkpoint, which lies in `store`."""
        parent = dict(self.lineage or {})
        ancestors = parent.pop("ancestors", [])
        return {
            "run": store.url,
            "id": self.job,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "changes": changes,
            "ancestors": [parent, *ancestors][:ANCESTORS_MAX] if parent else [],
        }


def validate_files(files: JsonObject) -> None:
    """Raise `ValueError` if the key `files` of a record has an entry that is not [bytes, CRC-32C]."""
    for name, entry in files.items():
        if not (isinstance(entry, list) and list(map(type, entry)) == [int, str] and 0 <= entry[0] <= INT_MAX):
            raise ValueError(f"files.{name} is not [bytes, CRC-32C]")


# Read.


def seal(record: JsonObject) -> bytes:
    """Return `record` with a digest of itself, as the content of a file."""
    return encode_json(record | {"digest": hash_record(record)})


def parse_manifest(content: bytes) -> JsonObject:
    """Return the content of a `manifest.json`, checked against its own digest.

    Raises `NewerFormatError` if a newer runner has written it, and `ValueError` if it is damaged.
    """
    record = parse_json(content)
    written = record.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise NewerFormatError(f"written by a newer runner, in format {written}; this one reads {FORMAT}")
    digest, tombstone = record.pop("digest", None), record.get(TOMBSTONE, 0)
    if digest != hash_record(record) or written not in (FORMAT_1, FORMAT) or not isinstance(tombstone, int):
        raise ValueError("damaged: it does not match its own digest")
    return record


def read_manifest(store: Store, directory: str) -> Manifest:
    """Return the manifest of the checkpoint in `directory`, which is `checkpoints/<name>`.

    Raises:
        NotCommittedError: there is no manifest, or a tombstone.
        NewerFormatError: a newer runner has written it.
        ValueError: it is damaged, or a copy of another checkpoint's.
        OSError: the store could not read it.
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
    # The files of a copied directory are intact, but its state is not that of the step in its name.
    name = directory.removeprefix(f"{CHECKPOINTS}/")
    if manifest.name != name or parse_number(name) not in (None, manifest.step):
        raise ValueError(f"it is of checkpoint {manifest.name}, step {manifest.step}, but lies in the directory {name}")
    return manifest


def list_steps(store: Store) -> list[int]:
    """Return every step that has a directory, committed or not, ascending by number."""
    return sorted(step for step in map(parse_number, store.list_names(CHECKPOINTS)) if step is not None)


def read_committed(store: Store) -> dict[int, Manifest]:
    """Return the manifests of all committed steps, ascending by step."""

    def read(step: int) -> Manifest | None:
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except UNREADABLE_ERRORS:
            return None

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for steps in _list_until_stable(store):
            manifests = list(pool.map(read, steps))
    return {step: manifest for step, manifest in zip(steps, manifests, strict=True) if manifest is not None}


def read_newest_manifest(store: Store) -> Manifest | None:
    """Return the newest manifest that can be read, None if there is none.

    Raises `NewerFormatError` if a newer runner has written one of those that come before it.
    """
    for steps in _list_until_stable(store):
        for step in reversed(steps):
            try:
                return read_manifest(store, f"{CHECKPOINTS}/{step}")
            except NewerFormatError:
                raise
            except UNREADABLE_ERRORS:
                continue
    return None


def _list_until_stable(store: Store) -> Iterator[list[int]]:
    """Yield the steps, and again as long as they change while the caller reads their manifests.

    A live run deletes its old checkpoint right after it has committed the next one, so every manifest of a listing may
    be gone when it is read, although there is a committed checkpoint at every moment.
    """
    before: list[int] | None = None
    for _ in range(MAX_LISTINGS):
        steps = list_steps(store)
        if steps == before:
            return
        yield steps
        before = steps


def is_committed(store: Store, name: str) -> bool:
    """Return True if a checkpoint has a manifest, good or not."""
    try:
        read_manifest(store, f"{CHECKPOINTS}/{name}")
    except NotCommittedError:
        return False
    except ValueError:
        return True
    return True


def find_file_problems(
    store: Store, directory: str, files: Files, part: int = 0, num_parts: int = 1, trust_store: bool = True
) -> list[str]:
    """Return one line for each of the `files` of the checkpoint in `directory` whose bytes are wrong.

    Several processes can divide the work: each checks one `part` of `num_parts`. With `trust_store` a digest is
    accepted that the store itself reports; else every byte is read.
    """
    sizes = store.list_sizes(directory)

    def find_problem(name: str) -> str | None:
        size, digest = files[name]
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, the manifest says {size}"
        path = f"{directory}/{name}"
        try:
            # A disk reports no digests of its own, so there the bytes are read in either case.
            is_reported = trust_store or store.root is not None
            found = store.compute_digest(path) if is_reported else compute_crc32c(store.read(path))
        except FileNotFoundError:
            return f"{name} is missing"
        return None if found == digest else f"{name} does not match its CRC-32C"

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        problems = pool.map(find_problem, sorted(files)[part::num_parts])
        return [problem for problem in problems if problem is not None]


# Commit, tombstone and deletion of a step. Process 0 only.


def commit(store: Store, directory: str, manifest: Manifest, attempt: int) -> None:
    """Create the manifest of `directory`, all of whose files are durable. This is the commit. Process 0 only.

    Raises:
        FileExistsError: another attempt was first, with a commit or a tombstone.
        FileNotFoundError: another attempt has retired the directory.
    """
    name = f"{directory}/{MANIFEST}"
    if isinstance(store, LocalStore):
        # The content is written beside the arrays and then linked to its name. The link fails if a newer attempt has
        # renamed `directory`.
        store.create_from(f"{directory}/{manifest.arrays}", name, manifest.encode())
        return
    present, version = store.read_versioned(name)
    if present == _encode_tombstone(attempt):
        # This attempt retired the step itself and now saves it again. An earlier attempt may still try to commit its
        # own save of the step, so the manifest is marked: a tombstone must replace it when it is deleted.
        store.write_if(name, replace(manifest, contested=True).encode(), version)
    else:
        store.write_if(name, manifest.encode(), ABSENT)


def uncommit(store: Store, directory: str, attempt: int) -> None:
    """Delete the manifest of a committed checkpoint, before its files are deleted. Process 0 only.

    A process of an earlier attempt may be about to commit the same step. Either the manifest or the arrays of another
    attempt tell: then a tombstone takes the place of the manifest, and on a disk these arrays are deleted first.
    """
    name = f"{directory}/{MANIFEST}"
    content, version = store.read_versioned(name)
    record = _parse_or_empty(content)
    others = [
        each
        for each in store.list_names(directory)
        if "arrays" in record
        if each.startswith(ARRAYS) and each != record["arrays"] and not _is_newer(each, attempt)
    ]
    if isinstance(store, LocalStore):
        for each in others:
            store.remove_tree(f"{directory}/{each}")
        store.remove(name)
        # After a power cut no file may be missing beside a manifest that names it.
        store.flush_names(directory)
    elif "contested" in record or others:
        store.write_if(name, _encode_tombstone(attempt), version)
    elif TOMBSTONE not in record:
        store.remove(name)


def retire_uncommitted(store: Store, step: int, attempt: int) -> None:
    """Delete an uncommitted step in such a way that no earlier attempt can still commit it. Process 0 only.

    A committed step is left alone.
    """
    directory = f"{CHECKPOINTS}/{step}"
    if store.root is not None:
        # The rename is the atomic decision. A manifest that was created right before it moves with the directory: then
        # the checkpoint is committed, and `finish_retirements` renames it back.
        if _is_directory(store, directory) and not store.exists(f"{directory}/{MANIFEST}"):
            retired = f"{directory}{RETIRED_SUFFIX}"
            if store.exists(retired):  # an earlier one that cannot be deleted
                retired = f"{directory}.{attempt}{RETIRED_SUFFIX}"
            try:
                as_local(store).move_tree(directory, retired)
            except ForbiddenError as error:
                # An immutable directory, in which no process can commit either, or one of another user. It must not
                # keep the run from starting.
                warn(f"{store.url}/{directory}, an unfinished save, cannot be moved away and stays: {error}")
                return
            finish_retirements(store)
        return
    name = f"{directory}/{MANIFEST}"
    content, version = store.read_versioned(name)
    # Only the absence of a manifest, or the tombstone of this or an earlier attempt, may be replaced.
    if version != ABSENT and not 0 < _parse_or_empty(content).get(TOMBSTONE, 0) <= attempt:
        return
    try:
        store.write_if(name, _encode_tombstone(attempt), version)
    except FileExistsError:
        return
    # Only now may the files be deleted: until the tombstone existed, an earlier attempt could have committed them.
    try:
        remove_files(store, directory, attempt)
    except PermissionError as error:
        warn(f"{store.url}/{directory}, an unfinished save, cannot be deleted and stays: {error}")


def finish_retirements(store: Store) -> None:
    """Finish what `retire_uncommitted` had begun on a disk when it was killed. Process 0 only.

    A renamed directory without a manifest is deleted, and one with a manifest is renamed back. If its old name belongs
    to another committed checkpoint, both are kept. Anything that is not a directory was not created by a run, and is
    kept.
    """
    for name in store.list_names(CHECKPOINTS) if store.root is not None else []:
        step = name.removesuffix(RETIRED_SUFFIX).partition(".")[0]
        retired, source = f"{CHECKPOINTS}/{name}", f"{CHECKPOINTS}/{step}"
        if not name.endswith(RETIRED_SUFFIX) or parse_number(step) is None or not _is_directory(store, retired):
            continue
        try:
            if not store.exists(f"{retired}/{MANIFEST}"):
                # An earlier attempt may have deleted the manifest a moment ago: see `uncommit`.
                as_local(store).flush_names(retired)
                store.remove_tree(retired)
            elif not store.exists(f"{source}/{MANIFEST}"):
                store.remove_tree(source)
                as_local(store).move_tree(retired, source)
        except OSError as error:
            # A file may be immutable, or open on another host of an NFS. Only space is lost.
            warn(f"{store.url}/{retired}, left by an unfinished save, cannot be cleaned up and stays: {error}")


def remove_files(store: Store, directory: str, attempt: int) -> None:
    """Delete the files of a checkpoint except its manifest. On a disk, delete a directory without a manifest too.

    Arrays of an attempt that is newer than `attempt`, whose process may have been suspended until now, are kept. In a
    bucket, those of a checkpoint in quarantine are kept too: they have stayed where they were written.
    """
    kept = {MANIFEST}
    for place in store.list_names(QUARANTINE) if store.root is None else []:
        if place.partition(".")[0] == directory.rpartition("/")[2]:
            kept.update(name for name in store.list_names(f"{QUARANTINE}/{place}") if name.startswith(ARRAYS))
    names = store.list_names(directory)
    kept.update(name for name in names if name.startswith(ARRAYS) and _is_newer(name, attempt))
    for name in names:
        if name not in kept:
            store.remove_tree(f"{directory}/{name}")
    if store.root is not None and not kept & {*store.list_names(directory)}:
        store.remove_tree(directory)


def _is_newer(arrays: str, attempt: int) -> bool:
    """Return True if a directory of arrays, `arrays.<attempt>`, is of a newer attempt."""
    return (parse_number(arrays.split(".")[1]) or 0) > attempt


def quarantine_files(store: Store, step: int, place: str, attempt: int) -> None:
    """Move a committed step to `place` in quarantine, so that it is no checkpoint any more. Process 0 only.

    In a bucket the arrays stay, since a move would copy each object while all hosts wait. An object with the name of
    their directory takes their place, and keeps `remove_files` from deleting them.
    """
    directory, target = f"{CHECKPOINTS}/{step}", f"{QUARANTINE}/{place}"
    if store.root is not None:
        as_local(store).move_tree(directory, target)
        return
    # The manifest goes first: a kill in between must not leave one that the next restore would try again.
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if version != ABSENT:
        store.write(f"{target}/{MANIFEST}", content)
        uncommit(store, directory, attempt)
    for name in store.list_names(directory):
        if name.startswith(ARRAYS):
            store.write(f"{target}/{name}", f"{store.url}/{directory}/{name}".encode())
        elif name != MANIFEST:
            store.write(f"{target}/{name}", store.read(f"{directory}/{name}"))
            store.remove(f"{directory}/{name}")


def _is_directory(store: Store, name: str) -> bool:
    try:
        return store.root is not None and find_kind(store.root / name) == "a directory"
    except WrongKindError:
        return False


def _encode_tombstone(attempt: int) -> bytes:
    return seal({"format": FORMAT_1, TOMBSTONE: attempt})


def _parse_or_empty(content: bytes) -> JsonObject:
    """Return the content of a manifest or tombstone; an empty object if it is damaged or of a newer runner."""
    try:
        return parse_manifest(content)
    except ValueError:
        return {}
