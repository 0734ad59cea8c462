"""The folder: ranks side by side, and what is not read from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from autoamp.errors import OptionError
from autoamp.flight import folder
from autoamp.flight.ring import Ring


def rank(root: Path, number: int | None) -> Path:
    home = folder.begin(root, number)
    Ring(home / folder.RING, {"rank": number}).close()
    return home


def test_two_ranks_are_told_apart_in_one_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../job 7/")
    homes = [rank(tmp_path, 0), rank(tmp_path, 1)]
    assert homes[0].parent == homes[1].parent
    assert homes[0].parent.parent == tmp_path
    assert [found.header["rank"] for found in folder.rings(tmp_path)] == [0, 1]
    again = [rank(tmp_path, 1), rank(tmp_path, 0)]  # the same job, started again
    assert again[0].parent == again[1].parent != homes[0].parent
    assert len(folder.rings(tmp_path)) == 4
    assert len(folder.rings(homes[0].parent)) == 2
    assert len(folder.rings(homes[0])) == 1


def test_two_models_of_one_process_have_two_folders(tmp_path: Path) -> None:
    assert rank(tmp_path, None) != rank(tmp_path, None)
    assert len(folder.rings(tmp_path)) == 2


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "x", "/proc/x", "a\0b"):
        with pytest.raises(OptionError, match="give a folder that can be written"):
            folder.checked(bad)


def test_without_safetensors_the_command_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr(folder, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'autoamp\[record\]'"):
        folder.checked(tmp_path)


def test_a_death_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    def fails() -> None:
        with folder.new_death(tmp_path, 3) as (place, _):
            folder.write(place / "death.json", b"{}")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert folder.deaths(tmp_path) == []
    assert [*(tmp_path / "deaths").iterdir()] == []
    for _ in range(2):
        with folder.new_death(tmp_path, 3) as (place, _):
            folder.write(place / "death.json", b'{"format":1}')
            folder.write_tensors(place / "state.safetensors", {"w": torch.arange(3.0)})
    first, second = folder.deaths(tmp_path)
    assert [first.name, second.name] == ["step-00000003", "step-00000003-2"]
    assert folder.read_death(first) == {"format": 1}
    assert folder.read_tensors(first, "state")["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "state.safetensors", ""])
def test_only_our_own_names_are_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="none of"):
        folder.read_tensors(tmp_path, name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    real, root = rank(tmp_path / "real", None), tmp_path / "root"
    (root / "run-1").mkdir(parents=True)
    (root / "run-2").symlink_to(real.parent)
    (root / "run-1" / "rank-00000").symlink_to(real)
    with pytest.raises(OptionError, match="holds no ring"):
        folder.rings(root)
    with folder.new_death(real, 1) as (place, _):
        (place / "death.json").symlink_to("/etc/hostname")
        (place / "state.safetensors").symlink_to("/etc/hostname")
    (real / "deaths" / "step-00000009").symlink_to(root)
    (death,) = folder.deaths(real)
    with pytest.raises(OptionError, match="no plain file"):
        folder.read_death(death)
    with pytest.raises(OptionError, match="no plain file"):
        folder.read_tensors(death, "state")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"{}", b'{"format":2}', b'{"format":NaN}', b"[" * 10**6]
)
def test_a_death_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "death.json").write_bytes(data)
    (tmp_path / "state.safetensors").write_bytes(data)
    with pytest.raises(OptionError):
        folder.read_death(tmp_path)
    with pytest.raises(OptionError):
        folder.read_tensors(tmp_path, "state")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError):
        folder.checked(tmp_path / "below")
