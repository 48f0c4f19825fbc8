"""Features of a training run, each in one file; see `runner.train.feature`.

- `averages`: exponential moving averages of the weights
- `noise_scale`: gradient-noise scale
- `replay`: steps whose gradients are computed twice, to find defective devices
- `stability`: skipped updates and roll-backs
"""

from collections.abc import Sequence
from typing import Any

from runner.config import TrainerConfig
from runner.train.feature import Feature
from runner.train.features.averages import Averages
from runner.train.features.noise_scale import NoiseScale
from runner.train.features.replay import Replay
from runner.train.features.stability import Stability

# In the order in which they are called. The order of the branches of the train state does not depend on it.
FEATURES: tuple[type[Feature], ...] = (Averages, NoiseScale, Stability, Replay)


def make_features(
    config: TrainerConfig[Any],
    run_config: TrainerConfig[Any] | None = None,
    classes: Sequence[type[Feature]] = FEATURES,
) -> list[Feature]:
    """Return the features of a job that the config of its run, or of one of its stages, switches on, in order.

    `run_config` is by default `config`.
    """
    return [feature(config, run_config or config) for feature in classes if feature.is_on(config)]
