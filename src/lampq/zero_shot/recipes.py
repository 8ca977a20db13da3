"""The recipes by name."""

from __future__ import annotations

from lampq.registry import Registry
from lampq.zero_shot.base import Recipe
from lampq.zero_shot.psaq import PSAQRecipe
from lampq.zero_shot.pyramid import PyramidRecipe

RECIPES: Registry[Recipe] = Registry("recipe", "lampq.recipes")
RECIPES.add("psaq", PSAQRecipe)
RECIPES.add("pyramid", PyramidRecipe)
