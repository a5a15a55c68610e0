"""benchmarks/serve_load.py: it counts the answers, and fails for a server that fails."""

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import timm

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import serve_load
from serve_load import LoadRow, Tally, bench_load, summarize
from serving import serving
from sima_attn.explain.photo_model import photo_model
from sima_attn.report.rows import read_rows
from sima_attn.serve.app import create_app

TALLY = Tally([200] * 6 + [429] * 3 + [422, 413], [0.01 * k for k in range(1, 6)])
FACTS = {"model": "small", "clients": 2, "seconds": 8.0, "took": 10.0}
FLAT = [100.0, 180.0, 200.0, 190.0, 205.0, 204.0, 203.0, 210.0]


def test_answers_are_counted_by_class():
    row = summarize(TALLY, FLAT, **FACTS)
    assert (row.answers, row.ok_2xx, row.busy_429, row.refused_4xx) == (11, 6, 3, 2)
    assert (row.failed_5xx, row.no_answer) == (0, 0)
    assert (row.p50_ms, row.photos_per_second) == (30.0, 0.5)
    assert (row.start_mib, row.quarter_mib, row.peak_mib, row.end_mib) == (100.0, 200.0, 210.0, 210.0)
    assert row.problem() is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"failed_5xx": 1}, "1 answers were a 5xx"),
        ({"no_answer": 2}, "2 requests had no answer"),
        ({"ok_2xx": 0}, "no request was answered"),
        ({"end_mib": 221.0}, "memory grew from 200 MiB after a quarter of the time to 221 MiB"),
    ],
)
def test_what_is_wrong_is_noticed(wrong, said):
    assert said in replace(summarize(TALLY, FLAT, **FACTS), **wrong).problem()


def test_a_short_run_against_the_page(tmp_path, monkeypatch):
    model = timm.create_model("sima_xcit_mini_p4_64_relu", depth=1).eval()
    app = create_app(photo_model(model, name="small", size=64))

    @contextmanager
    def in_this_process(model):
        with serving(app) as page:
            yield os.getpid(), page.port

    monkeypatch.setattr(serve_load, "_server", in_this_process)
    out = tmp_path / "serve.csv"
    serve_load.main(["--clients", "4", "--seconds", "2", "--out", str(out)])
    (row,) = read_rows(out, LoadRow)
    assert row.answers > 4
    assert row.ok_2xx > 0
    assert (row.failed_5xx, row.no_answer) == (0, 0)
    assert row.p95_ms >= row.p50_ms > 0
    assert row.end_mib > 50


def fake_python(folder, script):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_server_is_started_and_stopped(tmp_path, monkeypatch):
    script = "echo 'http://127.0.0.1:4321  (Ctrl-C to stop)'; exec sleep 60"
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, script))
    with serve_load._server(None) as (pid, port):
        assert port == 4321
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    script = "echo loading >&2; echo 'error: no such model' >&2; exit 2"
    monkeypatch.setattr("sys.executable", fake_python(tmp_path, script))
    with pytest.raises(RuntimeError, match="the server did not start: error: no such model"):
        bench_load(clients=1, seconds=1.0)
