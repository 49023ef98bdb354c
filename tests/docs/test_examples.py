"""The examples of the documentation run as they are shown, against a real server with the demo model."""

from __future__ import annotations

import gc
import re
import subprocess

import pytest

from tests.docs.markdown import pages

BLOCKS = [(str(page), language, text) for page in pages() for language, text in page.blocks]
PYTHON = [(page, text) for page, language, text in BLOCKS if language == "python" and "\n...\n" not in text]
CURL = [(page, text) for page, _, text in BLOCKS if text.startswith("curl") and "/ID" not in text]
CLIENT = 'from openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")\n'


def addressed(example: str, url: str) -> str:
    return re.sub(r"(http://127\.0\.0\.1|(?<!/)localhost):8000", url, example)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # examples do not close their clients
@pytest.mark.parametrize(("page", "example"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python(live_server: str, page: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "client" in example and "client = " not in example:
        example = CLIENT + example
    exec(compile(addressed(example, live_server), page, "exec"), {})
    gc.collect()
    assert "print(" not in example or capsys.readouterr().out.strip()


@pytest.mark.parametrize(("page", "example"), CURL, ids=[page for page, _ in CURL])
def test_curl(live_server: str, page: str, example: str) -> None:  # noqa: ARG001
    command = addressed(example, live_server).replace("curl ", "curl --fail-with-body -sS --max-time 60 ", 1)
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"penstock-demo"' in ended.stdout
