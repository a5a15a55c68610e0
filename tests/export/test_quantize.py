"""int8 files: weights in bytes, SimA's own part in float, small, close to float32, and refused where they cannot be."""

from collections import Counter

import numpy as np
import pytest
import timm
import torch

import sima_attn.models  # noqa: F401
from sima_attn.export.onnx import export_onnx
from sima_attn.export.preprocessing import Preprocessing
from sima_attn.export.quantize import Images, linear_layers_as_gemm, metadata_of, open_images, quantize_onnx
from sima_attn.export.runtimes import installed_runtimes, open_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIZE = 32
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
    assert report.share_of_size == pytest.approx(path.stat().st_size / fp32.stat().st_size, abs=1e-3)
    assert report.share_of_size < 0.3
    x = random_images(1, seed=2)[0][None]
    truth, ours = open_model(fp32)(x), open_model(path)(x)
    assert np.abs(ours - truth).max() < 0.1 * np.abs(truth).max()
    assert not np.array_equal(ours, truth)
    assert report.compared_images == 16
    assert np.isnan(report.top1_fp32)  # no labels were given
    assert "same first class on" in report.summary()


def test_every_weight_is_in_bytes_and_the_attention_is_not(int8):
    path, report = int8
    proto = onnx.load(path)
    # qkv, proj, fc1, fc2 of two blocks, the patches and the head; two products of activations a block.
    assert (report.quantised_products, report.float_products) == (10, 4)
    large = [w for w in proto.graph.initializer if np.prod(w.dims) > 1000 and len(w.dims) > 1 and w.name != "pos_embed"]
    weights = [w for w in large if "pos_embed" not in w.name and w.data_type == onnx.TensorProto.FLOAT]
    assert [w.name for w in weights if w.dims[-1] != 192] == []
    assert Counter(w.data_type for w in large)[onnx.TensorProto.INT8] == 10
    scales = [w for w in proto.graph.initializer if w.name.endswith("_scale") and len(w.dims) == 1 and w.dims[0] > 1]
    assert len(scales) >= 9  # per channel
    quantised = {name for node in proto.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    for node in proto.graph.node:
        if node.op_type in ("Abs", "ReduceSum", "Reciprocal", "MatMul"):
            assert quantised.isdisjoint(node.input)


def test_it_stays_exp_free_and_says_what_it_is(int8):
    path, report = int8
    assert report.exp_like_nodes == 0
    found = metadata_of(path)
    assert found["precision"] == "int8"
    assert found["calibration_images"] == "32"
    assert found["model"] == "VisionTransformer"


@pytest.mark.skipif("openvino" not in installed_runtimes(), reason="needs openvino")
def test_openvino_runs_it(int8):
    x = random_images(1, seed=2)[0][None]
    ours, theirs = open_model(int8[0])(x), open_model(int8[0], "openvino")(x)
    assert np.abs(ours - theirs).max() < 0.1 * np.abs(ours).max()


def test_accuracy_is_counted_from_the_labels(fp32, tmp_path):
    images = random_images(20, seed=3)
    session = open_model(fp32)
    labels = [int(session(image[None]).argmax()) for image in images]
    labels[:5] = [(label + 1) % 10 for label in labels[:5]]
    report = quantize_onnx(fp32, tmp_path / "m.onnx", random_images(32), compare_images=images, compare_labels=labels)
    assert report.top1_fp32 == 75.0
    assert abs(report.top1_int8 - 75.0) <= 100 - report.agreement


def test_linear_layers_become_gemm_and_compute_the_same_at_every_size(tmp_path):
    path = tmp_path / "m.onnx"
    export_onnx(model(depth=1), path, input_size=SIZE, dynamic=("batch", "size"))
    proto = onnx.load(path)
    linear_layers_as_gemm(proto)
    onnx.save(proto, tmp_path / "gemm.onnx")
    kinds = Counter(node.op_type for node in proto.graph.node)
    assert kinds["Gemm"] == 5
    assert kinds["MatMul"] == 2
    for shape in ((1, 3, SIZE, SIZE), (3, 3, SIZE, SIZE), (2, 3, 48, 80)):
        x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        assert np.allclose(open_model(path)(x), open_model(tmp_path / "gemm.onnx")(x), atol=1e-5)
    report = quantize_onnx(path, tmp_path / "int8.onnx", random_images(32), compare_images=random_images(4, seed=1))
    assert report.float_products == 2


def test_images_come_from_a_data_folder_as_the_file_takes_them(fp32, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("sklearn")
    metadata = metadata_of(fp32)
    digits = open_images("digits", metadata, split="train", most=40)
    assert len(digits) == len(digits.labels) == 40
    assert next(iter(digits)).shape == (3, SIZE, SIZE)
    again = open_images("digits", metadata, split="train", most=40)
    assert np.array_equal(next(iter(digits)), next(iter(again)))

    photo = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    image.fromarray(photo).save(tmp_path / "a.png")
    flat = open_images(tmp_path, metadata)
    assert flat.labels is None
    expected = Preprocessing.from_json(metadata["preprocessing"]).transform()(image.fromarray(photo)).numpy()
    assert np.array_equal(next(iter(flat)), expected)
    assert np.array_equal(next(iter(open_images(tmp_path, {**metadata, "preprocessing_inside": "true"}))), photo)


def test_wrong_inputs_are_said_and_leave_no_file(fp32, int8, tmp_path):
    out = tmp_path / "m.onnx"
    with pytest.raises(ValueError, match=r"31 calibration images are too few .* at least 32"):
        quantize_onnx(fp32, out, random_images(31))
    with pytest.raises(ValueError, match="is in int8 already"):
        quantize_onnx(int8[0], out, random_images(32))
    with pytest.raises(ValueError, match="another than"):
        quantize_onnx(fp32, fp32, random_images(32))
    with pytest.raises(ValueError, match=r"images must have 3 axes .* got \(1, 3, 32, 32\)"):
        quantize_onnx(fp32, out, [image[None] for image in random_images(32)])
    with pytest.raises(ValueError, match="3 labels for 2 images"):
        quantize_onnx(fp32, out, random_images(32), compare_images=random_images(2), compare_labels=[1, 2, 3])
    with pytest.raises(ValueError, match="labels up to 10, the file has 10 classes"):
        quantize_onnx(fp32, out, random_images(32), compare_images=random_images(1), compare_labels=[10])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        quantize_onnx(tmp_path / "none.onnx", out, random_images(32))
    with pytest.raises(ValueError, match="does not say how its images are prepared"):
        open_images(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_images_are_decoded_when_they_are_asked_for():
    read = []
    images = Images(lambda i: read.append(i) or np.zeros(3), 3, None)
    assert len(images) == 3
    assert read == []
    assert len(list(images)) == 3
    assert read == [0, 1, 2]
