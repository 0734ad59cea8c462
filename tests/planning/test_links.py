"""The text of a mesh, the links of its axes, and the time of collectives on them."""

from __future__ import annotations

import pytest

from autoamp.errors import OptionError
from autoamp.place.devices import figures
from autoamp.planning.links import (
    Link,
    Mesh,
    links_of,
    nanoseconds,
    on_the_wire,
    parsed_mesh,
    scaled,
)

SLOW = Link("slow", 2.0, 100.0)


def test_axes_come_in_any_order_and_may_be_left_out() -> None:
    assert parsed_mesh("pp=4, dp=512,tp=8") == Mesh(512, 8, 4)
    assert parsed_mesh("tp=2") == Mesh(1, 2, 1)
    assert Mesh(512, 8, 4).devices == 16_384
    assert parsed_mesh(str(Mesh(3, 2, 1))) == Mesh(3, 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no axis"),
        ("ep=2", "'ep=2' is no axis"),
        ("dp", "'dp' is no axis"),
        ("dp=2,dp=4", "gives dp twice"),
        ("dp=0", "dp=0 must be a whole number above 0"),
        ("dp=-1", "above 0"),
        ("dp=1.5", "above 0"),
        ("dp=²", "above 0"),
        ("dp=1000,tp=1001", "has 1,001,000 devices"),
        ("dp=" + "9" * 5000, "devices"),
    ],
)
def test_what_is_no_mesh_is_said(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parsed_mesh(text)


def test_replicas_fill_the_devices_and_fewer_stages_fit_few() -> None:
    mesh = Mesh(512, 8, 4)
    assert scaled(mesh, 16_000) == Mesh(500, 8, 4)
    assert scaled(mesh, 8) == Mesh(1, 8, 1)
    assert scaled(Mesh(1, 2, 8), 8) == Mesh(1, 2, 4)
    assert scaled(Mesh(1, 12, 1), 8) == Mesh(1, 6, 1)


def test_an_axis_that_leaves_the_node_takes_the_network() -> None:
    found = links_of(Mesh(dp=4, tp=2, pp=2), "cuda:sm_90", node=8, network=400)
    assert [found[axis].name for axis in ("tp", "dp", "pp")] == [
        "NVLink 4",
        "NVLink 4",
        "400 Gb/s",
    ]
    assert found["tp"].bytes_per_ns == 450
    assert found["pp"].bytes_per_ns == 50
    found = links_of(Mesh(tp=16), "cuda:sm_90", node=8, network=100)
    assert found["tp"].bytes_per_ns == 12.5


def test_every_gpu_of_the_table_has_a_link() -> None:
    gpus = [name for name, row in figures().items() if row["type"] == "cuda"]
    assert all(links_of(Mesh(), f"cuda:{name}", 8, 400)["tp"].name for name in gpus)


@pytest.mark.parametrize(
    ("device", "node", "network", "said"),
    [
        ("cpu", 8, 400, "a mesh is planned for cuda:sm_70"),
        ("cuda:sm_90", 0, 400, "devices of a node"),
        ("cuda:sm_90", 8, 0, "gigabits a second"),
    ],
)
def test_links_that_do_not_exist(
    device: str, node: int, network: int, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        links_of(Mesh(), device, node, network)


def test_bytes_on_the_wire_by_hand() -> None:
    """Four devices, 800 bytes: three of four parts go round, for all-reduce twice."""
    assert on_the_wire("all-reduce", 800, 4) == 1200
    assert on_the_wire("all-gather", 800, 4) == 600
    assert on_the_wire("reduce-scatter", 800, 4) == 600
    assert on_the_wire("send", 800, 4) == 800
    assert on_the_wire("all-reduce", 800, 1) == 0


def test_times_by_hand() -> None:
    """800 bytes at 2 bytes a nanosecond, and 100 ns for each message."""
    assert nanoseconds("all-gather", 800, 4, SLOW) == 3 * 100 + 300
    assert nanoseconds("send", 800, 4, SLOW) == 100 + 400
    assert nanoseconds("all-reduce", 800, 2, SLOW) == 2 * 100 + 400
    # A ring of 1,024 has 2,046 messages, two trees have 20.
    assert nanoseconds("all-reduce", 800, 1024, SLOW) == 20 * 100 + 800
    assert nanoseconds("all-reduce", 8e9, 4, SLOW) == pytest.approx(600 + 6e9, abs=500)
    assert nanoseconds("all-reduce", 800, 1, SLOW) == 0
