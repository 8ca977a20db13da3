"""Role patterns: which module of a model plays which role."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lampq.types import LayerRole


@dataclass(frozen=True, slots=True)
class RolePattern:
    """Names that play one role; ``*`` stands for any part of a dotted name.

    The text up to the last ``*`` names the block.

    Attributes:
        pattern: A dotted name as in ``named_modules()``.
        role: What the layers of that name do.
        norm: The LayerNorm that feeds them, by its name inside the block; None if there is none.
    """

    pattern: str
    role: LayerRole
    norm: str | None = None

    def match(self, name: str) -> str | None:
        """The block of a module of that name, "" if it is outside the blocks, None if no match."""
        *ahead, tail = self.pattern.split("*")
        body = "*".join(ahead) + "*" if ahead else ""
        expression = f"({'.+?'.join(map(re.escape, body.split('*')))})" + re.escape(tail)
        found = re.fullmatch(expression, name)
        return None if found is None else found.group(1)


TRANSFORMER_BLOCKS = (
    RolePattern("*.attn.qkv", LayerRole.QKV, norm="norm1"),
    RolePattern("*.attn.proj", LayerRole.PROJ),
    RolePattern("*.mlp.fc1", LayerRole.FC1, norm="norm2"),
    RolePattern("*.mlp.fc2", LayerRole.FC2),
)
VIT = (
    RolePattern("patch_embed.proj", LayerRole.PATCH_EMBED),
    *TRANSFORMER_BLOCKS,
    RolePattern("head", LayerRole.HEAD),
    RolePattern("head_dist", LayerRole.HEAD),
)
SWIN = (
    RolePattern("patch_embed.proj", LayerRole.PATCH_EMBED),
    *TRANSFORMER_BLOCKS,
    RolePattern("*.downsample.reduction", LayerRole.REDUCTION, norm="downsample.norm"),
    RolePattern("head.fc", LayerRole.HEAD),
)
# one table serves every timm family: their names do not contradict each other
TIMM = tuple(dict.fromkeys((*VIT, *SWIN)))
