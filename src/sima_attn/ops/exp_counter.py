"""Counts the numbers that a computation evaluates exp-like functions on.

A function is exp-like if hardware needs an exponential (or a table of one) for it: exp itself, powers with a computed
exponent, softmax, sigmoid, tanh, erf, and the activations that use them. A fused kernel counts with the functions
inside it: softmax attention with its N x M exponentials, an encoder layer with its GELU as well, an LSTM with three
sigmoids and two tanh per hidden unit and step. The contents of an operator of another library are unknown, so it is
counted under its full name, with the numbers of its first tensor.

Not counted:
- x ** y with a fixed exponent: a number or a parameter.
- Powers of a table, a tensor computed only from shapes and numbers, as position encodings are: it is constant at a
  fixed size.
- Kernels that are launched without the dispatcher, such as a plain Triton kernel.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Arguments = dict[str, Any]  # of one call, by the names in the operator's schema
Counts = dict[str, int]  # common name of a function -> how many numbers it is evaluated on

_FUNCTIONS = """
    exp exp2 expm1 softmax _softmax log_softmax _log_softmax _safe_softmax _masked_softmax logsumexp logcumsumexp
    _logcumsumexp logaddexp logaddexp2 linalg_matrix_exp binary_cross_entropy_with_logits soft_margin_loss
    sigmoid log_sigmoid_forward tanh sinh cosh erf erfc erfinv special_erfcx special_ndtri special_log_ndtr
    gelu elu celu selu silu mish softplus glu _sparse_softmax _sparse_log_softmax i0 special_i0e special_i1 special_i1e
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    _foreach_exp _foreach_expm1 _foreach_sigmoid _foreach_tanh _foreach_sinh _foreach_cosh _foreach_erf _foreach_erfc
""".split()
_FUSED_ATTENTIONS = """
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
""".split()
_FUSED_RECURRENT = """
    mkldnn_rnn_layer _cudnn_rnn miopen_rnn _lstm_mps quantized_lstm quantized_gru quantized_lstm_cell_dynamic
    quantized_gru_cell_dynamic quantized_rnn_tanh_cell_dynamic
""".split()
_POWERS = {"pow": "exponent", "pow_": "exponent", "ldexp": "other", "ldexp_": "other"}  # -> name of the exponent
_RECURRENT_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # in the order of torch's mode numbers
_EXPS_PER_UNIT = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 5, "gru": 3}  # sigmoids and tanh per hidden unit and step
# Operators of torch, torchvision and this package: those that are exp-like are listed in this module.
_KNOWN_NAMESPACES = frozenset(
    """
    aten prim prims quantized _quantized quantized_decomposed mkldnn onednn sparse c10d _c10d_functional torchvision
    sima_attn
    """.split()
)


def _of_function(name: str) -> Callable[[Arguments], Counts]:
    def count(arguments: Arguments) -> Counts:
        first = next(iter(arguments.values()))  # a list of tensors in the _foreach_ functions
        numbers = sum(leaf.numel() for leaf in tree_leaves(first) if isinstance(leaf, Tensor))
        return {name: numbers} if numbers else {}

    return count


def _of_attention(arguments: Arguments) -> Counts:
    """query [B, H, N, D] and key [B, H, M, D]: one exp for each of the B*H*N*M scores."""
    q, k = arguments["query"], arguments["key"]
    return {"scaled_dot_product_attention": q.numel() // q.shape[-1] * k.shape[-2]}


def _of_multi_head_attention(arguments: Arguments) -> Counts:
    """The one-kernel path of nn.MultiheadAttention: query [B, N, C] and key [B, M, C], or nested."""
    scores = arguments["num_head"] * _token_pairs(arguments["query"], arguments["key"])
    return {"scaled_dot_product_attention": scores}


def _of_encoder_layer(arguments: Arguments) -> Counts:
    """The one-kernel path of nn.TransformerEncoderLayer: tokens [B, N, C], or nested."""
    tokens = arguments["src"]
    counts = {"scaled_dot_product_attention": arguments["num_heads"] * _token_pairs(tokens, tokens)}
    if arguments["use_gelu"]:
        counts["gelu"] = tokens.numel() // arguments["embed_dim"] * arguments["ffn_weight_1"].shape[0]
    return counts


def _token_pairs(q: Tensor, k: Tensor) -> int:
    if q.is_nested:
        return sum(one.shape[0] * other.shape[0] for one, other in zip(q.unbind(), k.unbind(), strict=True))
    return q.shape[0] * q.shape[1] * k.shape[1]


def _of_recurrent(operator: str) -> Callable[[Arguments], Counts]:
    def count(arguments: Arguments) -> Counts:
        named = (mode for mode in _RECURRENT_MODES if mode in operator)
        mode = _RECURRENT_MODES[arguments["mode"]] if "mode" in arguments else next(named)
        x = arguments["input"] if "input" in arguments else arguments["data"]
        steps = x.numel() // x.shape[-1]  # of all sequences of the batch
        if "hidden_size" in arguments:
            hidden = arguments["hidden_size"]
        else:
            states = arguments["hx"]
            hidden = (states if isinstance(states, Tensor) else states[-1]).shape[-1]
        runs = 1
        if operator != "mkldnn_rnn_layer":  # which is called for each layer and direction
            runs = arguments.get("num_layers", 1) * (2 if arguments.get("bidirectional") else 1)
        return {mode: _EXPS_PER_UNIT[mode] * steps * hidden * runs}

    return count


# aten operation -> counts of one call
EXP_LIKE: dict[str, Callable[[Arguments], Counts]] = {
    **{name: _of_function(name.strip("_")) for name in _FUNCTIONS},
    # In-place forms.
    **{name + "_": _of_function(name.strip("_")) for name in _FUNCTIONS if name[0] != "_" or "foreach" in name},
    "_addmm_activation": lambda a: {"gelu": a["mat1"].shape[0] * a["mat2"].shape[1]} if a.get("use_gelu") else {},
    **dict.fromkeys(_FUSED_ATTENTIONS, _of_attention),
    **dict.fromkeys(("_native_multi_head_attention", "_triton_multi_head_attention"), _of_multi_head_attention),
    "_transformer_encoder_layer_fwd": _of_encoder_layer,
    **{name: _of_recurrent(name) for name in _FUSED_RECURRENT},
    # input_gates hold the four gates of an LSTM, or the three of a GRU, side by side
    "_thnn_fused_lstm_cell": lambda arguments: {"lstm": arguments["input_gates"].numel() // 4 * 5},
    "_thnn_fused_gru_cell": lambda arguments: {"gru": arguments["input_gates"].numel()},
}


class ExpCounter(TorchDispatchMode):
    """Context manager whose `counts` maps each exp-like function to the numbers it was evaluated on.

    Example:
        ```python
        with ExpCounter() as counter:
            model(image)
        counter.total, counter.counts  # 2794248, Counter({'scaled_dot_product_attention': 2794248})
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._tables: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    @property
    def total(self) -> int:
        """All exp-like evaluations together."""
        return self.counts.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for name, count in self._evaluated(func, args, kwargs).items():
            if count:
                self.add(name, count)
        out = func(*args, **kwargs)
        self._follow_tables(func, list(_tensors((args, kwargs))), out)
        return out

    def add(self, name: str, count: int) -> None:
        """Count one call; a subclass may store more, such as the module that runs."""
        self.counts[name] += count

    def _evaluated(self, func, args: tuple, kwargs: dict[str, Any]) -> Counts:
        operator = func.overloadpacket.__name__
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if func.namespace not in _KNOWN_NAMESPACES:
            first = next(_tensors((args, kwargs)), None)
            return {} if first is None else {f"{func.namespace}::{operator}": first.numel()}
        if operator in _POWERS:
            exponent = arguments[_POWERS[operator]]
            return {"pow": _broadcast_numel(arguments["self"], exponent)} if self._is_computed(exponent) else {}
        return EXP_LIKE[operator](arguments) if operator in EXP_LIKE else {}

    def _is_computed(self, exponent: Any) -> bool:
        """True for the exponent of a power that is exp-like; integer powers are products."""
        fixed = not isinstance(exponent, Tensor) or isinstance(exponent, nn.Parameter) or self._is_table(exponent)
        return not fixed and exponent.is_floating_point()

    def _is_table(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tables

    def _follow_tables(self, func, inputs: list[Tensor], out: Any) -> None:
        """Store which storages hold tables: tensors computed only from shapes, numbers and other tables."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        uninitialized = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        is_table = not random and not uninitialized and all(map(self._is_table, inputs))
        # Most operators return a tensor that they change in place; for the others it is among the inputs.
        for tensor in (*_tensors(out), *(inputs if func._schema.is_mutable else ())):
            storage = tensor.untyped_storage()
            if is_table:
                self._tables[storage._cdata] = storage
            else:
                self._tables.pop(storage._cdata, None)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The strided tensors in nested arguments or outputs; others have no storage."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)


def _broadcast_numel(base: Any, exponent: Tensor) -> int:
    shape = base.shape if isinstance(base, Tensor) else ()
    return torch.broadcast_shapes(shape, exponent.shape).numel()
