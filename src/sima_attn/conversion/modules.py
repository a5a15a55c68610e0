"""Attention modules of timm and torch -> the same with another attention inside, their weights carried over.

One function a class, found in the table ADAPTERS by the class's full name: a class that merely calls itself
"Attention" is never touched, and no library is imported for being looked up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod

from sima_attn.conversion.mixins import Mixin, with_mixin
from sima_attn.nn import SimClassAttention, SimMultiheadAttention, attention_class


class Refused(Exception):  # noqa: N818 - no error of the program, a finding
    """Why an attention cannot be converted."""


class Exchange(NamedTuple):
    """A new module for an old one, the names of the old parameters in it, and of what has no place there.

    `placement` is where the weights were then, and `give_back` copies to the old module what the new one holds in
    another form.
    """

    module: nn.Module
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    placement: tuple[torch.device, torch.dtype]
    give_back: Callable[[], None] = lambda: None


def is_convertible(module: nn.Module) -> bool:
    """True for attentions that the converter knows, be it that it refuses them."""
    return _class_name(module) in REFUSALS or _class_name(module) in ADAPTERS


def exchange(path: str, module: nn.Module, attention: str, options: dict[str, Any]) -> Exchange:
    """The exchange for an attention that the converter knows; raises Refused with the reason why there is none.

    Raises:
        ValueError: The attention was changed in a way that the converted one would silently ignore.
    """
    name = _class_name(module)
    if name in REFUSALS:
        raise Refused(REFUSALS[name])
    obstacle = _obstacle(path, module)
    if obstacle is not None:
        raise ValueError(f"{path} cannot be converted: {obstacle}; or leave it out with `where`")
    return ADAPTERS[name](module, attention, options)


def restore(old: Any, exchange: Exchange) -> None:
    """Bring an attention that was exchanged up to date: what has happened to its successor happens to it too."""
    new: Any = exchange.module
    for name in set(exchange.kept) & set(old._parameters) & set(new._parameters):
        old._parameters[name] = new._parameters[name]  # load_state_dict(assign=True) replaces them
    exchange.give_back()
    if new.training != old.training:  # the mode was changed while it was not in the model
        old.train(new.training)
    device, dtype = _placement(new)
    if (device, dtype) != exchange.placement:  # the model was moved or cast while it was not there
        old.to(device, dtype)
    old._is_full_backward_hook = new._is_full_backward_hook  # which belongs to the hooks, and they are shared


def _class_name(module: nn.Module) -> str:
    # torch.nn.utils.parametrize makes a subclass for the module
    cls = type(module).__bases__[0] if is_parametrized(module) else type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def _obstacle(path: str, module: nn.Module) -> str | None:
    """What the converted attention would silently lose or bypass, and what to do about it."""
    if path.rpartition(".")[2] == "_orig_mod" or module._compiled_call_impl is not None:
        return "it is compiled; convert the model first, then compile it"
    if "forward" in vars(module):
        return "its forward was replaced on this instance, which the converted one would not call; delete the attribute"
    for name, part in module.named_modules():
        what = f"its {name}" if name else "it"
        hooks = part._forward_pre_hooks.values()
        if is_parametrized(part) or any(isinstance(hook, BasePruningMethod) for hook in hooks):
            return (
                f"{what} is pruned or parametrized; make that permanent first (prune.remove, remove_parametrizations)"
            )
        if name in PROJECTIONS and type(part) not in (nn.Linear, NonDynamicallyQuantizableLinear):
            return (
                f"{what} is a {type(part).__module__}.{type(part).__qualname__}, not a torch.nn.Linear; merge LoRA "
                "weights first, quantize after converting"
            )
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}; convert the model before quantizing or sharding it"
    return None


def looks_like_attention(module: nn.Module) -> bool:
    """True for classes that by their name do attention, and hold no other that does.

    Those that we do not know are reported, not touched.
    """
    inner = [child for child in module.modules() if child is not module]
    return _named_attention(module) and not any(_named_attention(child) for child in inner)


def _named_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _plain(old: Any, attention: str, options: dict[str, Any]) -> Exchange:
    """timm's Attention: qkv, optional norms, proj."""
    if old.attn_dim != old.proj.out_features or old.attn_dim != old.qkv.in_features:
        raise Refused(f"its heads have {old.attn_dim} channels together, its tokens {old.qkv.in_features}")
    if old.gate is not None:
        raise Refused("its output is gated by a sigmoid")
    new = _new_attention(old, attention, options)
    new.q_norm, new.k_norm, new.norm = old.q_norm, old.k_norm, old.norm
    return _carried(old, new)


def _xca(old: Any, attention: str, options: dict[str, Any]) -> Exchange:
    """timm's XCA: its temperature is known to XCA alone."""
    new = _new_attention(old, attention, options)
    if hasattr(new, "temperature"):
        new.temperature = old.temperature
    return _carried(old, new)


def _class_attention(old: Any, attention: str, options: dict[str, Any]) -> Exchange:
    """CaiT's and XCiT's class attention."""
    if attention != "sima":
        raise Refused(f"class attention has a SimA form, but none of {attention!r}")
    known = only(options, ("token_ref",))
    new = SimClassAttention(old.q.in_features, old.num_heads, attn_drop=old.attn_drop.p, **known, **_factory(old.q))
    new.q, new.k, new.v, new.proj, new.proj_drop = old.q, old.k, old.v, old.proj, old.proj_drop
    return _carried(old, new)


def _beit(old: Any, attention: str, options: dict[str, Any]) -> Exchange:
    """BEiT's attention without relative position bias; its split bias becomes that of one qkv layer."""
    if old.relative_position_bias_table is not None:
        raise Refused("it adds a relative position bias to every pair of tokens")
    if old.qkv.out_features != 3 * old.qkv.in_features:
        raise Refused("its heads are wider than its tokens")
    new = _new_attention(old, attention, options, mixin=BeitCall)
    if old.q_bias is None:
        return _carried(old, new)
    packed = nn.Linear(old.qkv.in_features, old.qkv.out_features, **_factory(old.qkv))
    packed.weight = old.qkv.weight
    packed.bias = nn.Parameter(torch.cat((old.q_bias, old.k_bias, old.v_bias)).detach().clone())
    new.qkv = packed

    def give_back() -> None:
        # Softmax does not see a bias of the keys, which adds the same number to all scores of a query.
        q_bias, _, v_bias = new.qkv.bias.detach().chunk(3)
        old.q_bias.data, old.v_bias.data = q_bias.clone(), v_bias.clone()

    return _carried(old, new, copied=("q_bias", "k_bias", "v_bias"))._replace(give_back=give_back)


def _pvt(old: Any, attention: str, options: dict[str, Any]) -> Exchange:
    """PVT v2's attention to a shrunk map: N queries, fewer keys."""
    cls = attention_class(attention)
    if cls.needs_num_tokens or cls.needs_grid or cls.has_local_branch or attention == "xca":
        raise Refused(f"it has fewer keys than queries, which {attention!r} cannot take")
    new = _new_attention(old, attention, options, mixin=PvtCall)
    new.q, new.kv, new.sr, new.kv_norm, new.pool, new.act = old.q, old.kv, old.sr, old.norm, old.pool, old.act
    del new.qkv
    return _carried(old, new)


def _multihead(old: nn.MultiheadAttention, attention: str, options: dict[str, Any]) -> Exchange:
    """torch's MultiheadAttention, torchvision's vision transformers among its users."""
    if attention != "sima":
        raise Refused(f"torch.nn.MultiheadAttention has a SimA form, but none of {attention!r}")
    if not old._qkv_same_embed_dim:
        raise Refused("its keys or values have another width than its queries")
    if old.bias_k is not None or old.add_zero_attn:
        raise Refused("it adds a key of its own (add_bias_kv or add_zero_attn), which would enter the norm of K")
    known = only(options, ("order", "token_ref", "eps"))
    new = SimMultiheadAttention(
        old.embed_dim,
        old.num_heads,
        bias=old.in_proj_bias is not None,
        batch_first=old.batch_first,
        device="meta",
        **known,
    )
    new.in_proj_weight, new.in_proj_bias, new.out_proj = old.in_proj_weight, old.in_proj_bias, old.out_proj
    return _carried(old, new)


class BeitCall(Mixin):
    """BEiT blocks hand a shared position bias to their attention; there must be none."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C]."""
        if shared_rel_pos_bias is not None:
            raise ValueError("this attention was converted and cannot add a relative position bias")
        return super().forward(x)  # type: ignore[misc]


class PvtCall(Mixin):
    """PVT v2 blocks hand the size of the map to their attention, which shrinks it for keys and values."""

    def forward(self: Any, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Tokens [B, N, C] of a map -> tokens [B, N, C]."""
        B, _, C = x.shape
        heads = (self.num_heads, self.head_dim)
        q = self.q(x).unflatten(-1, heads).transpose(1, 2)  # [B, H, N, D]
        if self.sr is not None:
            maps = x.transpose(1, 2).reshape(B, C, *feat_size)
            maps = self.sr(maps if self.pool is None else self.pool(maps))
            x = self.kv_norm(maps.flatten(2).transpose(1, 2))  # [B, M, C]
            x = x if self.act is None else self.act(x)
        k, v = self.kv(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, M, D]
        return self.join(self.core(q, k, v))


def _new_attention(old: Any, attention: str, options: dict[str, Any], mixin: Any = None) -> Any:
    """An attention of the width and heads of the old one, which takes over its projections."""
    cls = attention_class(attention)
    if cls.ties_qk:
        raise Refused(f"{attention!r} has one projection for queries and keys, this attention has two")
    if mixin is not None:
        cls = with_mixin(mixin, cls)
    drop = {"attn_drop": old.attn_drop.p} if cls.can_drop_attention else {}
    new = cls(old.proj.out_features, old.num_heads, **drop, **_factory(old.proj), **options)
    if hasattr(old, "qkv"):
        new.qkv = old.qkv
    new.proj, new.proj_drop = old.proj, old.proj_drop
    return new


def _carried(old: Any, new: nn.Module, copied: tuple[str, ...] = ()) -> Exchange:
    """The exchange, with what went along and what did not; `copied` went along in another form."""
    tensors = {id(tensor) for tensor in (*new.parameters(), *new.buffers())}
    parameters, buffers = dict(old.named_parameters()), dict(old.named_buffers())
    kept = tuple(name for name, tensor in parameters.items() if id(tensor) in tensors or name in copied)
    lost = [name for name, tensor in (parameters | buffers).items() if id(tensor) not in tensors and name not in copied]
    parts = set(new.modules())
    for name, part in old.named_children():
        empty = not any(True for _ in (*part.parameters(), *part.buffers()))
        if empty and part not in parts and name != "attn_drop":
            lost.append(name)
    if not getattr(new, "can_drop_attention", False):
        name, rate = ("dropout", old.dropout) if hasattr(old, "dropout") else ("attn_drop", old.attn_drop.p)
        lost += [f"{name}={rate}"] if rate else []
    return Exchange(new, kept, tuple(lost), _placement(new))


def only(options: dict[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    """The options, where all of them are allowed."""
    if set(options) - set(allowed):
        raise Refused(f"of the options {sorted(options)} it takes {', '.join(allowed)} only")
    return options


def _placement(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next(module.parameters())
    return first.device, first.dtype


def _factory(layer: nn.Linear) -> dict[str, Any]:
    return {"device": layer.weight.device, "dtype": layer.weight.dtype}


# What the adapted classes call their linear layers.
PROJECTIONS = ("qkv", "q", "k", "v", "kv", "proj", "out_proj")
ADAPTERS: dict[str, Callable[[Any, str, dict[str, Any]], Exchange]] = {
    "timm.layers.attention.Attention": _plain,
    "timm.models.xcit.XCA": _xca,
    "timm.models.cait.ClassAttn": _class_attention,
    "timm.models.beit.Attention": _beit,
    "timm.models.pvt_v2.Attention": _pvt,
    "torch.nn.modules.activation.MultiheadAttention": _multihead,
}
# Class of timm -> our attentions that compute the same.
SAME_FUNCTION = {"Attention": ("softmax", "softmax_explicit"), "XCA": ("xca",)}
_WINDOW_BIAS = "it adds a position bias to every pair of tokens of a window"
_ROPE = "it turns queries and keys by their position (RoPE) inside its forward"
REFUSALS = {
    "timm.models.swin_transformer.WindowAttention": _WINDOW_BIAS,
    "timm.models.swin_transformer_v2.WindowAttention": _WINDOW_BIAS,
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": _WINDOW_BIAS,
    "timm.models.maxxvit.AttentionCl": _WINDOW_BIAS,
    "timm.models.maxxvit.Attention2d": _WINDOW_BIAS,
    "timm.models.vision_transformer_relpos.RelPosAttention": "it adds a relative position bias to every pair of tokens",
    "timm.models.levit.Attention": "it adds a learned bias to every pair of tokens",
    "timm.models.cait.TalkingHeadAttn": "its heads exchange their attention matrices (talking heads)",
    "timm.models.eva.EvaAttention": _ROPE,
    "timm.layers.attention.AttentionRope": _ROPE,
    "timm.models.vision_transformer_sam.Attention": "it may add a relative position bias, in windows",
}
