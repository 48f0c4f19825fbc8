"""Settings of a sweep as tables: values, ranges, products, draws, trials of a search, and rules of early stops."""

import json
import math

import pytest

from launch.sweep.command import format_summary
from launch.sweep.halving import HalvingRule, RungReader, decide
from launch.sweep.points import parse_plan, parse_range, parse_values
from runner.errors import InvalidError
from runner.history.sweep import Sweep, SweepRun
from runner.storage import LocalStore


def make_plan(grid=(), random=(), search=(), number=None, seed=0, file=None):
    plan = parse_plan(grid, random, search, number, seed, file or {})
    plan.validate([])
    return plan


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-3", [0.001, 0.003]),
        ("1,2.5, text ,true,null", [1, 2.5, "text", True, None]),
        ("[1, 2],[3]", [[1, 2], [3]]),
        (
            "{name: constant, warmup_steps: 10},{name: cosine}",
            [{"name": "constant", "warmup_steps": 10}, {"name": "cosine"}],
        ),
        ('"a,b",c', ["a,b", "c"]),
        ("no,012", ["no", "012"]),
    ],
)
def test_values_are_those_of_set(text, values):
    assert parse_values("--grid", "k", text) == values


@pytest.mark.parametrize("text", ["", " ", "1,", "1,,2", "[1", "1\n2"])
def test_empty_and_torn_values_are_refused(text):
    with pytest.raises(InvalidError):
        parse_values("--grid", "k", text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("logg(1,2)", "did you mean log"),
        ("log(0,1)", "above 0"),
        ("log(2,1)", "not below"),
        ("uniform(1)", "two numbers"),
        ("int(1,2.5)", "two whole numbers"),
        ("choice()", "empty"),
        ("choice(1,1)", "twice"),
        ("1e-3", "needs log"),
    ],
)
def test_a_bad_range_is_refused(text, word):
    with pytest.raises(InvalidError, match=word):
        parse_range("--random", "k", text)


def test_a_grid_has_all_combinations_in_order():
    settings = make_plan(["a=1,2", "seed=0,1"]).make_settings()
    assert [tuple(each.values()) for each in settings] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_grid_repeats_each_draw_and_each_listed_run():
    drawn = make_plan(["seed=0,1"], ["a=log(1e-4,1e-2)"], number=3).make_settings()
    assert len(drawn) == 6
    assert [drawn[0]["a"], drawn[2]["a"]] == [drawn[1]["a"], drawn[3]["a"]]
    listed = make_plan(["seed=0,1"], file={"runs": [{"a": 1}, {"b": 2}]}).make_settings()
    assert listed == [{"a": 1, "seed": 0}, {"a": 1, "seed": 1}, {"b": 2, "seed": 0}, {"b": 2, "seed": 1}]


def test_draws_depend_on_the_seed_and_stay_in_range():
    words = ["a=log(1e-4,1e-2)", "b=int(1,9)", "c=choice([1],x)", "d=uniform(-1,1)"]
    first, again, other = (make_plan(random=words, number=50, seed=seed).make_settings() for seed in (0, 0, 1))
    assert first == again != other
    for each in first:
        assert 1e-4 <= each["a"] <= 1e-2
        assert 1 <= each["b"] <= 9
        assert each["c"] in ([1], "x")
        assert -1 <= each["d"] <= 1


def test_more_draws_than_settings_are_refused():
    with pytest.raises(InvalidError, match="only 2 different"):
        make_plan(random=["a=choice(1,2)"], number=3).make_settings()


def test_a_trial_depends_on_its_number_and_the_results_before():
    plan = make_plan(search=["a=log(1e-4,1e-2)", "b=choice([1],x)"], number=20)
    trials: list[tuple[dict, float | None]] = []
    for number in range(12):
        setting = plan.ask(number, trials, False)
        assert plan.ask(number, trials, False) == setting
        trials.append((setting, None if number == 4 else abs(math.log(setting["a"] / 1e-3))))
    assert plan.ask(12, trials, False) != plan.ask(13, trials, False)
    worse = [(setting, None if value is None else -value) for setting, value in trials]
    assert plan.ask(12, trials, False) != plan.ask(12, worse, False)


@pytest.mark.parametrize(
    ("grid", "random", "search", "number", "file", "words"),
    [
        ((), (), (), None, {}, ["no settings"]),
        (["directory=a,b", "name=c"], (), (), None, {}, ["directory: the sweep", "name: the sweep"]),
        (["a=1,2", "a=3"], (), (), None, {}, ["a is given twice"]),
        (["a=1", "a.b=2"], (), (), None, {}, ["a and a.b overlap"]),
        (["a=1,1"], (), (), None, {}, ["1 is given twice"]),
        (["a=1"], (), ["b=int(1,2)"], 3, {}, ["search and grid"]),
        ((), ["a=int(1,2)"], ["b=int(1,2)"], 3, {}, ["random and search"]),
        ((), ["seed=int(1,9)"], (), 3, {}, ["a seed is not optimised"]),
        ((), (), ["seed=int(1,9)"], 3, {}, ["a seed is not optimised"]),
        ((), ["a=int(1,9)"], (), None, {}, ["--number N"]),
        (["a=1"], (), (), 3, {}, ["--number N"]),
        (
            [f"a={','.join(map(str, range(40)))}", f"b={','.join(map(str, range(40)))}"],
            (),
            (),
            None,
            {},
            ["1,600 runs"],
        ),
        (["a"], (), (), None, {}, ["KEY=VALUES"]),
        (["a=,", "=1"], ["b=nope(1)"], (), 1, {}, ["empty", "KEY=VALUES", "needs log"]),
        ((), (), (), None, {"grid": {"a": 1}}, ["list of values"]),
        ((), (), (), None, {"runs": [1]}, ["runs: 0 is 1"]),
        ((), (), (), None, {"random": {"number": 0, "a": "int(1,2)"}}, ["whole number above 0"]),
        ((), (), (), None, {"runs": [{"a": 1}, {"a": 1}]}, ["000 and 001 have the same setting"]),
    ],
)
def test_all_mistakes_are_reported_at_once(grid, random, search, number, file, words):
    with pytest.raises(InvalidError) as caught:
        make_plan(grid, random, search, number, file=file).make_settings()
    for word in words:
        assert word in str(caught.value)


SINGLE = [["a"], ["b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("settings", "values", "diverged", "is_maximised", "stopped", "undecided"),
    [
        (SINGLE, {}, (), False, {}, 10),
        (SINGLE[:3], {"a": {10: 3.0}, "b": {10: 1.0}}, (), False, {}, 10),
        (SINGLE[:3], {"a": {10: 3.0}, "b": {10: 1.0}, "c": {10: 2.0}}, (), False, {"a": 10}, 20),
        (SINGLE[:3], {"a": {10: 3.0}, "b": {10: 1.0}, "c": {10: 2.0}}, (), True, {"b": 10}, 20),
        (SINGLE[:2], {"a": {10: 1.0}, "b": {10: 1.0}}, (), False, {"b": 10}, 20),
        (SINGLE[:3], {"a": {10: 3.0}, "b": {10: 1.0}}, ("c",), False, {}, 20),
        (SINGLE[:2], {"a": {10: math.nan}, "b": {10: 9.0}}, (), False, {"a": 10}, 20),
        # A run that diverges after a rung has its value there.
        (SINGLE[:2], {"a": {10: 1.0}, "b": {10: 2.0}}, ("a",), False, {"b": 10}, None),
        (SINGLE[:2], {"a": {10: 1.0, 20: 5.0}, "b": {10: 2.0, 20: 1.0}}, (), False, {"b": 10}, None),
        (
            SINGLE,
            {"a": {10: 5.0}, "b": {10: 4.0}, "c": {10: 3.0, 20: 9.0}, "d": {10: 2.0, 20: 1.0}, "e": {10: 1.0, 20: 1.5}},
            (),
            False,
            {"a": 10, "b": 10, "c": 20},
            None,
        ),
        # The mean over seeds counts, and all runs of a setting stop together.
        (
            [["a", "b"], ["c", "d"]],
            {"a": {10: 1.0}, "b": {10: 5.0}, "c": {10: 2.0}, "d": {10: 2.5}},
            (),
            False,
            {"a": 10, "b": 10},
            20,
        ),
    ],
)
def test_the_best_part_goes_on_at_each_rung(settings, values, diverged, is_maximised, stopped, undecided):
    state = decide(HalvingRule(2, (10, 20)), settings, values, diverged, is_maximised)
    assert (dict(state.stopped), state.undecided) == (stopped, undecided)


@pytest.mark.parametrize("text", ["", "3", "1@10", "3@", "3@20,10", "3@0", "x@1", "3@10;20"])
def test_a_bad_rule_is_refused(text):
    with pytest.raises(InvalidError, match="3@100,300"):
        HalvingRule.parse(text)


def test_a_rung_is_read_from_its_own_row(tmp_path):
    reader, path = RungReader(LocalStore(tmp_path), "val/loss", (20, 40)), tmp_path / "metrics.jsonl"

    def read(**values):
        """Replace the file, as a restart does, by rows of steps with these values."""
        rows = [
            {"step": int(name[1:]), "train/loss": 9.0} | ({"val/loss": value} if value else {})
            for name, value in values.items()
        ]
        (tmp_path / "new").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "new").rename(path)
        reader.read()
        return reader.values

    assert read(s10=5.0, s20=None) == {}  # the evaluation at the rung is not there yet
    assert read(s10=5.0, s20=4.0) == {20: 4.0}
    assert read(s10=5.0, s20=4.0, s30=3.5, s50=3.0) == {20: 4.0, 40: 3.5}


def test_the_best_setting_over_seeds_is_that_of_the_lowest_mean():
    values = [(1, 0, 2.0), (1, 1, 2.0), (2, 0, 1.5), (2, 1, 3.0)]
    runs = [SweepRun(f"00{n}", {"a": a, "seed": seed}) for n, (a, seed, _) in enumerate(values)]
    sweep = Sweep("x", "x.yaml", "d", "loss", False, {}, tuple(runs))
    lines = format_summary(sweep, [(run, "done", value) for run, (_, _, value) in zip(runs, values, strict=True)])
    assert lines[3].endswith("done, best")
    assert lines[-1] == "sweep: best setting over 2 seeds: a=1, mean loss 2"
