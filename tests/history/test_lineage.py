"""`lineage` prints the runs that a run was forked from, and the trees of all runs below a directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.cli.app import run_command
from runner.errors import EXIT_DONE, InvalidError
from runner.history.lineage import ParentState, RunLineage, build_tree, parse_ancestors
from runner.history.reader import format_changes
from runner.history.records import ForkRecord
from tests.support.tiny_jobs import make_counter


def make_fork(directory: Path, parent: Path, step: int, seed: int = 0, total: int = 40) -> Path:
    fork = {"run": str(parent), "step": step, "changes": ["seed"]}
    options = {"checkpoint": {"every_steps": 10, "keep_last": 9}, "config.total_steps": total}
    make_counter(directory, seed=seed, **options, **{"checkpoint.fork_from": fork})()
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a fork of it, and a fork of that."""
    root = tmp_path_factory.mktemp("lineage")
    make_counter(root / "first", **{"checkpoint.keep_last": 9})()
    make_fork(root / "second", root / "first", 30, seed=1)
    make_fork(root / "third", root / "second", 40, seed=1, total=50)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of the runs in another place, so that their parents are where they say, and not below the root."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def read_tree(where: Path, capsys: Any) -> Any:
    capsys.readouterr()
    assert run_command(["lineage", str(where), "--json"]) == EXIT_DONE
    return json.loads(capsys.readouterr().out)


def test_the_lineage_of_a_run_lists_its_ancestors_with_their_changes(made: Path, capsys: Any) -> None:
    tree = read_tree(made / "third", capsys)
    assert tree["root"] == str(made / "third")
    assert tree["notes"] == []
    assert [(run["run"], run["depth"], run["state"]) for run in tree["runs"]] == [
        (str(made / name), depth, "there") for depth, name in enumerate(("first", "second", "third"))
    ]
    forks = [run["fork"] for run in tree["runs"]]
    assert [fork and (fork["run"], fork["step"], fork["changes"]) for fork in forks] == [
        None,
        (str(made / "first"), 30, {"seed": [0, 1]}),
        (str(made / "second"), 40, {}),
    ]
    assert [fork["id"] for fork in forks[1:]] == [run["id"] for run in tree["runs"][:-1]]
    assert (tree["runs"][-1]["name"], tree["runs"][-1]["step"]) == ("count", 50)
    assert run_command(["lineage", str(made / "third")]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "(" in line] == [
        str(made / name) for name in ("first", "second", "third")
    ]
    assert "      seed: 0 -> 1" in lines
    assert any(line.startswith("          from step 40, fingerprint ") for line in lines)


def test_the_runs_below_a_root_form_a_tree_also_after_a_move(root: Path, capsys: Any) -> None:
    make_counter(root / "alone", **{"config.total_steps": 10})()
    tree = read_tree(root, capsys)
    assert [(run["run"], run["depth"], run["state"]) for run in tree["runs"]] == [
        (str(root / "alone"), 0, "there"),
        *((str(root / name), depth, "there") for depth, name in enumerate(("first", "second", "third"))),
    ]
    (root / "second/job.json").write_bytes(b"{")
    tree = read_tree(root, capsys)
    assert len(tree["notes"]) == 1
    # The damaged run is still an ancestor, at the place where it was.
    assert [(run["depth"], run["name"]) for run in tree["runs"]] == [
        (0, "count"),
        (0, "count"),
        (1, None),
        (2, "count"),
    ]


def prune(parent: Path) -> None:
    shutil.rmtree(parent / "checkpoints/40")


def replace(parent: Path) -> None:
    shutil.rmtree(parent)
    make_counter(parent, seed=3)()


def hide(parent: Path) -> None:
    shutil.rmtree(parent)
    parent.write_bytes(b"")


def forget_owner(parent: Path) -> None:
    (parent / "job.json").unlink()


CHANGES = {
    "gone": (shutil.rmtree, ParentState.GONE),
    "pruned": (prune, ParentState.PRUNED),
    "replaced": (replace, ParentState.REPLACED),
    "a_file": (hide, ParentState.UNREADABLE),
    "a_copy_of_its_checkpoint": (forget_owner, ParentState.THERE),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_state_of_a_parent_is_told(made: Path, tmp_path: Path, capsys: Any, case: str) -> None:
    change, state = CHANGES[case]
    parent = Path(shutil.copytree(made / "second", tmp_path / "parent"))
    make_fork(tmp_path / "fork", parent, 40, seed=1, total=41)
    change(parent)
    runs = read_tree(tmp_path / "fork", capsys)["runs"]
    assert [run["state"] for run in runs] == ["there", state.value, "there"]


def test_a_fork_without_a_commit_has_the_lineage_of_the_ledger(root: Path, capsys: Any) -> None:
    shutil.rmtree(root / "third/checkpoints")
    runs = read_tree(root / "third", capsys)["runs"]
    # The ledger names the parent alone.
    assert [(run["run"], run["step"]) for run in runs] == [(runs[0]["run"], None), (str(root / "third"), None)]
    assert runs[-1]["fork"]["step"] == 40


def test_a_directory_without_runs_is_rejected(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidError, match="no run is here"):
            run_command(["lineage", str(where)])


def test_runs_that_name_each_other_as_parents_are_listed_once() -> None:
    def make(name: str, parent: str) -> RunLineage:
        return RunLineage(name, name, name, 1, (ForkRecord(parent, parent, 1, "0"),))

    assert sorted(node.run for node in build_tree([make("a", "b"), make("b", "a"), make("c", "c")])) == ["a", "b", "c"]
    # A chain of any length is no recursion.
    chain = [make(f"{number:05}", f"{number - 1:05}") for number in range(3000)]
    assert [node.depth for node in build_tree(chain)][-1] == 3000


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"seed": [0, 1], "config.train.total_steps": [None, 60]}, ["seed: 0 -> 1"]),
        ({"config.train.total_steps": [60, None]}, []),
        ({"config.train.total_steps": [60, 80]}, ["config.train.total_steps: 60 -> 80"]),
        (
            {"config.train.total_steps": [60, None], "config.train.total_tokens": [None, 99]},
            ["config.train.total_steps: 60 -> null", "config.train.total_tokens: null -> 99"],
        ),
        ({"config.data": ["x" * 300 + "1", "x" * 300 + "2"]}, [f"config.data: ...{'x' * 30}1 -> ...{'x' * 30}2"]),
    ],
)
def test_a_change_shows_what_differs(changes: dict[str, Any], lines: list[str]) -> None:
    assert format_changes(ForkRecord("run", "id", 1, "0", changes)) == lines


@pytest.mark.parametrize("damage", [{}, {"step": "x"}, {"step": -1}, {"ancestors": 3}, {"ancestors": [3, {}]}])
def test_damaged_lineage_is_ignored(damage: dict[str, Any]) -> None:
    ancestors = parse_ancestors({"step": 3, "run": 5, "changes": [1]} | damage if damage else {})
    assert len(ancestors) == int("ancestors" in damage)
