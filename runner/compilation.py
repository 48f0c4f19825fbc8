"""Which micro-batch fits a device, by the compiled step's own memory figures. Knows no model and no data."""

from collections.abc import Callable
from typing import Any

from runner.errors import InvalidError


def compile_to_fit(compile_step: Callable[[int], Any], sizes: list[int], limit_bytes: int) -> Any:
    """Compile with the largest of `sizes` (descending) whose arguments, outputs and temporaries fit, and return that.

    After one that does not fit, the next guess is the size whose share of the temporaries would fit. Raises
    `InvalidError` with the numbers if the smallest does not fit.
    """
    while True:
        compiled = compile_step(sizes[0])
        analysis = compiled.memory_analysis()
        resident_bytes = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        needed_bytes = resident_bytes + analysis.temp_size_in_bytes
        if needed_bytes <= limit_bytes:
            return compiled
        if len(sizes) == 1:
            raise InvalidError(
                f"a step with {sizes[0]} example(s) a device needs {needed_bytes / 2**30:.2f} GiB on each device and "
                f"{limit_bytes / 2**30:.2f} GiB are there; use a smaller micro_batch_examples, more devices, or a "
                "larger fsdp or tensor axis"
            )
        share = max(limit_bytes - resident_bytes, 0) / analysis.temp_size_in_bytes
        sizes = [size for size in sizes[1:] if size <= sizes[0] * share] or sizes[-1:]
