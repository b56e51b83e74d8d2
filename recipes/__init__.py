"""What to run: one recipe per model family."""

from .deepspeed_config import deepspeed_config
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
    "ModelRecipe",
    "Recipe",
    "TrainingRecipe",
    "deepspeed_config",
    "default_exit_layers",
    "list_recipes",
    "load_recipe",
    "recipe_from_dict",
    "resolve_model",
]
