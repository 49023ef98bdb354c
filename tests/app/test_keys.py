"""The file of API keys, the command that makes its lines, and what happens when it changes."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.cli import main
from penstock.app.errors import OperatorError
from penstock.app.keys import KeyFile, weights_of
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Lane, Tenant

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def line(name: str, key: str, attributes: str = "") -> str:
    return f"{name}:sha256:{digest_of(key).hex()} {attributes}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def put(path: Path, text: str) -> None:
    """In one go, so that no half of it is ever read."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.rename(path)


def read(folder: Path, text: str) -> dict[bytes, Client]:
    return KeyFile(write(folder, text)).read()


# The file


@pytest.mark.parametrize(
    ("attributes", "default", "top"),
    [
        ("", None, Lane.INTERACTIVE),
        ("lane=auto", None, Lane.INTERACTIVE),
        ("lane=auto top=standard", None, Lane.STANDARD),
        ("lane=interactive", Lane.INTERACTIVE, Lane.INTERACTIVE),
        ("lane=standard", Lane.STANDARD, Lane.INTERACTIVE),
        ("lane=batch top=standard", Lane.BATCH, Lane.STANDARD),
        ("top=batch", None, Lane.BATCH),
    ],
)
def test_a_line_fixes_the_lane_and_lowers_what_can_be_reached(
    tmp_path: Path, attributes: str, default: Lane | None, top: Lane
) -> None:
    [client] = read(tmp_path, line("a", ALICE, attributes)).values()
    assert (client.tenant.default_lane, client.tenant.top_lane) == (default, top)


def test_a_key_has_a_tenant(tmp_path: Path) -> None:
    digest = digest_of(BOB).hex().upper()
    clients = read(tmp_path, f"# ours\n{line('alice', ALICE)}\n\n  bob : sha256: {digest}  \n")
    assert clients == {
        digest_of(ALICE): Client(Tenant(name="alice")),
        digest_of(BOB): Client(Tenant(name="bob")),
    }


def test_a_tenant_can_have_several_keys(tmp_path: Path) -> None:
    clients = read(tmp_path, line("a", ALICE, "rpm=6 weight=2") + line("a", BOB, "weight=2 rpm=6"))
    assert len(clients) == 2
    assert set(clients.values()) == {Client(Tenant(name="a", weight=2), Quota(requests_per_minute=6))}
    assert weights_of(clients.values()) == {"a": 2}


@pytest.mark.parametrize(
    "attributes", ["weight=2", "lane=batch", "top=batch", "rpm=1", "tpm=1", "streams=1", "role=operator"]
)
def test_the_keys_of_a_tenant_say_the_same_of_it(tmp_path: Path, attributes: str) -> None:
    with pytest.raises(OperatorError, match="line 3: says otherwise of a than line 1"):
        read(tmp_path, f"{line('a', ALICE)}\n{line('a', BOB, attributes)}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key in it"),
        ("# only words\n", "no key in it"),
        (line("a", ALICE) + "b:short\n", "line 2: not"),
        (f":{ALICE}\n", "line 1: not"),
        (f"{ALICE}\n", "line 1: not"),
        (f"a:{ALICE}\n", "line 1: not"),
        (f"a:{ALICE} weight=2\n", "line 1: not"),
        (f"a:sha256:{ALICE}\n", "line 1: not"),
        (f"a:sha512:{'0' * 64}\n", "line 1: not"),
        (f"a:sha256:{'0' * 63}\n", "line 1: not"),
        (f"a:sha256:{'0' * 65}\n", "line 1: not"),
        (f"sha256:{'0' * 64}\n", "line 1: not"),
        (f"a:b:sha256:{'0' * 64}\n", "line 1: not"),
        ("a:with some spaces in it 0123\n", "line 1: not"),
        (line("a", ALICE, ALICE), "line 1: after the key"),
        (line("a", ALICE) + line("b", ALICE), "line 2: another tenant"),
    ],
)
def test_what_is_wrong_is_named_and_the_key_is_not_repeated(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(OperatorError, match=message) as caught:
        KeyFile(path).read()
    assert str(path) in str(caught.value)
    assert ALICE not in str(caught.value)
    assert "0" * 63 not in str(caught.value)


def test_who_has_a_plain_key_in_it_is_told_what_makes_the_line(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"`penstock key NAME --hash` makes that line from a key"):
        read(tmp_path, f"alice:{ALICE}\n")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"--api-keys-file .*/keys: No such file"):
        KeyFile(tmp_path / "keys").read()


def test_a_key_says_what_its_tenant_is_entitled_to(tmp_path: Path) -> None:
    [client] = read(tmp_path, line("night", ALICE, "weight=3 top=batch")).values()
    assert client == Client(Tenant(name="night", weight=3, top_lane=Lane.BATCH))
    [client] = read(tmp_path, line("day", ALICE, "lane=interactive")).values()
    assert client == Client(Tenant(name="day", default_lane=Lane.INTERACTIVE))
    [client] = read(tmp_path, line("day", ALICE, "rpm=60 tpm=100000 streams=8")).values()
    quota = Quota(requests_per_minute=60, tokens_per_minute=100_000, max_streams=8)
    assert client == Client(Tenant(name="day"), quota)
    [client] = read(tmp_path, line("day", ALICE, "rpd=1 tpd=2 rpmonth=3 tpmonth=1000000000000")).values()
    quota = Quota(requests_per_day=1, tokens_per_day=2, requests_per_month=3, tokens_per_month=10**12)
    assert client == Client(Tenant(name="day"), quota)
    [client] = read(tmp_path, line("day", ALICE, "role=operator")).values()
    assert client == Client(Tenant(name="day"), is_operator=True)
    [client] = read(tmp_path, line("day", ALICE, "role=tenant")).values()
    assert client == Client(Tenant(name="day"))


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ("weight=0", "weight must be greater than 0"),
        ("weight=-1", "weight must be greater than 0"),
        ("weight=heavy", "weight must be a whole number"),
        ("weight=²", "weight must be a whole number"),
        ("lane=fast", "there is no lane 'fast'"),
        ("lane=interactive top=batch", "default_lane interactive is above top_lane batch"),
        ("colour=red", "rpm=, tpm=, rpd=, tpd=, rpmonth=, tpmonth=, streams= and role="),
        ("role=root", "role must be tenant or operator, not 'root'"),
        ("tpd=1000000000001", "tpd must be 1 to 1000000000000"),
        ("rpm", "rpm must be a whole number, not ''"),
        ("rpm=1.5", "rpm must be a whole number"),
        ("rpm=0", "rpm must be 1 to 1000000000, not 0"),
        ("tpm=-5", "tpm must be 1 to 1000000000, not -5"),
        ("streams=1000000001", "streams must be 1 to 1000000000"),
        ("rpm=1 rpm=1", "rpm stands there twice"),
    ],
)
def test_wrong_entitlements_name_the_line(tmp_path: Path, attributes: str, complaint: str) -> None:
    with pytest.raises(OperatorError, match=f"line 2: .*{complaint}"):
        read(tmp_path, f"# keys\n{line('night', ALICE, attributes)}")


@given(st.text(max_size=60))
def test_any_other_line_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-keys"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(OperatorError) as caught:
        KeyFile(path).read()
    assert "\n" not in str(caught.value)


# Changes


def test_only_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, line("a", ALICE))
    file = KeyFile(path)
    file.read()
    assert file.read_changed() is None
    path.write_text(line("a", ALICE) + line("b", BOB))
    assert set(file.read_changed() or ()) == {digest_of(ALICE), digest_of(BOB)}
    assert file.read_changed() is None


def test_a_file_that_is_as_long_and_as_old_as_the_one_it_replaced_is_another(tmp_path: Path) -> None:
    path = write(tmp_path, line("a", ALICE))
    file = KeyFile(path)
    file.read()
    times = path.stat()
    put(path, line("a", BOB))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert set(file.read_changed() or ()) == {digest_of(BOB)}


def test_a_broken_file_is_told_once_and_read_when_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, line("a", ALICE))
    file = KeyFile(path)
    file.read()
    for break_ in (lambda: path.write_text(f"a:{ALICE}\n"), path.unlink):
        break_()
        with pytest.raises(OperatorError):
            file.read_changed()
        assert file.read_changed() is None
    path.write_text(line("b", BOB))
    assert set(file.read_changed() or ()) == {digest_of(BOB)}


def watched(
    path: Path, changes: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> list[set[bytes]]:
    """The keys that each of the changes brought. Each must bring a line of the log before the next is made."""
    seen: list[set[bytes]] = []

    async def watch() -> None:
        file = KeyFile(path)
        file.read()
        task = asyncio.create_task(file.watch(lambda clients: seen.append(set(clients)), 0.001))
        for number, change in enumerate(changes, 1):
            await asyncio.to_thread(change)
            async with asyncio.timeout(10):
                while len(caplog.records) < number:
                    await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    caplog.set_level(logging.INFO, "penstock.keys")
    asyncio.run(watch())
    return seen


def test_new_keys_are_handed_on_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    path = write(tmp_path, line("a", ALICE))
    changes = [
        lambda: put(path, line("a", ALICE) + line("a", BOB)),
        lambda: put(path, f"{line('a', ALICE)}a:{BOB}\n"),
        path.unlink,
        lambda: put(path, line("b", BOB)),
    ]
    two, one = {digest_of(ALICE), digest_of(BOB)}, {digest_of(BOB)}
    assert watched(path, list(changes), caplog) == [two, one]
    first, second, third, fourth = caplog.records
    assert (first.levelname, fourth.levelname) == ("INFO", "INFO")
    assert first.getMessage().endswith(": 2 keys of 1 tenants")
    assert (second.levelname, third.levelname) == ("WARNING", "WARNING")
    assert f"{path}, line 2: not" in second.getMessage()
    assert BOB not in second.getMessage()
    assert "No such file" in third.getMessage()


def test_who_cannot_take_the_new_keys_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    monkeypatch.setattr("penstock.app.keys.weights_of", None)
    path = write(tmp_path, line("a", ALICE))
    changes = [lambda: put(path, line("bob", BOB)), lambda: put(path, line("robert", BOB))]
    assert watched(path, list(changes), caplog) == [{digest_of(BOB)}] * 2
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


# The command


def test_a_new_key_is_shown_once_and_its_line_is_for_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "alice", "rpm=60", "top=batch"]) == 0
    shown, told = capsys.readouterr()
    key = told.split()[-1]
    assert key.startswith("sk-penstock-")
    assert len(key) == len("sk-penstock-") + 43
    assert key not in shown
    assert set(read(tmp_path, shown)) == {digest_of(key)}
    assert shown.endswith(" rpm=60 top=batch\n")
    main(["key", "alice"])
    assert key not in capsys.readouterr().err


def test_a_key_of_one_s_own_is_read_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ALICE}\n"))
    assert main(["key", "alice", "--hash", "weight=2"]) == 0
    shown, told = capsys.readouterr()
    assert told == ""
    assert read(tmp_path, shown) == {digest_of(ALICE): Client(Tenant(name="alice", weight=2))}


def test_a_key_that_is_typed_is_not_seen() -> None:
    screen, keyboard = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "key", "alice", "--hash"],
        stdin=keyboard,
        stdout=subprocess.PIPE,
        stderr=keyboard,
        start_new_session=True,
        text=True,
    )
    seen = b""
    while b"key: " not in seen:
        seen += os.read(screen, 1_000)
    os.write(screen, f"{ALICE}\n".encode())
    shown, _ = process.communicate(timeout=60)
    os.set_blocking(screen, False)
    seen += os.read(screen, 1_000)
    for end in (screen, keyboard):
        os.close(end)
    assert shown == line("alice", ALICE).rstrip() + "\n"
    assert ALICE.encode() not in seen


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a b"], "NAME must be without spaces and colons"),
        (["a:b"], "NAME must be without spaces and colons"),
        (["#a"], "NAME must be without spaces and colons"),
        ([""], "NAME must be without spaces and colons"),
        ([], "NAME"),
        (["a", "rpm=none"], "rpm must be a whole number"),
        (["a", ALICE], "after the key may stand"),
        (["a", "--hsah"], "did you mean --hash?"),
    ],
)
def test_no_key_is_made_for_a_line_that_would_be_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["key", *arguments]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith("penstock: ")
    assert complaint in told
    assert len(told.splitlines()) == 1
    assert ALICE not in told


@pytest.mark.parametrize("key", ["", "short", f"{ALICE} {BOB}", f"{ALICE}é", f"{ALICE}\x07"])
def test_a_key_of_one_s_own_that_no_header_could_carry_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(key))
    assert main(["key", "a", "--hash"]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told == "penstock: a key is at least 16 ASCII characters without spaces\n"
