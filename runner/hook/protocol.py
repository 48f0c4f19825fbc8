"""Hook protocol: five calls, a verdict, and counters in the train state. Imports no jax.

The runner makes each hook of the spec once per process. The training thread of every host calls it between two steps,
in the order of the spec:

1. `on_start` in each attempt, before its first step.
2. `on_row` when the metrics of a step are complete (with its evaluation, if it has one), then `on_evaluation` if the
   step was evaluated. Only these two return a verdict and new counters.
3. `on_checkpoint` right before the state is saved as a step's checkpoint in the run's directory.
4. `on_end` when the last step is complete and saved.

Counters are arrays of fixed shape and type in the train state, so they are saved, restored and fingerprinted with it. A
saved step includes the counters after its own calls, so each step is counted exactly once, however often the job is
killed. Steps that were lost are computed again, and their calls are made again. State that a hook keeps elsewhere is
not restored: an attribute is lost, and an append to a file is repeated. `verify-resume` finds such hooks.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import flax.linen as nn

from runner.config import TrainerConfig
from runner.distributed.agreement import Hosts
from runner.metrics.rows import Row
from runner.spec import ExecutionSpec, JobConfig
from runner.storage import Store


class HookConfig(JobConfig):
    """Base of a hook's `config`; no keys by default.

    `free_keys` of a hook with counters are the keys that may change on resume, because no bit of the counters depends
    on them.
    """


class SeenJob(Protocol):
    """Read-only view of the job for hooks.

    Attributes:
        spec: spec of the run.
        config: config of the trainer.
        store: directory of the run.
    """

    spec: ExecutionSpec
    config: TrainerConfig[Any]
    store: Store

    def model(self) -> nn.Module:
        """Return the module that is trained."""


class Act(enum.Enum):
    """Request of a verdict, carried out after all hooks have been called."""

    GO_ON = "go on"
    SAVE = "save"  # save this step, even if no save is due
    EVALUATE = "evaluate"  # evaluate this step, if it was not evaluated; then `on_evaluation` is called
    STOP = "stop"  # end the run as done: this step becomes the last one, and is evaluated and saved


@dataclass(frozen=True)
class Verdict:
    """Return value of `on_row` and `on_evaluation`; None means `Verdict()`. Process 0's verdict applies on every host.

    Attributes:
        act: request to the run.
        counters: new counters, in the structure of `init`; None: unchanged.
        reason: reason of a stop, for people and `result.json`.
    """

    act: Act = Act.GO_ON
    counters: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Moment:
    """Argument of every call of a hook.

    Attributes:
        step: completed steps.
        row: metrics of this step as in `metrics.jsonl`, the same on every host; in calls other than `on_row` and
            `on_evaluation`, the newest row (empty before the first).
        weights: `params`, and `variables` if the model has any: global arrays with the shardings of the mesh, so
            computations with them must run on every host. Do not keep them: the next step overwrites their memory.
        counters: the hook's own counters as numpy arrays, in the structure of `init`.
        hosts: processes of the job. Put side effects (a file, a message) under `if hosts.is_main`, and never a
            collective.
        run_began: time when the run's directory was first claimed, in Unix seconds.
    """

    step: int
    row: Row
    weights: Any
    counters: Any
    hosts: Hosts
    run_began: float


class Hook:
    """Base of every hook. Override the methods that are needed; methods that are not overridden are never called.

    The time of a call is excluded from the speed and the deadline of steps. An exception on any host ends the run with
    exit code 1 and a message with the name of the hook; the last checkpoint remains.

    Attributes:
        former_paths: paths (`module:Class`) that this class had earlier. A run with counters of a hook of such a path
            continues with this class. Not inherited.
    """

    Config: ClassVar[type[HookConfig]] = HookConfig
    former_paths: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Any, job: SeenJob):
        """Store `config`, an instance of `Config`, and `job`. Overrides may raise `InvalidError` if they do not fit."""
        self.config, self.job = config, job

    def init(self) -> Any:
        """Return the counters before the first step: a small tree of numpy arrays, none by default. Pure."""
        return {}

    def on_start(self, moment: Moment) -> None:
        """React to the start of an attempt at `moment.step`. Not part of the trajectory: each restart adds a call."""

    def on_row(self, moment: Moment) -> Verdict | None:
        """React to a new row of metrics. The verdict may depend on row, weights and counters only."""

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """React to an evaluation, whose metrics are in the row. The verdict may depend on the same as in `on_row`."""

    def on_checkpoint(self, moment: Moment) -> None:
        """React to a save that is about to start. Not part of the trajectory: saves depend on clocks and failures."""

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None] | None:
        """React to the end of the run, once the last step is saved.

        The returned mapping is added to `result.json`, and must not repeat a key of it.
        """


class Observer(Hook):
    """Base of read-only hooks: no counters and no verdicts, so that a run may get or lose one when it resumes."""
