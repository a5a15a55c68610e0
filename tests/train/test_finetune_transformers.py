"""Fine-tuning of small models of transformers: folders and objects, softmax, converted and linearized."""

import pytest
import timm
import torch
from typer.testing import CliRunner

from closeness import assert_close
from sima_attn import convert, finetune, linearize, load
from sima_attn.auditing.model import audit_named
from sima_attn.cli import app
from sima_attn.conversion.huggingface import core_of
from sima_attn.conversion.placing import converted_modules
from sima_attn.models.loading import load_model
from sima_attn.train.finetune_task import Finetuning
from sima_attn.train.run import RunFolder
from small_runs import class_folders
from transformers_models import HONORED, MASKED, build, build_clip, image, outputs

transformers = pytest.importorskip("transformers")

FAST = ["data.workers=0", "run.threads=1"]
STILL = [*FAST, "optim.lr=1e-60", "schedule.warmup_lr=0", "schedule.min_lr=0"]  # nothing learns
CLASSES = ["cat", "dog", "owl"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    class_folders(root, per_class=(4, 2), classes=CLASSES)
    return root


def tuned(model, data, out, **options):
    options = {"epochs": 1, "batch": 6, "overrides": FAST, "device": "cpu", "quiet": True, **options}
    return finetune(model, data, out, **options)


def encoder_of(model):
    return getattr(model, "vision_model", model.base_model)


@pytest.mark.parametrize(
    "name", ["vit", "vit_classifier", "deit", "dinov2_registers", "clip", "clip_model", "siglip", "siglip_model"]
)
def test_the_encoder_is_taken_over_and_the_classifier_is_that_of_the_data(name, photos, tmp_path):
    families = {"clip_model": "CLIP", "siglip_model": "Siglip"}
    model = build_clip(families[name]) if name in families else build(HONORED, name)
    model.save_pretrained(tmp_path / "start")
    done = tuned(tmp_path / "start", photos, tmp_path / "run", overrides=STILL)
    assert type(done.model).__name__.endswith("ForImageClassification")
    assert list(done.model.config.id2label.values()) == CLASSES
    before, after = encoder_of(model).state_dict(), encoder_of(done.model).state_dict()
    assert after.keys() <= before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert {name.partition(".")[0] for name in before.keys() - after.keys()} <= {"pooler"}


def test_the_run_is_the_same_model_for_us_and_for_transformers(photos, tmp_path):
    done = tuned(build(HONORED, "vit"), photos, tmp_path / "run", lr=0.01)
    expected = outputs(done.model, pixel_values=image())
    assert expected.shape == (2, 3)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    for loaded in (load(tmp_path / "run"), theirs):
        assert type(loaded) is transformers.ViTForImageClassification
        assert_close(outputs(loaded, pixel_values=image()), expected, 1e-6)
    loaded = load_model(tmp_path / "run")
    assert loaded.classes == CLASSES
    with torch.no_grad():
        assert_close(loaded.model(image()), expected, 1e-6)
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--device", "cpu"])
    assert result.exit_code == 0, result.output  # the recipe of the run says where its images are
    assert f"{done.metrics['top1']:.2f}" in result.output


def test_a_model_in_memory_stays_as_it_is(photos, tmp_path):
    model = build(HONORED, "vit_classifier")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = tuned(model, photos, tmp_path / "run", attention="sima", lr=0.01)
    assert not converted_modules(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [options["attention"] for options in converted_modules(done.model).values()] == ["sima", "sima"]
    assert RunFolder(tmp_path / "run").recipe_file.read_text().count("layer_decay: 1.0") == 1
    assert not [call for call in audit_named(str(tmp_path / "run")).calls if call.in_attention]


def test_a_timm_model_in_memory(photos, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=5, img_size=32)
    convert(model, "sima")
    with pytest.raises(ValueError, match=r"pass the arguments of timm\.create_model"):
        tuned(model, photos, tmp_path / "run")
    done = tuned(model, photos, tmp_path / "run", model_kwargs={"depth": 1}, overrides=STILL)
    assert torch.equal(done.model.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    assert type(done.model.blocks[0].attn) is type(model.blocks[0].attn)
    assert done.model.head.weight.shape == (3, 192)


@pytest.mark.parametrize("part", ["whole", "vision"])
def test_a_linearized_clip_keeps_its_attentions_at_another_size(part, photos, tmp_path):
    small = [*FAST, "report.speed=false", "report.photos=0"]
    linearized = {"attention": "sima", "steps": 4, "batch": 6, "overrides": small, "device": "cpu"}
    clip = build_clip() if part == "whole" else build(HONORED, "clip")
    linearize(clip, photos, tmp_path / "linearized", quiet=True, **linearized)
    done = tuned(tmp_path / "linearized", photos, tmp_path / "run", size=48)
    assert type(done.model).__name__ == "CLIPForImageClassification"
    for loaded in (done.model, load(tmp_path / "run")):
        cores = [core_of(module) for module in loaded.modules() if core_of(module) is not None]
        assert [core.token_ref for core in cores] == [17, 17]  # the tokens at 32 px
    assert load_model(tmp_path / "run").preprocessing.size == 48
    again = tuned(tmp_path / "run", photos, tmp_path / "again", overrides=STILL)  # with the same classes
    assert torch.equal(again.model.classifier.weight, done.model.classifier.weight)
    with pytest.raises(ValueError, match="is fine-tuned as it is: omit --attention, got 'sima'"):
        tuned(tmp_path / "run", photos, tmp_path / "other", attention="sima")


def test_earlier_layers_have_smaller_learning_rates_and_embeddings_no_weight_decay(photos, tmp_path, monkeypatch):
    rates, decays = {}, {}

    def look(self, step, groups):
        names = {id(p): name.removeprefix("network.") for name, p in self.model.named_parameters()}
        for group in groups:
            for parameter in group["params"]:
                rates[names[id(parameter)]], decays[names[id(parameter)]] = group["lr"], group["weight_decay"]

    monkeypatch.setattr(Finetuning, "before_step", look)
    tuned(build(HONORED, "dinov2"), photos, tmp_path / "run", overrides=[*FAST, "finetune.layer_decay=0.5"])
    head = rates["classifier.weight"]
    assert rates["dinov2.layernorm.weight"] == head
    assert rates["dinov2.encoder.layer.1.attention.q_proj.weight"] == pytest.approx(head / 2)
    assert rates["dinov2.encoder.layer.0.attention.q_proj.weight"] == pytest.approx(head / 4)
    assert rates["dinov2.embeddings.position_embeddings"] == pytest.approx(head / 8)
    assert decays["dinov2.embeddings.position_embeddings"] == decays["dinov2.embeddings.cls_token"] == 0
    assert decays["dinov2.embeddings.patch_embeddings.projection.weight"] == decays["classifier.weight"] == 0.05
    assert "dinov2.embeddings.mask_token" not in rates  # no logit depends on it


@pytest.mark.parametrize(("freeze", "learning"), [("backbone", []), ("all-but-attention", ["attention"])])
def test_frozen_weights_keep_their_values(freeze, learning, photos, tmp_path):
    model = build(HONORED, "vit")
    convert(model, "sima_local", where=lambda path, module: path.startswith("layers.1."))
    done = tuned(model, photos, tmp_path / "run", freeze=freeze, lr=0.01)
    before, after = encoder_of(model).state_dict(), encoder_of(done.model).state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(before[name], tensor)}
    assert all(any(part in name for part in learning) for name in changed), changed
    if learning:
        assert {"layers.0.attention.q_proj.weight", "layers.1.attention.v_proj.weight"} <= changed
        assert "layers.1.attention.attention_core.gain" in changed


def test_a_resumed_run_ends_with_the_same_bits(photos, tmp_path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(self, completed):
        self.completed = completed
        if completed == 3:
            raise StoppedError

    model = build(HONORED, "vit")
    convert(model, "sima_local", where=lambda path, module: path.startswith("layers.1."))
    options = {"epochs": 2, "size": 48, "overrides": [*FAST, "run.checkpoint_steps=1"]}
    whole = tuned(model, photos, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr(Finetuning, "after_step", stop)
        with pytest.raises(StoppedError):
            tuned(model, photos, tmp_path / "run", **options)
    with pytest.raises(ValueError, match="resume it with `sima finetune --out FOLDER --resume`"):
        load_model(tmp_path / "run")
    again = finetune(out=tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert again.metrics == whole.metrics
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_half_precision_is_fine_tuned_in_float32(photos, tmp_path):
    build(HONORED, "vit").half().save_pretrained(tmp_path / "start")
    done = tuned(tmp_path / "start", photos, tmp_path / "run")
    assert {parameter.dtype for parameter in done.model.parameters()} == {torch.float32}


def test_what_cannot_be_fine_tuned_is_said(photos, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="no image classifier for ViTMAEForPreTraining"):
        tuned(build(MASKED, "vit_mae"), photos, out)
    with pytest.raises(ValueError, match=r"only model\.attention can be set"):
        tuned(build(HONORED, "vit"), photos, out, overrides=[*FAST, "model.drop_path=0.1"])
    with pytest.raises(ValueError, match=r"cannot take images of 4 px.*choose a size that ViTModel takes"):
        tuned(build(HONORED, "vit"), photos, out, size=4)
    with pytest.raises(ValueError, match="weights and pretrained go with the name of a model"):
        tuned(build(HONORED, "vit"), photos, out, pretrained=True)
    with pytest.raises(ValueError, match="model_kwargs describe a model in memory"):
        tuned("resnet18", photos, out, model_kwargs={"depth": 2})
    assert not out.exists()
