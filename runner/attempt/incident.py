"""What the watchdog finds is kept where a person looks: in the ledger, beside it, or on the terminal."""

from runner import terminal
from runner.attempt.claim import Attempt
from runner.hosts.straggler import Straggling
from runner.hosts.watchdog import stacks_of_all_threads


class Incidents:
    """Called by the watchdog, from its thread.

    Attributes:
        attempt: None until the directory is claimed: nothing is written there before.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None

    def on_verdict(self, verdict: str, code: int) -> None:
        """Keep what helps to understand why the job does not go on. Any host, right before the process ends."""
        stacks = f"{verdict}\n\n{stacks_of_all_threads()}"
        attempt = self._owner()
        if attempt is None:
            terminal.warn(stacks)
            return
        attempt.events.append("stuck", attempt.progress.step, reason=verdict)
        attempt.store.write(f"stacks/{attempt.number:06}.{attempt.hosts.process_id}.txt", stacks.encode())
        attempt.end(code)

    def on_progress(self, step: int) -> None:
        """How far this attempt has come, for those who ask what a kill has cost. Main host only."""
        attempt = self._owner()
        if attempt is not None:
            attempt.events.append("progress", step)

    def on_straggler(self, straggling: Straggling) -> None:
        """Which processes come late to their steps. Main host only."""
        late, step, after_seconds = straggling.late, straggling.step, straggling.after_seconds
        if self.attempt is not None:
            self.attempt.events.append("straggler", step, late=late, after_seconds=after_seconds)
        after = ", ".join(
            f"process {process} came to step {step} {after_seconds[process]:.2f} s after the first" for process in late
        )
        terminal.warn(f"straggler: {after}" if after else "straggler: all processes are in time again")

    def _owner(self) -> Attempt | None:
        """The attempt, if it has claimed the directory and no newer one has since."""
        return self.attempt if self.attempt is not None and self.attempt.owns_directory() else None
