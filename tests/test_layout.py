"""The folders at the root are the subpackages of `hispec`, for an install as for a look at the tree."""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hispec

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("heads", "checkpoints", "recipes", "train", "infer")


def test_map_names_every_package_folder_at_the_root():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.name for path in ROOT.glob("[!.]*/__init__.py")} - {"hispec", "tests"}
    assert folders == set(SUBPACKAGES)
    assert setuptools["package-dir"] == {"hispec": "hispec"} | {f"hispec.{name}": name for name in folders}
    assert sorted(setuptools["packages"]) == sorted(setuptools["package-dir"])


@pytest.mark.parametrize("folder", SUBPACKAGES)
def test_folder_is_flat(folder):
    """Setuptools packs the folders in the map and no package inside them."""
    nested = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT / folder]
    assert nested == []


def test_links_show_the_folders_inside_the_package():
    links = {path.name: path.readlink() for path in (ROOT / "hispec").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in SUBPACKAGES}
    for name in SUBPACKAGES:
        assert (ROOT / "hispec" / name).resolve() == ROOT / name


@pytest.mark.parametrize(
    "path",
    [f"{name}/__init__.py" for name in SUBPACKAGES] + ["checkpoints/smollm2/adapter_model.safetensors"],
)
def test_git_takes_the_source_folders(path):
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "-c", f"safe.directory={ROOT}", "check-ignore", "--no-index", "--quiet", path]
    assert subprocess.run(command, cwd=ROOT).returncode == 1, f"git ignores {path}"


def test_import_does_not_load_torch():
    code = "import sys, hispec; print(hispec.__version__, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [hispec.__version__, "False"]


@pytest.mark.parametrize("name", hispec.__all__)
def test_public_name_resolves(name):
    assert name in dir(hispec)
    assert getattr(hispec, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hispec.no_such_name


def test_version_is_the_installed_one():
    assert importlib.metadata.version("hispec") == hispec.__version__
