"""Images with shapes drawn on them, in COCO's format, and a detector of a second a step."""

import json
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw

from sima_attn.detect.augment import Augment
from sima_attn.detect.recipes import Data, Detector, DetectRecipe
from sima_attn.train.recipes import Optim, Run, StepSchedule

CATEGORIES = [{"id": 3, "name": "square"}, {"id": 7, "name": "disc"}]  # ids with gaps
SMALL = {
    "sima_deit_tiny_patch16_224": {"depth": 2, "embed_dim": 24, "num_heads": 2},
    "sima_xcit_nano_12_p16_224": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    "sima_cvt_13": {"embed_dims": (8, 16, 24), "depths": (1, 1, 1), "num_heads": (1, 2, 2)},
}


def shape_on(pen, box, kind, ink):
    """Draw a shape into (x0, y0, x1, y1); its outline as a polygon."""
    x0, y0, x1, y1 = box
    if kind == 3:
        pen.rectangle(box, fill=ink)
        return [x0, y0, x1, y0, x1, y1, x0, y1]
    pen.ellipse(box, fill=ink)
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    xs, ys = (x0 + x1) / 2 + (x1 - x0) / 2 * np.cos(angles), (y0 + y1) / 2 + (y1 - y0) / 2 * np.sin(angles)
    return [float(x) for pair in zip(xs, ys, strict=True) for x in pair]


def coco_folder(root, counts=(4, 2), sides=((96, 80), (72, 96))):
    """annotations/instances_SPLIT.json and images/: two shapes an image, every second image gray."""
    generator = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "annotations").mkdir()
    image_id = 0
    for split, count in zip(("train", "val"), counts, strict=True):
        images, annotations = [], []
        for _ in range(count):
            image_id += 11
            width, height = sides[image_id % 2]
            picture = Image.new("RGB", (width, height), tuple(int(x) for x in generator.integers(0, 60, 3)))
            pen = ImageDraw.Draw(picture)
            for place, kind in enumerate((3, 7)):
                side = int(generator.integers(24, 34))
                x, y = 2 + place * (width // 2), int(generator.integers(2, height - side - 2))
                ink = (255, 80, 60) if kind == 3 else (70, 230, 90)
                polygon = shape_on(pen, (x, y, x + side, y + side), kind, ink)
                record = {"id": len(annotations) + 1, "image_id": image_id, "category_id": kind, "iscrowd": 0}
                annotations.append(
                    {**record, "bbox": [x, y, side, side], "area": side * side, "segmentation": [polygon]}
                )
            name = f"{image_id:06d}.png"
            (picture.convert("L") if image_id % 2 else picture).save(root / "images" / name)
            images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES[::-1]}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def edit(root, change, split="train"):
    """Change the content of an annotation file in place."""
    file = root / "annotations" / f"instances_{split}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return content


def small_recipe(path, *, name="sima_xcit_nano_12_p16_224", epochs=2, run=None, model=None, **parts):
    """64 px, two layers, eight proposals."""
    recipe = DetectRecipe(
        name="small",
        model=Detector(name, proposals=8, drop_path=0.1, kwargs=dict(SMALL[name])),
        data=Data(str(path), side=64, longest=96, workers=0),
        augment=Augment(sides=(64, 64), longest=96, crop_sides=(64, 80), crop_size=(48, 64)),
        optim=Optim(lr=1e-3, lr_batch=0, clip=1.0),
        schedule=StepSchedule(epochs=epochs, drops=(epochs, epochs), warmup_steps=2),
        run=Run(batch=2, log_steps=1, eval_epochs=epochs),
    )
    recipe = replace(recipe, model=replace(recipe.model, **(model or {})), run=replace(recipe.run, **(run or {})))
    return replace(recipe, **parts)
