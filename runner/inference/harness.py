"""Checkpoints of a run, evaluated by tasks of lm-evaluation-harness. Imported on request, because it needs that."""

from typing import Any

from runner.distributed.agreement import Hosts
from runner.evaluation.generation import infer_vocabulary_size, make_variables
from runner.evaluation.harness import HarnessModel, HarnessTasks
from runner.inference.evaluate import make_evaluation_context
from runner.inference.open_run import ReadOnlyRun
from runner.spec import PARAMS
from runner.storage import JsonObject


class HarnessEvaluator:
    """Evaluation by tasks of the harness, a `CheckpointEvaluator`."""

    weights = PARAMS

    def __init__(self, run: ReadOnlyRun, hosts: Hosts, tasks: HarnessTasks):
        self._hosts, self._tasks = hosts, tasks
        context, self.abstract = make_evaluation_context(run)
        infer_vocabulary_size(context.model, make_variables(self.abstract), run.job.config.data.tokens_per_example)
        self.model = HarnessModel(context, run.job.config)

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Return the harness's metrics by task; None on processes but 0. Raises InvalidError if a task has no data."""
        results = self._tasks.evaluate(self.model, weights)
        return {"step": step, "harness": results} if self._hosts.is_main else None


def format_record(record: JsonObject) -> list[str]:
    """Format a record for the terminal, one line for each task."""
    lines = []
    for task, metrics in record["harness"].items():
        numbers = [f"{key.split(',')[0]} {value:.4f}" for key, value in metrics.items() if isinstance(value, float)]
        lines.append(f"step {record['step']} {task}: {', '.join(numbers)}")
    return lines
