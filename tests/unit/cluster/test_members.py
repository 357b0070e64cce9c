# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import pytest

from mrl.cluster import members
from mrl.cluster.members import Member, dead_head, lost_nodes, warn_of_public


def test_lost_nodes_are_named_with_what_is_lost(monkeypatch: pytest.MonkeyPatch):
    assert lost_nodes() == ""
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and nobody listens
        places = [("alive", raylet.getsockname()[1]), ("gone", reserved.getsockname()[1]), ("dark", 1)]
        connect = socket.create_connection

        def connect_or_wait(address: tuple[str, int], timeout: float) -> socket.socket:
            if address[1] == 1:
                raise TimeoutError("timed out")
            return connect(address, timeout=timeout)

        monkeypatch.setattr(members.socket, "create_connection", connect_or_wait)
        monkeypatch.setattr(members, "members", [Member(host, "127.0.0.1", port) for host, port in places])
        expected = (
            "Ray's raylet on node gone (127.0.0.1) died and node dark (127.0.0.1) is down, or its network "
            "is (timed out)"
        )
        assert lost_nodes() == expected
        # A head that does not answer may be there again in a moment.
        said = {}
        for host, port in places:
            monkeypatch.setattr(members, "heads", [Member(host, "127.0.0.1", port, "gcs_server")])
            said[host] = dead_head()
        assert said == {"alive": "", "gone": "Ray's gcs_server on node gone (127.0.0.1) died", "dark": ""}


def test_addresses_that_the_internet_reaches_are_said(caplog: pytest.LogCaptureFixture):
    # Private by RFC 1918, 4193, 6598 (carriers), 3927 and 1122; those of documentation reach nobody.
    private = "10.0.0.1 172.16.3.4 192.168.1.1 fd12::1 100.64.0.7 169.254.1.1 127.0.0.1 ::1 fe80::1 192.0.2.1".split()
    warn_of_public([Member("inside", address, 1) for address in private])
    assert caplog.text == ""
    warn_of_public([Member("a", "8.8.8.8", 1), Member("inside", "10.0.0.1", 1), Member("b", "2600:1f16::1", 1)])
    assert "public addresses: a (8.8.8.8), b (2600:1f16::1). " in caplog.text and "inside" not in caplog.text
