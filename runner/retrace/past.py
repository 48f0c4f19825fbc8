"""History of a step that a run has made more than once."""

from runner.history.records import History
from runner.storage import Store
from runner.train.features.stability import read_roll_backs


def describe_past(run: Store, step: int, history: History) -> list[str]:
    """Return what became of a step in the run, if it was made more than once: a line each."""
    lines = []
    made = [
        attempt
        for attempt in history.attempts
        if attempt.resumed_step is not None and attempt.resumed_step < step <= (attempt.reached_step or 0)
    ]
    for attempt in made[:-1]:
        lines.append(f"attempt {attempt.number} made step {step} too, and lost it; it was computed again")
    for record in read_roll_backs(run):
        if record["begin"] < step <= record["detected"]:
            lines.append(
                f"step {step} was rolled back, because of {record['reason']} at step {record['detected']}: "
                f"{record['batches']} batches after step {record['begin']} were skipped, and the step was made again"
            )
    return lines
