"""Run by a Python that has Chainer: one window of the published network, buffer reused and copied.

Usage: python chainer_window.py FOLDER FRAMES CHANNELS, with the authors' `net.py` in FOLDER, an .npy file of
frames (T, C, H, W) in [0, 1], and channels such as 3,16,32. Prints JSON. Needs NumPy and Chainer alone.
"""

import json
import sys

import numpy as np


def window(net, frames, channels, copied):
    """Forward losses, and the gradient of their sum as one vector, from weights of a fixed seed."""
    import chainer
    from chainer.functions.loss.mean_squared_error import mean_squared_error

    np.random.seed(0)  # Chainer draws from NumPy's global generator
    _, colours, height, width = frames.shape
    predictor = net.PredNet(width, height, channels)
    model = chainer.links.Classifier(predictor, lossfun=mean_squared_error)
    model.compute_accuracy = False
    predictor.reset_state()
    seen, coming = (np.empty((1, colours, height, width), np.float32) for _ in range(2))
    wrap = (lambda buffer: buffer.copy()) if copied else np.asarray
    losses, total = [], 0
    seen[0] = frames[0]
    for frame in frames[1:]:
        coming[0] = frame
        loss = model(chainer.Variable(wrap(seen)), chainer.Variable(wrap(coming)))
        losses.append(loss.data.tobytes().hex())
        total += loss
        seen[0] = coming[0]
    model.cleargrads()
    total.backward()
    gradient = [p.grad.ravel() for _, p in sorted(model.namedparams()) if p.grad is not None]
    return losses, np.concatenate(gradient).astype(np.float64)


def main(folder, frames, channels):
    """Print how the two ways differ."""
    sys.path.insert(0, folder)
    import chainer
    import net

    frames = np.load(frames, allow_pickle=False).astype(np.float32)
    channels = tuple(int(number) for number in channels.split(","))
    copied, right = window(net, frames, channels, copied=True)
    reused, wrong = window(net, frames, channels, copied=False)
    lengths = np.linalg.norm(right), np.linalg.norm(wrong)
    answer = {
        "chainer": chainer.__version__,
        "numpy": np.__version__,
        "losses": len(copied),
        "same_losses": sum(a == b for a, b in zip(copied, reused)),  # noqa: B905  # runs on older Pythons too
        "gradient_difference": float(np.linalg.norm(wrong - right) / lengths[0]),
        "cosine": float(right @ wrong / lengths[0] / lengths[1]),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
