import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hispec.checkpoints import TrainingState, load_training_state, save_training_state

from .train_support import small_disk

SETTINGS = {"seed": 1, "training": {"learning_rate": 1e-3, "betas": (0.9, 0.95)}}


def save(folder: Path, step: int, **content: Any) -> None:
    save_training_state(folder, TrainingState(step=step, content={"step": step, **content}), SETTINGS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_comes_back_as_it_was(tmp_path: Path) -> None:
    content = {
        "tensors": {"a": torch.randn(3, 4).t(), "bf16": torch.randn(2).bfloat16(), "scalar": torch.tensor(7)},
        "numbers": [1, 2.5, None, True, "text", [], {}],
        3: {"key": "stays a number"},
    }
    save(tmp_path, 5, all=content)
    state = load_training_state(tmp_path, SETTINGS)
    assert state is not None
    assert state.step == 5
    loaded = state.content["all"]
    assert loaded["numbers"] == content["numbers"]
    assert loaded[3] == content[3]
    for name, tensor in content["tensors"].items():  # type: ignore[attr-defined]
        assert torch.equal(loaded["tensors"][name], tensor)
        assert loaded["tensors"][name].dtype == tensor.dtype


def train(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = model(torch.randn(4, 3, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    model, optimizer, generator = build()
    train(model, optimizer, generator, 3)
    parts = {
        "heads": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
    }
    save(tmp_path, 3, **parts)
    train(model, optimizer, generator, 4)

    resumed, resumed_optimizer, resumed_generator = build()
    state = load_training_state(tmp_path, SETTINGS)
    assert state is not None
    resumed.load_state_dict(state.content["heads"])
    resumed_optimizer.load_state_dict(state.content["optimizer"])
    resumed_generator.set_state(state.content["generator"])
    train(resumed, resumed_optimizer, resumed_generator, 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".state-000000001.dead.partial").mkdir()
    for step in (1, 2, 10, 100):
        save(tmp_path, step)
    assert names(tmp_path) == ["state-000000010", "state-000000100"]
    state = load_training_state(tmp_path, SETTINGS)
    assert state is not None
    assert state.content == {"step": 100}


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    assert load_training_state(tmp_path, SETTINGS) is None
    assert load_training_state(tmp_path / "missing", SETTINGS) is None


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "other"])
def test_a_broken_newest_falls_back_to_the_one_before(tmp_path: Path, file: str, damage: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, weight=torch.full((100,), float(step)))
    path = tmp_path / "state-000000002" / file
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes({"empty": b"", "cut": content[:-20], "other": b'{"step": 2}'}[damage])
    with pytest.warns(UserWarning, match="state-000000002 is broken"):
        state = load_training_state(tmp_path, SETTINGS)
    assert state is not None
    assert state.step == 1
    assert state.content["weight"].eq(1).all()


def test_all_broken_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "state-000000001" / "state.json").write_text("{")
    with pytest.warns(UserWarning, match="broken"), pytest.raises(ValueError, match="--no-resume"):
        load_training_state(tmp_path, SETTINGS)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    other = {"training": {"learning_rate": 2e-3, "betas": (0.9, 0.95)}, "loss": "forward_kl"}
    with pytest.raises(ValueError, match="other settings") as error:
        load_training_state(tmp_path, other)
    for words in (
        "training.learning_rate was 0.001, is now 0.002",
        "seed was 1, is now None",
        "loss was None",
    ):
        assert words in str(error.value)
    assert "betas" not in str(error.value)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "state-000000001" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        load_training_state(tmp_path, SETTINGS)


def test_a_full_disk_leaves_the_states_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    with small_disk(1000), pytest.raises(ValueError, match=r"cannot write .*state-000000003"):
        save(tmp_path, 3, weight=torch.zeros(1000))
    assert names(tmp_path) == ["state-000000001", "state-000000002"]


def test_a_state_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, try_number=1)
    save(tmp_path, 1, try_number=2)
    state = load_training_state(tmp_path, SETTINGS)
    assert state is not None
    assert state.content["try_number"] == 2
    assert names(tmp_path) == ["state-000000001"]
