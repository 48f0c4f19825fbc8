"""Parquet and Arrow tables of token ids: ids and documents in order, on disk and in a bucket."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.data.tables import _read_rows
from runner.errors import DataError
from tests.data.buckets import URL, put_in_bucket
from tests.data.datasets import load


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


RANDOM = np.random.default_rng(0)
ROWS = [RANDOM.integers(0, 5000, size).tolist() for size in RANDOM.zipf(1.5, 400).clip(1, 300)]
IDS = [token for row in ROWS for token in row]
ENDS = np.cumsum([len(row) for row in ROWS]).tolist()


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=50, **options)


def write_arrow(path: Path, columns: dict[str, Any], **options: Any) -> None:
    table = pa.table(columns)
    with pa.ipc.new_file(path, table.schema, **options) as file:
        file.write_table(table, max_chunksize=70)


def write_stream(path: Path, columns: dict[str, Any], **options: Any) -> None:
    """Write an Arrow stream, the format of `save_to_disk` of `datasets`."""
    table = pa.table(columns)
    with pa.ipc.new_stream(path, table.schema, **options) as file:
        file.write_table(table, max_chunksize=70)


WRITERS: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "parquet": (write_parquet, "a.parquet", {}),
    "parquet_zstd": (write_parquet, "a.parquet", {"compression": "zstd", "data_page_version": "2.0"}),
    "parquet_plain": (write_parquet, "a.parquet", {"compression": "none", "use_dictionary": False}),
    "arrow": (write_arrow, "a.arrow", {}),
    "arrow_lz4": (write_arrow, "a.arrow", {"options": pa.ipc.IpcWriteOptions(compression="lz4")}),
    "stream": (write_stream, "a.arrow", {}),
}


def make_column(kind: Any = None) -> pa.Array:
    return pa.array(ROWS, kind or pa.list_(pa.int32()))


def open_tables(root: Path, **changes: Any) -> Any:
    (root / "data").mkdir(exist_ok=True)
    (path,) = sorted((root / "data").iterdir())
    return load(path, cache=root / "cache", **changes)


def write_columns(root: Path, columns: dict[str, Any], name: str = "parquet") -> None:
    writer, file_name, options = WRITERS[name]
    (root / "data").mkdir(exist_ok=True)
    writer(root / "data" / file_name, columns, **options)


def check_content(dataset: Any, ids: list[int], ends: list[int]) -> None:
    source = dataset.train_sources[0].source
    assert source.read(0, len(source)).tolist() == ids
    assert source.read(100, 300).tolist() == ids[100:300]
    assert source.document_ends(0, len(source)).tolist() == sorted(set(ends))
    dataset.check()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_ids_and_documents_are_read_as_written(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_columns(tmp_path, {"text": ["a"] * len(ROWS), "input_ids": make_column()}, name)
    expected = open_tables(tmp_path)
    check_content(expected, IDS, ENDS)
    if place == "bucket":
        put_in_bucket(monkeypatch, tmp_path / "data")
        for _ in range(2):  # cold and warm cache
            dataset = load(f"{URL}/{WRITERS[name][1]}", cache=tmp_path / "other", vocabulary_size=6000)
            check_content(dataset, IDS, ENDS)
            assert dataset.fingerprint == expected.fingerprint
            assert dataset.train_sources[0].source.bytes_copied > 0


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.list_(pa.uint16()),
        pa.large_list(pa.int64()),
        pa.list_(pa.dictionary(pa.int16(), pa.int32())),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_lists_of_every_integer_type_are_read(name: str, kind: Any, tmp_path: Path) -> None:
    if pa.types.is_dictionary(kind.value_type):
        flat = pa.array(IDS, pa.int32()).dictionary_encode()
        column = pa.ListArray.from_arrays(pa.array([0, *ENDS], pa.int32()), flat)
    else:
        column = make_column(kind)
    write_columns(tmp_path, {"input_ids": column}, name)
    check_content(open_tables(tmp_path), IDS, ENDS)


def test_fixed_size_lists_are_read(tmp_path: Path) -> None:
    ids = RANDOM.integers(0, 5000, (90, 64))
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), 64)
    for name in ("parquet", "arrow"):
        (tmp_path / name).mkdir()
        write_columns(tmp_path / name, {"input_ids": column}, name)
        check_content(open_tables(tmp_path / name), ids.ravel().tolist(), list(range(64, 64 * 91, 64)))


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_missing_and_empty_rows_are_skipped(name: str, tmp_path: Path) -> None:
    holed = [part for row in ROWS for part in (row, [], None)]
    write_columns(tmp_path, {"input_ids": pa.array(holed, pa.list_(pa.int32()))}, name)
    check_content(open_tables(tmp_path, packing="documents"), IDS, ENDS)


def test_files_are_read_in_order_and_the_order_enters_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i, part in enumerate((ROWS[:200], ROWS[200:])):
        write_parquet(tmp_path / "data" / f"{i}.parquet", {"input_ids": pa.array(part, pa.list_(pa.int32()))})
    dataset = load(f"{tmp_path}/data/*.parquet", cache=tmp_path / "cache")
    check_content(dataset, IDS, ENDS)
    (tmp_path / "data" / "1.parquet").rename(tmp_path / "data" / "-.parquet")
    assert load(f"{tmp_path}/data/*.parquet", cache=tmp_path / "cache").fingerprint != dataset.fingerprint


def test_padding_is_removed_by_the_attention_mask(tmp_path: Path) -> None:
    left = [[0] * 3 + row + [0] * (i % 4) for i, row in enumerate(ROWS)]
    mask = [[0] * 3 + [1] * len(row) + [0] * (i % 4) for i, row in enumerate(ROWS)]
    write_columns(tmp_path, {"input_ids": pa.array(left), "attention_mask": pa.array(mask, pa.list_(pa.int8()))})
    padded = open_tables(tmp_path)
    check_content(padded, IDS, ENDS)
    (tmp_path / "plain").mkdir()
    write_columns(tmp_path / "plain", {"input_ids": make_column()})
    assert open_tables(tmp_path / "plain").fingerprint == padded.fingerprint


MARKS = [[token % 3 == 0 for token in row] for row in ROWS]
LABELS = [[t if mark else -100 for t, mark in zip(row, own, strict=True)] for row, own in zip(ROWS, MARKS, strict=True)]
MASKS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "labels": ("labels", pa.array(LABELS, pa.list_(pa.int64())), {}),
    "loss_mask": ("loss_mask", pa.array(MARKS), {}),
    "loss_mask_of_integers": ("loss_mask", pa.array(MARKS).cast(pa.list_(pa.int8())), {}),
    "loss_mask_of_floats": ("loss_mask", pa.array(MARKS).cast(pa.list_(pa.int8())).cast(pa.list_(pa.float32())), {}),
    "named": ("completion", pa.array(MARKS), {"options": {"mask": "completion"}}),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_a_mask_column_selects_the_targets(kind: str, packing: str, tmp_path: Path) -> None:
    name, column, changes = MASKS[kind]
    write_columns(tmp_path, {"input_ids": make_column(), name: column})
    dataset = open_tables(tmp_path, train_on="answers", packing=packing, **changes)
    batch = dataset.read("train", 0, 32)
    real = batch["padding_mask"]
    np.testing.assert_array_equal(batch["loss_weight"][real], (batch["y"] % 3 == 0)[real])
    everything = open_tables(tmp_path, train_on="all", packing=packing, **changes)
    assert "loss_weight" not in everything.fields
    assert everything.fingerprint != dataset.fingerprint
    with pytest.raises(DataError, match=rf"has the column {name}; set data\.train_on"):
        open_tables(tmp_path, packing=packing, **changes)


def test_a_file_is_converted_once_until_it_changes(tmp_path: Path) -> None:
    write_columns(tmp_path, {"input_ids": make_column()})
    first = open_tables(tmp_path)
    (converted,) = (tmp_path / "cache").glob("*.ids")
    time = converted.stat().st_mtime_ns
    assert open_tables(tmp_path).fingerprint == first.fingerprint
    assert converted.stat().st_mtime_ns == time
    write_columns(tmp_path, {"input_ids": pa.array(ROWS[::-1])})
    assert open_tables(tmp_path).fingerprint != first.fingerprint
    first.check()


def test_a_file_replaced_during_conversion_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_columns(tmp_path, {"input_ids": make_column()})
    path = tmp_path / "data/a.parquet"

    def replace_and_read(*arguments: Any) -> Any:
        os.utime(path, (1, 1))
        return _read_rows(*arguments)

    monkeypatch.setattr("runner.data.tables._read_rows", replace_and_read)
    with pytest.raises(DataError, match=r"a\.parquet: changed"):
        open_tables(tmp_path)
    assert not list((tmp_path / "cache").glob("*.ids"))
    monkeypatch.undo()
    check_content(open_tables(tmp_path), IDS, ENDS)


def make_columns(**changes: Any) -> dict[str, Any]:
    return {"input_ids": make_column(), **changes}


INVALID_TABLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": ({"text": ["a b"] * 9}, {}, r"no column input_ids; it has text.*experiments\.tokenise"),
    "misnamed": (make_columns(), {"options": {"column": "ids"}}, "no column ids"),
    "flat": ({"input_ids": IDS}, {}, "is int64, needs lists"),
    "floats": ({"input_ids": pa.array([[0.5, 1.0]])}, {}, "needs lists of integers"),
    "strings": ({"input_ids": pa.array([["a"]])}, {}, "needs lists of integers"),
    "nested": ({"input_ids": pa.array([[[1, 2]]])}, {}, "needs lists of integers"),
    "negative": ({"input_ids": pa.array([[1, 2], [3, -7]])}, {}, r"row 2: -7 is no token id"),
    "too_large": ({"input_ids": pa.array([[1, 1 << 40]])}, {}, "row 1: 1099511627776 is no token id"),
    "missing_value": ({"input_ids": pa.array([[1, None]])}, {}, "a missing value"),
    "no_mask": (make_columns(), {"train_on": "answers"}, "nothing reads it, there is no column"),
    "no_such_mask": (make_columns(), {"train_on": "answers", "options": {"mask": "m"}}, "no column m"),
    "shifted_labels": (
        make_columns(labels=pa.array([[*row[1:], -100] for row in ROWS])),
        {"train_on": "answers"},
        "not shifted",
    ),
    "short_labels": (
        make_columns(labels=pa.array([row[1:] for row in ROWS])),
        {"train_on": "answers"},
        "row 1: labels has",
    ),
    "weights": (
        make_columns(loss_mask=pa.array([[2] * len(row) for row in ROWS])),
        {"train_on": "answers"},
        "must be 0 or 1",
    ),
    "fractions": (
        make_columns(loss_mask=pa.array([[0.5] * len(row) for row in ROWS])),
        {"train_on": "answers"},
        "cannot be read",
    ),
    "segments": (make_columns(attention_mask=pa.array([[3] * len(row) for row in ROWS])), {}, "attention_mask must be"),
    "dtype": (make_columns(), {"dtype": "uint16"}, "nothing reads it"),
    "option": (make_columns(), {"options": {"colum": "x"}}, "unexpected keyword argument"),
}


@pytest.mark.parametrize("kind", INVALID_TABLES)
def test_invalid_tables_are_rejected_in_one_line(kind: str, tmp_path: Path) -> None:
    columns, changes, words = INVALID_TABLES[kind]
    write_columns(tmp_path, columns)
    with pytest.raises(DataError, match=words) as caught:
        open_tables(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob(".*.tmp"))


@pytest.mark.parametrize("name", ["parquet", "arrow", "stream"])
def test_a_damaged_table_gives_a_one_line_error(name: str, tmp_path: Path) -> None:
    write_columns(tmp_path, {"input_ids": make_column()}, name)
    (path,) = (tmp_path / "data").iterdir()
    whole = path.read_bytes()
    for size in (0, 4, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=path.name) as caught:
            open_tables(tmp_path)
        assert "\n" not in str(caught.value)
    generator = np.random.default_rng(1)
    for _ in range(12):
        content = bytearray(whole)
        content[generator.integers(len(content))] ^= 1 << int(generator.integers(8))
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            open_tables(tmp_path)


def test_a_missing_pyarrow_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_columns(tmp_path, {"input_ids": make_column()})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install .*parquet"):
        open_tables(tmp_path)


def test_a_file_larger_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.data.tables.BLOCK_BYTES", 1000)
    for name in ("parquet", "arrow", "stream"):
        (tmp_path / name).mkdir()
        write_columns(tmp_path / name, {"input_ids": make_column()}, name)
        check_content(open_tables(tmp_path / name), IDS, ENDS)


def test_an_id_outside_the_vocabulary_is_reported_with_its_table(tmp_path: Path) -> None:
    write_columns(tmp_path, {"input_ids": make_column()})
    with pytest.raises(DataError, match=r"a\.parquet is beyond the model's vocabulary of 100"):
        open_tables(tmp_path, vocabulary_size=100).validate_vocabulary(100)
