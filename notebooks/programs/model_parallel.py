"""One network on two devices: the encoder is on the first, the decoder on the second.

The code is copied between them, and autograd copies the gradient back. One device computes while
the other waits, so this gains memory but no speed. The program trains the same autoencoder whole
and in two parts, asserts that the losses are the same, and reports the memory that each part needs.

    python notebooks/programs/model_parallel.py  # two GPUs, or the CPU twice
    python notebooks/programs/model_parallel.py --hidden 8192 1024 --devices cuda:0 cuda:1

Source: Huang et al. 2019, *GPipe* (arXiv 1811.06965), which keeps both parts busy.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch.autograd.graph import saved_tensors_hooks

import gpulab as gl
from gpulab.store import recorded

UPDATES, BATCH = 40, 20  # number of updates; images per batch


class InTwoParts(gl.models.Autoencoder):
    """An autoencoder, cut after its code; both parts can be on the same device."""

    def __init__(self, hidden, first, second):
        super().__init__(hidden)
        self.encoder, self.decoder = (
            self.layers[: 2 * len(hidden)].to(first),
            self.layers[2 * len(hidden) :].to(second),
        )
        self.first, self.second = first, second

    def forward(self, images):
        """Reconstruct images; their code moves from the first device to the second."""
        code = self.encoder(self.flat(images).to(self.first))
        return self.decoder(code.to(self.second)).to(self.first).view_as(images)


def train(net, images):
    """Train with one update for each batch, and return the mean loss."""
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-3), []
    for batch in images.to(net.first).split(BATCH):
        optimizer.zero_grad()
        loss, _, _ = net.training_loss(batch, None)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def memory(part, inputs):
    """MiB of a part's weights, of their gradients and Adam's two moments, and of the tensors saved
    for the backward pass; and the part's outputs.
    """
    weights = sum(weight.nbytes for weight in part.parameters())
    saved = {}
    with saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        outputs = part(inputs)
    own = {weight.data_ptr() for weight in part.parameters()}
    activations = sum(tensor.nbytes for place, tensor in saved.items() if place not in own)
    return {
        "weights": weights / 2**20,
        "optimizer": 3 * weights / 2**20,
        "activations": activations / 2**20,
    }, outputs


def main():
    """Train whole and in parts, and compare."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs=2, default=devices)
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        default=[128, 32],
        help="widths of the layers up to the code",
    )
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    first, second = args.devices
    kind = torch.device(first).type
    with gl.setting("cpu:threads=1" if kind == "cpu" else f"{kind}:tf32=off") as setting:
        window = next(gl.load("digits", size=(28, 28)).windows(UPDATES * BATCH))
        images = torch.from_numpy(window.frames).float() / 255
        whole, cut = InTwoParts(args.hidden, first, first), InTwoParts(args.hidden, first, second)
        loss, loss_in_parts = (train(net, images) for net in (whole, cut))
        assert abs(loss - loss_in_parts) < 1e-5 * loss, (
            f"the loss is {loss_in_parts} in two parts and {loss} for the whole network"
        )
        encoder, code = memory(cut.encoder, cut.flat(images[:BATCH]).to(first))
        decoder, _ = memory(cut.decoder, code.detach().to(second))
    parts = pd.DataFrame([encoder, decoder]).assign(
        device=args.devices, whole=loss, parts=loss_in_parts
    )
    print(
        "Mean loss of an autoencoder, whole and in two parts, and the memory of each part in"
        f" MiB:\n{parts.to_string(index=False)}"
    )
    if args.record:
        rows = parts.assign(part=parts.index, network="autoencoder", setting=str(setting)).to_dict(
            "records"
        )
        recorded.write_document(args.record, recorded.make_measurement(kind, parts=rows))


if __name__ == "__main__":
    main()
