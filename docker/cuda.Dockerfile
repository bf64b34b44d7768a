# rlpack with its pinned dependencies, Ray, PyTorch for CUDA and flash-attn, for every node of a cluster with NVIDIA GPUs.
# From the project root: docker build -f docker/cuda.Dockerfile -t rlpack:cuda .
# With vLLM: add --build-arg VLLM=vllm==0.32.0, the version that pins this PyTorch.
# PyTorch's wheels include CUDA, cuDNN and NCCL; the NVIDIA container toolkit provides the node's driver.

# flash-attn has no wheels on PyPI and is compiled for one PyTorch, one Python and one CUDA. PyTorch 2.13.0 on PyPI is
# built with CUDA 13.0. Ubuntu 22.04 has an older C library than the image below, so that what it links runs there.
FROM nvidia/cuda:13.0.2-devel-ubuntu22.04 AS flash-attn

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
# The last release of the second generation, which rlpack calls; 2.8.3.post2 supports CUDA 13.
ARG FLASH_ATTN=flash-attn==2.8.3.post2
# Compute capabilities: 8.0 is A100, whose code other GPUs of generation 8 run; 9.0 is H100 and H200; 10.0 is B200.
ARG FLASH_ATTN_CUDA_ARCHS=80;90;100
# Files that are compiled at a time. Each takes several GB of memory, and all of them take hours on a few cores.
ARG MAX_JOBS=4

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.11 -m venv /build
ENV PATH=/build/bin:$PATH
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
RUN pip install --no-cache-dir ninja packaging psutil setuptools wheel
# nvcc of another CUDA than PyTorch's would compile for an hour and then fail to load.
RUN nvcc --version | grep --quiet "release $(python -c 'import torch; print(torch.version.cuda)')," \
    || { echo "TORCH is built with another CUDA than the image of this stage; change its tag" >&2; exit 1; }
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE NVCC_THREADS=1 MAX_JOBS="$MAX_JOBS" \
    FLASH_ATTN_CUDA_ARCHS="$FLASH_ATTN_CUDA_ARCHS" \
    pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels "$FLASH_ATTN"

FROM python:3.11-slim-bookworm

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
ARG VLLM=""

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
# vLLM pins the versions of almost all packages itself, some of them others than constraints.txt.
RUN if [ -z "$VLLM" ]; then pip install --no-cache-dir --constraint constraints.txt ".[tensorboard,wandb]"; \
    else pip install --no-cache-dir "$TORCH" "$VLLM" ".[tensorboard,wandb]"; fi
COPY --from=flash-attn /wheels /wheels
RUN pip install --no-cache-dir einops==0.8.2 /wheels/*.whl && python -c "import flash_attn"

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The last variable keeps Ray from killing the supervisor of the reward processes before it has cleaned up.
ENV PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAY_kill_child_processes_on_worker_exit=false
USER 1000
WORKDIR /home/rlpack
CMD ["rlpack", "--help"]
