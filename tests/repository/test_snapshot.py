"""Programs, train states and identities of the shipped specs, and files of short runs, equal their golden snapshots.

Daily: everything of the nano specs but clip_nano, the identity of all other specs, and runs of 20 steps of a counter, a
tokenise job, a GPT, a job on arrays and a lookup table with each feature. The rest is soak. With other versions or on
another CPU nothing is skipped: only digests of programs, or bits of runs, are left out, and a warning says so.
"""

import json
import warnings
from typing import Any

import pytest

from tests.repository.snapshot import (
    DAILY_GROUPS,
    SNAPSHOTS,
    SPECS,
    describe_identity,
    find_differences,
    format_snapshot,
    get_group,
    get_path,
    list_groups,
    make_group,
    open_shipped_job,
)

GROUPS = list_groups()
ADVICE = "python -m tests.repository.snapshot writes the golden files; when they may change: .github/CONTRIBUTING.md"
KEPT = {
    "made_with": {"versions": {"jax": "1"}, "cpu": "a"},
    "identity": {"config.rate": 0.5},
    "leaves": {"params.bias": ["float32", [8], ["fsdp"]]},
    "programs": {"train": "01", "validation": "02"},
    "rows": [{"step": 5, "train/loss": 5.5}],
    "events": [{"event": "compile", "program": "03"}, {"event": "init", "fingerprint": "04"}],
    "manifests": {"5": {"identity": {"config.rate": 0.5}, "leaves": {"step": {"shape": [], "digest": "05"}}}},
    "spec": ["name: x"],
}
VERSIONS: dict[str, Any] = {"versions": {"jax": "2"}, "cpu": "a"}
CPU: dict[str, Any] = {"versions": {"jax": "1"}, "cpu": "b"}


def read_golden(name: str) -> Any:
    assert get_path(name).exists(), f"{get_path(name)} is missing; {ADVICE}"
    return json.loads(get_path(name).read_text())


@pytest.mark.parametrize(
    "group", [group if group in DAILY_GROUPS else pytest.param(group, marks=pytest.mark.soak) for group in GROUPS]
)
def test_the_snapshots_of_a_group_equal_the_golden_files(group: str) -> None:
    lines: list[str] = []
    others: list[str] = []
    for name, found in make_group(group).items():
        kept = read_golden(name)
        lines += find_differences(name, found, kept)
        others += [name] if kept["made_with"] != found["made_with"] else []
    if others:
        warnings.warn(f"{others} were made with other versions or CPUs, so not all is compared", stacklevel=1)
    assert not lines, "\n".join([*lines, ADVICE])


@pytest.mark.parametrize("spec", [spec for spec in SPECS if get_group(spec) not in DAILY_GROUPS])
def test_the_identity_of_a_shipped_spec_equals_the_golden_file(spec: str) -> None:
    assert describe_identity(open_shipped_job(spec)) == read_golden(f"specs/{spec}")["identity"], ADVICE


def test_each_spec_and_each_run_has_one_golden_file() -> None:
    names = {get_path(name) for members in GROUPS.values() for name in members}
    assert {path for path in SNAPSHOTS.rglob("*") if path.is_file()} == names, ADVICE


def test_golden_files_are_small_and_formatted() -> None:
    for path in SNAPSHOTS.rglob("*.json"):
        text = path.read_text()
        assert len(text) < 100_000, path
        assert text == format_snapshot(json.loads(text)) + "\n", path


def change(**sections: Any) -> dict[str, Any]:
    """Return another snapshot than `KEPT`."""
    return KEPT | sections


BITS = {
    "a float": change(rows=[{"step": 5, "train/loss": 5.75}]),
    "a fingerprint": change(events=[KEPT["events"][0], {"event": "init", "fingerprint": "14"}]),
    "a digest": change(manifests={"5": KEPT["manifests"]["5"] | {"leaves": {"step": {"shape": [], "digest": "15"}}}}),
}
PROGRAMS = {
    "a program": change(programs={"train": "11", "validation": "02"}),
    "the program of an event": change(events=[{"event": "compile", "program": "13"}, KEPT["events"][1]]),
}
ALWAYS = {
    "identity": change(identity={"config.rate": 0.25}),
    "a leaf": change(leaves={"params.scale": KEPT["leaves"]["params.bias"]}),
    "a sharding": change(leaves={"params.bias": ["float32", [8], [None]]}),
    "a metric": change(rows=[{"step": 5, "train/loss_mean": 5.5}]),
    "a step": change(rows=[{"step": 6, "train/loss": 5.5}]),
    "an event": change(events=KEPT["events"][:1]),
    "a key of an event": change(events=[KEPT["events"][0] | {"why": ""}, KEPT["events"][1]]),
    "an identity of a manifest": change(manifests={"5": KEPT["manifests"]["5"] | {"identity": {"config.rate": 1.0}}}),
    "a line of the spec": change(spec=["name: y"]),
}


@pytest.mark.parametrize("maker", [KEPT["made_with"], CPU, VERSIONS], ids=["same", "cpu", "versions"])
@pytest.mark.parametrize("what", [*BITS, *PROGRAMS, *ALWAYS])
def test_a_difference_is_found_where_it_can_be_compared(what: str, maker: dict[str, Any]) -> None:
    found = (BITS | PROGRAMS | ALWAYS)[what] | {"made_with": maker}
    is_compared = what in ALWAYS or maker == KEPT["made_with"] or (what in PROGRAMS and maker == CPU)
    assert bool(find_differences("some", found, KEPT)) == is_compared
    assert find_differences("some", KEPT | {"made_with": maker}, KEPT) == []
