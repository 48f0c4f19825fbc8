"""A directory or URL in Hugging Face's layout: `config.json`, and safetensors in one file or in shards with an index.

Opening it reads the index and the headers, no tensor; nothing of it is executed. `describe` finds what is wrong.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from runner.errors import InvalidError
from runner.storage import JsonObject, Listed, OtherKindError, Store, Version, open_store, parse_json
from runner.weights.header import PREFIX_BYTES, Tensor, header_length, parse_header

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUM_READERS = 8


@dataclass(frozen=True)
class Published:
    """Weights as they were found.

    Attributes:
        config: the content of `config.json`.
        tensors: by the names that they have in the files.
        versions: of the files that hold them: another one is refused when they are read.
    """

    store: Store
    config: JsonObject
    tensors: dict[str, Tensor]
    versions: dict[str, Version]


def is_published(store: Store) -> bool:
    """Whether a directory is in Hugging Face's layout, or is meant to be; else it is a run's."""
    names = store.children("")
    return CONFIG in names or any(name.endswith((SUFFIX, INDEX)) for name in names)


def open_published(where: str | Store) -> Published:
    """The weights at a path or URL. Raises `InvalidError` with a line for each thing that is wrong."""
    store = open_store(where) if isinstance(where, str) else where
    listing = {name: listed for name, listed in store.listing("").items() if "/" not in name}
    names = list(listing)
    if CONFIG not in names:
        raise InvalidError(f"{store.url}: no {CONFIG} is here; needs a directory in Hugging Face's layout")
    config = _read_object(store, CONFIG)
    index = _read_index(store) if WHOLE not in names and INDEX in names else None
    files = _files(store, names, index)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="header") as pool:
        found = list(pool.map(lambda file: _read_header(store, file, listing[file]), files))
    problems = [problem for _, _, problem in found if problem is not None]
    tensors: dict[str, Tensor] = {}
    for file, (held, _, _) in zip(files, found, strict=True):
        for name, tensor in held.items():
            if name in tensors:
                problems.append(f"{store.url}: tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    if index is not None and not problems:
        problems += [f"{store.url}/{INDEX}: {problem}" for problem in _disagreements(index, tensors)]
    if problems:
        raise InvalidError("\n".join(sorted(problems)))
    return Published(
        store, config, tensors, {file: version for file, (_, version, _) in zip(files, found, strict=True)}
    )


def _read_object(store: Store, name: str) -> JsonObject:
    try:
        return parse_json(store.read(name))
    except (FileNotFoundError, OtherKindError):
        raise InvalidError(f"{store.url}/{name} is missing, or is no file") from None
    except ValueError as error:
        raise InvalidError(f"{store.url}/{name} cannot be read: {error}") from error


def _read_index(store: Store) -> dict[str, str]:
    """The file of each tensor, by the index. No name in it leads out of the directory."""
    files = _read_object(store, INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InvalidError(f"{store.url}/{INDEX}: has no weight_map")
    strange = {str(file) for file in files.values() if not _is_plain(file)}
    if strange:
        lines = [f"{store.url}/{INDEX}: names {file[:200]!r}, needs a {SUFFIX} beside it" for file in sorted(strange)]
        raise InvalidError("\n".join(lines))
    return files


def _is_plain(name: object) -> bool:
    """Whether a name is of a file in the very directory."""
    return (
        isinstance(name, str)
        and "\\" not in name
        and "\0" not in name
        and name.endswith(SUFFIX)
        and (PurePosixPath(name).name == name)
    )


def _files(store: Store, names: list[str], index: dict[str, str] | None) -> list[str]:
    if index is not None:
        files = sorted(set(index.values()))
        lacking = [file for file in files if file not in names]
        if lacking:
            raise InvalidError("\n".join(f"{store.url}/{file} is missing, {INDEX} names it" for file in lacking))
        return files
    found = [WHOLE] if WHOLE in names else [name for name in names if name.endswith(SUFFIX)]
    if found:
        return found
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise InvalidError(
            f"{store.url}/{pickles[0]} may be a pickle, which could run any program; needs *{SUFFIX}: load it with "
            "transformers where you trust it, and save_pretrained it"
        )
    raise InvalidError(f"{store.url}: no *{SUFFIX} is here")


def _read_header(store: Store, file: str, listed: Listed) -> tuple[dict[str, Tensor], Version, str | None]:
    """The tensors of a file, its version, and what is wrong with it."""
    size, version = listed.size_bytes, listed.version
    try:
        length = header_length(store.read_range(file, 0, min(PREFIX_BYTES, size), version), size)
        content = store.read_range(file, PREFIX_BYTES, PREFIX_BYTES + length, version)
        return parse_header(content, file, size), version, None
    except OtherKindError as error:
        return {}, version, str(error)
    except ValueError as error:
        return {}, version, f"{store.url}/{file}: {error}"


def _disagreements(index: dict[str, str], tensors: dict[str, Tensor]) -> Iterator[str]:
    for name in sorted(index.keys() | tensors.keys()):
        if name not in tensors:
            yield f"tensor {name} is not in {index[name]}"
        elif name not in index:
            yield f"tensor {name} of {tensors[name].file} is not in it"
        elif tensors[name].file != index[name]:
            yield f"tensor {name} is in {tensors[name].file}, not in {index[name]}"
