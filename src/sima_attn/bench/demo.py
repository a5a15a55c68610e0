"""Measurements of `sima demo`: twins trained on the digits, one word apart; all attentions on this machine."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sima_attn._settings import with_overrides
from sima_attn.auditing import audit
from sima_attn.bench.cores import unpack
from sima_attn.models.loading import load_model
from sima_attn.nn import ATTENTIONS, Attention, create_attention
from sima_attn.ops import AttentionShape, ExpCounter
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import time_interleaved
from sima_attn.train.recipes import Recipe, named_recipe
from sima_attn.train.run import RunFolder

HEADS, CHANNELS = 3, 64  # DeiT-Tiny
TOKENS = (49, 196, 784, 2304, 4096)  # squares: some attentions need a square grid
COUNTED_TOKENS = 196  # 224 x 224 pixels in patches of 16
TWINS = ("sima", "softmax")


@dataclass(frozen=True)
class TwinRow:
    """One of the twins: accuracy on the test digits, training time, exp-like evaluations per image."""

    attention: str
    params: int
    epochs: int
    top1: float
    seconds: float
    attention_exps: int
    other_exps: int
    threads: int
    device: str
    torch: str
    date: str


def train_twins(
    out: Path,
    *,
    changes: Sequence[str] = (),
    quiet: bool = False,
    on_twin: Callable[[str], object] = lambda attention: None,
) -> list[TwinRow]:
    """Train the recipe `digits` with SimA and with softmax, each in its own folder under `out`.

    `changes` are changes of the recipe, as for `--set`. The runs of an earlier demo are replaced.
    """
    rows = []
    for attention in TWINS:
        recipe = with_overrides(named_recipe("digits"), [*changes, f"model.attention={attention}"])
        _remove_old_twin(out / attention, recipe)
        on_twin(attention)
        rows.append(_train_twin(recipe, out / attention, quiet))
    return rows


def _remove_old_twin(folder: Path, recipe: Recipe) -> None:
    """Remove the run of an earlier demo; raise if the folder holds any other run."""
    if not (folder / "recipe.yaml").exists():
        return
    old = RunFolder(folder).read_recipe()
    if (old.model.name, old.data.path) != (recipe.model.name, recipe.data.path):
        raise ValueError(f"{folder} holds another run, of {old.model.name}; use another --out for the demo")
    shutil.rmtree(folder)


def _train_twin(recipe: Recipe, folder: Path, quiet: bool) -> TwinRow:
    from sima_attn.train.classify import train_classifier  # needs lightning, which comparing attentions does not

    finished = train_classifier(recipe, folder, device="cpu", quiet=quiet)
    report = audit(load_model(folder).model, recipe.data.size)
    return TwinRow(
        attention=str(recipe.model.attention),
        params=report.params,
        epochs=recipe.schedule.epochs,
        top1=round(finished.metrics["top1"], 2),
        seconds=round(finished.seconds, 1),
        attention_exps=report.attention_exps or 0,
        other_exps=report.other_exps or 0,
        threads=recipe.run.threads,
        **provenance_columns("cpu"),
    )


def twins_table(rows: Sequence[TwinRow]) -> TextTable:
    """The twins side by side."""
    header = ["attention", "accuracy", "training", "exp(), attention", "exp(), other", "params"]
    lines = [
        [row.attention, f"{row.top1:.1f} %", f"{row.seconds:.0f} s"]
        + [f"{count:,}" for count in (row.attention_exps, row.other_exps, row.params)]
        for row in rows
    ]
    return TextTable(header, lines, bold={i for i, row in enumerate(rows) if row.attention == "sima"})


@dataclass(frozen=True)
class DemoRow:
    """One attention at one number of tokens; `error` is float32 against its float64 reference at 196 tokens."""

    attention: str
    H: int
    N: int
    D: int
    order: str
    error: float
    exps: int
    exps_in_paper: str
    macs: int
    speedup: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    threads: int
    device: str
    torch: str
    date: str


@torch.no_grad()
def run_demo(
    *,
    tokens: Sequence[int] = TOKENS,
    seconds: float = 3.0,
    on_step: Callable[[str], object] = lambda what: None,
) -> list[DemoRow]:
    """Measure all attentions at each number of tokens, `seconds` each; calls `on_step` before each part."""
    errors = {}
    for name in ATTENTIONS:
        on_step(f"{name}: comparison with its reference")
        errors[name] = relative_error(name)
    rows = []
    for N in tokens:
        on_step(f"all at N = {N}")
        rows += _rows_at(N, seconds, errors)
    return rows


def relative_error(name: str, N: int = COUNTED_TOKENS) -> float:
    """Relative error of `core` in float32 against `reference` in float64."""
    module, inputs = _module_and_inputs(name, N)
    out = module.core(*inputs)
    truth = module.double().reference(*(x.double() for x in inputs))
    return ((out - truth).norm() / truth.norm()).item()


def _module_and_inputs(name: str, N: int) -> tuple[Attention, tuple[Tensor, Tensor, Tensor]]:
    module = create_attention(name, HEADS * CHANNELS, HEADS, num_tokens=N).eval()
    generator = torch.Generator().manual_seed(0)
    q, k, v = unpack(torch.randn(1, N, 3, HEADS, CHANNELS, generator=generator))  # [1, H, N, D] each
    return module, (q, q if module.ties_qk else k, v)


def _rows_at(N: int, seconds: float, errors: dict[str, float]) -> list[DemoRow]:
    modules = {name: _module_and_inputs(name, N) for name in ATTENTIONS}
    timings = time_interleaved(
        {name: (lambda m=module, i=inputs: m.core(*i)) for name, (module, inputs) in modules.items()},  # type: ignore[misc]
        seconds=seconds,
        least_samples=3,
    )
    rows = []
    for name, (module, inputs) in modules.items():
        timing, cost = timings[name], module.cost(AttentionShape(1, HEADS, N, CHANNELS))
        with ExpCounter() as counted:
            module.core(*inputs)
        if counted.total != cost.exps:
            raise RuntimeError(f"{name} evaluated {counted.total} exp-like functions, its cost says {cost.exps}")
        rows.append(
            DemoRow(
                attention=name,
                H=HEADS,
                N=N,
                D=CHANNELS,
                order=cost.order or "-",
                error=float(f"{errors[name]:.2e}"),
                exps=counted.total,
                exps_in_paper=module.exps_in_paper or "-",
                macs=cost.macs,
                speedup=round(timings["softmax"].p50 / timing.p50, 3),
                **timing.columns("ms", 4),
                threads=torch.get_num_threads(),
                **provenance_columns("cpu"),
            )
        )
    return rows
