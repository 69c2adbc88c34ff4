"""Secure sums: totals as without them, and no site's sum for anyone else."""

import numpy as np
import pytest
import torch

from kit.experiments import stop_after
from kit.refusals import assert_refused
from kit.sites import (
    SITES,
    SUMS_ALONE,
    Killed,
    Sites,
    Talk,
    assert_same_bits,
    assert_same_run,
    at_answers,
    make_experiment,
    make_services,
    opened,
)
from ppfl.federation.exchange import Timeouts
from ppfl.federation.messages import FederationError, Masked, Reveal, unpack_answer
from ppfl.federation.secure_sums import STEPS, add_mask, derive_key, mask_stream, to_integers
from ppfl.server import DivergedError
from ppfl.sites import Evaluate

SECURE = {"min_sites": 3}


def secure_experiment(case="fedavg", **settings):
    return make_experiment(case, **({"rounds": 4} | SUMS_ALONE | settings))


@pytest.mark.parametrize("case", ["fedavg", "ppfl-weights", "scaffold"])
def test_totals_are_those_without_masks(case, tmp_path):
    experiment = secure_experiment(case)
    masked = Sites(experiment, tmp_path / "masked", secure=SECURE).run()
    assert_same_run(Sites(experiment, tmp_path / "open").run(), masked, experiment, tolerance=1e-4)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    experiment = secure_experiment()
    whole = Sites(experiment, tmp_path / "whole", secure=SECURE).run()
    stopped = Sites(experiment, tmp_path / "stopped", secure=SECURE)
    with pytest.raises(Killed):
        stopped.run(on_round_end=stop_after(2, Killed))
    assert_same_bits(stopped.run(), whole)


def test_rounding_is_right_on_average_and_below_a_step():
    values = torch.linspace(-1, 1, 2001, dtype=torch.float64) * 1e-9
    found = to_integers({"totals": values}, 3, 0, "exchange 1", "a")["totals"].view(np.int64) * STEPS["totals"]
    error = torch.from_numpy(found) - values
    assert error.abs().max() < STEPS["totals"]
    assert error.mean().abs() < STEPS["totals"] / 20
    again = to_integers({"totals": values}, 3, 0, "exchange 1", "a")["totals"].view(np.int64) * STEPS["totals"]
    assert (found == again).all()


def test_known_answers_of_the_standards():
    """HKDF-SHA256 of RFC 5869, case A.3, and the first key stream of ChaCha20 in RFC 8439, A.1."""
    key = derive_key(b"\x0b" * 22, b"")
    assert key.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    stream = mask_stream(bytes(32), 4).tobytes()
    assert stream.hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"


def test_masks_cancel_modulo_2_to_the_64():
    numbers = np.array([5, 2**64 - 3], dtype=np.uint64)
    masked = numbers.copy()
    add_mask(masked, bytes(32), 1)
    assert (masked != numbers).all()
    add_mask(masked, bytes(32), -1)
    assert (masked == numbers).all()


def answers_of(tmp_path, experiment):
    """What each site sent in a run, by name."""
    sites = Sites(experiment, tmp_path, secure=SECURE)
    sent = {name: [] for name in SITES}
    for name in SITES:
        sites.faults[name] = lambda answer, name=name: sent[name].append(unpack_answer(answer)) or answer
    sites.run()
    return sent


def test_what_a_site_sends_looks_random_and_has_no_sum(tmp_path):
    sent = answers_of(tmp_path, secure_experiment())
    masked = [reply for name in SITES for answer in sent[name] for reply in answer.replies if isinstance(reply, Masked)]
    others = [reply for name in SITES for answer in sent[name][1:] for reply in answer.replies
              if not isinstance(reply, Masked)]  # fmt: skip
    assert masked
    assert all(not reply.totals and not reply.metrics for reply in others)
    bits = np.unpackbits(np.concatenate([reply.parts["totals"].numpy().view(np.uint8) for reply in masked]))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5


def reveal_of(talk, reply, **changes):
    ready = reply.facts["ready"]
    nonces = {"a": ready.nonce, "b": "0", "c": "1"}
    return Reveal(talk.number, ready.digest, nonces)._replace(**changes)


@pytest.fixture
def talk(tmp_path):
    """A conversation with site a, which has secure sums with b and c."""
    experiment = secure_experiment("ditto")
    services = make_services(tmp_path, SITES, experiment, secure=SECURE)
    conversation = Talk(services["a"], experiment)
    conversation.begin()
    return conversation


def test_a_set_may_only_shrink_and_no_sum_is_revealed_for_two(talk):
    (reply,) = talk.ask(talk.training())
    reveal, number = reveal_of(talk, reply), talk.number
    nonces = reveal.nonces
    sets = {
        "too small": {name: nonces[name] for name in ("a", "b")},
        "without this site": {name: nonces[name] for name in ("b", "c")},
        "with a stranger": nonces | {"d": "2"},
        "another nonce": nonces | {"a": "0"},
    }
    for wrong in sets.values():
        assert talk.ask(reveal._replace(nonces=wrong)) == "secure-set"
    assert talk.ask(reveal._replace(number=99)) == "secure-set"
    assert talk.ask(reveal._replace(digest="0")) == "secure-set"
    (first,) = talk.ask(reveal._replace(number=number))
    assert isinstance(first, Masked)
    (other,) = talk.ask(reveal._replace(number=number, nonces=nonces | {"b": "another"}))
    assert not other.parts["totals"].equal(first.parts["totals"])  # a mask that depends on all nonces


def test_a_set_that_has_shrunk_does_not_grow_again(tmp_path):
    experiment = secure_experiment("ditto")
    services = make_services(tmp_path, (*SITES, "d"), experiment, secure=SECURE)
    talk = Talk(services["a"], experiment)
    talk.begin()
    (reply,) = talk.ask(talk.training())
    nonce, digest = reply.facts["ready"].nonce, reply.facts["ready"].digest
    few, all_of_them = {"a": nonce, "b": "0", "c": "1"}, {"a": nonce, "b": "0", "c": "1", "d": "2"}
    number = talk.number
    assert isinstance(talk.ask(Reveal(number, digest, few))[0], Masked)
    assert talk.ask(Reveal(number, digest, all_of_them)) == "secure-set"
    (reply,) = talk.ask(talk.training(exchange=2))
    nonce, digest = reply.facts["ready"].nonce, reply.facts["ready"].digest
    assert talk.ask(Reveal(talk.number, digest, all_of_them | {"a": nonce})) == "secure-set"


def test_a_site_that_does_not_reveal_loses_the_round_and_nothing_else(tmp_path):
    experiment = secure_experiment("ditto", rounds=5)
    sites = Sites(experiment, tmp_path, secure=SECURE)
    lost = []

    def lose_one_reveal(answer):
        reveals = [isinstance(one, Reveal) for one in opened(sites.pushed[-1][1]).requests]
        trains = not any(isinstance(one, Evaluate) for one in opened(sites.pushed[-2][1]).requests)
        if all(reveals) and trains and not lost:
            lost.append(answer)
            return 10_000.0
        return answer

    sites.faults["b"] = lose_one_reveal
    record = sites.run(timeouts=Timeouts(deadline=100))
    assert lost
    assert [row["participants"] for row in record.metrics].count(0) == 1
    assert record.finished


def test_numbers_that_do_not_fit_end_the_run(tmp_path):
    experiment = secure_experiment("fedavg", method={"name": "fedavg", "lr": 1e9, "momentum": 0.0, "local_epochs": 3})
    sites = Sites(experiment, tmp_path, secure=SECURE)
    with pytest.raises((DivergedError, FederationError)):
        sites.run()


def test_sites_without_secure_sums_are_refused(tmp_path):
    sites = Sites(secure_experiment(), tmp_path)
    assert_refused(lambda: sites.run(secure=True), FederationError, "'a' has no secure sums")


def test_an_experiment_that_shows_clients_is_refused_before_anything_is_sent(tmp_path):
    sites = Sites(make_experiment("fedavg"), tmp_path, secure=SECURE)
    assert_refused(sites.run, ValueError, "scores of each client", "report_clients = false")
    assert not sites.pushed


def test_a_late_reveal_is_counted_and_dropped(tmp_path):
    sites = Sites(secure_experiment(rounds=3), tmp_path, secure=SECURE)
    sites.faults["c"] = at_answers({3}, lambda answer: "the relay was killed")
    assert sites.run().finished
