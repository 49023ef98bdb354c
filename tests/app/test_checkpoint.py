"""Where a model is looked for, what has to be there, and what clients will call it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from penstock.app import checkpoint, cli
from penstock.app.build import system_fingerprint
from penstock.app.checkpoint import (
    DEMO_DRAFT,
    DEMO_MODEL,
    DEMO_NAME,
    check_files,
    created,
    find_checkpoint,
    find_draft,
    fingerprint,
    is_hub_id,
    model_name,
)
from penstock.app.errors import OperatorError, TransientError
from penstock.app.settings import Settings
from penstock.engine.text.watermark import Watermark
from tests.engine import checkpoints
from tests.engine.gguf_files import same, write_gguf

FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, for names that are relative to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network behind it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cache_snapshot(cache: Path, owner: str, name: str) -> Path:
    """Makes the snapshot that an earlier download leaves in the cache."""
    repository = cache / f"models--{owner}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    return make_checkpoint(repository / "snapshots" / "c0ffee")


def test_without_a_model_it_is_the_demo_model() -> None:
    assert find_checkpoint(None) == DEMO_MODEL
    assert model_name(None, None) == DEMO_NAME


@pytest.mark.parametrize("name", ["penstock-demo", "demo"])
def test_the_demo_model_may_be_asked_for_by_name(here: Path, name: str) -> None:
    assert Settings.load({"model": name}).model is None
    make_checkpoint(here / name)
    assert Settings.load({"model": name}).model == name, "a folder goes before it"


@pytest.mark.parametrize("model", ["models/tiny", "./models/tiny", "models/tiny/", "models/../models/tiny"])
def test_a_directory_may_be_named_in_any_way(here: Path, model: str) -> None:
    folder = make_checkpoint(here / "models" / "tiny")
    assert find_checkpoint(model).resolve() == folder.resolve()
    assert model_name(model, None) == "tiny"


def test_a_directory_of_the_home_may_begin_with_a_tilde(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    folder = make_checkpoint(here / "tiny")
    assert find_checkpoint("~/tiny") == folder
    assert model_name("~/tiny", None) == "tiny"


def test_the_directory_that_one_is_in_has_its_own_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_checkpoint(here / "tiny"))
    assert find_checkpoint(".") == Path()
    assert model_name(".", None) == "tiny"


def test_a_link_is_called_what_it_leads_to(here: Path) -> None:
    make_checkpoint(here / "tiny-v2")
    (here / "current").symlink_to(here / "tiny-v2")
    assert find_checkpoint("./current") == Path("current")
    assert model_name("./current", None) == "tiny-v2"


@pytest.mark.parametrize("model", [None, "./tiny", "somebody/something"])
def test_a_served_name_goes_over_any_other(model: str | None) -> None:
    assert model_name(model, "ours") == "ours"


@pytest.mark.parametrize("model", ["somebody/something", "Some-body/some.thing_v1.5-8B", "0x/1"])
def test_an_owner_and_a_name_are_of_the_hub(here: Path, model: str) -> None:
    assert not list(here.iterdir())
    assert is_hub_id(model)
    assert model_name(model, None) == model


@pytest.mark.parametrize(
    "model", ["tiny", "./a/b", "../b", "/a/b", "a/b/c", "a/", "/a", "~/b", "a//b", "-a/b", "a b/c", ""]
)
def test_anything_else_is_a_directory(here: Path, model: str) -> None:
    assert here.is_dir()
    assert not is_hub_id(model)


def test_a_directory_goes_over_the_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    make_checkpoint(here / "somebody" / "something")
    assert find_checkpoint("somebody/something") == Path("somebody/something")
    assert model_name("somebody/something", None) == "something"


def test_a_model_fetched_before_needs_no_network(here: Path, hub_cache: Path) -> None:
    folder = cache_snapshot(hub_cache, "somebody", "something")
    assert not (here / "somebody").exists()
    assert find_checkpoint("somebody/something") == folder
    assert model_name("somebody/something", None) == "somebody/something"


def test_half_a_model_in_the_cache_is_told(hub_cache: Path) -> None:
    (cache_snapshot(hub_cache, "somebody", "something") / "tokenizer.json").unlink()
    with pytest.raises(OperatorError, match=r"^--model somebody/something: .* has no tokenizer\.json$"):
        find_checkpoint("somebody/something")


def test_a_model_that_is_nowhere_is_told_with_its_name(hub_cache: Path) -> None:
    assert not hub_cache.exists()
    with pytest.raises(
        OperatorError, match=r"^--model somebody/something: no such directory, and the hub says"
    ):
        find_checkpoint("somebody/something")


def test_weights_are_fetched_once_and_nothing_that_is_not_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some repositories hold their weights twice, in formats of their own: gigabytes that nobody would read."""
    asked: list[list[str]] = []
    folder = make_checkpoint(here / "fetched")

    def download(hub_id: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (hub_id, revision) == ("somebody/something", "v1")
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("somebody/something", "v1") == folder
    offered = {
        "config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf",
    }  # fmt: skip
    fetched = {name for name in offered for pattern in asked[0] if Path(name).match(pattern)}
    assert offered - fetched == {"pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf"}
    assert len(asked) == 1
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    assert find_checkpoint("somebody/something", "v1") == folder
    assert asked[1:] == [asked[0], [*asked[0], "consolidated.safetensors"]]


@pytest.mark.parametrize(
    "typed",
    [
        "serve --port 0 --model some/model --revision v1",
        "serve --port 0 --draft some/model --draft-revision v1",
        "switch --port 0 --model some/model --revision v1 http://127.0.0.1:1 --cluster-secret=sixteen-characters",
        "quantize some/model out --revision v1",
        "doctor some/model --revision v1",
    ],
)
def test_every_command_fetches_the_revision_that_it_was_told(
    typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def download(hub_id: str, *, revision: str | None = None, **_: object) -> str:
        asked.append((hub_id, revision))
        raise LocalEntryNotFoundError("no net")

    for name in ("snapshot_download", "get_safetensors_metadata"):
        monkeypatch.setattr(huggingface_hub, name, download)
    assert cli.main(typed.split()) in (cli.EXIT_TRANSIENT, cli.EXIT_USAGE)
    assert set(asked) == {("some/model", "v1")}


def test_libraries_tell_nobody_that_they_are_used() -> None:
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY


def hub_error(status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("the hub's words", response=response)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError("disk full"), True),
        (LocalEntryNotFoundError("no net"), True),
        (hub_error(503), True),
        (hub_error(429), True),
        (hub_error(404), False),
        (hub_error(401), False),
    ],
    ids=repr,
)
def test_whatever_the_hub_says_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, may_pass: bool
) -> None:
    """A supervisor starts the server again unless the hub refused what was asked for."""

    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OperatorError) as caught:
        find_checkpoint("somebody/something")
    assert str(caught.value).endswith(str(error))
    assert isinstance(caught.value, TransientError) is may_pass


@pytest.mark.parametrize("missing", FILES)
def test_a_checkpoint_without_a_file_is_none(tmp_path: Path, missing: str) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / missing).unlink()
    with pytest.raises(
        OperatorError, match=f"{folder} is no checkpoint, it has no .*{Path(missing).suffix}$"
    ):
        check_files(folder, "--model tiny")


def test_a_family_that_is_not_served_is_named_before_a_missing_tokenizer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(
        OperatorError, match=r"^.*config\.json: architecture NoSuchForCausalLM is not supported"
    ):
        check_files(folder, "--model tiny")


def test_a_checkpoint_is_a_directory_or_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=f"^--model {tmp_path}/tiny: there is no directory"):
        find_checkpoint(str(tmp_path / "tiny"))
    (tmp_path / "tiny").write_text("a file")
    with pytest.raises(OperatorError, match=f"^--model {tmp_path}/tiny: a model is a directory, or .*gguf"):
        find_checkpoint(str(tmp_path / "tiny"))


def told(*arguments: str | None, **options: Any) -> str:
    """Why there is no checkpoint."""
    with pytest.raises(OperatorError) as caught:
        find_checkpoint(*arguments, **options)
    return str(caught.value)


def test_a_gguf_file_is_found_and_called_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "tiny.v1.gguf"
    assert told(str(path)) == f"--model {path}: there is no file {path}"
    path.touch()
    assert find_checkpoint(str(path)) == path
    assert model_name(str(path), None) == "tiny.v1"
    assert model_name(str(tmp_path / "tiny.v1"), None) == "tiny.v1"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "other.gguf").touch()
    assert told(str(folder)) == (
        f"--model {folder}: {folder} is no checkpoint, it has no config.json; "
        f"--model {folder / 'other.gguf'} serves the file"
    )
    folder.rename(tmp_path / "folder.gguf")
    assert told(f"{folder}.gguf").startswith(f"--model {folder}.gguf: {folder}.gguf is no checkpoint")


def test_only_the_hub_has_revisions() -> None:
    assert told(None, "v1") == "--revision v1: the demo model is not on the hub, and has no revisions"
    assert told("./x", "v1") == "--revision v1: ./x is not on the hub, and has no revisions"
    said = "--draft-revision v1: ./x is not on the hub, and has no revisions"
    assert told("./x", "v1", argument="--draft") == said
    for draft in (None, "none"):
        with pytest.raises(OperatorError, match=r"^--draft-revision v1: the draft is not on the hub"):
            find_draft(draft, "v1", None)


def test_the_demo_model_has_a_draft_and_others_have_what_is_named(here: Path) -> None:
    assert find_draft(None, None, None) == DEMO_DRAFT
    assert find_draft("none", None, None) is None
    assert find_draft(None, None, "./tiny") is None
    head = make_checkpoint(here / "head")
    (head / "tokenizer.json").unlink()
    assert find_draft(str(head), None, None) == head
    (head / "model.safetensors").unlink()
    with pytest.raises(OperatorError, match=f"^--draft {head}: {head} is no checkpoint"):
        find_draft(str(head), None, None)


def test_the_fingerprint_is_that_of_config_tokenizer_and_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "other.txt").write_text("")
    found = [fingerprint(folder)]
    assert len(found[0]) == 8
    (folder / "other.txt").write_text("changed")
    assert fingerprint(folder) == found[0]
    others = ("model.safetensors", "[ ]"), ("model.safetensors", "{ }")
    for name, text in (("config.json", "[]"), ("tokenizer.json", "[]"), *others):
        (folder / name).write_text(text)
        found.append(fingerprint(folder))
    assert len(set(found)) == 5
    os.utime(folder / "config.json", (7, 7))
    os.utime(folder, (8, 8))
    assert created(folder) == 7


def test_a_fingerprint_reads_pieces_of_large_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_SAMPLED_BYTES", 1 << 16)
    folder, weights = make_checkpoint(tmp_path / "tiny"), bytearray(1 << 20)
    read, pread, found = list[int](), os.pread, set[str]()

    def counted(descriptor: int, size: int, start: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", counted)
    for changed in (slice(1 << 20), slice(1 << 19, 3 << 18), slice(3 << 18, 1 << 20)):
        weights[changed] = b"1" * len(weights[changed])
        (folder / "model.safetensors").write_bytes(weights)
        found.add(fingerprint(folder))
        weights[changed] = b"2" * len(weights[changed])
    assert len(found) == 3
    assert sum(read) // 3 <= 1 << 16


def test_the_fingerprint_of_a_gguf_file_is_that_of_its_header_and_weights(tmp_path: Path) -> None:
    folder = checkpoints.make_checkpoint("llama", tmp_path / "tiny")
    path = write_gguf(folder, tmp_path / "tiny.gguf", same("F16"))
    found, data = fingerprint(path), path.read_bytes()
    os.utime(path, (7, 7))
    assert created(path) == 7
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fingerprint(path) != found
    path.write_bytes(data.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mOdel", 1))
    assert fingerprint(path) != found


def test_replies_name_the_weights_and_the_types_they_are_computed_in() -> None:
    settings, other = (
        Settings(),
        [
            Settings(dtype="bfloat16"),
            Settings(quantize="int8"),
            Settings(kv_dtype="int8"),
        ],
    )
    names = [system_fingerprint(one, fingerprint(DEMO_MODEL)) for one in (settings, *other)]
    assert len(set(names)) == len(names)
    assert system_fingerprint(Settings(), fingerprint(DEMO_MODEL)) == names[0]
    assert system_fingerprint(Settings(max_num_seqs=7), fingerprint(DEMO_MODEL)) == names[0]
    assert system_fingerprint(settings, fingerprint(DEMO_DRAFT)) != names[0]
    marked = [
        system_fingerprint(settings, fingerprint(DEMO_MODEL), Watermark(key=key, delta=delta))
        for key, delta in ((1, 2.0), (2, 2.0), (1, 3.0))
    ]
    assert marked[0] == marked[1], "a key is nobody's to guess by it"
    assert len({names[0], *marked}) == 3
