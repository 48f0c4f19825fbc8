"""Documents of files and overrides, in which every key has a position for error messages."""

from pathlib import Path

import pytest

from runner.errors import (
    DataError,
    FailedError,
    InvalidError,
    PeerLostError,
    RunnerError,
    SpecError,
    StorageError,
)
from runner.spec import MeshConfig, load_document, parse_document, validate_spec
from runner.storage import DeadlineError
from tests.spec.sample import SPEC, Config, find_problems


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "config.train.total_stepz=5",
            "--set config.train.total_stepz=5: unknown key; did you mean config.train.total_steps?",
        ),
        (
            "config.train={total_steps: 1, rte: 2}",
            "--set config.train={total_steps: 1, rte: 2}: config.train.rte: "
            "unknown key; did you mean config.train.rate?",
        ),
        ("config.train={}", "--set config.train={}: missing key total_steps"),
        ("logging.every_stps=5", "--set logging.every_stps=5: unknown key; did you mean logging.every_steps?"),
        ("sed=5", "--set sed=5: unknown key; did you mean seed?"),
        ("seed=abc", "--set seed=abc: got 'abc' (text), needs a whole number"),
        ("seed=", "--set seed=: got null, needs a whole number"),
        ("seed.x=1", "--set seed.x=1: seed is 7, so it has no keys; override seed itself"),
        ("seed", "--set seed: needs the form dotted.key=value"),
        ("a..b=1", "--set a..b=1: needs the form dotted.key=value"),
        ("=1", "--set =1: needs the form dotted.key=value"),
        ("seed=a: b: c", "--set seed=a: b: c: unreadable YAML: mapping values are not allowed here; put a "
         'value that holds a colon into quotes, as in key: "a: b", and indent the keys of one section equally'),
    ],
)  # fmt: skip
def test_an_invalid_override_is_reported_like_a_line_of_the_file(override: str, line: str) -> None:
    assert find_problems(SPEC, override, config=Config) == [line]


def test_an_override_with_several_problems_is_shown_once() -> None:
    override = "config.train={rte: 2, size: 3}"
    first, *others = find_problems(SPEC, override, config=Config)
    assert first.startswith(f"--set {override}: ")
    assert others
    assert all(line.startswith("  config.train") and override not in line for line in others)


def test_a_section_missing_several_keys_gives_one_line() -> None:
    (line,) = find_problems("name: x", config=Config)
    assert line == "specs/x.yaml:1: missing key job; missing key directory"


def test_a_long_override_is_shortened_in_messages() -> None:
    (line,) = find_problems(SPEC, f"seed={'x' * 5000}")
    assert line.startswith("--set seed=xxx")
    assert line.endswith("needs a whole number")
    assert len(line) < 300


def test_a_list_of_problems_at_a_key_keeps_its_lines_and_is_bounded() -> None:
    document = parse_document(SPEC, "x.yaml")
    with pytest.raises(SpecError) as caught, document.errors_at("seed"):
        raise InvalidError("\n".join([*(f"tensor {i}: \x1b[1m {'0' * 1_000_000}" for i in range(50)), "use another"]))
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("x.yaml:4: seed: tensor 0: \\x1b[1m")
    assert lines[1].startswith("  tensor 1: ")
    assert lines[-2:] == ["  ... and 32 more lines like these", "  use another"]
    assert len(lines) == 20
    assert max(map(len, lines)) < 2100


@pytest.mark.parametrize("kind", [FailedError, DataError, PeerLostError, StorageError, DeadlineError])
def test_the_message_of_every_error_is_bounded(kind: type[RunnerError]) -> None:
    assert str(kind("one line")) == "one line"
    assert len(str(kind("\n".join("x" * 10_000 for _ in range(10_000))))) < 45_000


def test_all_malformed_overrides_are_listed() -> None:
    assert len(find_problems(SPEC, "seed", "name", "seed.x=1")) == 3


def test_an_override_creates_missing_sections() -> None:
    document = parse_document(SPEC, "x", ["logging.every_steps=3", "topology.mesh.tensor=2", "topology.mesh.data=4"])
    spec = validate_spec(document)
    assert spec.logging.every_steps == 3
    assert spec.topology is not None
    assert spec.topology.mesh == MeshConfig(data=4, fsdp=1, tensor=2)


LISTS = "name: x\nconfig:\n  mixture:\n  - {name: a, weight: 1}\n  - {name: b}\n  decays: [0.9, 0.99]\n  none: []\n"


def test_an_override_reaches_items_of_lists_by_index() -> None:
    overrides = ["config.mixture.0.weight=3", "config.mixture.1.options.path=/a", "config.decays.1=0.5"]
    document = parse_document(LISTS, "x.yaml", overrides)
    mixture = [{"name": "a", "weight": 3}, {"name": "b", "options": {"path": "/a"}}]
    assert document.data["config"] == {"mixture": mixture, "decays": [0.9, 0.5], "none": []}
    line = document.format_problem(("config", "mixture", "0", "weight"), "is bad")
    assert line == "--set config.mixture.0.weight=3: is bad"
    assert document.format_problem(("config", "mixture", "1", "name"), "is bad").startswith("x.yaml:5: ")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("config.mixture.2.weight=3", "config.mixture is a list, got '2', needs an index: 0 to 1; or override"),
        ("config.mixture.2=3", "config.mixture is a list, got '2', needs an index: 0 to 1; or override"),
        ("config.mixture.-1.weight=3", "got '-1', needs an index: 0 to 1"),
        ("config.mixture.weight=3", "got 'weight', needs an index: 0 to 1"),
        ("config.none.0=3", "got '0', needs an index: none; or override config.none itself"),
        ("config.decays.0.x=3", "config.decays.0 is 0.9, so it has no keys; override config.decays.0 itself"),
    ],
)
def test_an_override_of_an_item_that_is_not_there_names_the_indices(override: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_document(LISTS, "x.yaml", [override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert problem in str(caught.value)


def test_an_unreadable_file_gives_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: x\njob: \xff\xfe")
    for path, reason in (
        (tmp_path / "absent.yaml", ": cannot read the spec: No such file or directory"),
        (tmp_path, ": cannot read the spec: Is a directory"),
        (binary, ":2: not UTF-8 text: byte 0xff"),
    ):
        with pytest.raises(SpecError) as caught:
            load_document(path)
        assert str(caught.value) == f"{path}{reason}"


def test_later_problems_of_a_key_are_reported_at_its_line() -> None:
    document = parse_document(SPEC, "specs/x.yaml", ["config.train.rate=2"])
    for key, line in (
        ("topology.mesh", "specs/x.yaml:6: topology.mesh: 3 > 2"),
        ("topology.mesh.tensor", "specs/x.yaml:6: topology.mesh.tensor: 3 > 2"),
        ("logging.wandb", "specs/x.yaml:1: logging.wandb: 3 > 2"),
        ("config.train.rate", "--set config.train.rate=2: 3 > 2"),
        ("", "specs/x.yaml:1: 3 > 2"),
    ):
        assert str(document.error(key, "3 > 2")) == line
