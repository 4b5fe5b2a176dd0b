"""Correct and faulty programs with asynchronous GPU copies, under the guard. Needs CUDA.

    python benchmarks/correctness/copies_under_way_cases.py --write
    benchmarks/results/copies_under_way.md

Seven programs of our own have the fault of a public thread; ten similar programs are correct. The
expected answers were written down before the guard was tried on any of them. Each program is first
run without the guard, once as it is and once with copies that wait, to see whether its numbers
differ. The GPU is kept busy before each copy, as in a training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.correctness.guarded_programs import Program, guarded, show_guarded
from benchmarks.measuring import keep

SIZE = 1 << 20  # the number of elements in a tensor
BUSY = 50_000_000  # cycles of the GPU, about 30 ms


def pinned() -> Tensor:
    """Return pinned memory, which the GPU can read and write on its own."""
    return torch.zeros(SIZE, pin_memory=True)


def sent(host: Tensor, going_on: bool) -> Tensor:
    """Copy to the GPU, queued behind other work."""
    torch.cuda._sleep(BUSY)
    return host.to("cuda", non_blocking=going_on)  # here


def computed(number: float) -> Tensor:
    """Compute a result that takes the GPU some time."""
    torch.cuda._sleep(BUSY)
    return torch.full((SIZE,), number, device="cuda")


# --- faulty programs ------------------------------------------------------------------------------


def inputs_refilled(going_on: bool) -> Tensor:
    """A server writes the next step's inputs into the pinned array of the last step."""
    host, seen = pinned(), []
    array = host.numpy()
    for step in range(3):
        array[:] = step + 1
        seen.append(sent(host, going_on).sum())
    return torch.stack(seen).cpu()


def mask_refilled(going_on: bool) -> Tensor:
    """The same, but torch writes."""
    host, seen = pinned(), []
    for step in range(3):
        host.fill_(step + 1)
        seen.append(sent(host, going_on).sum())
    return torch.stack(seen).cpu()


def prefetched_into_one_buffer(going_on: bool) -> Tensor:
    """A prefetcher has its own stream; the GPU waits for it, but the host does not."""
    host, stream, seen = pinned(), torch.cuda.Stream(), []
    for step in range(3):
        host.numpy()[:] = step + 1
        with torch.cuda.stream(stream):
            batch = sent(host, going_on)
        torch.cuda.current_stream().wait_stream(stream)
        seen.append(batch.sum())
    return torch.stack(seen).cpu()


def summed_on_arrival(going_on: bool) -> Tensor:
    """A result is copied to the host and used immediately."""
    return computed(3).to("cpu", non_blocking=going_on).sum()  # here


def as_numpy_on_arrival(going_on: bool) -> Tensor:
    """The same with NumPy."""
    return torch.tensor(computed(3).to("cpu", non_blocking=going_on).numpy().sum())  # here


def metrics_on_arrival(going_on: bool) -> Tensor:
    """Several metrics are copied to the host and joined there."""
    moved = [computed(number).to("cpu", non_blocking=going_on) for number in (1, 2)]  # here
    return torch.cat(moved).sum()


def view_made_before(going_on: bool) -> Tensor:
    """NumPy's view of the pinned memory is older than the copy into it."""
    host = pinned()
    view = host.numpy()
    host.copy_(computed(3), non_blocking=going_on)  # here
    return torch.tensor(view.sum())


# --- correct programs -----------------------------------------------------------------------------


def loader_of_pinned_batches(going_on: bool) -> Tensor:
    """`DataLoader(pin_memory=True)`: a batch's memory is not reused before its copy is done."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None].expand(8, 1 << 16))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    return torch.stack([sent(batch, going_on).sum() for (batch,) in loader]).cpu()


def event_before_refilling(going_on: bool) -> Tensor:
    """The host waits for an event recorded after the copy."""
    host, seen = pinned(), []
    for step in range(3):
        host.numpy()[:] = step + 1
        batch, copied = sent(host, going_on), torch.cuda.Event()
        copied.record()
        seen.append(batch.sum())
        copied.synchronize()
    return torch.stack(seen).cpu()


def two_buffers(going_on: bool) -> Tensor:
    """A prefetcher with two buffers waits for a buffer's copy before refilling the buffer."""
    hosts, events, seen = [pinned(), pinned()], [torch.cuda.Event(), torch.cuda.Event()], []
    for step in range(5):
        host, copied = hosts[step % 2], events[step % 2]
        copied.synchronize()
        host.numpy()[:] = step + 1
        seen.append(sent(host, going_on).sum())
        copied.record()
    return torch.stack(seen).cpu()


def asked_until_done(going_on: bool) -> Tensor:
    """The host polls until the copy is done."""
    host, seen = pinned(), []
    for step in range(3):
        host.numpy()[:] = step + 1
        batch, copied = sent(host, going_on), torch.cuda.Event()
        copied.record()
        seen.append(batch.sum())
        while not copied.query():
            pass
    return torch.stack(seen).cpu()


def loss_as_a_number(going_on: bool) -> Tensor:
    """`.item()` waits for all earlier work."""
    host, seen = pinned(), []
    for step in range(3):
        host.numpy()[:] = step + 1
        seen.append(sent(host, going_on).sum().item())
    return torch.tensor(seen)


def another_buffer_each_time(going_on: bool) -> Tensor:
    """Every batch has its own pinned memory."""
    return torch.stack(
        [sent(torch.full((SIZE,), step).float().pin_memory(), going_on).sum() for step in range(3)]
    ).cpu()


def pageable_refilled(going_on: bool) -> Tensor:
    """Memory that is not pinned is read before the call returns."""
    host, seen = torch.zeros(SIZE), []
    for step in range(3):
        host.fill_(step + 1)
        seen.append(sent(host, going_on).sum())
    return torch.stack(seen).cpu()


def device_synchronized(going_on: bool) -> Tensor:
    """The host waits for the device before it reads."""
    host = computed(3).to("cpu", non_blocking=going_on)
    torch.cuda.synchronize()
    return host.sum()


def results_of_a_stream(going_on: bool) -> Tensor:
    """Several results, one wait for their stream, then NumPy."""
    hosts = [computed(number).to("cpu", non_blocking=going_on) for number in (1, 2, 3)]
    torch.cuda.current_stream().synchronize()
    return torch.tensor(sum(host.numpy().sum() for host in hosts))


def one_after_the_other(going_on: bool) -> Tensor:
    """The host and the GPU read a pinned tensor at the same time."""
    host = torch.ones(SIZE, pin_memory=True)
    return sent(host, going_on).sum().cpu() + host.sum()


CASES = [
    Program(inputs_refilled, "vllm#54269", "leaving"),
    Program(mask_refilled, "vllm#31841", "leaving"),
    Program(prefetched_into_one_buffer, "libffcv/ffcv#37", "leaving"),
    Program(summed_on_arrival, "invoke-ai/InvokeAI#6624", "arriving"),
    Program(as_numpy_on_arrival, "pytorch#86264", "arriving"),
    Program(metrics_on_arrival, "Lightning-AI/pytorch-lightning#11288", "arriving"),
    Program(view_made_before, "vllm#36013", "arriving"),
    *(
        Program(program, "", "")
        for program in (
            *(
                loader_of_pinned_batches,
                event_before_refilling,
                two_buffers,
                asked_until_done,
                loss_as_a_number,
            ),
            *(
                another_buffer_each_time,
                pageable_refilled,
                device_synchronized,
                results_of_a_stream,
            ),
            one_after_the_other,
        )
    ),
]


def tried(case: Program) -> dict[str, Any]:
    """Return a row of the table."""
    # Memory that torch will reuse.
    held = [torch.full((SIZE,), torch.nan, pin_memory=True) for _ in range(4)]
    del held
    torch.cuda.synchronize()
    differs = not torch.equal(case.program(True), case.program(False))
    row = guarded(case, True)
    first = {name: row.pop(name) for name in ("program", "thread")}
    return {**first, "other numbers than with waiting": "yes" if differs else "no", **row}


def main(
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
    record: Annotated[Path | None, typer.Option(help="JSON file, for data/measured/")] = None,
) -> None:
    """Run all programs with and without the guard."""
    rows = [tried(case) for case in CASES]
    show_guarded("Copies under way", write, rows)
    columns = ("program", "thread", "other_numbers", "expected", "said")
    keep(record, "cuda", programs=[dict(zip(columns, row.values(), strict=False)) for row in rows])


if __name__ == "__main__":
    typer.run(main)
