"""What a file of weights, a checkpoint or a run's folder says of its model: used where it is harmless, else refused.

No file has timm download anything, open another file, or build a model that is larger than the weights in it.
"""

import copy
import json
from dataclasses import replace

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from sima_attn._settings import to_dict
from sima_attn.data.settings import Data
from sima_attn.detect.recipes import Detector
from sima_attn.detect.recipes import named_recipe as named_detection
from sima_attn.dino.recipes import DINO_RECIPES, DinoRecipe
from sima_attn.dino.task import build_backbone
from sima_attn.models.building import SOURCES, build_model, check_arguments
from sima_attn.models.loading import load_model
from sima_attn.probe.features import load_backbone
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipe_files import recipe_from_file, sources_in, without_sources
from sima_attn.train.recipes import RECIPES, Model, Recipe
from sima_attn.train.run import RunFolder
from small_runs import class_folders, small_recipe

CLASSES = ["cat", "dog", "owl"]
ELSEWHERE = {
    "pretrained": True,
    "pretrained_cfg": {"url": "http://127.0.0.1:9/weights.pth", "num_classes": 3},
    "pretrained_cfg_overlay": {"file": "other.safetensors"},
    "checkpoint_path": "other.safetensors",
    "cache_dir": "/nowhere",
}


@pytest.fixture
def nothing_else_is_read(monkeypatch):
    """timm's two ways to other weights."""

    def refuse(*_, **__):
        raise AssertionError("timm was asked for other weights")

    monkeypatch.setattr("timm.models._builder.load_pretrained", refuse)
    monkeypatch.setattr("timm.models._factory.load_checkpoint", refuse)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return build_model(small_recipe().model, 3).state_dict()


@pytest.fixture
def write(weights, tmp_path):
    """Settings -> a file of weights whose metadata have them; a function value changes the metadata itself."""

    def file(ending=".safetensors", edit=lambda about: None, **kwargs):
        about = {"recipe": to_dict(small_recipe()), "classes": list(CLASSES), "images": 24}
        about["recipe"]["model"]["kwargs"] |= kwargs
        edit(about)
        path = tmp_path / f"foreign{ending}"
        if ending == ".safetensors":
            save_file(weights, path, metadata={"about": json.dumps(about)})
        else:
            torch.save({"about": about, "model": weights, "ema": None}, path)
        return path

    return file


@pytest.mark.usefixtures("nothing_else_is_read")
@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_weights_are_neither_downloaded_nor_opened(write, weights, name, ending):
    path = write(ending, **{name: ELSEWHERE[name]})
    state = load_model(path).model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in state.items())


def test_the_two_ways_to_other_weights_are_the_ones_that_are_closed(nothing_else_is_read):
    """That the test above can fail."""
    with pytest.raises(AssertionError, match="asked for other weights"):
        timm.create_model("vit_tiny_patch16_224", pretrained=True)
    with pytest.raises(AssertionError, match="asked for other weights"):
        timm.create_model("vit_tiny_patch16_224", checkpoint_path="other.safetensors")


TOO_LARGE = "describes a far larger model than its weights are for"
REFUSED = {
    "depth by far": ({"depth": 10**6}, r"model\.kwargs\.depth must be a number from -65536 to 65536"),
    "depth": ({"depth": 60_000}, TOO_LARGE),
    "width": ({"embed_dim": 65_536}, TOO_LARGE),
    "tokens": ({"img_size": 60_000, "patch_size": 1, "embed_dim": 2048}, TOO_LARGE),
    "no patches": ({"patch_size": 0}, "cannot be built: ZeroDivisionError"),
    "infinite": ({"mlp_ratio": float("inf")}, "model.kwargs.mlp_ratio must be a number"),
    "not a number": ({"mlp_ratio": float("nan")}, "model.kwargs.mlp_ratio must be a number"),
    "an address": ({"act_layer": "http://127.0.0.1:9/x"}, "model.kwargs.act_layer must be .* a word without / and :"),
    "a path": ({"weight_init": "../x"}, "model.kwargs.weight_init must be"),
    "a long list": ({"depths": [1] * 1000}, "model.kwargs.depths must be"),
    "deep inside": ({"attention_options": {"token_ref": ["/x"]}}, "model.kwargs.attention_options must be"),
    "of the factory": ({"features_only": True}, "model.kwargs.features_only is not an argument of a model"),
    "a configuration": ({"model_cfg": "x"}, "model.kwargs.model_cfg is not an argument of a model"),
    "unknown": ({"no_such_argument": 1}, "cannot be built with"),
}


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_no_file_needs_are_refused_before_anything_is_built(write, name, ending):
    kwargs, message = REFUSED[name]
    path = write(ending, **kwargs)
    with pytest.raises(ValueError, match=message) as refused:
        load_model(path)
    assert path.name in str(refused.value)


def edits():
    def setting(group, name, value):
        return lambda about: about["recipe"][group].update({name: value})

    return {
        "another source of models": (setting("model", "name", "hf-hub:someone/model"), "model.name must be the name"),
        "a folder as a model": (setting("model", "name", "local-dir:/x"), "model.name must be the name of a model"),
        "a number as a model": (setting("model", "name", 5), "ModelSettings.name must be of type str, got 5"),
        "kwargs of another type": (setting("model", "kwargs", [1]), "ModelSettings.kwargs must be of type dict"),
        "large images": (
            setting("data", "size", 10**9),
            "size must be a whole number from 1 to 8192 pixels, got 1000000000",
        ),
        "no images": (setting("data", "size", 0), "size must be a whole number from 1 to 8192 pixels, got 0"),
        "a size in words": (
            setting("data", "size", "64"),
            "size must be a whole number from 1 to 8192 pixels, got '64'",
        ),
        "many processes": (setting("data", "workers", 10**6), "data.workers must be between 0 and 256"),
        "two channels": (setting("data", "mean", [0.5, 0.5]), "mean must be three numbers"),
        "a path as a filter": (
            setting("data", "interpolation", "/x"),
            "interpolation must be bicubic or bilinear, got '/x'",
        ),
        "an unknown setting": (setting("data", "url", "x"), "unknown setting of Data 'url'"),
        "no name of a model": (lambda about: about["recipe"]["model"].pop("name"), "ModelSettings lacks name"),
        "no recipe": (lambda about: about.update(recipe="x"), "was not written by `sima train`"),
        "a number of classes": (lambda about: about.update(classes=3), "`classes` must be a list of words"),
        "classes that are numbers": (
            lambda about: about.update(classes=[1, 2, 3]),
            "`classes` must be a list of words",
        ),
        "many classes": (lambda about: about.update(classes=["x"] * 100_000), TOO_LARGE),
    }


@pytest.mark.parametrize("name", edits())
def test_settings_of_another_type_or_size_are_refused(write, name):
    edit, message = edits()[name]
    with pytest.raises(ValueError, match=message):
        Data.of_model(load_model(write(edit=edit)))


def test_metadata_too_deep_for_json_are_refused(weights, tmp_path):
    save_file(weights, tmp_path / "deep.safetensors", metadata={"about": "[" * 100_000})
    with pytest.raises(ValueError, match="was not written by `sima train`"):
        load_model(tmp_path / "deep.safetensors")


@pytest.mark.usefixtures("nothing_else_is_read")
def test_features_of_dino_weights(tmp_path):
    recipe = DINO_RECIPES["digits"]()
    about = {"task": "dino", "recipe": to_dict(recipe), "classes": CLASSES}
    state = build_backbone(recipe).state_dict()

    def load(**kwargs):
        changed = copy.deepcopy(about)
        changed["recipe"]["model"]["kwargs"] |= kwargs
        save_file(state, tmp_path / "dino.safetensors", metadata={"about": json.dumps(changed)})
        return load_backbone(tmp_path / "dino.safetensors")

    assert load(**ELSEWHERE).model.state_dict().keys() == state.keys()
    with pytest.raises(ValueError, match=TOO_LARGE):
        load(depth=60_000)


@pytest.mark.usefixtures("nothing_else_is_read")
def test_detectors(tmp_path):
    pytest.importorskip("torchvision")
    from sima_attn.detect.weights import build_detector, load_detector

    recipe = replace(named_detection("coco_mini"), model=Detector("sima_xcit_mini_p4_64_relu", kwargs={"depth": 4}))
    state = build_detector(recipe, 2, masks=True).state_dict()

    def load(weights=None, **kwargs):
        values = to_dict(recipe)
        values["model"]["weights"] = weights
        values["model"]["kwargs"] |= kwargs
        about = {"detector": values, "classes": ["square", "disc"]}
        save_file(state, tmp_path / "detector.safetensors", metadata={"about": json.dumps(about)})
        return load_detector(tmp_path / "detector.safetensors")

    assert load(weights="/nowhere/weights.pth", **ELSEWHERE).classes == ["square", "disc"]
    with pytest.raises(ValueError, match=TOO_LARGE):
        load(depth=60_000)
    with pytest.raises(ValueError, match=r"model\.kwargs\.depth must be a number"):
        load(depth=10**6)


@pytest.mark.parametrize("kind", [Recipe, DinoRecipe], ids=["train", "dino"])
def test_every_recipe_of_ours_passes_through_a_file(kind, tmp_path):
    for make in (RECIPES if kind is Recipe else DINO_RECIPES).values():
        recipe = make()
        values = yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(to_dict(recipe)))))
        assert recipe_from_file(kind, values, tmp_path) == recipe


def test_ordinary_arguments_of_other_models_are_allowed():
    kwargs = {
        "img_size": [224, 160],
        "act_layer": "relu",
        "norm_layer": "layernorm2d",
        "global_pool": "",
        "init_values": 1e-5,
        "class_token": False,
        "depths": [2, 2, 6, 2],
        "attention_options": {"norm": "l1", "token_ref": 196.0},
        "window_size": None,
    }
    check_arguments(Model("swin_tiny_patch4_window7_224.ms_in1k", kwargs=kwargs))


def test_sources_are_listed_and_left_out():
    recipe = small_recipe(model={"name": "vit_tiny_patch16_224", "kwargs": {"depth": 2, **ELSEWHERE}})
    assert sources_in(recipe) == [f"model.kwargs.{name}" for name in ELSEWHERE]
    assert without_sources(recipe).model.kwargs == {"depth": 2}
    assert sources_in(small_recipe(model={"kwargs": {"pretrained": True}})) == []  # those of the package
    assert ELSEWHERE.keys() <= SOURCES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    recipe = small_recipe(class_folders(root / "data"), epochs=1)
    train_classifier(recipe, root / "run", device="cpu", quiet=True)
    return root / "run", recipe


def edited(run, tmp_path, checkpoints=True, **kwargs):
    """A copy of the run whose recipe, also that of its checkpoints, has further model arguments; and that recipe."""
    import shutil

    folder, recipe = run
    recipe = replace(recipe, model=replace(recipe.model, kwargs={**recipe.model.kwargs, **kwargs}))
    shutil.copytree(folder, tmp_path / "run")
    for path in () if checkpoints else [*tmp_path.glob("run/*.safetensors"), *tmp_path.glob("run/*.csv")]:
        path.unlink()
    if not checkpoints:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    RunFolder(tmp_path / "run").write_recipe(recipe)
    for path in tmp_path.glob("run/checkpoints/*.pt"):
        state = torch.load(path)
        state["about"]["recipe"] = to_dict(recipe)
        torch.save(state, path)
    return tmp_path / "run", recipe


@pytest.mark.usefixtures("nothing_else_is_read")
def test_a_run_is_resumed_from_its_checkpoint_alone(run, tmp_path):
    folder, recipe = edited(run, tmp_path, checkpoint_path="other.safetensors")
    train_classifier(recipe, folder, resume=True, device="cpu", quiet=True)
    before, after = (load_file(path / "weights.safetensors") for path in (run[0], folder))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert RunFolder(folder).read_recipe() == recipe


def test_a_run_without_a_checkpoint_does_not_load_other_weights(run, tmp_path):
    folder, recipe = edited(run, tmp_path, checkpoints=False, checkpoint_path="other.safetensors")
    with pytest.raises(ValueError, match=r"has no checkpoint yet, and model\.kwargs\.checkpoint_path is not used from"):
        train_classifier(recipe, folder, resume=True, device="cpu", quiet=True)


def test_a_recipe_in_a_folder_is_checked_as_one_in_weights(run, tmp_path):
    folder, _ = edited(run, tmp_path, depth=10**6)
    with pytest.raises(ValueError, match=r"recipe\.yaml cannot be used: model\.kwargs\.depth must be a number"):
        RunFolder(folder).read_recipe()
