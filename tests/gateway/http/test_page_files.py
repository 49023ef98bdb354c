"""The chat page over a socket: its files and nothing else, whatever a path pretends to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.gateway.app import create_app
from tests.gateway.harness import Gateway, client, serving
from tests.gateway.raw_http import Answer, connect, get

pytestmark = pytest.mark.anyio

SECRET = "not for the world"
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "logo.svg": "image/svg+xml",
    "manifest.json": "application/json",
    "deep/er/part.js": "text/javascript; charset=utf-8",
    "unknown": "application/octet-stream",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    for name in TYPES:
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text(f"this is {name}: é")
    (tmp_path / "secret.txt").write_text(SECRET)
    (page / "server.py").write_text(SECRET)
    (page / "link.txt").symlink_to(tmp_path / "secret.txt")
    return page


async def asked(folder: Path, request: bytes, method: str = "GET") -> Answer:
    async with serving(create_app(Gateway().service, folder)) as url, connect(url) as connection:
        connection.send(request)
        return await connection.answer(method)


async def test_a_file_has_its_bytes_and_its_type(folder: Path) -> None:
    async with serving(create_app(Gateway().service, folder)) as url, connect(url) as connection:
        for name, media_type in TYPES.items():
            connection.send(get(f"/static/{name}"))
            answer = await connection.answer()
            assert (answer.status, answer.headers["content-type"]) == (200, media_type)
            assert answer.body == (folder / name).read_bytes()
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"


async def test_a_file_is_packed_for_clients_that_take_it(folder: Path) -> None:
    async with client(create_app(Gateway().service, folder)) as http:
        for encoding, packed in (("gzip, br", "gzip"), ("identity", None)):
            reply = await http.get("/static/main.js", headers={"accept-encoding": encoding})
            assert reply.headers.get("content-encoding") == packed
            assert reply.headers["vary"] == "accept-encoding"
            assert reply.text == (folder / "main.js").read_text()


async def test_the_index_is_the_root(folder: Path) -> None:
    assert (await asked(folder, get("/"))).body == (folder / "index.html").read_bytes()
    assert (await asked(folder, get("/?conversation=7"))).status == 200


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [("text/html,application/xhtml+xml,*/*;q=0.8", True), ("*/*", False), ("application/json", False)],
)
async def test_what_takes_no_pages_is_greeted_as_ollama_does(
    folder: Path, accept: str, is_page: bool
) -> None:
    reply = await asked(folder, get("/", f"accept: {accept}"))
    page = (folder / "index.html").read_bytes()
    assert (reply.status, reply.body) == (200, page if is_page else b"Ollama is running")


NOT_THERE = [
    "/static/../secret.txt",
    "/static/deep/../../secret.txt",
    "/static/%2e%2e/secret.txt",
    "/static/..%2fsecret.txt",
    "/static/%2e%2e%2fsecret.txt",
    "/static/%252e%252e%252fsecret.txt",
    "/static/..%5csecret.txt",
    "/static/..\\secret.txt",
    "/static/....//secret.txt",
    "/static/%c0%ae%c0%ae/secret.txt",
    "/static/main.js/../../secret.txt",
    "/static/main.js%00.html",
    "/static/link.txt",
    "/static/server.py",
    "/static/server.py%00.js",
    "/static/deep",
    "/static/deep/",
    "/static/./main.js",
    "/static//main.js",
    "/static/MAIN.JS",
    "/static",
    "/static/",
    "/index.html",
    "/../secret.txt",
]


async def test_nothing_but_its_files_is_served(folder: Path) -> None:
    async with serving(create_app(Gateway().service, folder)) as url, connect(url) as connection:
        for path in (
            *NOT_THERE,
            f"/static/{folder.parent}/secret.txt",
            f"/static/%2f{folder.parent}/secret.txt",
        ):
            connection.send(get(path))
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (404, "unknown_url"), path
            assert SECRET.encode() not in answer.body


async def test_a_file_is_sent_again_only_if_it_is_another(folder: Path) -> None:
    first = await asked(folder, get("/static/main.js"))
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache", "or else the browser would not ask again"
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = await asked(folder, get("/static/main.js", f"if-none-match: {known}"))
        assert (again.status, again.headers["etag"]) == (304, tag)
    for unknown in ('"other"', (await asked(folder, get("/static/style.css"))).headers["etag"]):
        assert (await asked(folder, get("/static/main.js", f"if-none-match: {unknown}"))).status == 200
    (folder / "main.js").write_text("changed")
    changed = await asked(folder, get("/static/main.js", f"if-none-match: {tag}"))
    assert (changed.status, changed.body) == (200, b"changed")
    assert changed.headers["etag"] != tag


async def test_an_answer_without_a_body_leaves_the_connection_usable(folder: Path) -> None:
    async with serving(create_app(Gateway().service, folder)) as url, connect(url) as connection:
        connection.send(get("/", method="HEAD"))
        head = await connection.answer("HEAD")
        connection.send(get("/", f"if-none-match: {head.headers['etag']}"))
        assert (await connection.answer()).status == 304
        connection.send(get("/"))
        full = await connection.answer()
    assert head.headers["content-length"] == str(len(full.body))


async def test_the_policy_lets_in_nothing_foreign(folder: Path) -> None:
    async with serving(create_app(Gateway().service, folder)) as url, connect(url) as connection:
        for path in ("/", *(f"/static/{name}" for name in TYPES)):
            connection.send(get(path))
            headers = (await connection.answer()).headers
            directives = [part.split(" ") for part in headers["content-security-policy"].split("; ")]
            policy = {name: sources for name, *sources in directives}
            assert policy["default-src"] == ["'none'"]
            assert policy.pop("require-trusted-types-for") == ["'script'"]
            assert policy.pop("trusted-types") == ["penstock-math"]
            allowed = {source for sources in policy.values() for source in sources}
            assert allowed == {"'none'", "'self'", "data:"}
            assert [name for name, sources in policy.items() if "data:" in sources] == ["img-src"]
            # These do not fall back to default-src.
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
            assert headers["cross-origin-resource-policy"] == "same-origin"


async def test_files_cannot_be_written(folder: Path) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = await asked(folder, get("/static/main.js", "content-length: 0", method=method), method)
        assert answer.status == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
