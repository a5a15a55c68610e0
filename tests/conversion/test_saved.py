"""Converted transformers models, saved and loaded: the same model again, or an error, and never softmax."""

import copy
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from closeness import assert_close
from fresh_imports import run_fresh
from sima_attn.conversion import convert, load_pretrained
from sima_attn.conversion.placing import converted_modules
from sima_attn.conversion.saved import SEALS, load_saved
from transformers_models import HONORED, MASKED, TEXT, TOKENS, VISION, build, build_clip, features, image, outputs

transformers = pytest.importorskip("transformers")

HONORED = HONORED | MASKED
ALONE = {
    "clip_vision": ("clip", "AutoModel"),
    "siglip_vision": ("siglip", "AutoModel"),
    "vit": ("vit", "AutoModel"),
    "vit_classifier": ("vit_classifier", "AutoModelForImageClassification"),
    "dinov2": ("dinov2", "AutoModel"),
    "beit": ("beit", "AutoModel"),
    "vit_mae": ("vit_mae", "AutoModelForPreTraining"),
    "timm": ("timm", "AutoModelForImageClassification"),
}
NESTED = {"clip": "CLIP", "siglip": "Siglip"}
SEGMENTATION = {"reduce_dim": 16, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 16}


def converted(name, **options):
    """A converted model, the part that `convert` was given, and the Auto class."""
    if name in NESTED:
        model = build_clip(NESTED[name])
        convert(model.vision_model, **options)
        return model, model.vision_model, transformers.AutoModel
    if name == "clipseg":
        model = clipseg()
        convert(model.clip.vision_model, **options)
        return model, model.clip.vision_model, transformers.AutoModel  # which has CLIPSegModel
    model = build(HONORED, ALONE[name][0])
    convert(model, **options)
    return model, model, getattr(transformers, ALONE[name][1])


def clipseg():
    text = {**TEXT, **TOKENS, "max_position_embeddings": 8}
    config = transformers.CLIPSegConfig(
        text_config=text, vision_config={**VISION, "num_hidden_layers": 3}, extract_layers=[1], **SEGMENTATION
    )
    torch.manual_seed(0)
    return transformers.CLIPSegForImageSegmentation(config).eval()


def answer(model):
    """What the model computes of an image, whichever model it is."""
    if "CLIPSeg" in type(model).__name__:
        return outputs(model, pixel_values=image(), input_ids=torch.tensor([[1, 3, 2], [1, 4, 2]]))
    if "MAE" in type(model).__name__:
        return outputs(model, pixel_values=image(), noise=torch.rand(2, 16, generator=torch.Generator().manual_seed(2)))
    return features(model)


ALL = [*ALONE, *NESTED, "clipseg"]


@pytest.mark.parametrize("name", ALL)
def test_saved_and_loaded_twice_it_is_the_same_model(name, tmp_path):
    model, _, _ = converted(name, token_ref=9)
    expected = answer(model)
    model.save_pretrained(tmp_path / "once")
    loaded = load_pretrained(type(model), tmp_path / "once")  # and not run before it is saved again
    loaded.save_pretrained(tmp_path / "twice")
    again = load_pretrained(type(model), tmp_path / "twice").eval()
    assert converted_modules(again) == converted_modules(model)
    assert_close(answer(again), expected, 1e-6)


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
def test_a_local_branch_and_its_grid_are_saved(attention, tmp_path):
    model = build(HONORED, "timm")
    convert(model, attention, grid=(4, 4))
    for block in model.timm_model.blocks:
        torch.nn.init.normal_(block.attn.local.weight)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert again.timm_model.blocks[0].attn.local.grid == (4, 4)
    assert_close(answer(again), answer(model), 1e-6)


def randomize_cores(model):
    """Other numbers than those that an attention starts with; their names."""
    names = [name for name, _ in model.named_parameters() if ".attention_core." in name]
    for name in names:
        torch.nn.init.normal_(model.get_parameter(name), std=0.1)
    return names


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
@pytest.mark.parametrize("name", ["vit_classifier", "dinov2", "siglip_vision", "clip"])
def test_the_parameters_of_an_attention_are_saved_and_loaded(name, attention, tmp_path):
    model, _, auto = converted(name, attention=attention)
    assert len(randomize_cores(model)) == {"sima_local": 4, "relu2": 2, "relu2_wide": 10}[attention]
    expected = answer(model)
    model.save_pretrained(tmp_path / "once")
    load_pretrained(type(model), tmp_path / "once").save_pretrained(tmp_path / "twice")
    again = auto.from_pretrained(tmp_path / "twice").eval()
    assert converted_modules(again) == converted_modules(model)
    assert_close(answer(again), expected, 1e-6)
    for twin in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(answer(twin), answer(again))


def test_weights_and_options_that_do_not_fit_a_converted_attention_are_errors(tmp_path):
    model, _, auto = converted("vit_classifier", attention="sima_local")
    model.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights = load_file(file)
    save_file({name: w for name, w in weights.items() if not name.endswith(".gain")}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights of converted attentions are missing: vit\.layers\.0.*\.gain"):
        auto.from_pretrained(tmp_path)
    config.write_text(config.read_text().replace('"prefix_tokens"', '"prefix"'))
    with pytest.raises(ValueError, match=r"cannot be converted as it was when it was saved.*'prefix'"):
        auto.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", [*ALONE, *NESTED])
def test_the_auto_classes_load_it_wherever_the_whole_model_is_marked(name, tmp_path):
    model, part, auto = converted(name, token_ref=9)
    model.save_pretrained(tmp_path / "once")
    if part is not model:  # only the part is marked: the first time it needs load_pretrained
        with pytest.raises(AttributeError, match="has no setter"):
            auto.from_pretrained(tmp_path / "once")
        load_pretrained(type(model), tmp_path / "once").save_pretrained(tmp_path / "once")
    loaded = auto.from_pretrained(tmp_path / "once")
    assert type(loaded).__name__ == type(model).__name__
    loaded.save_pretrained(tmp_path / "twice")
    for again in (auto.from_pretrained(tmp_path / "twice"), type(loaded).from_pretrained(tmp_path / "twice")):
        assert_close(answer(again.eval()), answer(model), 1e-6)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "twice")
    assert isinstance(config, type(model).config_class)
    assert config.model_type == type(model).config_class.model_type  # in memory it is that of the family


def test_the_base_class_of_configurations_reads_it_as_trainer_does(tmp_path):
    model, _, _ = converted("vit_classifier")
    model.save_pretrained(tmp_path)
    config = transformers.PreTrainedConfig.from_json_file(tmp_path / "config.json")
    assert isinstance(config, type(model.config))
    assert config.transformers_version == transformers.__version__


@pytest.mark.parametrize("name", ALL)
def test_no_other_way_loads_it(name, tmp_path, caplog):
    model, part, auto = converted(name)
    model.save_pretrained(tmp_path / "once")
    load_pretrained(type(model), tmp_path / "once").save_pretrained(tmp_path / "twice")
    plain, part_class = type(model), type(part)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        for load in (
            plain.from_pretrained,
            part_class.from_pretrained,
            plain.config_class.from_pretrained,
            lambda path: plain.from_pretrained(path, attn_implementation="sdpa"),
        ):
            with pytest.raises(AttributeError, match="has no setter"):
                load(folder)
    with pytest.raises(AttributeError, match="has no setter"):
        plain.config_class(**model.config.to_dict())
    # Nothing but what is shown without any setting of the log says how.
    assert "load this model with an Auto class of transformers or with sima_attn.conversion.load_pre" in caplog.text
    with pytest.raises(ValueError, match="attn_implementation='sdpa' cannot be set"):
        auto.from_pretrained(tmp_path / "twice", attn_implementation="sdpa")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "twice")
    with pytest.raises(ValueError, match="is not supported"):
        plain.from_pretrained(tmp_path / "twice", config=config)
    with pytest.raises(ValueError, match="attn_implementation='sdpa' cannot be set"):
        plain.from_pretrained(tmp_path / "twice", config=config, attn_implementation="sdpa")


@pytest.fixture(autouse=True)
def transformers_log_is_captured(monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)


WITHOUT_SIMA = """
import json, sys
sys.modules["sima_attn"] = None
import transformers
for folder, names in json.loads(sys.argv[1]).items():
    for name in names:
        try:
            getattr(transformers, name).from_pretrained(folder)
        except Exception as error:
            print(name, type(error).__name__, error)
        else:
            sys.exit(f"{name} loaded {folder}")
"""


@pytest.mark.timeout(300)
def test_without_this_package_it_cannot_be_loaded(tmp_path):
    vit, _, _ = converted("vit_classifier")
    clip, _, _ = converted("clip")
    vit.save_pretrained(tmp_path / "vit")
    clip.save_pretrained(tmp_path / "clip")
    load_pretrained(type(clip), tmp_path / "clip").save_pretrained(tmp_path / "clip_twice")
    classes = {
        "vit": ["AutoConfig", "AutoModel", "AutoModelForImageClassification", "ViTConfig", "ViTForImageClassification"],
        "clip": ["AutoModel", "CLIPModel", "CLIPVisionModel"],
        "clip_twice": ["AutoModel", "CLIPModel", "CLIPVisionModel"],
    }
    loads = json.dumps({str(tmp_path / folder): names for folder, names in classes.items()})
    done = subprocess.run([sys.executable, "-c", WITHOUT_SIMA, loads], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("install sima-attn, import sima_attn") >= 7  # what each class says that is not an Auto one
    assert "AutoModel ValueError The checkpoint you are trying to load has model type `sima_attn`" in done.stdout


@pytest.mark.timeout(300)
def test_importing_the_package_is_enough_for_the_auto_classes(tmp_path):
    """Whichever is imported first."""
    model, _, _ = converted("vit_classifier")
    model.save_pretrained(tmp_path)
    imports = ["from transformers import AutoModelForImageClassification as Auto", "import sima_attn"]
    load = ["import sys", "model = Auto.from_pretrained(sys.argv[1])", "print(len(model.config.sima_attn['modules']))"]
    programs = ["\n".join([*order, *load]) for order in (imports, imports[::-1])]
    assert run_fresh(programs, tmp_path) == ["2", "2"]


def test_either_seal_is_enough(tmp_path):
    model, _, _ = converted("vit")
    model.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    seals = [seal for seal in SEALS if seal in entries]
    for seal in seals:
        one = {key: value for key, value in entries.items() if key not in SEALS or key == seal}
        (tmp_path / "config.json").write_text(json.dumps(one))
        with pytest.raises(AttributeError, match="has no setter"):
            transformers.ViTModel.from_pretrained(tmp_path)
        assert len(converted_modules(load_pretrained(transformers.AutoModel, tmp_path))) == 2


def test_a_decoder_that_copies_the_configuration_keeps_its_softmax(tmp_path):
    model, _, _ = converted("clipseg")
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(type(model), tmp_path)
    assert all(path.startswith("clip.vision_model.") for path in converted_modules(loaded))
    assert_close(answer(loaded.eval()), answer(model), 1e-6)


def test_a_part_of_a_converted_model_is_loaded_and_saved_alone(tmp_path):
    model, part, _ = converted("clip")
    model.save_pretrained(tmp_path / "whole")
    loaded = load_pretrained(transformers.CLIPVisionModel, tmp_path / "whole").eval()
    assert_close(outputs(loaded, pixel_values=image()), outputs(part, pixel_values=image()), 1e-6)
    whole = load_pretrained(transformers.CLIPModel, tmp_path / "whole")
    whole.vision_model.save_pretrained(tmp_path / "part")
    again = transformers.AutoModel.from_pretrained(tmp_path / "part").eval()
    assert_close(outputs(again, pixel_values=image()), outputs(part, pixel_values=image()), 1e-6)


def test_heads_come_and_go(tmp_path):
    classifier, _, _ = converted("vit_classifier")
    classifier.save_pretrained(tmp_path / "classifier")
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "classifier").eval()
    expected = outputs(classifier.vit, pixel_values=image())
    assert_close(outputs(backbone, pixel_values=image()), expected, 1e-6)
    backbone.save_pretrained(tmp_path / "backbone")
    other = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "backbone", num_labels=7).eval()
    assert outputs(other, pixel_values=image()).shape == (2, 7)
    assert_close(outputs(other.vit, pixel_values=image()), expected, 1e-6)
    classifier.vit.save_pretrained(tmp_path / "part")
    assert len(converted_modules(transformers.AutoModel.from_pretrained(tmp_path / "part"))) == 2
    mae, _, _ = converted("vit_mae")
    mae.save_pretrained(tmp_path / "mae")
    assert len(converted_modules(transformers.AutoModel.from_pretrained(tmp_path / "mae"))) == 2  # without the decoder


def test_a_converted_module_that_is_not_there_is_an_error(tmp_path):
    model, _, _ = converted("vit")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("layers.1.attention", "blocks.1.attention"))
    with pytest.raises(ValueError, match=r"blocks\.1\.attention was converted, and there is none in this ViTModel"):
        transformers.AutoModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text.replace("layers.1.attention", "layers.1.mlp"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp cannot be converted .* call transformers' interface"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_after_undo_it_is_saved_as_it_was(name, tmp_path):
    model = build(HONORED, "vit") if name == "vit" else build_clip()
    part = model if name == "vit" else model.vision_model
    before, entries = features(model), model.config.to_dict()
    convert(part, token_ref=9).undo()
    assert model.config.to_dict() == entries
    assert all(module.config is part.config for module in part.modules() if hasattr(module, "config"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this is no converted model: load it with from_pretrained"):
        load_pretrained(type(model), tmp_path)
    assert torch.equal(features(type(model).from_pretrained(tmp_path).eval()), before)


INNER = {
    "pooling head": (lambda: build(HONORED, "siglip"), lambda model: model.head),
    "timm model": (lambda: build(HONORED, "timm"), lambda model: model.timm_model),
    "encoder": (build_clip, lambda model: model.vision_model.encoder),
}


@pytest.mark.parametrize("inner", INNER)
def test_a_part_that_cannot_mark_the_model_around_it_keeps_it_from_being_saved(inner, tmp_path):
    make, part_of = INNER[inner]
    model = make()
    report = convert(part_of(model))
    model.state_dict()  # which says nothing of attentions, and never did
    with pytest.raises(ValueError, match=r"was converted, or put back, without this .* and convert this model, with"):
        model.save_pretrained(tmp_path)
    report.undo()
    model.save_pretrained(tmp_path)
    assert torch.equal(features(type(model).from_pretrained(tmp_path).eval()), features(model))


def test_a_converted_model_that_is_put_into_another_keeps_that_from_being_saved(tmp_path):
    model, other = build_clip(), build(HONORED, "clip")
    convert(other)
    model.vision_model = other
    with pytest.raises(ValueError, match="was converted, or put back, without this CLIPModel around it"):
        model.save_pretrained(tmp_path)


def test_a_converted_model_is_copied_and_pickled(tmp_path):
    model, _, _ = converted("vit_classifier", token_ref=9)
    model.save_pretrained(tmp_path)
    for one in (model, transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()):
        for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(twin) is type(one)
            assert torch.equal(answer(twin), answer(model))
            twin.save_pretrained(tmp_path / "twin")
            again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "twin").eval()
            assert_close(answer(again), answer(model), 1e-6)


def test_the_configuration_of_a_converted_model_is_not_chosen_when_it_is_loaded(tmp_path):
    model, _, _ = converted("vit")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation='sdpa' cannot be set"):
        load_pretrained(transformers.ViTModel, tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="config is that of the converted model"):
        load_pretrained(transformers.ViTModel, tmp_path, config=transformers.ViTConfig(**VISION))


def test_a_model_in_another_module_is_marked_too(tmp_path):
    model = nn.Sequential(build(HONORED, "vit"))
    convert(model, example_inputs=image(1))
    model[0].save_pretrained(tmp_path)
    assert len(converted_modules(transformers.AutoModel.from_pretrained(tmp_path))) == 2


@pytest.mark.parametrize("shown", [True, False])
def test_a_folder_is_read_without_a_progress_bar(tmp_path, capfd, shown):
    from transformers.utils import logging

    model, _, _ = converted("vit_classifier")
    model.save_pretrained(tmp_path)
    before = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar() if shown else logging.disable_progress_bar()
        capfd.readouterr()
        load_saved(tmp_path)
        assert "Loading weights" not in capfd.readouterr().err
        assert logging.is_progress_bar_enabled() is shown
    finally:
        logging.enable_progress_bar() if before else logging.disable_progress_bar()


@pytest.mark.parametrize("name", ["vit_classifier", "dinov2"])
def test_a_converted_model_is_pushed_to_the_hub(name, tmp_path, monkeypatch):
    """Everything but the network: the files that would be uploaded are copied to a folder, which is loaded."""
    import huggingface_hub
    from transformers.utils import hub

    def create_commit(self, repo_id, operations, **options):
        for operation in operations:
            target = tmp_path / repo_id / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(operation.path_or_fileobj).read_bytes())

    def create_repo(self, repo_id, **options):
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: huggingface_hub.ModelCard("A card."))
    model, _, auto = converted(name)
    model.push_to_hub("small-sima")
    folder = tmp_path / "me" / "small-sima"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = auto.from_pretrained(folder).eval()
    assert len(converted_modules(again)) == 2
    assert torch.equal(outputs(again, pixel_values=image()), outputs(model.eval(), pixel_values=image()))
