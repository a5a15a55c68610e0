"""Linearization of small models of transformers on the CPU."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from closeness import assert_close
from sima_attn import convert, linearize, load
from sima_attn.auditing.model import audit_named
from sima_attn.cli import app
from sima_attn.conversion.placing import converted_modules
from sima_attn.distill.networks import block_errors, build_student, exchanged, fit_gains, run, settings_of
from sima_attn.distill.task import Linearization
from sima_attn.models.huggingface import TimmInterface, with_timm_interface
from sima_attn.models.loading import load_model
from transformers_models import HONORED, MASKED, SILENT, build, build_clip, image, outputs

transformers = pytest.importorskip("transformers")

SMALL = ["run.threads=1", "run.log_steps=1", "data.workers=0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(draw.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02}.png")
    return folder


def linearized(model, photos, out, **options):
    options = {"attention": "sima_local", "steps": 12, "batch": 8, "overrides": SMALL, "device": "cpu", **options}
    return linearize(model, photos, out, quiet=True, **options)


@pytest.fixture(scope="module")
def clip(photos, tmp_path_factory):
    teacher, out = build_clip(), tmp_path_factory.mktemp("runs") / "clip"
    return teacher, out, linearized(teacher, photos, out)


def test_the_vision_model_of_clip_learns_and_its_text_model_stays(clip):
    teacher, _, done = clip
    assert type(done.model).__name__ == "CLIPModel"
    assert all(block.error_after < block.error_before for block in done.blocks)
    assert all("vision_model" in block.path for block in done.blocks)
    new, old = done.model.state_dict(), teacher.state_dict()
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items() if "vision_model" not in name)
    assert any(not torch.equal(new[name], tensor) for name, tensor in old.items() if "vision_model" in name)
    assert not converted_modules(teacher)  # the teacher was copied
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def test_the_run_folder_is_the_student_for_us_and_for_transformers(clip, tmp_path):
    _, out, done = clip
    expected = outputs(done.model.vision_model, pixel_values=image())
    for loaded in (load(out), transformers.AutoModel.from_pretrained(out).eval()):
        assert len(converted_modules(loaded)) == 2
        assert_close(outputs(loaded.vision_model, pixel_values=image()), expected, 1e-6)
    with pytest.raises(AttributeError, match="has no setter"):
        transformers.CLIPModel.from_pretrained(out)
    report = audit_named(str(out))
    assert not [call for call in report.calls if call.in_attention]
    checkpoint = next((out / "checkpoints").iterdir())
    with pytest.raises(ValueError, match="resume it with `sima linearize --out FOLDER --resume`"):
        load_model(checkpoint)


def test_a_kept_attention_stays_softmax_after_loading(photos, tmp_path):
    out = tmp_path / "run"
    done = linearized(build(HONORED, "vit"), photos, out, keep=1, overrides=[*SMALL, "report.speed=false"])
    (kept,) = done.record.kept
    loaded, expected = load(out), outputs(done.model, pixel_values=image())
    assert len(converted_modules(loaded)) == len(done.blocks) - 1
    assert kept.removeprefix("network.") not in converted_modules(loaded)
    assert_close(outputs(loaded, pixel_values=image()), expected, 1e-6)
    named = [block.path for block in done.blocks if block.kept]  # paths in the user's model, as in the report
    calls = [call for call in audit_named(str(out)).calls if call.in_attention]
    assert [call.module for call in calls] == named == [kept.removeprefix("network.")]
    assert "network." not in (out / "report.md").read_text() + (out / "keep.csv").read_text()


def test_a_resumed_run_ends_with_the_same_bits(clip, photos, tmp_path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(self, step):
        if step == 8:
            raise StoppedError

    teacher, _, whole = clip
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Linearization, "after_step", stop)
        with pytest.raises(StoppedError):
            linearized(teacher, photos, out, overrides=[*SMALL, "run.checkpoint_steps=3"])
    with pytest.raises(ValueError, match="has attention 'sima_local', got 'relu2'; omit it to resume"):
        linearize(None, out=out, resume=True, attention="relu2")
    with pytest.raises(ValueError, match=r"different recipe: model\.attention"):
        linearized(teacher, photos, out, resume=True, attention="relu2")
    with pytest.raises(ValueError, match="has another teacher than the model given; omit the model"):
        linearized(build(HONORED, "clip"), photos, out, resume=True)
    other = build_clip()
    torch.nn.init.normal_(other.vision_model.post_layernorm.weight)
    same = [*SMALL, "run.checkpoint_steps=3"]
    with pytest.raises(ValueError, match="has another teacher than the model given"):
        linearized(other, photos, out, resume=True, overrides=same)
    again = linearize(None, out=out, resume=True, device="cpu", quiet=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert again.metrics == whole.metrics
    assert again.blocks == whole.blocks
    repeated = linearized(teacher, photos, out, resume=True, overrides=same)  # the same command, with --resume
    assert repeated.metrics == whole.metrics


@pytest.mark.parametrize(
    ("name", "attention", "size"),
    [("dinov2_registers", "relu2", None), ("deit", "sima", 48), ("vit_classifier", "sima_local", 48)],
)
def test_a_folder_of_save_pretrained_is_a_teacher(name, attention, size, photos, tmp_path):
    build(HONORED, name).save_pretrained(tmp_path / "teacher")
    done = linearized(tmp_path / "teacher", photos, tmp_path / "run", attention=attention, size=size, steps=4)
    assert set(done.metrics) == ({"cosine", "agreement"} if name == "vit_classifier" else {"cosine"})
    loaded = load_model(tmp_path / "run")
    assert loaded.preprocessing.size == (size or 32)
    side = loaded.preprocessing.size
    images = torch.randn(1, 3, side, side)
    with torch.no_grad():
        assert_close(loaded.model(images), TimmInterface(done.model, loaded.preprocessing)(images), 1e-6)


def test_a_teacher_that_is_converted_in_part_teaches_the_rest(photos, tmp_path):
    teacher = build(HONORED, "vit")
    convert(teacher, where=lambda path, module: path.startswith("layers.0."))
    done = linearized(teacher, photos, tmp_path, attention="relu2", steps=4)
    assert [block.path for block in done.blocks] == ["layers.1.attention"]
    attentions = [options["attention"] for options in converted_modules(load(tmp_path)).values()]
    assert attentions == ["sima", "relu2"]
    again = linearize(None, out=tmp_path, resume=True, device="cpu", quiet=True)
    assert again.metrics == done.metrics


def test_the_pooling_head_of_siglip_keeps_its_softmax():
    model = build(HONORED, "siglip")
    teacher = with_timm_interface(model).eval()
    student = build_student(teacher, settings_of(teacher), "sima").eval()
    assert exchanged(teacher, student) == [f"network.encoder.layers.{i}.self_attn" for i in range(2)]
    assert isinstance(student.network.head.attention, torch.nn.MultiheadAttention)
    assert run(student, image()).tokens.shape == run(teacher, image()).tokens.shape


def test_bad_input_is_named_and_leaves_no_folder(photos, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"ViTMAEForPreTraining drops patches at random; .* ViTModel\.from_pretrained"):
        linearized(build(MASKED, "vit_mae"), photos, out)
    with pytest.raises(ValueError, match="it does not call transformers' attention interface"):
        linearized(build(SILENT, "pvt_v2"), photos, out)
    with pytest.raises(ValueError, match="holds a timm model; give that one"):
        linearized(build(HONORED, "timm"), photos, out)
    with pytest.raises(ValueError, match="model_kwargs are arguments of timm"):
        linearized(build(HONORED, "vit"), photos, out, model_kwargs={"depth": 2})
    student = linearized(build(HONORED, "vit"), photos, tmp_path / "student", steps=4).model
    with pytest.raises(ValueError, match=r"the attention of ViTModel is free of exp\(\) already"):
        linearized(student, photos, out, attention="relu2")
    with pytest.raises(ValueError, match=r"the attention of student is free of exp\(\) already"):
        linearized(tmp_path / "student", photos, out, attention="sima")
    text = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ValueError, match="BertModel takes 'input_ids'; an image model is needed"):
        linearized(text, photos, out)
    assert not out.exists()


def test_the_commands_take_the_folder(clip, photos, tmp_path):
    pytest.importorskip("onnxruntime")
    file = tmp_path / "clip.onnx"
    for command in (
        ["audit", str(clip[1])],
        ["export", str(clip[1]), "--out", str(file)],
        ["heatmap", str(photos / "00.png"), "--model", str(clip[1]), "--out", str(tmp_path / "map")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert file.is_file()


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "siglip", "yolos"])
def test_plain_sima_starts_with_fitted_gains(name):
    teacher = with_timm_interface(build(HONORED, name)).eval()
    student = build_student(teacher, settings_of(teacher), "sima").eval()
    paths, images, names = exchanged(teacher, student), image(4), list(student.state_dict())
    before = block_errors(teacher, student, paths, images)
    fit_gains(teacher, student, paths, images)
    after = block_errors(teacher, student, paths, images)
    assert list(student.state_dict()) == names
    if name == "yolos":  # it projects its output outside the attention
        assert after == before
    else:
        assert all(after[path] < before[path] for path in paths)
