"""Write the golden files of this directory, each with the tool that its format belongs to.

    python tests/data/formats/make.py megatron mds array_record nanogpt

writes those that are named, into the directory of this file, and the versions of their tools into `versions.json`.
Needs `megatron-core` and `torch`, `mosaicml-streaming`, `array_record`, `numpy`: only what is asked for is imported.
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


def documents(vocabulary_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """The documents that went into the files: any ids, another one at each position."""
    first = np.cumsum([0, *lengths])
    return [[(7919 * (first[i] + j) + 13) % vocabulary_size for j in range(n)] for i, n in enumerate(lengths)]


def make_megatron(directory: Path) -> None:
    """`int32` and `int64`: a sequence a document. `uint16`: the documents of two files, of one or several sequences."""
    module = importlib.import_module("megatron.core.datasets.indexed_dataset")

    def build(name: str, dtype: type[np.number], items: list[list[int]], pieces: int) -> None:
        builder = module.IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=dtype)
        for ids in items:
            lengths = [len(piece) for piece in np.array_split(ids, pieces if len(ids) >= pieces else 1)]
            builder.add_document(np.array(ids, dtype), lengths)
        builder.finalize(str(directory / f"{name}.idx"))

    build("int32", np.int32, documents(100_000), 1)
    build("int64", np.int64, documents(100_000), 1)
    build("uint16_0", np.uint16, documents(50_000)[:3], 3)
    build("uint16_1", np.uint16, documents(50_000)[3:], 3)


def make_mds(directory: Path) -> None:
    """One directory a way in which data sets of tokens are written, with small shards so that there are several."""
    writer = importlib.import_module("streaming.base.format.mds.writer").MDSWriter

    def build(name: str, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> None:
        with writer(columns=columns, out=str(directory / name), size_limit=1500, **options) as out:
            for sample in samples:
                out.write(sample)

    wide, full = documents(100_000), [ids for ids in documents(50_000) if ids]
    blocks = documents(50_000, (BLOCK,) * 20)
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
    """`single`: a record a group, as data loaders want it. `grouped_*`: two files, several records a group."""
    module = importlib.import_module("array_record.python.array_record_module")

    def build(name: str, options: str, dtype: str, items: list[list[int]]) -> None:
        writer = module.ArrayRecordWriter(str(directory / f"{name}.array_record"), options)
        for ids in items:
            writer.write(np.array(ids, dtype).tobytes())
        writer.close()
        path = directory / f"{name}.array_record"
        content = zlib.compress(path.read_bytes(), 9)  # a file is padded to blocks of 64 KiB
        path.with_name(f"{path.name}.zlib").write_bytes(content)
        path.unlink()

    build("single", "group_size:1", "<u2", documents(50_000))
    build("grouped_0", "group_size:4", "<i4", documents(100_000)[:3])
    build("grouped_1", "group_size:4", "<i4", documents(100_000)[3:])


def make_nanogpt(directory: Path) -> None:
    """As nanoGPT's data/openwebtext/prepare.py does."""
    ids = np.concatenate([np.array(ids, np.uint16) for ids in documents(50_000)])
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
