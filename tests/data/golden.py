"""Files written by the tools of other formats (`formats/make.py`), and their expected content."""

import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from runner.data.megatron import HEADER, MAGIC, VERSION
from runner.data.open_source import open_format
from runner.data.remote import CacheSettings
from runner.data.source_files import find_source
from runner.data.token_files import DocumentFiles
from tests.data.formats.make import BLOCK, make_documents

GOLDEN = Path(__file__).parent / "formats"
WIDE, NARROW = make_documents(100_000), make_documents(50_000)


@dataclass(frozen=True)
class FormatCase:
    """A source of another format: its `data.source` and `data.options`, and the documents it must contain."""

    source: str
    options: Mapping[str, str]
    documents: list[list[int]]
    dtype: str

    def open(self, root: Path | str, cache: Path | None = None, cache_bytes: int | None = 1 << 20) -> DocumentFiles:
        """Open the source below a directory, or below a URL, for which `cache` is required."""
        kept = cache or Path(root) / "cache"
        settings = CacheSettings(kept, cache_bytes, 9)
        return open_format(find_source(f"{root}/{self.source}"), self.options, settings)

    @property
    def ids(self) -> list[int]:
        return [token for ids in self.documents for token in ids]

    @property
    def ends(self) -> list[int]:
        return sorted({int(end) for end in np.cumsum([len(ids) for ids in self.documents])})


CASES = {
    "megatron_int32": FormatCase("megatron/int32.idx", {}, WIDE, "int32"),
    "megatron_int64": FormatCase("megatron/int64.idx", {}, WIDE, "int64"),
    "megatron_several": FormatCase("megatron/uint16_*.idx", {}, NARROW, "uint16"),
    "mds_bytes": FormatCase("mds/bytes_int64", {"dtype": "int64"}, WIDE, "int64"),
    "mds_array": FormatCase("mds/ndarray_int32", {"column": "tokens"}, WIDE, "int32"),
    "mds_zstd": FormatCase("mds/zstd", {}, WIDE, "int32"),
    "mds_indexes": FormatCase("mds/*_int32/index.json", {}, WIDE, "int32"),
    "mds_static": FormatCase("mds/static", {}, make_documents(50_000, (BLOCK,) * 20), "uint16"),
    "mds_columns": FormatCase("mds/columns", {"column": "input_ids"}, NARROW, "uint16"),
    "array_record": FormatCase("array_record/single.array_record", {"dtype": "uint16"}, NARROW, "uint16"),
    "array_record_several": FormatCase("array_record/grouped_*", {"dtype": "int32"}, WIDE, "int32"),
}


def copy_golden(place: Path) -> Path:
    """Copy the golden files to `place` and unpack them."""
    shutil.copytree(GOLDEN, place)
    for packed in place.rglob("*.zlib"):
        packed.with_suffix("").write_bytes(zlib.decompress(packed.read_bytes()))
        packed.unlink()
    return place


def write_records(path: Path, items: Sequence[Sequence[int]]) -> None:
    """Write an ArrayRecord file of uint16 documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for ids in items:
        writer.write(np.array(ids, "<u2").tobytes())
    writer.close()


def write_megatron(path: Path, items: Sequence[Sequence[int]]) -> None:
    """Write a Megatron dataset of int32 documents of one sequence each; `path` is the `.idx` file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(ids) for ids in items], "<i4")
    starts = np.concatenate([[0], np.cumsum(lengths[:-1])]) * 4
    header = HEADER.pack(MAGIC, VERSION, 4, len(items), len(items) + 1)
    tables = (lengths, starts.astype("<i8"), np.arange(len(items) + 1, dtype="<i8"))
    path.write_bytes(header + b"".join(table.tobytes() for table in tables))
    path.with_suffix(".bin").write_bytes(np.concatenate(list(map(np.asarray, items))).astype("<i4").tobytes())
