"""ONNX file in float32 -> int8 file, and a comparison of both: size, and accuracy on images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sima_attn._files import atomic_write
from sima_attn._version import __version__
from sima_attn.auditing.model import audit
from sima_attn.data.images import images_in, open_photo
from sima_attn.data.settings import Data
from sima_attn.export.int8_graph import count_products, quantized_graph
from sima_attn.export.onnx import check_installed, write_metadata
from sima_attn.export.runtimes import FEATURES, Session, labels_in, open_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.report.rows import cpu_name, today
from sima_attn.report.tables import TextTable

MIN_IMAGES = 32
MAX_BATCH = 16  # for files with a dynamic batch size
FP32, INT8 = "fp32", "int8"
UNKNOWN = float("nan")


@dataclass(frozen=True)
class FileRow:
    """A file and its accuracy on `images` val images, in percent; NaN without images or labels, and for features.

    `share_of_fp32`, `points_lost` (of top-1), `same_class` and `cosine` are relative to the original float32 file.
    """

    model: str
    format: str  # fp32 or int8
    file: str
    bytes: int
    share_of_fp32: float
    top1: float
    top5: float
    points_lost: float
    same_class: float  # share of images with the same first class as float32
    cosine: float  # of the features, mean over the images; NaN for logits
    images: int
    data: str
    calibration_images: int
    settings: str
    int8_products: int
    float_products: int
    exp_like_nodes: int
    device: str
    onnxruntime: str
    sima_attn: str
    date: str


class QuantizeReport(NamedTuple):
    """The float32 file and the int8 file."""

    fp32: FileRow
    int8: FileRow

    def summary(self) -> str:
        """Size and accuracy in one line."""
        sizes = " -> ".join(f"{row.bytes / 2**20:.2f}" for row in self)
        size = f"{sizes} MiB ({self.int8.share_of_fp32:.1%})"
        if not self.int8.images:
            return f"{size}; not compared on images"
        if not np.isnan(self.int8.cosine):
            return f"{size}; cosine of the features {self.int8.cosine:.4f} on {self.int8.images} images"
        same = f"same first class on {self.int8.same_class:.1f} % of {self.int8.images} images"
        if np.isnan(self.int8.top1):
            return f"{size}; {same}"
        return f"{size}; top-1 {self.fp32.top1:.2f} -> {self.int8.top1:.2f}, {same}"


def quantize_table(rows: Sequence[FileRow]) -> TextTable:
    """Size and accuracy of each file; int8 in bold. Files of features have a cosine, and no top-1."""
    columns = {"top-1": "top1", "top-5": "top5", "lost": "points_lost", "same class": "same_class", "cosine": "cosine"}
    columns = {title: name for title, name in columns.items() if any(not np.isnan(getattr(row, name)) for row in rows)}
    header = ["model", "type", "MiB", "of fp32", *columns, "images", "exp-like"]
    lines = [
        [row.model, row.format, f"{row.bytes / 2**20:.2f}", f"{row.share_of_fp32:.1%}"]
        + [_shown(name, getattr(row, name)) for name in columns.values()]
        + [str(row.images), str(row.exp_like_nodes)]
        for row in rows
    ]
    return TextTable(header, lines, {i for i, row in enumerate(rows) if row.format == INT8})


def _shown(column: str, value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.{4 if column == 'cosine' else 2}f}"


class Images:
    """Inputs for an ONNX file from a data folder, decoded on access; `labels` is None if there are none."""

    def __init__(self, read: Callable[[int], np.ndarray], size: int, labels: list[int] | None) -> None:
        self.read, self.size, self.labels = read, size, labels

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.read, range(self.size))


def open_images(
    data: str | Path, metadata: dict[str, str], *, split: str = "val", most: int | None = None, seed: int = 0
) -> Images:
    """Images of a data folder as inputs of an exported file; `most` of them, selected at random.

    The folder has a format of `sima train`, where class folders without val images are divided as by `sima finetune`,
    or it contains image files, without labels.
    """
    from sima_attn.data.loader import evaluation_transform
    from sima_attn.data.splits import default_val, open_split

    if metadata.get("task") == "detection":
        raise ValueError("the file is a detector, and quantization of detectors is not supported: use it as float32")
    if "preprocessing" not in metadata:
        raise ValueError("the file has no preprocessing metadata: export it again with `sima export`")
    transform = evaluation_transform(Preprocessing.from_json(metadata["preprocessing"]))
    raw = metadata.get("preprocessing_inside") == "true"
    root = Path(data)
    files = images_in(root) if root.is_dir() else []
    source = None if files else open_split(Data(str(data), val=default_val(data)), split)
    known = labels_in(metadata)
    if source is not None and known is not None and len(source.classes) != len(known):
        raise ValueError(
            f"{data} has {len(source.classes)} classes, the file has {len(known)}: pass the data it was trained on, or "
            "a folder of image files, which need no labels"
        )
    total = len(files) if source is None else len(source)
    chosen = np.random.default_rng(seed).permutation(total)[: total if most is None else most]

    def read(index: int) -> np.ndarray:
        place = int(chosen[index])
        if source is None:
            image = open_photo(files[place])
        else:
            try:
                image = source.read(place)
            except Exception as error:  # decoders raise many kinds of errors
                raise ValueError(f"{source.name(place)} cannot be read as an image: {error}; remove it") from None
        return np.asarray(image) if raw else transform(image).numpy()

    return Images(read, len(chosen), None if source is None else source.labels[chosen].tolist())


def quantize_onnx(
    fp32_path: str | Path,
    int8_path: str | Path,
    calibration_images: Collection[np.ndarray] | Images,
    *,
    compare_images: Collection[np.ndarray] | Images = (),
    compare_labels: Sequence[int] | None = None,
    data: str = "",
    reduce_range: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> QuantizeReport:
    """Quantize an exported file to int8, and compare both files.

    Args:
        fp32_path: A file that `export_onnx` wrote.
        int8_path: Must end in .onnx.
        calibration_images: Training images, which determine the ranges of all activations. Inputs of the file without
            the batch axis: [3, height, width], or a photo [height, width, 3] in uint8.
        compare_images: Images on which both files are run.
        compare_labels: Their classes, for accuracy.
        data: Name of the images in the report.
        reduce_range: 7-bit weights, for x86 processors without VNNI, whose 8-bit products saturate.
        on_image: Called after each image of calibration and comparison.
    """
    check_installed()
    import onnx

    fp32_path, int8_path = Path(fp32_path), Path(int8_path)
    if int8_path.suffix != ".onnx" or int8_path == fp32_path:
        raise ValueError(f"the int8 file must end in .onnx and differ from {fp32_path}, got {str(int8_path)!r}")
    if len(calibration_images) < MIN_IMAGES:
        count = len(calibration_images)
        raise ValueError(f"{count} calibration images are too few: use at least {MIN_IMAGES}, better a few hundred")
    if compare_labels is not None and len(compare_labels) != len(compare_images):
        raise ValueError(f"got {len(compare_labels)} labels for {len(compare_images)} images")
    fp32 = open_model(fp32_path, threads=torch.get_num_threads())
    if fp32.metadata.get("precision") == INT8:
        raise ValueError(f"{fp32_path} is already in int8: pass the float32 file")
    batches = _batches(calibration_images, fp32)
    proto = quantized_graph(fp32_path, batches, reduce_range=reduce_range, on_image=on_image)
    write_metadata(proto, {"precision": INT8, "calibration_images": str(len(calibration_images))})

    with atomic_write(int8_path) as written:
        onnx.save(proto, written)
        int8 = open_model(written, threads=torch.get_num_threads())
        compared = _compare(fp32, int8, compare_images, compare_labels, on_image)
        model = fp32.metadata.get("model", fp32_path.stem)
        full_size = fp32_path.stat().st_size
        bits = 7 if reduce_range else 8
        settings = (
            f"static QDQ; weights {bits} bits a channel; activations 8 bits, min-max; activation products in float32"
        )

        def row(path: Path, name: str, precision: str, accuracy: _Accuracy, images: int, settings: str) -> FileRow:
            int8_products, float_products = count_products(path)
            return FileRow(
                model=model,
                format=precision,
                file=name,
                bytes=path.stat().st_size,
                share_of_fp32=round(path.stat().st_size / full_size, 4),
                **accuracy._asdict(),
                images=len(compare_images),
                data=data,
                calibration_images=images,
                settings=settings,
                int8_products=int8_products,
                float_products=float_products,
                exp_like_nodes=len(audit(path).calls),
                device=cpu_name(),
                onnxruntime=version("onnxruntime"),
                sima_attn=__version__,
                date=today(),
            )

        return QuantizeReport(
            row(fp32_path, fp32_path.name, FP32, compared[0], 0, "-"),
            row(written, int8_path.name, INT8, compared[1], len(calibration_images), settings),
        )


def _batches(images: Iterable[np.ndarray], session: Session) -> Iterator[np.ndarray]:
    """Inputs of the file: one image each, or up to MAX_BATCH if its batch size is dynamic."""
    photo = session.metadata.get("preprocessing_inside") == "true"
    fitting = len(session.input_shape) - (not photo)
    at_once = MAX_BATCH if isinstance(session.input_shape[0], str) and not photo else 1
    waiting: list[np.ndarray] = []
    for image in images:
        if image.ndim != fitting:
            raise ValueError(f"images must have {fitting} axes for an input {session.input_shape}, got {image.shape}")
        if photo:
            yield image
            continue
        waiting.append(image.astype(np.float32))
        if len(waiting) == at_once:
            yield np.stack(waiting)
            waiting = []
    if waiting:
        yield np.stack(waiting)


class _Accuracy(NamedTuple):
    """Accuracy of a file in percent."""

    top1: float = UNKNOWN
    top5: float = UNKNOWN
    points_lost: float = UNKNOWN
    same_class: float = UNKNOWN
    cosine: float = UNKNOWN


def _compare(
    fp32: Session,
    int8: Session,
    images: Collection[np.ndarray] | Images,
    labels: Sequence[int] | None,
    on_image: Callable[[], object],
) -> tuple[_Accuracy, _Accuracy]:
    """Accuracy of both files on the same images."""
    if not len(images):
        return _Accuracy(), _Accuracy()
    if fp32.metadata.get("output") == FEATURES:
        cosine = _mean_cosine(fp32, int8, images, on_image)
        return _Accuracy(cosine=1.0), _Accuracy(cosine=cosine)
    known = labels_in(fp32.metadata)
    if labels is not None and known is not None and max(labels) >= len(known):
        raise ValueError(f"the images have labels up to {max(labels)}, the file has {len(known)} classes")
    found: dict[Session, list[np.ndarray]] = {fp32: [], int8: []}  # five classes per image, the most probable first
    for batch in _batches(images, fp32):
        for session, fives in found.items():
            logits = session(batch)  # [B, K]
            fives.append(np.argsort(-logits, axis=-1)[:, :5])
        for _ in fives[-1]:
            on_image()
    theirs, ours = (np.concatenate(fives) for fives in found.values())  # [images, 5]

    def accuracy(fives: np.ndarray) -> _Accuracy:
        same = _percent(fives[:, 0] == theirs[:, 0])
        if labels is None:
            return _Accuracy(same_class=same)
        truth = np.asarray(labels)
        first = _percent(fives[:, 0] == truth)
        lost = round(_percent(theirs[:, 0] == truth) - first, 2)
        return _Accuracy(first, _percent((fives == truth[:, None]).any(1)), lost, same)

    return accuracy(theirs), accuracy(ours)


def _mean_cosine(
    fp32: Session, int8: Session, images: Collection[np.ndarray] | Images, on_image: Callable[[], object]
) -> float:
    """Mean cosine of the features of both files."""
    cosines: list[float] = []
    for batch in _batches(images, fp32):
        theirs, ours = (session(batch) for session in (fp32, int8))  # [B, C]
        norms = np.linalg.norm(theirs, axis=1) * np.linalg.norm(ours, axis=1)
        cosines += ((theirs * ours).sum(1) / norms.clip(1e-12)).tolist()
        for _ in theirs:
            on_image()
    return round(float(np.mean(cosines)), 6)


def _percent(of: np.ndarray) -> float:
    return round(100 * float(of.mean()), 2)
