"""Readers of csv and parquet tables with a client column and a target column."""

import builtins
import bz2
import gzip
import io
import lzma
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError, SettingError
from ppfl.data import from_table, read_csv, read_parquet
from ppfl.data.limits import limited

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


def zipped(*files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for i, content in enumerate(files):
            archive.writestr(f"{i}.csv", content)
    return buffer.getvalue()


def zstandard(content: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}
COMPRESSIONS[".zst"] = zstandard
ROWS = b"who,x,y\n" + b"".join(b"%d,%d,%d\n" % (i % 3, i, i % 2) for i in range(60))


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_every_compression_gives_the_same_table_and_damage_is_refused(tmp_path, suffix):
    path, packed = tmp_path / f"a.csv{suffix}", COMPRESSIONS[suffix](ROWS)
    path.write_bytes(packed)
    f = read_csv(path, "who", "y", test_fraction=0)
    assert (f.ids, sorted(f.train.x.flatten().tolist())) == (("0", "1", "2"), list(map(float, range(60))))
    with limited(bytes=len(ROWS) - 1), pytest.raises(DataError, match="PPFL_LIMITS=bytes="):
        read_csv(path, "who", "y")
    if suffix:
        for damaged in (packed[: len(packed) // 2], b"nonsense", b""):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match="cannot be read as csv") as caught:
                read_csv(path, "who", "y")
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("a.tar", ROWS, "is an archive .*extract it first"),
        ("a.csv.tar.gz", ROWS, "is an archive"),
        ("a.csv.zip", zipped(ROWS, ROWS), "2 files"),
        ("a.csv.zip", zipped(), "0 files"),
        ("a.csv", ROWS + b"a\0,1,1\na,1,1\n", "NUL"),
        ("a.csv", ROWS.decode().encode("utf-16"), "NUL|cannot be read as csv"),
    ],
)
def test_files_that_are_not_one_table_are_refused(tmp_path, name, content, pattern):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=pattern) as caught:
        read_csv(tmp_path / name, "who", "y")
    assert "\n" not in str(caught.value)


def test_damaged_parquet_files_are_refused_at_every_byte(tmp_path):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"who": ["a", "b"] * 20, "x": range(40), "y": [0.5] * 40}).to_parquet(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with suppress(DataError):  # some bytes do not matter
            read_parquet(path, "who", "y")


def test_a_parquet_file_that_expands_beyond_the_limit_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"who": ["a" * 500] * 10_000, "x": np.zeros(10_000), "y": np.zeros(10_000)}).to_parquet(path)
    assert path.stat().st_size < 20_000
    assert read_parquet(path, "who", "y").n_clients == 1
    with limited(bytes=1_000_000), pytest.raises(DataError, match="PPFL_LIMITS=bytes="):
        read_parquet(path, "who", "y")


def test_limits_of_columns_and_classes(tmp_path):
    (tmp_path / "a.csv").write_bytes(ROWS)
    with limited(features=2), pytest.raises(DataError, match="3 columns.*PPFL_LIMITS=features="):
        read_csv(tmp_path / "a.csv", "who", "y")
    with limited(classes=50), pytest.raises(DataError, match="60 classes.*regression.*PPFL_LIMITS=classes="):
        read_csv(tmp_path / "a.csv", "who", "x", columns=["y"])
    with limited(clients=2), pytest.raises(DataError, match="3 client ids.*PPFL_LIMITS=clients="):
        read_csv(tmp_path / "a.csv", "who", "y")


def test_limits_come_from_the_environment(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_bytes(ROWS)
    monkeypatch.setenv("PPFL_LIMITS", "features=2, classes=1e6")
    with pytest.raises(DataError, match="limit of 2"):
        read_csv(tmp_path / "a.csv", "who", "y")
    monkeypatch.setenv("PPFL_LIMITS", "features=3")
    assert read_csv(tmp_path / "a.csv", "who", "y").n_clients == 3
    for wrong in ("columns=3", "features=many", "features", "bytes=-1", "bytes=inf"):
        monkeypatch.setenv("PPFL_LIMITS", wrong)
        with pytest.raises(SettingError, match="write whole numbers for some of bytes, classes, features, clients"):
            read_csv(tmp_path / "a.csv", "who", "y")


def test_columns_are_named_once_and_are_real_numbers():
    frame = pd.DataFrame({"who": ["a", "b"] * 4, "x": np.ones(8), "y": [0.5] * 8})
    with pytest.raises(DataError, match="twice"):
        from_table(frame, "who", "y", columns=["x", "x"])
    with pytest.raises(DataError, match="two columns 'x'"):
        from_table(frame.set_axis(["who", "x", "x"], axis=1), "who", "x")
    with pytest.raises(DataError, match="'x' are not numeric"):
        from_table(frame.assign(x=1 + 2j), "who", "y")
    assert from_table(frame.rename(columns={"x": 7}), "who", "y").features == ("7",)


def test_ids_that_numpy_would_merge_or_no_file_can_hold_are_refused():
    frame = pd.DataFrame({"who": ["a", "a\0"] * 4, "x": np.ones(8), "y": [0.5] * 8})
    with pytest.raises(DataError, match=r"'a\\x00', with a NUL"):
        from_table(frame, "who", "y")
    with pytest.raises(DataError, match="surrogate|UTF-8"):
        from_table(frame.assign(who=pd.Series(["a", "\ud800"] * 4, dtype=object)), "who", "y")
    with pytest.raises(DataError, match="not UTF-8"):
        from_table(frame.assign(who=[b"\xff", b"b"] * 4), "who", "y")
    assert from_table(frame.assign(who=[b"a", b"b"] * 4), "who", "y").ids == ("a", "b")
