"""Weights as one vector."""

import torch


def weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def drawn(net, seed=5):
    """The weights that a network draws from a seed."""
    net.draw_weights(torch.Generator().manual_seed(seed))
    return weights(net)
