"""Directories in Hugging Face's layout: location of tensors, and every kind of damage."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from runner.errors import InvalidError
from runner.huggingface.safetensors import has_published_weights, open_published_weights
from runner.storage import LocalStore
from tests.huggingface.small import convert_to_tensors, make_leaves, write_export

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def read_header(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    """Return a damage that changes the header of the only file."""

    def act(directory: Path) -> None:
        record, rest = read_header(directory / FILE)
        found = change(record)
        text = found.encode() if isinstance(found, str) else json.dumps(record).encode()
        (directory / FILE).write_bytes(len(text).to_bytes(8, "little") + text + rest)

    return act


def write_file(name: str, content: bytes | str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def truncate(num_bytes: int) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / FILE, num_bytes)


def append_byte(directory: Path) -> None:
    with (directory / FILE).open("ab") as file:
        file.write(b"more")


def shift_offsets(record: dict[str, dict[str, object]], name: str, by: int) -> None:
    record[name]["data_offsets"] = [offset + by for offset in record[name]["data_offsets"]]  # type: ignore[attr-defined]


def point_index(**files: str) -> Callable[[Path], None]:
    """Return a damage that makes the index name other files."""

    def act(directory: Path) -> None:
        record = json.loads((directory / INDEX).read_text())
        record["weight_map"] |= {name.replace("__", "."): file for name, file in files.items()}
        (directory / INDEX).write_text(json.dumps(record))

    return act


def write_pickle(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def duplicate_tensor(directory: Path) -> None:
    save_file({"model.scale": np.zeros((), np.float32)}, directory / SECOND)
    (directory / INDEX).unlink()


def replace_entry(name: str = "a", **changes: str) -> Callable[[Path], None]:
    """Return a damage that replaces the header by a single tensor with the given JSON fields."""
    fields = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0, 4]"} | changes
    text = ", ".join(f'"{key}": {value}' for key, value in fields.items())
    return rewrite_header(lambda record: f'{{"{name}": {{{text}}}}}')


SINGLE_FILE_DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no config", lambda directory: (directory / "config.json").unlink(), r"no config\.json is here"),
    ("a torn config", write_file("config.json", "{"), r"config\.json cannot be read"),
    ("a config that is a list", write_file("config.json", "[]"), r"config\.json cannot be read: not a JSON object"),
    ("no file", lambda directory: (directory / FILE).unlink(), r"no \*\.safetensors is here"),
    ("a pickle", write_pickle, r"pytorch_model\.bin may be a pickle.*needs \*\.safetensors"),
    ("empty", truncate(0), r"is torn: it has 0 bytes"),
    ("torn in the header", truncate(100), r"is torn: its header has [\d,]+ bytes, and it ends after 100"),
    ("torn in the tensors", truncate(5000), r"is torn: by its header it has [\d,]+ bytes, it has 5,000"),
    ("more bytes", append_byte, r"holds more than its header says"),
    (
        "no safetensors at all",
        write_file(FILE, b"<html>not found</html>"),
        r"is not a safetensors file: its header would have",
    ),
    ("a header that is no JSON", rewrite_header(lambda record: "{]"), r"its header is not JSON"),
    ("a header that is a list", rewrite_header(lambda record: "[]"), r"its header is not a JSON object"),
    (
        "a header nested deeply",
        rewrite_header(lambda record: "[" * 100_000),
        r"its header is nested too deeply|is not JSON",
    ),
    ("a tensor twice", rewrite_header(lambda record: '{"a": {}, "a": {}}'), r"its header names a twice"),
    ("no shape", rewrite_header(lambda record: record["model.scale"].pop("shape")), r"scale has no shape"),
    (
        "a negative shape",
        rewrite_header(lambda record: record["model.scale"].update(shape=[-1])),
        r"scale has no shape",
    ),
    (
        "another shape",
        rewrite_header(lambda record: record["model.scale"].update(shape=[3])),
        r"scale is F32\[3\] and has 4",
    ),
    (
        "a type of nobody",
        rewrite_header(lambda record: record["model.scale"].update(dtype="F7")),
        r"type F7, which is",
    ),
    ("an overlap", rewrite_header(lambda record: shift_offsets(record, "model.scale", -4)), r"overlaps"),
    ("sizes of digits", replace_entry(shape=f"[{','.join(['9' * 4000] * 3000)}]"), r"a number of 4,000 digits"),
    ("an offset of digits", replace_entry(data_offsets=f"[0, {'9' * 5000}]"), r"a number of 5,000 digits"),
    ("a size beyond the file", replace_entry(shape=f"[{'9' * 19}]"), r"and has 4 bytes"),
    ("a shape nested deeply", replace_entry(shape="[" * 50_000 + "]" * 50_000), r"nested too deeply"),
    ("dimensions", replace_entry(shape=f"[{','.join(['2'] * 100_000)}]"), r"100,000 dimensions"),
    *(
        (f"a shape of {size}", replace_entry(shape=f"[{size}]"), "has no shape or data_offsets of whole numbers")
        for size in ("-1", "1.0", "1e3", "NaN", "Infinity", "-Infinity", "true", "null", '"1"', "[1]", "{}")
    ),
    *(
        (f"offsets {offsets}", replace_entry(data_offsets=offsets), "has no shape or data_offsets of whole numbers")
        for offsets in ("[0]", "[0, 4, 8]", "[-4, 0]", "[0, 4.0]", "[NaN, 4]", "{}", "4", "null")
    ),
    ("offsets backwards", replace_entry(data_offsets="[4, 0]"), r"and has -4 bytes"),
    ("a key twice", replace_entry(dtype='"F32", "dtype": "F32"'), r"names dtype twice"),
    ("a type of megabytes", replace_entry(dtype=f'"{"x" * 1_000_000}"'), r"of type x{20}, which"),
    ("a name of megabytes", replace_entry("x" * 1_000_000, shape="[2]"), r"tensor x{200} is"),
    ("a name of several lines", replace_entry(r"a\n\u001b[2J", shape="[2]"), r"tensor a\\n\\x1b\[2J is"),
    ("half a surrogate pair", replace_entry(r"\ud800", shape="[2]"), r"tensor \\ud800 is"),
    (
        "many entries of a name",
        rewrite_header(lambda record: "{" + ",".join(['"a": {}'] * 100_000) + "}"),
        r"names a twice",
    ),
    (
        "a hole",
        rewrite_header(lambda record: shift_offsets(record, "model.scale", 4)),
        r"leaves a hole after|holds more|is torn",
    ),
]
SHARDED_DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no shard", lambda directory: (directory / SECOND).unlink(), rf"{SECOND} is missing, .*index\.json names it"),
    ("a torn index", write_file(INDEX, "{"), r"index\.json cannot be read"),
    ("an empty index", write_file(INDEX, "{}"), r"index\.json: has no weight_map"),
    ("a file above", point_index(model__scale="../secret.safetensors"), r"names '\.\./secret\.safetensors', needs"),
    (
        "a file elsewhere",
        point_index(model__scale="/etc/passwd.safetensors"),
        r"names '/etc/passwd\.safetensors', needs",
    ),
    ("another kind of file", point_index(model__scale="pytorch_model.bin"), r"names 'pytorch_model\.bin', needs"),
    ("the wrong shard", point_index(model__embedding__weight=SECOND), r"embedding\.weight is in model-00001.*, not in"),
    ("a tensor that is not there", point_index(model__nothing=SECOND), rf"tensor model\.nothing is not in {SECOND}"),
    (
        "in two shards",
        lambda directory: save_file(convert_to_tensors(make_leaves()), directory / SECOND),
        r"is in model-00001.* and",
    ),
    (
        "two files and no index",
        lambda d: [duplicate_tensor(d), save_file(convert_to_tensors(make_leaves()), d / FIRST)],
        r"model\.scale is in",
    ),
]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_every_tensor_is_located(tmp_path: Path, num_shards: int):
    files = convert_to_tensors(make_leaves())
    published = open_published_weights(str(write_export(tmp_path / "hf", files, num_shards)))
    assert published.tensors.keys() == files.keys()
    for name, found in published.tensors.items():
        content = (tmp_path / "hf" / found.file).read_bytes()[found.start : found.stop]
        assert (content, found.shape, found.dtype) == (files[name].tobytes(), files[name].shape, "F32")


@pytest.mark.parametrize(
    ("num_shards", "damage", "message"),
    [(number, *case[1:]) for number, table in ((1, SINGLE_FILE_DAMAGES), (2, SHARDED_DAMAGES)) for case in table],
    ids=[case[0] for table in (SINGLE_FILE_DAMAGES, SHARDED_DAMAGES) for case in table],
)
def test_damage_is_reported_in_one_line(
    tmp_path: Path, num_shards: int, damage: Callable[[Path], object], message: str
):
    directory = write_export(tmp_path / "hf", convert_to_tensors(make_leaves()), num_shards)
    damage(directory)
    with pytest.raises(InvalidError, match=message) as found:
        open_published_weights(str(directory))
    assert all(line.startswith(str(directory)) and len(line) < 1000 for line in str(found.value).splitlines())


def test_a_run_is_not_mistaken_for_published_weights(tmp_path: Path):
    assert has_published_weights(LocalStore(write_export(tmp_path / "hf", convert_to_tensors(make_leaves()))))
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "run" / "spec.yaml").write_text("")
    assert not has_published_weights(LocalStore(tmp_path / "run"))
    assert not has_published_weights(LocalStore(tmp_path / "nothing"))
