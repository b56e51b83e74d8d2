"""The licence of a base model, as far as its publisher says it where we can read it."""

from importlib.metadata import PackageNotFoundError, metadata

from huggingface_hub import HfApi

from .hub import HUB_ID
from .model_card import Licence

SECONDS = 10
"""A card is no reason to wait longer."""


def find_licence(api: HfApi, base: str | None, revision: str | None) -> Licence | None:
    """The licence of a hub id or a `package:` source; None where it cannot be found out, for any reason."""
    if base is None:
        return None
    if base.startswith("package:"):
        return _of_package(base.removeprefix("package:"))
    return _of_repository(api, base, revision) if HUB_ID.fullmatch(base) else None


def _of_package(package: str) -> Licence | None:
    try:
        fields = metadata(package).json
    except PackageNotFoundError:
        return None
    name = fields.get("license_expression") or fields.get("license")
    # Some packages put the whole text there.
    return Licence(id=name.lower()) if isinstance(name, str) and len(name) < 40 and " " not in name else None


def _of_repository(api: HfApi, base: str, revision: str | None) -> Licence | None:
    try:
        card = api.model_info(base, revision=revision, timeout=SECONDS).card_data
    # The client raises errors of many libraries; without a licence the card is still whole.
    except Exception:
        return None
    values = {key: card.get(key) if card else None for key in ("license", "license_name", "license_link")}
    texts = {key: value if isinstance(value, str) else None for key, value in values.items()}
    if texts["license"] is None:
        return None
    link = texts["license_link"]
    if link and "://" not in link:
        link = f"https://huggingface.co/{base}/blob/main/{link.lstrip('/')}"
    return Licence(id=texts["license"], name=texts["license_name"], link=link)
