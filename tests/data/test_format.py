"""Formats of other tools, on files written by these tools (`formats/make.py`): exact content or a one-line error."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data import array_record
from runner.data.open_source import open_format
from runner.data.remote import CacheSettings
from runner.data.source_files import find_corpus, find_source, is_available
from runner.data.token_files import TokenSequence, open_token_files
from runner.errors import DataError
from tests.data.buckets import URL, CountingDriver, put_in_bucket
from tests.data.datasets import load
from tests.data.golden import CASES, NARROW, WIDE, FormatCase, copy_golden, write_records

each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the golden files."""
    return copy_golden(tmp_path / "golden")


def list_edges(case: FormatCase) -> list[int]:
    """Return positions around document ends and a few in between."""
    around = {end + step for end in [0, *case.ends] for step in (-1, 0, 1)} | {100, 255, 256, 257}
    return sorted(position for position in around if 0 <= position <= len(case.ids))


@each_case
def test_ids_and_document_ends_are_read_as_written(root: Path, name: str) -> None:
    case = CASES[name]
    source = case.open(root)
    assert source.has_documents
    assert len(source) == len(case.ids)
    found = source.read(0, len(source))
    assert (found.dtype.name, found.tolist()) == (case.dtype, case.ids)
    assert source.document_ends(0, len(source)).tolist() == case.ends
    assert source.document_ends(0, len(source)).dtype == np.int64
    assert source.vocabulary_size == max(case.ids) + 1
    assert is_available(f"{root}/{case.source}")


@each_case
def test_every_range_is_a_slice_of_all_ids(root: Path, name: str) -> None:
    case = CASES[name]
    source = case.open(root)
    for start, stop in combinations_with_replacement(list_edges(case), 2):
        assert source.read(start, stop).tolist() == case.ids[start:stop], (start, stop)
        assert source.document_ends(start, stop).tolist() == [end for end in case.ends if start < end <= stop]


@each_case
def test_sequences_of_two_steps_are_windows_of_the_ids(root: Path, name: str) -> None:
    case = CASES[name]
    dataset = load(f"{root}/{case.source}", cache=root / "cache", options=dict(case.options), vocabulary_size=100_000)
    dataset.validate_vocabulary(100_000)
    windows = {tuple(case.ids[start : start + 9]) for start in range(0, len(case.ids), 8)}
    for step in range(2):
        rows = dataset.read("train", 4 * step, 4)
        assert {(*x, y[-1]) for x, y in zip(rows["x"].tolist(), rows["y"].tolist(), strict=True)} <= windows
    with pytest.raises(DataError, match=rf"token id {max(case.ids):,} at position \d+ of .* is beyond the model's"):
        dataset.validate_vocabulary(max(case.ids))


@each_case
def test_each_segment_of_a_packed_sequence_is_one_document(root: Path, name: str) -> None:
    case = CASES[name]
    dataset = load(f"{root}/{case.source}", cache=root / "cache", options=dict(case.options), packing="documents")
    document_of = {token: number for number, ids in enumerate(case.documents) for token in ids}
    after = dict(zip(case.ids, case.ids[1:], strict=False))
    rows = dataset.read("train", 0, 80)
    is_real = rows["padding_mask"]
    assert [after[token] for token in rows["x"][is_real].tolist()] == rows["y"][is_real].tolist()
    for field in ("x", "y"):
        found = np.array([document_of[token] for token in rows[field][is_real].tolist()])
        pairs = {*zip(is_real.nonzero()[0].tolist(), rows["segment"][is_real].tolist(), found.tolist(), strict=True)}
        assert len(pairs) == len({pair[:2] for pair in pairs}), "one document per segment"


def test_a_nanogpt_file_is_read(root: Path) -> None:
    ids = [token for document in NARROW for token in document]
    source = open_token_files(find_source(f"{root}/nanogpt/train.bin"), CacheSettings(root / "cache"))
    assert source.read(0, len(source)).tolist() == ids


@each_case
def test_the_fingerprint_does_not_depend_on_the_path(root: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    there = shutil.copytree(root, tmp_path / "elsewhere")
    assert case.open(there).fingerprint == case.open(root).fingerprint == case.open(root).fingerprint


def change_id_in_records(root: Path) -> None:
    write_records(root / "array_record/single.array_record", [*NARROW[:-1], [*NARROW[-1][:-1], 7]])


def merge_documents_in_records(root: Path) -> None:
    write_records(root / "array_record/single.array_record", [[*NARROW[0], *NARROW[1]], *NARROW[2:]])


def move_ends_in_records(root: Path) -> None:
    first, second, *rest = NARROW
    write_records(root / "array_record/single.array_record", [first[:-1], [first[-1], *second], *rest])


def flip_last(path: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        content = bytearray((root / path).read_bytes())
        content[-2] ^= 1
        (root / path).write_bytes(content)

    return change


def merge_documents_in_megatron(root: Path) -> None:
    rewrite(root / "megatron/int32.idx", -8 * len(WIDE), struct.pack("<q", 2))


def rewrite(path: Path, place: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + len(new) or None] = new
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("megatron_int32", flip_last("megatron/int32.bin")),
        ("megatron_int32", merge_documents_in_megatron),
        ("mds_array", flip_last("mds/ndarray_int32/shard.00000.mds")),
        ("array_record", change_id_in_records),
        ("array_record", merge_documents_in_records),
        ("array_record", move_ends_in_records),
    ],
)
def test_changed_ids_or_documents_change_the_fingerprint(
    root: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    there = shutil.copytree(root, tmp_path / "elsewhere")
    change(there)
    assert CASES[name].open(there).fingerprint != CASES[name].open(root).fingerprint


def cut_to(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length if length >= 0 else path.stat().st_size + length)


def overwrite_at(place: int, new: bytes) -> Callable[[Path], None]:
    return lambda path: rewrite(path, place, new)


def copy_from(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.copy(path.parent / name, path)

    return change


def move_sample(path: Path) -> None:
    (place,) = struct.unpack("<I", path.read_bytes()[8:12])
    rewrite(path, 8, struct.pack("<I", place + 1))


def set_in_shard(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        index = json.loads(path.read_bytes())
        for key, value in changes.items():
            index["shards"][0][key] = value
        path.write_text(json.dumps(index))

    return change


def set_in_index(**changes: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))  # type: ignore[return-value]


# Tables of damages: the change to a file and the expected error message, if it is always the same.
Damage = tuple[Callable[[Path], Any], str | None]
COMMON_DAMAGES: dict[str, Damage] = {
    "missing": (Path.unlink, None),
    "empty": (cut_to(0), None),
    "cut in its head": (cut_to(10), None),
    "cut by a byte": (cut_to(-1), None),
    "cut by an id": (cut_to(-4), None),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0\0\0\0"), None),
    "no such file at all": (lambda path: path.write_bytes(bytes(range(256)) * 8), None),
}
IDX_DAMAGES: dict[str, Damage] = {
    **COMMON_DAMAGES,
    "wrong magic": (overwrite_at(0, b"TNTIDX"), r"begins with b'TNTIDXX.*, needs b'MMIDIDX"),
    "newer version": (overwrite_at(9, b"\2"), "has version 2, needs 1"),
    "floats": (overwrite_at(17, b"\7"), r"holds floats \(type 7\), needs token ids"),
    "unknown type": (overwrite_at(17, b"\11"), "has the unknown type 9, needs one of 1, 2, 3, 4, 5, 8"),
    "another type": (overwrite_at(17, b"\10"), r"sequence 1 begins at byte 20, needs 10"),
    "huge counts": (overwrite_at(18, b"\xff" * 16), "182 bytes, needs "),
    "multimodal": (lambda path: path.write_bytes(path.read_bytes() + bytes(7)), "multimodal data are not read"),
    "negative length": (overwrite_at(34, struct.pack("<i", -5)), "sequence 0 has -5 tokens"),
    "no order of documents": (overwrite_at(-8 * len(WIDE), struct.pack("<q", 9)), "its documents must ascend"),
    "documents end too early": (
        overwrite_at(-8, struct.pack("<q", 6)),
        "its documents must ascend from sequence 0 to 7",
    ),
}
BIN_DAMAGES: dict[str, Damage] = {
    **COMMON_DAMAGES,
    "of another pair": (copy_from("uint16_0.bin"), r"612 bytes, needs 1,440: int32\.idx counts 360 tokens of 4 bytes"),
}
INDEX_DAMAGES: dict[str, Damage] = {
    **{name: COMMON_DAMAGES[name] for name in ("empty", "cut in its head", "cut by a byte", "no such file at all")},
    "newer version": (set_in_index(version=3), "has version 3, needs 2"),
    "newer shard": (set_in_shard(version=3), "has version 3, needs 2"),
    "no shards": (set_in_index(shards={}), "shards is of another type"),
    "a shard that is none": (set_in_index(shards=[7]), "is not an index of MDS"),
    "another format": (set_in_shard(format="jsonl"), "has a shard of format 'jsonl', needs mds"),
    "a file elsewhere": (set_in_shard(raw_data={"basename": "../a", "bytes": 1}), r"'\.\./a' is not a file below it"),
    "no size": (set_in_shard(raw_data={"basename": "a"}), "the key bytes is missing"),
    "too few sizes": (set_in_shard(column_sizes=[]), "unequal numbers of names, encodings and sizes"),
    "a size that is none": (set_in_shard(column_sizes=[0]), "that is not a positive integer"),
    "floats": (set_in_shard(column_encodings=["ndarray:float32"]), "is encoded as 'ndarray:float32', needs bytes or"),
    "arrays of any type": (set_in_shard(column_encodings=["ndarray"]), "is encoded as 'ndarray', needs bytes or"),
    "pickles": (set_in_shard(column_encodings=["pkl"]), "is encoded as 'pkl', needs bytes or"),
}
SHARD_DAMAGES: dict[str, Damage] = {
    **COMMON_DAMAGES,
    "another count": (overwrite_at(0, b"\3"), "holds 3 samples, needs 4, as its index says"),
    "no order of samples": (overwrite_at(8, b"\xff\xff"), "its samples do not lie one after the other"),
    "of another data set": (
        overwrite_at(50, b"_"),
        "is of different|are not those of its index|not a JSON object|char",
    ),
    "of another shard": (copy_from("shard.00001.mds"), "413 bytes, needs 1,458, as its index says"),
    "a sample of no whole ids": (move_sample, "a sample holds no array of int32 of one dimension"),
}
ZSTD_DAMAGES: dict[str, Damage] = {
    name: COMMON_DAMAGES[name]
    for name in ("missing", "empty", "cut in its head", "cut by a byte", "no such file at all")
} | {"of another shard": (copy_from("shard.00001.mds.zstd"), "does not hold the 1,468 bytes that its index says")}
DAMAGES = {
    ("megatron_int32", "megatron/int32.idx"): IDX_DAMAGES,
    ("megatron_int32", "megatron/int32.bin"): BIN_DAMAGES,
    ("mds_array", "mds/ndarray_int32/index.json"): INDEX_DAMAGES,
    ("mds_array", "mds/ndarray_int32/shard.00000.mds"): SHARD_DAMAGES,
    ("mds_zstd", "mds/zstd/shard.00000.mds.zstd"): ZSTD_DAMAGES,
    ("array_record", "array_record/single.array_record"): {
        name: COMMON_DAMAGES[name] for name in COMMON_DAMAGES if name != "longer"
    }
    | {"cut at a block": (cut_to(1 << 16), "holds no records: it is cut")},
}


def iterate_damages() -> Iterator[Any]:
    for (name, path), table in DAMAGES.items():
        for what, (damage, message) in table.items():
            yield pytest.param(name, path, damage, message, id=f"{path}-{what}")


@pytest.mark.daily(24)
@pytest.mark.parametrize(("name", "path", "damage", "message"), list(iterate_damages()))
def test_a_damaged_file_gives_the_same_one_line_error_on_disk_and_in_a_bucket(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    path: str,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    damage(root / path)
    with pytest.raises(DataError, match=message) as caught:
        CASES[name].open(root)
    assert "\n" not in str(caught.value)
    assert Path(path).name.removesuffix(".zstd") in str(caught.value)
    put_in_bucket(monkeypatch, root, CountingDriver())
    with pytest.raises(DataError) as there:
        CASES[name].open(URL, tmp_path / "there")
    assert normalise_line(str(there.value).replace(URL, str(root))) == normalise_line(str(caught.value))


def normalise_line(line: str) -> str:
    """Return the line with the parts normalised that differ between disk and bucket (unmatched names)."""
    nothing = "no (file|object) matches|is a directory, and no corpus|1 of 1 files are of a kind that is not read"
    return re.sub(rf"data\.source=\S+: ({nothing}).*", "names nothing", line)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("megatron_int32", "megatron/int32.idx"),
        ("mds_array", "mds/ndarray_int32/shard.00001.mds"),
        ("mds_columns", "mds/columns/shard.00000.mds"),
        ("mds_array", "mds/ndarray_int32/index.json"),
    ],
)
def test_a_wrong_byte_gives_ids_or_a_one_line_error(root: Path, name: str, path: str) -> None:
    case, whole = CASES[name], (root / path).read_bytes()
    num_refused, lines = 0, []
    for place in range(0, len(whole), 1 + len(whole) // 200):
        rewrite(root / path, 0, whole)
        rewrite(root / path, place, bytes([whole[place] ^ 1 << place % 8]))
        try:
            source = case.open(root, root / f"cache{place}")
            assert len(source.read(0, len(source))) == len(source)
        except DataError as error:
            lines += str(error).splitlines()
            num_refused += 1
    assert len(lines) == num_refused > 30


@pytest.mark.parametrize(
    ("name", "path", "place", "message"),
    [
        ("mds_bytes", "mds/bytes_int64/shard.00001.mds", 0, "a sample begins with sizes that are not its own"),
        ("mds_array", "mds/ndarray_int32/shard.00000.mds", 1, "a sample begins with sizes that are not its own"),
        (
            "mds_array",
            "mds/ndarray_int32/shard.00000.mds",
            4,
            "a sample is not an array of one dimension; it is one of",
        ),
        (
            "mds_array",
            "mds/ndarray_int32/shard.00000.mds",
            5,
            "a sample is not an array of one dimension; it is one of",
        ),
    ],
)
def test_sample_headers_are_validated_when_read(root: Path, name: str, path: str, place: int, message: str) -> None:
    (first,) = struct.unpack("<I", (root / path).read_bytes()[4:8])
    rewrite(root / path, first + place, b"\x08")
    source = CASES[name].open(root)
    with pytest.raises(DataError, match=rf"{Path(path).name}: {message}"):
        source.read(0, len(source))


def test_columns_of_a_dataset_are_cached_separately(root: Path) -> None:
    for column, size in (("input_ids", max(CASES["mds_columns"].ids) + 1), ("attention_mask", 7)):
        case = FormatCase("mds/columns", {"column": column}, [], "uint16")
        assert case.open(root).vocabulary_size == size


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("megatron/int32.idx", {"options": {"dtype": "int32"}}, r"is of megatron: data\.options: .* argument 'dtype'"),
        ("megatron/int32.idx", {"dtype": "uint16"}, r"data\.dtype=uint16: nothing reads it, .* is of megatron"),
        ("megatron/int32.idx", {"document_separator": "nul"}, r"data\.document_separator=nul: nothing reads it"),
        ("megatron/int32.*", {}, r"1 of 2 files are of a kind that is not read, .*int32\.idx"),
        ("mds/bytes_int64", {}, r"column tokens: holds bytes: say which ids they are, as data\.options\.dtype: int64"),
        ("mds/bytes_int64", {"options": {"dtype": "int23"}}, r"^data\.options\.dtype=int23: needs one of uint8, "),
        ("mds/bytes_int64", {"options": {"dtype": 64}}, r"^data\.options\.dtype=64: needs one of uint8, "),
        ("mds/zstd", {"options": {"dtype": "int32"}}, r"holds int32: leave out data\.options\.dtype"),
        ("mds/zstd", {"options": {"colum": "tokens"}}, r"is of mds: data\.options: .* argument 'colum'"),
        (
            "mds/columns",
            {},
            r"column tokens: there is none; there are attention_mask, input_ids, kind, name, number, weights;",
        ),
        ("mds/columns", {"options": {"column": "input_id"}}, r"there is none; did you mean input_ids\?"),
        ("mds/columns", {"options": {"column": 3}}, r"column 3: there is none"),
        ("mds/columns", {"options": {"column": "weights"}}, r"encoded as 'ndarray:float32', needs bytes or ndarray of"),
        ("mds/columns", {"options": {"column": "name"}}, r"encoded as 'str', needs bytes or ndarray of an integer"),
        ("mds", {}, r"is a directory, and no corpus \(index\.json\)"),
        ("array_record/single.array_record", {}, r"is of array_record: data\.options: missing .* argument: 'dtype'"),
        (
            "array_record/single.*",
            {"options": {"dtype": "int64"}},
            r"record 0 has 10 bytes, not a whole number of 8-byte",
        ),
    ],
)
def test_keys_that_do_not_match_the_files_are_rejected(
    root: Path, source: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(root / source, cache=root / "cache", **changes)
    assert "\n" not in str(caught.value)


def test_unsupported_compression_is_rejected_by_name(root: Path) -> None:
    set_in_shard(compression="gz:9")(root / "mds/zstd/index.json")
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.zstd: is compressed by gz, needs zstd or none"):
        CASES["mds_zstd"].open(root)


def test_a_manually_unpacked_shard_is_read_in_place(root: Path) -> None:
    case = CASES["mds_zstd"]
    case.open(root)
    for unpacked in (root / "cache").glob("*.mds"):
        number = 0 if unpacked.stat().st_size == 1468 else 1
        unpacked.rename(root / f"mds/zstd/shard.0000{number}.mds")
    assert case.open(root).read(0, 360).tolist() == case.ids
    assert not list((root / "cache").glob("*.mds"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [("mds_zstd", cut_to(3)), ("array_record", cut_to(3)), ("array_record", overwrite_at(0, b"\4"))],
    ids=["cut shard", "cut sizes", "altered sizes"],
)
def test_derived_files_are_made_once_and_again_if_damaged(
    root: Path, name: str, damage: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    case.open(root)
    kept = [path for path in (root / "cache").iterdir() if path.suffix in (".mds", ".sizes")]
    with monkeypatch.context() as patch:
        patch.delattr(os, "replace")
        patch.delattr(array_record, "_scan_sizes")
        assert case.open(root).read(0, 360).tolist() == case.ids
    for path in kept:
        damage(path)
    assert kept
    assert case.open(root).read(0, 360).tolist() == case.ids


def test_an_unwritable_cache_fails_only_sources_that_need_it(root: Path) -> None:
    (root / "cache").write_text("no directory")
    case = CASES["array_record"]
    assert case.open(root).read(0, 360).tolist() == case.ids
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.zstd: cannot be kept in .*/cache .*RUNNER_CACHE"):
        CASES["mds_zstd"].open(root)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("megatron_int32", "megatron/int32.bin"),
        ("mds_array", "mds/ndarray_int32/shard.00001.mds"),
        ("array_record", "array_record/single.array_record"),
    ],
)
@pytest.mark.parametrize("change", ["cut", "replaced", "gone"])
def test_a_changed_file_is_detected_without_a_crash(root: Path, name: str, path: str, change: str) -> None:
    source = CASES[name].open(root)
    source.check()
    source.read(0, len(source))
    if change == "cut":
        os.truncate(root / path, 300)
        with pytest.raises(DataError, match=r"changed since the job started|is not a complete ArrayRecord file"):
            source.read(0, len(source))
    elif change == "replaced":
        os.utime(root / path, (1, 1))
    else:
        (root / path).unlink()
    with pytest.raises(DataError, match=r"changed since the job started|cannot read"):
        source.check()


@each_case
def test_threads_read_in_parallel(root: Path, name: str) -> None:
    case = CASES[name]
    source = case.open(root)
    ranges = [(start, min(start + 50, len(source))) for start in range(0, len(source), 7)]
    with ThreadPoolExecutor(4) as pool:
        for (start, stop), found in zip(ranges, pool.map(lambda piece: source.read(*piece), ranges), strict=True):
            assert found.tolist() == case.ids[start:stop]


@pytest.mark.parametrize("extra", ["b.txt", "b.bin", "b.array_record"])
def test_files_of_a_format_cannot_be_mixed_with_others(root: Path, extra: str) -> None:
    (root / "megatron" / extra).write_text("text")
    with pytest.raises(DataError, match=r"\d of \d+ files are of a kind .* or nothing but \.idx, \.array_record,"):
        find_source(f"{root}/megatron/*")


@pytest.mark.parametrize("content", ['{"format": 1, "shards": []}', '{"version": 2', ""])
def test_an_mds_index_is_distinguished_from_a_corpus_index(root: Path, content: str) -> None:
    directory = root / "mds/zstd"
    assert find_corpus(str(directory)) is find_corpus(f"{directory}/index.json") is None
    (directory / "index.json").write_text(content)
    assert find_corpus(str(directory)) == find_corpus(f"{directory}/index.json") == str(directory)
    with pytest.raises(DataError, match=r"index\.json is not the index of a corpus: "):
        load(directory, cache=root / "cache")


def test_ids_are_checked_against_a_trusted_vocabulary(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.data.token_files.SCANNED_TOKENS_MAX", 10)
    monkeypatch.delattr(TokenSequence, "scan")
    source = open_format(find_source(f"{root}/megatron/int32.idx"), {}, CacheSettings(root / "cache"), 90_000)
    assert source.vocabulary_size == 90_000
    with pytest.raises(DataError, match=r"token id 9\d,\d+ at position \d+ of .*int32\.bin is beyond"):
        source.read(0, len(source))
