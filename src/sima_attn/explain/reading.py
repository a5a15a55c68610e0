"""Queries, keys and token grids of all self-attentions of a model, recorded by forward hooks.

The forward pass is not reimplemented: q and k are the outputs of the model's own projections. The token grid comes from
the convolutions: it is the latest feature map with as many positions as there are tokens, apart from class and register
tokens.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, C = H * D.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.conversion.huggingface import core_of, is_plain_softmax
from sima_attn.models.huggingface import users_model
from sima_attn.nn.attention import Attention, SimAttention
from sima_attn.nn.baselines.softmax import softmax_matrix
from sima_attn.nn.baselines.xca import XCAttention
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.grid import on_grid
from sima_attn.nn.multihead import SimMultiheadAttention
from sima_attn.nn.rotation import RotatedAttention
from sima_attn.ops.reference import normalize_tokens, sima_matrix_reference

Grid = tuple[int, int]
PARTS = ("q", "k")
MAX_PREFIX_TOKENS = 16  # class, distillation and register tokens, which come before the grid
# Names of layers whose outputs are q and k [B, N, C]: our CvT, transformers, CvT of transformers.
PAIRS = (("proj_q", "proj_k"), ("q_proj", "k_proj"), ("query", "key"), ("projection_query", "projection_key"))
EPS = 1e-12


@dataclass(frozen=True)
class Layer:
    """One self-attention in one forward pass: q [B, H, N, D] and k [B, H, M, D] in float32, and their grids.

    Prefix tokens, which are not on the grid, come first.
    """

    path: str
    module: nn.Module
    q: Tensor
    k: Tensor
    q_grid: Grid
    k_grid: Grid

    def tokens(self, of: str) -> tuple[Tensor, Grid]:
        """q or k [B, H, N, D] and the grid of its tokens."""
        if of not in PARTS:
            raise ValueError(f"a map is of 'q' (queries) or 'k' (keys), got {of!r}")
        return (self.q, self.q_grid) if of == "q" else (self.k, self.k_grid)

    def normalized(self, of: str) -> Tensor:
        """q or k [B, H, N, D] with the rotation and the normalization of the attention.

        SimA: each channel divided by its l1 norm over all tokens; XCA: by its l2 norm; others: unchanged.
        """
        norm, eps = _norm_over_tokens(self.module)
        x, grid = self.tokens(of)
        module = core_of(self.module) or self.module
        if isinstance(module, RotatedAttention):
            with on_grid(module, grid):
                x = module.rotation(x)
        return normalize_tokens(x, norm, eps)

    def scores(self, of: str) -> Tensor:
        """One number per token [B, rows, columns]: the l2 norm of q-hat or k-hat over the channels of all heads."""
        rows, columns = grid = self.tokens(of)[1]
        norms = self.normalized(of).square().sum((1, 3)).sqrt()  # [B, N]
        return norms[:, -rows * columns :].unflatten(1, grid)  # [B, rows, columns]

    @torch.no_grad()  # some attentions have parameters in it
    def matrix(self) -> Tensor:
        """The attention matrix [B, H, N, M]: signed Q-hat K-hat^T for SimA, rows that sum to 1 for softmax."""
        module = core_of(self.module) or self.module
        kind = type(module)
        if isinstance(module, XCAttention) or kind.__name__ == "XCA":
            raise ValueError(f"{self.path} is cross-covariance attention: its matrix is of channels, not of tokens")
        if isinstance(module, Attention):
            return module.matrix(self.q, self.k)
        if isinstance(module, SimMultiheadAttention):
            return sima_matrix_reference(self.q, self.k, token_ref=module.token_ref, eps=module.eps)
        is_softmax = isinstance(module, nn.MultiheadAttention) or f"{kind.__module__}.{kind.__name__}" == _TIMM
        if is_softmax or is_plain_softmax(module):
            return softmax_matrix(self.q, self.k)
        raise ValueError(
            f"{self.path} is a {kind.__name__}, whose attention matrix is unknown; supported: ours, timm's Attention, "
            "torch's MultiheadAttention, and those of transformers without RoPE and relative positions"
        )


class Reading(NamedTuple):
    """Result of one forward pass: the output of the model [B, K] and its layers, first to last.

    `share` is the part of the token grids (height, width) that the image covers; some models pad the rest.
    """

    output: Tensor
    layers: list[Layer]
    share: tuple[float, float]

    def layer(self, index: int) -> Layer:
        """A layer by its index, from 0, or from the end if negative."""
        count = len(self.layers)
        if not -count <= index < count:
            raise ValueError(
                f"layer must be from {-count} to {count - 1}, got {index}; layer 1 in captions is number 0"
            )
        return self.layers[index]


_TIMM = "timm.layers.attention.Attention"


@torch.no_grad()
def read_attention(model: nn.Module, images: Tensor) -> Reading:
    """Run the model once, in eval mode, on images [B, 3, height, width], and record its self-attentions.

    Class attention, which has a single query, and windowed attention are omitted.

    Raises:
        ValueError: No layer could be recorded.
    """
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile, where hooks run
    if images.dim() != 4:
        raise ValueError(f"images must have shape [batch, channels, height, width], got {tuple(images.shape)}")
    like = next((p for p in model.parameters() if p.is_floating_point()), images)
    images = images.to(like)
    recorder = _Recorder(B=len(images))
    with eval_mode(model), recorder.watch(model):
        output: Any = model(images)
    layers = recorder.layers(model)
    if not layers:
        raise ValueError(
            f"no self-attention of this {type(model).__name__} can be read: supported: layers with a projection named "
            f"qkv, or a pair such as {' and '.join(PAIRS[1])}, and tokens on the grid of a convolution"
        )
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):  # transformers' models without a head
        output = output[0]
    height, width = images.shape[2:]
    seen = recorder.seen or (height, width)
    return Reading(output.float(), layers, (min(1.0, height / seen[0]), min(1.0, width / seen[1])))


@dataclass
class _Recorder:
    B: int
    grids: list[Grid] = field(default_factory=list)
    seen: Grid | None = None
    found: dict[nn.Module, dict[str, tuple[Tensor, Grid]]] = field(default_factory=dict)

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for module in model.modules():
                hooks = [*self._convolution(module), *self._attention(module)]
                for hook in hooks:
                    stack.callback(hook.remove)
            # torch's fused encoder layer does not call its attention module.
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            yield

    def layers(self, model: nn.Module) -> list[Layer]:
        paths = {module: path for path, module in users_model(model).named_modules()}
        whole = {module: parts for module, parts in self.found.items() if set(parts) == set(PARTS)}
        return [
            Layer(paths[module], module, parts["q"][0], parts["k"][0], parts["q"][1], parts["k"][1])
            for module, parts in whole.items()
        ]

    def record(self, attention: nn.Module, of: str, x: Tensor) -> None:
        """Record q or k [B, H, N, D] of an attention if its tokens are a grid of the whole image."""
        grid = self._grid(x.shape[2])
        if grid is not None and len(x) == self.B:
            self.found.setdefault(attention, {})[of] = (x.detach().float(), grid)

    def _grid(self, N: int) -> Grid | None:
        """The latest grid with the fewest remaining tokens."""
        fitting = [g for g in reversed(self.grids) if 0 <= N - g[0] * g[1] <= MAX_PREFIX_TOKENS]
        return max(fitting, key=lambda g: g[0] * g[1], default=None)

    def _convolution(self, module: nn.Module) -> Iterator[Any]:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.seen = self.seen or (inputs[0].shape[-2], inputs[0].shape[-1])
            self.grids.append((output.shape[-2], output.shape[-1]))

        if isinstance(module, nn.Conv2d):
            yield module.register_forward_hook(keep)

    def _attention(self, module: nn.Module) -> Iterator[Any]:
        """Hooks on the layers that output q and k in this module; none if it is not a known attention."""
        if isinstance(module, nn.MultiheadAttention | SimMultiheadAttention):
            if module.in_proj_weight is not None:
                yield module.register_forward_pre_hook(self._multihead, with_kwargs=True)
            return
        children = dict(module.named_children())
        heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
        if heads is None:
            return

        def split(x: Tensor, count: int) -> tuple[Tensor, ...]:
            parts = x.unflatten(-1, (count, heads, -1)).permute(2, 0, 3, 1, 4)  # [count, B, H, N, D]
            return parts.unbind(0)

        def on(name: str, keep: Callable[[Tensor], None], dim: int = 3) -> Any:
            return children[name].register_forward_hook(lambda _module, _inputs, x: keep(x) if x.dim() == dim else None)

        tied = getattr(module, "ties_qk", False)

        def packed(x: Tensor) -> None:
            parts = split(x, 2 if tied else 3)
            self.record(module, "q", parts[0])
            self.record(module, "k", parts[0 if tied else 1])

        def q_alone(x: Tensor) -> None:
            second = tied and "q" in self.found.get(module, {})
            factor = getattr(module, "q_factor", 1.0)  # our CvT scales q after the projection
            self.record(module, "k" if second else "q", split(x, 1)[0] * (1.0 if second else factor))

        def k_first(count: int) -> Callable[[Tensor], None]:
            return lambda x: self.record(module, "k", split(x, count)[0])

        if "qkv" in children:
            yield on("qkv", packed)
        elif "q" in children and "kv" in children:  # PVT v2
            yield on("q", q_alone)
            yield on("kv", k_first(2))
        for q_name, k_name in PAIRS:
            if q_name in children and (k_name in children or tied):
                yield on(q_name, q_alone)
                if k_name in children:
                    yield on(k_name, k_first(1))
        for of in PARTS:  # a norm after the projection
            norm = children.get(f"{of}_norm")
            if norm is not None and not isinstance(norm, nn.Identity):
                yield on(f"{of}_norm", partial(self.record, module, of), dim=4)

    def _multihead(self, module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """torch's attention has no projection module to hook, so its input is projected here."""
        names = ("query", "key")
        tokens = [kwargs[name] if name in kwargs else args[i] for i, name in enumerate(names)]
        if tokens[0].dim() != 3:
            return
        weights = module.in_proj_weight.chunk(3)
        biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for of, x, weight, bias in zip(PARTS, tokens, weights, biases, strict=False):
            x = x if module.batch_first else x.transpose(0, 1)  # [B, N, C]
            x = F.linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)  # [B, H, N, D]
            self.record(module, of, x)


def _norm_over_tokens(module: nn.Module) -> tuple[str, float]:
    """The norm over tokens that an attention applies to q and k, and its eps."""
    module = core_of(module) or module
    if isinstance(module, SimAttention):
        return module.norm_over_tokens, module.eps
    if isinstance(module, SimMultiheadAttention):
        return "l1", module.eps
    if isinstance(module, XCAttention) or type(module).__name__ == "XCA":
        return "l2", EPS
    return "none", EPS
