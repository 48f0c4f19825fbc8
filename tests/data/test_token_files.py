import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.data.remote import CacheSettings
from runner.data.source_files import find_source
from runner.data.token_files import TokenSequence, open_token_files, scan_cached
from runner.errors import DataError
from tests.data.datasets import write_bin, write_npy


def read(tokens: TokenSequence, start: int, stop: int) -> list[int]:
    found = tokens.read(start, stop).tolist()
    assert found == tokens.read_ranges([(start, stop)])[0].tolist()
    return found


def test_files_of_a_glob_are_read_as_one_sequence(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", range(5))
    write_bin(tmp_path / "b.bin", [])
    write_bin(tmp_path / "c.bin", range(5, 6))
    write_npy(tmp_path / "d.npy", range(6, 10), ">i8")
    tokens = open_token_files(find_source(f"{tmp_path}/*"), CacheSettings(tmp_path))
    assert len(tokens) == 10
    for start in range(11):
        for stop in range(start, 11):
            assert read(tokens, start, stop) == list(range(start, stop))


def test_more_files_than_the_process_may_map_at_once_are_read(tmp_path: Path) -> None:
    for i in range(300):
        write_bin(tmp_path / f"{i:03}.bin", [i])
    tokens = open_token_files(find_source(f"{tmp_path}/*.bin"), CacheSettings(tmp_path))
    assert read(tokens, 0, 300) == list(range(300))
    assert read(tokens, 0, 300) == list(range(300))


def test_uint32_ids_are_read_if_the_spec_sets_the_dtype(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 300)
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    tokens = open_token_files(find_source(f"{tmp_path}/a.bin"), CacheSettings(tmp_path), "uint32", 2**32)
    assert read(tokens, 0, 300) == ids.tolist()


@pytest.mark.parametrize("vocabulary_size", [4, 256, 50_304, 100_000, 1_000_000])
@pytest.mark.parametrize("num_ids", [200, 20_000, 300_000])
def test_uint32_ids_in_a_bin_file_are_never_taken_for_uint16(
    tmp_path: Path, vocabulary_size: int, num_ids: int
) -> None:
    ids = np.random.default_rng(0).integers(0, vocabulary_size, num_ids)
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    source = find_source(f"{tmp_path}/a.bin")
    with pytest.raises(DataError, match=r"a\.bin: looks like uint32 ids .* data\.dtype: uint32, or uint16"):
        open_token_files(source, CacheSettings(tmp_path))
    assert len(open_token_files(source, CacheSettings(tmp_path), "uint32")) == num_ids
    assert len(open_token_files(source, CacheSettings(tmp_path), "uint16")) == 2 * num_ids


@pytest.mark.parametrize("vocabulary_size", [2, 4, 16, 256, 50_304, 65_536])
@pytest.mark.parametrize("num_ids", [1, 129, 20_000, 300_000])
def test_uint16_ids_are_never_taken_for_wider_ones(tmp_path: Path, vocabulary_size: int, num_ids: int) -> None:
    ids = np.random.default_rng(0).integers(0, vocabulary_size, num_ids)
    assert (
        len(open_token_files(find_source(str(write_bin(tmp_path / "a.bin", ids))), CacheSettings(tmp_path))) == num_ids
    )


def test_a_dtype_is_rejected_for_npy_files(tmp_path: Path) -> None:
    source = find_source(str(write_npy(tmp_path / "a.npy", range(9))))
    with pytest.raises(DataError, match=r"data\.dtype=uint32: nothing reads it, \.npy files say their own"):
        open_token_files(source, CacheSettings(tmp_path), "uint32")


def test_uint16_ids_are_not_taken_for_signed_ones(tmp_path: Path) -> None:
    tokens = open_token_files(find_source(str(write_bin(tmp_path / "a.bin", [65535, 40000]))), CacheSettings(tmp_path))
    assert read(tokens, 0, 2) == [65535, 40000]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.int32), r"a\.npy: needs a 1-D array of integers, holds int32 of shape \(2, 3\)"),
        (np.zeros(3, np.float32), r"holds float32 of shape \(3,\)"),
        (np.zeros(3, np.bool_), r"holds bool of shape \(3,\)"),
        (np.array(["object", None]), r"holds object of shape \(2,\)"),
    ],
)
def test_an_npy_file_of_anything_but_1d_integers_is_rejected(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        open_token_files(find_source(f"{tmp_path}/a.npy"), CacheSettings(tmp_path))


def test_a_zip_archive_under_an_npy_name_is_rejected(tmp_path: Path) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(DataError, match="holds an archive of arrays"):
        open_token_files(find_source(f"{tmp_path}/a.npy"), CacheSettings(tmp_path))


def test_a_truncated_npy_file_is_rejected(tmp_path: Path) -> None:
    whole = write_npy(tmp_path / "a.npy", range(9)).read_bytes()
    for length in range(len(whole)):
        path = tmp_path / f"cut{length}.npy"
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"is not a complete \.npy file of numbers|cannot read") as caught:
            open_token_files(find_source(str(path)), CacheSettings(tmp_path))
        assert "\n" not in str(caught.value)


def test_a_damaged_npy_header_never_raises_another_exception(tmp_path: Path) -> None:
    whole = write_npy(tmp_path / "a.npy", range(9)).read_bytes()
    for position in range(128):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 7)
        path = tmp_path / f"damaged{position}.npy"
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            open_token_files(find_source(str(path)), CacheSettings(tmp_path))


def test_a_bin_file_of_odd_length_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match=r"a\.bin: 3 bytes are not a whole number of 2-byte \(uint16\) token ids"):
        open_token_files(find_source(f"{tmp_path}/a.bin"), CacheSettings(tmp_path))


def test_a_replaced_file_is_detected(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "a.bin", range(5))
    tokens = open_token_files(find_source(str(path)), CacheSettings(tmp_path))
    write_bin(path, range(6))
    with pytest.raises(DataError, match=r"a\.bin: changed since the job started"):
        tokens.check()


def cut(path: Path) -> None:
    os.truncate(path, 130)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize("write", [write_bin, write_npy], ids=["bin", "npy"])
@pytest.mark.parametrize("change", [cut, overwrite, touch, Path.unlink], ids=lambda change: change.__name__)
def test_a_file_changed_in_place_is_detected_without_a_crash(
    tmp_path: Path, write: Callable[..., Path], change: Callable[[Path], None]
) -> None:
    path = write(tmp_path / f"a.{write.__name__[-3:]}", range(5000))
    tokens = open_token_files(find_source(str(path)), CacheSettings(tmp_path))
    assert read(tokens, 0, 5000) == list(range(5000))
    tokens.check()
    change(path)
    with pytest.raises(DataError, match=r"changed since the job started|cannot read"):
        tokens.check()
    if change is cut:
        with pytest.raises(DataError, match="changed since the job started"):
            read(tokens, 0, 5000)


def test_ids_of_every_width_and_order_are_read(tmp_path: Path) -> None:
    for dtype in ("u1", "<u2", ">u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8"):
        tokens = open_token_files(
            find_source(str(write_npy(tmp_path / "a.npy", range(200), dtype))), CacheSettings(tmp_path)
        )
        assert read(tokens, 3, 200) == list(range(3, 200)), dtype


def test_the_probe_of_a_small_dataset_sees_every_token() -> None:
    for num_tokens in (1, 511, 512, 513, 5000):
        ids = np.arange(num_tokens)
        probe = TokenSequence([ids]).probe()
        assert TokenSequence([ids.copy()]).probe() == probe
        for position in {0, num_tokens // 3, num_tokens // 2, num_tokens - 1}:
            altered = ids.copy()
            altered[position] += 1
            assert TokenSequence([altered]).probe() != probe


def test_the_probe_of_a_large_dataset_sees_sizes_types_and_both_ends() -> None:
    ids = np.zeros(5_000_000, "<u2")
    probe = TokenSequence([ids]).probe()
    assert TokenSequence([ids[1:]]).probe() != probe
    assert TokenSequence([ids.astype("<i4")]).probe() != probe
    for position in (0, -1):
        altered = ids.copy()
        altered[position] = 1
        assert TokenSequence([altered]).probe() != probe


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1 << 22])
def test_a_scan_finds_the_smallest_and_largest_id_across_chunks(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.data.token_files.SCAN_CHUNK_TOKENS", chunk_tokens)
    tokens = TokenSequence([np.array([3, 7, 3]), np.array([9, 1, 9, 1], "u8")])
    found = tokens.scan()
    assert (found.smallest, found.smallest_position, found.largest, found.largest_position) == (1, 4, 9, 3)
    assert tokens.describe_position(3) == "position 0 of the text"


def test_a_scan_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_bin(tmp_path / "a.bin", [1, 2]), tmp_path / "cache"
    found = scan_cached(open_token_files(find_source(str(path)), CacheSettings(tmp_path)), cache)
    with monkeypatch.context() as patch:
        patch.delattr(TokenSequence, "scan")
        assert scan_cached(open_token_files(find_source(str(path)), CacheSettings(tmp_path)), cache) == found
    write_bin(path, [1, 2, 3])
    assert scan_cached(open_token_files(find_source(str(path)), CacheSettings(tmp_path)), cache).largest == 3


def test_a_scan_is_cached_by_dtype(tmp_path: Path) -> None:
    np.array([70_000, 1], "<u4").tofile(tmp_path / "a.bin")
    source = find_source(f"{tmp_path}/a.bin")
    for dtype, largest in (("uint16", 70_000 - 65_536), ("uint32", 70_000)):
        assert (
            scan_cached(open_token_files(source, CacheSettings(tmp_path), dtype), tmp_path / "cache").largest == largest
        )
