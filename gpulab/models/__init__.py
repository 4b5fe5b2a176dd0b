"""The networks that gpulab trains."""

from gpulab.models.autoencoder import Autoencoder
from gpulab.models.prednet import PredNet

__all__ = ["MODELS", "Autoencoder", "PredNet"]

MODELS = {"autoencoder": Autoencoder, "prednet": PredNet}
