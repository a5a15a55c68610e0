"""benchmarks/weak_scaling.py and communication.py: their rows, and the check of the gradients."""

from pathlib import Path

import pytest

import communication
import forked
import weak_scaling
from sima_attn.report.rows import read_rows

RESULTS = Path(communication.__file__).parent / "results"


def test_two_processes_write_rows_and_a_figure(tmp_path):
    out, figure, log = tmp_path / "rows.csv", tmp_path / "figure.png", tmp_path / "log"
    sizes = ["--model", "sima_vit_mini_patch4_64", "--height", "8", "--width", "8", "--steps", "1"]
    codes = forked.run_group(log, 2, weak_scaling.main, [*sizes, "--out", str(out), "--figure", str(figure)])
    assert codes == [0, 0], log.read_text()
    one, two = read_rows(out, weak_scaling.WeakScalingRow)
    assert (one.processes, one.height, one.efficiency) == (1, 8, 1.0)
    assert (two.processes, two.height) == (2, 16)
    assert two.error < weak_scaling.MAX_ERROR
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| sima_vit_mini_patch4_64 | 2 | 16 x 8 |" in log.read_text()


def test_it_is_started_with_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        weak_scaling.main([])
    assert "torchrun --nproc-per-node=2" in capsys.readouterr().err


def test_the_committed_rows_on_paper_are_those_of_the_formulas(tmp_path):
    communication.main(["--out", str(tmp_path / "rows.csv")])
    committed = read_rows(RESULTS / "communication.csv", communication.CommunicationRow)
    assert read_rows(tmp_path / "rows.csv", communication.CommunicationRow) == committed
