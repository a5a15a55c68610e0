"""int8 files: weights in bytes, SimA's own part in float, small, close to float32, and refused where they cannot be."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import sima_attn  # noqa: F401  registers the models
from sima_attn.auditing import audit
from sima_attn.data.loader import evaluation_transform
from sima_attn.export.int8_graph import convert_linear_to_gemm, quantized_graph
from sima_attn.export.onnx import export_onnx
from sima_attn.export.quantize import (
    FileRow,
    Images,
    open_images,
    quantize_onnx,
    quantize_table,
)
from sima_attn.export.runtimes import OnnxRuntime, installed_runtimes, open_model, read_metadata
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.pretrained import read_card, weights_file
from sima_attn.report.rows import read_rows

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIZE = 32
RECORDED = Path(__file__).parents[2] / "benchmarks/results/int8.csv"
LABELS = [str(k) for k in range(10)]


def model(**options):
    torch.manual_seed(0)
    return timm.create_model(
        "sima_deit_tiny_patch16_224_relu",
        **{"depth": 2, "patch_size": 8, "num_classes": 10, "img_size": SIZE, **options},
    )


def random_images(count, seed=0):
    return list(np.random.default_rng(seed).standard_normal((count, 3, SIZE, SIZE), dtype=np.float32))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantize") / "model.onnx"
    export_onnx(model(), path, input_size=SIZE, labels=LABELS)
    return path


@pytest.fixture(scope="module")
def int8(fp32):
    path = fp32.with_suffix(".int8.onnx")
    report = quantize_onnx(fp32, path, random_images(32), compare_images=random_images(16, seed=1))
    return path, report


def test_it_is_close_and_small(fp32, int8):
    path, report = int8
    assert (report.fp32.bytes, report.int8.bytes) == (fp32.stat().st_size, path.stat().st_size)
    assert report.int8.share_of_fp32 == pytest.approx(report.int8.bytes / report.fp32.bytes, abs=1e-4)
    assert report.int8.share_of_fp32 < 0.3
    x = random_images(1, seed=2)[0][None]
    truth, ours = open_model(fp32)(x), open_model(path)(x)
    assert np.abs(ours - truth).max() < 0.1 * np.abs(truth).max()
    assert not np.array_equal(ours, truth)
    assert report.int8.images == report.fp32.images == 16
    assert np.isnan([report.fp32.top1, report.int8.top5, report.int8.points_lost]).all()  # no labels were given
    assert report.fp32.same_class == 100
    assert "same first class on" in report.summary()


def test_every_weight_is_in_bytes_and_the_attention_is_not(int8):
    path, report = int8
    proto = onnx.load(path)
    # qkv, proj, fc1, fc2 of two blocks, the patches and the head; two products of activations a block.
    assert (report.int8.int8_products, report.int8.float_products) == (10, 4)
    assert (report.fp32.int8_products, report.fp32.float_products) == (0, 14)
    large = [w for w in proto.graph.initializer if np.prod(w.dims) > 1000 and len(w.dims) > 1 and w.name != "pos_embed"]
    weights = [w for w in large if "pos_embed" not in w.name and w.data_type == onnx.TensorProto.FLOAT]
    assert [w.name for w in weights if w.dims[-1] != 192] == []
    assert Counter(w.data_type for w in large)[onnx.TensorProto.INT8] == 10
    scales = [w for w in proto.graph.initializer if w.name.endswith("_scale") and len(w.dims) == 1 and w.dims[0] > 1]
    assert len(scales) >= 9  # per channel
    quantized = {name for node in proto.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    for node in proto.graph.node:
        if node.op_type in ("Abs", "ReduceSum", "Reciprocal", "MatMul"):
            assert quantized.isdisjoint(node.input)


def test_it_stays_exp_free_and_says_what_it_is(int8):
    path, report = int8
    assert report.int8.exp_like_nodes == 0
    assert (report.fp32.format, report.fp32.calibration_images) == ("fp32", 0)
    assert (report.int8.format, report.int8.calibration_images) == ("int8", 32)
    assert "weights 8 bits" in report.int8.settings
    found = read_metadata(path)
    assert found["precision"] == "int8"
    assert found["calibration_images"] == "32"
    assert found["model"] == "VisionTransformer"


def test_its_audit_counts_the_parameters_of_the_float_file(tmp_path):
    uneven = model(depth=1)
    for parameter in uneven.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # the exporter writes biases that are all zeros once
    fp32, int8 = tmp_path / "m.onnx", tmp_path / "m.int8.onnx"
    export_onnx(uneven, fp32, input_size=SIZE)
    onnx.save(quantized_graph(fp32, (image[None] for image in random_images(2))), int8)
    assert audit(int8).params == audit(fp32).params


@pytest.mark.skipif("openvino" not in installed_runtimes(), reason="needs openvino")
def test_openvino_runs_it(int8):
    x = random_images(1, seed=2)[0][None]
    ours, theirs = open_model(int8[0])(x), open_model(int8[0], "openvino")(x)
    assert np.abs(ours - theirs).max() < 0.1 * np.abs(ours).max()


def test_accuracy_is_counted_from_the_labels(fp32, tmp_path):
    images = random_images(20, seed=3)
    session = open_model(fp32)
    ranked = [np.argsort(-session(image[None])[0]) for image in images]
    # Ten images right, five right among the first five only, five wrong even there.
    labels = [int(ranks[0 if i < 10 else 4 if i < 15 else 5]) for i, ranks in enumerate(ranked)]
    report = quantize_onnx(
        fp32, tmp_path / "m.onnx", random_images(32), compare_images=images, compare_labels=labels, data="noise"
    )
    assert (report.fp32.top1, report.fp32.top5, report.fp32.points_lost) == (50.0, 75.0, 0.0)
    assert abs(report.int8.points_lost) <= 100 - report.int8.same_class
    assert report.int8.points_lost == report.fp32.top1 - report.int8.top1
    assert report.int8.data == "noise"
    shown = quantize_table(report)
    assert [line[1] for line in shown.lines] == ["fp32", "int8"]
    assert shown.bold == {1}


def test_images_go_through_many_at_once_where_the_batch_is_open_and_nothing_changes(fp32, tmp_path, monkeypatch):
    path = tmp_path / "open.onnx"
    export_onnx(model(), path, input_size=SIZE, labels=LABELS, dynamic=("batch",))
    images = random_images(16 + 3, seed=1)
    labels = [0] * len(images)
    calls = []
    monkeypatch.setattr(OnnxRuntime, "__call__", counting(OnnxRuntime.__call__, calls))
    seen = []
    reports = [
        quantize_onnx(
            file,
            tmp_path / f"{file.stem}.int8.onnx",
            random_images(32),
            compare_images=images,
            compare_labels=labels,
            on_image=lambda: seen.append(1),
        )
        for file in (fp32, path)
    ]
    assert calls == [1] * 2 * 19 + [16, 16, 3, 3]
    assert len(seen) == 2 * (32 + 19)  # every image of calibration and comparison
    ours, theirs = (report.int8 for report in reports)
    assert (ours.top1, ours.top5, ours.same_class) == (theirs.top1, theirs.top5, theirs.same_class)


def counting(call, sizes):
    """`call` of a session, which notes the batch it was given."""

    def counted(self, images):
        sizes.append(len(images))
        return call(self, images)

    return counted


def test_the_recorded_rows_keep_the_promise():
    """At most a point lost, at most 30 % of the size, on all val images, with nothing exp-like in the shipped model."""
    rows = read_rows(RECORDED, FileRow)
    by_format = {(row.model, row.format): row for row in rows}
    assert len(by_format) == len(rows)
    for (name, kind), row in by_format.items():
        assert row.images == 5000
        if kind == "int8":
            full = by_format[name, "fp32"]
            assert row.points_lost == pytest.approx(full.top1 - row.top1, abs=0.005)
            assert row.points_lost <= 1.0
            assert row.share_of_fp32 == pytest.approx(row.bytes / full.bytes, abs=1e-4)
            assert row.share_of_fp32 <= 0.3
    shipped = by_format["sima_xcit_mini_p4_64_relu", "fp32"]
    card = read_card(weights_file("sima_xcit_mini_p4_64_relu"))
    assert (shipped.top1, shipped.images) == (pytest.approx(card.top1, abs=0.1), card.images)
    assert {row.exp_like_nodes for row in rows if row.model == shipped.model} == {0}


def test_the_docs_print_the_recorded_rows():
    page = (RECORDED.parents[2] / "docs/edge.md").read_text()
    for row in read_rows(RECORDED, FileRow):
        sizes = f"| {row.format}, {row.bytes / 2**20:.2f} MiB | {100 * row.share_of_fp32:.1f} % "
        accuracy = f"| {row.top1:.2f} | {row.top5:.2f} | {row.points_lost:.2f} | {row.same_class:.2f} |"
        assert sizes + accuracy in page


def test_linear_layers_become_gemm_and_compute_the_same_at_every_size(tmp_path):
    path = tmp_path / "m.onnx"
    export_onnx(model(depth=1), path, input_size=SIZE, dynamic=("batch", "size"))
    proto = onnx.load(path)
    convert_linear_to_gemm(proto)
    onnx.save(proto, tmp_path / "gemm.onnx")
    kinds = Counter(node.op_type for node in proto.graph.node)
    assert kinds["Gemm"] == 5
    assert kinds["MatMul"] == 2
    for shape in ((1, 3, SIZE, SIZE), (3, 3, SIZE, SIZE), (2, 3, 48, 80)):
        x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        assert np.allclose(open_model(path)(x), open_model(tmp_path / "gemm.onnx")(x), atol=1e-5)
    report = quantize_onnx(path, tmp_path / "int8.onnx", random_images(32), compare_images=random_images(4, seed=1))
    assert report.int8.float_products == 2


def test_images_come_from_a_data_folder_as_the_file_takes_them(fp32, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("sklearn")
    metadata = read_metadata(fp32)
    digits = open_images("digits", metadata, split="train", most=40)
    assert len(digits) == len(digits.labels) == 40
    assert next(iter(digits)).shape == (3, SIZE, SIZE)
    again = open_images("digits", metadata, split="train", most=40)
    assert np.array_equal(next(iter(digits)), next(iter(again)))

    photo = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    image.fromarray(photo).save(tmp_path / "a.png")
    flat = open_images(tmp_path, metadata)
    assert flat.labels is None
    expected = evaluation_transform(Preprocessing.from_json(metadata["preprocessing"]))(image.fromarray(photo)).numpy()
    assert np.array_equal(next(iter(flat)), expected)
    assert np.array_equal(next(iter(open_images(tmp_path, {**metadata, "preprocessing_inside": "true"}))), photo)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image"):
        next(iter(open_images(tmp_path, metadata)))
    (tmp_path / "val" / "cat").mkdir(parents=True)
    (tmp_path / "a.png").rename(tmp_path / "val" / "cat" / "b.png")
    with pytest.raises(ValueError, match=r"b\.png cannot be read as an image: .*; remove it"):
        next(iter(open_images(tmp_path, {**metadata, "labels": '["cat"]'})))


def test_class_folders_without_a_split_are_divided(fp32, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(10):
            image.new("RGB", (8, 8), (25 * i, 0, 0)).save(tmp_path / name / f"{i}.png")
    metadata = {**read_metadata(fp32), "labels": '["cat", "dog"]'}
    train, val = (open_images(tmp_path, metadata, split=split) for split in ("train", "val"))
    assert sorted(val.labels) == [0, 0, 1, 1]
    assert len(train) == 16


def test_wrong_inputs_are_said_and_leave_no_file(fp32, int8, tmp_path):
    out = tmp_path / "m.onnx"
    with pytest.raises(ValueError, match=r"31 calibration images are too few: use at least 32"):
        quantize_onnx(fp32, out, random_images(31))
    with pytest.raises(ValueError, match="is already in int8"):
        quantize_onnx(int8[0], out, random_images(32))
    with pytest.raises(ValueError, match="differ from"):
        quantize_onnx(fp32, fp32, random_images(32))
    with pytest.raises(ValueError, match=r"images must have 3 axes .* got \(1, 3, 32, 32\)"):
        quantize_onnx(fp32, out, [image[None] for image in random_images(32)])
    with pytest.raises(ValueError, match="3 labels for 2 images"):
        quantize_onnx(fp32, out, random_images(32), compare_images=random_images(2), compare_labels=[1, 2, 3])
    with pytest.raises(ValueError, match="labels up to 10, the file has 10 classes"):
        quantize_onnx(fp32, out, random_images(32), compare_images=random_images(1), compare_labels=[10])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        quantize_onnx(tmp_path / "none.onnx", out, random_images(32))
    with pytest.raises(ValueError, match="quantization of detectors is not supported"):
        open_images(tmp_path, {"task": "detection"})
    with pytest.raises(ValueError, match="no preprocessing metadata"):
        open_images(tmp_path, {})
    with pytest.raises(ValueError, match="contains no class folders"):
        open_images(tmp_path, read_metadata(fp32))
    with pytest.raises(FileNotFoundError, match="none does not exist; set it with --data"):
        open_images(tmp_path / "none", read_metadata(fp32))
    if find_spec("sklearn"):
        with pytest.raises(ValueError, match="digits has 10 classes, the file has 2"):
            open_images("digits", {**read_metadata(fp32), "labels": '["a", "b"]'})
    assert list(tmp_path.iterdir()) == []


def test_images_are_decoded_when_they_are_asked_for():
    read = []
    images = Images(lambda i: read.append(i) or np.zeros(3), 3, None)
    assert len(images) == 3
    assert read == []
    assert len(list(images)) == 3
    assert read == [0, 1, 2]
