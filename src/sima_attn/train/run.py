"""The folder of a run: its recipe, checkpoints, logs and curve, and the rules for starting and going on.

recipe.yaml    the resolved recipe, versions and commit        checkpoints/  step-*.pt
train.csv, eval.csv   a row every few steps, a row an evaluation      tensorboard/
learning_curve.png    at the end                                weights.safetensors  the trained model, at the end
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sima_attn._files import written_whole
from sima_attn._version import __version__
from sima_attn.train.recipes import Recipe, differences, from_dict, to_dict


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """The trained model, without the optimiser."""
        return self.path / "weights.safetensors"

    @property
    def curve(self) -> Path:
        """The learning curve."""
        return self.path / "learning_curve.png"

    def check(self, recipe: Any, *, resume: bool) -> None:
        """Raise unless the folder is free for a new run, or holds the very run to go on with."""
        if not resume:
            if self.recipe_file.exists():
                raise ValueError(
                    f"{self.path} holds a run already: go on with it by --resume, or give another folder with --out"
                )
            return
        changed = differences(to_dict(self.read_recipe(type(recipe))), to_dict(recipe))
        if changed:
            raise ValueError(
                f"the run in {self.path} has another recipe: {'; '.join(changed)}. Go on without these changes, or "
                "start a new run with another --out"
            )

    def write_recipe(self, recipe: Any) -> None:
        """Keep the recipe, and what it ran on."""
        import yaml

        with written_whole(self.recipe_file) as temporary:
            temporary.write_text(yaml.safe_dump({"recipe": to_dict(recipe), **provenance()}, sort_keys=False))

    def read_recipe(self, kind: type = Recipe) -> Any:
        """The recipe of the run in this folder."""
        import yaml

        if not self.recipe_file.is_file():
            raise FileNotFoundError(f"there is no run in {self.path}: {self.recipe_file.name} is missing")
        return from_dict(kind, yaml.safe_load(self.recipe_file.read_text())["recipe"])


def provenance(packages: Sequence[str] = ("torch", "torchvision", "timm", "lightning", "numpy")) -> dict[str, Any]:
    """Versions of what takes part, and the commit of the source where it is a checkout."""
    versions = {"sima-attn": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit()}


def _commit() -> str | None:
    try:
        git = ("git", "-C", str(Path(__file__).parent))
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + (" with changes" if status.stdout.strip() else "")
