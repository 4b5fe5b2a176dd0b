"""The networks that gpulab trains."""

from gpulab.models.autoencoders import Autoencoder, LinearAutoencoder, Whitener
from gpulab.models.base import Trainable, flip_bit
from gpulab.models.prednet import PredNet

__all__ = ["MODELS", "Autoencoder", "LinearAutoencoder", "PredNet", "Trainable", "Whitener", "flip_bit"]

MODELS = {"autoencoder": Autoencoder, "prednet": PredNet, "whitener": Whitener}
