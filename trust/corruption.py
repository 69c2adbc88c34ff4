"""Damage every file of a run folder: it must be refused by name, or make no difference at all."""

import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from trial import Trial
from victim import contents, difference, run_until, victim

from ppfl.errors import PPFLError
from ppfl.runs import load_run, run


def flip_a_bit(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]


def cut_it_off(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def zero_a_block(content: bytes, random: Random) -> bytes:
    at, length = random.randrange(len(content)), random.randint(1, 512)
    return content[:at] + bytes(len(content[at : at + length])) + content[at + length :]


def repeat_a_part(content: bytes, random: Random) -> bytes:
    at, length = random.randrange(len(content)), random.randint(1, 512)
    return content[: at + length] + content[at:]


def append_noise(content: bytes, random: Random) -> bytes:
    return content + random.randbytes(random.randint(1, 64))


DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "one bit flipped": flip_a_bit,
    "cut off": cut_it_off,
    "a block of zeros": zero_a_block,
    "a part repeated": repeat_a_part,
    "noise at the end": append_noise,
}
OTHER_RUN, REMOVED = "replaced by another run's", "removed"


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    whole = run(victim(), folder / "whole")[0].folder
    stopped = run_until(folder / "stopped", round=6, checkpoint_every=4)
    other = run_until(folder / "other", round=6, checkpoint_every=4, seeds=[1])
    run(victim(seeds=[1]), folder / "other-whole")
    others = {whole: folder / "other-whole" / "seed-1", stopped: other}
    for number in range(count):
        source = random.choice((whole, stopped))
        damaged = Path(shutil.copytree(source, folder / f"damaged-{number}" / "seed-0"))
        name = random.choice(sorted(contents(damaged)))
        damage = random.choice((*DAMAGES, OTHER_RUN, REMOVED))
        file = damaged / name
        if damage in DAMAGES:
            content = file.read_bytes()
            file.write_bytes(DAMAGES[damage](content, random) if content else b"noise")
        elif damage == REMOVED:
            file.unlink()
        else:
            shutil.copy(others[source] / name, file)
        failure = _failure(damaged, whole)
        state = "finished" if source is whole else "stopped"
        yield Trial(f"a file: {damage}", failure and f"{name} of a {state} run {damage}, trial {number}: {failure}")
        if failure is None:
            shutil.rmtree(damaged.parent)


def _failure(damaged: Path, whole: Path) -> str | None:
    """Whether the damage went unnoticed and changed something, or was noticed in the wrong way."""
    before = contents(damaged)
    try:
        with suppress(PPFLError):
            load_run(damaged)
        if contents(damaged) != before:
            return "reading it changed it"
        try:
            run(victim(), damaged.parent, resume=True)
        except PPFLError:
            return None if contents(damaged) == before else "it was refused, and changed all the same"
        return difference(damaged, whole)
    except Exception:
        return traceback.format_exc()
