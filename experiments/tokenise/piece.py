"""The work, cut into pieces: a pure function of the files and of `shard_bytes`, never of hosts and cores."""

import itertools
from collections.abc import Iterable, Iterator

from experiments.tokenise.reading import Part, row_groups
from experiments.tokenise.source import InputFile

Piece = tuple[Part, ...]


def cut_into_pieces(files: Iterable[InputFile], shard_bytes: int) -> list[Piece]:
    """Pieces of about `shard_bytes` of input, in reading order.

    Small files share a piece. A large .jsonl on a disk is cut into ranges, a large .parquet on a disk between its row
    groups; what is compressed, in a bucket, or one document stays whole.
    """
    pieces: list[Piece] = []
    piece: list[Part] = []
    size_bytes = 0
    for part in (part for file in files for part in _parts(file, shard_bytes)):
        if piece and size_bytes + part.size_bytes > shard_bytes:
            pieces.append(tuple(piece))
            piece, size_bytes = [], 0
        piece.append(part)
        size_bytes += part.size_bytes
    return [*pieces, tuple(piece)] if piece else pieces


def _parts(file: InputFile, shard_bytes: int) -> Iterator[Part]:
    is_large = file.place is None and file.size_bytes > shard_bytes
    if is_large and file.form == "jsonl" and not file.compression:
        num_parts = -(-file.size_bytes // shard_bytes)
        edges = [file.size_bytes * i // num_parts for i in range(num_parts + 1)]
        yield from (Part(file, stop - start, start, stop) for start, stop in itertools.pairwise(edges))
    elif is_large and file.form == "parquet":
        yield from _row_group_parts(file, shard_bytes)
    else:
        yield Part(file, file.size_bytes)


def _row_group_parts(file: InputFile, shard_bytes: int) -> Iterator[Part]:
    start, size_bytes, sizes = 0, 0, row_groups(file)
    for group, group_bytes in enumerate(sizes):
        if size_bytes and size_bytes + group_bytes > shard_bytes:
            yield Part(file, size_bytes, start, group)
            start, size_bytes = group, 0
        size_bytes += group_bytes
    if start < len(sizes):
        yield Part(file, size_bytes, start, len(sizes))
