"""`save`: a saved model is loaded with the same outputs, and never as another model."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from sima_attn import convert, finetune, load, load_official, save
from sima_attn.conversion.placing import converted_modules
from sima_attn.models.loading import load_model
from sima_attn.nn.token_ref import set_token_ref
from small_runs import class_folders
from transformers_models import HONORED, build

NAME, DEPTH = "vit_tiny_patch16_224", {"depth": 2, "embed_dim": 48}


def vit(name=NAME, **options):
    torch.manual_seed(1)
    return timm.create_model(name, **{"img_size": 32, "num_classes": 5, **DEPTH, **options}).eval()


@torch.no_grad()
def assert_same(a, b, size=32):
    images = torch.randn(2, 3, size, size)
    assert torch.equal(a.eval()(images), b.eval()(images))


@pytest.mark.parametrize("attention", ["sima", "sima_local", "relu2", "relu2_wide"])
def test_a_converted_timm_model_comes_back(attention, tmp_path):
    model = vit()
    convert(model, attention)
    save(model, tmp_path / "saved", model_kwargs=DEPTH)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["weights.safetensors"]
    loaded = load(tmp_path / "saved")
    assert converted_modules(loaded) == converted_modules(model)
    assert_same(model, loaded)
    save(loaded, tmp_path / "saved")  # it knows its arguments now, and replaces what was there
    assert_same(model, load(tmp_path / "saved"))


def test_images_may_have_other_channels_than_rgb(tmp_path):
    model = vit(in_chans=4)
    convert(model, "sima")
    set_token_ref(model, 32)
    save(model, tmp_path, model_kwargs={**DEPTH, "in_chans": 4})
    images = torch.randn(2, 4, 32, 32)
    assert torch.equal(load(tmp_path)(images), model(images))


def test_a_part_may_be_converted_with_options(tmp_path):
    model = vit()
    convert(model, "sima", where=lambda path, module: path.startswith("blocks.1."), token_ref=9)
    save(model, tmp_path, model_kwargs=DEPTH)
    loaded = load(tmp_path)
    assert list(converted_modules(loaded)) == ["blocks.1.attn"]
    assert loaded.blocks[1].attn.token_ref == 9
    assert_same(model, loaded)


def test_models_of_the_package_and_unconverted_ones(tmp_path):
    ours = vit("sima_deit_tiny_patch16_224", depth=1)
    set_token_ref(ours, 32)
    save(ours, tmp_path / "ours", model_kwargs={"depth": 1, "embed_dim": 48})
    assert load(tmp_path / "ours").blocks[0].attn.token_ref == 5
    assert_same(ours, load(tmp_path / "ours"))
    plain = vit(num_classes=0)
    save(plain, tmp_path / "plain", model_kwargs=DEPTH)
    assert_same(plain, load(tmp_path / "plain"))
    shipped = load_model()
    save(shipped.model, tmp_path / "shipped")
    assert load_model(tmp_path / "shipped").classes == shipped.classes
    assert_same(shipped.model, load(tmp_path / "shipped"), 64)


def test_a_file_of_a_converted_model_is_never_loaded_as_softmax(tmp_path):
    model = vit()
    convert(model, "sima")
    bare = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vit().load_state_dict(bare)  # why a bare state dict is dangerous: nothing is said
    file = save(model, tmp_path, model_kwargs=DEPTH) / "weights.safetensors"
    with pytest.raises(ValueError, match=r"were converted, .*give the file alone"):
        load_model(NAME, weights=file)
    with pytest.raises(ValueError, match="were converted"):
        load_model(f"{NAME}={file}")
    with pytest.raises(ValueError, match="were converted"):
        load_official(vit(), file)
    with pytest.raises(ValueError, match="were converted"):
        finetune(NAME, "digits", tmp_path / "run", weights=file)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*sima_attn\.converted_attentions"):
        vit().load_state_dict(load_file(file))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        timm.create_model(NAME, img_size=32, num_classes=5, **DEPTH, checkpoint_path=str(file))


def test_what_cannot_be_built_again_is_not_written(tmp_path):
    model = vit()
    convert(model, "sima")
    with pytest.raises(ValueError, match=r"cannot be built again from its name .*model_kwargs"):
        save(model, tmp_path / "saved")
    pooled = vit(global_pool="avg", fc_norm=False)
    with pytest.raises(ValueError, match=r"outputs differ; pass the arguments"):
        save(pooled, tmp_path / "saved", model_kwargs=DEPTH)
    with pytest.raises(ValueError, match=r"does not say which model of timm it is"):
        save(torch.nn.Linear(2, 2), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"model\.kwargs\.act_layer must be"):
        save(vit(act_layer=torch.nn.ReLU), tmp_path / "saved", model_kwargs={**DEPTH, "act_layer": torch.nn.ReLU})
    assert not (tmp_path / "saved").exists()
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match=r"holds a run \(recipe\.yaml\)"):
        save(model, tmp_path, model_kwargs=DEPTH)
    with pytest.raises(ValueError, match="is a file"):
        save(model, tmp_path / "recipe.yaml")


def test_the_metadata_of_a_file_are_checked(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = vit()
    convert(model, "sima")
    file = save(model, tmp_path, model_kwargs=DEPTH) / "weights.safetensors"
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["about"])
    for change, message in (
        ({"converted": {"blocks.9.attn": {"attention": "sima"}}}, r"blocks\.9\.attn cannot be converted"),
        ({"converted": {"blocks.0.attn": {"attention": "smia"}}}, "unknown attention 'smia'"),
        ({"converted": {"blocks.0.attn": {"attention": "sima", "x": "/etc"}}}, "must map attentions to names"),
        ({"token_refs": {"blocks.0.attn": -1}}, "must map attentions to numbers above 0"),
        ({"token_refs": {"blocks.0.mlp": 4}}, r"has no SimA attention 'blocks\.0\.mlp'"),
        ({"num_classes": 10**9}, "`num_classes` must be a number"),
    ):
        save_file(
            load_file(file), tmp_path / "changed.safetensors", metadata={"about": json.dumps({**about, **change})}
        )
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "changed.safetensors")


def test_a_saved_model_is_fine_tuned(tmp_path):
    model = vit()
    convert(model, "sima", where=lambda path, module: path.startswith("blocks.1."))
    save(model, tmp_path / "saved", model_kwargs=DEPTH)
    data = class_folders(tmp_path / "data")
    overrides = ["data.workers=0", "run.threads=1"]
    options = {"epochs": 1, "size": 48, "device": "cpu", "quiet": True, "overrides": overrides}
    done = finetune(tmp_path / "saved", data, tmp_path / "run", **options)
    assert list(converted_modules(done.model)) == ["blocks.1.attn"]
    assert done.model.blocks[1].attn.token_ref == 5  # the tokens at 32 px
    with pytest.raises(ValueError, match="is fine-tuned as it is: omit --attention"):
        finetune(tmp_path / "saved", data, tmp_path / "other", attention="sima", **options)
    save(done.model, tmp_path / "again")
    assert_same(load(tmp_path / "again"), done.model, 48)


def test_a_model_of_transformers_comes_back(tmp_path):
    model = build(HONORED, "vit").eval()
    convert(model, "sima")
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert type(loaded).__name__ == type(model).__name__
    assert converted_modules(loaded) == converted_modules(model)
    with pytest.raises(ValueError, match="with transformers"):
        save(model, tmp_path, model_kwargs={"depth": 2})
