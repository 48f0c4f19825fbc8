"""The manifest: what makes a directory a checkpoint, and what its files must look like. Knows no arrays.

`manifest.json` holds the step, the identity of the run, shape, dtype and digest of every leaf, size and CRC-32C of
every file, and a digest of itself. In a bucket a *void* manifest says that a step was never committed and that whoever
may still be writing it has lost the right to: only one of the two can be created.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from runner.checkpoint.fingerprint import describe
from runner.errors import ResumeError
from runner.spec import hash_of
from runner.storage import Store, encode_json, read_json

FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
_RETIRED = ".retired"
_NUM_READERS = 8


class NotCommittedError(FileNotFoundError):
    """The directory holds no checkpoint: its save did not end, or was made void."""


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """The content of `manifest.json`, with its own digest."""
    return encode_json(manifest | {"digest": hash_of(manifest)})


def read_manifest(store: Store, directory: str) -> dict[str, Any]:
    """The manifest of one checkpoint. Raises `NotCommittedError`, or `ValueError` if it is damaged."""
    try:
        manifest = read_json(store, f"{directory}/{MANIFEST}")
    except FileNotFoundError as error:
        raise NotCommittedError("no manifest.json: it was never committed") from error
    digest = manifest.pop("digest", None)
    if digest != hash_of(manifest) or manifest.get("format") != FORMAT:
        raise ValueError("damaged: it does not match its own digest")
    if "void" in manifest:
        raise NotCommittedError(f"attempt {manifest['void']} found it unfinished")
    return manifest


def steps(store: Store) -> list[int]:
    """Every step that has a directory, committed or not, ascending by number."""
    return sorted(int(name) for name in store.children(CHECKPOINTS) if name.isdecimal())


def committed(store: Store) -> dict[int, dict[str, Any]]:
    """The manifests of all steps that have a whole one, ascending by step."""

    def read(step: int) -> dict[str, Any] | None:
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except (FileNotFoundError, ValueError):
            return None

    numbers = steps(store)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        manifests = list(pool.map(read, numbers))
    return {step: manifest for step, manifest in zip(numbers, manifests, strict=True) if manifest is not None}


def newest_manifest(store: Store) -> dict[str, Any] | None:
    """The newest manifest that can be read, None if there is none."""
    for step in reversed(steps(store)):
        try:
            return read_manifest(store, f"{CHECKPOINTS}/{step}")
        except (FileNotFoundError, ValueError):
            continue
    return None


def file_problems(
    store: Store, directory: str, manifest: dict[str, Any], part: int = 0, num_parts: int = 1
) -> list[str]:
    """What is wrong with the bytes of a checkpoint, a line a bad file. Checks every `num_parts`-th file.

    Reads every byte, except where the store reports digests of its own.
    """
    sizes = store.sizes(directory)

    def problem(name: str) -> str | None:
        size, digest = manifest["files"][name]
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
        found = pool.map(problem, sorted(manifest["files"])[part::num_parts])
        return [text for text in found if text is not None]


def check_leaves(manifest: dict[str, Any], abstract: Any, may_hold_more: bool = False) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    With `may_hold_more`, leaves that only the checkpoint has are passed over.
    """
    expected = describe(abstract)
    saved = {name: {"shape": leaf["shape"], "dtype": leaf["dtype"]} for name, leaf in manifest["leaves"].items()}
    compared = expected.keys() if may_hold_more else expected.keys() | saved.keys()
    names = sorted(name for name in compared if expected.get(name) != saved.get(name))
    if names:
        lines = [f"{name}: checkpoint has {_leaf(saved, name)}, the job {_leaf(expected, name)}" for name in names[:8]]
        more = f"\n  and {len(names) - 8} more" if len(names) > 8 else ""
        raise ResumeError(f"checkpoint {manifest['name']} does not fit this job\n  " + "\n  ".join(lines) + more)


def _leaf(leaves: dict[str, dict[str, Any]], name: str) -> str:
    if name not in leaves:
        return "nothing"
    shape, dtype = leaves[name]["shape"], leaves[name]["dtype"]
    return f"{dtype}[{','.join(map(str, shape))}]"
