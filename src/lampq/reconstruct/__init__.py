"""Training of a quantized model on the calibration images, after its plan is known."""

from lampq.reconstruct.base import Finish, Finisher, NoStore, Rates, StateStore
from lampq.reconstruct.blocks import BlockRecipe
from lampq.reconstruct.distill import Distill

__all__ = ["BlockRecipe", "Distill", "Finish", "Finisher", "NoStore", "Rates", "StateStore"]
