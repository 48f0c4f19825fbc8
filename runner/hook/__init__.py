"""Hooks: calls with a run's rows and weights, which may save, evaluate or end the run. See .github/docs/hooks.md.

- `hooks`: base classes, verdicts and arguments of hooks; early stopping, stop at a loss or a time, best checkpoint
- `listing`: hooks of a spec, and their counters in the train state
- `dispatch`: calls of hooks, and the effect of their verdicts
"""

from runner.hook.hooks import (
    Act,
    BestAtEnd,
    EarlyStopping,
    Hook,
    HookConfig,
    Moment,
    Observer,
    SeenJob,
    StopAtLoss,
    StopAtTime,
    Verdict,
)

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
