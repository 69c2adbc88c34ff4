"""What is ours at both ends of Flower: who is known, which app is answered, and what is given up."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import context_to_proto
from flwr.proto.run_pb2 import Run
from flwr.proto.runtime_pb2 import PullTaskInputResponse
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp

from kit.masked_sites import PUBLIC_KEYS
from ppfl.federation import flower_site
from ppfl.federation.flower_carrier import FlowerCarrier, from_flower, key_bytes, to_flower
from ppfl.federation.flower_site import SuperNodeMessages

RUN, NODE = 7, 3


def test_a_stranger_under_the_name_of_a_site_gets_nothing(caplog):
    """A site is known by its key alone."""
    keys = {name: PUBLIC_KEYS[name] for name in "ab"}
    known = [(1, "a", keys["a"]), (2, "a", PUBLIC_KEYS["c"]), (3, "z", keys["b"])]
    nodes = [SimpleNamespace(node_id=n, name=s, public_key=key_bytes(k), last_activated_at="now") for n, s, k in known]
    carrier = FlowerCarrier(SimpleNamespace(get_nodes=lambda: nodes), keys)
    assert {name: one.address for name, one in carrier.online().items()} == {"a": 1, "b": 3}
    assert len(caplog.records) == 1 and "unknown key" in caplog.text


def test_a_site_answers_its_own_app_alone_and_gives_up_what_never_comes_whole(monkeypatch):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, NODE
    arriving, sent = [], []
    context = Context(run_id=RUN, node_id=NODE, node_config={}, state=RecordDict(), run_config={})
    own = flower_site.app_hash()
    task = PullTaskInputResponse(context=context_to_proto(context), run=Run(run_id=RUN, fab_hash=own), task_id=1)
    task.fab.hash_str = own
    flower = SimpleNamespace(
        take=lambda: (None, "token") if arriving else None,
        PullTaskInput=lambda request: task,
        PullMessages=lambda request: SimpleNamespace(messages_list=[arriving.pop(0)], message_object_trees=[None]),
        close=lambda: None,
    )
    for name, fake in {
        "TaskQueue": lambda node, kind: flower,
        "runtime_client": lambda node, interceptors, retry: flower,
        "Heartbeat": lambda client: nullcontext(),
        "IncomingMessage": lambda client, node, run, message, tree: SimpleNamespace(receive=lambda: message),
    }.items():
        monkeypatch.setattr(flower_site, name, fake)
    monkeypatch.setattr(run_clientapp, "push_message", lambda client, reply, context: sent.append(reply))
    monkeypatch.setattr(run_clientapp, "push_task_output", lambda *output: None)
    monkeypatch.setattr(flower_site.time, "sleep", lambda seconds: pytest.fail("it waits for ever"))
    messages = SuperNodeMessages(None, lambda data: b"reply to " + data)

    whole = Message(to_flower(b"the next server"), NODE, "query")
    arriving += [None, whole]  # the first is of a server that was killed while it sent
    assert messages.serve_one() and not sent
    assert messages.serve_one() and from_flower(sent[-1].content) == b"reply to the next server"
    assert not messages.serve_one()
    messages.accepted = "another hash"
    arriving.append(whole)
    assert messages.serve_one() and "not the one this site accepts" in sent[-1].error.reason
