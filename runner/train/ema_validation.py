"""The loss of averaged weights on the validation sets, beside that of the weights themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from runner.hosts.agreement import Hosts
from runner.train.adapter import shown_weights
from runner.train.ema import EMA
from runner.train.validation import Figures, Validation
from runner.train.variables import PARAMS, RIDERS, merge_of


class EmaValidation:
    """`Validation` of the average with one decay. The weights that it is shown hold all averages: `with_averages`."""

    def __init__(self, validation: Validation, decay: float):
        self._validation, self._decay = validation, str(decay)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """What `Validation` says, by keys of this average: `val/ema_0.999/loss`."""
        averages = as_params(weights[EMA][self._decay], weights[PARAMS])
        figures = self._validation.evaluate({**weights, PARAMS: averages}, step, hosts)
        if figures is None:
            return None
        return {f"val/{EMA}_{self._decay}/{key.removeprefix('val/')}": value for key, value in figures.items()}


def ema_evaluators(config: Any, validation: Validation) -> Sequence[EmaValidation]:
    """One for each average, if the config wants them evaluated."""
    rule = config.ema
    return [] if rule is None or not rule.evaluate else [EmaValidation(validation, decay) for decay in rule.decays]


def with_averages(weights: Callable[[Any], Any], state: Any) -> Any:
    """`weights(state)`, and by `ema` the averages that ride along in it, by decay, if there are any.

    Those of an adapter are merged, when they are first asked for.
    """
    if merge_of(state) is not None:
        return shown_weights(state)
    riders = getattr(state, RIDERS, {})
    return weights(state) | ({EMA: riders[EMA]} if EMA in riders else {})


def as_params(averages: Any, params: Any) -> Any:
    """Averages in the types of the parameters, of which shape and dtype are enough, so that they take their place."""
    return jax.tree.map(lambda average, param: average.astype(param.dtype), averages, params)
