"""One answer to a photo, sure or not."""

import io
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.cli.classify import print_answer
from sima_attn.explain.answer import Answer, answer, classify, prepare
from sima_attn.explain.photo_model import photo_model

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
CLASSES = ["ant", "bee", "cat", "dog", "[elk]"]


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = timm.create_model("sima_deit_tiny_patch16_224", **VIT).eval()
    with torch.no_grad():
        model.head.weight *= 40
    return photo_model(model, classes=CLASSES, size=32)


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_classes_are_sorted_by_their_probability(subject):
    found = classify(subject, noise(90, 60))
    names, probabilities = zip(*found.classes, strict=True)
    assert sorted(names) == sorted(CLASSES)
    assert list(probabilities) == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1)
    assert classify(subject, noise(90, 60), 2).classes == found.classes[:2]


def test_what_lies_outside_of_the_middle_square_changes_nothing(subject):
    subject = replace(subject, preprocessing=replace(subject.preprocessing, crop_ratio=1.0))
    wide = noise(96, 32)
    other = wide.copy()
    other.paste((255, 0, 0), (0, 0, 30, 32))
    assert classify(subject, other) == classify(subject, wide)
    other.paste((255, 0, 0), (40, 0, 56, 32))
    assert classify(subject, other) != classify(subject, wide)


def test_it_is_unsure_below_the_measured_probability_alone(subject):
    image = prepare(subject, noise(90, 60))
    most = answer(subject, image).classes[0][1]
    for below, unsure in ((None, False), (0.0, False), (most - 1e-4, False), (most, False), (most + 1e-4, True)):
        assert answer(replace(subject, unsure_below=below), image).unsure is unsure


def test_an_unsure_answer_is_printed_as_one(capsys):
    print_answer("a [b].jpg", Answer([("[elk]", 0.4), ("cat", 0.2)], True))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "a [b].jpg  unsure: maybe none of the classes that it knows (--classes lists them)"
    assert lines[0].startswith("  [elk]   40.0 %")
    print_answer("a.jpg", Answer([("cat", 0.7)], False))
    assert capsys.readouterr().out.splitlines()[0] == "a.jpg"


def test_the_command_lists_the_classes():
    result = CliRunner().invoke(cli.app, ["classify", "--classes"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 100
    assert result.output.splitlines()[0] == "goldfish"


@pytest.mark.parametrize("arguments", [[], ["photo.jpg", "--classes"]])
def test_photos_or_the_list_of_classes(arguments):
    with pytest.raises(ValueError, match="give photos to classify, or --classes alone"):
        CliRunner().invoke(cli.app, ["classify", *arguments], catch_exceptions=False)


def test_an_onnx_file_keeps_the_probability(subject, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from sima_attn.export.onnx import export_onnx
    from sima_attn.export.runtimes import read_metadata, unsure_below_in

    export_onnx(subject.model, tmp_path / "a.onnx", input_size=32, unsure_below=0.45)
    assert unsure_below_in(read_metadata(tmp_path / "a.onnx")) == 0.45
    assert unsure_below_in({}) is None
    for text in ("1.5", "nan", "-0.1", "half", "1e-3", "[" * 1000):
        with pytest.raises(ValueError, match=r"must be a probability such as 0\.5"):
            unsure_below_in({"unsure_below": text})


def test_a_transparent_photo_is_white_behind(subject):
    opaque = noise(40, 40)
    clear = opaque.convert("RGBA")
    clear.paste((9, 9, 9, 0), (0, 0, 40, 20))
    opaque.paste((255, 255, 255), (0, 0, 40, 20))
    clear.save(file := io.BytesIO(), "PNG")
    from sima_attn.data.images import read_image

    assert read_image(file).tobytes() == opaque.tobytes()
    assert classify(subject, read_image(file)) == classify(subject, opaque)
