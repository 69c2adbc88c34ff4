"""A fitted table as files that other programs read."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .table_fit import CLEAR, TableFit
from .table_terms import Term

MEMBERSHIPS, COEFFICIENTS, RESULT = "memberships.csv", "coefficients.csv", "result.json"


def files_of(fitted: TableFit, names: Sequence[str], about: dict[str, Any]) -> dict[str, str]:
    """Contents by file name; canonical models go by these names, and the result begins with what is said about it."""
    return {
        MEMBERSHIPS: _csv(["client", "rows", *names], _membership_rows(fitted)),
        COEFFICIENTS: _csv(
            ["outcome", "term", "shared", *names, "pooled"], map(_coefficient_row, fitted.terms.coefficients)
        ),
        RESULT: json.dumps(about | _result(fitted, names), indent=1, ensure_ascii=False) + "\n",
    }


def _membership_rows(fitted: TableFit) -> Iterable[list[Any]]:
    for client, rows, membership in zip(fitted.ids, fitted.sizes, fitted.memberships, strict=True):
        yield [client, rows, *membership]


def _coefficient_row(term: Term) -> list[Any]:
    return [term.outcome, term.name, "yes" if term.is_shared else "no", *term.values, term.pooled]


def _result(fitted: TableFit, names: Sequence[str]) -> dict[str, Any]:
    table = fitted.table
    return {
        "settings": asdict(fitted.settings),
        "rows": len(table.frame),
        "rows_left_out": table.incomplete,
        "clients": len(fitted.ids),
        "family": table.target.family,
        "family_guessed": bool(table.target.reason),
        "classes": list(table.target.classes),
        "terms": fitted.encoding.terms,
        "columns_left_out": table.left_out,
        "k": fitted.best.k,
        "tried": [
            {
                "k": tried.k,
                "bic": tried.bic,
                "aic": tried.aic,
                "converged": tried.converged,
                "held_out": tried.score.figures if tried.score else None,
            }
            for tried in fitted.candidates
        ],
        "shares": dict(zip(names, fitted.shares, strict=True)),
        "clear_from": CLEAR,
        "clear": dict(zip(names, fitted.clear, strict=True)),
        "mixed": fitted.mixed,
        "held_out_rows": int(table.is_test.sum()),
        "held_out": {score.label: score.figures for score in fitted.scores},
        "seconds": {score.label: score.seconds for score in fitted.scores},
    }


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
