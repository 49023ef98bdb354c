"""The file of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import OperatorError
from app.keys import read_keys
from gateway.access import digest_of
from priority.lanes import Lane, Tenant

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def write(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_a_key_has_a_tenant(tmp_path: Path) -> None:
    tenants = read_keys(write(tmp_path, f"# ours\nalice:{ALICE}\n\n  bob : {BOB}  \n{BOB}2\n"))
    names = {digest: tenant.name for digest, tenant in tenants.items()}
    assert names == {digest_of(ALICE): "alice", digest_of(BOB): "bob", digest_of(BOB + "2"): "key-5"}


def test_a_tenant_can_have_several_keys(tmp_path: Path) -> None:
    assert set(read_keys(write(tmp_path, f"a:{ALICE}\na:{BOB}\n")).values()) == {Tenant(name="a")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no key in it"),
        ("# only words\n", "no key in it"),
        (f"a:{ALICE}\nb:short\n", "line 2: not"),
        (f":{ALICE}\n", "line 1: not"),
        ("a:with some spaces in it 0123\n", "line 1: not"),
        (f"a:{ALICE}\nb:{ALICE}\n", "line 2: another tenant"),
    ],
)
def test_what_is_wrong_is_named_and_the_key_is_not_repeated(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(OperatorError, match=message) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"--api-keys-file .*/keys: No such file"):
        read_keys(tmp_path / "keys")


def test_a_key_says_what_its_tenant_is_entitled_to(tmp_path: Path) -> None:
    [tenant] = read_keys(write(tmp_path, f"night:{ALICE} weight=3 top=batch\n")).values()
    assert tenant == Tenant(name="night", weight=3, default_lane=Lane.BATCH, top_lane=Lane.BATCH)
    [tenant] = read_keys(write(tmp_path, f"day:{ALICE} lane=interactive\n")).values()
    assert tenant == Tenant(name="day", default_lane=Lane.INTERACTIVE)


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ("weight=0", "weight must be greater than 0"),
        ("weight=-1", "weight must be greater than 0"),
        ("weight=heavy", "weight must be a whole number"),
        ("lane=fast", "there is no lane 'fast'"),
        ("lane=interactive top=batch", "default_lane interactive is above top_lane batch"),
        ("colour=red", "weight=, lane= and top="),
    ],
)
def test_wrong_entitlements_name_the_line(tmp_path: Path, attributes: str, complaint: str) -> None:
    with pytest.raises(OperatorError, match=f"line 2: .*{complaint}"):
        read_keys(write(tmp_path, f"# keys\nnight:{ALICE} {attributes}\n"))
