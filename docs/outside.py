"""A hook of MkDocs: on the site, a link to a file of the repository that is no page becomes the file's path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    folder = (_DOCS / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(_DOCS):
            return link[0]
        path = target.relative_to(_DOCS.parent).as_posix()
        return f"`{path}`" if path.endswith(link[1].strip("`")) else f"{link[1]} (`{path}`)"

    return _LINK.sub(replace, markdown)
