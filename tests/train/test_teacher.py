"""A student that learns from a teacher beside the labels."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from closeness import assert_close
from sima_attn import finetune
from sima_attn.cli import app
from sima_attn.data.settings import Data
from sima_attn.models.loading import load_model
from sima_attn.train.checkpoint import checkpoints, load_newest
from sima_attn.train.classify import train_classifier
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import TeacherSettings
from sima_attn.train.teacher import Teacher
from small_runs import class_folders, small_recipe


def teacher_recipe(place, epochs):
    """Of another size, mean and std than the student."""
    recipe = small_recipe(
        place / "data", data={"size": 24, "mean": (0.2, 0.5, 0.3), "std": (0.1, 0.2, 0.3)}, epochs=epochs
    )
    return replace(recipe, model=replace(recipe.model, kwargs={**recipe.model.kwargs, "img_size": 24}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images in data/, and the run of a teacher that was trained on them."""
    place = tmp_path_factory.mktemp("teacher")
    class_folders(place / "data")
    train_classifier(teacher_recipe(place, epochs=4), place / "run", device="cpu", quiet=True)
    return place


def with_teacher(place, **settings):
    return small_recipe(place / "data", teacher=TeacherSettings(str(place / "run"), **settings))


def trained(recipe, out, **options):
    train_classifier(recipe, out, device="cpu", quiet=True, **options)
    return load_newest(out / "checkpoints")


def test_the_teacher_sees_the_pixels_of_the_student_as_it_was_trained_to(place):
    loaded, data = load_model(place / "run"), Data("", size=24)
    teacher = Teacher(TeacherSettings(str(place / "run")), loaded.classes, data, compiled=False)
    pixels = torch.rand(2, 3, 24, 24)

    def normalized(mean, std):
        return (pixels - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)

    own = loaded.model(normalized(loaded.preprocessing.mean, loaded.preprocessing.std))
    assert_close(teacher(normalized(data.mean, data.std)), own, 1e-5)
    assert teacher(torch.rand(2, 3, 16, 16)).shape == own.shape  # resized to 24
    assert not teacher.train().training
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_and_zero_for_equal_logits(place, temperature):
    settings = TeacherSettings(str(place / "run"), temperature=temperature)
    teacher = Teacher(settings, load_model(place / "run").classes, Data("", size=24), compiled=False)
    images = torch.randn(4, 3, 24, 24)
    wanted = teacher(images)
    assert teacher.loss(wanted + 5, images).abs() < 1e-5
    logits = torch.randn_like(wanted)
    p, q = (wanted / temperature).softmax(1), (logits / temperature).softmax(1)
    by_hand = temperature**2 * (p * (p / q).log()).sum(1).mean()
    assert_close(teacher.loss(logits, images), by_hand, 1e-5)


def test_without_weight_the_teacher_changes_nothing(place, tmp_path):
    plain = trained(small_recipe(place / "data"), tmp_path / "plain")["model"]
    other = trained(with_teacher(place, weight=0.0), tmp_path / "other")["model"]
    assert all(torch.equal(other[name], tensor) for name, tensor in plain.items())


def test_with_all_weight_the_loss_is_that_of_the_teacher_and_falls(place, tmp_path):
    recipe = replace(with_teacher(place, weight=1.0), schedule=small_recipe(epochs=6).schedule)
    trained(recipe, tmp_path / "student")
    rows = read_log(tmp_path / "student" / "train.csv")
    assert float(rows[-1]["loss"]) == pytest.approx(float(rows[-1]["teacher_loss"]))
    assert float(rows[-1]["teacher_loss"]) < 0.5 * float(rows[0]["teacher_loss"])


def test_a_resumed_run_has_the_teacher_that_it_started_with(place, tmp_path):
    recipe, out, replaced = with_teacher(place), tmp_path / "out", tmp_path / "replaced"
    whole = trained(replace(recipe, run=replace(recipe.run, checkpoint_steps=2)), out)["model"]
    newest = checkpoints(out / "checkpoints")[0]
    newest.unlink()
    (out / "weights.safetensors").unlink()
    train_classifier(teacher_recipe(place, epochs=1), replaced, device="cpu", quiet=True)
    again = trained(replace(recipe, teacher=TeacherSettings(str(replaced))), out, resume=True)["model"]
    assert newest.exists()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_a_teacher_of_other_classes_or_without_training_is_an_error(place, tmp_path):
    class_folders(tmp_path / "data", classes=("a", "b"))
    recipe = replace(with_teacher(place), data=replace(small_recipe().data, path=str(tmp_path / "data")))
    with pytest.raises(ValueError, match=r"the teacher .*run knows 3 classes \(.*\), the data have 2 classes \(a, b\)"):
        train_classifier(recipe, tmp_path / "out", device="cpu", quiet=True)
    recipe = replace(with_teacher(place), teacher=TeacherSettings("deit_tiny_patch16_224"))
    with pytest.raises(ValueError, match="deit_tiny_patch16_224 has random weights; give the run of a trained"):
        train_classifier(recipe, tmp_path / "out", device="cpu", quiet=True)
    assert not (tmp_path / "out").exists()


def test_the_commands_take_a_teacher(place, tmp_path):
    student, tuned = tmp_path / "student", tmp_path / "tuned"
    options = ["--data", str(place / "data"), "--teacher", str(place / "run"), "--device", "cpu"]
    settings = ["data.size=16", "data.workers=0", "schedule.epochs=1", "schedule.warmup_epochs=0", "run.batch=8"]
    settings += [f"model.kwargs.{name}={value}" for name, value in (("embed_dim", 16), ("depth", 1), ("num_heads", 2))]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["train", *options, "--recipe", "digits", "--out", str(student), *sets])
    assert done.exit_code == 0, done.output
    assert float(read_log(student / "train.csv")[-1]["teacher_loss"]) > 0
    teacher = f"teacher.path={place / 'run'}"
    finetune(student, place / "data", tuned, epochs=1, overrides=[teacher], device="cpu", quiet=True)
    assert float(read_log(tuned / "train.csv")[-1]["teacher_loss"]) > 0
