"""Totals are exact with and without sites that drop out, and what one site sent shows nothing."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from kit.masked_sites import (
    PAIRS,
    PUBLIC_KEYS,
    STEP,
    GivenSums,
    integer_sums,
    masked,
    secure,
    train_request,
)
from ppfl.core.errors import PPFLError, SettingError
from ppfl.federation.certificates import create_key_pair
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.secure_sums import MaskedSite, SecureSettings
from ppfl.federation.secure_sums.mask_streams import add_mask, pair_sign, part_key
from ppfl.server import DivergedError
from ppfl.sites import Describe, Evaluate, Refusal, Reply, Save
from ppfl.sites.messages import AcceptKeys, Masked, MaskedNote, OfferKey, Unmask

NAMES = ("a", "b", "c", "d", "e")


def total_of(reply: Reply) -> torch.Tensor:
    total = reply.totals["models"]
    return torch.cat([total.weight, total.value["weight"]])


# ---------------------------------------------------------------------- totals


@pytest.mark.parametrize("names", [NAMES[:2], NAMES[:3], NAMES])
def test_the_total_is_exact(names: tuple[str, ...]) -> None:
    sums = integer_sums(names)
    transport, _ = secure(sums)
    for exchange in (1, 2, 3):
        (reply,) = transport.ask([train_request(exchange)])
        assert torch.equal(total_of(reply), sum(sums.values()))
        assert torch.equal(reply.totals["models"].value["bias"], -total_of(reply)[:1])
        assert float(reply.metrics["participants"]) == 5 * len(names)
        assert float(reply.metrics["loss"]) == 1.25 * len(names)
        assert reply.metrics.keys() == {"asked", "participants", "bytes_up", "loss"} and not reply.by_site


@pytest.mark.parametrize(
    ("before", "after"),
    [("c", ""), ("ac", ""), ("", "b"), ("", "be"), ("c", "a"), ("e", "c"), ("a", "b")],
    ids=lambda names: names or "none",
)
def test_the_total_of_those_who_answered_is_exact(before: str, after: str) -> None:
    """Sites that are lost before they send their sums, and others after that, when masks are opened."""
    sums = integer_sums(NAMES)
    transport, sites = secure(sums, threshold=3)
    transport.ask([train_request(1)])
    sites.down = {Masked: {*before}, Unmask: {*before, *after}}
    (reply,) = transport.ask([train_request(2)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in NAMES if name not in before))


def test_a_site_that_comes_back_takes_part_again() -> None:
    sums = integer_sums(NAMES)
    transport, sites = secure(sums)
    sites.down = {kind: {"b"} for kind in (OfferKey, AcceptKeys, Masked, Unmask)}
    (reply,) = transport.ask([train_request(1)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in "acde"))
    sites.down = {}
    transport.ask([train_request(2)])  # it says that it has no keys
    (reply,) = transport.ask([train_request(3)])
    assert torch.equal(total_of(reply), sum(sums.values()))


def test_a_site_that_was_started_again_takes_part_again() -> None:
    sums = integer_sums(NAMES[:3])
    transport, sites = secure(sums)
    transport.ask([train_request(1)])
    settings = sites.sites[1].settings
    restarted = masked(GivenSums("b", sums["b"]), settings, NAMES[:3], seed="again")
    sites.sites = (sites.sites[0], restarted, sites.sites[2])
    (reply,) = transport.ask([train_request(2)])
    assert torch.equal(total_of(reply), sums["a"] + sums["c"])
    (reply,) = transport.ask([train_request(3)])
    assert torch.equal(total_of(reply), sum(sums.values()))


def test_a_site_of_which_no_client_took_part_has_counts_alone() -> None:
    sums = integer_sums(NAMES) | {"b": None}
    transport, sites = secure(sums)
    (reply,) = transport.ask([train_request(1)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in "acde"))
    assert (float(reply.metrics["asked"]), float(reply.metrics["participants"])) == (25, 20)
    sites.down = {Masked: {"c"}, Unmask: {"c"}}
    (reply,) = transport.ask([train_request(2)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in "ade"))
    assert (float(reply.metrics["asked"]), float(reply.metrics["participants"])) == (20, 15)


def test_nobody_took_part() -> None:
    (reply,) = secure(dict.fromkeys(NAMES))[0].ask([train_request()])
    assert reply.totals == {} and float(reply.metrics["asked"]) == 25 and float(reply.metrics["participants"]) == 0


def test_several_requests_in_one_message() -> None:
    sums = integer_sums(NAMES[:3])
    transport, sites = secure(sums)
    transport.ask([train_request(1)])
    before = len(sites.replies)
    one, two = transport.ask([train_request(2), train_request(3)])
    assert torch.equal(total_of(one), sum(sums.values())) and torch.equal(total_of(two), sum(sums.values()))
    assert len(sites.replies) - before == 2 * 3  # one message with sums and one that opens them, for each site


@pytest.mark.parametrize(("step", "largest", "bits"), [(2.0**-10, 1000.0, 32), (2.0**-32, 1e6, 64)])
def test_rounding_adds_less_than_a_step_for_each_site(step: float, largest: float, bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = {name: 300 * torch.randn(400, generator=generator, dtype=torch.float64) for name in NAMES}
    transport, sites = secure(sums, SecureSettings(step=step, largest=largest * 2))
    (reply,) = transport.ask([train_request()])
    error = (total_of(reply) - sum(sums.values())).abs()
    assert 0 < float(error.max()) < len(NAMES) * step
    sent = next(replies[0].metrics["totals"] for _, replies in sites.replies if "totals" in replies[0].metrics)
    assert 8 * sent.element_size() == bits


def test_a_resumed_run_rounds_in_the_same_way() -> None:
    sums = {name: torch.rand(100, dtype=torch.float64) for name in NAMES[:3]}
    totals = []
    for skipped in (0, 4):  # requests for other things before it, with other keys
        transport, _ = secure(sums)
        for _ in range(skipped):
            transport.ask([train_request(1)])
        totals.append(total_of(transport.ask([train_request(2)])[0]))
    assert torch.equal(*totals)


def test_training_that_diverges_ends_with_an_error() -> None:
    sums = integer_sums(NAMES[:3])
    sums["b"][3:5] = 1e30
    with pytest.raises(DivergedError, match="2 numbers of the sums"):
        secure(sums)[0].ask([train_request()])


# ---------------------------------------------------------------------- what one site sent


def looks_uniform(data: bytes) -> bool:
    """Chi-square test on the bytes: an even source fails once in a million times."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-6, 255)


def sent_totals(replies) -> dict[str, np.ndarray]:
    """The masked totals of each site's last reply that has any."""
    return {name: reply.metrics["totals"].numpy() for name, (reply,) in replies if "totals" in reply.metrics}


def test_what_a_site_sends_looks_like_random_bytes() -> None:
    sums = {name: torch.linspace(-1, 1, 20_000, dtype=torch.float64) for name in NAMES[:3]}
    transport, sites = secure(sums)
    transport.ask([train_request()])
    sent = sent_totals(sites.replies)
    for one in sent.values():
        assert looks_uniform(one.tobytes())
    assert looks_uniform((sent["a"] + sent["b"]).tobytes())  # a part of the total does too
    plain = (torch.cat([sums["a"]]) / STEP).long().numpy()
    assert not looks_uniform(plain.tobytes())
    assert not looks_uniform((3 * plain).tobytes())  # as the total is when it has been opened


def test_what_a_site_sent_stays_masked_when_the_total_is_open() -> None:
    """The server then has every own mask: the ones that sites have in common still cover each of them."""
    sums = {name: torch.linspace(-1, 1, 20_000, dtype=torch.float64) for name in NAMES[:3]}
    transport, sites = secure(sums)
    seen = {}
    opened = transport._opened
    transport._opened = lambda *asked: seen.setdefault("opened", opened(*asked))
    transport.ask([train_request()])
    uncovered = {}
    for name, one in sent_totals(sites.replies).items():
        uncovered[name] = one.copy().view(np.uint64)
        add_mask(uncovered[name], part_key(seen["opened"].own[name], "totals"), -1)
        assert looks_uniform(uncovered[name].tobytes())
    assert looks_uniform((uncovered["a"] + uncovered["b"]).tobytes())
    assert not looks_uniform((uncovered["a"] + uncovered["b"] + uncovered["c"]).tobytes())  # the total itself


def test_sums_that_come_late_stay_masked() -> None:
    """The server took a site for lost and opened the masks that others had in common with it. Its own mask is left."""
    sums = {name: torch.linspace(-1, 1, 20_000, dtype=torch.float64) for name in NAMES[:3]}
    transport, sites = secure(sums)
    transport.ask([train_request(1)])
    seen, opened = {}, transport._opened
    transport._opened = lambda *asked: seen.setdefault("opened", opened(*asked))
    sites.down = {Masked: {"c"}, Unmask: {"c"}}
    transport.ask([train_request(2)])
    late = sites.sites[2].answer(Masked("run-1", transport._keys, 2, train_request(2))).metrics["totals"]
    uncovered = late.numpy().copy().view(np.uint64)
    for other in "ab":
        add_mask(uncovered, part_key(seen["opened"].pairs[other, "c"], "totals"), -pair_sign("c", other))
    assert seen["opened"].own.keys() == {"a", "b"}
    assert looks_uniform(uncovered.tobytes())


def test_masks_differ_from_request_to_request() -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    sent = []
    for _ in range(2):  # the same sums twice
        transport.ask([train_request(1)])
        sent.append(sent_totals(sites.replies)["a"].copy())
    assert looks_uniform((sent[0] - sent[1]).tobytes()) and np.count_nonzero(sent[0] - sent[1]) > 45


def test_no_number_with_a_fraction_leaves_a_site() -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    transport.ask([train_request()])
    for _, replies in sites.replies:
        for reply in replies:
            assert not reply.totals and not reply.rows.values
            assert all(value.dtype in (torch.int32, torch.int64) for value in reply.metrics.values())


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("lost", ["ab", "bc"])
def test_a_total_over_too_few_sites_is_refused(lost: str) -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    transport.ask([train_request(1)])
    sites.down = {Masked: {*lost}, Unmask: {*lost}}
    with pytest.raises(FederationError, match=r"1 of 3 sites answered \(missing: [ab], [bc]\)"):
        transport.ask([train_request(2)])


def test_a_site_does_not_open_a_total_over_too_few_sites() -> None:
    """Whatever the server thinks is enough: this one asks all the same."""
    transport, sites = secure(integer_sums(NAMES[:4]), min_sites=3)
    transport.ask([train_request(1)])
    sites.down = {Masked: {"a", "b"}}
    transport.settings = SecureSettings(min_sites=2, threshold=2)
    with pytest.raises(FederationError, match="site 'c' refused to open a total over 2 sites; it needs 3"):
        transport.ask([train_request(2)])


def test_a_total_over_too_few_clients_is_refused() -> None:
    transport, _ = secure(integer_sums(NAMES[:3]), clients=3, min_clients=9)
    transport.ask([train_request(1)])
    transport, _ = secure(integer_sums(NAMES[:3]), clients=3, min_clients=10)
    with pytest.raises(FederationError, match="a total over 9 clients; min_clients is 10"):
        transport.ask([train_request(1)])


def test_clients_of_one_site_alone_are_too_few_sites() -> None:
    sums = integer_sums(NAMES[:3]) | {"b": None, "c": None}
    with pytest.raises(FederationError, match="clients of 1 sites took part"):
        secure(sums)[0].ask([train_request()])


def test_too_few_sites_help_to_open() -> None:
    transport, sites = secure(integer_sums(NAMES))
    sites.down = {Unmask: {"a", "b", "c"}}
    with pytest.raises(FederationError, match="2 sites helped to open a total and 3 are needed"):
        transport.ask([train_request()])


def begun(settings: SecureSettings | None = None):
    """Three sites with keys, and the packets of request 1."""
    transport, sites = secure(integer_sums(NAMES[:3]), settings)
    transport._agree_on_keys()
    first = transport._masked(train_request())
    notes = {site.name: site.answer(first).by_site[site.name] for site in sites.sites}
    assert all(isinstance(note, MaskedNote) for note in notes.values())
    return transport, sites.sites, first, {name: note.packets for name, note in notes.items()}


def test_a_repeated_request_gets_the_same_answer_and_another_one_none() -> None:
    _, (site, *_), first, _ = begun()
    again = site.answer(first)
    assert torch.equal(again.metrics["totals"], site.answer(first).metrics["totals"])
    with pytest.raises(FederationError, match="request 1 came to site 'a' a second time with other contents"):
        site.answer(first._replace(request=train_request(2)))


def test_a_request_of_another_run_is_refused() -> None:
    transport, (site, *_), first, packets = begun()
    for request in (first._replace(run="run-2"), Unmask("run-2", transport._keys, 1, packets)):
        with pytest.raises(FederationError, match="takes part in run 'run-1' and got a request of run 'run-2'"):
            site.answer(request)


def test_a_total_is_opened_for_one_set_of_sites() -> None:
    transport, (site, *_), _, packets = begun()
    question = Unmask(transport.run, transport._keys, 1, packets)
    assert site.answer(question).by_site["a"] == site.answer(question).by_site["a"]
    fewer = {name: packets[name] for name in "ab"}
    with pytest.raises(FederationError, match="was opened for a, b, c and cannot be opened for a, b"):
        site.answer(question._replace(packets=fewer))


def test_packets_of_another_request_are_refused() -> None:
    transport, sites, _, packets = begun()
    second = transport._masked(train_request(2))
    for site in sites:
        site.answer(second)
    with pytest.raises(FederationError, match="is not of request 2 with these keys, or was changed"):
        sites[0].answer(Unmask(transport.run, transport._keys, 2, packets))
    with pytest.raises(FederationError, match="asked to open request 3"):
        sites[0].answer(Unmask(transport.run, transport._keys, 3, packets))
    others = {name: packets[name] for name in "bc"}
    assert sites[0].answer(Unmask(transport.run, transport._keys, 1, others)) == Reply()  # a total without its own


def test_keys_of_the_past_open_nothing() -> None:
    """After new keys were agreed on, a site says of older ones that it has none."""
    transport, (site, *_), first, packets = begun()
    transport._agree_on_keys()
    for request in (first, Unmask(first.run, first.keys, 1, packets)):
        (note,) = site.answer(request).by_site.values()
        assert type(note).__name__ == "NoKeys"


def test_a_site_with_another_key_than_the_pinned_one_is_refused() -> None:
    """It cannot start with the others' folder, and what it signs with its own key nobody accepts."""
    settings, thief = SecureSettings(), create_key_pair()
    site = GivenSums("b", torch.zeros(5))
    with pytest.raises(FederationError, match="does not belong to the public key"):
        MaskedSite(site, thief.private_key, PUBLIC_KEYS, settings)
    transport, sites = secure(integer_sums(NAMES[:3]), settings)
    sites.sites = (
        sites.sites[0],
        MaskedSite(site, thief.private_key, {"b": thief.public_key}, settings),
        sites.sites[2],
    )
    with pytest.raises(FederationError, match="site 'b' offered a key that is not signed, for run 'run-1'"):
        transport.ask([train_request()])


def test_a_site_refuses_keys_that_the_server_made_up() -> None:
    """A server that puts its own key in the place of a site's, or replays an offer of another run."""
    transport, sites, _, _ = begun()
    offers = {site.name: site.answer(OfferKey("run-1")).by_site[site.name] for site in sites}
    server = GivenSums("b", None)
    made_up = MaskedSite(server, PAIRS["c"].private_key, {"b": PUBLIC_KEYS["c"]}, transport.settings)
    forged = made_up.answer(OfferKey("run-1")).by_site["b"]
    old = masked(GivenSums("b", None), transport.settings, NAMES[:3]).answer(OfferKey("run-0")).by_site["b"]
    for wrong in (forged, old, offers["c"], offers["b"]._replace(signature="00")):
        with pytest.raises(FederationError, match="'b' offered a key that is not signed"):
            sites[0].answer(AcceptKeys("run-1", offers | {"b": wrong}))
    stranger = offers | {"z": offers["b"]}
    with pytest.raises(FederationError, match="site 'z' is not one of a, b, c"):
        sites[0].answer(AcceptKeys("run-1", stranger))
    with pytest.raises(PPFLError, match="1 sites take part, and a total needs 2"):
        sites[0].answer(AcceptKeys("run-1", {"a": offers["a"]}))


def test_sites_with_other_settings_are_refused() -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    other = SecureSettings(min_sites=3)
    sites.sites = (*sites.sites[:2], masked(GivenSums("c", None), other, NAMES[:3]))
    with pytest.raises(FederationError, match="site 'c' has the secure sums settings .*give all sites the same"):
        transport.ask([train_request()])


def test_rows_are_refused() -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    sites.sites[1].site.rows = {"membership": torch.ones(1, 2)}
    with pytest.raises(FederationError, match="site 'b' has secure sums on and would show membership of each"):
        transport.ask([train_request()])
    with pytest.raises(FederationError, match="would show its clients' states"):
        sites.sites[1].answer(Save("main", 1))
    with pytest.raises(SettingError, match="set report_clients = false"):
        transport.ask([Evaluate("main", ("test",), {}, {})])


def test_sums_without_masks_are_refused_and_a_description_has_none() -> None:
    _, (site, *_), first, _ = begun()
    with pytest.raises(FederationError, match="asked for sums without masks"):
        site.answer(train_request())
    assert site.answer(Describe()).metrics == {}
    with pytest.raises(FederationError, match="a Save has no sums that are masked"):
        site.answer(first._replace(number=2, request=Save("main", 1)))


def test_the_norm_of_a_refused_upload_stays_at_the_site() -> None:
    transport, sites = secure(integer_sums(NAMES[:3]))
    given = sites.sites[0].site
    answer = given.answer
    reasons = [("x", "its update has norm 123.4, most have 1.2"), ("y", "its update is not finite")]
    given.answer = lambda request: answer(request)._replace(refused=tuple(Refusal(*reason) for reason in reasons))
    (reply,) = transport.ask([train_request()])
    assert [refusal.client for refusal in reply.refused] == ["x", "y"]
    assert "123" not in reply.refused[0].reason and "not finite" in reply.refused[1].reason
