"""The networks that gpulab trains."""

from gpulab.models.autoencoder import Autoencoder
from gpulab.models.prednet import PredNet
from gpulab.models.whitener import Whitener

__all__ = ["MODELS", "Autoencoder", "PredNet", "Whitener"]

MODELS = {"autoencoder": Autoencoder, "prednet": PredNet, "whitener": Whitener}
