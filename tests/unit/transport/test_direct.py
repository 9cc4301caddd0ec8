"""The offer of a direct socket is checked by the client that gets it."""

from __future__ import annotations

import pytest

from gradwire.proto.v1 import link_pb2
from gradwire.transport import LinkSettings, direct


def test_a_port_that_is_none_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "remote_of", lambda seen, target: ("127.0.0.1", 1))
    offer = link_pb2.Direct(port=70_000, token=bytes(32))
    assert direct.connect(offer, "127.0.0.1:1", 1.0, LinkSettings()) is None
