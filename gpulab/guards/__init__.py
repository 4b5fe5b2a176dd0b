"""The guard: refuses tensors that something overwrites before autograd uses them. It needs torch
alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
