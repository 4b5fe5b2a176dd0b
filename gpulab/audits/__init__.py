"""The audit: one training step under two settings, compared operation by operation, and
explained.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
