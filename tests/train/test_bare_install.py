"""The command line without any extra: what works, and what the rest asks for."""

import json
import subprocess
import sys
from pathlib import Path

from sima_attn._install import install_command
from small_runs import class_folders, picture

HERE = Path(__file__).parent
ROWS = HERE.parents[1] / "benchmarks" / "results" / "cpu.csv"


def test_commands_run_without_what_they_do_not_use_and_name_the_extra_they_need(tmp_path):
    """As after `pip install sima-attn`: no command fails with an ImportError."""
    data, photo = str(class_folders(tmp_path / "data")), str(tmp_path / "photo.png")
    picture(0).save(photo)
    model, small = "sima_xcit_mini_p4_64_relu", ["--device", "cpu"]
    run = [
        ["classify", photo],
        ["heatmap", photo, "--out", str(tmp_path / "maps")],
        ["audit", model],
        ["recipes"],
        ["detect", "recipes"],
        ["bench", "table", str(ROWS)],
        ["knn", model, "--data", data, "--cache", str(tmp_path), *small],
    ]
    refused = {
        "the model has 100 classes, the data have 3": ["eval", "sima_vit_mini_patch4_64", "--data", data, *small],
        install_command("train"): ["train"],
        install_command("serve"): ["serve"],
        install_command("plots"): ["demo", "--attentions"],
        install_command("onnx"): ["export", model, "--out", str(tmp_path / "model.onnx")],
        install_command("detection"): ["detect", "eval", str(tmp_path)],
    }
    arguments = [sys.executable, str(HERE / "bare_install.py"), json.dumps([*run, *refused.values()])]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert [(words, output) for words, (code, output) in zip(run, results[: len(run)], strict=True) if code] == []
    for message, (_, output) in zip(refused, results[len(run) :], strict=True):
        assert "ValueError: " in output
        assert output.endswith(message)
