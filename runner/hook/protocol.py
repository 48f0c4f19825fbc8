"""What a hook is: five calls, a verdict, and counters that live in the train state. Knows no jax.

The runner makes each hook that the spec lists once a process, and calls it by the training thread of every host, in the
order of the spec, between two steps:

1. `on_start` in each attempt, before its first step.
2. `on_row` when the row of a step is made (its evaluation included, if it has one), then `on_evaluation` if the step
   was evaluated. Only these two return a verdict and new counters.
3. `on_checkpoint` right before the state is saved as a step's checkpoint in the run's directory.
4. `on_end` when the last step is complete and saved.

Counters are arrays of fixed shape and type in the train state, so they are saved, restored and fingerprinted with it. A
step that is saved has the counters after its own calls: each step of the surviving trajectory is counted exactly once,
however often the job was killed. Steps that were lost are done again, and so are their calls. What a hook keeps
elsewhere (an attribute, a file that grows) is forgotten or repeated: `verify-resume` finds it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import flax.linen as nn

from runner.config import TrainerConfig
from runner.distributed.agreement import Hosts
from runner.metrics.rows import Row
from runner.spec import ExecutionSpec, JobConfig
from runner.storage import Store


class HookConfig(JobConfig):
    """Base of what a hook's class accepts under its `config`; no keys by default.

    The `free_keys` of a hook with counters are those that may change on resume, since no bit of the counters depends on
    them.
    """


class SeenJob(Protocol):
    """What a hook may read of its job. It changes nothing of it."""

    spec: ExecutionSpec
    config: TrainerConfig[Any]
    store: Store

    def model(self) -> nn.Module:
        """The module that is trained."""


class Act(enum.Enum):
    """What a verdict asks for, after all hooks have been called."""

    GO_ON = "go on"
    SAVE = "save"  # this step, whether a save is due or not
    EVALUATE = "evaluate"  # the weights of this step, unless they have been; then `on_evaluation` is called
    STOP = "stop"  # end the run as done: this step is the last, evaluated and saved as such


@dataclass(frozen=True)
class Verdict:
    """What `on_row` and `on_evaluation` return; None is the same as `Verdict()`. Host 0's counts, on every host.

    Attributes:
        act: what the run is to do.
        counters: the new ones, None if they stay; a tree like the one of `init`.
        reason: of a stop, for people and `result.json`.
    """

    act: Act = Act.GO_ON
    counters: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Moment:
    """What a hook is shown.

    Attributes:
        step: completed steps.
        row: the figures of the row of this step as `metrics.jsonl` has them, the same on every host; of the newest row,
            empty before the first, where a call is not about a row.
        weights: `params`, and the other `variables` of a model that has some: global arrays, cut as the mesh says, so
            what computes with them is called on every host. Not to be kept: the next step overwrites their memory.
        counters: the hook's own, numpy arrays by the tree of `init`.
        hosts: who is where. What has effects outside (a file, a message) belongs under `if hosts.is_main`; nothing that
            waits for the other hosts does.
        run_began: when the run's directory was claimed first, in Unix seconds.
    """

    step: int
    row: Row
    weights: Any
    counters: Any
    hosts: Hosts
    run_began: float


class Hook:
    """Base of every hook. Replace what is needed: a method that is not replaced costs nothing.

    A method may take its time: it counts in no step's speed and trips no step's deadline. What it raises on any host
    ends the run with 1, and names the hook; the last checkpoint stays as it is.
    """

    Config: ClassVar[type[HookConfig]] = HookConfig

    def __init__(self, config: Any, job: SeenJob):
        """`config` is an instance of `Config`. Raise `InvalidError` if it does not go with the job's spec."""
        self.config, self.job = config, job

    def init(self) -> Any:
        """The counters before the first step: a small tree of numpy arrays, none by default. Pure."""
        return {}

    def on_start(self, moment: Moment) -> None:
        """An attempt begins at `moment.step`. Not part of the trajectory: how often it comes depends on failures."""

    def on_row(self, moment: Moment) -> Verdict | None:
        """A row was made. To be decided by the row, the weights and the counters alone."""

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """The weights were evaluated: the row has the figures. To be decided as in `on_row`."""

    def on_checkpoint(self, moment: Moment) -> None:
        """The state is about to be saved. Not part of the trajectory: saves may depend on clocks and failures."""

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None] | None:
        """The last step is saved. What is returned goes into `result.json`, and must not take a key from it."""


class Observer(Hook):
    """A hook that only looks: no counters, no verdicts, so that a run may get or lose it when it is resumed."""
