"""Options that several commands share, as types of their parameters."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

# Where benchmarks write unless they are told where. The rows and figures that are committed are written by `make`.
BENCH_FOLDER = Path("runs/bench")

# Checked before anything is measured: what was measured until then would be lost.
RowsFile = Annotated[Path, Option(help="CSV file for the rows.", dir_okay=False)]
FigureFile = Annotated[Path, Option(help="PNG file for the figure.", dir_okay=False)]
Threads = Annotated[list[int], Option(help="Thread counts; repeat for several.", min=1)]
Pixels = Annotated[list[int] | None, Option(help="Image sides; repeat for several. Default: all.", min=1)]
Seconds = Annotated[float, Option(help="Time for each group of measurements.", min=0.0)]

Device = Annotated[str, Option(help="auto, cpu or cuda.")]
BatchSize = Annotated[int, Option(help="Batch size.", min=1)]
Workers = Annotated[int | None, Option(help="Worker processes that decode images.", min=0)]
# Of the commands that train with a recipe.
RecipeName = Annotated[
    str | None, Option(help="Name of a recipe, see `sima recipes`. Default: by the images; without --data, digits.")
]
RunFolder = Annotated[Path | None, Option(help="Folder of the run.", show_default="runs/RECIPE")]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="A setting of the recipe, e.g. schedule.epochs=10."),
]
Resume = Annotated[bool, Option("--resume", help="Resume the run in the folder.")]
Precision = Annotated[str | None, Option(help="fp32, bf16 or fp16. Default: the recipe's.")]
# A run's folder, a checkpoint, weights or a name, as `load_model` takes them.
RunOrModel = Annotated[
    str, Argument(metavar="RUN_OR_MODEL", help="A run's folder, a checkpoint, weights, or a model name.")
]
Model = Annotated[
    str | None,
    Option(help="A model name, NAME=WEIGHTS, a run's folder or a checkpoint. Default: the model in the package."),
]
Data = Annotated[str | None, Option(help="Folder of the images, or digits. Default: the recipe's.")]
HeldOut = Annotated[
    float | None, Option("--val", metavar="PART", help="Hold out this part of each class as val images, e.g. 0.2.")
]
DataOfRun = Annotated[str | None, Option(help="Folder of the images, or digits. Default: the run's.")]
