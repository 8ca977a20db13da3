"""Training of a quantized model on the calibration images, after its plan is known."""

from lampq.reconstruct.base import Finish, Finisher, NoStore, Rates, StateStore
from lampq.reconstruct.blocks import BlockRecipe
from lampq.reconstruct.distill import Distill
from lampq.reconstruct.recipes import adalog, distill, pdquant, qdrop
from lampq.registry import Registry

DEFAULT = "distill"
FINISHERS: Registry[Finisher] = Registry("reconstruction", "lampq.finishers")
FINISHERS.add("adalog", adalog)
FINISHERS.add("distill", distill)
FINISHERS.add("pdquant", pdquant)
FINISHERS.add("qdrop", qdrop)

__all__ = [
    "DEFAULT",
    "FINISHERS",
    "BlockRecipe",
    "Distill",
    "Finish",
    "Finisher",
    "NoStore",
    "Rates",
    "StateStore",
]
