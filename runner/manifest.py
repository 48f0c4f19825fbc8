"""The manifest: what makes a directory a checkpoint, and what its files must look like. Reads only; never orbax.

`manifest.json` holds the step, the identity of the run, shape, dtype and digest of every leaf, size and CRC-32C of
every file, and a digest of itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.errors import ResumeError
from runner.fingerprint import describe
from runner.spec import hash_of
from runner.storage import crc32c, encode_json, read_json

FORMAT = 1
MANIFEST = "manifest.json"


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """The content of `manifest.json`, with its own digest."""
    return encode_json(manifest | {"digest": hash_of(manifest)})


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of one checkpoint. Raises `FileNotFoundError` if there is none, `ValueError` if it is damaged."""
    manifest = read_json(directory / MANIFEST)
    digest = manifest.pop("digest", None)
    if digest != hash_of(manifest) or manifest.get("format") != FORMAT:
        raise ValueError("manifest.json is damaged: it does not match its own digest")
    return manifest


def step_directories(checkpoints: Path) -> Iterator[Path]:
    """Every directory named after a step, committed or not, in no order."""
    if checkpoints.exists():
        yield from (path for path in checkpoints.iterdir() if path.name.isdecimal())


def committed_steps(checkpoints: Path) -> list[int]:
    """The steps that have a manifest, ascending by number."""
    return sorted(int(path.name) for path in step_directories(checkpoints) if (path / MANIFEST).exists())


def newest_manifest(checkpoints: Path) -> dict[str, Any] | None:
    """The newest manifest that can be read, None if there is none."""
    for step in reversed(committed_steps(checkpoints)):
        try:
            return read_manifest(checkpoints / str(step))
        except ValueError:
            continue
    return None


def file_problem(directory: Path, manifest: dict[str, Any], part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with the bytes of a checkpoint, None if nothing is. Checks every `num_parts`-th file."""
    for name in sorted(manifest["files"])[part::num_parts]:
        size, digest = manifest["files"][name]
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {size}"
        if crc32c(path) != digest:
            return f"{name} does not match its CRC-32C"
    return None


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
