"""`load_model`: what a user calls a model, beyond what the tests of training, explaining and exporting load."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from sima_attn._settings import to_dict
from sima_attn.models.building import build_model
from sima_attn.models.loading import load_model
from sima_attn.models.settings import ModelSettings
from small_runs import small_recipe

NAME = "sima_xcit_nano_12_p16_224"


@pytest.mark.parametrize(
    ("file", "reason"), [("mine.pth", "size mismatch for head.weight"), ("none.pth", "no such file")]
)
def test_weights_that_a_recipe_cannot_start_from(tmp_path, file, reason):
    kwargs = {"depth": 1, "img_size": 32}
    torch.save(timm.create_model("vit_tiny_patch16_224", **kwargs).state_dict(), tmp_path / "mine.pth")
    settings = ModelSettings("vit_tiny_patch16_224", kwargs={**kwargs, "checkpoint_path": str(tmp_path / file)})
    with pytest.raises(ValueError, match=f"{reason}.*; `sima finetune vit_tiny_patch16_224 --weights FILE`") as caught:
        build_model(settings, 5)
    assert "\n" not in str(caught.value)


def test_a_path_may_hold_an_equals_sign_and_the_model_is_prepared_as_its_run(tmp_path):
    recipe = small_recipe(data={"crop_ratio": 0.9, "interpolation": "bilinear", "std": (0.1, 0.2, 0.3)})
    about = {"recipe": to_dict(recipe), "classes": ["a", "b"]}
    run = tmp_path / "lr=0.1"
    run.mkdir()
    model = build_model(recipe.model, 2)
    save_file(model.state_dict(), run / "weights.safetensors", metadata={"about": json.dumps(about)})
    loaded = load_model(run)
    assert (loaded.name, loaded.classes, loaded.trained) == ("lr=0.1", ["a", "b"], True)
    assert loaded.preprocessing == recipe.data.preprocessing
    assert loaded.model.pretrained_cfg["input_size"] == (3, 16, 16)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded.model(images), model.eval()(images))
        assert load_model(run, features=True).model(images).shape == (2, 16)
    with pytest.raises(ValueError, match="weights and pretrained go with the name of a model"):
        load_model(run, pretrained=True)


def test_without_a_network_a_file_of_weights_is_asked_for(monkeypatch):
    def no_network(*arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(timm, "create_model", no_network)
    with pytest.raises(
        OSError, match=r"cannot download the weights of vit_tiny_patch16_224.* --weights FILE \(no route"
    ):
        load_model("vit_tiny_patch16_224", pretrained=True)


def test_weights_are_named_once_and_fit_the_model(tmp_path):
    torch.save(timm.create_model(NAME, num_classes=3).state_dict(), tmp_path / "own.pth")
    assert load_model(NAME, weights=tmp_path / "own.pth").model.num_classes == 3
    for options in ({"pretrained": True}, {"weights": tmp_path / "own.pth"}):
        with pytest.raises(ValueError, match="exclude each other"):
            load_model(f"{NAME}={tmp_path / 'own.pth'}", **options)
    with pytest.raises(ValueError, match="ema weights are in the checkpoints of a run"):
        load_model(NAME, branch="ema")
    xcit = timm.create_model("xcit_nano_12_p16_224", num_classes=3)  # its temperatures have no place in SimA
    torch.save(xcit.state_dict(), tmp_path / "xcit.pth")
    with pytest.raises(ValueError, match=rf"does not fit {NAME}\. blocks\.0\.attn\.temperature"):
        load_model(f"{NAME}={tmp_path / 'xcit.pth'}")


def test_an_onnx_file_is_sent_to_the_commands_that_take_it(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"graph")
    with pytest.raises(ValueError, match=r"model\.onnx is an ONNX file, which `sima audit`, `sima quantize` and"):
        load_model(tmp_path / "model.onnx")
