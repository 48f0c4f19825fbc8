"""The table of buckets in the page is the one in the code."""

import re
from pathlib import Path

import runner.history
from runner.distributed.clock import TimeBucket

PAGE = Path(runner.history.__file__).with_name("README.md")


def test_the_page_says_of_each_bucket_what_the_code_says() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert told == {bucket.value: bucket.meaning.removesuffix(".") for bucket in TimeBucket}
