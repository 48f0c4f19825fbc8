"""Headers of `.bin` and `.npy` files: ids are read correctly, or the file is rejected in one line."""

import gzip
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from runner.data.token_headers import HEAD_BYTES
from runner.errors import DataError
from tests.data.buckets import URL, put_in_bucket
from tests.data.datasets import load
from tests.data.golden import write_megatron


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


IDS = np.random.default_rng(3).integers(0, 300, 900)
WIDE = np.random.default_rng(4).integers(0, 120_000, 900)


def encode_with_header(numbers: list[int], ids: np.ndarray, dtype: str) -> bytes:
    header = np.zeros(256, "<i4")
    header[: len(numbers)] = numbers
    return header.tobytes() + ids.astype(dtype).tobytes()


def encode_npy(ids: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, ids, **options)
    return stream.getvalue()


def encode_npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, ids=IDS)
    return stream.getvalue()


def encode_torch_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return stream.getvalue()


def encode_litdata(ids: np.ndarray, num_items: int) -> bytes:
    """Return a chunk in the format of litdata's `BinaryWriter`."""
    items = [part.astype("<i4").tobytes() for part in np.array_split(ids, num_items)]
    offsets = np.array([0, *np.cumsum([len(item) for item in items])], "<u4") + 4 * (num_items + 2)
    return struct.pack("<I", num_items) + offsets.astype("<u4").tobytes() + b"".join(items)


def encode_safetensors() -> bytes:
    header = json.dumps({"ids": {"dtype": "I64", "shape": [900], "data_offsets": [0, 7200]}}).encode()
    return struct.pack("<Q", len(header)) + header + IDS.astype("<i8").tobytes()


RAW = IDS.astype("<u2").tobytes()
LLM_C = encode_with_header([20240520, 1, 900], IDS, "<u2")

# File name, content, `data.dtype` and the expected ids.
VALID_FILES: dict[str, tuple[str, bytes, str | None, np.ndarray]] = {
    "nanogpt": ("a.bin", RAW, None, IDS),
    "nanogpt_32": ("a.bin", WIDE.astype("<u4").tobytes(), "uint32", WIDE),
    "llm_c": ("a.bin", LLM_C, None, IDS),
    "llm_c_dtype": ("a.bin", LLM_C, "uint16", IDS),
    "llm_c_llama3": ("a.bin", encode_with_header([20240801, 7, 900], WIDE, "<u4"), None, WIDE),
    "nemo": ("a.bin", encode_with_header([278895051, 1, 900, 2], IDS, "<u2"), None, IDS),
    "nemo_32": ("a.bin", encode_with_header([278895051, 1, 900, 4], WIDE, "<u4"), None, WIDE),
    "header_by_chance": ("a.bin", encode_with_header([20240520, 70_000], IDS, "<u2"), "uint16", None),
    "npy": ("a.npy", encode_npy(IDS), None, IDS),
    "npy_2": ("a.npy", encode_npy(WIDE.astype(">i4")), None, WIDE),
    "dolma": ("a.npy", RAW, "uint16", IDS),
    "olmo": ("a.npy", WIDE.astype("<u4").tobytes(), "uint32", WIDE),
}
VALID_FILES["header_by_chance"] = (
    *VALID_FILES["header_by_chance"][:3],
    np.frombuffer(VALID_FILES["header_by_chance"][1], "<u2"),
)

# File name, content, `data.dtype` and words of the message.
INVALID_FILES: dict[str, tuple[str, bytes, str | None, str]] = {
    "llm_c_version": ("a.bin", encode_with_header([20240520, 2, 900], IDS, "<u2"), None, "version 2; needs 1"),
    "llm_c_llama3_version": ("a.bin", encode_with_header([20240801, 1, 900], WIDE, "<u4"), None, "version 1; needs 7"),
    "llm_c_cut": ("a.bin", LLM_C[:-2], None, "needs 2,824 .* truncated"),
    "llm_c_longer": ("a.bin", LLM_C + b"\0\0", None, "needs 2,824"),
    "llm_c_head": ("a.bin", LLM_C[:600], None, "header alone takes 1024"),
    "llm_c_contradicted": ("a.bin", LLM_C, "uint32", "header says uint16"),
    "llm_c_evaluation": ("a.bin", encode_with_header([20240522, 1, 9], IDS, "<u2"), None, "evaluation set of llm.c"),
    "llm_c_weights": ("a.bin", encode_with_header([20240326, 5], IDS, "<f4"), "uint16", "weights of llm.c"),
    "llm_c_tokenizer": ("a.bin", encode_with_header([20240328, 2], IDS, "u1"), None, "tokenizer of llm.c"),
    "nemo_width": ("a.bin", encode_with_header([278895051, 1, 900, 8], WIDE, "<i8"), None, "ids of 8 bytes"),
    "npy_as_bin": ("a.bin", encode_npy(IDS), None, "name it .npy"),
    "npz": ("a.npy", encode_npz(), None, "archive of arrays"),
    "npz_as_bin": ("a.bin", encode_npz(), None, "zip archive"),
    "torch_zip": ("a.bin", encode_torch_zip(), "uint16", "PyTorch checkpoint"),
    "torch_legacy": ("a.bin", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + RAW, None, "a pickle"),
    "npy_of_objects": ("a.npy", encode_npy(np.array([[1], [2, 3]], object), allow_pickle=True), None, "holds object"),
    "pickled_array": ("a.npy", IDS.dumps(), "uint16", "a pickle"),
    "pickled_array_2": ("a.npy", pickle.dumps(IDS, 2), "uint16", "a pickle"),
    "pickled_list": ("a.bin", pickle.dumps(IDS.tolist()), None, "a pickle"),
    "pickled_list_2": ("a.bin", pickle.dumps(IDS.tolist(), 2), None, "a pickle"),
    "dolma_without_dtype": ("a.npy", RAW, None, "as Dolma writes them, say which: data.dtype"),
    "dolma_odd": ("a.npy", RAW[:-2], "uint32", "1798 bytes are not a whole number"),
    "uint64_as_uint32": ("a.bin", WIDE.astype("<u8").tobytes(), "uint32", "8 bytes read as uint32"),
    "uint16_as_uint32": ("a.bin", RAW, "uint32", "uint16 ids read as uint32"),
    "uint16_as_uint32_npy": ("a.npy", RAW, "uint32", "uint16 ids read as uint32"),
    "bytes_as_uint32": ("a.bin", (IDS % 100).astype("<u2").tobytes(), "uint32", "uint16 ids read as uint32"),
    "int64": ("a.bin", WIDE.astype("<i8").tobytes(), None, "looks like uint32"),
    "litdata_tokens": ("chunk-0-0.bin", encode_litdata(IDS, 3), None, "chunk of litdata"),
    "litdata_one_item": ("chunk-0-0.bin", encode_litdata(IDS, 1), "uint16", "chunk of litdata"),
    "litdata_many_items": ("chunk-0-0.bin", encode_litdata(np.arange(9000), 4000), None, "chunk of litdata"),
    "litdata_zstd": ("chunk-0-0.zstd.bin", zstandard.compress(encode_litdata(IDS, 3)), None, "compressed with zstd"),
    "lit_gpt": ("a.bin", b"LITPKDS" + struct.pack("<QBQ", 1, 8, 900) + RAW, None, "Lit-GPT"),
    "gzip": ("a.npy", gzip.compress(RAW), "uint16", "compressed with gzip"),
    "gzip_as_bin": ("a.bin", gzip.compress(RAW), None, "compressed with gzip"),
    "zstd": ("a.bin", zstandard.compress(RAW), None, "compressed with zstd"),
    "safetensors": ("a.bin", encode_safetensors(), None, "safetensors"),
    "parquet": ("a.bin", b"PAR1" + RAW + b"PAR1", None, "Parquet"),
    "text": ("a.bin", b"It was the best of times.\n" * 300, None, "is text"),
    "text_cut_within_a_character": ("a.bin", (b"." + "\u4e94\u6708".encode() * 2000), "uint16", "is text"),
    "text_as_npy": ("a.npy", b"It was the best of times.\n" * 300, "uint16", "is text"),
    "json": ("a.bin", b'{"text": "It was the best of times."}\n' * 300, None, "is text"),
    "megatron_index": ("a.bin", b"MMIDIDX\0\0" + RAW, None, "index of Megatron"),
}


@pytest.mark.parametrize("kind", VALID_FILES)
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_token_file_is_read_by_its_header(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content, dtype, ids = VALID_FILES[kind]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    source = f"{tmp_path}/data/{name}"
    if place == "bucket":
        put_in_bucket(monkeypatch, tmp_path / "data")
        source = f"{URL}/{name}"
    dataset = load(source, cache=tmp_path / "cache", dtype=dtype)
    found = dataset.train_sources[0].source
    assert found.read(0, len(found)).tolist() == ids.tolist()
    assert dataset.vocabulary_size == ids.max() + 1
    dataset.check()


def test_the_header_does_not_enter_the_fingerprint(tmp_path: Path) -> None:
    fingerprints = set()
    for name, content in (("raw.bin", RAW), ("llm_c.bin", LLM_C)):
        (tmp_path / name).write_bytes(content)
        fingerprints.add(load(tmp_path / name, cache=tmp_path / "cache").fingerprint)
    assert len(fingerprints) == 1


def test_shards_with_and_without_a_header_are_read_as_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(RAW)
    (tmp_path / "b.bin").write_bytes(LLM_C)
    (tmp_path / "c.bin").write_bytes(encode_with_header([20240801, 7, 900], WIDE, "<u4"))
    found = load(f"{tmp_path}/*.bin", cache=tmp_path / "cache").train_sources[0].source
    assert found.read(890, 2000).tolist() == [*IDS, *IDS, *WIDE][890:2000]


@pytest.mark.parametrize("kind", INVALID_FILES)
def test_files_of_other_formats_are_rejected_by_name(kind: str, tmp_path: Path) -> None:
    name, content, dtype, words = INVALID_FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load(tmp_path / name, cache=tmp_path / "cache", dtype=dtype)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_megatron_bin_file_needs_its_index_or_dtype(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.idx", [IDS.tolist(), WIDE.tolist()])
    for dtype in (None, "uint16"):
        with pytest.raises(DataError, match=r"a\.bin: .*a\.idx beside it is an index of Megatron's|looks like"):
            load(tmp_path / "a.bin", cache=tmp_path / "cache", dtype=dtype)
    for name, dtype in (("a.idx", None), ("a.bin", "uint32")):
        found = load(tmp_path / name, cache=tmp_path / "cache", dtype=dtype).train_sources[0].source
        assert found.read(0, 1800).tolist() == [*IDS, *WIDE]


@pytest.mark.parametrize("vocabulary_size", [2, 256, 50_257, 65_536])
def test_raw_ids_are_not_mistaken_for_another_format(vocabulary_size: int, tmp_path: Path) -> None:
    random = np.random.default_rng(vocabulary_size)
    for number in range(150):
        ids = random.integers(0, vocabulary_size, int(random.integers(30, 1 + HEAD_BYTES)))
        (tmp_path / f"{number:03}.bin").write_bytes(ids.astype("<u2").tobytes())
    assert len(load(f"{tmp_path}/*.bin", cache=tmp_path / "cache").train_sources) == 1
