"""The Markdown of the repository, and what stands in it: links, headings, blocks of code, words in backticks."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|(?<=\n\n))(?: {4}.*\n)+")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def tracked() -> frozenset[Path]:
    """All files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    return frozenset(path for name in listed if name and (path := ROOT / name).is_file())


@cache
def pages() -> tuple[Page, ...]:
    return tuple(Page(path) for path in sorted(tracked()) if path.suffix == ".md")


@dataclass(frozen=True)
class Page:
    path: Path

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each block of code."""
        fenced = [(language, text) for _, language, text in _FENCE.findall(self.text)]
        return fenced + [("", text) for text in _INDENTED.findall(_FENCE.sub("", self.text))]

    @cached_property
    def prose(self) -> str:
        """The text without blocks of code."""
        return _INDENTED.sub("", _FENCE.sub("", self.text))

    @cached_property
    def spans(self) -> list[str]:
        """Returns the texts in backticks that stand on one line."""
        return [" ".join(span.split()) for span in _SPAN.findall(self.prose)]

    @cached_property
    def links(self) -> list[str]:
        return _LINK.findall(_SPAN.sub("", self.prose))

    @cached_property
    def anchors(self) -> set[str]:
        """Returns the anchors of the headings, as GitHub makes them."""
        titles = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
