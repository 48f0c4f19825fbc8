"""Scaling laws: the loss of a model by its parameters N and training tokens D, fitted to finished runs.

The law is L(N, D) = E + A / N^a + B / D^b, as in Chinchilla (Hoffmann et al., arXiv:2203.15556, approach 3). Where all
runs have about the same ratio of tokens to parameters, D follows from N and the two terms cannot be told apart: the law
is then L(N) = E + A / N^a, and holds for that ratio only.

Both are fitted as there, by a Huber loss of the residuals of log L, with E >= 0. Two things differ. The threshold of
the Huber loss is `OUTLIER`, not 0.001: far above the noise of a run, because an absolute loss needs hundreds of runs.
And the solver runs from the best point of a grid until it has converged, since a solver that ended early explains the
published constants (Besiroglu et al., arXiv:2404.10102).

The interval of a forecast is a profile likelihood: it holds each loss that one more run could have without the best fit
of all runs becoming worse than Student's t allows for the noise that the residuals show. It is exact for a linear model
with normal noise, and needs no random numbers. `COVERAGE` is the share of such runs that it contains if the law holds.
It says nothing about a law that ends to hold beyond the runs.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares
from scipy.special import stdtrit

from runner.errors import InvalidError
from runner.history.sweep import RATIO_SPREAD
from runner.storage import JsonObject

COVERAGE = 0.9
OUTLIER = 0.02  # residual of log L from which a run counts as an outlier
LEAST_NOISE = 1e-4  # standard deviation of log L that is assumed at least: few residuals may be small by chance
_CURVE_POINTS = 13
_EXPONENTS = (0.01, 2.0)
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class ScalingPoint:
    """Size of one run, and its loss."""

    parameters: int
    tokens: int
    loss: float = math.nan


@dataclass(frozen=True)
class LossForecast:
    """Loss that a law expects of one more run, with the interval that contains it with probability `COVERAGE`."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^a + B / D^b, or without the term in D."""

    floor: float  # E
    of_size: tuple[float, float]  # A and a
    of_tokens: tuple[float, float] | None = None  # B and b

    def format(self) -> str:
        """Return the law as a formula."""
        terms = [("N", self.of_size), *([] if self.of_tokens is None else [("D", self.of_tokens)])]
        return f"L = {self.floor:.4f}" + "".join(
            f" + {scale:.4g} / {name}^{power:.3f}" for name, (scale, power) in terms
        )


def has_one_ratio(points: Sequence[ScalingPoint]) -> bool:
    """Return True if the tokens of all runs are about the same multiple of their parameters."""
    ratios = [each.tokens / each.parameters for each in points]
    return max(ratios) < RATIO_SPREAD * min(ratios)


def validate_points(points: Sequence[ScalingPoint]) -> None:
    """Raise `InvalidError` if a law cannot be fitted to runs of these sizes, with the number that is needed."""
    num_sizes = len({each.parameters for each in points})
    if not points or has_one_ratio(points):
        if num_sizes < 4:
            raise InvalidError(f"{num_sizes} sizes: a law E + A / N^a needs runs of at least 4")
    elif num_sizes < 3 or len(points) < 6:
        raise InvalidError(
            f"{len(points)} runs of {num_sizes} sizes: a law E + A / N^a + B / D^b needs at least 6 runs of at least 3"
        )


class ScalingFit:
    """Fit of a law to runs, and its forecasts."""

    def __init__(self, points: Sequence[ScalingPoint]):
        """Fit the law. Raises `InvalidError` for too few runs, or a loss that is not a positive number."""
        validate_points(points)
        for each in points:
            if not 0 < each.loss < math.inf:
                raise InvalidError(f"a run of {each.parameters:,} parameters has the loss {each.loss}; leave it out")
        self._points = sorted(points, key=lambda each: (each.parameters, each.tokens, each.loss))
        self._has_tokens = not has_one_ratio(points)
        self._losses = np.log([each.loss for each in self._points])
        largest = self._points[-1]
        cost, anchored, (share, a, *rest) = self._fit(largest)
        freedom = len(points) - (5 if self._has_tokens else 3)
        self._limit = max(cost, freedom * LEAST_NOISE**2)
        self._limit *= 1 + float(stdtrit(freedom, (1 + COVERAGE) / 2)) ** 2 / freedom
        loss = math.exp(anchored)
        of_tokens, b = rest or (0.0, 0.0)
        self.law = ScalingLaw(
            loss * (1 - share),
            (loss * share * (1 - of_tokens) * largest.parameters**a, a),
            (loss * share * of_tokens * largest.tokens**b, b) if rest else None,
        )

    def is_expected(self, point: ScalingPoint) -> bool:
        """Return True if the interval of the forecast for a run contains its loss."""
        return self._fit(point, math.log(point.loss))[0] <= self._limit

    def forecast(self, parameters: int, tokens: int) -> LossForecast:
        """Return the forecast for one more run."""
        target = ScalingPoint(parameters, tokens)
        _, middle, _ = self._fit(target)

        def exceed(value: float) -> float:
            return self._fit(target, value)[0] - self._limit

        ends = []
        for sign in (-1, 1):
            step = 1e-3
            while exceed(middle + sign * step) < 0 and step < math.log(1e6):
                step *= 2
            is_bounded = exceed(middle + sign * step) > 0
            ends.append(brentq(exceed, middle, middle + sign * step, xtol=1e-7) if is_bounded else middle + sign * step)
        low, high = (math.exp(end) for end in ends)
        return LossForecast(math.exp(middle), low, high)

    def to_json(self, target: ScalingPoint) -> JsonObject:
        """Return the law as records hold it, with its line and band from the smallest run to `target`."""
        first = self._points[0].parameters
        ratio, growth = target.tokens / target.parameters, (target.parameters / first) ** (1 / (_CURVE_POINTS - 1))
        curve = []
        for parameters in (round(first * growth**index) for index in range(_CURVE_POINTS)):
            found = self.forecast(parameters, round(ratio * parameters))
            curve.append([parameters, found.loss, found.low, found.high])
        return {
            "formula": self.law.format(),
            "floor": self.law.floor,
            "of_size": [*self.law.of_size],
            "of_tokens": None if self.law.of_tokens is None else [*self.law.of_tokens],
            "coverage": COVERAGE,
            "points": [[each.parameters, each.tokens, each.loss] for each in self._points],
            "curve": curve,
        }

    def _fit(self, target: ScalingPoint, value: float | None = None) -> tuple[float, float, list[float]]:
        """Fit the law, expressed by its log L at `target`, with one more run there of log L `value`, if it is given.

        Return the sum of the Huber losses, log L at `target`, and: the share of the reducible loss there, a, and with
        a term in D the share of that term in it, and b.
        """
        sizes = np.log([[target.parameters / each.parameters, target.tokens / each.tokens] for each in self._points])
        losses = self._losses
        if value is not None:
            sizes, losses = np.vstack([sizes, np.zeros(2)]), np.concatenate([losses, [value]])

        def describe(cells: _Array) -> _Array:
            """Return log L of each run relative to `target` for rows of parameters."""
            share, a, *rest = cells.T[..., None]
            growth = np.exp(a * sizes[:, 0])
            if rest:
                growth = (1 - rest[0]) * growth + rest[0] * np.exp(rest[1] * sizes[:, 1])
            return np.asarray(np.log1p(share * (growth - 1)))

        # A grid, on which log L at `target` follows from the rest: the solver begins in the right valley.
        shares, powers = np.linspace(0.02, 0.98, 13), np.geomspace(0.03, 1.5, 13)
        axes = [shares[::2], powers[::2], shares[::2], powers[::2]] if self._has_tokens else [shares, powers]
        cells = np.array(list(itertools.product(*axes)))
        residuals = losses - describe(cells)
        best = int(np.argmin(residuals.var(axis=1)))
        start = np.array([residuals[best].mean(), *cells[best]])
        bounds = [(-np.inf, np.inf), (0.0, 1.0), _EXPONENTS, *([(0.0, 1.0), _EXPONENTS] if self._has_tokens else [])]
        found = least_squares(
            lambda x: losses - x[0] - describe(x[None, 1:])[0],
            start,
            bounds=tuple(zip(*bounds, strict=True)),
            loss="huber",
            f_scale=OUTLIER,
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
        )
        anchored, *rest = (float(each) for each in found.x)
        return 2 * float(found.cost), anchored, rest


def fit_ladder(runs: Sequence[tuple[int, int, float]], parameters: int, tokens: int) -> JsonObject:
    """Return a forecast (`FORECAST_KEYS`), without the ladder, by parameters, tokens and losses of finished runs."""
    fit, target = ScalingFit([ScalingPoint(*each) for each in runs]), ScalingPoint(parameters, tokens)
    found = fit.forecast(parameters, tokens)
    return {
        "loss": found.loss,
        "low": found.low,
        "high": found.high,
        "coverage": COVERAGE,
        "parameters": target.parameters,
        "tokens": target.tokens,
        "law": fit.to_json(target),
    }
