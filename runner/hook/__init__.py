"""Hooks: calls with a run's rows and weights, which may save, evaluate or end the run. See README.md in this folder.

- `protocol`: base classes, verdicts and arguments of hooks
- `builtin`: early stopping, stop at a loss or a time, best checkpoint
- `listing`: hooks of a spec, and their counters in the train state
- `dispatch`: calls of hooks, and the effect of their verdicts
"""

from runner.hook.builtin import BestAtEnd, EarlyStopping, StopAtLoss, StopAtTime
from runner.hook.protocol import Act, Hook, HookConfig, Moment, Observer, SeenJob, Verdict

__all__ = [
    "Act",
    "BestAtEnd",
    "EarlyStopping",
    "Hook",
    "HookConfig",
    "Moment",
    "Observer",
    "SeenJob",
    "StopAtLoss",
    "StopAtTime",
    "Verdict",
]
