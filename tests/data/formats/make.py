"""Write the golden files of this directory, each with the tool that defines its format.

python tests/data/formats/make.py megatron mds array_record nanogpt

writes the named formats below this directory, and the versions of the tools to `versions.json`.
Needs `megatron-core` and `torch`, `mosaicml-streaming`, `array_record` or `numpy`, imported only for the named formats.
"""

import importlib
import importlib.metadata
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
TOOLS = {
    "megatron": "megatron-core",
    "mds": "mosaicml-streaming",
    "array_record": "array_record",
    "nanogpt": "numpy",
}
LENGTHS = (5, 1, 300, 0, 2, 40, 12)
BLOCK = 32


def make_documents(vocabulary_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return the documents of the files, with a different id at each position."""
    first = np.cumsum([0, *lengths])
    return [[(7919 * (first[i] + j) + 13) % vocabulary_size for j in range(n)] for i, n in enumerate(lengths)]


def make_megatron(directory: Path) -> None:
    """Write `int32`, `int64` (one sequence per document) and two `uint16` files (up to three per document)."""
    module = importlib.import_module("megatron.core.datasets.indexed_dataset")

    def build(name: str, dtype: type[np.number], items: list[list[int]], pieces: int) -> None:
        builder = module.IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=dtype)
        for ids in items:
            lengths = [len(piece) for piece in np.array_split(ids, pieces if len(ids) >= pieces else 1)]
            builder.add_document(np.array(ids, dtype), lengths)
        builder.finalize(str(directory / f"{name}.idx"))

    build("int32", np.int32, make_documents(100_000), 1)
    build("int64", np.int64, make_documents(100_000), 1)
    build("uint16_0", np.uint16, make_documents(50_000)[:3], 3)
    build("uint16_1", np.uint16, make_documents(50_000)[3:], 3)


def make_mds(directory: Path) -> None:
    """Write one directory for each way of storing tokens, with small shards so that there are several."""
    writer = importlib.import_module("streaming.base.format.mds.writer").MDSWriter

    def build(name: str, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> None:
        with writer(columns=columns, out=str(directory / name), size_limit=1500, **options) as out:
            for sample in samples:
                out.write(sample)

    wide, full = make_documents(100_000), [ids for ids in make_documents(50_000) if ids]
    blocks = make_documents(50_000, (BLOCK,) * 20)
    build("bytes_int64", {"tokens": "bytes"}, [{"tokens": np.array(ids, np.int64).tobytes()} for ids in wide])
    arrays = [{"tokens": np.array(ids, np.int32)} for ids in wide if ids]
    build("ndarray_int32", {"tokens": "ndarray:int32"}, arrays)
    build("zstd", {"tokens": "ndarray:int32"}, arrays, compression="zstd:7", hashes=["sha1"])
    build("static", {"tokens": f"ndarray:uint16:{BLOCK}"}, [{"tokens": np.array(ids, np.uint16)} for ids in blocks])
    build(
        "columns",
        {
            "attention_mask": "ndarray:uint16",
            "input_ids": "ndarray:uint16",
            "kind": "uint8",
            "name": "str",
            "number": "int",
            "weights": "ndarray:float32",
        },
        [
            {
                "attention_mask": np.full(len(ids) + i, 1 + i, np.uint16),
                "input_ids": np.array(ids, np.uint16),
                "kind": 3,
                "name": "n" * i,
                "number": i,
                "weights": np.ones(i + 1, np.float32),
            }
            for i, ids in enumerate(full)
        ],
    )


def make_array_record(directory: Path) -> None:
    """Write `single` with one record per group, as data loaders need it, and `grouped_*` with several, in two files."""
    module = importlib.import_module("array_record.python.array_record_module")

    def build(name: str, options: str, dtype: str, items: list[list[int]]) -> None:
        writer = module.ArrayRecordWriter(str(directory / f"{name}.array_record"), options)
        for ids in items:
            writer.write(np.array(ids, dtype).tobytes())
        writer.close()
        path = directory / f"{name}.array_record"
        content = zlib.compress(path.read_bytes(), 9)  # the tool pads files to blocks of 64 KiB
        path.with_name(f"{path.name}.zlib").write_bytes(content)
        path.unlink()

    build("single", "group_size:1", "<u2", make_documents(50_000))
    build("grouped_0", "group_size:4", "<i4", make_documents(100_000)[:3])
    build("grouped_1", "group_size:4", "<i4", make_documents(100_000)[3:])


def make_nanogpt(directory: Path) -> None:
    """Write ids like nanoGPT's data/openwebtext/prepare.py."""
    ids = np.concatenate([np.array(ids, np.uint16) for ids in make_documents(50_000)])
    array = np.memmap(directory / "train.bin", dtype=np.uint16, mode="w+", shape=(len(ids),))
    array[:] = ids
    array.flush()


def main() -> None:
    path = HERE / "versions.json"
    versions = json.loads(path.read_text()) if path.exists() else {}
    for name in sys.argv[1:] or TOOLS:
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        globals()[f"make_{name}"](directory)
        versions[name] = f"{TOOLS[name]} {importlib.metadata.version(TOOLS[name])}"
    path.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
