"""Links of the site's pages to files of the repository outside `docs`.

Pages link to other files by relative paths, which work on GitHub. For the site, each such file becomes a page below
`repository/`: Markdown as it is, source code as one block. The links then lead there, so the site needs no other host.
"""

import html
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = Path(__file__).parent / "docs"
# A block or code, which stays as it is, or the target of a link with its anchor.
LINK = re.compile(r"^ *```.*?^ *```$|``?[^`\n]+``?|(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}
LANGUAGES |= {".ipynb": "json"}
ADDED: dict[str, Path] = {}  # files outside of `docs` by their name in the site


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on GitHub."""
    config.mdx_configs["toc"]["slugify"] = make_anchor
    return config


def make_anchor(heading: str, separator: str) -> str:
    """Return the anchor of a heading in GitHub's form."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).lower()).replace(" ", separator)


def find_uri(path: Path) -> str:
    """Return the name in the site of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    own = path.relative_to(ROOT).as_posix().removeprefix(".")
    return f"repository/{own}" if path.suffix == ".md" else f"repository/{own}.md"


def list_targets(path: Path, text: str) -> list[Path]:
    """Return the files of the repository to which the Markdown file `path` links."""
    targets = [match[1] for match in LINK.finditer(text) if match[1]]
    return [Path(os.path.normpath(path.parent / target)) for target in targets]


def make_page(path: Path) -> str:
    """Return the Markdown of a file outside `docs`."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    return f"{head}````````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs` to which pages link, directly or through other such files."""
    waiting = [DOCS / file.src_uri for file in files if file.src_uri.endswith(".md")]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in list_targets(path, path.read_text()) if path.suffix == ".md" else ():
            if target in known or target.is_relative_to(DOCS) or not target.is_file():
                continue  # MkDocs reports a target that does not exist
            known.add(target)
            waiting.append(target)
            uri, level = find_uri(target), InclusionLevel.NOT_IN_NAV  # so that no warning says that it is missing there
            files.append(File.generated(config, uri, content=make_page(target), inclusion=level))
            ADDED[uri] = target
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of a page lead to the pages of the site."""
    path = ADDED.get(page.file.src_uri) or DOCS / page.file.src_uri
    here = PurePosixPath(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = Path(os.path.normpath(path.parent / match[1]))
        if not target.is_file():
            return match[0]
        return os.path.relpath(find_uri(target), here) + (match[2] or "")

    return LINK.sub(replace, markdown) if path.suffix == ".md" else markdown
