"""Bytes go through Flower's messages as they are, and a site is known by its key alone."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")

from ppfl.federation.certificates import create_key_pair
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_carrier import FlowerCarrier, from_flower, key_bytes, to_flower

KEYS = {name: create_key_pair().public_key for name in ("a", "b")}


class FakeGrid:
    """Nodes as a SuperLink lists them."""

    def __init__(self, *nodes):
        self.nodes = nodes

    def get_nodes(self):
        return self.nodes


def node(number, name, key):
    return SimpleNamespace(node_id=number, name=name, public_key=key_bytes(key), last_activated_at="now")


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_bytes_come_back(size):
    data = bytes(i % 251 for i in range(size))
    assert from_flower(to_flower(data)) == data


def test_another_content_is_refused():
    from flwr.app import RecordDict

    with pytest.raises(FederationError, match="without ppfl's content"):
        from_flower(RecordDict())


def test_a_stranger_under_the_name_of_a_site_gets_nothing(caplog):
    stranger = create_key_pair().public_key
    carrier = FlowerCarrier(FakeGrid(node(1, "a", KEYS["a"]), node(2, "a", stranger), node(3, "z", KEYS["b"])), KEYS)
    assert {name: one.address for name, one in carrier.online().items()} == {"a": 1, "b": 3}
    carrier.online()
    assert len(caplog.records) == 1 and "unknown key" in caplog.text
