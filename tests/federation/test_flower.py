"""Messages of Flower arrive in parts, and some never whole: nobody waits for what does not come, or is too large."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import context_to_proto, message_to_proto
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.run_pb2 import Run
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PullTaskInputResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.task_identity import TaskIdentity

from kit.masked_sites import PUBLIC_KEYS
from kit.refusals import assert_refused
from ppfl.federation import flower_site, site_daemon
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_carrier import FlowerCarrier, from_flower, key_bytes, to_flower
from ppfl.federation.flower_objects import MOST_OBJECT_BYTES, IncomingMessage, LostMessageError, bound_responses
from ppfl.federation.flower_site import StuckSuperNodeError, SuperNodeMessages
from ppfl.federation.site_settings import SiteSettings

RUN, NODE = 7, 3


@pytest.fixture(autouse=True)
def task():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, NODE


class FakeFlower:
    """Has messages for whoever asks; objects can be missing for a time, or for ever."""

    def __init__(self, *messages):
        self.waiting, self.tasks, self.objects, self.confirmed = [], [], {}, []
        self.replies, self.outputs, self.pushed, self.asked = [], [], {}, []
        for data in messages:
            self.add(data)

    def add(self, data, *, whole=True, answers=""):
        message = Message(to_flower(data), NODE, "query")
        message.metadata.__dict__["_reply_to_message_id"] = answers
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
            self.waiting.append((message_to_proto(message), get_object_tree(message)))
        self.objects |= contents if whole else dict.fromkeys(contents, b"")
        self.tasks.append((SimpleNamespace(run_id=RUN), f"token {len(self.tasks)}"))
        return contents

    def take(self):
        return self.tasks.pop(0) if self.tasks else None

    def PullTaskInput(self, request):
        context = Context(run_id=RUN, node_id=NODE, node_config={}, state=RecordDict(), run_config={})
        app = flower_site.app_hash()
        return PullTaskInputResponse(
            context=context_to_proto(context), run=Run(run_id=RUN, fab_hash=app), fab=Fab(hash_str=app), task_id=1
        )

    def PullMessages(self, request):
        self.asked.append(list(request.message_ids))
        one, self.waiting = self.waiting[:1], self.waiting[1:]
        return PullAppMessagesResponse(
            messages_list=[proto for proto, _ in one], message_object_trees=[tree for _, tree in one]
        )

    def PullObject(self, request):
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)

    def PushMessages(self, request):
        self.replies += request.messages_list
        ids = [one.object_id for tree in request.message_object_trees for one in iterate_object_tree(tree)]
        return PushAppMessagesResponse(objects_to_push=ids, session_id="s")

    def PushObject(self, request):
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PushTaskOutput(self, request):
        self.outputs.append(request.sub_status)

    def close(self):
        pass


def incoming(flower, **options):
    return IncomingMessage(flower, NODE, RUN, *flower.waiting[0], **options)


@pytest.mark.parametrize("size", [0, 10, 9_000_000])
def test_a_message_that_arrives_in_parts_is_whole_with_the_last_of_them(size):
    flower, data = FakeFlower(), bytes(at % 251 for at in range(1000)) * (size // 1000) + bytes(size % 1000)
    contents = flower.add(data, whole=False)
    message = incoming(flower)
    for name, content in contents.items():
        assert message.receive() is None
        flower.objects[name] = content
    assert from_flower(message.receive().content) == data
    assert flower.confirmed == [message.id]


def test_a_message_whose_objects_are_gone_is_lost_and_another_content_is_refused():
    flower = FakeFlower()
    flower.add(b"data", whole=False)
    flower.objects.clear()
    with pytest.raises(LostMessageError):
        incoming(flower).receive()
    assert_refused(lambda: from_flower(RecordDict()), FederationError, "without ppfl's content")


def test_a_message_that_is_too_large_is_not_pulled_to_its_end():
    flower, pulled = FakeFlower(bytes(30_000_000)), []  # six pieces, of which the first is too much already
    pull = flower.PullObject
    flower.PullObject = lambda request: pulled.append(request) or pull(request)
    message = incoming(flower, most_bytes=1_000_000)
    assert_refused(message.receive, FederationError, "more than 1,000,000 bytes")
    assert sum(len(flower.objects[request.object_id]) for request in pulled) < 7_000_000


def test_a_response_is_refused_by_its_header():
    read = []

    class Body(httpx.SyncByteStream):
        def __iter__(self):
            read.append(True)
            yield b"x"

    headers = {"content-length": str(MOST_OBJECT_BYTES + 1)}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=Body()))
    client = SimpleNamespace(_client=httpx.Client(transport=transport))
    bound_responses(client)
    assert_refused(lambda: client._client.post("http://superlink"), FederationError, "bytes; at most")
    assert not read


def make_carrier(flower, **options):
    grid = SimpleNamespace(_runtime_client=flower, run=SimpleNamespace(run_id=RUN), node=SimpleNamespace(node_id=NODE))
    return FlowerCarrier(grid, {}, **options)


def test_a_reply_on_its_way_does_not_hold_up_another():
    flower = FakeFlower()
    late = flower.add(b"late", whole=False, answers="one")
    carrier = make_carrier(flower)
    assert carrier.pull(["one", "two"]) == []
    flower.add(b"early", answers="two")
    assert [(one.message, one.data) for one in carrier.pull(["one", "two"])] == [("two", b"early")]
    flower.objects |= late
    assert [(one.message, one.data) for one in carrier.pull(["one"])] == [("one", b"late")]
    assert flower.asked == [["one", "two"], ["two"]]  # a SuperLink hands out a message once


def test_a_reply_that_is_too_large_is_dropped_and_a_lost_one_may_be_asked_for_again():
    flower = FakeFlower()
    flower.add(bytes(200_000), answers="large")
    carrier = make_carrier(flower, most_bytes=100)
    (large,) = carrier.pull(["large"])
    assert large.data is not None and "more than 100 bytes" in large.reason and len(flower.confirmed) == 1
    flower.add(b"", whole=False, answers="lost")
    flower.objects.clear()
    (lost,) = carrier.pull(["lost"])
    assert lost.data is None and lost.reason


def test_a_stranger_under_the_name_of_a_site_gets_nothing(caplog):
    """A site is known by its key alone."""

    def node(number, name, key):
        return SimpleNamespace(node_id=number, name=name, public_key=key_bytes(key), last_activated_at="now")

    keys = {name: PUBLIC_KEYS[name] for name in "ab"}
    nodes = [node(1, "a", keys["a"]), node(2, "a", PUBLIC_KEYS["c"]), node(3, "z", keys["b"])]
    carrier = FlowerCarrier(SimpleNamespace(get_nodes=lambda: nodes), keys)
    assert {name: one.address for name, one in carrier.online().items()} == {"a": 1, "b": 3}
    carrier.online()
    assert len(caplog.records) == 1 and "unknown key" in caplog.text


# ---------------------------------------------------------------------- a site


@pytest.fixture
def serve(monkeypatch):
    def make(flower):
        monkeypatch.setattr(flower_site, "TaskQueue", lambda node, kind: flower)
        monkeypatch.setattr(flower_site, "runtime_client", lambda node, interceptors, retry: flower)
        monkeypatch.setattr(flower_site, "Heartbeat", lambda client: nullcontext())
        monkeypatch.setattr(flower_site.time, "sleep", lambda seconds: flower.tasks or pytest.fail("it waits for ever"))
        return SuperNodeMessages(None, lambda data: b"reply to " + data)

    return make


def answers_of(flower):
    return [content for content in flower.pushed.values() if b"reply to" in content]


def test_a_message_that_never_comes_whole_is_given_up_for_the_next_one(serve):
    flower = FakeFlower()
    flower.add(b"of a server that was killed", whole=False)
    flower.add(b"of the next server")
    messages = serve(flower)
    assert messages.serve_one() and not flower.replies and flower.outputs == ["failed"]
    assert messages.serve_one() and len(flower.replies) == 1
    assert len(answers_of(flower)) == 1 and b"reply to of the next server" in answers_of(flower)[0]
    assert not messages.serve_one()


def test_a_message_that_was_dropped_or_a_task_that_has_ended_is_nothing_to_answer(serve):
    flower = FakeFlower()
    flower.add(b"x", whole=False)
    flower.objects.clear()
    assert serve(flower).serve_one() and not flower.replies

    def refuse(request):
        raise httpx.HTTPStatusError("401", request=None, response=httpx.Response(401))

    flower.add(b"x")
    flower.PullTaskInput = refuse
    assert serve(flower).serve_one() and not flower.replies


def test_an_app_that_is_not_ours_is_not_answered(serve):
    flower = FakeFlower(b"x")
    messages = serve(flower)
    messages.accepted = "another hash"
    assert messages.serve_one() and not answers_of(flower)
    assert len(flower.replies) == 1 and "not the one this site accepts" in flower.replies[0].error.reason


def test_a_supernode_that_waits_for_a_reply_that_could_not_be_sent_is_stuck(serve):
    flower = FakeFlower(b"x")
    flower.PushObject = lambda request: PushObjectResponse(stored=False)
    with pytest.raises(StuckSuperNodeError, match="was not answered"):
        serve(flower).serve_one()


# ---------------------------------------------------------------------- the process of a site


class Stopped(BaseException):
    """Ends the process of a site."""


@pytest.fixture
def run_site(tmp_path, monkeypatch):
    """A site whose SuperNode is a list of what comes of each look at its messages; the starts of it and messages."""

    def go(looks, said=("SuperNode ID: 5",) * 9):
        looks, said, starts, ended, served = iter(looks), iter(said), [], [], []

        class Messages:
            answered = True

            def __init__(self, node, answer):
                starts.append(node)

            def serve_one(self):
                found = next(looks)
                if isinstance(found, BaseException):
                    raise found
                return found

        def no_processes(logs):
            logs.mkdir(exist_ok=True)
            return nullcontext(SimpleNamespace(refuse_dead=lambda: None, end=ended.append))

        def start_supernode(processes, superlink, authority, private_key, secret):
            with (tmp_path / "a.run" / "supernode.log").open("a") as log:
                log.write(next(said))
            return f"start {len(starts)}"

        monkeypatch.setattr(site_daemon, "Processes", no_processes)
        monkeypatch.setattr(site_daemon, "SiteService", lambda settings, base: SimpleNamespace(answer=None))
        monkeypatch.setattr(site_daemon, "SuperNodeMessages", Messages)
        monkeypatch.setattr(site_daemon, "start_supernode", start_supernode)
        monkeypatch.setattr(site_daemon, "sign_off", lambda connection, node: ended.append(node))
        monkeypatch.setattr(site_daemon.time, "sleep", lambda seconds: None)
        files = {"superlink": "server:1", "root_certificate": "authority.pem", "private_key": "site.key"}
        settings = SiteSettings.model_validate({"name": "a", "data": {"name": "digits"}, **files})
        try:
            site_daemon.run_site(settings, tmp_path, served.append)
        except Stopped:
            return starts, served, ended

    return go


def test_a_stuck_supernode_is_signed_off_and_started_again_and_the_site_goes_on(run_site):
    stuck = [StuckSuperNodeError("no reply"), httpx.ConnectError("gone")]
    starts, served, ended = run_site([True, stuck[0], True, stuck[1], False, True, Stopped()])
    assert len(starts) == 3 and served == [1, 2, 3]
    assert ended == ["supernode", 5] * 2  # the old one ends, and the server hears of it


def test_a_supernode_that_is_not_let_in_is_an_error_unless_the_reason_passes(run_site):
    refused = FederationError("supernode ended with code 1")
    with pytest.raises(FederationError, match="ended with code 1"):
        run_site([refused], said=["no such key"])
    starts, _, _ = run_site([refused, Stopped()], said=["[code: 2004] still online", "SuperNode ID: 5"])
    assert len(starts) == 2
