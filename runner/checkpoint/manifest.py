"""The manifest: what makes a directory a checkpoint, and what its files must look like. Knows no arrays.

`manifest.json` holds the step, the identity of the run, shape, dtype and digest of every leaf, size and CRC-32C of
every file, and a digest of itself. In a bucket a tombstone stands in its place (`tombstone`) where a step was never
committed and whoever may still be writing it has lost the right to.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypedDict

from runner.checkpoint.fingerprint import LeafRecord, LeafShape, describe
from runner.errors import ResumeError
from runner.spec import Trajectory, hash_of
from runner.storage import JsonObject, Store, encode_json, read_json

FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
TOMBSTONE = "void"  # the key of a tombstone: the attempt that has put it
_NUM_READERS = 8

Files = dict[str, list[Any]]  # name -> [bytes, CRC-32C]


class Shard(TypedDict):
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
    environment: JsonObject | None = None
    files: Files = field(default_factory=dict)
    shards: dict[str, list[Shard]] | None = None
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
        """The inverse of `to_json`; keys that are not known are passed over."""
        return cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})


def seal(record: JsonObject) -> bytes:
    """`record` with its own digest, as the content of a file."""
    return encode_json(record | {"digest": hash_of(record)})


def read_manifest(store: Store, directory: str) -> Manifest:
    """The manifest of one checkpoint. Raises `NotCommittedError`, or `ValueError` if it is damaged."""
    try:
        record = read_json(store, f"{directory}/{MANIFEST}")
    except FileNotFoundError as error:
        raise NotCommittedError("no manifest.json: it was never committed") from error
    digest = record.pop("digest", None)
    if digest != hash_of(record) or record.get("format") != FORMAT:
        raise ValueError("damaged: it does not match its own digest")
    if TOMBSTONE in record:
        raise NotCommittedError(f"attempt {record[TOMBSTONE]} found it unfinished")
    return Manifest.from_json(record)


def steps(store: Store) -> list[int]:
    """Every step that has a directory, committed or not, ascending by number."""
    return sorted(int(name) for name in store.children(CHECKPOINTS) if name.isdecimal())


def committed(store: Store) -> dict[int, Manifest]:
    """The manifests of all steps that have a whole one, ascending by step."""

    def read(step: int) -> Manifest | None:
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except (FileNotFoundError, ValueError):
            return None

    numbers = steps(store)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        manifests = list(pool.map(read, numbers))
    return {step: manifest for step, manifest in zip(numbers, manifests, strict=True) if manifest is not None}


def newest_manifest(store: Store) -> Manifest | None:
    """The newest manifest that can be read, None if there is none."""
    for step in reversed(steps(store)):
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except (FileNotFoundError, ValueError):
            continue
    return None


def file_problems(store: Store, directory: str, files: Files, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is wrong with the bytes of a checkpoint, a line a bad file. Checks every `num_parts`-th file.

    Reads every byte, except where the store reports digests of its own.
    """
    sizes = store.sizes(directory)

    def problem(name: str) -> str | None:
        size, digest = files[name]
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, the manifest says {size}"
        try:
            if store.digest(f"{directory}/{name}") != digest:
                return f"{name} does not match its CRC-32C"
        except FileNotFoundError:
            return f"{name} is missing"
        return None

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        found = pool.map(problem, sorted(files)[part::num_parts])
        return [text for text in found if text is not None]


def check_leaves(manifest: Manifest, abstract: Any, may_hold_more: bool = False) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    With `may_hold_more`, leaves that only the checkpoint has are passed over.
    """
    expected = describe(abstract)
    saved = {name: LeafShape(shape=leaf["shape"], dtype=leaf["dtype"]) for name, leaf in manifest.leaves.items()}
    compared = expected.keys() if may_hold_more else expected.keys() | saved.keys()
    names = sorted(name for name in compared if expected.get(name) != saved.get(name))
    if names:
        lines = [f"{name}: checkpoint has {_leaf(saved, name)}, the job {_leaf(expected, name)}" for name in names[:8]]
        more = f"\n  and {len(names) - 8} more" if len(names) > 8 else ""
        raise ResumeError(f"checkpoint {manifest.name} does not fit this job\n  " + "\n  ".join(lines) + more)


def _leaf(leaves: dict[str, LeafShape], name: str) -> str:
    if name not in leaves:
        return "nothing"
    return f"{leaves[name]['dtype']}[{','.join(map(str, leaves[name]['shape']))}]"
