"""The command line as a user types it."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sima_attn import __version__, cli
from sima_attn.bench import demo
from sima_attn.bench.figures import check_can_plot

runner = CliRunner()


def sima(*arguments, code=0):
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_help_names_every_command_and_version_prints_it():
    assert "demo" in sima("--help")
    assert "bench" in sima("--help")
    assert "cpu" in sima("bench", "--help")
    assert sima("--version").strip() == f"sima-attn {__version__}"


def test_help_needs_neither_torch_nor_matplotlib():
    """What keeps `sima --help` under a second."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from sima_attn.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'timm', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_demo_compares_the_twins_and_ends_with_photos_or_a_sentence(tmp_path, monkeypatch):
    brief = ("schedule.epochs=2", "schedule.warmup_epochs=1", "model.kwargs.depth=1")
    train = demo.train_twins
    monkeypatch.setattr(demo, "train_twins", lambda out, **options: train(out, changes=brief, quiet=True, **options))
    output = sima("demo", "--out", str(tmp_path))
    assert {"sima", "softmax", "twins.csv", "twins.png"} == {p.name for p in tmp_path.iterdir()}
    assert "1,536" in output  # 6 heads, 16 tokens
    from sima_attn.explain.subject import shipped_models

    assert ("chelsea (a cat)" if shipped_models() else "No trained weights come with this version") in output


def test_demo_attentions_prints_a_table_and_saves_rows_and_figure(tmp_path, monkeypatch):
    run = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda **options: run(tokens=(49, 196), **options))
    output = sima("demo", "--attentions", "--out", str(tmp_path), "--seconds", "0")
    assert "sima" in output
    assert "qk at N = 49, kv at N = 196" in output
    assert {p.name for p in tmp_path.iterdir()} == {"rows.csv", "time_against_tokens.png"}


def test_demo_takes_no_seconds_where_they_mean_nothing(tmp_path):
    result = runner.invoke(cli.app, ["demo", "--out", str(tmp_path), "--seconds", "1"])
    assert "--seconds is for --attentions" in str(result.exception)


def test_bench_table_prints_the_committed_rows():
    assert sima("bench", "table", "--threads", "1").startswith("| B, H, N, D | order |")


def test_an_error_of_the_user_is_one_line_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sima_attn.cli", "bench", "table", str(tmp_path / "none.csv")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "none.csv" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_matplotlib_is_named_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'sima-attn\[plots\]'"):
        check_can_plot()
