"""In which dtypes a kernel is tried."""

from __future__ import annotations

import torch

# In the interpreter bfloat16 is silently wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
