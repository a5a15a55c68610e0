"""A run of a second, and images to train it on."""

from dataclasses import replace

import numpy as np
from PIL import Image

from sima_attn.data.settings import Augment, Data
from sima_attn.train.recipes import Model, Optim, Recipe, Run, Schedule

VIT = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "class_token": False,
    "global_pool": "avg",
}


def small_recipe(path="digits", *, augment=None, run=None, data=None, model=None, epochs=2, **parts) -> Recipe:
    """16 px, two layers; without augmentation unless some is given."""
    recipe = Recipe(
        name="small",
        model=Model("sima_deit_tiny_patch16_224", "sima", kwargs=VIT),
        data=Data(str(path), size=16, workers=0, cache=False),
        augment=Augment(crop="none", flip=0.0),
        optim=Optim(lr=1e-3, lr_batch=0),
        schedule=Schedule(epochs=epochs, warmup_epochs=0),
        run=Run(batch=8, log_steps=2),
    )
    groups = {"augment": augment, "run": run, "data": data, "model": model}
    groups = {name: replace(getattr(recipe, name), **change) for name, change in groups.items() if change}
    return replace(recipe, **groups, **parts)


ALL_ON = {
    "crop": "resized",
    "flip": 0.5,
    "randaugment": "rand-m9-mstd0.5-inc1",
    "erasing": 0.25,
    "repeats": 2,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smoothing": 0.1,
}


def picture(seed: int, size=(20, 18), mode="RGB") -> Image.Image:
    """Noise: unlike any other seed's."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def class_folders(root, per_class=(8, 4), classes=("cat", "dog", "owl")):
    """train/CLASS/n.png and val/CLASS/n.png."""
    seed = 0
    for split, count in zip(("train", "val"), per_class, strict=True):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                picture(seed).save(root / split / name / f"{i}.png")
                seed += 1
    return root
