"""The image, built and run: `make test ARGS=tests/deploy/image.py`, as root, in about a quarter of an hour.

No other run collects this file, for its name does not begin with `test_`. Instead of Docker, Buildah builds the CPU
target over a Debian made by debootstrap. The container is a chroot with namespaces of its own and with what compose and
Kubernetes give it: user, capabilities, a read-only root, volumes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.access.keys import digest_of
from tests import tools
from tests.deploy.files import COMPOSE, DOCKERFILE, ROOT

SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv,python-is-python3"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
USER = 10001
KEY = "penstock-a-key-of-the-test"
ASK = """
import json, urllib.request
body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
headers = {"content-type": "application/json", "authorization": "Bearer " + KEY}
request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


class Builder:
    """Buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._command = [
            tools.find("buildah"),
            "--root",
            str(folder / "storage"),
            "--runroot",
            str(folder / "run"),
        ]
        self._command += ["--storage-driver", "vfs"]
        self._env = os.environ | {"TMPDIR": str(folder)}

    def __call__(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._env, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Removed at once: it takes some gigabytes."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    faulthandler.cancel_dump_traceback_later()  # building takes longer than any other test may
    path = tmp_path_factory.mktemp("image")
    yield path
    shutil.rmtree(path)


def make_base(build: Builder, folder: Path, name: str) -> None:
    """Makes the image that the Dockerfile begins with, from Debian's packages."""
    root = folder / "base"
    subprocess.run(
        [tools.find("debootstrap"), "--variant=minbase", f"--include={PACKAGES}", SUITE, root],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    # Debian's pip refuses to install anything beside Debian's packages; python's own images have no such mark.
    for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        mark.unlink()
    shutil.copy(os.environ.get("SSL_CERT_FILE", CERTIFICATES), root / CERTIFICATES[1:])
    container = build("from", "scratch")
    build("add", container, root, "/")
    shutil.rmtree(root)
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SSL_CERT_FILE": CERTIFICATES,
    }
    variables |= {"PIP_CERT": CERTIFICATES, **({"UV_FIND_LINKS": str(wheels())} if wheels() else {})}
    for variable, value in variables.items():
        build("config", "--env", f"{variable}={value}", container)
    build("commit", "--rm", container, name)


def wheels() -> Path | None:
    """The folder of UV_FIND_LINKS or PIP_FIND_LINKS that has the image's torch as a wheel, if one has."""
    version = re.search(r"^ARG TORCH=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert version is not None
    named = os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", "")).split()
    pattern = f"torch-{version[1]}*-cp{PYTHON.replace('.', '')}-*.whl"
    return next((Path(one) for one in named if any(Path(one).glob(pattern))), None)


@pytest.fixture(scope="module")
def image(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The root of a container of the image, and the image's configuration."""
    build = Builder(folder)
    make_base(build, folder, f"docker.io/library/python:{PYTHON}-slim")
    text, mounts = DOCKERFILE.read_text(), []
    if (links := wheels()) is not None:
        # A backend sends uv to PyTorch's own index, whatever wheels there are.
        text = text.replace("ARG UV_TORCH_BACKEND=cpu", "ARG UV_TORCH_BACKEND")
        mounts = ["--volume", f"{links}:{links}:ro"]
    (folder / "Dockerfile").write_text(text)
    began_s = time.monotonic()
    options = [
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--pull-never",
        "--layers=false",
        "--format",
        "docker",
    ]
    options += ["--build-arg", f"PYTHON={PYTHON}", *mounts, "--file", str(folder / "Dockerfile")]
    build("build", *options, "--tag", "penstock", ROOT)
    size = json.loads(build("images", "--json", "penstock"))[0]["size"]
    print(f"built in {time.monotonic() - began_s:.0f} s, {size}")
    container = build("from", "--pull-never", "penstock")
    yield Path(build("mount", container)), json.loads(build("inspect", container))["Docker"]["config"]
    build("rm", container)


class Container:
    """A server in a mount and a network namespace."""

    def __init__(self, process: subprocess.Popen[str], env: Mapping[str, str]) -> None:
        self.process = process
        self._env = env

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program beside the server, as `docker exec` does."""
        enter = ["nsenter", f"--target={self.process.pid}", "--mount", "--net", "--root", "--wd"]
        return subprocess.run(
            [*enter, *as_user(self._env), *command], capture_output=True, text=True, check=False
        )

    def status(self, name: str) -> str:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        (value,) = re.findall(rf"^{name}:\s+(\S+)", text, re.MULTILINE)
        return str(value)


def as_user(env: Mapping[str, str]) -> list[str]:
    rights = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--clear-groups"]
    variables = [f"{name}={value}" for name, value in env.items()]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", *rights, "env", "-i", *variables]


@contextmanager
def started(
    root: Path, config: Mapping[str, Any], own: Mapping[str, str], volumes: Mapping[str, Path]
) -> Iterator[Container]:
    """Starts the image's command over a read-only root with these volumes, and waits until the server is ready."""
    env: dict[str, str] = {**dict(line.split("=", 1) for line in config["Env"]), **own}
    binds = {**{f"/{name}": Path(f"/{name}") for name in ("dev", "sys")}, **volumes}
    for place in binds:
        (root / place[1:]).mkdir(parents=True, exist_ok=True)
    script = [
        "set -e",
        "ip link set lo up",
        f"mount --bind -o ro {root} {root}",
        *(f"mount --rbind {source} {root}{place}" for place, source in binds.items()),
        f"mount -t tmpfs tmpfs {root}/tmp",
        f"mount -t proc proc {root}/proc",
        f'exec chroot {root} "$@"',
    ]
    command = ["unshare", "--mount", "--net", "sh", "-c", "\n".join(script), "sh", *as_user(env)]
    began_s = time.monotonic()
    process = subprocess.Popen(
        [*command, *config["Entrypoint"], *config["Cmd"]], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "ready in" in line:
                break
        else:
            pytest.fail("".join(said))
        print(f"ready {time.monotonic() - began_s:.1f} s after its start")
        yield Container(process, env)
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("manner", ["compose", "kubernetes"])
def test_the_image_serves_as_its_user_over_a_read_only_root(
    manner: str, image: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    root, config = image
    assert config["User"] == str(USER)
    cache, keys = folder / manner / "cache", folder / manner / "keys"
    for path in (cache, keys):
        path.mkdir(parents=True)
    if manner == "compose":  # a named volume begins as a copy of the image's folder
        own = yaml.safe_load(COMPOSE.read_text())["services"]["penstock"]["environment"]
        env = {name: value for name, value in own.items() if value and name != "PENSTOCK_REDIS_URL"}
        os.chown(cache, USER, USER)
    else:  # fsGroup
        (keys / "keys").write_text(f"alice:sha256:{digest_of(KEY).hex()}\n")
        env = {"PENSTOCK_API_KEYS_FILE": "/etc/penstock/keys", "PENSTOCK_DRAIN_TIMEOUT": "60"}
        os.chown(cache, 0, USER)
        cache.chmod(0o2775)
    with started(root, config, env, {"/cache": cache, "/etc/penstock": keys}) as container:
        assert [container.status(name) for name in ("Uid", "CapEff", "NoNewPrivs")] == [
            *(str(USER), "0" * 16, "1")
        ]
        assert "Read-only" in container.run("touch", "/home/penstock/x").stderr
        assert container.run("touch", "/cache/x", "/tmp/x").returncode == 0
        check = container.run(*config["Healthcheck"]["Test"][1:])
        assert check.returncode == 0, check.stderr
        url = "http://127.0.0.1:8000/v1/chat/completions"
        reply = container.run("python", "-c", f"KEY, URL = {KEY!r}, {url!r}\n{ASK}")
        assert reply.returncode == 0, reply.stderr
        answer = json.loads(reply.stdout)
        print(answer["choices"][0]["message"]["content"])
        assert answer["choices"][0]["message"]["content"]
        kernels = container.run("penstock", "kernels", "list")
        assert re.search(r"^\* .* prebuilt ", kernels.stdout, re.MULTILINE), kernels.stdout + kernels.stderr
    assert container.process.returncode == 0
