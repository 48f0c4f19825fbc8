"""The category table of the page matches the code."""

import re
from pathlib import Path

from runner.distributed.clock import TimeCategory

PAGE = Path(__file__).parents[2] / ".github" / "docs" / "status.md"


def test_the_category_table_of_the_page_matches_the_code() -> None:
    section = PAGE.read_text().partition("\n## Categories of wall time\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert told == {category.value: category.meaning.removesuffix(".") for category in TimeCategory}
