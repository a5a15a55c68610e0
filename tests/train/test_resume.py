"""A run killed at any step and resumed is bitwise equal to one that was never interrupted."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal

import pytest
import torch

import forked
from full_disk import no_file_above
from sima_attn._files import PREFIX, DiskFullError
from sima_attn._settings import with_overrides
from sima_attn.detect.recipes import named_recipe
from sima_attn.detect.task import train_detector
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import train_dino
from sima_attn.reproduce import dino as dino_grid
from sima_attn.reproduce import miniature
from sima_attn.train.checkpoint import checkpoints, load_checkpoint, load_newest, save_checkpoint
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.logs import CsvLog, read_log
from sima_attn.train.run import RunFolder
from small_runs import ALL_ON, class_folders, picture, small_recipe


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
# The recipe, what ends the run at these steps, its exit code, and the newest checkpoints after it.
ENDS = {
    "two workers": ("two workers", forked.train_and_die, -signal.SIGKILL, [2, 6]),
    "device cache": ("device cache", forked.train_and_die, -signal.SIGKILL, [2, 6]),
    "SIGTERM": ("two workers", forked.train_and_stop, 128 + signal.SIGTERM, DEATHS),
}


@pytest.mark.parametrize("name", ENDS)
def test_killed_and_resumed_equals_never_stopped(name, tmp_path):
    way, end, code, newest = ENDS[name]
    recipe = small_recipe(class_folders(tmp_path / "data"), **WAYS[way])
    whole, resumed, log = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "resumed"), tmp_path / "log"
    for i, (step, saved) in enumerate(zip(DEATHS, newest, strict=True)):
        ended = forked.run(log, end, train_classifier, Classification, step, recipe, resumed.path, resume=i > 0)
        assert ended == code, log.read_text()
        assert load_newest(resumed.checkpoints)["step"] == saved
    train_classifier(recipe, resumed.path, resume=True, device="cpu", quiet=True)
    train_classifier(recipe, whole.path, device="cpu", quiet=True)
    states = [load_newest(folder.checkpoints) for folder in (whole, resumed)]
    assert states[0]["step"] == 9
    assert_same_state(*states)
    for name in ("train", "eval"):
        rows = logged(whole.path, name)
        assert [int(row["step"]) for row in rows] == [3, 6, 9]
        assert logged(resumed.path, name) == rows
    assert whole.weights.read_bytes() == resumed.weights.read_bytes()
    assert resumed.curve.is_file()


def test_resuming_a_finished_run_makes_no_step(tmp_path):
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
    with pytest.raises(ValueError, match=r"has weights\.safetensors and train\.csv, but no checkpoint to resume from"):
        train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


def test_a_run_is_resumed_with_images_that_were_moved(tmp_path):
    data = class_folders(tmp_path / "data")
    first = train_classifier(small_recipe(data, epochs=1), tmp_path / "run", device="cpu", quiet=True)
    moved = data.rename(tmp_path / "moved")
    there = small_recipe(moved, epochs=1)
    again = train_classifier(there, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert again.metrics == first.metrics
    assert RunFolder(tmp_path / "run").read_recipe() == there
    other = small_recipe(class_folders(tmp_path / "other", per_class=(7, 4)), epochs=1)
    with pytest.raises(
        ValueError, match=r"their images have changed \(24 to 21\); give the data of the run with --data"
    ):
        train_classifier(other, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert RunFolder(tmp_path / "run").read_recipe() == there


def test_another_recipe_or_a_fresh_start_in_the_same_folder_is_refused(tmp_path):
    data = class_folders(tmp_path / "data")
    recipe = small_recipe(data, epochs=1)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    before = (tmp_path / "run" / "weights.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run \(recipe\.yaml\): add --resume, or choose another"):
        train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ValueError, match=r"the run in .* has a different recipe: schedule\.epochs: 1 -> 2"):
        train_classifier(small_recipe(data, epochs=2), tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == before


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=rf"{name} is a file or a broken link, not a folder; choose another --out"):
            train_classifier(small_recipe(), tmp_path / name, device="cpu", quiet=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_recipe_file_edited_by_hand_is_refused_when_the_run_is_resumed(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    folder = RunFolder(tmp_path / "run")
    text = folder.recipe_file.read_text()
    folder.recipe_file.write_text(text.replace("  lr: 0.001\n", "  lr: 0.5\n"))
    before = folder.weights.read_bytes()
    with pytest.raises(
        ValueError, match=r"the checkpoint in .* has a different recipe: optim\.lr: 0\.001 -> 0\.5\. Undo"
    ):
        train_classifier(folder.read_recipe(), folder.path, resume=True, device="cpu", quiet=True)
    assert folder.weights.read_bytes() == before
    folder.recipe_file.write_text(text.replace("  workers: 0\n", "  workers: 1\n"))  # may change
    train_classifier(folder.read_recipe(), folder.path, resume=True, device="cpu", quiet=True)


def start_classifier(out):
    train_classifier(small_recipe(), out, device="cpu", quiet=True)


def start_dino(out):
    train_dino(named_dino_recipe("digits"), out, device="cpu", quiet=True)


def start_detector(out):
    data = out.parent / "coco"
    data.mkdir(parents=True, exist_ok=True)
    picture(0, size=(64, 64)).save(data / "0.png")
    content = {
        "images": [{"id": 1, "file_name": "0.png", "width": 64, "height": 64}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 8, 32, 32]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (data / "train.json").write_text(json.dumps(content))
    train_detector(with_overrides(named_recipe("coco_mini"), [f"data.path={data}"]), out, device="cpu", quiet=True)


def start_miniature(out):
    run = miniature.planned_runs(["sima"])[0]
    (out.parent / run.folder).symlink_to(out)
    miniature.GRID.make_run(run, out.parent, "digits", device="cpu", quiet=True)


def start_random_features(out):
    run = dino_grid.planned_dino_runs(["random"])[0]
    (out.parent / run.folder).symlink_to(out)
    dino_grid.GRID.make_run(run, out.parent, "digits", device="cpu", quiet=True)


@pytest.mark.parametrize(
    "start", [start_classifier, start_dino, start_detector, start_miniature, start_random_features]
)
def test_a_new_run_beside_the_checkpoints_of_another_is_refused(tmp_path, start):
    folder = RunFolder(tmp_path / "run")
    kept = save_checkpoint(folder.checkpoints, 3, state(3)).read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run \(checkpoints\)"):
        start(folder.path)
    assert [path.name for path in folder.path.iterdir()] == ["checkpoints"]
    assert checkpoints(folder.checkpoints)[0].read_bytes() == kept


@pytest.mark.parametrize("name", ["weights.safetensors", "train.csv", "eval.csv", "recipe.yaml", "checkpoints"])
@pytest.mark.parametrize("kind", ["a file", "a broken link"])
def test_a_new_run_overwrites_nothing(tmp_path, name, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "a file":
        (folder / name).write_text("of an older run")
    else:
        (folder / name).symlink_to("missing")
    with pytest.raises(ValueError, match=r"--out"):
        start_classifier(folder)
    assert [path.name for path in folder.iterdir()] == [name]


def test_only_a_resumed_run_reads_checkpoints(tmp_path, monkeypatch):
    """Even those that appear after the folder was checked."""
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    folder = RunFolder(tmp_path / "run")
    save_checkpoint(folder.checkpoints, 2, state(2))
    monkeypatch.setattr(RunFolder, "check", lambda *arguments, **options: None)
    train_classifier(recipe, folder.path, device="cpu", quiet=True)
    assert [int(row["step"]) for row in read_log(folder.path / "train.csv")] == [2, 3]


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


@pytest.mark.parametrize(
    ("limit", "strategy"), [(5000, "ddp"), (5000, "fsdp"), (1, "ddp")], ids=["checkpoint", "sharded checkpoint", "log"]
)
def test_a_full_disk_leaves_the_last_checkpoint_and_says_how_to_resume(tmp_path, monkeypatch, limit, strategy):
    run = {"checkpoint_steps": 1, "log_steps": 1, "strategy": strategy}
    recipe = small_recipe(class_folders(tmp_path / "data"), run=run)
    out = tmp_path / "a run"
    with contextlib.ExitStack() as stack:
        after_step = Classification.after_step

        def fill_disk(self, step):
            after_step(self, step)
            if step == 3:
                stack.enter_context(no_file_above(limit))

        monkeypatch.setattr(Classification, "after_step", fill_disk)
        with pytest.raises(DiskFullError, match=re.escape(os.strerror(errno.EFBIG))) as raised:
            train_classifier(recipe, out, device="cpu", quiet=True)
    monkeypatch.undo()
    assert str(raised.value).endswith(
        f"free some space, then resume with: sima train --out '{out}' --resume --device cpu"
    )
    assert load_newest(out / "checkpoints")["step"] == 2
    train_classifier(recipe, out, resume=True, device="cpu", quiet=True)
    train_classifier(recipe, tmp_path / "whole", device="cpu", quiet=True)
    assert_same_state(*(load_newest(folder / "checkpoints") for folder in (tmp_path / "whole", out)))
    assert logged(out, "train") == logged(tmp_path / "whole", "train")


@pytest.mark.parametrize("kind", ["folder", "pipe", "broken link"])
def test_a_checkpoint_that_is_no_file_is_named_and_the_one_before_taken(tmp_path, kind):
    save_checkpoint(tmp_path, 1, state(1))
    path = tmp_path / "step-00000009.pt"
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "broken link": lambda: path.symlink_to("missing")}
    make[kind]()
    said = []
    assert load_newest(tmp_path, said.append)["step"] == 1
    assert len(said) == 1
    assert re.search(r"step-00000009\.pt is a (folder|pipe or device|link to a missing file), not a file", said[0])
    with pytest.raises(ValueError, match="not a file"):
        load_checkpoint(path)
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, step, state(step))
    assert [path.name[-4:-3] for path in checkpoints(tmp_path)] == ["9", "4", "3"]


def test_a_run_starts_with_removing_what_a_killed_one_left(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    folder = RunFolder(tmp_path / "run")
    train_classifier(recipe, folder.path, device="cpu", quiet=True)
    for place in (folder.path, folder.checkpoints):
        left = place / f"{PREFIX}left"
        left.mkdir()
        (left / ".lock").touch()
        (left / "step-00000001.pt").write_text("half of")
    train_classifier(recipe, folder.path, resume=True, device="cpu", quiet=True)
    assert not list(folder.path.rglob(f"{PREFIX}*"))


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("never printed",)

    torch.save({"step": 1, "x": Evil()}, tmp_path / "step-00000001.pt")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(tmp_path / "step-00000001.pt")


def test_a_log_is_continued_from_the_checkpoint_without_an_incomplete_line(tmp_path):
    path = tmp_path / "train.csv"
    log = CsvLog(path, 0)
    for step in (2, 4, 6):
        log.add({"step": step, "loss": step / 10})
    path.write_text(path.read_text() + "8,0.")
    log = CsvLog(path, 4)
    log.add({"step": 6, "loss": 0.6})
    assert path.read_text() == "step,loss\n2,0.2\n4,0.4\n6,0.6\n"
