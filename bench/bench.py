"""Speed, memory and traffic, against plain PyTorch loops and the measured matmul limit, all taken in one run.

    make bench
    .venv/bin/python bench/bench.py --quick --only a,b

Prints tables and the targets, writes results.json and results.svg beside this file.
"""

import argparse
import json
from pathlib import Path

import cases
from growth import measure_growth
from plot import picture
from ranks import seconds_by_ranks
from results import Results, compare
from tables import LEGEND, compared_table, grown_table, ranks_table, targets_table
from targets import targets

FOLDER = Path(__file__).parent
PARTS = "abcdef"


def main() -> None:
    asked = arguments()
    turns, most = (2, 10**5) if asked.quick else (5, 10**6)
    results = measure(asked.only, turns, most)
    found = targets(results)
    print(f"{targets_table(found)}\n\n{LEGEND}")
    said = results.as_json() | {"targets": [one._asdict() for one in found]}
    (FOLDER / "results.json").write_text(json.dumps(said, indent=2) + "\n")
    picture(results).save(FOLDER / "results.svg")
    print(f"\nwritten to {FOLDER / 'results.json'} and results.svg")


def measure(parts: str, turns: int, most: int) -> Results:
    """One part after the other, each printed when it is done."""
    results = Results({}, [], {})
    for comparison in cases.comparisons():
        if comparison.part in parts:
            results.compared[comparison.part] = compare(comparison, turns)
            print(compared_table(results.compared[comparison.part]), end="\n\n", flush=True)
    for growth in (*cases.growths(), cases.many_clients(most)):
        if growth.part in parts:
            results.grown.append(measure_growth(growth, turns, alone=growth.part == "d"))
            print(grown_table(results.grown[-1]), end="\n\n", flush=True)
    if "e" in parts and (found := seconds_by_ranks(turns)):
        results.ranks.update(found)
        print(ranks_table(found), end="\n\n", flush=True)
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure ppfl's speed on this machine.")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="a,b", help=f"parts of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no population of a million")
    return parser.parse_args()


def _parts(text: str) -> str:
    chosen = text.replace(",", "")
    if not chosen or set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} names no parts; use some of {','.join(PARTS)}")
    return chosen


if __name__ == "__main__":
    main()
