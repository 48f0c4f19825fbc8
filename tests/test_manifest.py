"""What makes a directory a checkpoint, and what is wrong with one."""

import json

import jax
import jax.numpy as jnp
import pytest

from runner.errors import ResumeError
from runner.manifest import (
    FORMAT,
    MANIFEST,
    check_leaves,
    committed_steps,
    encode_manifest,
    file_problem,
    newest_manifest,
    read_manifest,
)
from runner.storage import crc32c


def commit(checkpoints, step, **more):
    directory = checkpoints / str(step)
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_bytes(encode_manifest({"format": FORMAT, "step": step} | more))
    return directory


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    manifest = {"format": FORMAT, "step": 7, "leaves": {"w": {"shape": [2], "dtype": "int8"}}, "time": 1.5}
    directory = commit(tmp_path, 7)
    (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    assert read_manifest(directory) == manifest


def test_any_change_of_a_manifest_is_seen(tmp_path):
    directory = commit(tmp_path, 7, time=123.5)
    content = json.loads((directory / MANIFEST).read_text())
    for changed in (content | {"step": 8}, content | {"more": 1}, content | {"digest": "0"}, content | {"format": 0}):
        (directory / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="does not match its own digest"):
            read_manifest(directory)


def test_only_numbered_directories_with_a_manifest_are_committed_steps_in_order(tmp_path):
    for step in (1000, 900, 99):
        commit(tmp_path, step)
    commit(tmp_path, "best")
    (tmp_path / "2000").mkdir()
    (tmp_path / "3000").touch()
    assert committed_steps(tmp_path) == [99, 900, 1000]
    assert committed_steps(tmp_path / "none") == []


def test_the_newest_manifest_is_the_newest_that_can_be_read(tmp_path):
    assert newest_manifest(tmp_path) is None
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (tmp_path / "3" / MANIFEST).write_bytes(b"{")
    assert newest_manifest(tmp_path)["step"] == 2


def test_files_are_checked_by_size_and_sum_and_shared_out_over_hosts(tmp_path):
    files = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 10)
        files[name] = [10, crc32c(tmp_path / name)]
    manifest = {"files": files}
    assert file_problem(tmp_path, manifest) is None
    (tmp_path / "b").write_bytes(b"x" * 10)
    assert file_problem(tmp_path, manifest) == "b does not match its CRC-32C"
    problems = [file_problem(tmp_path, manifest, part, 2) for part in range(2)]
    assert problems == [None, "b does not match its CRC-32C"]
    (tmp_path / "b").write_bytes(b"x")
    assert file_problem(tmp_path, manifest) == "b has 1 bytes, the manifest says 10"
    (tmp_path / "b").unlink()
    assert file_problem(tmp_path, manifest) == "b is missing"


def test_leaves_that_differ_are_named():
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.int32)}
    saved = {"w": {"shape": [2, 3], "dtype": "float32"}, "b": {"shape": [], "dtype": "int32"}}
    check_leaves({"name": "5", "leaves": saved}, abstract)
    more = saved | {"old": {"shape": [1], "dtype": "bool"}, "b": {"shape": [4], "dtype": "int32"}}
    with pytest.raises(ResumeError) as caught:
        check_leaves({"name": "5", "leaves": more}, abstract)
    assert str(caught.value).splitlines() == [
        "checkpoint 5 does not fit this job",
        "  b: checkpoint has int32[4], the job int32[]",
        "  old: checkpoint has bool[1], the job nothing",
    ]
    check_leaves({"name": "5", "leaves": saved | {"old": more["old"]}}, abstract, may_hold_more=True)
