"""Official checkpoints, both ways. None is published, so the tests write them as the official code names them."""

import re

import pytest
import timm
import torch
from safetensors.torch import save_file

from closeness import assert_close
from sima_attn import load_official, save_official

DEIT, XCIT = "deit_tiny_patch16_224", "xcit_nano_12_p16_224"


def small(name, **options):
    torch.manual_seed(options.pop("seed", 0))
    return timm.create_model(name, depth=2, num_classes=5, **options).eval()


def same_logits(a, b):
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert_close(a(x), b(x), 1e-6)


@pytest.mark.parametrize("file", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("name", [f"sima_{DEIT}", f"sima_{XCIT}", f"sima_{DEIT}_layerscale", f"sima_{XCIT}_nolpi"])
def test_what_is_saved_loads_and_gives_the_same_logits(name, file, tmp_path):
    model, other = small(name), small(name, seed=1)
    save_official(model, tmp_path / file)
    report = load_official(other, tmp_path / file)
    assert report.loaded == len(model.state_dict())
    assert report.dropped == report.changed == {}
    same_logits(model, other)
    assert [p.name for p in tmp_path.iterdir()] == [file]


def test_the_file_has_the_names_of_the_official_code(tmp_path):
    save_official(small(f"sima_{XCIT}"), tmp_path / "xcit.pth")
    keys = torch.load(tmp_path / "xcit.pth", weights_only=True)["model"].keys()
    assert {
        "pos_embeder.token_projection.weight",
        "cls_attn_blocks.1.attn.qkv.weight",
        "blocks.0.attn.qkv.weight",
    } <= keys
    assert not [key for key in keys if key.startswith("pos_embed.") or ".attn.q." in key or "temperature" in key]
    save_official(small(f"sima_{DEIT}_layerscale"), tmp_path / "deit.pth")
    assert "blocks.1.gamma2" in torch.load(tmp_path / "deit.pth", weights_only=True)["model"]


def test_the_number_of_official_keys(tmp_path):
    """The official small_12_p16 has 371 keys."""
    save_official(timm.create_model("sima_xcit_small_12_p16_224"), tmp_path / "w.pth")
    assert len(torch.load(tmp_path / "w.pth", weights_only=True)["model"]) == 371


def test_an_xcit_checkpoint_warm_starts_its_sima_twin_and_the_temperature_is_said_to_be_dropped(tmp_path):
    xcit = small(XCIT)
    torch.save({"model": xcit.state_dict()}, tmp_path / "xcit.pth")
    model = small(f"sima_{XCIT}", seed=1)
    report = load_official(model, tmp_path / "xcit.pth")
    assert list(report.dropped) == ["blocks.0.attn.temperature", "blocks.1.attn.temperature"]
    assert "dropped blocks.0.attn.temperature: the temperature of XCA" in str(report)
    assert torch.equal(model.blocks[1].attn.qkv.weight, xcit.blocks[1].attn.qkv.weight)
    twin = small(f"sima_{XCIT}", attention="xca", class_attention="softmax", seed=1)
    assert load_official(twin, tmp_path / "xcit.pth").dropped == {}
    same_logits(twin, xcit)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_deit_checkpoint_loads_and_its_softmax_twin_is_timms_model(tmp_path, suffix):
    deit, path = small(DEIT), tmp_path / f"deit{suffix}"
    of_several_devices = {f"module.{k}": v for k, v in deit.state_dict().items()}
    (torch.save if suffix == ".pth" else save_file)(of_several_devices, path)
    twin = small(f"sima_{DEIT}", attention="softmax", seed=1)
    load_official(twin, path)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert_close(twin(x), deit(x), 1e-6)


def test_position_embeddings_of_another_size_are_resampled_and_that_is_said(tmp_path):
    save_official(small(f"sima_{DEIT}"), tmp_path / "w.pth")
    report = load_official(small(f"sima_{DEIT}", img_size=96), tmp_path / "w.pth")
    assert report.changed == {"pos_embed": "resampled from 197 to 37 tokens"}


def test_what_does_not_fit_is_listed(tmp_path):
    save_official(small(f"sima_{XCIT}"), tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth", weights_only=True)["model"]
    del content["norm.weight"]
    content["spare"] = torch.zeros(1)
    torch.save(content, tmp_path / "broken.pth")
    other = timm.create_model(f"sima_{XCIT}", depth=2, num_classes=9)
    with pytest.raises(
        ValueError, match=r"missing in the file: norm.weight; not in the model: spare; of another shape"
    ):
        load_official(other, tmp_path / "broken.pth")
    with pytest.raises(ValueError, match=r"head.bias \(5,\), the model has \(9,\)"):
        load_official(other, tmp_path / "w.pth")


@pytest.mark.parametrize("shape", [(), (192,), (197, 192), (1, 0, 192), (1, 3, 192), (1, 198, 192), (2, 50, 192)])
def test_position_embeddings_of_no_grid_do_not_fit(shape, tmp_path):
    model = small(f"sima_{DEIT}")
    torch.save({**model.state_dict(), "pos_embed": torch.zeros(shape)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=re.escape(f"pos_embed {shape}, the model has (1, 197, 192)")):
        load_official(model, tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("shape", "problem"),
    [((), "not in the model: .*attn.qkv.bias"), ((2,), r"attn.q.bias \(1,\), the model has \(128,\)")],
)
def test_a_short_qkv_does_not_fit(shape, problem, tmp_path):
    model = small(f"sima_{XCIT}")
    save_official(model, tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth", weights_only=True)["model"]
    torch.save({**content, "cls_attn_blocks.0.attn.qkv.bias": torch.zeros(shape)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=f"does not fit this model.*{problem}"):
        load_official(model, tmp_path / "w.pth")


def test_files_and_models_of_another_kind_are_refused(tmp_path):
    for name, text in (("junk.pth", "hi"), ("junk.safetensors", "hi"), ("empty.pth", ""), ("empty.safetensors", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} cannot be read as weights: give a .safetensors file, or a .pth"):
            load_official(small(f"sima_{DEIT}"), tmp_path / name)
    for content in ([1, 2], {0: torch.zeros(1)}):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ValueError, match="holds no state dict"):
            load_official(small(f"sima_{DEIT}"), tmp_path / "other.pth")
    with pytest.raises(FileNotFoundError, match="none"):
        load_official(small(f"sima_{DEIT}"), tmp_path / "none.pth")
    with pytest.raises(ValueError, match="exist for DeiT and XCiT models, got a Linear"):
        save_official(torch.nn.Linear(2, 2), tmp_path / "w.pth")
