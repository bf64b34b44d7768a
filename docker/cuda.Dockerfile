# rlpack with its pinned dependencies, Ray and PyTorch for CUDA, for every node of a cluster with NVIDIA GPUs.
# From the project root: docker build -f docker/cuda.Dockerfile -t rlpack:cuda .
# PyTorch's wheels include CUDA, cuDNN and NCCL; the NVIDIA container toolkit provides the node's driver.
FROM python:3.11-slim-bookworm

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple

# KubeRay's health checks need wget, Triton a C compiler, and NCCL the InfiniBand libraries on nodes with such cards.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 wget \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 rlpack

# PyTorch first, as in `make install`: it is the largest layer, and its build determines the supported devices.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"

WORKDIR /opt/rlpack
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY rlpack rlpack
COPY workers workers
COPY recipes recipes
COPY configs configs
RUN pip install --no-cache-dir --constraint constraints.txt ".[tensorboard,wandb]"

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The last variable keeps Ray from killing the supervisor of the reward processes before it has cleaned up.
ENV PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAY_kill_child_processes_on_worker_exit=false
USER 1000
WORKDIR /home/rlpack
CMD ["rlpack", "--help"]
