"""benchmarks/finetune_cifar.py: its lines, its rows and its subset, on images of noise."""

import pytest

import finetune_cifar
from finetune_cifar import CifarRow, cifar_table, scratch_recipe, write_subset
from sima_attn import finetune
from sima_attn._settings import to_dict, with_overrides
from sima_attn.data.splits import open_data
from sima_attn.models.loading import load_model
from sima_attn.report.rows import read_rows
from sima_attn.train.finetune_task import Finetuning
from small_runs import class_folders


@pytest.fixture
def images(tmp_path):
    class_folders(tmp_path / "images", per_class=(8, 2), classes=("cat", "dog"))
    return tmp_path / "images"


def test_lines_are_trained_with_as_many_steps_on_the_same_images(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune_cifar, "SMALL", 8)
    settings = ("data.size=8", "run.threads=1", "run.precision=fp32", "run.batch=4", "run.checkpoint_steps=2")
    options = [part for setting in settings for part in ("--set", setting)]
    place, out = tmp_path / "runs", tmp_path / "rows.csv"
    call = ["--data", str(images), "--folder", str(place), "--device", "cpu", "--epochs", "2", *options]
    with pytest.raises(ValueError, match=r"there are no images in .*; run --only subset first"):
        finetune_cifar.main([*call, "--only", "scratch_5000"])
    names = ["finetuned_5000", "scratch_5000", "softmax_50000"]
    steps = [part for name in ("subset", *names) for part in ("--only", name)]
    after_step = Finetuning.after_step

    def cut_off(task, step):
        after_step(task, step)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Finetuning, "after_step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        finetune_cifar.main([*call, *steps])
    monkeypatch.setattr(Finetuning, "after_step", after_step)
    capsys.readouterr()
    finetune_cifar.main([*call, *steps, "--rows", str(out)])
    rows = read_rows(out, CifarRow)
    assert [row.name for row in rows] == names
    assert [(row.train_images, row.val_images, row.epochs, row.steps) for row in rows] == [
        (8, 4, 2, 4),
        (8, 4, 2, 4),
        (16, 4, 2, 8),
    ]
    assert [(row.attention, row.pretrained) for row in rows] == [("sima", True), ("sima", False), ("xca", False)]
    shown = capsys.readouterr()
    assert cifar_table(rows).markdown() in shown.out
    assert "resuming at step 2 of 4" in shown.err
    for row in rows:
        run = place / row.name / "run"
        assert load_model(run).about["recipe"]["model"]["name"] == row.model
        assert len((run / "eval.csv").read_text().splitlines()) == 2  # the last weights alone
        assert not list((run / "checkpoints").iterdir())
    finetune_cifar.main([*call, *steps])
    assert capsys.readouterr().out.count("finished before") == 4


def test_the_subset_has_the_same_part_of_each_class_and_all_val_images(images, tmp_path):
    assert write_subset(str(images), tmp_path / "subset", 8) == {"train": 8, "val": 4}
    train, val = (open_data(tmp_path / "subset", split) for split in ("train", "val"))
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    whole = open_data(images, "val")
    assert [val.read(i).tobytes() for i in range(4)] == [whole.read(i).tobytes() for i in range(4)]


def test_training_from_scratch_differs_from_fine_tuning_in_its_learning_rates_alone(images, tmp_path):
    options = {"overrides": ["data.size=8", "data.workers=8", "run.threads=1"], "device": "cpu", "quiet": True}
    finetune(None, images, tmp_path / "run", epochs=1, **options)
    tuned = load_model(tmp_path / "run").about["recipe"]
    scratch = to_dict(with_overrides(scratch_recipe("sima", str(images), 16, 1), options["overrides"]))
    for group in ("data", "augment", "schedule", "run"):
        assert scratch[group] == tuned[group], group
    assert {**scratch["optim"], "lr": tuned["optim"]["lr"]} == tuned["optim"]
