from .datasets import load as load
