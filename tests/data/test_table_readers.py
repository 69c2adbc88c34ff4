"""Readers of csv and parquet tables with a client column and a target column."""

import builtins
import gzip

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.data import from_table, read_csv, read_parquet

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

TABLE = pd.DataFrame(
    {
        "shop": ["007", "007", "7", "7", "8", "8"],
        "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "sale": [True, False] * 3,
        "city": ["x", "y"] * 3,
        "sold": ["no", "yes"] * 3,
        "count": [0, 2, 4, 6, 8, 10],
    }
)


def write(folder, kind, table=TABLE):
    path = folder / f"table.{kind}"
    (table.to_parquet if kind == "parquet" else table.to_csv)(path, index=False)
    return path


READERS = {"csv": read_csv, "csv.gz": read_csv, "parquet": read_parquet}


@pytest.mark.parametrize("kind", READERS)
def test_a_table_round_trip(tmp_path, kind):
    f = READERS[kind](write(tmp_path, kind), "shop", "sold", drop=["city"], test_fraction=0)
    assert f.ids == ("007", "7", "8")
    assert (f.features, f.classes, f.name) == (("price", "sale", "count"), ("no", "yes"), "table")
    torch.testing.assert_close(f.train.x, torch.tensor(TABLE[list(f.features)].to_numpy("float32")))
    assert f.train.y.tolist() == [0, 1] * 3


def test_integers_are_labels_unless_the_task_is_regression(tmp_path):
    path = write(tmp_path, "csv")
    assert read_csv(path, "shop", "count", columns=["price"], test_fraction=0).n_classes == 11
    f = read_csv(path, "shop", "count", columns=["price"], task="regression", test_fraction=0)
    assert (f.n_classes, f.train.y.dtype) == (None, torch.float32)


def test_a_site_without_samples_of_a_class_can_give_all_classes():
    one_sided = TABLE[TABLE["sold"] == "yes"]
    f = from_table(one_sided, "shop", "sold", columns=["price"], classes=("no", "yes"), test_fraction=0)
    assert f.train.y.tolist() == [1, 1, 1]


def test_a_column_can_mark_the_test_rows():
    f = from_table(TABLE, "shop", "sold", columns=["price"], is_test="sale")
    assert f.test.x.flatten().tolist() == [1, 3, 5]


def test_a_real_table(real_data):
    path = real_data / "tabular" / "mlmRev_Contraception.csv.gz"
    if not path.is_file():
        pytest.skip("no tabular/ in the data folder")
    f = read_csv(path, "district", "use", columns=["age"])
    assert (f.n_clients, f.classes, f.name) == (60, ("N", "Y"), "mlmRev_Contraception")


def changed(**columns):
    return TABLE.assign(**columns)


ERRORS = {
    "text columns": (lambda: from_table(TABLE, "shop", "sold"), "'city' are not numeric.*drop.*get_dummies"),
    "no such column": (lambda: from_table(TABLE, "store", "sold"), "no column 'store'; the table has 'shop'"),
    "nothing left": (lambda: from_table(TABLE[["shop", "sold"]], "shop", "sold"), "left for features"),
    "missing values": (
        lambda: from_table(changed(price=[1, np.nan] * 3), "shop", "sold", drop=["city"]),
        r"'price' \(3\) have missing values",
    ),
    "missing target": (
        lambda: from_table(changed(sold=["no", None] * 3), "shop", "sold", drop=["city"]),
        "y has 3 missing",
    ),
    "missing client": (
        lambda: from_table(changed(shop=["a", None] * 3), "shop", "sold", drop=["city"]),
        "clients has 3 missing",
    ),
    "marks in words": (
        lambda: from_table(TABLE, "shop", "sold", columns=["price"], is_test="city"),
        "is_test contains .*convert it",
    ),
    "negative label": (
        lambda: from_table(changed(count=[-1, 1] * 3), "shop", "count", columns=["price"], test_fraction=0),
        "label -1",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_table_gives_an_error_of_one_line(case):
    build, pattern = ERRORS[case]
    with pytest.raises(DataError, match=pattern) as caught:
        build()
    assert "\n" not in str(caught.value)


BROKEN = {
    "empty": ("a.csv", b""),
    "ragged": ("a.csv", b"a,b\n1,2\n1,2,3,4\n"),
    "not text": ("a.csv", b"a,b\n\xff\xfe\x80,1\n"),
    "no gzip": ("a.csv.gz", b"a,b\n1,2\n"),
    "gzip cut": ("a.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-12]),
    "no parquet": ("a.parquet", b"a,b\n1,2\n"),
    "empty parquet": ("a.parquet", b""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_table_is_refused(tmp_path, case):
    name, content = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    read = read_parquet if name.endswith("parquet") else read_csv
    with pytest.raises(DataError, match="cannot be read as") as caught:
        read(tmp_path / name, "a", "b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_csv, read_parquet])
def test_the_error_names_a_missing_file(tmp_path, read):
    with pytest.raises(DataError, match=r"no file .*nowhere"):
        read(tmp_path / "nowhere", "a", "b")


def test_without_pandas_the_error_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pandas(name, *rest):
        if name == "pandas":
            raise ImportError("No module named 'pandas'", name="pandas")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(DataError, match=r"need pandas.*ppfl\[tables\]"):
        read_csv(tmp_path / "a.csv", "a", "b")
