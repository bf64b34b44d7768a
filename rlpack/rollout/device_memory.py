"""The memory in use on a rank's GPUs."""

import torch


def used_bytes(device: torch.device) -> int:
    """Return the memory in use on all GPUs that this process sees, by all processes, in bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    memory = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return sum(total - free for free, total in memory)
