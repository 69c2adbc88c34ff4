"""What a server does not take from a site: each reply is refused as a whole, and the run goes on without it."""

import pytest
import torch

from kit.refusals import assert_refused
from kit.sites import NumberedIds, Rows, Sites, Total, at_answers, make_experiment, tree_map
from ppfl.federation.exchange import Timeouts, printable
from ppfl.federation.messages import FederationError, pack_answer, unpack_answer
from ppfl.sites import Refusal, Reply


def changed_reply(change, at=-1):
    """A fault that changes one reply of an answer."""

    def fault(data):
        answer = unpack_answer(data)
        replies = list(answer.replies)
        replies[at] = change(replies[at])
        return pack_answer(answer._replace(replies=replies))

    return fault


def with_metric(name, change):
    return lambda reply: reply._replace(metrics={**reply.metrics, name: change(reply.metrics[name])})


def with_totals(change):
    return lambda reply: reply._replace(totals=tree_map(change, reply.totals))


TRAINING = {  # changes of a reply to a training request, with words of the reason
    "not finite": (with_totals(lambda leaf: leaf / 0), "not finite"),
    "far too large": (with_totals(lambda leaf: leaf * 1e9), "norm"),
    "of another type": (with_totals(lambda leaf: leaf.double()), "float64"),
    "of another shape": (with_totals(lambda leaf: leaf[..., :1]), "expected"),
    "no tensor": (lambda reply: reply._replace(totals={"change": Total("all", {})}), "in the place of numbers"),
    "no sum": (lambda reply: reply._replace(totals={"change": 3}), "a sum of its reply is none"),
    "rows that are a list": (lambda reply: reply._replace(rows=["a"]), "other fields"),
    "rows that nobody asked for": (
        lambda reply: reply._replace(rows=Rows(("g0-c0",), {"membership": torch.ones(1, 1)})), "",
    ),
    "rows of another client": (
        lambda reply: reply._replace(rows=Rows(("x",), {"change": torch.ones(1)})), "client 'x'",
    ),
    "numbered clients": (lambda reply: reply._replace(rows=Rows(NumberedIds(10**8), {})), "one by one"),
    "clients without end": (with_metric("participants", lambda value: value * 1e6), "clients were asked"),
    "negative samples": (with_metric("samples", lambda value: -value), "fewer than no samples"),
    "a metric with a shape": (with_metric("loss", lambda value: value.repeat(10)), "no number"),
    "a strange refusal": (lambda reply: reply._replace(refused=(Refusal("x", ""),)), "'x'"),
    "a word": (lambda reply: "done", "no reply"),
    "nothing": (lambda reply: Reply(), ""),
}  # fmt: skip
SCORES = {
    "not finite": (with_metric("test.score.sum", lambda value: value * torch.nan), "not finite"),
    "above one": (with_metric("test.score.total", lambda value: value * 100), "cannot be above"),
    "of more clients than there are": (with_metric("test.loss.clients", lambda value: value + 1000), "cannot be above"),
    "with a lifted importance": (with_metric("test.score.importance", lambda value: value * 10), "cannot be above"),
    "of fewer than no clients": (with_metric("test.loss.not_finite", lambda value: value - 1), "negative"),
    "of another shape": (with_metric("test.loss.histogram", lambda value: value[:, :3]), "shape"),
    "of another split": (
        lambda reply: reply._replace(metrics={f"x{k}": v for k, v in reply.metrics.items()}), "other names",
    ),
}  # fmt: skip


def run_with(fault, tmp_path, answers):
    sites = Sites(make_experiment("fedavg", rounds=3), tmp_path)
    sites.faults["b"] = at_answers(answers, fault)
    return sites.run()


@pytest.mark.parametrize("case", TRAINING)
def test_a_reply_to_training_that_cannot_be_used_is_refused(case, tmp_path):
    change, words = TRAINING[case]
    record = run_with(changed_reply(change), tmp_path, {3})
    (absent,) = [row["absent"] for row in record.metrics if "absent" in row]
    assert words in absent["b"]
    assert record.finished
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in record.metrics)


@pytest.mark.parametrize("case", SCORES)
def test_scores_that_cannot_be_are_refused(case, tmp_path):
    change, words = SCORES[case]
    record = run_with(changed_reply(change, at=0), tmp_path, {3})
    (absent,) = [row["absent"] for row in record.metrics if "absent" in row]
    assert words in absent["b"]
    assert all(0 <= row["accuracy"] <= 1 for row in record.metrics)


JOINING = {
    "no facts": lambda reply: reply._replace(facts={}),
    "a lifted importance": with_metric("importance", lambda value: value * 100),
    "a client twice": lambda reply: reply._replace(rows=Rows((*reply.rows.ids, reply.rows.ids[0]), {})),
    "clients without end": lambda reply: reply._replace(rows=Rows(NumberedIds(10**8), {})),
    "names that move the cursor": lambda reply: reply._replace(rows=Rows(("\u001b[2J",), {})),
    "no number": lambda reply: reply._replace(metrics={}),
}


@pytest.mark.parametrize("case", JOINING)
def test_a_site_that_does_not_describe_its_data_stops_the_run_with_its_name(case, tmp_path):
    assert_refused(lambda: run_with(changed_reply(JOINING[case]), tmp_path, {1}), FederationError, "site 'b'")


def test_answers_of_other_runs_and_bytes_that_are_none_are_refused(tmp_path):
    def of_another_run(data):
        return pack_answer(unpack_answer(data)._replace(run="another"))

    for at, fault in enumerate((of_another_run, lambda data: b"noise", lambda data: b"[" * 100_000)):
        record = run_with(fault, tmp_path / str(at), {3})
        assert any("b" in row.get("absent", {}) for row in record.metrics)


def test_a_code_of_a_site_is_read_as_a_sentence_of_ours(tmp_path, caplog):
    def failing(data):
        return pack_answer(unpack_answer(data)._replace(replies=[], code="not-approved"))

    run_with(failing, tmp_path, {3})
    assert "its owner has not approved this experiment" in caplog.text

    def invented(data):
        return pack_answer(unpack_answer(data)._replace(replies=[], code="invented"))

    record = run_with(invented, tmp_path / "other", {3})
    assert "something failed there" in str([row.get("absent") for row in record.metrics])


def test_text_of_another_machine_is_one_printable_line():
    assert printable("two\nlines \u001b[31mred\u009b") == "two lines [31mred"


def test_data_that_do_not_fit_are_named(tmp_path):
    def fewer_classes(reply):
        agreed = {**reply.facts["agreed"], "units": {"glucose": "mmol/l"}}
        return reply._replace(facts={**reply.facts, "agreed": agreed})

    assert_refused(lambda: run_with(changed_reply(fewer_classes), tmp_path, {1}), ValueError, "'b' does not fit",
                   "glucose", "mmol/l")  # fmt: skip


def test_waiting_ends(tmp_path):
    sites = Sites(make_experiment("fedavg", rounds=2), tmp_path)
    sites.faults = {name: at_answers({2}, lambda answer: "lost") for name in sites.services}
    assert sites.run(timeouts=Timeouts(deadline=100)).finished
    assert sites.time < 300
