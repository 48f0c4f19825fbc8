"""Differences between specs, key by key, also for damaged ones."""

from runner.dashboard.reader import ABSENT, UNREADABLE, find_differences

SPEC = "name: a\ndirectory: runs/a\nseed: 0\nconfig: {model: {layers: 2, heads: 4}, list: [1, 2], empty: {}}\n"


def test_only_differing_keys_are_listed_except_name_and_directory():
    other = SPEC.replace("name: a", "name: b").replace("layers: 2", "layers: 3").replace(", heads: 4", "")
    found = find_differences([SPEC, other.replace("[1, 2]", "[1, 3]")])
    assert [tuple(each) for each in found] == [
        ("config.list", ["[1, 2]", "[1, 3]"]),
        ("config.model.heads", ["4", ABSENT]),
        ("config.model.layers", ["2", "3"]),
    ]
    assert find_differences([SPEC, SPEC]) == find_differences([SPEC]) == find_differences([]) == []


def test_an_unreadable_or_expanding_spec_has_no_values():
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    for broken in (None, "", "a: [", bomb, "seed: !!python/object:os.system 0"):
        (seed,) = (each for each in find_differences([SPEC, broken]) if each.key == "seed")
        assert seed.values == ["0", UNREADABLE]
