"""What the curvature builders refuse, and which parameters a layer's block holds."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.distributions import (
    diagonal_curvature,
    kronecker_curvature,
    layer_curvature,
    neuron_curvature,
    post_distribution,
    pre_distribution,
)
from lightning_taskinfo.fisher import KroneckerFactors


@pytest.mark.parametrize("build", [layer_curvature, neuron_curvature])
def test_refuses_a_matrix_that_is_not_positive(net, build):
    matrix = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.5]))
    with pytest.raises(
        ValueError, match=r"curvature of `0` must be positive semi-definite, got eigenvalue -0\.5"
    ):
        build(net, {"0": matrix})


def test_refuses_a_negative_diagonal(net):
    with pytest.raises(ValueError, match=r"The curvature of `w` must be non-negative, got -2\.0"):
        diagonal_curvature({"w": torch.tensor([1.0, -2.0])})
    with pytest.raises(ValueError, match=r"`w` must be non-negative, got -2\.0"):
        kronecker_curvature({"w": KroneckerFactors(torch.eye(2), torch.tensor([1.0, -2.0]))})
    with pytest.raises(ValueError, match=r"The curvature of `0` must be non-negative, got -1\.0"):
        neuron_curvature(net, {"0": torch.eye(4)}, scales={"0": -torch.ones(4)})


def test_weights_that_share_a_block_need_one_prior_width(net):
    blocks = neuron_curvature(net, {"0": torch.eye(4), "2": torch.eye(5)})
    std = {name: 1.0 + name.endswith("bias") for name, _ in net.named_parameters()}
    with pytest.raises(
        ValueError, match=r"`prior_std` must be the same for \('0.weight', '0.bias'\).*\[1.0, 2.0\]"
    ):
        post_distribution(net, pre_distribution(net, prior_std=std), blocks)


def test_a_layer_with_a_frozen_bias_gives_a_block_of_its_weight(net):
    net[0].bias.requires_grad_(False)
    (block,) = neuron_curvature(net, {"0": torch.eye(3)})
    assert block.names == ("0.weight",)


def test_a_single_layer_is_its_own_root():
    (block,) = neuron_curvature(nn.Linear(2, 3), {"": torch.eye(3)})
    assert block.names == ("weight", "bias")


def test_packing_and_unpacking_are_inverse(net):
    (block,) = neuron_curvature(net, {"0": torch.eye(4)})
    tensors = dict(net[0].named_parameters(prefix="0"))
    again = block.unpack(block.pack(tensors), tensors)
    assert torch.equal(block.pack(tensors)[:, -1], net[0].bias)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
