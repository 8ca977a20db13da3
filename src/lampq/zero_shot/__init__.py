"""Calibration pictures from the model alone, where there are no images."""

from lampq.zero_shot.base import DEFAULT_IMAGES, DEFAULT_RECIPE, Recipe, Synthesis
from lampq.zero_shot.folder import (
    check_folder,
    check_synthetic,
    described,
    make_folder,
    read_about,
    read_made,
)
from lampq.zero_shot.painter import check_model, recipe_of, synthesize
from lampq.zero_shot.recipes import RECIPES

__all__ = [
    "DEFAULT_IMAGES",
    "DEFAULT_RECIPE",
    "RECIPES",
    "Recipe",
    "Synthesis",
    "check_folder",
    "check_model",
    "check_synthetic",
    "described",
    "make_folder",
    "read_about",
    "read_made",
    "recipe_of",
    "synthesize",
]
