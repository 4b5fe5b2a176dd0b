"""A guard reports what it does not watch, and what runs differently because of it."""

import concurrent.futures
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpulab as gl

WEIGHT = torch.ones(3, requires_grad=True)
SWITCHED_OFF = "torch.compile was switched off"


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(3) * index


def plain_step():
    (WEIGHT * torch.ones(3)).sum().backward()


def compiled_inside():
    torch.compile(lambda x: (x * 2).sum(), backend="eager")(WEIGHT).backward()


def compiled_in_place():
    net = nn.Linear(3, 2)
    net.compile(backend="eager")
    net(torch.ones(3)).sum().backward()


COMPILED_BEFORE = torch.compile(lambda x: (x * 3).sum(), backend="eager")


def compiled_before():
    COMPILED_BEFORE(WEIGHT).backward()


def compiled_and_not_called():
    torch.compile(lambda x: x)


def loader_with_workers():
    list(torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork"))


def loader_without_workers():
    list(torch.utils.data.DataLoader(Numbers()))


def thread():
    worker = threading.Thread(target=plain_step)
    worker.start()
    worker.join()


def pool():
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(plain_step).result()


def hooks_of_ones_own():
    with torch.autograd.graph.save_on_cpu():
        plain_step()


def recomputed():
    checkpoint(lambda x: x.exp(), WEIGHT, use_reentrant=False).sum().backward()


def scripted():
    torch.jit.script(nn.Linear(3, 2))(torch.ones(3)).sum().backward()


SAID = [
    (compiled_inside, SWITCHED_OFF),
    (compiled_in_place, SWITCHED_OFF),
    (compiled_before, SWITCHED_OFF),
    (loader_with_workers, "not watched: 2 processes that this program started"),
    (thread, "not watched: 1 thread that this program started"),
    (pool, "not watched: 1 thread that this program started"),
    (hooks_of_ones_own, "not watched: tensors saved inside 1 block"),
    (scripted, "not watched: tensors saved internally by 1 function of torch.jit"),
]
NOT_SAID = [plain_step, compiled_and_not_called, loader_without_workers, recomputed]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("step", "words"), SAID)
def test_guard_says_what_it_does_not_watch(step, words):
    torch.compiler.reset()
    with gl.guard(reads="any") as report:
        step()
    assert [sentence for sentence in report.unwatched if sentence.startswith(words)]
    assert str(report).count(words) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", NOT_SAID)
def test_guard_says_nothing_of_what_it_watches(step):
    with gl.guard(reads="any") as report:
        step()
    assert report.unwatched == []


@pytest.mark.parametrize("step", [compiled_inside, compiled_before])
def test_guard_of_compiled_code_leaves_it_compiled_under_reads_backward(step):
    torch.compiler.reset()
    with gl.guard(reads="backward") as report:
        step()
    assert report.unwatched == []


def test_guard_watches_a_thread_that_enters_it():
    report = gl.guard(reads="any")

    def work():
        with report:
            plain_step()

    with report:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    assert report.unwatched == []


def test_guard_restores_functions_when_it_ends():
    def functions():
        owners = (
            (torch, "compile"),
            (nn.Module, "compile"),
            (threading.Thread, "start"),
            (torch.jit, "script"),
        )
        return [vars(owner)[name] for owner, name in owners]

    before = functions()
    with gl.guard(reads="any"), gl.guard(reads="any"):
        assert functions() != before
        torch.from_numpy(np.ones(2, np.float32)).sum()
    assert functions() == before
