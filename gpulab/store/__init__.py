"""Where runs are kept, and how they are read again: one format, one reader, one writer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
