"""What a linearization reached: blocks.csv and report.md in the run folder."""

from dataclasses import dataclass
from pathlib import Path

from sima_attn._files import atomic_write
from sima_attn.distill.recipes import LinearizeRecipe
from sima_attn.distill.task import Linearized
from sima_attn.report.rows import write_rows
from sima_attn.report.tables import TextTable


@dataclass(frozen=True)
class BlockRow:
    """Relative squared error of one attention, given the teacher's input, on held-out images."""

    block: str
    attention: str
    error_before: float
    error_after: float


def block_table(done: Linearized) -> TextTable:
    """One line per attention."""
    lines = [[block.path, f"{block.error_before:.3f}", f"{block.error_after:.3f}"] for block in done.blocks]
    return TextTable(["attention", "error before", "error after"], lines, set())


def summary_of(done: Linearized) -> str:
    """The metrics in one line."""
    words = {
        "cosine": "cosine of final tokens {:.3f}",
        "agreement": "same class as the teacher {:.1f} %",
        "top1": "top-1 {:.1f} %",
        "teacher_top1": "teacher {:.1f} %",
    }
    return ", ".join(words[name].format(value) for name, value in done.metrics.items())


def write_report(done: Linearized, recipe: LinearizeRecipe, folder: Path) -> None:
    """Write the errors of the blocks as rows, and a page."""
    attention = str(recipe.model.attention)
    rows = [
        BlockRow(block.path, attention, round(block.error_before, 5), round(block.error_after, 5))
        for block in done.blocks
    ]
    write_rows(folder / "blocks.csv", rows)
    text = f"# {recipe.model.name} with {attention}\n\n{summary_of(done)}\n\n{block_table(done).markdown()}\n"
    with atomic_write(folder / "report.md") as temporary:
        temporary.write_text(text)
