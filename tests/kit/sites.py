"""Sites in this process behind a carrier that can lose, delay and change messages; time is a number."""

from collections import defaultdict
from pathlib import Path

from ppfl.federation.carrier import Delivery, OnlineSite
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import SiteSettings


class FakeClock:
    """Goes on only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FakeCarrier:
    """By default every message is answered at once. `faults[site]` are called with each reply, and may change it:
    None loses it, a number of seconds delays it, bytes replace it."""

    def __init__(self, services: dict[str, SiteService], clock: FakeClock) -> None:
        self.services, self.clock = services, clock
        self.since = dict.fromkeys(services, "start")
        self.faults: dict[str, list] = defaultdict(list)
        self.pushed: list[tuple[str, bytes]] = []
        self._arrivals: list[tuple[float, Delivery]] = []

    def online(self):
        return {name: OnlineSite(at, self.since[name]) for at, name in enumerate(self.services) if self.since[name]}

    def push(self, messages):
        ids, names = {}, list(self.services)
        for address, data in messages.items():
            name = names[address]
            message = ids[address] = f"message-{len(self.pushed)}"
            self.pushed.append((name, data))
            reply, delay = self.services[name].answer(data), 0.0
            for fault in self.faults[name]:
                changed = fault(reply)
                if isinstance(changed, float):
                    delay = changed
                else:
                    reply = changed
            if reply is not None:
                self._arrivals.append((self.clock.time + delay, Delivery(message, reply)))
        return ids

    def pull(self, messages):
        here = [one for at, one in self._arrivals if at <= self.clock.time and one.message in messages]
        self._arrivals = [(at, one) for at, one in self._arrivals if one not in here]
        return here


def make_services(folder: Path, names, data, **settings) -> dict[str, SiteService]:
    """Sites that have a part each of the federation that `data` describes."""
    services = {}
    for number, name in enumerate(names, start=1):
        part = {"number": number, "of": len(names)}
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        one = SiteSettings.model_validate({"name": name, "data": data, "part": part, **settings})
        services[name] = SiteService(one, place)
    return services


def once(change):
    """A fault that happens to the first reply alone."""
    done = []

    def fault(reply):
        if done:
            return reply
        done.append(True)
        return change(reply)

    return fault
