"""Differences of specs, key by key, also of damaged ones."""

from runner.dashboard.reader import ABSENT, UNREADABLE, find_differences

ONE = "name: a\ndirectory: runs/a\nseed: 0\nconfig: {model: {layers: 2, heads: 4}, list: [1, 2], empty: {}}\n"


def test_only_what_differs_is_named_and_neither_name_nor_directory():
    other = ONE.replace("name: a", "name: b").replace("layers: 2", "layers: 3").replace(", heads: 4", "")
    found = find_differences([ONE, other.replace("[1, 2]", "[1, 3]")])
    assert [tuple(each) for each in found] == [
        ("config.list", ["[1, 2]", "[1, 3]"]),
        ("config.model.heads", ["4", ABSENT]),
        ("config.model.layers", ["2", "3"]),
    ]
    assert find_differences([ONE, ONE]) == find_differences([ONE]) == find_differences([]) == []


def test_a_spec_that_cannot_be_read_or_that_blows_up_has_no_values():
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    for broken in (None, "", "a: [", bomb, "seed: !!python/object:os.system 0"):
        (seed,) = (each for each in find_differences([ONE, broken]) if each.key == "seed")
        assert seed.values == ["0", UNREADABLE]
