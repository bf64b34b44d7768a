"""Reward functions of every signature, for tests that run them in the pool's workers."""

import asyncio
import contextvars
import json
import os
import sys
import threading
import time

calls = []


def batched(completions, level):
    return [len(text) + number for text, number in zip(completions, level, strict=True)]


def everything(prompts, completions, **columns):
    assert sorted(columns) == ["answer", "level"]
    return [float(len(prompts)) for _ in completions]


def single(prompt, completion, answer, *, scale=1.0):
    return scale * float(f"{prompt}{completion}" == answer)


def single_completion(completion):
    return completion == "b"


def answers_alone(completions, answer):
    return [float(value == "ab") for value in answer]


async def waiting(completion, answer):
    await asyncio.sleep(0.2)
    return float(completion in answer)


async def waiting_batch(completions):
    await asyncio.sleep(0)
    return [1.0 for _ in completions]


def gives_an_awaitable(completion):
    return waiting(completion, completion)


one_at_a_time = asyncio.Semaphore(1)
of_a_call = contextvars.ContextVar("of_a_call", default=0)
left_behind = []


async def takes_turns(completion):
    async with one_at_a_time:
        await asyncio.sleep(0)
    return float(len(completion))


async def takes_turns_in_a_batch(completions):
    lengths = await asyncio.gather(*map(takes_turns, [*completions, "so that a single row waits, too"]))
    return lengths[:-1]


async def times_out_in_turns(completion):
    async with one_at_a_time:
        await asyncio.sleep(30.0 if completion == "slow" else 0.0)
    return 1.0


async def leaves_tasks_and_threads(completion):
    """Return how many of the tasks and threads of earlier calls have ended, and whether their context is gone."""
    ended = sum(item.done() if isinstance(item, asyncio.Task) else item.is_set() for item in left_behind)
    left_behind.append(asyncio.create_task(asyncio.sleep(3600.0)))
    left_behind.append(threading.Event())
    asyncio.get_running_loop().run_in_executor(None, lambda event: (time.sleep(0.05), event.set()), left_behind[-1])
    of_a_call.set(of_a_call.get() + 100)
    return float(ended + of_a_call.get())


class Callable:
    async def __call__(self, completion):
        return 2.0


instance = Callable()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    extra = 0.0 if extra_info is None else extra_info["bonus"]
    return {"score": float(solution_str == ground_truth) + extra, "method": "exact"}


def broken(completions):
    return [json.loads(text) for text in completions]


def fails_on_some(completions):
    """Raise if any text is "raise", so that the pool has to find out which row it is."""
    if any(text == "raise" for text in completions):
        raise ValueError("such a text")
    return [1.0] * len(completions)


def talks_and_fails(completions):
    sys.stdout.write(f"saw {completions[0]}\n")
    raise ValueError("no reward")


def prints_and_dies(completion):
    sys.stdout.write("last words\n")
    os._exit(3)


def refused(completion):
    """Read what the sandbox hides, and hide the refusal in another exception."""
    try:
        os.kill(1, 0)
        raise PermissionError("as if refused")
    except OSError as error:
        raise RuntimeError("could not look") from error


def runs_a_program(completion):
    raise FileNotFoundError(2, "No such file or directory", "no-such-program")  # as subprocess does


def reads_a_relative_path(completion):
    with open("words.txt") as file:
        return float(completion in file.read())


def slow_or_broken(completion):
    """Take long for "slow", and raise for any other text."""
    if completion == "slow":
        time.sleep(30)
    raise KeyError("no such key")


def seldom(completion):
    return {"none": None, "nan": float("nan"), "text": "1"}.get(completion, 0.5)


def half(completion):
    return 0.5


def short(prompts, completions):
    return [1.0]


def talks(completion):
    sys.stdout.write(f"\x1b[31mred {completion}\n")
    return 1.0


def positional(prompts, completions, /):
    return []


def mixed(prompt, completions):
    return []


def silent(**columns):
    return []


def is_readable(completion):
    try:
        with open(completion) as file:
            return float(bool(file.read()))
    except PermissionError:
        return 0.0


def score_by_level(prompts, completions, level):
    return [0.0 for _ in completions]


def score_by_all(prompts, completions, answer, uid, finish_reason):
    return [0.0 for _ in completions]


def lacks_a_return(completion):
    len(completion)


def rewards_one_letter(completion):
    return 1.0 if len(completion) == 1 else None
