"""Exact softmax attention of tokens that are split over processes, in the two usual ways, to count what they send.

    ring       keys and values visit all processes (Liu et al., 2023)
    Ulysses    an all-to-all from split tokens to split heads and back (Jacobs et al., 2023)

Shapes: B batch, H heads, n tokens of this process, the same number on each, D channels per head.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

sent = []  # bytes that this process has sent to others, a number per exchange


def exchange(x: torch.Tensor) -> torch.Tensor:
    """[P, ...] -> [P, ...]: entry p goes to process p, and the one that comes from p takes its place."""
    sent.append(x[0].nbytes * (len(x) - 1))
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous())
    return received


def hop(x: torch.Tensor) -> torch.Tensor:
    """The tensor of the process before this one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    to, origin = [0] * world, [0] * world
    to[(rank + 1) % world] = origin[rank - 1] = x.numel()
    sent.append(x.nbytes)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received.view(-1), x.contiguous().view(-1), origin, to)
    return received


class RingAttention(torch.autograd.Function):
    """q, k, v [B, H, n, D] -> o [B, H, n, D]."""

    @staticmethod
    def forward(ctx, q, k, v):
        scale, kv = 1 / math.sqrt(q.shape[-1]), torch.stack([k, v])
        o, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -math.inf)
        for step in range(dist.get_world_size()):
            kv = hop(kv) if step else kv
            scores = scale * q @ kv[0].mT
            new = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            o, lse = o * (lse - new).exp() + (scores - new).exp() @ kv[1], new
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        scale, kv = 1 / math.sqrt(q.shape[-1]), torch.stack([k, v])
        dq, dkv, delta = torch.zeros_like(q), torch.zeros_like(kv), (do * o).sum(-1, keepdim=True)
        for step in range(dist.get_world_size()):
            kv = hop(kv) if step else kv
            weights = (scale * q @ kv[0].mT - lse).exp()
            scores_grad = scale * weights * (do @ kv[1].mT - delta)
            dq += scores_grad @ kv[0]
            dkv = hop(dkv + torch.stack([scores_grad.mT @ q, weights.mT @ do]))  # the last hop leads home
        return dq, *dkv


class SplitHeads(torch.autograd.Function):
    """All heads of some tokens [B, H, n, D] -> some heads of all tokens [B, H / P, P n, D]."""

    @staticmethod
    def forward(ctx, x):
        return _heads_of_all_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return _tokens_of_all_heads(grad)


class SplitTokens(torch.autograd.Function):
    """The inverse."""

    @staticmethod
    def forward(ctx, x):
        return _tokens_of_all_heads(x)

    @staticmethod
    def backward(ctx, grad):
        return _heads_of_all_tokens(grad)


def _heads_of_all_tokens(x):
    x = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)  # [P, B, H / P, n, D]
    return exchange(x).movedim(0, 2).flatten(2, 3)


def _tokens_of_all_heads(x):
    x = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)  # [P, B, H / P, n, D]
    return exchange(x).movedim(0, 1).flatten(1, 2)


def ulysses_attention(q, k, v):
    """q, k, v [B, H, n, D] -> o [B, H, n, D]."""
    return SplitTokens.apply(F.scaled_dot_product_attention(*map(SplitHeads.apply, (q, k, v))))
