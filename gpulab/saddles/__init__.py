"""Saddle points: Hessians as linear operators, spectra, critical points and escapes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
