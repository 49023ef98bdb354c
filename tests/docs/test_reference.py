"""The reference pages say what the code says."""

from __future__ import annotations

import pytest

from docs.generate import FOLDER, pages
from penstock.app.settings import Settings


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "http.md", "metrics.md"])
def test_the_page_is_what_the_code_makes_it(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == pages()[name], f"docs/reference/{name} is out of date: run `python -m docs.generate`"


def test_the_pages_say_all_settings_and_commands_and_no_other_page_is_there() -> None:
    made = pages()
    assert {path.name for path in FOLDER.iterdir()} == made.keys()
    assert made["settings.md"].count("<br>`PENSTOCK_") == len(Settings.model_fields)
    assert "### cluster deploy" in made["commands.md"]
