# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.ops.view.server import Runs, main, server_of
from tests.reading import read_page
from tests.unit.ops.view.runs import make_run, row, write_metrics
from tests.waiting import HANG_S


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    server = server_of(Runs([make_run(tmp_path / "one"), make_run(tmp_path / "two")]), 0, "token")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=HANG_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_the_page_needs_the_token(address: str):
    assert [get(f"{address}{path}")[0] for path in ("/", "/wrong/", "/token2/", "/wrong/data")] == [403] * 4
    assert get(f"{address}/token/")[0] == 200


def test_it_shows_all_runs_and_gives_rollouts_on_demand(address: str):
    data = read_page(get(f"{address}/token/")[1].decode())
    assert [run["name"] for run in data["runs"]] == ["one", "two"] and data["runs"][0]["rollouts"] == {}
    code, content = get(f"{address}/token/rollouts/1/train_data_step2")
    assert code == 200 and len(json.loads(gzip.decompress(content))) == 8


@pytest.mark.parametrize(
    "path",
    ["rollouts/0/../../config", "rollouts/2/train_data_step1", "rollouts/x/y", "rollouts/0/train_data_step99", "etc"],
)
def test_nothing_else_is_served(address: str, path: str):
    assert get(f"{address}/token/{path}")[0] == 404


HOSTILE = [
    "9" * 5000,
    "-1",
    "+1",
    "1_0",
    "٣",
    "²",
    "0x1",
    "1e3",
    "1.0",
    " 1",
    "nan",
    "inf",
    "None",
    "..",
    "%00",
    "%ff",
    "%0d%0aX:1",
    "<b>",
    "%2e%2e%2fconfig",
    "$(id)",
    "a" * 20_000,
]


@pytest.mark.attack("a run folder of a stranger")
@pytest.mark.parametrize(
    "query",
    [
        f"{kind}/{index}/{name}"
        for kind, good in (("rollouts", "train_data_step2"), ("timeline", "3"))
        for index, name in (("{}", good), ("1", "{}"), ("{}", "{}"))
    ]
    + ["{}", "{}/1/2"],
)
def test_hostile_values_of_a_query_are_not_found(address: str, query: str):
    for value in HOSTILE:
        text = urllib.parse.quote(value, safe="%/:.$()+<>")
        assert get(f"{address}/token/{query.replace('{}', text)}")[0] in (400, 404), value[:50]
    assert get(f"{address}/token/timeline/1/3")[0] == 200


@pytest.mark.attack("a run folder of a stranger")
def test_hostile_marks_of_what_was_seen_get_the_page_anew(address: str):
    codes = {
        get(f"{address}/token/data?{name}={urllib.parse.quote(value, safe='%')}")[0]
        for value in HOSTILE
        for name in ("seen", "x")
    }
    assert codes == {200} and get(f"{address}/token/data?{'seen=1&' * 5000}")[0] == 200
    assert get(f"{address}/{urllib.parse.quote(HOSTILE[0])}/data")[0] == 403


@pytest.mark.parametrize(
    "target", ["http://[bad]/token/data", "http://[::1/token", "//[", "http://x:99999999/token/", "*"]
)
def test_a_target_that_is_no_path_is_answered(address: str, target: str):
    """Proxies and scanners send such ones."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.recv(12)[9:] == b"403"


def test_a_reader_gets_news_once(address: str, tmp_path: Path):
    first = read_page(get(f"{address}/token/")[1].decode())
    seen = first["runs"][0]["version"]
    assert get(f"{address}/token/data?seen={seen}") == (204, b"")
    write_metrics(tmp_path / "one", [row(step) for step in range(1, 12)])
    code, content = get(f"{address}/token/data?seen={seen}")
    news = json.loads(gzip.decompress(content))
    assert code == 200 and news["runs"][0]["series"]["step"][-1] == 11
    assert news.keys() == first.keys(), "the page's script takes them in place of its own"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().out


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_run(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main([str(tmp_path / "one"), "--port", str(port)]) == 2
    assert f"--port {port}: [Errno 98] Address already in use; choose another, or 0" in capsys.readouterr().out


def test_the_timeline_of_a_step_is_read_on_demand(address: str):
    code, content = get(f"{address}/token/timeline/1/3")
    found = json.loads(gzip.decompress(content))
    assert code == 200 and found["3"]["begin"] == 3_000_000 and len(found["3"]["lanes"]) == 5
    assert [get(f"{address}/token/timeline/{path}")[0] for path in ("1/99", "2/1", "x/1", "1/-1", "1/x")] == [404] * 5
