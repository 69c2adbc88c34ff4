"""Totals are exact with and without sites that drop out, and what one site sent shows nothing."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from kit.masked_sites import PAIRS, PUBLIC_KEYS, STEP, GivenSums, integer_sums, masked, secure, train_request
from kit.messages import AcceptKeys, Masked, OfferKey, Unmask
from kit.refusals import SettingError, assert_refused
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.secure_sums import MaskedSite, SecureSettings
from ppfl.federation.secure_sums.fixed_point import fixed_point, whole_range
from ppfl.federation.secure_sums.mask_streams import add_mask, pair_sign, part_key
from ppfl.server import DivergedError
from ppfl.sites import Evaluate, Refusal, Reply, Save

NAMES = ("a", "b", "c", "d", "e")
SETTINGS = SecureSettings(step=STEP, largest=2.0**20)


def total_of(reply):
    total = reply.totals["models"]
    return torch.cat([total.weight, total.value["weight"]])


LOST = ["  ", "c  ", "ac  ", " b ", " be ", "c a ", "a b ", "c  b", "  abcde"]  # before, after, without clients


@pytest.mark.parametrize(("names", "lost"), [("ab", "  "), ("abc", "  "), *(("abcde", lost) for lost in LOST)])
def test_the_total_of_those_who_answered_is_exact(names, lost):
    """Sites are lost before they send their sums, or when masks are opened; of some no client takes part."""
    before, after, without = lost.split(" ")
    sums = integer_sums(names) | dict.fromkeys(without)
    transport, below = secure(sums)
    transport.ask([train_request(1)])
    below.down, earlier = {Masked: {*before}, Unmask: {*before, *after}}, len(below.replies)
    here = [sums[name] for name in names if name not in before + without]
    for reply in transport.ask([train_request(2), train_request(3)]):  # several requests in one message
        assert torch.equal(total_of(reply), sum(here)) if here else reply.totals == {}
        assert not here or torch.equal(reply.totals["models"].value["bias"], -total_of(reply)[:1])
        counts = {name: float(value) for name, value in reply.metrics.items() if name != "bytes_up"}
        expected = {"asked": 5 * (len(names) - len(before)), "participants": 5 * len(here)}
        assert counts == (expected | {"loss": 1.25 * len(here)} if here else expected) and not reply.by_site
    most = 2 * len(names)  # one message with sums and one that opens them, for each site
    assert len(below.replies) - earlier == most - 2 * len(before) - len(after)


@pytest.mark.parametrize("started_again", [False, True])
def test_a_site_that_comes_back_takes_part_again(started_again):
    """It was away when keys were agreed on, or has lost them: it says so, and all agree on new ones."""
    sums = integer_sums(NAMES)
    transport, below = secure(sums)
    if not started_again:
        below.down = {kind: {"b"} for kind in (OfferKey, AcceptKeys, Masked, Unmask)}
    (reply,) = transport.ask([train_request(1)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in sums if started_again or name != "b"))
    below.down = {}
    if started_again:
        below.sites[1] = masked(GivenSums("b", sums["b"]), below.sites[1].settings, NAMES, seed="again")
    (reply,) = transport.ask([train_request(2)])
    assert torch.equal(total_of(reply), sum(sums[name] for name in "acde"))
    (reply,) = transport.ask([train_request(3)])
    assert torch.equal(total_of(reply), sum(sums.values()))


@pytest.mark.parametrize(("step", "largest", "bits"), [(2.0**-10, 2000.0, 32), (2.0**-32, 2e6, 64)])
def test_rounding_adds_less_than_a_step_for_each_site_and_is_the_same_when_resumed(step, largest, bits):
    generator, totals = torch.Generator().manual_seed(0), []
    sums = {name: 300 * torch.randn(400, generator=generator, dtype=torch.float64) for name in NAMES}
    for earlier in (0, 4):  # requests for other things before it, with other keys
        transport, below = secure(sums, SecureSettings(step=step, largest=largest))
        for _ in range(earlier):
            transport.ask([train_request(1)])
        totals.append(total_of(transport.ask([train_request(2)])[0]))
    assert torch.equal(*totals)
    assert 0 < float((totals[0] - sum(sums.values())).abs().max()) < len(NAMES) * step
    assert all(8 * sent.itemsize == bits for sent in sent_totals(below.replies).values())


def test_a_total_of_the_largest_numbers_does_not_wrap_and_the_smaller_modulus_is_chosen_where_it_is_enough():
    for step, largest, sites in [(2.0**-16, 1e3, 10), (2.0**-32, 2.0**20, 10), (0.3, 1e6, 3), (1.0, 2.0**29 - 1, 4)]:
        for numbers in (fixed_point(step, largest, sites), whole_range(step, sites)):
            for value in (numbers.largest, -numbers.largest):
                values = torch.full((8,), value, dtype=torch.float64)
                draws = torch.linspace(0, 1 - 2.0**-53, 8, dtype=torch.float64)
                integers, clipped = numbers.to_integers(values, draws)
                total = np.add.reduce([integers] * sites, dtype=integers.dtype)
                error = (numbers.to_numbers(total) - sites * values).abs()
                assert clipped == 0 and float(error.max()) <= sites * step + 1e-15 * sites * numbers.largest
    # sums of 4 integers of up to ceil(largest / step) + 1 fit into 31 bits, and into 32 not
    assert fixed_point(1.0, (2**31 - 1) // 4 - 1.0, 4).bits == 32
    assert fixed_point(1.0, (2**31 - 1) // 4 + 0.0, 4).bits == 64
    assert_refused(lambda: fixed_point(2.0**-40, 2.0**30, 4), SettingError, "64 bits")


def test_rounding_has_no_drift():
    """Of 40,000 equal numbers the mean error has a standard deviation of sqrt(f (1 - f) / 40000) steps."""
    numbers, n = fixed_point(1.0, 1000.0, 3), 40_000
    draws = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for fraction in (0.1, 0.5, 0.9):
        integers, _ = numbers.to_integers(torch.full((n,), 7 + fraction, dtype=torch.float64), draws)
        drift = float(numbers.to_numbers(integers).mean()) - 7 - fraction
        assert abs(drift) < 5 * math.sqrt(fraction * (1 - fraction) / n)


def test_what_is_too_large_or_no_number_is_clipped_counted_and_ends_in_an_error():
    numbers = fixed_point(2.0**-16, 1000.0, 3)
    values = torch.tensor([1000.0, 1000.1, -2000.0, math.inf, math.nan, 3.0])
    integers, clipped = numbers.to_integers(values, torch.zeros(6, dtype=torch.float64))
    assert clipped == 4
    assert numbers.to_numbers(integers).tolist() == [1000.0, 1000.0, -1000.0, 1000.0, 0.0, 3.0]
    sums = integer_sums(NAMES[:3])
    sums["b"][3:5] = 1e30
    assert_refused(lambda: secure(sums)[0].ask([train_request()]), DivergedError, "2 numbers")


def looks_uniform(data):
    """Chi-square test on the bytes: an even source fails once in a million times."""
    counts = np.bincount(np.frombuffer(data.tobytes(), dtype=np.uint8), minlength=256)
    expected = data.nbytes / 256
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-6, 255)


def sent_totals(replies):
    """The masked totals of each site's last reply that has any."""
    sent = {name: reply.metrics["totals"].numpy() for name, (reply,) in replies if "totals" in reply.metrics}
    return {name: one.copy().view(f"u{one.itemsize}") for name, one in sent.items()}


def watched():
    """Three sites with sums that are anything but random, the server's way to them, and what the server opens."""
    sums = {name: torch.linspace(-1, 1, 20_000, dtype=torch.float64) for name in NAMES[:3]}
    transport, below = secure(sums)
    opened, seen = transport._opened, []
    transport._opened = lambda *asked: seen.append(opened(*asked)) or seen[-1]
    return transport, below, seen


def test_what_a_site_sends_looks_random_also_when_the_total_is_open():
    """The server then has every own mask: the ones that sites have in common still cover each of them."""
    transport, below, seen = watched()
    transport.ask([train_request()])
    sent = sent_totals(below.replies)
    plain = (torch.linspace(-1, 1, 20_000, dtype=torch.float64) / STEP).long().numpy()
    assert not looks_uniform(plain) and not looks_uniform(3 * plain)  # as the total is when it has been opened
    for opened in (False, True):
        for name, one in sent.items():
            if opened:
                add_mask(one, part_key(seen[0].own[name], "totals"), -1)
            assert looks_uniform(one)
        assert looks_uniform(sent["a"] + sent["b"])  # a part of the total does too
    assert not looks_uniform(sent["a"] + sent["b"] + sent["c"])  # the total itself
    for _, replies in below.replies:  # and no number with a fraction leaves a site
        for reply in replies:
            assert not reply.totals and not reply.rows.values
            assert all(value.dtype in (torch.int32, torch.int64) for value in reply.metrics.values())
    transport.ask([train_request()])  # the same sums again have other masks
    first, second = (sent_totals(below.replies[:at])["a"] for at in (len(below.replies) // 2, None))
    assert looks_uniform(first - second) and np.count_nonzero(first - second) > 0.99 * len(first)


def test_sums_that_come_late_stay_masked():
    """The server took a site for lost and opened the masks that others had in common with it. Its own mask is left."""
    transport, below, seen = watched()
    transport.ask([train_request(1)])
    below.down = {Masked: {"c"}, Unmask: {"c"}}
    transport.ask([train_request(2)])
    reply = below.sites[2].answer(Masked("run-1", transport._keys, 2, train_request(2)))
    late = sent_totals([("c", (reply,))])["c"]
    for other in "ab":
        add_mask(late, part_key(seen[-1].pairs[other, "c"], "totals"), -pair_sign("c", other))
    assert seen[-1].own.keys() == {"a", "b"} and looks_uniform(late)


def lost(kinds, names, sites=3, of_server=None, **options):
    """Ask twice, the second time without some sites; the server may have settings of its own."""
    transport, below = secure(integer_sums(NAMES[:sites]), **options)
    transport.ask([train_request(1)])
    below.down, transport.settings = {kind: {*names} for kind in kinds}, of_server or transport.settings
    return transport


def thief():
    """In the place of site b, with the key of another one."""
    return MaskedSite(GivenSums("b", None), PAIRS["d"].private_key, {"b": PUBLIC_KEYS["d"]}, SETTINGS)


def second_site(site):
    transport, below = secure(integer_sums(NAMES[:3]))
    below.sites[1] = site
    return transport


GREEDY = SecureSettings(min_sites=2, threshold=2)
OTHER = masked(GivenSums("b", None), SecureSettings(min_sites=3), NAMES[:3])
ROWS = masked(GivenSums("b", torch.ones(50), rows={"membership": torch.ones(1, 2)}), SETTINGS, NAMES[:3])
REFUSED_BY_SERVER = {
    "one site is left": (lambda: lost([Masked, Unmask], "ab"), ("1 of 3 sites", "missing: a, b")),
    "sites refuse": (lambda: lost([Masked], "ab", 4, GREEDY, min_sites=3), ("'c'", "over 2 sites", "needs 3")),
    "few clients": (lambda: secure(integer_sums("abc"), clients=3, min_clients=10)[0], ("9 clients", "min_clients")),
    "clients of one site": (lambda: secure(integer_sums("a") | {"b": None, "c": None})[0], ("clients of 1 sites",)),
    "few help to open": (lambda: lost([Unmask], "abc", 5), ("2 sites helped", "3 are needed")),
    "another key": (lambda: second_site(thief()), ("'b'", "not signed")),
    "other settings": (lambda: second_site(OTHER), ("'b'", "settings")),
    "rows": (lambda: second_site(ROWS), ("'b'", "would show membership")),
}


@pytest.mark.parametrize("case", REFUSED_BY_SERVER)
def test_a_total_that_would_show_too_much_is_refused(case):
    make, words = REFUSED_BY_SERVER[case]
    transport = make()
    assert_refused(lambda: transport.ask([train_request(2)]), FederationError, *words)


def test_enough_clients_and_sites_are_counted_with_the_bound_itself():
    transport, _ = secure(integer_sums(NAMES[:3]), clients=3, min_clients=9)
    transport.ask([train_request(1)])
    assert [SecureSettings().needed(sites) for sites in (2, 3, 4, 5)] == [2, 2, 3, 3]
    assert_refused(lambda: SecureSettings(min_sites=4).needed(3), SettingError, "3 sites take part")
    assert_refused(lambda: transport.ask([Evaluate("main", ("test",), {}, {})]), SettingError, "report_clients = false")


class Begun:
    """Three sites with keys that have answered request 1."""

    def __init__(self):
        self.transport, below = secure(integer_sums(NAMES[:3]))
        self.transport._agree_on_keys()
        self.sites, self.first = below.sites, self.transport._masked(train_request())
        self.packets = {site.name: site.answer(self.first).by_site[site.name].packets for site in self.sites}
        self.question = Unmask(self.first.run, self.first.keys, 1, self.packets)

    def accept(self, **changes):
        """Keys of all sites come to site a, some of them changed."""
        offers = {site.name: site.answer(OfferKey("run-1")).by_site[site.name] for site in self.sites}
        made = {name: change(offers) for name, change in changes.items()}
        return self.sites[0].answer(AcceptKeys("run-1", offers | made))

    def opened_for_fewer(self):
        self.sites[0].answer(self.question)
        return self.question._replace(packets={name: self.packets[name] for name in "ab"})


def offer_of_b(run, site):
    return site.answer(OfferKey(run)).by_site["b"]


REFUSED_BY_SITE = {
    "other contents": (lambda b: b.first._replace(request=train_request(2)), ("second time",)),
    "masks of another run": (lambda b: b.question._replace(run="run-2"), ("run-1", "run-2")),
    "opened for fewer": (lambda b: b.opened_for_fewer(), ("opened for a, b, c",)),
    "without masks": (lambda b: train_request(), ("without masks",)),
    "masked states": (lambda b: b.first._replace(number=2, request=Save("main", 1)), ("Save",)),
    "made up key": (lambda b: b.accept(b=lambda offers: offer_of_b("run-1", thief())), ("'b'", "not signed")),
    "key of another run": (lambda b: b.accept(b=lambda offers: offer_of_b("run-0", b.sites[1])), ("'b'", "not signed")),
    "stranger": (lambda b: b.accept(z=lambda offers: offers["b"]), ("'z'", "a, b, c")),
}


@pytest.mark.parametrize("case", REFUSED_BY_SITE)
def test_a_site_refuses_what_could_uncover_its_sums(case):
    make, words = REFUSED_BY_SITE[case]
    begun = Begun()
    assert_refused(lambda: begun.sites[0].answer(make(begun)), FederationError, *words)


def test_a_repeated_request_gets_the_same_answer_and_keys_of_the_past_open_nothing():
    begun = Begun()
    site = begun.sites[0]
    one, other = (site.answer(begun.first).metrics["totals"] for _ in range(2))
    assert torch.equal(one, other)
    assert site.answer(begun.question).by_site == site.answer(begun.question).by_site
    others = begun.question._replace(packets={name: begun.packets[name] for name in "bc"})
    assert site.answer(others) == Reply()  # a total without its own
    begun.transport._agree_on_keys()
    for request in (begun.first, begun.question):
        (note,) = site.answer(request).by_site.values()
        assert type(note).__name__ == "NoKeys"


def test_the_norm_of_a_refused_upload_stays_at_the_site():
    transport, below = secure(integer_sums(NAMES[:3]))
    given = below.sites[0].site
    answer, refused = given.answer, (Refusal("x", "its update has norm 123.4, most have 1.2"),)
    given.answer = lambda request: answer(request)._replace(refused=refused)
    (reply,) = transport.ask([train_request()])
    assert reply.refused[0].client == "x" and "123" not in reply.refused[0].reason
