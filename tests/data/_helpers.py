"""Functions that write films, folders of images and files of MNIST for the tests of data."""

import gzip
import io
import struct
import wave

import av
import numpy as np
from PIL import Image

SMALL = (24, 32)


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def every_frame(data):
    """Return all frames of a sequence, both training and held-out frames."""
    return np.stack(list(data.stream(0, data.frames + data.heldout_count)))


def write_video(file, frames, codec="ffv1", pixels="bgr0"):
    """Encode colour (T, H, W, 3) or grey (T, H, W) frames; FFV1 and PNG are lossless."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(
                frame, format="gray" if frame.ndim == 2 else "rgb24"
            )
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file


def write_sound(file):
    with wave.open(str(file), "w") as stream:
        stream.setparams((1, 2, 8000, 800, "NONE", ""))
        stream.writeframes(bytes(1600))


def write_images(folder, frames, suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames):
        (folder / f"{number:03}.{suffix}").write_bytes(encoded(frame, suffix=suffix))
    return folder


def encoded(*frames, suffix="png"):
    """Return the content of an image file, with several pictures if there are several frames."""
    file, (first, *more) = io.BytesIO(), map(Image.fromarray, frames)
    kind = Image.registered_extensions()[f".{suffix}"]
    first.save(file, kind, **({"save_all": True, "append_images": more} if more else {}))
    return file.getvalue()


def idx(images, magic=2051):
    return struct.pack(">4I", magic, *images.shape) + images.tobytes()


def write_idx(file, images):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(idx(images)) if file.suffix == ".gz" else idx(images))
