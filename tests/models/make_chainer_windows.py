"""Make chainer_windows.npz: windows of the authors' own network, trained by stock Chainer on a CPU
with copied frames.

    python tests/models/make_chainer_windows.py prednet_in_chainer_py3/PredNet
    tests/models/chainer_windows.npz

`python benchmarks/peers/published.py --help` says how to install Chainer and where the authors'
`net.py` is from. The archive holds frames as bytes (T, C, H, W); the losses of each window; the
weights before the first window and the gradient of each, all arrays one after the other in the
order of their names; and how it was made.
"""

import json
import platform
import shlex
import sys

import numpy as np

from companion.benchmarks import benchmark

CHANNELS, SIZE = [3, 4, 8], [12, 16]  # height and width
WINDOWS, FRAMES = 3, 6  # the number of windows, and of frames in each (the authors' --bprop)


def scene(count, height, width):
    """Smooth waves that drift, as bytes, with a different speed and direction in each colour."""
    t, y, x = np.meshgrid(np.arange(count), np.arange(height), np.arange(width), indexing="ij")
    colours = [
        np.sin(0.5 * x + 0.3 * y - 0.7 * t) + np.cos(0.9 * y + 0.4 * t),
        np.sin(0.8 * x - 0.4 * y + 0.5 * t) + np.sin(0.2 * x + 1.1 * t),
        np.cos(0.3 * x + 0.7 * y + 0.9 * t) + np.sin(1.2 * x - 0.3 * t),
    ]
    return np.stack([np.round(127.5 + 63 * colour) for colour in colours], axis=1).astype(np.uint8)


def main():
    """Train, and save the losses and the gradient of each window."""
    net, output = sys.argv[1:]
    authors = benchmark("peers/published").Published(
        net, size=SIZE, channels=CHANNELS, loader="copied"
    )
    weights = {name: parameter.data for name, parameter in sorted(authors.model.namedparams())}
    frames = scene(WINDOWS * FRAMES, *SIZE)
    seen = frames.astype(np.float32) / np.float32(255)
    kept = {"frames": frames, "weights": flat(weights)}
    authors.restart(seen[0])
    for number in range(WINDOWS):
        begin, end = number * FRAMES, (number + 1) * FRAMES
        gradients = []
        losses = authors.window(
            seen[max(1, begin) : end],
            lambda: gradients.append(authors.gradients()),  # noqa: B023
        )
        kept |= {
            f"losses{number}": np.array(losses, np.float32),
            f"gradient{number}": flat(gradients[0]),
        }
    versions = {
        "chainer": authors.chainer.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    names = [name.removeprefix("/predictor/") for name in weights]
    kept["made"] = np.array(
        json.dumps({**versions, "command": shlex.join(["python", *sys.argv]), "names": names})
    )
    np.savez_compressed(output, **kept)


def flat(arrays):
    """Concatenate arrays."""
    return np.concatenate([array.ravel() for array in arrays.values()])


if __name__ == "__main__":
    main()
