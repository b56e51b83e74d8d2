"""What to run: one recipe per model family."""

from .loss_mixture import LossName, parse_loss
from .schema import (
    DataRecipe,
    HeadsRecipe,
    ModelRecipe,
    Recipe,
    TrainingRecipe,
    default_exit_layers,
    list_recipes,
    load_recipe,
    recipe_from_dict,
    resolve_model,
)

__all__ = [
    "DataRecipe",
    "HeadsRecipe",
    "LossName",
    "ModelRecipe",
    "Recipe",
    "TrainingRecipe",
    "default_exit_layers",
    "list_recipes",
    "load_recipe",
    "parse_loss",
    "recipe_from_dict",
    "resolve_model",
]
