"""One rule each for ids, features, numbers and targets of tables, wherever they come from."""

import numpy as np
import pandas as pd
import pyarrow
import pytest

from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import DataTable, build, read_table
from ppfl.data.ids import Holdout

NOTHING = Holdout(test_fraction=0)
RANDOM = np.random.default_rng(0)
TABLE = pd.DataFrame({"shop": [1, 2, 3] * 20, "price": RANDOM.normal(size=60), "sold": ["no", "yes"] * 30})


@pytest.mark.parametrize("ids", [[7] * 30 + [8] * 30, [7.0] * 30 + [8.0] * 30, ["7"] * 30 + ["8"] * 30,
                                 [7, 7.0, "7"] * 10 + ["8"] * 30])  # fmt: skip
def test_ids_are_compared_as_text(ids):
    table = DataTable.of({**TABLE, "shop": ids}, "shop", "sold")
    assert table.federation(NOTHING).ids == ("7", "8")
    assert len(table.only(["7"])) == 30


def test_a_client_called_na_is_a_client_and_an_empty_cell_is_none(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("shop,price,sold\n" + "NA,1.5,no\n007,NA,yes\n" * 5 + "nan,2.5,yes\n,3.5,no\n")
    table = DataTable.of(read_table(file, client="shop"), "shop", "sold")
    assert set(table.clients) == {"NA", "007", "nan", None}
    assert table.features["price"].isna().sum() == 5 and table.complete().sum() == 6
    assert_refused(lambda: table.rows(NOTHING, "fill"), DataError, "clients has 1 missing")
    file.write_text("shop,p,q,p,sold\n1,2,3,4,5\n")
    assert_refused(lambda: read_table(file, client="shop"), DataError, "two columns 'p'", "rename")


def test_tables_of_other_libraries_and_dicts_are_the_same():
    whole = DataTable.of(TABLE, "shop", "sold").federation(NOTHING)
    for data in (pyarrow.Table.from_pandas(TABLE), TABLE.to_dict("list"), TABLE.convert_dtypes()):
        assert DataTable.of(data, "shop", "sold").federation(NOTHING).fingerprint == whole.fingerprint
    assert_refused(lambda: DataTable.of([[1, 2]], "shop", "sold"), DataError, "list", "polars")
    assert_refused(lambda: DataTable.of({"shop": [1], "sold": [1, 2]}, "shop", "sold"), DataError, "one value per row")


def test_useless_columns_are_left_out_unless_they_are_named():
    more = {
        "row": np.arange(1, 61), "one": "x", "same": 0.1 + 0.2, "name": [f"n{at}" for at in range(60)],
        "lists": [[1, 2]] * 60, "nothing": None,
        "euros": [f"{at},5" for at in range(60)],
    }  # fmt: skip
    frame = TABLE.assign(**more)
    frame.loc[3, "same"] = 0.3  # one step between floating-point numbers away
    table = DataTable.of(frame, "shop", "sold")
    assert list(table.features) == ["price"]
    assert table.left_out == {
        "row": "row numbers", "one": "one value", "same": "one value", "name": "60 levels", "lists": "lists or bytes",
        "nothing": "no value", "euros": "numbers with a decimal comma",
    }  # fmt: skip
    assert "left out: row (row numbers)" in repr(table)
    assert list(DataTable.of(frame, "shop", "sold", columns=["row", "name"]).features) == ["row", "name"]
    assert list(DataTable.of(frame, "shop", "sold", drop=["row"], text=["same"]).features) == ["price", "same"]
    for columns, words in ((["lists"], "lists or bytes"), (["sold"], "is no feature"), (["price"] * 2, "twice")):
        assert_refused(lambda: DataTable.of(frame, "shop", "sold", columns=columns), DataError, words)


def test_a_text_column_of_nearly_all_numbers_is_one_of_numbers():
    price = [*map(str, range(100, 154)), *["?"] * 6]
    table = DataTable.of({**TABLE, "price": price}, "shop", "sold", columns=["price"])
    (bad,) = table.bad_cells
    assert bad.describe() == "price has 6 cells without a number, such as '?' in row 55: taken as missing"
    assert table.features["price"].sum() == sum(range(100, 154))
    assert not DataTable.of({**TABLE, "price": price}, "shop", "sold", columns=["price"], text=["price"]).bad_cells
    more = DataTable.of({**TABLE, "price": [*price[:-7], *["?"] * 7]}, "shop", "sold", columns=["price"])
    assert more.features["price"].dtype == object  # 53 of 60 are fewer than nine tenths


def test_booleans_are_the_classes_false_and_true():
    table = DataTable.of({**TABLE, "sold": TABLE.sold == "yes"}, "shop", "sold")
    assert table.federation(NOTHING).classes == ("False", "True")
    assert table.federation(NOTHING, task="regression").train.y.unique().tolist() == [0.0, 1.0]


def test_a_csv_file_of_an_experiment_may_have_another_separator_and_decimal_point(tmp_path):
    TABLE.to_csv(tmp_path / "a.csv", index=False)
    TABLE.to_csv(tmp_path / "b.csv", index=False, sep=";", decimal=",")
    settings = {"client": "shop", "target": "sold", "base": tmp_path}
    one, other = build("csv", file="a.csv", **settings), build("csv", file="b.csv", sep=";", decimal=",", **settings)
    np.testing.assert_array_equal(one.train.x, other.train.x)
    assert_refused(lambda: build("csv", file="b.csv", **settings), DataError, "one column only", "sep")
    assert_refused(lambda: build("csv", file="b.csv", sep=";;", **settings), SettingError, "sep is ';;'", "a tab")
