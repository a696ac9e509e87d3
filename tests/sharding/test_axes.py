"""Which share of an array each device of a mesh gets."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sharding.axes import Axis, Part
from sharding.mesh import axis_rules, make_layout

H, K, h = 8, 2, 3
QKV = (Part("heads", H, h), Part("kv_heads", K, h, repeat=True), Part("kv_heads", K, h, repeat=True))


def place(array: np.ndarray, axes: tuple[Axis, ...], tensor: int, expert: int = 1) -> list[np.ndarray]:
    """What each device has, in the order of the devices."""
    placed = make_layout(jax.devices(), tensor, expert).place(array, axes)
    shards = sorted(placed.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def heads_of(block: np.ndarray) -> list[str]:
    """Names of the heads in a block of rows of the merged projection, which are numbered."""
    names = [f"q{i}" for i in range(H)] + [f"k{i}" for i in range(K)] + [f"v{i}" for i in range(K)]
    assert (block[::h, 0] % h == 0).all()
    return [names[row // h] for row in block[::h, 0].tolist()]


def test_each_device_has_the_kv_heads_that_its_queries_need() -> None:
    rows = np.arange((H + 2 * K) * h)[:, None] + np.zeros((1, 5), np.int64)
    assert [heads_of(block) for block in place(rows, (QKV, "embed"), 2)] == [
        ["q0", "q1", "q2", "q3", "k0", "v0"],
        ["q4", "q5", "q6", "q7", "k1", "v1"],
    ]
    # H / K = 4 queries share a KV head: with four devices, two of them hold the same one.
    assert [heads_of(block) for block in place(rows, (QKV, "embed"), 4)] == [
        ["q0", "q1", "k0", "v0"],
        ["q2", "q3", "k0", "v0"],
        ["q4", "q5", "k1", "v1"],
        ["q6", "q7", "k1", "v1"],
    ]
    assert [heads_of(block)[-2:] for block in place(rows, (QKV, "embed"), 2, 4)] == [
        [f"k{device // 4}", f"v{device // 4}"] for device in range(8)
    ]


def test_gate_and_up_are_cut_alike() -> None:
    part = Part("mlp", 4)
    blocks = place(np.arange(8)[:, None], ((part, part), None), 2)
    assert [block[:, 0].tolist() for block in blocks] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("size", "devices", "shares"),
    [(320, 2, [256, 64]), (320, 4, [128, 128, 64, 0]), (256, 2, [128, 128])],
)
def test_a_vocabulary_is_cut_between_groups_and_filled_up(size: int, devices: int, shares: list[int]) -> None:
    axis = (Part("vocab", size, unit=128),)
    blocks = place(np.ones((size, 2)), (axis, None), devices)
    assert [int(block[:, 0].sum()) for block in blocks] == shares
    assert len({block.shape for block in blocks}) == 1


def test_experts_and_their_width_are_spread_over_different_axes() -> None:
    array = np.arange(4 * 6).reshape(4, 1, 6)
    axes: tuple[Axis, ...] = ("experts", "embed", "expert_mlp")
    rules = axis_rules(tensor=3, expert=2)
    assert rules.spec(axes) == PartitionSpec("expert", None, "tensor")
    assert rules.spec(("mlp",)) == PartitionSpec(("expert", "tensor"))
    blocks = place(array, axes, 3, 2)
    assert [block.shape for block in blocks] == [(2, 1, 2)] * 6
    np.testing.assert_array_equal(blocks[4], array[2:, :, 2:4])


def test_replicated_arrays_are_whole() -> None:
    blocks = place(np.arange(3), ("embed",), 2)
    assert [block.tolist() for block in blocks] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("part", "devices", "message"),
    [
        (Part("heads", 8), 3, "8 heads cannot be spread over 3 devices: 3 does not divide 8"),
        (
            Part("kv_heads", 6, repeat=True),
            4,
            "6 kv_heads .* 4 devices: 4 does not divide 6, nor the other way",
        ),
    ],
)
def test_what_cannot_be_divided_is_told_with_both_numbers(part: Part, devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        axis_rules(tensor=devices, expert=1).local((part,), part.count)


def test_too_few_devices_are_told_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"3 x 4 x 1 = 12, but there are 8 devices"):
        make_layout(jax.devices()[:8], 3, 4)


@pytest.mark.feature("tensor parallel", "expert parallel")
@pytest.mark.parametrize(
    ("tensor", "expert", "groups"), [(2, 2, 3), (4, 1, 1), (1, 2, 1), (1, 1, 0)], ids=str
)
def test_there_is_a_first_sum_over_every_group_of_devices(tensor, expert, groups, monkeypatch) -> None:
    over = []
    psum = lax.psum
    monkeypatch.setattr(lax, "psum", lambda x, axis_name: over.append(axis_name) or psum(x, axis_name))
    run = make_layout(jax.devices(), tensor, expert).compile_sums()
    assert len(over) == len(set(over)) == groups
    run()
