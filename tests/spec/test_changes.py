"""Changes of values as text: one line each, whatever a manifest holds."""

from typing import Any

import pytest

from runner.spec import list_value_changes

MIXTURE = [{"name": "a", "weight": 1.0}, {"name": "b"}]


@pytest.mark.parametrize(
    ("former", "present", "lines"),
    [
        (60, 80, ["key: 60 -> 80"]),
        (None, 0.5, ["key: null -> 0.5"]),
        (1.0, 2.0, ["key: 1 -> 2"]),
        (True, "text", ["key: true -> text"]),
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ["key.b.c: 2 -> 3"]),
        ({"a": 1}, {"b": 1}, ["key.a: 1 -> null", "key.b: null -> 1"]),
        ({}, {"a": 1}, ['key: {} -> {"a": 1}']),
        (MIXTURE, [], ["key: a 1, b -> []"]),
        ([], [[30, {"x": 1}, {"d": "46"}, "goes on"]], ['key: [] -> from step 30: {"x": 1}']),
        ([[3, {}, {}]], [[1, 2]], ["key: from step 3: {} -> [[1, 2]]"]),
        ([[3, {"a": 9**9999}, {}]], 1, ["key: ? -> 1"]),
        pytest.param(9**9999, 1, ["key: ? -> 1"], id="many digits"),
        (
            ["x" * 300, 1],
            ["x" * 300, 2],
            [f'key: ...{"x" * 27}", 1] -> ...{"x" * 27}", 2]'],
        ),
        (["x" * 300], "y", [f'key: ["{"x" * 118}... -> y']),
        (float("nan"), float("inf"), ["key: NaN -> Infinity"]),
        ("a\nFORGED line", "\x1b[2J", ["key: a\\nFORGED line -> \\x1b[2J"]),
        ({"a\nb": 1}, {"a\nb": 2}, ["key.a\\nb: 1 -> 2"]),
    ],
)
def test_a_change_is_one_printable_line_for_each_key(former: Any, present: Any, lines: list[str]) -> None:
    found = list_value_changes("key", former, present)
    assert found == lines
    assert all(line.isprintable() for line in found)
