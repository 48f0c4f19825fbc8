"""Template process, which forks the children that `tests.support.forked_python` asks for.

It imports jax and the runner, and has no threads that a fork would lose. A request is a JSON list of arguments and
environment, with descriptors of the three standard streams and of a pipe, to which the template writes the process id
of the child and, once it has ended, its exit status.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import struct
import sys
from collections.abc import Sequence

from runner.__main__ import restart_with_allocator_options
from runner.process import request_death_signal

IMPORTS = ("flax.linen", "flax.training.train_state", "optax", "runner.session", "runner.trainer", "runner.cli.app")
WORD = struct.Struct("q")  # form of the process id and of the exit status
MAX_REQUEST_BYTES = 1 << 17
ALLOCATOR = "GLIBC_TUNABLES"  # read by the C library when the template starts


def serve(requests: int) -> list[str]:
    """Fork a child for each request until the other end closes the socket; in a child, return its arguments."""
    connection = socket.socket(fileno=requests)
    children: dict[int, tuple[int, int]] = {}  # by descriptor of the process: its id and the pipe for its status
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == requests:
                content, given, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 4)
                if not content:
                    os._exit(0)
                *streams, report = given
                template = os.getpid()
                child = os.fork()
                if not child:
                    connection.detach()
                    return _become(content, streams, template)
                os.write(report, WORD.pack(child))
                process = os.pidfd_open(child)
                children[process] = child, report
                poll.register(process, select.POLLIN)
                for stream in streams:
                    os.close(stream)
            else:
                child, report = children.pop(descriptor)
                poll.unregister(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # nobody waits for this child
                    os.write(report, WORD.pack(status))
                os.close(descriptor)
                os.close(report)


def _become(content: bytes, streams: Sequence[int], template: int) -> list[str]:
    """Make this child the process of a request, and return its arguments."""
    request_death_signal(template)
    arguments, variables = json.loads(content)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if ALLOCATOR in os.environ:
        variables[ALLOCATOR] = os.environ[ALLOCATOR]
    os.environ.clear()
    os.environ.update(variables)
    sys.orig_argv = [sys.executable, "-m", *arguments]
    return list(arguments)


if __name__ == "__main__":
    restart_with_allocator_options()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    del sys.modules["runner.__main__"]  # runpy warns of a module that it runs and finds imported
    sys.argv = serve(int(sys.argv[1]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
