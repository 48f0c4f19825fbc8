"""What a job keeps beside its state, and tells at its end: nothing, unless its class has more to tell."""

from collections.abc import Sequence

from runner.storage import JsonObject


class Account:
    """Nothing is kept. A trainer's `Report` has its rows."""

    def problem_with(self, attachments: dict[str, bytes]) -> str | None:
        """Why the job cannot go on from a state of the fast tier that has these beside it; None if it can.

        Called on the main host only, while an older state can still be taken.
        """
        return None

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None) -> None:
        """The state of `step` is there, new or restored; `attachments` came with it from the fast tier.

        `carry` is that of the payload it was saved with.

        Called once, on every host, before the first step.
        """

    def result(self, step: int) -> JsonObject:
        """What `result.json` says besides step and fingerprint. Called at the end, on every host."""
        return {}

    def next_lines(self) -> Sequence[str]:
        """What one may want of the run now that it has ended: lines for a person, printed last."""
        return ()
