from ._base import Trainable as Trainable
from ._base import flip_bit as flip_bit
from ._registry import MODELS as MODELS
from .autoencoders import Autoencoder as Autoencoder
from .autoencoders import LinearAutoencoder as LinearAutoencoder
from .autoencoders import Whitener as Whitener
from .prednet import PredNet as PredNet
