"""Final losses of runs with 8-bit matmuls, relative to those of runs in bfloat16, over several seeds.

    python -m tests.benchmarks.eight_bit [--specs specs/gpt_small.yaml specs/llama_nano.yaml] [--seeds 0 1 2]
        [--types int8 float8 int8-stochastic float8-stochastic] [--steps N] [--eval-examples 512] [--set KEY=VALUE ...]

A seed determines the initial weights and the order of the data, so the runs of a seed differ in their matmuls alone.
On a CPU the 8-bit matmuls are emulated, with the same rounding. The aim is a mean ratio within 0.5% of 1. The ratio of
bfloat16 to float32 matmuls (`--types float32`) shows how far a change of rounding alone moves the losses. With
types that end in `-stochastic` the gradients of results are rounded stochastically (`precision.gradient_rounding`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TYPES = ["int8", "float8", "int8-stochastic", "float8-stochastic", "float32"]


def train(spec: Path, matmul: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train a spec in a process of its own, and return its result."""
    precision = {"compute": "float32" if matmul == "float32" else "bfloat16"}
    name, _, rounding = matmul.partition("-")
    if name in ("int8", "float8"):
        precision |= {"matmul": name, "gradient_rounding": rounding or "nearest"}
    changes = {
        "seed": seed,
        "config.precision": json.dumps(precision),
        "config.eval": f"{{every_steps: null, batches: {options.eval_examples}}}",
        "checkpoint": "{every_steps: 1000000}",
    }
    if options.steps:
        changes["config.train.total_steps"] = options.steps
    settings = [f"{key}={value}" for key, value in changes.items()] + options.set
    with tempfile.TemporaryDirectory() as directory:
        arguments = [f"--set={setting}" for setting in [f"directory={directory}/run", *settings]]
        subprocess.run([sys.executable, "-m", "runner", spec, *arguments], check=True, capture_output=True)
        found: dict[str, float] = json.loads((Path(directory) / "run" / "result.json").read_text())
    return found


def main() -> None:
    """Print the validation loss of every run, and the ratio of each type to bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--specs", type=Path, nargs="+", default=[Path("specs/gpt_small.yaml"), Path("specs/llama_nano.yaml")]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--types", nargs="+", default=["int8", "float8"], choices=TYPES)
    parser.add_argument("--steps", type=int, help="steps of each run; by default those of its spec")
    parser.add_argument("--eval-examples", type=int, default=512, help="validation examples at the end")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of every spec")
    options = parser.parse_args()
    for spec in options.specs:
        losses: dict[str, list[float]] = {}
        for matmul in ("bfloat16", *options.types):
            for seed in options.seeds:
                began = time.perf_counter()
                result = train(spec, matmul, seed, options)
                losses.setdefault(matmul, []).append(result["val_loss"])
                seconds = time.perf_counter() - began
                print(
                    f"{spec.stem}, {matmul}, seed {seed}: validation loss {result['val_loss']:.4f} after "
                    f"{result['step']:.0f} steps, {seconds:.0f} s",
                    flush=True,
                )
        for matmul in options.types:
            ratios = [own / base for own, base in zip(losses[matmul], losses["bfloat16"], strict=True)]
            shown = ", ".join(f"{ratio - 1:+.2%}" for ratio in ratios)
            print(f"{spec.stem}, {matmul} / bfloat16: mean {statistics.mean(ratios) - 1:+.2%} ({shown})", flush=True)


if __name__ == "__main__":
    main()
