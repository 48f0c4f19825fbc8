"""Reader of W&B's offline files, as `wandb sync` reads them: LevelDB logs of protocol buffers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_HEADER, _BLOCK_BYTES = 7, 1 << 15
_FULL, _LAST = 1, 4


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows in order, each with its step."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({"step": row["_step"]} | {key: row[key] for key in row if key[0] != "_"})
    return rows


def read_config(path: Path) -> dict[str, Any]:
    """Return the config and tags that the run was started with."""
    (run,) = (record.run for record in read_records(path) if record.WhichOneof("record_type") == "run")
    return {item.key: json.loads(item.value_json) for item in run.config.update} | {"tags": list(run.tags)}


def read_records(path: Path) -> Iterator[Any]:
    """Yield all records, in the format https://github.com/google/leveldb/blob/main/doc/log_format.md after a header."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    offset, whole = _HEADER, b""
    while offset + _HEADER <= len(content):
        left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if left < _HEADER:
            offset += left
            continue
        _, size, kind = struct.unpack("<IHB", content[offset : offset + _HEADER])
        whole += content[offset + _HEADER : offset + _HEADER + size]
        offset += _HEADER + size
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
