"""The event loop of a worker process.

All calls share it, so that a function can keep an HTTP client, a lock or a semaphore at module level.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any


def run_until_complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; cancel the tasks that it left, and wait for its threads.

    As after `asyncio.run`, no task or thread of one call goes on in the next one. But an async generator that a call
    leaves open is closed only once it is garbage.
    """
    runner = _runner()
    executor = ThreadPoolExecutor()  # starts no thread unless it is used
    runner.get_loop().set_default_executor(executor)
    try:
        return runner.run(coroutine, context=copy_context())
    finally:
        runner.run(_cancel_tasks())
        executor.shutdown()


@cache
def _runner() -> asyncio.Runner:
    """Return the process's runner, which is never closed: a worker runs until it is killed."""
    return asyncio.Runner()


async def _cancel_tasks() -> None:
    """Cancel all tasks of the loop but this one, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
