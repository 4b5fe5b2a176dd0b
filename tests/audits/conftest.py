import pytest
import torch


@pytest.fixture(scope="module")
def two_threads():
    """`cpu` leaves the number of threads as it is: on a machine with one core too, it shall not be that of B."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
