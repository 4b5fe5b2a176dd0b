"""Helpers for the notebooks: execution, widgets, tables, findings and figures."""

import lazy_loader

from gpulab.errors import extra

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = extra("notebooks")(__getattr__)
