"""Whether the leaves of a checkpoint are those of a job's state."""

from typing import Any

from runner.checkpoint.fingerprint import describe
from runner.checkpoint.leaves import listed, type_text
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.manifest_key import LeafShape
from runner.errors import ResumeError


def check_leaves(manifest: Manifest, abstract: Any, may_hold_more: bool = False) -> None:
    """Raise `ResumeError` if the job's state has other leaves than the checkpoint: its code or spec has changed.

    With `may_hold_more`, leaves that only the checkpoint has are passed over.
    """
    expected = describe(abstract)
    saved = {name: LeafShape(shape=leaf["shape"], dtype=leaf["dtype"]) for name, leaf in manifest.leaves.items()}
    compared = expected.keys() if may_hold_more else expected.keys() | saved.keys()
    names = sorted(name for name in compared if expected.get(name) != saved.get(name))
    if names:
        lines = [f"{name}: checkpoint has {_leaf(saved, name)}, the job {_leaf(expected, name)}" for name in names]
        raise ResumeError(f"checkpoint {manifest.name} does not fit this job{listed(lines)}")


def _leaf(leaves: dict[str, LeafShape], name: str) -> str:
    return type_text(leaves[name]["dtype"], leaves[name]["shape"]) if name in leaves else "nothing"
