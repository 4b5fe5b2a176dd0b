from ._datasets import load as load
