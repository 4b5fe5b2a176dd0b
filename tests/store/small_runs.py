"""What several files here begin with: runs that nobody trained, and damage."""

import pandas as pd

HISTORY = pd.DataFrame({"window": [0, 1], "step": [1, 2], "loss": [0.5, 0.25], "seconds": [0.1, 0.2]})


def flipped(share, bit, file):
    """One bit of a file, at a share of its length."""
    content = bytearray(file.read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    file.write_bytes(content)
