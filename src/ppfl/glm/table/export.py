"""A fitted table as CSV and JSON files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .coefficients import CoefficientRow
from .fit_table import CLEAR, TableFit

MEMBERSHIPS, COEFFICIENTS, RESULT = "memberships.csv", "coefficients.csv", "result.json"


def file_contents(fitted: TableFit, names: Sequence[str], about: dict[str, Any]) -> dict[str, str]:
    """Contents by file name. `names` are those of the canonical models, and `about` comes first in the result."""
    return {
        MEMBERSHIPS: _csv(["client", "rows", *names], _membership_rows(fitted)),
        COEFFICIENTS: _csv(
            ["outcome", "term", "shared", *names, "pooled"], map(_coefficient_cells, fitted.terms.coefficients)
        ),
        RESULT: json.dumps(about | _result(fitted, names), indent=1, ensure_ascii=False) + "\n",
    }


def _membership_rows(fitted: TableFit) -> Iterable[list[Any]]:
    for client, rows, membership in zip(fitted.ids, fitted.sizes, fitted.memberships, strict=True):
        yield [client, rows, *membership]


def _coefficient_cells(row: CoefficientRow) -> list[Any]:
    return [row.outcome, row.name, "yes" if row.is_shared else "no", *row.values, row.pooled]


def _result(fitted: TableFit, names: Sequence[str]) -> dict[str, Any]:
    table = fitted.table
    return {
        "settings": asdict(fitted.settings),
        "rows": len(table.frame),
        "rows_left_out": table.incomplete,
        "clients_left_out": list(table.lost),
        "bad_cells": [cells._asdict() for cells in table.bad_cells],
        "clients": len(fitted.ids),
        "family": table.target.family,
        "family_guessed": bool(table.target.reason),
        "classes": list(table.target.classes),
        "terms": fitted.encoding.terms,
        "columns_left_out": table.left_out,
        "k": fitted.best.k,
        "tried": [
            {
                "k": candidate.k,
                "log_likelihood": candidate.log_likelihood,
                "bic": candidate.bic,
                "aic": candidate.aic,
                "held_out": candidate.held_out,
                "held_out_error": candidate.held_out_error,
                "converged": candidate.converged,
            }
            for candidate in fitted.candidates
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
