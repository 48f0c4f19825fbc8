"""YAML dialect of specs: scalars have their apparent type, and unreadable text gives one line."""

import pytest

from runner.errors import SpecError
from runner.spec import SpecLocation, parse_document
from runner.spec.document import parse_yaml
from tests.spec.sample import find_problems


def test_plain_scalars_have_their_apparent_type() -> None:
    text = "{a: 1e-3, b: 1_000, c: on, d: 012, e: 1:30, f: 2024-01-01, g: ~, h: true, i: -1.5E+3, j: .5, on: '1'}"
    assert parse_document(text, "x").data == {
        "a": 0.001, "b": 1000, "c": "on", "d": "012", "e": "1:30", "f": "2024-01-01", "g": None, "h": True,
        "i": -1500.0, "j": 0.5, "on": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3", "specs/x.yaml:3: a: duplicate key, first given at specs/x.yaml:1"),
        ("a:\n  b: 1\n  b: 2", "specs/x.yaml:3: a.b: duplicate key, first given at specs/x.yaml:2"),
        ("", "specs/x.yaml:1: got nothing, needs a mapping with name, job and directory"),
        ("- 1", "specs/x.yaml:1: got a list, needs a mapping with name, job and directory"),
        ("a: 1\nb: [", "specs/x.yaml:2: unreadable YAML: column 5: while parsing a flow node, expected the node "
         "content, but found '<stream end>'; a bracket, a brace or a quote is not closed"),
        ("a: 1\nb: &x 2", "specs/x.yaml:2: unreadable YAML: column 4: anchors, aliases and tags are refused; put a "
         "value that begins with *, & or ! into quotes"),
        ("a: !!python/name:os.system 1", "specs/x.yaml:1: unreadable YAML: column 4: anchors, aliases and tags are "
         "refused; put a value that begins with *, & or ! into quotes"),
        ("a: 1\n---\nb: 1", "specs/x.yaml:2: unreadable YAML: column 1: expected a single document in the stream, "
         "but found another document"),
        ("a: 1\nb: c: d", "specs/x.yaml:2: unreadable YAML: column 5: mapping values are not allowed here; put a value "
         'that holds a colon into quotes, as in key: "a: b", and indent the keys of one section equally'),
        ("a:\n\tb: 1", "specs/x.yaml:2: unreadable YAML: column 1: while scanning for the next token, found character "
         "'\\t' that cannot start any token; indent with spaces, as YAML does not allow tabs"),
        ("a: 'b", "specs/x.yaml:1: unreadable YAML: column 6: while scanning a quoted scalar, found unexpected end of "
         "stream; a quote is not closed"),
        ("a: [1, 2\nb: 3", "specs/x.yaml:2: unreadable YAML: column 2: while parsing a flow sequence, expected ',' or "
         "']', but got ':'; a list in brackets is not closed, or lacks a comma"),
        ("a: @b", "specs/x.yaml:1: unreadable YAML: column 4: while scanning for the next token, found character '@' "
         "that cannot start any token; put the value into quotes"),
        ("a: 1\nb: \x00", "specs/x.yaml:2: unreadable YAML: special characters are not allowed"),
        ("[a]: 1", "specs/x.yaml:1: a key must be text, not a list or a mapping"),
        ("a: 1e999", "specs/x.yaml:1: a: 1e999 is too large a number"),
        ("a: " + "9" * 5000, "specs/x.yaml:1: a: 99999999999999999999 is too large a number"),
        ("[" * 5000, "specs/x.yaml:1: unreadable YAML: nested too deeply"),
    ],
)  # fmt: skip
def test_unreadable_yaml_gives_one_line(text: str, line: str) -> None:
    assert find_problems(text) == [line]


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\ufeff"], ids=ascii)
def test_line_breaks_of_yaml_1_1_are_text(mark: str) -> None:
    for text in (f"a{mark}b", mark, f"{mark}a", f"a{mark}", f"a {mark} b"):
        for written in (text, f'"{text}"', f"'{text}'", f"[{text}]"):
            found, _ = parse_yaml(written, lambda line: SpecLocation(str(line)))
            assert found == ([text] if "[" in written else text), written
    data, locations = parse_yaml(f"a{mark}: 1 # {mark}\nb: 2", lambda line: SpecLocation(str(line), line))
    assert data == {f"a{mark}": 1, "b": 2}
    assert locations["b",].line == 2


def test_a_lone_surrogate_is_rejected() -> None:
    with pytest.raises(SpecError, match="surrogate"):
        parse_yaml(r'a: "x\ud800"', lambda line: SpecLocation(str(line)))
