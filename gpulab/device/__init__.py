"""What a device does: how fast it is, and where a training step stands under that."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
