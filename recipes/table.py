"""The packaged recipes as a table for the terminal."""

from .exit_layers import show_exit_layers
from .schema import HeadsRecipe, list_recipes, load_recipe

TITLES = ("alias", "model", "exit layers", "heads")


def describe_recipes() -> str:
    """One line a recipe: its alias, the model that it stands for, its exit layers and its heads."""
    rows = [TITLES]
    for alias in list_recipes():
        recipe = load_recipe(alias)
        layers = "1/8,1/4" if recipe.heads.exit_layers is None else show_exit_layers(recipe.heads.exit_layers)
        rows.append((alias, recipe.model.source, layers, _describe_heads(recipe.heads)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _describe_heads(heads: HeadsRecipe) -> str:
    kinds = ",".join(heads.kinds)
    if set(heads.kinds) == {"shared"}:
        return f"{kinds} (no training)"
    context = ", committed context" if heads.committed_context else ""
    vocabulary = "" if heads.draft_vocab_size is None else f", {heads.draft_vocab_size} draft tokens"
    return kinds + context + vocabulary
