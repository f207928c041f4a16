"""Small tensors are faster on one thread; on a busy machine a second one only waits."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
