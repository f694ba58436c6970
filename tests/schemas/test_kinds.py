"""Kinds of measurement and tables: the two lists, and what is derived from them."""

import pickle

from headcount.schemas.scans.kinds import KINDS, TABLES, table_schema
from headcount.schemas.scans.scan import Scan
from headcount.schemas.statistics import STATISTICS
from tests.toys import toy_models as toy


def test_every_field_is_of_one_kind_and_every_table_is_filled():
    fields = [kind.field for kind in KINDS]
    assert len(set(fields)) == len(fields)
    assert [field for field in Scan.model_fields if field in fields] == fields
    for table in TABLES.values():
        assert set(table.order) <= set(table.own), table.name


def test_no_two_columns_of_a_table_have_one_name():
    formulas_by_field = {kind.field: list(kind.values()) for kind in KINDS}
    for table in TABLES.values():
        names = table_schema(table, formulas_by_field).names
        assert len(set(names)) == len(names), table.name


def test_a_scan_is_the_same_after_ray_has_pickled_it():
    scan = toy.toy_scan(curves=["value_norm_by_key"])
    assert pickle.loads(pickle.dumps(scan)) == scan
    assert [kind.field for kind in scan.kinds()] == ["statistics", "curves"]
    assert [kind.field for kind in scan.kinds("from the weights")] == []
    assert [f.name for f in scan.formulas(STATISTICS)] == toy.FORWARD_STATISTICS
