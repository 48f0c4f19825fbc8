"""Step time with a stability policy and without: the compiled steps of one job, a few steps of each in turn.

    python -m tests.benchmarks.stability [--spec specs/gpt_small.yaml] [--examples 8] [--length 128] [--rounds 12]

The policy watches the gradient norm and skips what is not finite. Ratios are of neighbouring rounds, so that a load on
the machine that changes slowly does not matter.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import yaml

from experiments.gpt import PretrainGPT
from runner import ExecutionSpec

POLICIES: dict[str, Any] = {"without": {}, "with": {"skip_update": {"grad_norm_above": {}}, "non_finite": "skip"}}


def main() -> None:
    """Print the median seconds of a step of both, the ratio, and the memory of both programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=Path("specs/gpt_small.yaml"))
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    steps = {}
    for name, policy in POLICIES.items():
        document = yaml.safe_load(options.spec.read_text())
        document["config"]["stability"] = policy
        document["config"]["data"] |= {"source": "python-stdlib", "sequence_length": options.length}
        document["config"]["train"]["global_batch_examples"] = options.examples
        job = PretrainGPT(ExecutionSpec.model_validate(document))
        setup = job.setup_builder.build(jax.devices()[:1], lambda data: None)
        layout = job.setup_builder.get_largest_layout(setup)
        compiled = setup.compile_train(job.train_step, layout)
        print(f"{name}: temporaries {compiled.memory.temporaries:,} bytes, needed {compiled.memory.needed:,} bytes")
        steps[name] = [compiled.executable, setup.init_state(), layout.batch(job.dataset, "train", 0), setup.key]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            executable, state, batch, key = steps[name]
            began = time.perf_counter()
            for _ in range(options.steps):
                state, loss, _ = executable(state, batch, key)
            jax.block_until_ready((state, loss))
            steps[name][1] = state
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / options.steps)
    ratios = [after / before for before, after in zip(seconds["without"], seconds["with"], strict=True)]
    print(", ".join(f"{name} {statistics.median(each):.4f} s a step" for name, each in seconds.items()))
    print(f"ratio: median {statistics.median(ratios):.4f}, least {min(ratios):.4f}, of the minima ", end="")
    print(f"{min(seconds['with']) / min(seconds['without']):.4f}")


if __name__ == "__main__":
    main()
