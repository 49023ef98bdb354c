"""Every setting can be a flag, a variable or a key of the file, in this order; the units and the file's own rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.errors import OperatorError
from app.settings import Settings, flag

SETTINGS = sorted(set(Settings.model_fields) - {"config"})
ANY_TEXT = {
    "draft",
    "model",
    "served_model_name",
    "host",
    "api_keys_file",
    "allowed_hosts",
    "cors_origins",
    "redis_url",
    "replica",
    "cluster_secret",
}
"""Settings of which any text may be a value."""

# For each setting three values that differ from its default: as text for a flag, a variable and a key of the file.
VALUES: dict[str, tuple[str, str, str]] = {
    "model": ("one", "two", "three"),
    "served_model_name": ("one", "two", "three"),
    "host": ("::1", "0.0.0.0", "localhost"),
    "port": ("0", "1", "65535"),
    "api_keys_file": ("/one", "/two", "/three"),
    "allowed_hosts": ("one.example", "two.example", "three.example"),
    "cors_origins": ("http://one", "http://two", "http://three"),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_dtype": ("float32", "int8", "float16"),
    "quantize": ("int8", "int4", "int8"),
    "quantize_group_size": ("32", "64", "128"),
    "no_quantize_cache": ("true", "true", "true"),
    "device": ("cpu", "cuda", "cpu"),
    "threads": ("1", "2", "3"),
    "tensor_parallel": ("2", "3", "4"),
    "max_model_len": ("1", "2", "3"),
    "max_batch_tokens": ("1", "2", "3"),
    "max_num_seqs": ("1", "2", "3"),
    "lane_interactive": ("ttft=3", "ttft=2,weight=3", "kv_share=0.5"),
    "lane_standard": ("ttft=1", "ttft=2", "ttl=5"),
    "lane_batch": ("weight=3", "weight=2", "max_requests=3"),
    "num_blocks": ("2", "3", "4"),
    "kv_memory": ("1MiB", "2MiB", "3MiB"),
    "redis_url": ("redis://one", "redis://two/1", "unix:///three"),
    "replica": ("one", "two", "three"),
    "cluster_secret": ("one-that-is-long-enough", "two-that-is-long-enough", "three-that-is-long-enough"),
    "warm_up_tokens": ("0", "1", "2"),
    "gpu_memory_utilization": ("0.5", "0.75", "1"),
    "no_cuda_graphs": ("true", "true", "true"),
    "no_speculation": ("true", "true", "true"),
    "draft": ("none", "some/draft", "none"),
    "drain_timeout": ("0", "0.5", "600"),
    "metrics_port": ("0", "1024", "65535"),
    "metrics_compat": ("vllm", "vllm", "vllm"),
    "log_level": ("debug", "warning", "error"),
    "log_format": ("json", "json", "json"),
    "otlp_endpoint": ("http://a:4318", "https://b", "http://c"),
    "access_log": ("true", "true", "true"),
    "tool_parser": ("none", "hermes", "mistral"),
    "reasoning_parser": ("none", "think", "mistral"),
    "strict": ("true", "true", "true"),
}


NEEDED = {"quantize_group_size": ("PENSTOCK_QUANTIZE", "int8")}
"""The variable without which a setting is refused."""


@pytest.fixture(autouse=True)
def _only_needed_variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    params = getattr(request.node, "callspec", None)
    if params is not None and (needed := NEEDED.get(params.params.get("name", ""))):
        monkeypatch.setenv(*needed)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "penstock.toml"


def toml(values: Mapping[str, str]) -> str:
    """Text as TOML writes it: numbers bare, everything else quoted."""
    return "".join(
        f"{key} = {value}\n" if value.replace(".", "").isdigit() else f'{key} = "{value}"\n'
        for key, value in values.items()
    )


def value_of(name: str, text: str) -> Any:
    """What a setting is worth when this text is all that was said."""
    return getattr(Settings.load({name: text}), name)


def test_the_table_has_every_setting() -> None:
    assert sorted(VALUES) == SETTINGS


@pytest.mark.parametrize("name", SETTINGS)
def test_no_value_of_the_table_is_the_default(name: str) -> None:
    default = getattr(Settings.load({}), name)
    assert default == Settings.model_fields[name].default
    assert all(value_of(name, text) != default for text in VALUES[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_each_source_alone_gives_the_setting(
    name: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = VALUES[name][0]
    wanted = value_of(name, text)
    config.write_text(toml({name: text}))
    assert getattr(Settings.load({"config": str(config)}), name) == wanted
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", text)
    assert getattr(Settings.load({}), name) == wanted


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_goes_over_a_variable_over_the_file(
    name: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_flag, by_variable, by_file = VALUES[name]
    wanted = [value_of(name, text) for text in VALUES[name]]
    config.write_text(toml({name: by_file}))
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", by_variable)
    with_flag = getattr(Settings.load({"config": str(config), name: by_flag}), name)
    without_flag = getattr(Settings.load({"config": str(config)}), name)
    monkeypatch.delenv(f"PENSTOCK_{name.upper()}")
    assert [with_flag, without_flag, getattr(Settings.load({"config": str(config)}), name)] == wanted


def test_sources_are_mixed_setting_by_setting(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(toml({"port": "1", "threads": "1", "max_num_seqs": "1"}))
    monkeypatch.setenv("PENSTOCK_THREADS", "2")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "2")
    settings = Settings.load({"config": str(config), "max_num_seqs": "3"})
    assert (settings.port, settings.threads, settings.max_num_seqs) == (1, 2, 3)
    assert settings.max_batch_tokens == Settings.model_fields["max_batch_tokens"].default


def test_the_file_named_by_a_flag_is_read_in_place_of_the_variable_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_by_flag, named_by_variable = tmp_path / "flag.toml", tmp_path / "variable.toml"
    named_by_flag.write_text("port = 1\n")
    named_by_variable.write_text("port = 2\nthreads = 2\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(named_by_variable))
    settings = Settings.load({"config": str(named_by_flag)})
    assert (settings.port, settings.threads) == (1, None)


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - ANY_TEXT))
def test_variables_are_told_apart_from_flags_when_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match=f"^{flag(name)}: "):
        Settings.load({name: "wrong!"})
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", "wrong!")
    with pytest.raises(OperatorError, match=f"^PENSTOCK_{name.upper()}: .*'wrong!'$"):
        Settings.load({})


def test_a_secret_is_not_shown_when_wrong() -> None:
    with pytest.raises(OperatorError, match=r"^--cluster-secret: [^']*$"):
        Settings.load({"cluster_secret": "too-short"})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("4GB", 4 * 10**9),
        ("4096", 4096),
    ],
)
def test_memory_is_told_in_the_units_people_write(text: str, num_bytes: int, config: Path) -> None:
    assert Settings.load({"kv_memory": text}).kv_memory == num_bytes
    config.write_text(f'kv_memory = "{text}"\n')
    assert Settings.load({"config": str(config)}).kv_memory == num_bytes


@pytest.mark.parametrize("text", ["4 gibibytes", "GiB", "", "4GiB4", "--"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OperatorError, match=r"^--kv-memory: "):
        Settings.load({"kv_memory": text})


@pytest.mark.parametrize(
    "text", ["port = 8000 8001", "[serve\nport = 1", "port: 8000", "port = 1\nport = 2", "\x00"]
)
def test_a_file_that_is_not_toml_is_one_line(text: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(OperatorError) as caught:
        Settings.load({"config": str(config)})
    assert str(caught.value).startswith(f"--config {config}: not TOML: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf_8_is_one_line(config: Path) -> None:
    config.write_bytes(b"host = '\xff'\n")
    with pytest.raises(OperatorError, match="not TOML"):
        Settings.load({"config": str(config)})


@pytest.mark.parametrize("key", ["max-num-seqs", "MAX_NUM_SEQS", "PENSTOCK_MAX_NUM_SEQS", "serve"])
def test_keys_of_the_file_are_spelt_one_way(key: str, config: Path) -> None:
    config.write_text(f"{key} = 4\n")
    with pytest.raises(OperatorError, match=f"^--config {config}: unknown key '{key}'"):
        Settings.load({"config": str(config)})


def test_a_wrong_key_is_told_although_a_flag_hides_it(config: Path) -> None:
    """A file is right or wrong as a whole: what is misspelt there today is missed by somebody tomorrow."""
    config.write_text("prot = 1\n")
    with pytest.raises(OperatorError, match=r"unknown key 'prot'; did you mean port\?"):
        Settings.load({"config": str(config), "port": "2"})


def test_settings_do_not_change_once_read() -> None:
    settings = Settings.load({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
