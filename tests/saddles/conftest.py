import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The problems here are so small that a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
