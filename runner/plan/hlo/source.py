"""Where in the source an instruction comes from: by the tables of files and stack frames that a module begins with."""

import re
from dataclasses import dataclass

_FILE = re.compile(r'^(\d+) "([^"]*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.MULTILINE)
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")
_STATED = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


@dataclass(frozen=True)
class Sources:
    """`file:line` of each stack frame of a module, by its number."""

    by_frame: dict[str, str]

    def of(self, rest: str) -> str:
        """`file:line` of the innermost call that made an instruction, from its attributes; "" if the text lacks it."""
        if frame := _FRAME_OF.search(rest):
            return self.by_frame.get(frame[1], "")
        stated = _STATED.search(rest)
        return ":".join(part for part in stated.groups() if part) if stated else ""


def sources_in(text: str) -> Sources:
    """The tables in front of the first computation."""
    found = re.search(r"^(?:%|ENTRY )", text, re.MULTILINE)
    head = text[: found.start()] if found else ""
    tables = {name: head.partition(f"\n{name}\n")[2].partition("\n\n")[0] for name in ("FileNames", "FileLocations")}
    files = dict(_FILE.findall(tables["FileNames"]))
    lines = {
        number: f"{files.get(file, '')}:{line}" for number, file, line in _LOCATION.findall(tables["FileLocations"])
    }
    frames = head.partition("\nStackFrames\n")[2]
    return Sources({number: lines.get(location, "") for number, location in _FRAME.findall(frames)})
