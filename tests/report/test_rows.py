"""Rows survive the trip through a file, or say why not."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sima_attn.bench.cores import FORWARD
from sima_attn.bench.cpu import CpuRow
from sima_attn.bench.tables import cpu_table
from sima_attn.report.rows import cpu_name, merge_rows, read_rows, write_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    name: str
    fused: bool
    count: int
    speed: float

    @property
    def key(self):
        return self.name


ROWS = [Row("a, with a comma", True, 3, 1.5), Row("b", False, -1, 2e-7)]


def test_rows_come_back_as_they_went(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    write_rows(path, ROWS)
    assert read_rows(path, Row) == ROWS
    write_rows(path, ROWS[:1])
    assert read_rows(path, Row) == ROWS[:1]


def test_new_rows_replace_old_ones_of_the_same_key():
    again, other = replace(ROWS[0], speed=9.0), replace(ROWS[1], name="c")
    assert merge_rows(ROWS, [other, again]) == [again, ROWS[1], other]
    assert merge_rows([], ROWS) == ROWS == merge_rows(ROWS, [])


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, ROWS)
    with pytest.raises(TypeError):
        write_rows(path, [ROWS[0], "not a row"])
    assert read_rows(path, Row) == ROWS
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


def test_a_file_of_other_columns_is_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("name,speed\na,1\n")
    with pytest.raises(ValueError, match=r"has the columns \['name', 'speed'\].*run the benchmark again"):
        read_rows(path, Row)


@pytest.mark.parametrize("line", ["b,Fal", "b,False,-1", "b,False,-1,2e-7,3", "b,no,-1,2e-7", "b,False,1.5,2", "\x00,"])
def test_a_cut_or_garbled_line_is_named(line, tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, ROWS[:1])
    with open(path, "a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"line 3 of .*rows\.csv is not a row of Row: .*; run the benchmark again"):
        read_rows(path, Row)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"rows\.csv has the columns"):
        read_rows(tmp_path / "rows.csv", Row)


def test_a_table_of_rows_that_were_cut_says_so():
    rows = [row for row in read_rows(RESULTS / "cpu.csv", CpuRow) if row.method != "sima"]
    with pytest.raises(ValueError, match=r"no row of sima for B, H, N, D = \(1, 6, 196, 64\): rows are missing"):
        cpu_table(rows, 1, FORWARD)


def test_no_rows_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no rows to write"):
        write_rows(tmp_path / "rows.csv", [])


def test_the_processor_has_a_name():
    assert cpu_name()
