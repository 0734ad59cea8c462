"""Some random programs of listed ops are as true as under the autocast of the device.

`python -m tests.conformance.attack cuda 1000` runs more of them.
"""

from __future__ import annotations

import pytest
import torch

from tests.conformance import attack

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", attack.PLANNED)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_is_as_true(seed: int, device: str, low: torch.dtype) -> None:
    assert not attack.surely_worse(attack.steps(seed, device), device, low)


def test_a_program_that_is_worse_is_found_and_shrunk() -> None:
    chosen = [attack.Step(name, 1, 0) for name in ("relu", "softmax", "linear")]

    def worse(less: list[attack.Step]) -> bool:
        return "softmax" in {step.name for step in less}

    assert [s.name for s in attack.shrunk(chosen, worse)] == ["softmax"]
