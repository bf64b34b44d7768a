"""The names of vLLM that the engine uses. Importing this module imports vLLM: set its environment variables first."""

from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferInitRequest as WeightTransferInitRequest,
)
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferUpdateRequest as WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import (  # pyright: ignore[reportMissingImports]
    AsyncEngineArgs as AsyncEngineArgs,
)
from vllm.exceptions import (  # pyright: ignore[reportMissingImports]
    RetryableRequestError as RetryableRequestError,
)
from vllm.exceptions import (  # pyright: ignore[reportMissingImports]
    VLLMClientError as VLLMClientError,
)
from vllm.lora.request import (  # pyright: ignore[reportMissingImports]
    LoRARequest as LoRARequest,
)
from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
    RequestOutputKind as RequestOutputKind,
)
from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
    SamplingParams as SamplingParams,
)
from vllm.v1.engine.async_llm import (  # pyright: ignore[reportMissingImports]
    AsyncLLM as AsyncLLM,
)
from vllm.v1.metrics.loggers import (  # pyright: ignore[reportMissingImports]
    PrometheusStatLogger as PrometheusStatLogger,
)
