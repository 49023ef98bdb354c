"""A Prometheus of one's own that scrapes one server, with our rules; for testing and drawing what it is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit

RULES = Path(__file__).with_name("prometheus") / "alerts.yml"


class Prometheus:
    """Scrapes `target` every second, from a folder of its own that is gone afterwards."""

    def __init__(self, target: str) -> None:
        """`target` is the URL of a server."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-prometheus-"))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "penstock", "static_configs": [{"targets": [urlsplit(target).netloc]}]}
            ],
        }
        path = self._folder / "prometheus.yml"
        path.write_text(json.dumps(config), encoding="utf-8")  # which is YAML, too
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._url = ""

    def __enter__(self) -> Prometheus:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            told = json.loads(line)
            if told.get("msg") == "Listening on":
                self._url = f"http://{told['address']}"
            if "ready to receive web requests" in told.get("msg", ""):
                return self
        raise RuntimeError("prometheus did not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer of its API.

        Raises:
            ValueError: what was asked is no valid query.
        """
        try:
            with urllib.request.urlopen(
                f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=30
            ) as reply:
                return json.load(reply)["data"]
        except HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
