from .autoencoders import Autoencoder as Autoencoder
from .autoencoders import LinearAutoencoder as LinearAutoencoder
from .autoencoders import Whitener as Whitener
from .base import Trainable as Trainable
from .base import flip_bit as flip_bit
from .prednet import PredNet as PredNet
from .registry import MODELS as MODELS
