from __future__ import annotations

import torch

# The models here are tiny: a second thread brings nothing, and stalls whenever something else has its core.
torch.set_num_threads(1)
