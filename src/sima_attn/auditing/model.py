"""Model or ONNX file -> what it costs, and every exp-like function it evaluates.

"Exp-like" is what `ops.exp_counter` says: exp, softmax, sigmoid, tanh, erf, the activations made of them, and powers
whose exponent is computed.
The paper counts exp() in attention only; the audit counts the whole network and tells the two parts apart.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sima_attn._errors import first_line
from sima_attn.auditing.report import AuditReport, ExpCall, show_shapes
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.ops.exp_counter import ExpCounter

InputSize = int | tuple[int, int, int] | Tensor | tuple[Tensor, ...]

# exp() in attention as the paper counts it, for classes that are not ours. Class attention is not in its
# tables; one query against N keys is HN.
EXPS_IN_PAPER = {
    "timm.layers.attention.Attention": "HN^2",
    "timm.models.xcit.XCA": "HD^2",
    "timm.models.cait.ClassAttn": "HN",
    "torch.nn.modules.activation.MultiheadAttention": "HN^2",
    "sima_attn.nn.class_attention.SimClassAttention": "0",
    "sima_attn.nn.cross_attention.SimCrossAttention": "0",
    "sima_attn.nn.multihead.SimMultiheadAttention": "0",
}


def audit(model: nn.Module | str | Path, input_size: InputSize | None = None) -> AuditReport:
    """Parameters, MACs, activation memory and every exp-like call of a model or an .onnx file.

    `input_size` is the side of a square RGB image, (C, H, W), a tensor, or a tuple of example inputs. The default
    is 224 for a module; for an ONNX file it is what the file says, and a given size fixes the sizes left open.

    A module runs twice on one input, in eval mode without autograd, and is left as it was: once with softmax
    attention in plain products, which gives MACs and exp-like calls by module, and once as usual, which gives
    the memory. An ONNX file is read, not run: see `auditing.onnx`.

    A call is "in attention" by the classes of the modules around it, the innermost first. A class is an attention
    if its name, or that of a base class, contains "attn" or "attention", or is timm's XCA: so are all of ours,
    torch's MultiheadAttention, and those of timm and transformers. An MLP ("mlp", "feedforward" or "ffn" in the
    name) is not attention, wherever it lies. A class named an attention that holds another may be a block around
    it (timm's ClassAttentionBlock) or the attention itself (transformers' CvtSelfAttention, with its
    projections): what it calls in its own forward and every softmax below it count, other activations do not.
    """
    if isinstance(model, nn.Module):
        return _audit_module(model, 224 if input_size is None else input_size)
    if isinstance(model, str | Path):
        from sima_attn.auditing.onnx import audit_onnx  # needs the report above

        return audit_onnx(Path(model), None if input_size is None else _shapes(example_inputs(input_size)))
    raise ValueError(f"audit takes a torch module or the path of an .onnx file, got {type(model).__name__}")


def audit_named(name: str, size: int | None = None) -> AuditReport:
    """Audit of a timm model by name, of a run folder or an .onnx file; `size` is the image side, by default its own."""
    if name.endswith(".onnx"):
        return audit(name, size)
    from sima_attn.models.building import check_name

    if Path(name).exists():
        from sima_attn.models.loading import load_model

        loaded = load_model(name, features=None)
        return replace(audit(loaded.model, size or loaded.preprocessing.size), name=name)
    check_name(name, "model, run folder or .onnx file")
    model = _create_timm_model(name, size)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    channels, *own = config.get("input_size", (3, 224, 224))
    height, width = own if size is None else (size, size)
    return replace(audit(model, (channels, height, width)), name=name)


def assert_exp_free(model: nn.Module | str | Path, input_size: InputSize | None = None) -> None:
    """Raise AssertionError naming every exp-like call that is left in the whole network."""
    report = audit(model, input_size)
    if report.is_exp_free:
        return
    listed = [
        f"  {call.module or '(model)'}: {call.kind} on {call.shown_count} elements ({call.part})"
        for call in report.calls
    ]
    raise AssertionError(f"{report.name} is not exp-free: {report.summary()}\n" + "\n".join(listed))


class Parts:
    """Tells attention from the rest by the classes of the modules, as `audit` describes it.

    `classes` maps the dotted path of each module to the names of its class and base classes.
    """

    def __init__(self, classes: Mapping[str, Iterable[str]]) -> None:
        named = {path for path, names in classes.items() if any(map(_is_attention, names))}
        self.holders = named & {parent for path in named for parent in _parents(path)}
        self.attentions = named - self.holders
        self.mlps = {path for path, names in classes.items() if any(map(_is_mlp, names))} - named

    def attention_of(self, path: str, kind: str) -> str | None:
        """Path of the attention to which a call of `kind` in the module `path` belongs, or None."""
        for scope in (path, *_parents(path)):
            if scope in self.mlps:
                return None
            if scope in self.attentions:
                return scope
            if scope in self.holders and (scope == path or "softmax" in kind.lower()):
                return scope
        return None

    def distinct(self, ran: Iterable[str], with_exps: Set[str | None]) -> list[str]:
        """The attentions among the modules that ran; a part of one that calls exp itself is not another."""
        busy = self.holders & with_exps
        return [path for path in ran if path in self.attentions | busy and busy.isdisjoint(_parents(path))]


def example_inputs(input_size: Any, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """The inputs for any form of `input_size`: the tensors given, or a random image with the dtype of `like`."""
    parts = tuple(input_size) if isinstance(input_size, tuple | list) else (input_size,)
    if parts and all(isinstance(part, Tensor) for part in parts):
        return tuple(part.detach() for part in parts)
    shape = (3, *parts, *parts) if len(parts) == 1 else parts
    if len(shape) != 3 or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError(
            "input_size must be an image side such as 224, (channels, height, width), a tensor, or a tuple of "
            f"tensors, got {input_size!r}"
        )
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    return (image if like is None else image.to(like),)


def _shapes(inputs: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in inputs)


@contextmanager
def followed(model: nn.Module) -> Iterator[tuple[list[str], dict[str, None]]]:
    """Paths of the modules whose forward runs, the innermost last, and of all that ran; no hook stays behind."""
    running, ran = [""], dict[str, None]()
    with ExitStack() as hooks:
        for path, module in model.named_modules():

            def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                running.append(path)
                ran[path] = None

            def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
                running.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            # A model may catch what a part of it raises: then the part has ended too.
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield running, ran


class _ExpByModule(ExpCounter):
    """Counts by the path of the module that runs, as `followed` says."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.by_module: Counter[tuple[str, str]] = Counter()  # keeps the order of the first calls

    def add(self, name: str, count: int) -> None:
        super().add(name, count)
        kind = "softmax" if name == "safe_softmax" else name  # torch's own name inside plain-product attention
        self.by_module[self.running[-1], kind] += count


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes alive at one time in tensors made under this mode."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:  # a view, or written in place
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _audit_module(model: nn.Module, input_size: InputSize) -> AuditReport:
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps; under the counters it runs uncompiled
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"{name} is a TorchScript module, whose parts cannot be followed: audit the module it is from")
    inputs = example_inputs(input_size, next((p for p in model.parameters() if p.is_floating_point()), None))
    shapes = _shapes(inputs)
    flops = FlopCounterMode(display=False)
    try:
        with _as_in_inference(model):
            # Older torch has no FLOP formula for the fused CPU attention, so here it runs as plain products.
            with followed(model) as (running, ran), sdpa_kernel(SDPBackend.MATH), flops, _ExpByModule(running) as exps:
                model(*inputs)
            memory = LiveBytes([*model.parameters(), *model.buffers(), *inputs])
            with memory:
                model(*inputs)
    except Exception as error:
        raise ValueError(
            f"{name} cannot run on an input of {show_shapes(shapes)} ({type(error).__name__}: {first_line(error)}); "
            "pass the input_size it was built for: an image side, (channels, height, width), or example tensors"
        ) from error

    from sima_attn.models.huggingface import users_path  # imports timm

    modules = dict(model.named_modules())
    parts = Parts({path: [base.__name__ for base in type(module).__mro__] for path, module in modules.items()})
    with_exps = {parts.attention_of(path, kind) for path, kind in exps.by_module}
    return AuditReport(
        name=name,
        input_size=shapes,
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=flops.get_total_flops() // 2,
        activation_bytes=memory.peak,
        calls=tuple(
            ExpCall(users_path(model, path), kind, count, in_attention=parts.attention_of(path, kind) is not None)
            for (path, kind), count in exps.by_module.items()
        ),
        in_paper=tuple(
            dict.fromkeys(
                in_paper(type(modules[path]), evaluates_exp=path in with_exps)
                for path in parts.distinct(ran, with_exps)
            )
        ),
    )


def in_paper(cls: type | str, evaluates_exp: bool) -> str:
    """exp() of an attention class (or its full name) in the paper's symbols; "?" where it is not known."""
    if isinstance(cls, str):
        from sima_attn.nn.registry import ATTENTIONS

        ours = {full_name(attention): attention.exps_in_paper for attention in ATTENTIONS.values()}
        symbol = EXPS_IN_PAPER.get(cls) or ours.get(cls)
    else:
        symbol = EXPS_IN_PAPER.get(full_name(cls)) or getattr(cls, "exps_in_paper", None)
    return symbol or ("?" if evaluates_exp else "0")


def full_name(cls: type) -> str:
    """Module and name of a class, as exporters write it."""
    return f"{cls.__module__}.{cls.__qualname__}"


@contextmanager
def _as_in_inference(model: nn.Module) -> Iterator[None]:
    """Eval mode without autograd; torch's one-kernel encoder layer, which hides its parts, is off."""
    # torch's FLOP counter fails on a parameter that is the input of a module and asks for a gradient.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for parameter in trained:
            parameter.requires_grad_(False)
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for parameter in trained:
            parameter.requires_grad_()


def _create_timm_model(name: str, size: int | None) -> nn.Module:
    import timm

    if size is not None:
        with suppress(TypeError):  # convolutional models take any size and have no such option
            return timm.create_model(name, pretrained=False, img_size=size)
    return timm.create_model(name, pretrained=False)


def _is_attention(name: str) -> bool:
    return name == "XCA" or "attn" in name.lower() or "attention" in name.lower()


def _is_mlp(name: str) -> bool:
    return any(word in name.lower() for word in ("mlp", "feedforward", "ffn"))


def _parents(path: str) -> list[str]:
    """The paths around a dotted path, innermost first."""
    if not path:
        return []
    words = path.split(".")
    return [".".join(words[:n]) for n in range(len(words) - 1, -1, -1)]
