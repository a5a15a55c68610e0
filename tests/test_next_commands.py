"""After a command, the commands that lead on: each of them runs as it is printed."""

import shlex

import pytest
import torch
import typer
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.cli import _next
from sima_attn.data.splits import open_data
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.models.loading import load_model
from sima_attn.probe.features import Features
from sima_attn.probe.knn import votes
from sima_attn.probe.knn_classifier import KnnClassifier
from small_runs import class_folders

SHORT = ["--device", "cpu", "--set", "schedule.epochs=2", "--set", "schedule.warmup_epochs=1"]
SMALL = ["--set", "model.kwargs.depth=1", *SHORT]
KINDS = {
    "train": ["train", *SMALL],
    "dino": ["dino", *SMALL, "--set", "distill.teacher_temp_epochs=1"],
}


def sima(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def next_commands(output):
    """The commands that are suggested at the end of an output."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Next: "))
    commands = [shlex.split(line.removeprefix("Next:")) for line in lines[start:]]
    assert all(words[0] == "sima" for words in commands)
    return [words[1:] for words in commands]


@pytest.fixture(scope="module", params=KINDS)
def suggested(request, tmp_path_factory):
    """(the folder of a run, whose name needs quotes, what its training suggests)."""
    folder = tmp_path_factory.mktemp("next") / "my run"
    return folder, next_commands(sima(*KINDS[request.param], "--out", folder))


def test_what_a_training_suggests_runs_and_suggests_what_runs(suggested, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, commands = suggested
    kinds = [words[0] for words in commands]
    assert kinds[0] in ("eval", "knn")
    assert "export" in kinds
    for words in commands:
        assert str(folder) in words
        output = sima(*words)
        if words[0] == "eval":
            (mistakes,) = next_commands(output)
            assert "Mistakes: mistakes.png" in sima(*mistakes)
        if words[0] == "knn":
            (linear,) = next_commands(output)
            finetune, export = next_commands(sima(*linear, "--epochs", 1))
            assert "top1" in sima(*finetune, "--epochs", 1)
            assert export == ["export", str(folder)]
            again = next_commands(sima(*linear, "--epochs", 1))
            assert again == [export]  # the folder of the run is taken
        if words[0] == "export":
            quantize, audit = next_commands(output)
            compared = sima(*quantize, "--calibrate", 32, "--compare", 8)
            assert ("top-1" in compared, "cosine" in compared) == (
                (True, False) if kinds[0] == "eval" else (False, True)
            )
            (last,) = next_commands(compared)
            for audited in (audit, last):
                assert "exp" in sima(*audited)


def test_a_run_of_dino_leads_on(tmp_path, monkeypatch):
    """Heat maps, an ONNX file, an audit, and classes by the nearest labeled images."""
    monkeypatch.chdir(tmp_path)
    data = class_folders(tmp_path / "data")
    run, photo = tmp_path / "run", _next.first_image(str(data))
    own = ["--data", data, "--set", "model.kwargs.depth=1", *SHORT, "--set", "distill.teacher_temp_epochs=1"]
    first = next_commands(sima("dino", *own, "--set", "run.batch=4", "--out", run))
    assert [words[0] for words in first] == ["knn", "classify", "export"]
    heatmap, page = next_commands(sima(*first[1]))
    assert heatmap == ["heatmap", str(photo), "--model", str(run)]
    assert page == ["serve", "--model", str(run)]
    sima(*first[2])
    maps, page = next_commands(sima(*heatmap))
    assert page == ["serve", "--model", str(run)]
    assert "chance" not in sima(*maps)
    assert "attention" in sima("audit", run)
    found = sima("classify", photo, "--model", run, "--data", data)
    assert all(name in found for name in open_data(data).classes)
    assert next_commands(found)[1] == ["serve", "--model", str(run), "--data", str(data)]
    assert sima("classify", photo, "--data", data).count("%") == len(
        open_data(data).classes
    )  # the model in the package
    for words in (["eval", run], ["explain", "deletion", "--model", run, "--data", data]):
        result = CliRunner().invoke(cli.app, [str(word) for word in words])
        assert "gives features and has no classes" in str(result.exception)


def test_a_run_without_labels_says_which_images_it_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo = _next.first_image(str(class_folders(tmp_path / "data")))
    (tmp_path / "none").mkdir()
    result = CliRunner().invoke(cli.app, ["classify", str(photo), "--data", str(tmp_path / "none")])
    assert "give a folder with one folder per class with --data" in str(result.exception)


def test_the_softmax_of_the_nearest_neighbors_is_their_vote():
    torch.manual_seed(0)
    bank, labels = torch.randn(30, 8), torch.arange(30) % 4
    classifier = KnnClassifier(torch.nn.Identity(), Features(bank.numpy(), labels.numpy(), None, [*"abcd"]), k=7)
    queries = torch.randn(5, 8)
    cosines, nearest = torch.nn.functional.cosine_similarity(queries[:, None], bank[None], dim=2).topk(7)
    shares = votes(cosines, labels[nearest], 4)
    torch.testing.assert_close(classifier(queries).softmax(1), shares / shares.sum(1, keepdim=True))
    assert (classifier(bank).argmax(1) == labels).float().mean() > 0.5  # the nearest image is the image itself
    assert KnnClassifier(torch.nn.Identity(), Features(bank[:3].numpy(), labels[:3].numpy(), None, [*"abcd"])).k == 3


COMMANDS = {
    "a classifier": lambda run, photo: _next.after_run(run, {"top1": 1.0}),
    "features": lambda run, photo: _next.after_run(run, {"knn_top1": 1.0}),
    "no labels": lambda run, photo: _next.after_run(run, {}),
    "eval": lambda run, photo: _next.after_eval(str(run), "my data", "test"),
    "eval of a detector": lambda run, photo: _next.after_detector_eval(str(run), str(photo.parent)),
    "predict": lambda run, photo: _next.after_predict(str(run)),
    "a detector": lambda run, photo: _next.after_detector(run, {}),
    "linearize": lambda run, photo: _next.after_linearize(run, {"top1": 1.0, "cosine": 1.0}),
    "export": lambda run, photo: _next.after_export(run / "m.onnx", {"recipe": {"data": {"path": "digits"}}}),
    "quantize": lambda run, photo: _next.after_quantize([run / "m.int8.onnx"]),
    "knn": lambda run, photo: _next.after_knn(str(run), "my data"),
    "linear": lambda run, photo: _next.after_linear(str(run), "my data"),
    "classify": lambda run, photo: _next.after_classify(photo, str(run), "my data"),
    "heatmap": lambda run, photo: _next.after_heatmap(photo, str(run), "-1"),
}


@pytest.mark.parametrize("situation", COMMANDS)
def test_every_suggestion_parses(situation, tmp_path):
    run, data = tmp_path / "my run", class_folders(tmp_path / "my data")
    run.mkdir()
    (run / "recipe.yaml").write_text(f"recipe:\n  data:\n    path: {data}\n")
    suggestions = COMMANDS[situation](run, _next.first_image(str(data)))
    assert suggestions
    for words in suggestions:
        command, rest = typer.main.get_command(cli.app), [str(word) for word in words]
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context("sima", rest)  # raises for an unknown option or a missing argument


def test_class_folders_without_a_split_lead_to_knn_and_to_int8(tmp_path):
    run, data = tmp_path / "run", class_folders(tmp_path / "data", per_class=(20, 1)) / "train"
    run.mkdir()
    (run / "recipe.yaml").write_text(f"recipe:\n  data:\n    path: {data}\n")
    assert [words[0] for words in _next.after_run(run, {})][:2] == ["knn", "classify"]
    about = {"recipe": {"data": {"path": str(data)}}}
    assert [words[0] for words in _next.after_export(run / "m.onnx", about)] == ["quantize", "audit"]
    for image in sorted((data / "cat").iterdir())[2:]:
        image.unlink()
    for image in sorted((data / "dog").iterdir())[2:]:
        image.unlink()  # too few for int8
    assert [words[0] for words in _next.after_export(run / "m.onnx", about)] == ["audit"]


def test_heat_maps_are_suggested_where_attentions_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = class_folders(tmp_path / "data")
    photo = _next.first_image(str(data))
    broken = tmp_path / "a.png"
    broken.write_bytes(b"no photo")
    heatmap, _ = next_commands(sima("classify", broken, photo))
    assert heatmap == ["heatmap", str(photo)]
    assert next_commands(sima("heatmap", broken, photo, "--size", 16))[0] == [*heatmap, "--layer", "all"]
    monkeypatch.setattr(PhotoModel, "has_maps", False)
    assert "Next" not in sima("classify", photo)


def test_a_name_without_a_folder_has_nothing_to_fine_tune():
    assert _next.after_linear("sima_vit_mini_patch4_64", "digits") == []


def test_a_model_without_classes_is_known_to_be_one():
    assert load_model("sima_vit_mini_patch4_64").has_classes
    assert not load_model("sima_vit_mini_patch4_64", features=True).has_classes
