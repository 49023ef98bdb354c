"""A temporary Prometheus that scrapes one server by the rules of this folder; tests and draw.py use it."""

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
    """A Prometheus process that scrapes one server every second and deletes its folder when it ends."""

    def __init__(self, target: str) -> None:
        """Starts a Prometheus; `target` is the URL of the server to scrape."""
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
            entry = json.loads(line)
            if entry.get("msg") == "Listening on":
                self._url = f"http://{entry['address']}"
            if "ready to receive web requests" in entry.get("msg", ""):
                return self
        raise RuntimeError("prometheus did not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, path: str, **parameters: str | float) -> Any:
        """Returns the data of a reply of Prometheus's HTTP API.

        Raises:
            ValueError: the query is invalid.
        """
        try:
            with urllib.request.urlopen(
                f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=30
            ) as reply:
                return json.load(reply)["data"]
        except HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
