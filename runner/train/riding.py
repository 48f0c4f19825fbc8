"""What the config of a trainer asks of its step besides gradients: riders, and how it rounds."""

from typing import Any

from runner.train.ema import make_ema
from runner.train.noise_scale import make_noise_scale
from runner.train.norm import Norms, norms_of_job
from runner.train.rider import Rider
from runner.train.rounding import NEAREST
from runner.train.variables import UpdateVariables


def riders_of(job_class: Any) -> tuple[Rider, ...]:
    """What rides along in the state of a trainer, whose class it is given: by default what `config` asks for.

    An experiment that has riders of its own adds them to these: `return *super().riders(), Rider(...)`.
    """
    config = getattr(job_class, "config", None)  # a class alone, of which no job is made, has none
    if config is None:
        return ()
    found = [] if config.ema is None else [make_ema(config.ema.decays)]
    found += [] if config.noise_scale is None else [make_noise_scale(config.noise_scale.decay)]
    return tuple(found)


def options_of(job_class: Any) -> tuple[UpdateVariables, tuple[Rider, ...], str, Norms, int | None]:
    """What a trainer, whose class it is given, hands to `train_step`.

    How variables change, riders, rounding, norms, and the number of groups whose sums have a fixed order.
    """
    config = getattr(job_class, "config", None)
    rounding = NEAREST if config is None else str(config.precision.rounding)
    norms, groups = norms_of_job(job_class), groups_of(job_class)
    return job_class.update_variables, job_class.riders(), rounding, norms, groups


def groups_of(job_class: Any) -> int | None:
    """`train.same_bits_devices` of a trainer, whose class it is given."""
    config = getattr(job_class, "config", None)
    return None if config is None else config.train.same_bits_devices
