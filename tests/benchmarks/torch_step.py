"""Step time of the runner on a CPU, relative to PyTorch with the same shapes, compiled or eager.

Both train a GPT of 10.7M parameters in float32 on 8 sequences of 256 tokens with fused AdamW and global-norm clipping,
in two processes that run alternately. The script prints the median of the ratios of adjacent slices.

    python -m tests.benchmarks.torch_step [--torch-python PYTHON] [--eager] [--rounds 6] [--steps 5]

Layers are unrolled on both sides. Results with two threads, ratios of pairs:

| CPU | torch | seconds of a step, ours and torch's | ratio |
|---|---|---|---|
| AVX-512 | 2.15 compiled | 0.53, 0.82 | 0.65 |
| AMD EPYC with AVX-512, in a virtual machine | 2.13 eager | 0.94 to 1.00, 1.04 to 1.11 | 0.91, 0.93, 0.95 |
| the same, memory not kept (see below) | 2.13 eager | 1.2 to 1.3, 0.98 to 1.09 | 1.10, 1.20, 1.23, 1.27 |
| AMD EPYC without AVX-512, memory not kept | 2.13 eager | 1.2, 1.1 to 1.2 | 1.04, 1.05 |

"Not kept" is GLIBC_TUNABLES=glibc.malloc.hugetlb=1. The temporaries of a step are 670 MB. In the second and third row
the hypervisor takes free pages back: to write 125 MB takes 0.32 s in pages that were free for long, and 0.03 s in pages
that were freed just before. So keeping memory may gain less on other machines. Compiled torch takes 1.17 s on that
machine, and the ratio is 0.83. Without huge pages of 2 MiB (GLIBC_TUNABLES=glibc.malloc.hugetlb=0) the last row is
1.22. Single operations relative to torch: attention with its gradients 1.15 to 1.4; weight gradients 1.06 to 1.24, the
most for the MLP's output projection; other matmuls of 384 x 384 up to 1.26, those of the MLP 0.97 to 1.08. Tried
without gain beyond noise (2%): weight gradients and gradients of activations as products with explicitly transposed
operands, which XLA computes by YNNPACK instead of Eigen; other YNNPACK fusion types; no scheduling of operations side
by side.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.accelerator.config import GPT2, Model, Shape
from tests.benchmarks.accelerator.sections.speed import SHARED, make_trainer_command
from tests.benchmarks.accelerator.worker import Worker

SHAPE = Shape("gpt", 6, 6, 6, 384, 1536, 256, 256, 8, 8)
# The same precision, memory use and layer loop as in PyTorch.
OPTIONS = (
    "config.precision.compute=float32",
    "config.memory.remat=none",
    "config.model.layer_loop=unroll",
)


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="Python interpreter with torch")
    parser.add_argument("--eager", action="store_true", help="do not compile the torch model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    environment = os.environ | SHARED | ({"TORCH_COMPILE_DISABLE": "1"} if options.eager else {})
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        ours = make_trainer_command(Model("gpt_10m", GPT2, SHAPE, options.rounds, options.steps, OPTIONS), scratch)
        peer = [options.torch_python, "-m", "tests.benchmarks.accelerator.torch_gpt", json.dumps(asdict(SHAPE))]
        with (
            Worker(ours, environment, scratch / "ours.log") as runner,
            Worker(peer, environment, scratch / "torch.log") as torch,
        ):
            for _ in range(options.rounds + 1):  # the first slice warms up
                for worker in (runner, torch):
                    worker.run_slice(options.steps)
            pairs = list(zip(runner.step_seconds[1:], torch.step_seconds[1:], strict=True))
            version = torch.ready.version
    ratios = [own / other for own, other in pairs]
    own, other = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    print(
        f"{own:.3f} s a step, torch {version} {'eager' if options.eager else 'compiled'} {other:.3f} s; ratio median "
        f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
