"""Hooks: what looks at a run's rows and weights, and may save, evaluate or stop it. See README.md in this folder.

- `counters`: The part of the train state that belongs to hooks: their counters, and which of their calls are behi
- `protocol`: What a hook is: five calls, a verdict, and counters that live in the train state. Knows no jax
- `builtin`: Hooks for every run. Each is an example, too: what is to survive is in `init`, and nowhere else
- `listing`: The hooks that a spec lists, made and checked before any device is touched
- `dispatch`: When hooks are called, and what becomes of what they say: the part of the training loop that is thei
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
