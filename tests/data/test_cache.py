import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.data.readers import cache_key, publish, read_record, write_record
from runner.data.source_files import SourceFile
from runner.storage import default_cache_directory


def test_the_default_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("RUNNER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_directory() == Path("/home/ada/.cache/runner")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert default_cache_directory() == Path("/scratch/runner")
    monkeypatch.setenv("RUNNER_CACHE", "/tokens")
    assert default_cache_directory() == Path("/tokens")


def test_a_key_changes_with_every_part_of_a_file_s_identity() -> None:
    variants = [
        ("bytes", SourceFile(Path("/a"), 1, 1)),
        ("characters", SourceFile(Path("/a"), 1, 1)),
        ("bytes", SourceFile(Path("/b"), 1, 1)),
        ("bytes", SourceFile(Path("/a"), 2, 1)),
        ("bytes", SourceFile(Path("/a"), 1, 2)),
    ]
    assert len({cache_key(kind, [file]) for kind, file in variants}) == len(variants)


def test_a_record_reads_back_as_written(tmp_path: Path) -> None:
    write_record(tmp_path / "new", "key", {"a": [1, "é"], "b": None})
    assert read_record(tmp_path / "new", "key") == {"a": [1, "é"], "b": None}
    assert read_record(tmp_path, "other") is None


def test_a_record_that_is_cut_or_altered_anywhere_is_a_miss(tmp_path: Path) -> None:
    write_record(tmp_path, "key", {"num_tokens": 12345})
    path = tmp_path / "key.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_record(tmp_path, "key") is None
    path.write_bytes(whole.replace(b"12345", b"12346"))
    assert read_record(tmp_path, "key") is None
    for other in (b"[]", b"{}", b"null", b"\xff"):
        path.write_bytes(other)
        assert read_record(tmp_path, "key") is None


def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "array"
    publish(path, [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        publish(path, chunks())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["array"]
