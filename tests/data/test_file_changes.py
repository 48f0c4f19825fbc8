"""Files replaced while a job runs: changed content is found even with equal size and time, and a touch is harmless."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.data.source_files import SourceFile, describe_file
from runner.data.token_files import TokenSequence
from runner.errors import DataError
from tests.data.buckets import make_random_shards, write_corpus
from tests.data.datasets import load, mark_every_third, write_bin, write_npy
from tests.data.golden import copy_golden, write_records


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


IDS = np.random.default_rng(0).integers(0, 250, 5000)


def _write_masked_corpus(root: Path, **changes: Any) -> str:
    return str(
        write_corpus(root / "corpus", make_random_shards([[300, 200], [700]], 250), vocabulary_size=250, **changes)
    )


def _copy_golden(root: Path, place: str) -> str:
    return f"{copy_golden(root / 'golden')}/{place}"


def _write_record_file(root: Path) -> str:
    write_records(root / "a.array_record", [IDS[:3000].tolist(), IDS[3000:].tolist()])
    return f"{root}/a.array_record"


def _write_bins(root: Path) -> str:
    for number in range(3):
        write_bin(root / f"{number}.bin", IDS)
    return f"{root}/*.bin"


# Writer of the source, the file of it to replace, and keys of the data config.
SOURCES: dict[str, tuple[Callable[[Path], str], str, dict[str, Any]]] = {
    "bin": (lambda root: str(write_bin(root / "a.bin", IDS)), "a.bin", {}),
    "npy": (lambda root: str(write_npy(root / "a.npy", IDS)), "a.npy", {}),
    "one_of_several": (_write_bins, "1.bin", {}),
    "megatron": (lambda root: _copy_golden(root, "megatron/int32.idx"), "golden/megatron/int32.bin", {}),
    "mds": (lambda root: _copy_golden(root, "mds/ndarray_int32"), "golden/mds/ndarray_int32/shard.00000.mds", {}),
    "array_record": (_write_record_file, "a.array_record", {"options": {"dtype": "uint16"}}),
    "corpus": (_write_masked_corpus, "corpus/00001.bin", {}),
    "mask": (
        lambda root: _write_masked_corpus(root, marks_of=mark_every_third),
        "corpus/00001.answers",
        {"train_on": "answers"},
    ),
}


def damage(content: bytes) -> bytes:
    """Change the ids of the second half and keep the first, which may hold a header."""
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 1 for byte in content[middle:])


def rewrite(path: Path, content: bytes) -> None:
    """Overwrite the content in place and restore the modification time."""
    time = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(time, time))


def rename_over(path: Path, content: bytes) -> None:
    """Replace the file by another one with the same modification time."""
    time = path.stat().st_mtime_ns
    other = path.with_name("other.tmp")
    other.write_bytes(content)
    os.utime(other, ns=(time, time))
    os.replace(other, path)


def chmod(path: Path, content: bytes) -> None:
    path.chmod(0o600)


def link(path: Path, content: bytes) -> None:
    os.link(path, path.with_name("link.tmp"))


def restore_from_backup(path: Path, content: bytes) -> None:
    rename_over(path, path.read_bytes())


def open_source(kind: str, root: Path) -> tuple[Any, Path]:
    make, name, changes = SOURCES[kind]
    dataset = load(make(root), cache=root / "cache", **changes)
    dataset.read("train", 0, 4)
    dataset.check()
    return dataset, root / name


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("replace", [rewrite, rename_over], ids=lambda replace: replace.__name__)
def test_changed_content_of_equal_size_and_time_is_detected(
    kind: str, replace: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    dataset, path = open_source(kind, tmp_path)
    replace(path, damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{path.name}: changed since the job started|{path.name}: ") as caught:
        dataset.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("touch", [chmod, link, restore_from_backup], ids=lambda touch: touch.__name__)
def test_unchanged_content_is_compared_once_without_an_error(
    kind: str, touch: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, path = open_source(kind, tmp_path)
    before = dataset.read("train", 0, 40)
    touch(path, b"")
    dataset.check()
    monkeypatch.setattr(TokenSequence, "probe", lambda tokens: pytest.fail("compared again"))
    dataset.check()
    for field, values in dataset.read("train", 0, 40).items():
        np.testing.assert_array_equal(values, before[field])
    monkeypatch.undo()
    rewrite(path, damage(path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        dataset.check()


def test_unstable_inodes_are_ignored_after_one_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, _ = open_source("bin", tmp_path)
    fresh = iter(range(1, 100))
    status = os.stat

    def unstable(path: Any, **options: Any) -> os.stat_result:
        found = list(status(path, **options))
        return os.stat_result([found[0], next(fresh), *found[2:]], get_fields(status(path, **options)))

    def get_fields(found: os.stat_result) -> dict[str, Any]:
        return {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}

    monkeypatch.setattr("os.stat", unstable)
    dataset.check()
    monkeypatch.setattr(TokenSequence, "probe", lambda tokens: pytest.fail("compared again"))
    dataset.check()


def _write_text(root: Path, number: int) -> str:
    (root / "a.txt").write_text("ab"[number] * 5000)
    return f"{root}/a.txt"


def _write_bin(root: Path, number: int) -> str:
    return str(write_bin(root / "a.bin", IDS + number))


def _write_table(root: Path, number: int) -> str:
    rows = [[7 + number] * 50, [3] * 50] * 50
    # Without an encoding that depends on the values, both files have the same size.
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"input_ids": rows}), root / "a.parquet", **options)
    return f"{root}/a.parquet"


def _write_two_records(root: Path, number: int) -> str:
    cut = (3000, 2000)[number]
    write_records(root / "a.array_record", [IDS[:cut].tolist(), IDS[cut:].tolist()])
    return f"{root}/a.array_record"


# Writers of two sources that differ in their content alone.
PAIRS: dict[str, tuple[Callable[[Path, int], str], dict[str, Any]]] = {
    "text": (_write_text, {}),
    "bin": (_write_bin, {}),
    "table": (_write_table, {}),
    "records": (_write_two_records, {"options": {"dtype": "uint16"}}),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_an_edit_between_runs_is_no_hit_in_the_cache(kind: str, tmp_path: Path) -> None:
    write, changes = PAIRS[kind]

    def describe(cache: str) -> Any:
        dataset = load(source, cache=tmp_path / cache, **changes)
        return dataset.fingerprint, dataset.vocabulary_size, dataset.read("train", 0, 4)["x"].tolist()

    source = write(tmp_path, 0)
    before, status = describe("cache"), os.stat(source)
    write(tmp_path, 1)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(source).st_size == status.st_size
    found = describe("cache")
    assert found != before
    assert found == describe("fresh")


def test_a_changed_validation_set_is_detected(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", IDS)
    path = write_bin(tmp_path / "held_out.bin", IDS)
    dataset = load(tmp_path / "train.bin", cache=tmp_path / "cache", validation={"other": str(path)})
    path.chmod(0o600)
    dataset.check()
    rewrite(path, damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"held_out\.bin: changed since the job started"):
        dataset.check()
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("kind", SOURCES)
def test_other_hosts_check_some_files_at_each_save(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, path = open_source(kind, tmp_path)
    monkeypatch.setattr("runner.data.token_files._CHECKED_FILES", 2)
    checked: list[str] = []

    def describe(path: Path) -> SourceFile:
        checked.append(path.name)
        return describe_file(path)

    monkeypatch.setattr("runner.data.readers.describe_file", describe)
    dataset.check()
    names, checked[:] = list(checked), []
    (sequences,) = [[source, source._completion_mask] for source in dataset._sources.values()]
    num_sequences = sum(sequence is not None for sequence in sequences)
    for _ in range(-(-len(names) // 2)):
        before = len(checked)
        dataset.check(is_main=False)
        assert len(checked) - before <= 2 * num_sequences
    assert set(checked) == set(names)
    rewrite(path, damage(path.read_bytes()))

    def check_all() -> None:
        for _ in names:
            dataset.check(is_main=False)

    with pytest.raises(DataError, match=rf"{path.name}: changed since the job started|{path.name}: "):
        check_all()
