"""The networks that gpulab trains, by the name that a run gives them."""

from gpulab.models.autoencoders import Autoencoder, Whitener
from gpulab.models.prednet import PredNet

MODELS = {"autoencoder": Autoencoder, "prednet": PredNet, "whitener": Whitener}
