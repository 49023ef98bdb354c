"""The image: a linter passes it, its build is sent what a wheel needs, and the lock fits pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from penstock.app.settings import ENV_PREFIX, Settings
from tests.deploy.files import COMPOSE, DOCKERFILE, KUBERNETES, ROOT

LOCK = ROOT / "requirements.lock"
PIN = re.compile(
    r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)((?:    #.*\n)*)", re.MULTILINE
)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def wanted() -> dict[str, Requirement]:
    """Returns the requirements that pyproject.toml has for the server and for traces."""
    project = pyproject()["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["otel"]
    return {one.name: one for one in map(Requirement, lines)}


def stages() -> dict[str, str]:
    """The text of each stage, by its name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not built for this machine")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_targets_are_what_their_names_say() -> None:
    """The last stage is what a build without --target makes."""
    assert list(stages())[-1] == "cpu"
    for target, other in (("cpu", "cuda"), ("cuda", "cpu")):
        assert f"--from=packages-{target} " in stages()[target]
        assert f"packages-{other}" not in stages()[target]
        assert "\nUSER 10001\n" in stages()[target]
    assert re.findall("^ARG (.*)$", stages()["packages-cpu"], re.MULTILINE) == [
        "TORCH",
        "UV_TORCH_BACKEND=cpu",
    ]
    assert re.findall("^ARG (.*)$", stages()["packages-cuda"], re.MULTILINE) == ["TORCH", "UV_TORCH_BACKEND"]


def test_the_build_is_sent_what_a_wheel_is_made_of_and_nothing_else() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    wheel = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    linked = {path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()}
    others = {"pyproject.toml", "hatch_build.py", "requirements.lock", "README.md", "LICENSE"}
    assert sent == others | set(wheel) | linked
    assert [name for name in sent if not (ROOT / name).exists()] == []


def test_the_lock_pins_what_is_wanted_with_hashes() -> None:
    text = LOCK.read_text()
    own, pins = wanted(), {name: version for name, version, *_ in PIN.findall(text)}
    assert len(pins) == len(re.findall(r"^[^#\s]", text, re.MULTILINE)) > 40, (
        "a line that is no pin with hashes"
    )
    torch = own.pop("torch")
    assert own.keys() <= pins.keys()
    assert "torch" not in pins
    assert [name for name, one in own.items() if not one.specifier.contains(pins[name])] == []
    assert "nvidia" not in text
    version = re.search(r"^ARG TORCH=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert version is not None
    assert torch.specifier.contains(version[1])


def test_the_lock_was_made_from_these_dependencies() -> None:
    own = {name for name, _, _, why in PIN.findall(LOCK.read_text()) if "penstock (pyproject.toml)" in why}
    assert own == wanted().keys() - {"torch"}, "run the command at the top of requirements.lock"


@pytest.mark.parametrize(
    "path", [DOCKERFILE, COMPOSE, *KUBERNETES.rglob("*.yaml")], ids=lambda path: path.name
)
def test_variables_are_settings(path: Any) -> None:
    known = {(ENV_PREFIX + name).upper() for name in Settings.model_fields}
    assert set(re.findall(r"\bPENSTOCK_[A-Z_]+", path.read_text())) - known == set()


def test_what_compose_mounts_and_builds_is_there_and_only_this_machine_reaches_it() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert "build" not in service or service["build"]["target"] in stages()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    penstock = compose["services"]["penstock"]
    drain_s = float(penstock["environment"]["PENSTOCK_DRAIN_TIMEOUT"])
    assert drain_s < float(penstock["stop_grace_period"].removesuffix("s"))
    assert "XDG_CACHE_HOME=/cache " in stages()["base"]
    assert penstock["volumes"] == ["cache:/cache"]
