"""Texts that every Python brings, as numbered words, and a network that says where they come from: for notebook 07."""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gpulab.errors import GpulabError

# Packages of the standard library that every supported Python has, each with more than a hundred docstrings.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY = 4096  # words are numbered by a hash


class TextNet(nn.Module):
    """Scores of texts for each class: words are embedded, read by an LSTM or a Transformer encoder, and averaged.

    Examples:
        >>> TextNet("LSTM", classes=3, width=8)(torch.tensor([[5, 7, 0]])).shape
        torch.Size([1, 3])
    """

    def __init__(self, kind: str, classes: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        if kind == "LSTM":
            self.reader: nn.Module = nn.LSTM(width, width, layers, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.reader = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, classes)

    def forward(self, words: Int[Tensor, "b t"]) -> Float[Tensor, "b c"]:
        """Scores; 0 is no word."""
        there = words > 0
        if isinstance(self.reader, nn.LSTM):
            read = self.reader(self.words(words))[0]
        else:
            read = self.reader(self.words(words), src_key_padding_mask=~there)
        counted = there.unsqueeze(-1)
        return self.scores((read * counted).sum(1) / counted.sum(1))


@functools.cache
def docstrings() -> tuple[list[str], list[str]]:
    """What the standard library says of itself: docstrings, each once, and the package that each stands in.

    Read from the source, which is not executed.

    Examples:
        >>> texts, packages = docstrings()
        >>> len(texts) == len(set(texts)) == len(packages), sorted(set(packages)) == sorted(PACKAGES)
        (True, True)
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for package in PACKAGES:
        for file in sorted((library / package).rglob("*.py")):
            if {"test", "tests"} & set(file.relative_to(library).parts):
                continue
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if len(text.split()) >= 5:
                        found.setdefault(text, package)
    return list(found), list(found.values())


def newsgroups() -> tuple[list[str], list[str]]:
    """20 Newsgroups and their names, downloaded by scikit-learn (14 MB), and not kept.

    Raises:
        GpulabError: Without a network, or without scikit-learn.
    """
    try:
        from sklearn.datasets import fetch_20newsgroups

        with tempfile.TemporaryDirectory() as folder:  # a copy that is kept would be a pickle
            fetched = fetch_20newsgroups(data_home=folder, subset="all", remove=("headers", "footers", "quotes"))
    except (ImportError, OSError) as error:
        raise GpulabError(f"20 Newsgroups cannot be had here, the docstrings can: {error}") from None
    return fetched.data, [fetched.target_names[number] for number in fetched.target]


CORPORA: dict[str, Callable[[], tuple[list[str], list[str]]]] = {"docstrings": docstrings, "newsgroups": newsgroups}


def as_words(texts: Iterable[str], length: int) -> Int[Tensor, "b t"]:
    """The first words of each text as numbers from 1, by a hash that is the same everywhere; 0 behind the last.

    Examples:
        >>> as_words(["a b", "a"], 3).tolist()[1]
        [2728, 0, 0]
    """
    numbers = np.zeros((len(texts := list(texts)), length), np.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"[a-z]+", text.lower())[:length] or ["none"]
        numbers[row, : len(words)] = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return torch.from_numpy(numbers)


def split(corpus: str, length: int, every: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words and classes to train on, and those of every fifth text, which are held out."""
    texts, names = (part[::every] for part in CORPORA[corpus]())
    labels = torch.from_numpy(np.unique(names, return_inverse=True)[1])
    words, held = as_words(texts, length), torch.arange(len(texts)) % 5 == 0
    return words[~held], labels[~held], words[held], labels[held]
