"""A run killed at any step and gone on with is, bit for bit, the run never stopped."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import ALL_ON, class_folders, small_recipe

from sima_attn.train.checkpoint import checkpoints, load_checkpoint, load_newest, save_checkpoint
from sima_attn.train.classify import train_classifier
from sima_attn.train.logs import CsvLog, read_log
from sima_attn.train.recipes import to_dict
from sima_attn.train.run import RunFolder


def assert_same_state(a, b):
    """Equal to the last bit, at every depth."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


def test_the_comparison_sees_a_last_bit():
    one = torch.ones(3)
    other = torch.nextafter(one, torch.tensor(2.0))
    assert_same_state({"a": [one, 1]}, {"a": [one.clone(), 1]})
    with pytest.raises(AssertionError):
        assert_same_state({"a": [one, 1]}, {"a": [other, 1]})


def logged(folder, name):
    """Rows without the one column that measures time."""
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in read_log(folder / f"{name}.csv")]


# Mixup, cutmix, erasing, drop path, moving average, accumulation: all on.
ALL_OF_IT = {
    "epochs": 3,
    "model": {"drop_path": 0.2},
    "run": {"ema": 0.9, "checkpoint_steps": 2, "accumulate": 2, "log_steps": 3},
}
WAYS = {
    "two workers": {"augment": ALL_ON, "data": {"workers": 2}, **ALL_OF_IT},
    "device cache": {
        "augment": {**ALL_ON, "randaugment": None, "color_jitter": 0.2},
        "data": {"cache": True},
        **ALL_OF_IT,
    },
}
DEATHS = [3, 8]  # with a checkpoint every second step and three steps an epoch


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Each way, killed twice and then run to the end: its recipe, folder, and newest step after each death."""
    root = tmp_path_factory.mktemp("killed")
    data = class_folders(root / "data")
    recipes = {way: small_recipe(data, **parts) for way, parts in WAYS.items()}
    runs = [{"recipe": to_dict(r), "out": str(root / way), "deaths": DEATHS} for way, r in recipes.items()]
    script = Path(__file__).parent / "killed_run.py"
    done = subprocess.run([sys.executable, str(script), json.dumps(runs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [int(line) for line in done.stdout.split()]
    return {way: (recipes[way], RunFolder(root / way), steps[2 * i : 2 * i + 2]) for i, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", WAYS)
def test_killed_and_gone_on_with_equals_never_stopped(killed, way, tmp_path):
    recipe, gone_on, newest = killed[way]
    assert newest == [2, 6]
    whole = RunFolder(tmp_path / "whole")
    train_classifier(recipe, whole.path, device="cpu", quiet=True)
    states = [load_newest(folder.checkpoints) for folder in (whole, gone_on)]
    assert states[0]["step"] == 9
    assert_same_state(*states)
    for name in ("train", "eval"):
        rows = logged(whole.path, name)
        assert [int(row["step"]) for row in rows] == [3, 6, 9]
        assert logged(gone_on.path, name) == rows
    assert whole.weights.read_bytes() == gone_on.weights.read_bytes()
    assert gone_on.curve.is_file()


def test_a_finished_run_goes_on_with_nothing(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    first = train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    again = train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert again.metrics == first.metrics
    assert len(read_log(tmp_path / "run" / "eval.csv")) == 1


def test_a_run_without_its_checkpoints_is_left_as_it_is(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"has weights\.safetensors and train\.csv, but no checkpoint to go on from"):
        train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


def test_a_run_goes_on_where_its_images_lie_now(tmp_path):
    data = class_folders(tmp_path / "data")
    first = train_classifier(small_recipe(data, epochs=1), tmp_path / "run", device="cpu", quiet=True)
    moved = data.rename(tmp_path / "moved")
    there = small_recipe(moved, epochs=1)
    again = train_classifier(there, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert again.metrics == first.metrics
    assert RunFolder(tmp_path / "run").read_recipe() == there
    other = small_recipe(class_folders(tmp_path / "other", per_class=(7, 4)), epochs=1)
    with pytest.raises(ValueError, match=r"their images have changed \(24 to 21\); say with --data"):
        train_classifier(other, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert RunFolder(tmp_path / "run").read_recipe() == there


def test_another_recipe_or_a_fresh_start_in_the_same_folder_is_refused(tmp_path):
    data = class_folders(tmp_path / "data")
    recipe = small_recipe(data, epochs=1)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    before = (tmp_path / "run" / "weights.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds a run already: go on with it by --resume"):
        train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ValueError, match=r"another recipe: schedule\.epochs: 1 -> 2"):
        train_classifier(small_recipe(data, epochs=2), tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == before


def test_wrong_data_leave_no_folder_behind(tmp_path):
    with pytest.raises(FileNotFoundError):
        train_classifier(small_recipe(tmp_path / "none"), tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def state(step):
    return {"step": step, "weights": torch.full((1000,), float(step))}


def test_the_last_two_checkpoints_are_kept(tmp_path):
    for step in (1, 5, 12):
        save_checkpoint(tmp_path, step, state(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000012.pt", "step-00000005.pt"]
    assert load_newest(tmp_path)["step"] == 12
    assert load_newest(tmp_path / "none") is None


@pytest.mark.parametrize("damage", ["cut off", "a flipped bit", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(step))
    path = checkpoints(tmp_path)[0]
    content = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        place = bytes(content).index(torch.full((10,), 2.0).numpy().tobytes()) + 1000
        content[place] ^= 1
    path.write_bytes({"cut off": content[: len(content) // 2], "a flipped bit": content, "empty": b""}[damage])
    said = []
    assert load_newest(tmp_path, said.append)["step"] == 1
    assert len(said) == 1
    assert path.name in said[0]
    assert "damaged" in said[0]
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(path)


def test_no_readable_checkpoint_at_all_is_an_error(tmp_path):
    save_checkpoint(tmp_path, 1, state(1))
    checkpoints(tmp_path)[0].write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 1 checkpoints"):
        load_newest(tmp_path, lambda line: None)


def test_a_checkpoint_that_fails_while_written_leaves_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(1))

    def fail(value, file):
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, 2, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert load_newest(tmp_path)["step"] == 1


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("never printed",)

    torch.save({"step": 1, "x": Evil()}, tmp_path / "step-00000001.pt")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(tmp_path / "step-00000001.pt")


def test_a_log_goes_on_where_the_checkpoint_was_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "train.csv"
    log = CsvLog(path, 0)
    for step in (2, 4, 6):
        log.add({"step": step, "loss": step / 10})
    path.write_text(path.read_text() + "8,0.")
    log = CsvLog(path, 4)
    log.add({"step": 6, "loss": 0.6})
    assert path.read_text() == "step,loss\n2,0.2\n4,0.4\n6,0.6\n"
