"""Cost of replays and of a stability policy that never triggers, and whether they change any bits.

    python -m tests.benchmarks.stability [--spec specs/gpt_small.yaml] [--examples 8] [--length 128] [--rounds 12]
    python -m tests.benchmarks.stability --layers 12 --width 768 --examples 16 --length 1024 --bfloat16

Use the second command on an accelerator. The policy monitors gradient norm and loss, and skips non-finite updates.
Steps of these variants of one job alternate:

- without a policy;
- the same again, which shows whether two runs of one program are bit-identical at all;
- with the policy;
- with a step that can be replayed (`train.replay_every_steps`), executed once;
- the same step, executed and replayed.

Ratios are those of neighbouring rounds, so that slow changes of the machine load cancel out.

On GPUs, autotuning may select different matrix multiplications for different programs. To compare bits, disable it:
`XLA_FLAGS="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"`.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from experiments.gpt import PretrainGPT
from runner import ExecutionSpec
from runner.train.replay import ReplayedStep

WITHOUT, AGAIN, WITH, REPLAYABLE, REPLAYED = "without", "without, again", "with", "not replayed", "replayed"
POLICY: dict[str, Any] = {
    "skip_update": {"grad_norm_above": {}},
    "non_finite": "skip",
    "roll_back": {"skip_examples": 1},
}


def make_job(options: argparse.Namespace, policy: dict[str, Any], replay_every_steps: int | None) -> PretrainGPT:
    """Return the job with the given policy and interval of replays."""
    document = yaml.safe_load(options.spec.read_text())
    config = document["config"]
    config["stability"], config["train"]["replay_every_steps"] = policy, replay_every_steps
    config["data"] |= {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": options.length}
    config["train"]["global_batch_examples"] = options.examples
    if options.layers:
        heads = max(options.width // 64, 1)
        config["model"] |= {"layers": options.layers, "heads": heads, "width": options.width, "layer_loop": "scan"}
    if options.bfloat16:
        config["precision"] = {"compute": "bfloat16"}
    return PretrainGPT(ExecutionSpec.model_validate(document))


def count_differing_bytes(one: Any, other: Any) -> int:
    """Return the number of differing bytes in parameters and optimizer state."""
    pairs = zip(*(jax.tree.leaves((state.params, state.opt_state)) for state in (one, other)), strict=True)
    return sum(
        int(
            np.sum(np.frombuffer(np.asarray(a).tobytes(), np.uint8) != np.frombuffer(np.asarray(b).tobytes(), np.uint8))
        )
        for a, b in pairs
    )


def main() -> None:
    """Print step times, ratios, the memory of each program, and the number of differing bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=Path("specs/gpt_small.yaml"))
    parser.add_argument("--layers", type=int, default=0, help="layers of the model; 0: the model of the spec")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.platform}, {device.device_kind}, jax {jax.__version__}")
    steps: dict[str, list[Any]] = {}
    for name, policy, every_steps in ((WITHOUT, {}, None), (WITH, POLICY, None), (REPLAYABLE, {}, 100)):
        began = time.perf_counter()
        job = make_job(options, policy, every_steps)
        setup = job.setup_builder.build([device], lambda: None)
        layout = job.setup_builder.list_layouts(setup)[0]
        compiled = setup.compile_train(job.train_step, layout)
        print(
            f"{name}: temporaries {compiled.memory.temporaries:,} bytes, needed {compiled.memory.needed:,} bytes; "
            f"compiled in {time.perf_counter() - began:.1f} s"
        )
        batch = layout.batch(job.dataset, "train", 0)
        steps[name] = [compiled.executable, setup.init_state(), batch, setup.key]
        if name == REPLAYABLE:
            replayed = ReplayedStep(
                compiled.executable, setup.abstract_state, compiled.layout.mesh, compiled.layout.is_ordered
            )
            steps[name][0] = replayed.run
            steps[REPLAYED] = [replayed.compare, setup.init_state(), batch, setup.key]
        if name == WITHOUT:
            steps[AGAIN] = [compiled.executable, setup.init_state(), batch, setup.key]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            executable, state, batch, key = steps[name]
            began = time.perf_counter()
            for _ in range(options.steps):
                state, loss, *_ = executable(state, batch, key)
            jax.block_until_ready((state, loss))
            steps[name][1] = state
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / options.steps)
    print(", ".join(f"{name} {statistics.median(each):.4f} s a step" for name, each in seconds.items()))
    others = [name for name in steps if name != WITHOUT]
    for name in others:
        ratios = [after / before for before, after in zip(seconds[WITHOUT], seconds[name], strict=True)]
        least = min(seconds[name]) / min(seconds[WITHOUT])
        print(f"{name} / without: median {statistics.median(ratios):.4f}, of the minima {least:.4f}")
    num_steps = (options.rounds + 1) * options.steps
    for name in others:
        different = count_differing_bytes(steps[WITHOUT][1], steps[name][1])
        print(f"the same bits after {num_steps} steps, {name}: {not different} ({different:,} bytes differ)")


if __name__ == "__main__":
    main()
