"""What to run: one recipe per model family."""

from .exit_layers import default_exit_layers, parse_exit_layers, resolve_exit_layers, show_exit_layers
from .loss_mixture import LossName, parse_loss
from .overrides import override
from .schema import (
    DataRecipe,
    HeadsRecipe,
    ModelRecipe,
    Recipe,
    TrainingRecipe,
    list_recipes,
    load_recipe,
    recipe_from_dict,
    resolve_model,
    shared_heads,
)
from .table import describe_recipes

__all__ = [
    "DataRecipe",
    "HeadsRecipe",
    "LossName",
    "ModelRecipe",
    "Recipe",
    "TrainingRecipe",
    "default_exit_layers",
    "describe_recipes",
    "list_recipes",
    "load_recipe",
    "override",
    "parse_exit_layers",
    "parse_loss",
    "recipe_from_dict",
    "resolve_exit_layers",
    "resolve_model",
    "shared_heads",
    "show_exit_layers",
]
