"""A closed terminal or a broken pipe never stops a run."""

import subprocess
import sys


def test_lines_nobody_reads_are_dropped():
    program = "\n".join(
        [
            "import os, sys",
            "from runner.terminal import say, warn",
            "reader, writer = os.pipe()",
            "os.close(reader)",
            "os.dup2(writer, 1); os.dup2(writer, 2)",
            "for _ in range(3): say('x' * 100_000); warn('y' * 100_000)",
            "os._exit(7)",
        ]
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=600).returncode == 7
