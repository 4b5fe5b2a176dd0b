"""Typical distributed steps, correct and faulty, each with its equivalent in a single process.

Every function step of the ranks takes the name of a fault, which is empty for the correct program.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn

import gpulab as gl
from tests.audits._helpers import drawn, seeded

N_RANKS = 2
N_SAMPLES = 16
DEVICE = "cpu"  # of the networks and the data of this process
INPUTS = drawn(N_SAMPLES, 12)
TARGETS = torch.randint(0, 5, (N_SAMPLES,), generator=torch.Generator().manual_seed(1))
TEXT = drawn(2, 8, 12, seed=3)


def use_device(device):
    """Place the networks and the data of this process on a device."""
    global DEVICE, INPUTS, TARGETS, TEXT
    DEVICE = device
    INPUTS, TARGETS, TEXT = (tensor.to(device) for tensor in (INPUTS, TARGETS, TEXT))


def setting_of(device):
    """Return the setting under which a step is recorded."""
    return device if device == "cpu" else f"{device}:tf32=off"


def network():
    layers = seeded(lambda: nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5)))
    return layers.to(DEVICE)


def samples_of(rank):
    n = N_SAMPLES // N_RANKS
    return slice(rank * n, rank * n + n)


# --- data parallel --------------------------------------------------------------------------------


def whole_batch():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    F.cross_entropy(net(INPUTS), TARGETS).backward()
    optimizer.step()


def data_parallel(fault=""):
    net = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rows = samples_of(dist.get_rank())
    loss = F.cross_entropy(net(INPUTS[rows]), TARGETS[rows])
    if fault == "divided_twice":
        loss = loss / dist.get_world_size()  # DDP already takes the mean
    loss.backward()
    optimizer.step()
    return loss.detach()


def data_parallel_by_hand(fault=""):
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rows = samples_of(dist.get_rank())
    F.cross_entropy(net(INPUTS[rows]), TARGETS[rows]).backward()
    for name, parameter in net.named_parameters():
        if fault == "unreduced_gradient" and name == "0.bias":
            continue
        if fault == "unreduced_on_rank_1" and name == "0.bias":
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
            if dist.get_rank() == 0:
                parameter.grad.copy_(gradient / dist.get_world_size())
            continue
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


# --- gradients accumulated over parts with unequal numbers of words -------------------------------

COUNTS = ((3, 4), (7, 2))  # the words in the two parts of each rank


def words_of(rank, part):
    start = sum(sum(COUNTS[r]) for r in range(rank)) + sum(COUNTS[rank][:part])
    return slice(start, start + COUNTS[rank][part])


def accumulated(fault=""):
    net = nn.parallel.DistributedDataParallel(network())
    rank = dist.get_rank()
    n_words = torch.tensor(float(sum(COUNTS[rank])), device=DEVICE)
    dist.all_reduce(n_words)
    for part in range(2):
        rows = words_of(rank, part)
        scores = net(INPUTS[rows])
        if fault == "mean_of_means":
            loss = F.cross_entropy(scores, TARGETS[rows]) / 2
        else:
            losses = F.cross_entropy(scores, TARGETS[rows], reduction="sum")
            loss = losses * dist.get_world_size() / n_words
        if part == 0:
            with net.no_sync():
                loss.backward()
        else:
            loss.backward()


def all_words():
    F.cross_entropy(network()(INPUTS), TARGETS).backward()


# --- tensor parallel ------------------------------------------------------------------------------


class CopyToRanks(torch.autograd.Function):
    """Pass the input to a column-parallel layer; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """Sum the output of a row-parallel layer over the ranks."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient


def column_and_row_parallel(fault=""):
    net = network()
    half = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
    first_weight, first_bias, last_weight = (
        nn.Parameter(t.detach().clone())
        for t in (net[0].weight[half], net[0].bias[half], net[2].weight[:, half])
    )
    last_bias = nn.Parameter(net[2].bias.detach().clone())
    x = INPUTS.clone().requires_grad_()
    copied = x if fault == "input_gradient_unreduced" else CopyToRanks.apply(x)
    hidden = F.gelu(F.linear(copied, first_weight, first_bias))
    if fault == "bias_on_every_rank":
        scores = SumOverRanks.apply(F.linear(hidden, last_weight, last_bias))
    elif fault == "gradient_of_a_part_doubled":
        doubled = 2 * last_weight - last_weight.detach()
        scores = SumOverRanks.apply(F.linear(hidden, doubled)) + last_bias
    else:
        scores = SumOverRanks.apply(F.linear(hidden, last_weight)) + last_bias
    loss = F.cross_entropy(scores, TARGETS)
    loss.backward()
    return loss.detach()


def one_network():
    x = INPUTS.clone().requires_grad_()
    loss = F.cross_entropy(network()(x), TARGETS)
    loss.backward()
    return loss.detach()


# --- sequence parallel ----------------------------------------------------------------------------


class GatherSequence(torch.autograd.Function):
    """Gather the parts of a sequence from all ranks; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        parts = x.new_empty(N_RANKS * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        part = gradient.new_empty(gradient.shape[0] // N_RANKS, *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous())
        return part


class ScatterSequence(torch.autograd.Function):
    """Sum over the ranks, of which each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        part = x.new_empty(x.shape[0] // N_RANKS, *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous())
        return part

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        parts = gradient.new_empty(N_RANKS * gradient.shape[0], *gradient.shape[1:])
        dist.all_gather_into_tensor(parts, gradient.contiguous())
        return parts


def block():
    layers = seeded(lambda: (nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12)))
    return [layer.to(DEVICE) for layer in layers]


def sequence_parallel(fault=""):
    norm, up, down = block()
    rank = dist.get_rank()
    half = slice(8 * rank, 8 * rank + 8)
    weights = [
        nn.Parameter(t.detach().clone())
        for t in (up.weight[half], up.bias[half], down.weight[:, half])
    ]
    # Words are the first dimension, as in Megatron: each rank normalises half of the words.
    words = TEXT.transpose(0, 1).contiguous().chunk(N_RANKS)[rank]
    gathered = GatherSequence.apply(norm(words))
    hidden = F.gelu(F.linear(gathered, weights[0], weights[1]))
    out = words + ScatterSequence.apply(F.linear(hidden, weights[2]))
    out.square().sum().backward()
    if fault != "norm_gradient_unreduced":
        for parameter in norm.parameters():
            dist.all_reduce(parameter.grad)


def one_block():
    norm, up, down = block()
    words = TEXT.transpose(0, 1).contiguous()
    hidden = F.gelu(up(norm(words)))
    out = words + F.linear(hidden, down.weight)
    out.square().sum().backward()


# --- sequence parallel attention, in which the ranks exchange words for heads ---------------------


class ExchangeParts(torch.autograd.Function):
    """Give every rank its part of one dimension, and get all parts of another one."""

    @staticmethod
    def forward(ctx, x, given, gathered):
        ctx.dims = given, gathered
        return exchange_parts(x, given, gathered)

    @staticmethod
    def backward(ctx, gradient):
        given, gathered = ctx.dims
        return exchange_parts(gradient, gathered, given), None, None


def exchange_parts(x, given, gathered):
    sent = [part.contiguous() for part in x.chunk(N_RANKS, given)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received, gathered)


def attention_layers():
    layers = seeded(lambda: (nn.Linear(12, 36), nn.Linear(12, 12)))
    return [layer.to(DEVICE) for layer in layers]


def heads_of(words, projection):
    batch, length, _ = words.shape
    return projection(words).view(batch, length, 3, 4, 3).permute(2, 0, 3, 1, 4)


def exchanged_attention(fault=""):
    projection, last = attention_layers()
    rank = dist.get_rank()
    words = TEXT.chunk(N_RANKS, 1)[rank]
    queries, keys, values = (ExchangeParts.apply(t, 1, 2) for t in heads_of(words, projection))
    causal = fault != "mask_of_words_lost"
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
    mixed = ExchangeParts.apply(mixed, 2, 1)
    out = last(mixed.transpose(1, 2).flatten(2))
    out.square().sum().backward()
    for name, parameter in [*projection.named_parameters(), *last.named_parameters()]:
        if fault == "bias_gradient_unreduced" and name == "bias":
            continue
        dist.all_reduce(parameter.grad)


def whole_attention():
    projection, last = attention_layers()
    queries, keys, values = heads_of(TEXT, projection)
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    out = last(mixed.transpose(1, 2).flatten(2))
    out.square().sum().backward()


# Each distributed step, the equivalent step in one process, and the lines of its faults.
PROGRAMS = {
    "data_parallel": (data_parallel, whole_batch, {"divided_twice": "loss = F.cross_entropy("}),
    "data_parallel_by_hand": (
        data_parallel_by_hand,
        whole_batch,
        {
            "unreduced_gradient": "F.cross_entropy(net(INPUTS[rows]), TARGETS[rows]).backward()",
            "unreduced_on_rank_1": "F.cross_entropy(net(INPUTS[rows]), TARGETS[rows]).backward()",
        },
    ),
    "accumulated": (
        accumulated,
        all_words,
        {"mean_of_means": "loss = F.cross_entropy(scores, TARGETS[rows]) / 2"},
    ),
    "column_and_row_parallel": (
        column_and_row_parallel,
        one_network,
        {
            "bias_on_every_rank": "scores = SumOverRanks.apply(F.linear(hidden, last_weight, ",
            "gradient_of_a_part_doubled": "doubled = 2 * last_weight - last_weight.detach()",
            "input_gradient_unreduced": "hidden = F.gelu(F.linear(copied, first_weight, ",
        },
    ),
    "sequence_parallel": (
        sequence_parallel,
        one_block,
        {"norm_gradient_unreduced": "gathered = GatherSequence.apply(norm(words))"},
    ),
    "exchanged_attention": (
        exchanged_attention,
        whole_attention,
        {
            "mask_of_words_lost": "mixed = F.scaled_dot_product_attention(queries, keys, values, ",
            "bias_gradient_unreduced": "out = last(mixed.transpose(1, 2).flatten(2))",
        },
    ),
}


def sends_messages():
    x = INPUTS.clone()
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x.exp().sum()


def uses_functional_collectives():
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(INPUTS.exp(), "sum", dist.group.WORLD).sum()


def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(DEVICE).type, (N_RANKS,))
    net = fully_shard(network(), mesh=mesh)
    F.cross_entropy(net(INPUTS), TARGETS).backward()


def sharded_flat_parameters():
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(network(), device_id=torch.device(DEVICE))
    F.cross_entropy(net(INPUTS), TARGETS).backward()


REFUSED = {
    "fully_sharded": fully_sharded,
    "sharded_flat_parameters": sharded_flat_parameters,
    "sends_messages": sends_messages,
    "uses_functional_collectives": uses_functional_collectives,
}


def run_rank(rank, folder, backend):
    """Record every program, correct and faulty, on one of the ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        use_device(f"cuda:{rank}")
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=N_RANKS
    )
    for name, (step, _, faults) in PROGRAMS.items():
        for fault in ("", *faults):
            file = folder / f"{name}.{fault}.{rank}"
            gl.record(partial(step, fault=fault), setting_of(DEVICE), file, progress=False)
    for name, step in REFUSED.items():
        try:
            gl.record(step, setting_of(DEVICE), progress=False)
        except gl.UsageError as error:
            (folder / f"{name}.{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def record_all(folder, backend):
    """Record every program on two ranks, in files of a folder."""
    multiprocessing.spawn(run_rank, (folder, backend), nprocs=N_RANKS)
