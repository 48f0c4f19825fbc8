"""Format unexpected errors for the author of the code that raised them.

If a frame of the traceback is in the user's own code, its line comes first, with the shapes of the arrays in it.
Frames of the runner, of JAX and of other installed packages are counted, not shown. `RUNNER_TRACEBACK=full` shows all.
"""

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import runner

FULL_VARIABLE = "RUNNER_TRACEBACK"
_MAX_FRAMES, _MAX_ARRAYS, _MAX_MESSAGE = 8, 8, 2000
_NAME = re.compile(r"[^\W\d]\w*")
_INSTALLED = tuple(
    {f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}
)


def has_own_frames(error: BaseException) -> bool:
    """Return True if the error was raised in code of the user's own, or below it."""
    return any(_is_own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def format_bug(error: BaseException) -> str:
    """Return the text of an error: short if a frame is in the user's own code, otherwise the whole traceback."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [(frame, number) for frame, number in frames if _is_own(frame.f_code.co_filename)]
    if not own or os.environ.get(FULL_VARIABLE) == "full":
        return "".join(traceback.format_exception(error)).rstrip("\n")
    message = "\n".join(traceback.format_exception_only(error)).strip()
    # JAX appends a paragraph about its own traceback, and Flax a link.
    message = message.partition("\n--------------------\n")[0].strip()
    frame, number = own[-1]
    lines = [f"{_format_place(frame, number)}: {message[:_MAX_MESSAGE]}", f"    {_read_line(frame, number)}"]
    lines += [f"      {each}" for each in _describe_arrays(frame, _read_line(frame, number))]
    lines += [
        f"  called at {_format_place(caller, place)}: {_read_line(caller, place)}"
        for caller, place in reversed(own[-_MAX_FRAMES:-1])
    ]
    folded = len(frames) - len(own)
    lines.append(f"  {folded} frames of the runner and of packages are not shown; {FULL_VARIABLE}=full shows them")
    return "\n".join(lines)


def _is_own(file: str) -> bool:
    """Return True for a file that is neither the runner's nor Python's nor of an installed package."""
    path = os.path.abspath(file)
    packages = (*_INSTALLED, f"{Path(runner.__file__).parent}{os.sep}")
    return not file.startswith("<") and not path.startswith(packages)


def _format_place(frame: FrameType, number: int) -> str:
    file = os.path.relpath(frame.f_code.co_filename)
    file = frame.f_code.co_filename if file.startswith("..") else file
    return f"{file}:{number} in {frame.f_code.co_qualname}"


def _read_line(frame: FrameType, number: int) -> str:
    return linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()


def _describe_arrays(frame: FrameType, line: str) -> list[str]:
    """Return type and shape of the arrays among the local variables: first those in the line."""
    arrays = {
        name: f"{name}: {value.dtype}[{','.join(map(str, value.shape))}]"
        for name, value in frame.f_locals.items()
        if hasattr(value, "shape") and hasattr(value, "dtype")
    }
    named = [name for name in dict.fromkeys(_NAME.findall(line)) if name in arrays]
    return [arrays[name] for name in dict.fromkeys([*named, *arrays])][:_MAX_ARRAYS]
