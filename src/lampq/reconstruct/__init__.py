"""What is done to a quantized model on the calibration images, after its plan is known."""

from lampq.reconstruct import recipes
from lampq.reconstruct.align import Align
from lampq.reconstruct.base import Finish, Finisher, NoStore, Rates, StateStore
from lampq.reconstruct.blocks import BlockRecipe
from lampq.reconstruct.distill import Distill
from lampq.registry import Registry

DEFAULT = "distill"
FINISHERS: Registry[Finisher] = Registry("reconstruction", "lampq.finishers")
FINISHERS.add("adalog", recipes.adalog)
FINISHERS.add("align", recipes.align)
FINISHERS.add("distill", recipes.distill)
FINISHERS.add("pdquant", recipes.pdquant)
FINISHERS.add("qdrop", recipes.qdrop)

__all__ = [
    "DEFAULT",
    "FINISHERS",
    "Align",
    "BlockRecipe",
    "Distill",
    "Finish",
    "Finisher",
    "NoStore",
    "Rates",
    "StateStore",
]
