"""Rotations inside each attention head that leave the float function as it is.

Scores are products of queries and keys, so an orthogonal matrix applied to both changes nothing;
one applied to the values is undone by the next projection. Rotated channels share their outliers
out evenly, which makes a grid of one scale fit all of them. Everything is folded into the weights:
the model has the same layers and the same cost. The idea is that of QuaRot (Ashkboos et al.,
NeurIPS 2024); a ViT needs no rotation at run time, as it has no rotary embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lampq.graph.attention import ExplicitAttention, ExplicitWindowAttention


def rotation(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix: Hadamard with random signs where the size is a power of two."""
    if size & (size - 1):
        noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
        turn: Tensor = torch.linalg.qr(noise).Q
        return turn
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return matrix * signs / math.sqrt(size)


@torch.no_grad()
def rotate_attention_(model: nn.Module, seed: int) -> None:
    """Rotate queries with keys, and values, of every explicit attention of the model.

    What stands between two layers stays in the way of a rotation: queries and keys with a norm of
    their own, and values with a norm or a gate before the projection, are left as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if not isinstance(module, ExplicitAttention | ExplicitWindowAttention):
            continue
        size = module.qkv.out_features // 3 // module.num_heads
        if _plain(module, "q_norm", "k_norm"):
            turn = rotation(size, generator)
            _rotate_outputs_(module.qkv, 0, module.num_heads, turn)
            _rotate_outputs_(module.qkv, 1, module.num_heads, turn)
        if _plain(module, "norm", "gate"):
            turn = rotation(size, generator)
            _rotate_outputs_(module.qkv, 2, module.num_heads, turn)
            weight = module.proj.weight
            heads = weight.double().view(len(weight), module.num_heads, size)
            module.proj.weight = _frozen((heads @ turn.T).reshape(weight.shape), weight)


def _plain(module: nn.Module, *names: str) -> bool:
    parts = (getattr(module, name, None) for name in names)
    return all(part is None or isinstance(part, nn.Identity) for part in parts)


def _rotate_outputs_(qkv: nn.Linear, part: int, heads: int, turn: Tensor) -> None:
    """Rotate the outputs of one third of the layer, head by head."""
    rows = slice(part * heads * len(turn), (part + 1) * heads * len(turn))
    for name in ("weight", "bias"):
        old = getattr(qkv, name)
        if old is None:
            continue
        new = old.detach().clone()
        split = new[rows].double().view(heads, len(turn), -1)
        new[rows] = (turn @ split).reshape(new[rows].shape).to(new)
        setattr(qkv, name, _frozen(new, old))


def _frozen(values: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(like), requires_grad=False)
