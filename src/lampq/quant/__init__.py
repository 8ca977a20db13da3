"""How numbers become codes."""

from lampq.quant.base import CodedQuantizer, Quantizer, describe, rebuild
from lampq.quant.fold import NormFold, absorb_shift
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import LayerFit, MatmulFit, QuantLinear, QuantMatMul, assemble
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.quant.uniform import UniformQuantizer

__all__ = [
    "CodedQuantizer",
    "LayerFit",
    "LogQuantizer",
    "MatmulFit",
    "NormFold",
    "PrefixQuantizer",
    "QuantLinear",
    "QuantMatMul",
    "Quantizer",
    "TokenLogQuantizer",
    "TokenQuantizer",
    "UniformQuantizer",
    "absorb_shift",
    "assemble",
    "describe",
    "rebuild",
]
