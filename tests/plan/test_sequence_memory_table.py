"""The table of device memory for long sequences in the page of plans, computed by arithmetic.

python -m tests.plan.test_sequence_memory_table     prints it
"""

from runner.accelerator import parse_accelerator
from runner.parallel.mesh import AXES
from runner.plan.checks import Findings, open_job
from runner.plan.mesh import order_sizes
from runner.plan.prediction import Predictor, build_abstract
from runner.spec import load_document
from runner.trainer import BaseTrainer
from tests.support.job_process import ROOT

DEVICES, FSDP = 256, 16
LENGTHS, PARTS = (8192, 32_768, 131_072), (1, 4, 16)


def make_predictor(length: int) -> Predictor:
    """Return the predictor of an 8B with activation checkpointing, one sequence per device or group of devices."""
    accelerator = parse_accelerator(f"v5p-{DEVICES}")
    assert accelerator is not None
    keys = (
        f"config.data.sequence_length={length}",
        "config.memory.remat=layers",
        f"topology.accelerator={accelerator}",
    )
    job = open_job(load_document("specs/llama3_8b.yaml", keys), Findings())
    assert isinstance(job, BaseTrainer)
    train_setup = build_abstract(job.setup_builder, order_sizes(dict.fromkeys(AXES, 1)))
    return Predictor(job, job.flops_per_token(train_setup), accelerator)


def format_table() -> list[str]:
    """Return the lines of the table in Markdown."""
    of = {length: make_predictor(length) for length in LENGTHS}
    heads = [f"`sequence` {parts}" for parts in PARTS]
    lines = [f"| tokens per sequence | {' | '.join(heads)} |", f"|---|{'---|' * len(PARTS)}"]
    first = of[LENGTHS[0]]
    for length in LENGTHS:
        cells = []
        for parts in PARTS:
            fsdp = FSDP // parts if parts < FSDP else 1
            sizes = dict.fromkeys(AXES, 1) | {"data": DEVICES // (fsdp * parts), "fsdp": fsdp, "sequence": parts}
            state = first.measure_state(first.shard_state(order_sizes(sizes)))
            found = of[length].predict(sizes, 1, state)
            cells.append(f"{found.needed_bytes / 2**30:.1f} GiB")
        lines.append(f"| {length:,} | {' | '.join(cells)} |")
    return lines


def test_the_page_of_plans_has_the_memory_table_of_long_sequences() -> None:
    assert "\n".join(format_table()) in (ROOT / ".github" / "docs" / "design" / "plan.md").read_text()


if __name__ == "__main__":
    print("\n".join(format_table()))
