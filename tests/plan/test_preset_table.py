"""Page of the hardware that each preset needs, by arithmetic: the smallest slice of each chip, and its speed.

python -m tests.plan.test_preset_table     writes the page, which takes twenty minutes
"""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.model.presets import PRESETS
from runner.accelerator import Accelerator
from runner.errors import InvalidError
from runner.plan.prediction import SINGLE_DEVICE, build_abstract
from runner.plan.program import TYPICAL_SHARE, count_elements
from runner.plan.search import Search, find_smallest_slice
from tests.support.job_process import ROOT

PAGE = ROOT / ".github" / "docs" / "design" / "hardware.md"
CHIP_NAMES = ("v5e", "v5p", "v6e", "h100")
LENGTH, EXAMPLES = 8192, 256  # of a batch: 2 million tokens
TOKENS_PER_PARAMETER, DAYS = 20, 30
TESTED_PRESET = "smollm2_135m"
HEADS = (
    "preset",
    "parameters",
    "smallest slice",
    "mesh",
    "micro-batch",
    "`memory`",
    "GiB a device",
    "tokens/s a chip",
    f"chips for {DAYS} days",
)
SPEC = f"""
name: table
job: experiments.model.decoder:PretrainDecoder
directory: /nowhere
topology: {{accelerator: any, mesh: {{data: auto}}}}
config:
  model: {{preset: llama3_8b}}
  data: {{source: none, sequence_length: {LENGTH}}}
  optimizer: {{name: adamw, learning_rate: 3.0e-4}}
  schedule: {{name: constant}}
  train: {{total_steps: 1000, global_batch_examples: {EXAMPLES}}}
  precision: {{params: float32, compute: bfloat16}}
"""
INTRODUCTION = f"""# Hardware for each preset

The smallest slice on which each preset trains with AdamW: parameters and moments in float32, matmuls in bfloat16,
sequences of {LENGTH:,} tokens, {EXAMPLES} of them in a step. For another length or batch, or to compile the step for
the chip, use `python -m runner plan SPEC --search` and `--chips auto --hours H`.

All figures are arithmetic on shapes and makers' peak rates ([plan](../plan.md#search)): nothing here
was compiled or run. `tokens/s a chip` is an upper bound. The last column is the number of chips that process
{TOKENS_PER_PARAMETER} tokens per parameter in {DAYS} days at half of that speed. Mesh, micro-batch and `config.memory`
are those with the best predicted step on that slice; axes of size 1 and options that are null are left out.

`python -m tests.plan.test_preset_table` writes this page.
"""


def open_search(preset: str, directory: Path) -> Search:
    spec = directory / "table.yaml"
    spec.write_text(SPEC)
    return Search(str(spec), (f"config.model={{preset: {preset}}}",))


def make_rows(preset: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the chip and the line of a preset for each chip."""
    search = open_search(preset, directory)
    variants = search.list_variants()
    state = build_abstract(variants[0].job.setup_builder, SINGLE_DEVICE).abstract_state
    num_parameters = count_elements(state.params)
    for chip_name in CHIP_NAMES:
        name, billions = f"`{preset}`", f"{num_parameters / 1e9:.2f}B"
        try:
            slice_, (candidate, *_) = find_smallest_slice(search, variants, Accelerator(chip_name, 1), math.inf)
        except InvalidError:
            yield chip_name, f"| {name} | {billions} | none |{' |' * (len(HEADS) - 3)}"
            continue
        mesh = ", ".join(f"{axis}: {size}" for axis, size in candidate.mesh if size > 1) or "data: 1"
        options = ", ".join(f"{key.rpartition('.')[2]}: {value}" for key, value in candidate.choices if value)
        tokens_per_second = EXAMPLES * LENGTH / candidate.prediction.times.step_seconds / slice_.num_chips
        tokens, seconds = TOKENS_PER_PARAMETER * num_parameters, DAYS * 86_400
        num_chips = tokens / (TYPICAL_SHARE * tokens_per_second * seconds)
        cells = (
            *(name, billions, f"{slice_}", f"`{{{mesh}}}`", f"{candidate.prediction.micro_batch_examples}"),
            *(f"`{{{options}}}`", f"{candidate.prediction.needed_bytes / 2**30:.1f}", f"{tokens_per_second:,.0f}"),
            f"{num_chips:,.0f}" if num_chips >= 1 else "1",
        )
        yield chip_name, f"| {' | '.join(cells)} |"


@pytest.mark.soak
def test_the_page_has_the_rows_of_a_preset(tmp_path: Path) -> None:
    for _, row in make_rows(TESTED_PRESET, tmp_path):
        assert row in PAGE.read_text()


def test_the_page_has_every_preset_on_every_chip() -> None:
    for preset in PRESETS:
        assert PAGE.read_text().count(f"| `{preset}` |") == len(CHIP_NAMES)


def main() -> None:
    """Write the page."""
    rows: dict[str, list[str]] = {name: [] for name in CHIP_NAMES}
    with tempfile.TemporaryDirectory() as directory:
        for preset in PRESETS:
            print(preset, flush=True)
            for chip_name, row in make_rows(preset, Path(directory)):
                rows[chip_name].append(row)
    text = INTRODUCTION
    for chip_name, lines in rows.items():
        heads = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        text += "\n".join(["", f"## {chip_name}", "", *heads, *lines, ""])
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
