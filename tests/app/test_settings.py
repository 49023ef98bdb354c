"""Where a setting comes from, and how a wrong one is told."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app import settings as settings_module
from penstock.app.cli import _parse_settings, _Parser
from penstock.app.errors import OperatorError
from penstock.app.settings import EngineSettings, FrontSettings, Settings, default_text
from penstock.priority.lanes import DEFAULT_POLICIES, Lane

SOURCES = ("flag", "variable", "file")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("PENSTOCK_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "penstock.toml"
    path.write_text(text, encoding="utf-8")
    return path


@given(
    present=st.sets(st.sampled_from(SOURCES)),
    values=st.lists(st.integers(1, 10_000), min_size=3, max_size=3, unique=True),
)
def test_flags_go_over_variables_over_the_file_over_defaults(
    tmp_path_factory: pytest.TempPathFactory, present: set[str], values: list[int]
) -> None:
    value = dict(zip(SOURCES, values, strict=True))
    flags = {"max_batch_tokens": str(value["flag"])} if "flag" in present else {}
    with pytest.MonkeyPatch.context() as patch:
        if "variable" in present:
            patch.setenv("PENSTOCK_MAX_BATCH_TOKENS", str(value["variable"]))
        if "file" in present:
            path = write(tmp_path_factory.mktemp("config"), f"max_batch_tokens = {value['file']}\n")
            flags["config"] = str(path)
        settings = Settings.load(flags)
    default = Settings.model_fields["max_batch_tokens"].default
    assert settings.max_batch_tokens == next((value[s] for s in SOURCES if s in present), default)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(write(tmp_path, "port = 9001\n")))
    assert Settings.load({}).port == 9001


def test_every_field_has_a_description() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_lists_are_commas_in_text_and_lists_in_the_file(tmp_path: Path) -> None:
    from_text = Settings.load({"cors_origins": "http://a.example, http://b.example,"})
    path = write(tmp_path, 'cors_origins = ["http://a.example", "http://b.example"]\n')
    from_file = Settings.load({"config": str(path)})
    assert from_text.cors_origins == from_file.cors_origins == ("http://a.example", "http://b.example")


@pytest.mark.parametrize(
    ("flags", "beginning"),
    [
        ({"port": "99999"}, "--port: input should be less than or equal to 65535, not '99999'"),
        ({"quantize": "int3"}, "--quantize: input should be 'int8', 'int4', 'fp8' or 'nf4', not 'int3'"),
        (
            {"quantize": "int4", "quantize_group_size": "48"},
            "--quantize-group-size: must be 32, 64 or 128, not '48'",
        ),
        ({"quantize_group_size": "64"}, "quantize_group_size 64 needs quantize int8, int4 or nf4"),
        (
            {"quantize": "fp8", "quantize_group_size": "64"},
            "quantize_group_size 64 needs quantize int8, int4 or nf4",
        ),
        ({"kv_memory": "much"}, "--kv-memory: must be a size like 2GiB, not 'much'"),
        ({"lane_interactive": "ttft=-1"}, "--lane-interactive: ttft must be greater than 0, not -1.0"),
        ({"lane_batch": "kv_share=2"}, "--lane-batch: kv_share must be at most 1, not 2.0"),
        ({"lane_batch": "ttl=none"}, "--lane-batch: ttl must be finite, not 'ttl=none'"),
        ({"num_blocks": "9", "kv_memory": "1GiB"}, "num_blocks and kv_memory both"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, str], beginning: str) -> None:
    with pytest.raises(OperatorError) as caught:
        Settings.load(flags)
    assert str(caught.value).startswith(beginning)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(", not ") <= 1


def test_a_secret_has_16_characters_and_is_not_shown_when_wrong() -> None:
    assert Settings.load({"cluster_secret": "sixteen-letters."}).cluster_secret == "sixteen-letters."
    with pytest.raises(OperatorError, match=r"^--cluster-secret: string should have at least 16 characters$"):
        Settings.load({"cluster_secret": "fifteen-letters"})


def test_each_port_is_its_own() -> None:
    assert Settings.load({"port": "0", "metrics_port": "0"}).metrics_port == 0
    with pytest.raises(OperatorError, match=r"^metrics_port and port are both 81; give each its own$"):
        Settings.load({"port": "81", "metrics_port": "81"})


def test_a_lane_is_what_is_said_over_its_default() -> None:
    said = "ttft = none, weight=8,max_requests=7,max_tokens=none,tenant_share=0.4,"
    default = DEFAULT_POLICIES[Lane.STANDARD]
    bounds: dict[str, Any] = {"max_requests": 7, "max_tokens": inf, "tenant_share": 0.4}
    policy = replace(default, ttft_s=inf, weight=8, **bounds)
    settings = Settings.load({"lane_standard": said})
    assert settings.lanes == {**DEFAULT_POLICIES, Lane.STANDARD: policy}
    assert type(policy.weight) is type(settings.lane_standard.weight) is int
    assert type(settings.lane_standard.max_requests) is int
    assert Settings(lane_standard=policy) == settings
    assert Settings.load({"lane_standard": default_text(policy)}) == settings
    assert default_text(policy).startswith("ttft=none,tpot=0.2,weight=8,")


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("fast", "keys are ttft, "),
        ("speed=1", "keys are ttft, "),
        ("ttft=soon", "ttft must be a number or none"),
        ("ttft=nan", "ttft must be a number or none"),
    ],
)
def test_a_lane_that_is_none_is_told(said: str, fault: str) -> None:
    with pytest.raises(OperatorError, match=f"^--lane-batch: {fault}"):
        Settings.load({"lane_batch": said})
    with pytest.raises(OperatorError, match=r"^--lane-batch: must be like ttft=0.5,weight=8"):
        Settings.load({"lane_batch": 7})


@pytest.mark.parametrize(("cores", "most"), [(1, 4), (2, 8), (100, 400), (256, 1024), (1000, 1024)])
def test_there_are_at_most_a_few_threads_for_each_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, most: int
) -> None:
    monkeypatch.setattr(settings_module, "num_cores", lambda: cores)
    assert Settings.load({"threads": str(most)}).threads == most
    assert Settings.load({}).threads is None
    for threads in (most + 1, 1_000_000):
        wanted = f"^--threads: must be at most {most}: 4 for each of the {cores} cores .*, not '{threads}'$"
        with pytest.raises(OperatorError, match=wanted):
            Settings.load({"threads": str(threads)})


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "many")
    with pytest.raises(OperatorError, match=r"^PENSTOCK_MAX_NUM_SEQS: .*, not 'many'$"):
        Settings.load({})


def test_a_flag_hides_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:80")
    assert Settings.load({"port": "81"}).port == 81


def test_an_unknown_variable_is_named_with_what_may_have_been_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQ", "3")
    with pytest.raises(OperatorError, match=r"PENSTOCK_MAX_NUM_SEQ; did you mean PENSTOCK_MAX_NUM_SEQS\?"):
        Settings.load({})


@pytest.mark.parametrize("name", ["SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP_ADDR", "SERVICE_PORT_HTTP"])
def test_what_kubernetes_adds_is_nobody_s_mistake(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"PENSTOCK_{name}", "10.0.0.1")
    assert Settings.load({}).port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seqs = 0\n", "max_num_seqs in {path}: "),
        ("max_num_sequences = 4\n", "--config {path}: unknown key 'max_num_sequences'; did you mean"),
        ('config = "other.toml"\n', "--config {path}: unknown key 'config'"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(OperatorError) as caught:
        Settings.load({"config": str(path)})
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [["--no-cuda-graphs"], ["--no-cuda-graphs", "--port", "81"]])
def test_a_switch_takes_no_value(arguments: list[str]) -> None:
    flags = _parse_settings(_Parser(), arguments, Settings)
    assert flags["no_cuda_graphs"] == "true"
    assert Settings.load(flags).no_cuda_graphs
    assert not Settings.load(_parse_settings(_Parser(), [], Settings)).no_cuda_graphs


def test_a_value_behind_a_switch_is_refused() -> None:
    with pytest.raises(OperatorError, match="unknown argument false"):
        _parse_settings(_Parser(), ["--no-cuda-graphs", "false"], Settings)


def test_the_file_turns_a_switch_on_with_true(tmp_path: Path) -> None:
    assert Settings.load({"config": str(write(tmp_path, "no_cuda_graphs = true\n"))}).no_cuda_graphs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "penstock.toml"


def test_sources_are_mixed_setting_by_setting(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("port = 1\nthreads = 1\nmax_num_seqs = 1\n")
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
    "text",
    [
        b"port = 8000 8001",
        b"[serve\nport = 1",
        b"port: 8000",
        b"port = 1\nport = 2",
        b"\x00",
        b"host = '\xff'",
    ],
)
def test_a_file_that_is_not_toml_is_one_line(text: bytes, config: Path) -> None:
    config.write_bytes(text)
    with pytest.raises(OperatorError) as caught:
        Settings.load({"config": str(config)})
    assert str(caught.value).startswith(f"--config {config}: not TOML: ")
    assert "\n" not in str(caught.value)


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


def test_what_listens_and_what_computes_know_only_their_own_settings(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch and a program read the file and the variables of a server, and pass over what is not theirs."""
    config.write_text("num_blocks = 7\nport = 81\nwarm_up_tokens = 0\n")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "3")
    front, engine = FrontSettings.load({"config": str(config)}), EngineSettings.load({"config": str(config)})
    assert (front.port, engine.num_blocks, engine.max_num_seqs) == (81, 7, 3)
    assert not hasattr(front, "num_blocks")
    assert not hasattr(engine, "port")
