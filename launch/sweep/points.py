"""Settings of the runs of a sweep: grids, random draws, and values that are searched.

A setting is a mapping of dotted keys of the spec to values. Values are YAML, as those of `--set`.
"""

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import InvalidError, SpecError, suggest_choices
from runner.spec import SpecLocation
from runner.spec.document import describe_value, parse_yaml
from runner.spec.imports import import_extra

Setting = dict[str, Any]
MAX_RUNS = 1000
SEED = "seed"
_OWN_KEYS = ("directory", "name")
_KINDS = ("log", "uniform", "int", "choice")
_MAX_REDRAWS = 1000
_DIGITS = 4  # of a drawn number


@dataclass(frozen=True)
class ValueRange:
    """Range of the values of one key."""

    kind: str  # one of `_KINDS`
    values: tuple[Any, ...]  # lower and upper end, or the choices
    text: str  # as it was given

    def draw(self, generator: random.Random) -> Any:
        """Return a value."""
        if self.kind == "choice":
            return self.values[generator.randrange(len(self.values))]
        low, high = self.values
        if self.kind == "int":
            return generator.randint(low, high)
        if self.kind == "log":
            return self.round(math.exp(generator.uniform(math.log(low), math.log(high))))
        return self.round(generator.uniform(low, high))

    def round(self, value: float) -> float:
        """Return a number of a few digits inside the range."""
        return min(max(float(f"{value:.{_DIGITS}g}"), float(self.values[0])), float(self.values[1]))

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be valid so that all of them are."""
        return self.values

    def make_distribution(self, optuna: Any) -> Any:
        """Return Optuna's form of the range; a choice is its index, since it may be a list."""
        if self.kind == "choice":
            return optuna.distributions.CategoricalDistribution(range(len(self.values)))
        low, high = self.values
        if self.kind == "int":
            return optuna.distributions.IntDistribution(low, high)
        return optuna.distributions.FloatDistribution(float(low), float(high), log=self.kind == "log")


def parse_values(option: str, key: str, text: str) -> list[Any]:
    """Return the values of `V1,V2`, each YAML as in `--set`. Raises `SpecError`."""
    where = SpecLocation(f"{option} {key}={text}"[:120], key=key)
    if not text.strip() or text.rstrip().endswith(",") or "\n" in text:
        raise SpecError(where.format_problem((), "an empty value; needs values with commas between them, KEY=V1,V2"))
    values, _ = parse_yaml(f"[{text}]", lambda line: where)
    return list(values)


def parse_range(option: str, key: str, text: str) -> ValueRange:
    """Return the range of `log(LOW, HIGH)`, `uniform(LOW, HIGH)`, `int(LOW, HIGH)` or `choice(V1, V2)`.

    Raises:
        InvalidError: it is none of them, or its ends are no range.
    """
    match = re.fullmatch(r"\s*(\w+)\((.*)\)\s*", text)
    where = f"{option} {key}={text}"[:120]
    if match is None or match[1] not in _KINDS:
        hint = suggest_choices(match[1] if match else "", _KINDS)
        raise InvalidError(f"{where}: needs log(LOW, HIGH), uniform(LOW, HIGH), int(LOW, HIGH) or choice(V1, V2){hint}")
    kind, values = match[1], tuple(parse_values(option, key, match[2]))
    if kind == "choice":
        _validate_distinct(where, values)
        return ValueRange(kind, values, text.strip())
    numbers = [value for value in values if type(value) in ((int,) if kind == "int" else (int, float))]
    if len(numbers) != 2 or len(values) != 2:
        raise InvalidError(f"{where}: needs two {'whole ' * (kind == 'int')}numbers, the lowest and the highest value")
    if not numbers[0] < numbers[1]:
        raise InvalidError(f"{where}: {numbers[0]} is not below {numbers[1]}; put the lower one first")
    if kind == "log" and numbers[0] <= 0:
        raise InvalidError(f"{where}: a logarithmic range needs a lower end above 0, got {numbers[0]}")
    return ValueRange(kind, values, text.strip())


def split_option(option: str, text: str) -> tuple[str, str]:
    """Return key and value of `KEY=VALUE`. Raises `InvalidError`."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise InvalidError(f"{option} {text!r:.100}: needs the form KEY=VALUES, with a dotted key of the spec")
    return key.strip(), value


def _validate_distinct(where: str, values: Sequence[Any]) -> None:
    texts = [json.dumps(value, sort_keys=True) for value in values]
    if twice := [text for text in dict.fromkeys(texts) if texts.count(text) > 1]:
        raise InvalidError(f"{where}: {twice[0]} is given twice; needs different values")
    if not values:
        raise InvalidError(f"{where}: no values; needs one or more")


@dataclass(frozen=True)
class SweepPlan:
    """Settings of a sweep, as its command gives them."""

    grid: Mapping[str, Sequence[Any]]
    drawn: Mapping[str, ValueRange]
    searched: Mapping[str, ValueRange]
    listed: Sequence[Setting]
    number: int | None  # of draws or trials
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return what is recorded of it; empty parts are left out."""
        parts: dict[str, Any] = {
            "grid": {key: [*values] for key, values in self.grid.items()},
            "random": {key: each.text for key, each in self.drawn.items()},
            "search": {key: each.text for key, each in self.searched.items()},
            "runs": [*self.listed],
        }
        has_draws = self.number is not None
        return {key: part for key, part in parts.items() if part} | (
            {"number": self.number, "sweep_seed": self.seed} if has_draws else {}
        )

    def validate(self, overridden: Sequence[str]) -> None:
        """Raise `InvalidError` with all problems. `overridden` are the keys that `--set` gives."""
        problems = []
        ways = {"random": self.drawn, "search": self.searched, "runs": self.listed}
        used = [name for name, part in ways.items() if part]
        if len(used) > 1:
            problems.append(f"{' and '.join(used)}: give one of them; a grid repeats each run of random or runs")
        if self.searched and self.grid:
            problems.append(
                "search and grid: a search chooses each run by the results of others; leave out one of them"
            )
        if not used and not self.grid:
            problems.append("no settings; give --grid KEY=V1,V2, --random, --search or --file")
        if (self.number is None) == bool(self.drawn or self.searched):
            problems.append("--number N is the number of runs of random or search; give both or neither")
        keys = [*self.grid, *self.drawn, *self.searched, *dict.fromkeys(key for each in self.listed for key in each)]
        for key in dict.fromkeys(keys):
            if key in _OWN_KEYS:
                problems.append(f"{key}: the sweep sets it itself, ROOT/000 and NAME-000; leave it out")
            clash = next(
                (other for other in [*keys, *overridden] if other != key and f"{key}.".startswith(f"{other}.")), ""
            )
            if keys.count(key) > 1 or key in overridden or clash:
                twice = f"{clash} and {key} overlap" if clash else f"{key} is given twice"
                problems.append(f"{twice}; give each key once, by --set or as a part of the sweep")
            if key == SEED and (self.drawn or self.searched) and key not in self.grid:
                problems.append(f"{key}: a seed is not optimised; --grid seed=0,1,2 repeats each setting instead")
        for key, values in self.grid.items():
            try:
                _validate_distinct(f"grid {key}", values)
            except InvalidError as error:
                problems.append(str(error))
        size = math.prod(map(len, self.grid.values())) * (self.number or 1) * (len(self.listed) or 1)
        if size > MAX_RUNS:
            problems.append(f"{size:,} runs; a sweep has at most {MAX_RUNS:,}")
        if problems:
            raise InvalidError("\n".join(problems))

    def make_settings(self) -> list[Setting]:
        """Return the settings of all runs that are known before any has run. Raises `InvalidError` if two are equal."""
        if self.searched:
            return []
        outer = self._draw() if self.drawn else [*self.listed] or [{}]
        grid = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        settings = [dict(first) | second for first in outer for second in grid]
        texts: dict[str, int] = {}
        for number, setting in enumerate(settings):
            text = json.dumps(setting, sort_keys=True)
            if text in texts:
                raise InvalidError(
                    f"runs {format_name(texts[text])} and {format_name(number)} have the same setting, "
                    f"{format_setting_line(setting)}; leave out one"
                )
            texts[text] = number
        return settings

    def _draw(self) -> list[Setting]:
        assert self.number is not None, "validated"
        generator, found = random.Random(f"sweep {self.seed}"), dict[str, Setting]()
        for _ in range(self.number + _MAX_REDRAWS):
            setting = {key: each.draw(generator) for key, each in self.drawn.items()}
            found.setdefault(json.dumps(setting, sort_keys=True), setting)
            if len(found) == self.number:
                return [*found.values()]
        raise InvalidError(f"--number {self.number}: the ranges have only {len(found)} different settings")

    def ask(self, number: int, trials: Sequence[tuple[Setting, float | None]], is_maximised: bool) -> Setting:
        """Return the setting of trial `number` of a search by TPE, given the results of earlier trials.

        It depends on nothing else, since the sampler is new. The result of a run that diverged is None, and ranks last.
        """
        optuna = import_extra("optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        distributions = {key: each.make_distribution(optuna) for key, each in self.searched.items()}
        seed = int.from_bytes(hashlib.sha256(f"sweep {self.seed} {number}".encode()).digest()[:4], "big")
        startup = max(2, min(10, (self.number or 0) // 3))
        study = optuna.create_study(
            direction="maximize" if is_maximised else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup),
        )
        for setting, value in trials:
            params = {
                key: each.values.index(setting[key]) if each.kind == "choice" else setting[key]
                for key, each in self.searched.items()
            }
            state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, value=value, params=params, distributions=distributions)
            )
        asked = study.ask(distributions).params
        return {
            key: each.values[asked[key]]
            if each.kind == "choice"
            else asked[key]
            if each.kind == "int"
            else each.round(asked[key])
            for key, each in self.searched.items()
        }

    def list_ends(self) -> list[Setting]:
        """Return settings with each end of the searched ranges, to check them before the search."""
        first = {key: each.ends[0] for key, each in self.searched.items()}
        return [first, *(first | {key: end} for key, each in self.searched.items() for end in each.ends[1:])]


def parse_plan(
    grid: Sequence[str],
    drawn: Sequence[str],
    searched: Sequence[str],
    number: int | None,
    seed: int,
    file: Mapping[str, Any],
) -> SweepPlan:
    """Return the settings of the options, or of a file of `--file`. Raises `InvalidError` with all problems."""
    problems: list[str] = []
    grids: dict[str, Sequence[Any]] = {}
    ranges: dict[str, dict[str, ValueRange]] = {"random": {}, "search": {}}

    def add(target: dict[str, Any], key: str, value: Any) -> None:
        if key in target:
            problems.append(f"{key} is given twice; give each key once")
        target[key] = value

    def attempt(act: Any) -> None:
        try:
            act()
        except InvalidError as error:
            problems.append(str(error))

    def add_grid(text: str) -> None:
        key, values = split_option("--grid", text)
        add(grids, key, parse_values("--grid", key, values))

    def add_range(name: str, text: str) -> None:
        key, value = split_option(f"--{name}", text)
        add(ranges[name], key, parse_range(f"--{name}", key, value))

    for text in grid:
        attempt(lambda text=text: add_grid(text))
    for name, texts in (("random", drawn), ("search", searched)):
        for text in texts:
            attempt(lambda name=name, text=text: add_range(name, text))
    for key, values in _read_section(file, "grid", dict, problems).items():
        if isinstance(values, list):
            add(grids, key, values)
        else:
            problems.append(f"grid: {key} is {describe_value(values)}, needs a list of values")
    for name in ("random", "search"):
        for key, value in _read_section(file, name, dict, problems).items():
            if key == "number":
                number = value if type(value) is int and value > 0 and number is None else number
                if number != value:
                    problems.append(f"{name}: number is {describe_value(value)}, needs a whole number above 0, once")
            else:
                attempt(
                    lambda name=name, key=key, value=value: add(ranges[name], key, parse_range(name, key, str(value)))
                )
    listed = _read_section(file, "runs", list, problems)
    for place, each in enumerate(listed):
        if not (isinstance(each, dict) and each):
            problems.append(f"runs: {place} is {describe_value(each)}, needs a mapping of keys of the spec to values")
    if problems:
        raise InvalidError("\n".join(problems))
    return SweepPlan(grids, ranges["random"], ranges["search"], listed, number, seed)


def _read_section(file: Mapping[str, Any], name: str, kind: type, problems: list[str]) -> Any:
    value = file.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind) or not value:
        form = "a mapping of keys of the spec" if kind is dict else "a list of mappings"
        problems.append(f"{name}: is {describe_value(value)}, needs {form}")
        return kind()
    return value


def format_name(number: int) -> str:
    """Return the name of a run's directory below the root."""
    return f"{number:03d}"


def format_setting_line(setting: Mapping[str, Any]) -> str:
    """Return a setting as `key=value, key=value`."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in setting.items())
