import torch


# Several workers share the cores: with a thread pool each, every small operation would wait for the other's turn.
torch.set_num_threads(1)
