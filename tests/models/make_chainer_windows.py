"""Make chainer_windows.npz: windows of the authors' own network, trained by stock Chainer on a CPU, frames copied.

    pip install --target CHAINER --no-deps --no-build-isolation chainer==7.8.1
    PYTHONPATH=CHAINER python tests/models/make_chainer_windows.py AUTHORS/PredNet tests/models/chainer_windows.npz

AUTHORS is github.com/eijwat/prednet_in_chainer_py3. The operations are those of its `main.py`, in their order. The
archive holds frames as bytes (T, C, H, W); the losses of each window; the weights before the first window and the
gradient of each, all arrays one after the other in the order of their names; and how it was made.
"""

import argparse
import json
import platform
import shlex
import sys
import types
from unittest import mock

import numpy as np


def stand_in():
    """For what Chainer 7.8.1 asks of an older Python and NumPy while it is imported, none of it numerical."""
    sys.modules["pkg_resources"] = mock.MagicMock()
    sys.modules["chainer._environment_check"] = types.SimpleNamespace(check=lambda: None)
    np.sctypes = {"int": [np.int8, np.int16, np.int32, np.int64], "float": [np.float16, np.float32, np.float64]}


def scene(count, height, width):
    """Smooth waves that drift, as bytes: another speed and direction in each colour."""
    t, y, x = np.meshgrid(np.arange(count), np.arange(height), np.arange(width), indexing="ij")
    colours = [
        np.sin(0.5 * x + 0.3 * y - 0.7 * t) + np.cos(0.9 * y + 0.4 * t),
        np.sin(0.8 * x - 0.4 * y + 0.5 * t) + np.sin(0.2 * x + 1.1 * t),
        np.cos(0.3 * x + 0.7 * y + 0.9 * t) + np.sin(1.2 * x - 0.3 * t),
    ]
    return np.stack([np.round(127.5 + 63 * colour) for colour in colours], axis=1).astype(np.uint8)


def main():
    """Train, and keep what each window gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with the authors' net.py")
    parser.add_argument("output")
    parser.add_argument("--channels", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--size", type=int, nargs=2, default=[12, 16], help="height and width")
    parser.add_argument("--window", type=int, default=6, help="frames (their --bprop)")
    parser.add_argument("--windows", type=int, default=3)
    asked = parser.parse_args()
    stand_in()
    sys.path.insert(0, asked.folder)
    import chainer
    import net
    from chainer.functions.loss.mean_squared_error import mean_squared_error

    height, width = asked.size
    frames = scene(asked.windows * asked.window, height, width)
    np.random.seed(0)  # Chainer draws from NumPy's global generator
    model = chainer.links.Classifier(net.PredNet(width, height, asked.channels), lossfun=mean_squared_error)
    model.compute_accuracy = False
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)
    named = {name.removeprefix("/predictor/"): parameter for name, parameter in sorted(model.namedparams())}
    kept = {"frames": frames, "weights": np.concatenate([parameter.data.ravel() for parameter in named.values()])}
    loss, losses, window = 0, [], 0
    for number in range(1, len(frames)):
        seen, coming = (frame[None].astype(np.float32) / np.float32(255) for frame in frames[number - 1 : number + 1])
        loss += model(chainer.Variable(seen), chainer.Variable(coming))
        losses.append(model.loss.data.copy())
        if (number + 1) % asked.window == 0:
            model.zerograds()
            loss.backward()
            loss.unchain_backward()
            kept[f"gradient{window}"] = np.concatenate([parameter.grad.ravel() for parameter in named.values()])
            kept[f"losses{window}"] = np.array(losses)
            optimizer.update()
            loss, losses, window = 0, [], window + 1
    versions = {"chainer": chainer.__version__, "numpy": np.__version__, "python": platform.python_version()}
    made = {**versions, "command": shlex.join(["python", *sys.argv]), "names": list(named)}
    kept["made"] = np.array(json.dumps(made))
    np.savez_compressed(asked.output, **kept)


if __name__ == "__main__":
    main()
