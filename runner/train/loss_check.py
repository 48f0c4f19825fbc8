"""Check at the start of a run that a job's own `forward` returns a sum over targets, and not a mean.

The step divides the loss of each micro-batch by the number of targets of the whole batch. A `forward` that has already
divided, as in most other trainers, gives a loss and gradients that are too small by the targets of a micro-batch, and
nothing fails. So the same examples are evaluated in one micro-batch and in two: a sum is the same in both, and a mean
is twice as large in two.
"""

import inspect
import math
import re
from typing import Any

import numpy as np

from runner.data import TRAIN, Dataset
from runner.errors import InvalidError
from runner.parallel.mesh import count_batch_shards
from runner.train.layout import BatchLayout
from runner.train.setup import StepRecipe, TrainSetup
from runner.train.state import TrainState, get_variables

_TOLERANCE = 1e-3  # relative; sums over other micro-batches are rounded differently
_MEAN = re.compile(r"\b(mean|average)\(|\breduction=")


def validate_loss_is_sum(recipe: StepRecipe, setup: TrainSetup, state: TrainState, dataset: Dataset) -> None:
    """Raise `InvalidError` if `forward` of a recipe returns a mean. Called on every host, with the state of step 0.

    Returns at once if the class that defines `forward` states that it `returns_loss_sum`. Otherwise it compiles two
    small programs. The check is inconclusive, and passes, if the loss is 0 or not finite, or cannot be computed for one
    and two examples on each device.
    """
    owner = _find_owner(type(recipe), "forward")
    # A `val_step` of the job's own may do without `forward`.
    is_own_val_step = "returns_loss_sum" not in vars(_find_owner(type(recipe), "val_step"))
    if vars(owner).get("returns_loss_sum", False) or is_own_val_step:
        return
    shards = count_batch_shards(setup.mesh)
    abstract = setup.abstract_val_state
    weights = abstract.replace(params=state.params, variables=get_variables(state), step=np.int32(0))
    sums = []
    for num_examples in (2, 1):
        layout = BatchLayout(setup.mesh, 2 * shards, num_examples, dataset.fields)
        try:
            compiled = setup.compile_val(recipe.val_step, abstract, layout)
            loss_sum, *_ = compiled(weights, layout.batch(dataset, TRAIN, 0))
        except Exception:  # noqa: BLE001 - any error of the user's code, which may need other sizes
            return
        sums.append(float(loss_sum))
    whole, split = sums
    if whole and math.isfinite(split) and abs(split - 2 * whole) <= _TOLERANCE * abs(split):
        raise InvalidError(
            f"{_locate_mean(owner)}: forward of {owner.__name__} returns a mean: for {2 * shards} examples in one "
            f"micro-batch {whole:.6g}, in two micro-batches {split:.6g}. Return the sum over the real targets instead, "
            "such as jnp.sum(...) in place of jnp.mean(...): the step divides by the targets of the whole batch. If it "
            "is a sum nevertheless, set returns_loss_sum = True in the class"
        )


def _find_owner(recipe_class: type, name: str) -> type:
    return next(each for each in recipe_class.__mro__ if name in vars(each))


def _locate_mean(owner: type) -> str:
    """Return file and line of the last mean in `forward` of a class, or else of its first line."""
    forward: Any = vars(owner)["forward"]
    function = getattr(forward, "__func__", forward)
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):  # defined in a prompt
        return f"{owner.__module__}:{owner.__qualname__}"
    number = next((index for index in reversed(range(len(lines))) if _MEAN.search(lines[index])), 0)
    return f"{file}:{first + number}"
