"""Exponential moving averages of the weights (`config.ema`).

They are float32 and start as a copy of the parameters. A step computes `average + (1 - decay) * (parameter - average)`,
in this form, so that the average of constant parameters stays bit-identical to them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from runner.config import EmaConfig, TrainerConfig
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.train.auxiliary import EMA, AuxiliaryState, Scalars, StepObservation
from runner.train.evaluators import EvaluationMetrics, Evaluator, Validation, cast_like
from runner.train.feature import Feature
from runner.train.state import PARAMS


class Averages(Feature):
    """Averages of the weights, with the metrics `val/ema_<decay>/...`.

    They keep the names that they have at the start of the run, also in a stage that sets other decays.
    """

    key = EMA

    @staticmethod
    def is_on(config: TrainerConfig[Any]) -> bool:
        """Return True if the config asks for averages."""
        return config.ema is not None

    def make_auxiliary(self) -> AuxiliaryState:
        """Return the averages, named by the decays at the start of the run."""
        decays, names = _get_section(self.config).decays, _get_section(self.run_config).decays
        if len(decays) != len(names):
            raise InvalidError(
                f"decays has {len(decays)} entries, and the run keeps {len(names)} averages; give one for each"
            )
        return make_ema(decays, names)

    def make_evaluators(self, validation: Validation) -> Sequence[Evaluator]:
        """Return an evaluator of each average, if the config asks for them."""
        ema = _get_section(self.run_config)
        return [EmaValidation(validation, decay) for decay in ema.decays] if ema.evaluate else []


def _get_section(config: TrainerConfig[Any]) -> EmaConfig:
    assert config.ema is not None, "the feature is on in every stage or in none"
    return config.ema


def make_ema(decays: Sequence[float], names: Sequence[float] | None = None) -> AuxiliaryState:
    """Return averages with these decays in (0, 1): `average + (1 - decay) * (parameter - average)` in each step.

    `names` are the decays in the names of the averages, by default `decays`.
    """
    by_name = dict(zip(map(str, names or decays), decays, strict=True))

    def copy(param: jax.Array) -> jax.Array:
        return jnp.array(param, jnp.float32, copy=True)  # parameters and averages are both donated to the step

    def init(params: Any) -> Any:
        return {name: jax.tree.map(copy, params) for name in by_name}

    def update(averages: Any, observation: StepObservation) -> tuple[Any, Scalars]:
        def move(average: jax.Array, param: jax.Array, share: float) -> jax.Array:
            return average + jnp.float32(share) * (param.astype(jnp.float32) - average)

        return {
            name: jax.tree.map(
                lambda average, param, share=1 - decay: move(average, param, share),
                averages[name],
                observation.params,
            )
            for name, decay in by_name.items()
        }, {}

    return AuxiliaryState(EMA, init, update)


class EmaValidation:
    """`Validation` of the averaged weights with one decay; the weights must hold the averages (`add_averages`)."""

    def __init__(self, validation: Validation, decay: float):
        self._validation, self._decay = validation, str(decay)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return the metrics of `Validation` by keys of this average, such as `val/ema_0.999/loss`."""
        # Averages are kept in float32; the compiled step takes the dtype of the parameters.
        averages = cast_like(weights[EMA][self._decay], weights[PARAMS])
        metrics = self._validation.evaluate({**weights, PARAMS: averages}, step, hosts)
        if metrics is None:
            return None
        return {f"val/{EMA}_{self._decay}/{key.removeprefix('val/')}": value for key, value in metrics.items()}
