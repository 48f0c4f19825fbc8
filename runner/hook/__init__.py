"""Hooks: what looks at a run's rows and weights, and may save, evaluate or stop it. See README.md in this folder.

- `protocol` the five calls, the verdict, and what a hook is shown
- `shipped` early stopping, stop at a loss or a time, the best at the end
- `counters` the hooks' part of the train state
- `listing` the hooks that a spec lists
- `call` one call on every host: errors, verdicts, time
- `steering` when they are called, and what becomes of what they say
- `job` a job that calls them
"""

from runner.hook.protocol import Act, Hook, HookConfig, Moment, Observer, SeenJob, Verdict
from runner.hook.shipped import BestAtEnd, EarlyStopping, StopAtLoss, StopAtTime

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
